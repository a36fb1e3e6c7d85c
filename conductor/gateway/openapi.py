"""The gateway's own OpenAPI document, `GET /openapi.json`: its routes, and what it answers itself.

Bodies are those of the OpenAI API and of vLLM, which engines check; the gateway reads a few fields,
and those alone are described.
"""

from __future__ import annotations

import functools
from http import HTTPStatus
from typing import Any

import msgspec

from ..wire.models import NAME_MAX, ErrorReply
from .openai.openai_request import (
    CHAT,
    COMPLETIONS,
    LISTENING,
    POOLING,
    RESPONSES,
    SPEECH,
)

_REF = "#/components/schemas/{name}"
_JSON = "application/json"
_MODEL = {"type": "string", "minLength": 1, "maxLength": NAME_MAX}
_COUNT = {"type": ["integer", "null"], "minimum": 1}
_FIELDS: dict[str, dict[str, Any]] = {
    CHAT: {
        "messages": {"type": "array", "items": {"type": "object"}},
        "max_completion_tokens": _COUNT,
    },
    COMPLETIONS: {"prompt": {"type": ["string", "array"]}, "max_tokens": _COUNT},
    RESPONSES: {
        "input": {"type": ["string", "array"]},
        "instructions": {"type": ["string", "null"]},
        "max_output_tokens": _COUNT,
        "previous_response_id": {"type": ["string", "null"]},
    },
}
_STREAMED = (CHAT, COMPLETIONS, RESPONSES)
_SUMMARIES = {
    CHAT: "The next message of a chat",
    COMPLETIONS: "The continuation of a prompt",
    RESPONSES: "A response, which an instance keeps",
    SPEECH: "Speech of a text",
    "/tokenize": "The tokens of a text or a chat",
    "/detokenize": "The text of tokens",
    **{path: f"What `{path}` of the engine says of texts" for path in POOLING},
    **dict.fromkeys(LISTENING, "The text of a recording"),
}
# Which statuses the gateway answers itself, with an error; engines have others of their own.
_ALWAYS, _GUARDED = (400, 421), (401, 403)
_WITH_BODY = (408, 413, 415, 422, 429, 500, 502, 503, 504)


@functools.cache
def document() -> dict[str, Any]:
    """The OpenAPI 3.1 document."""
    paths: dict[str, Any] = {path: {"post": _call(path)} for path in _SUMMARIES}
    name = {"in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    one = {**name, "name": "response_id"}
    streamed = [
        {"in": "query", "name": "stream", "schema": {"type": "boolean"}},
        {"in": "query", "name": "starting_after", "schema": {"type": "integer", "minimum": 0}},
    ]
    paths[RESPONSES + "/{response_id}"] = {
        "get": _operation(
            "A response as it is by now, or its events",
            (404, 500, 503),
            parameters=[one, *streamed],
        )
    }
    paths[RESPONSES + "/{response_id}/cancel"] = {
        "post": _operation("End a response", (404, 500, 503), parameters=[one])
    }
    paths["/v1/models"] = {"get": _operation("The models that are served")}
    paths["/v1/models/{model}"] = {
        "get": _operation("One of them", (404,), parameters=[{**name, "name": "model"}])
    }
    paths["/livez"] = {"get": _operation("Whether the process answers", right=False)}
    ready = _operation("Whether a request could be served", (503,), right=False, error=False)
    paths |= {path: {"get": ready} for path in ("/readyz", "/health", "/ping")}
    _, schemas = msgspec.json.schema_components([ErrorReply], ref_template=_REF)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Tiffin gateway", "version": "1", "description": __doc__},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _call(path: str) -> dict[str, Any]:
    """A route with a body."""
    if path in LISTENING:
        fields = {"model": _MODEL, "file": {"type": "string", "format": "binary"}}
        kind = "multipart/form-data"
    else:
        fields, kind = {"model": _MODEL, **_FIELDS.get(path, {})}, _JSON
    if path in _STREAMED:
        fields["stream"] = {"type": ["boolean", "null"]}
    required = ["model", "file"] if path in LISTENING else ["model"]
    body = {"schema": {"type": "object", "properties": fields, "required": required}}
    good: dict[str, Any] = {_JSON: {}} if path != SPEECH else {"*/*": {}}
    if path in _STREAMED:
        good["text/event-stream"] = {}
    described = _operation(_SUMMARIES[path], (404, *_WITH_BODY), good=good)
    return described | {"requestBody": {"required": True, "content": {kind: body}}}


def _operation(
    summary: str,
    errors: tuple[int, ...] = (),
    *,
    good: dict[str, Any] | None = None,
    parameters: list[dict[str, Any]] | None = None,
    right: bool = True,
    error: bool = True,
) -> dict[str, Any]:
    failing = {_JSON: {"schema": {"$ref": _REF.format(name="ErrorReply")} if error else {}}}
    statuses = (*_ALWAYS, *(_GUARDED if right else ()), *errors)
    answers = {
        str(status): {"description": HTTPStatus(status).phrase, "content": failing}
        for status in sorted(set(statuses))
    }
    answers["200"] = {"description": "OK", "content": good or {_JSON: {}}}
    described: dict[str, Any] = {"summary": summary, "responses": answers}
    if parameters:
        described["parameters"] = parameters
    if right:
        described["security"] = [{"key": []}]
    return described
