"""The OpenAPI document: FastAPI's, completed with what it does not know.

FastAPI describes paths, parameters, tokens and what each route says of itself. It knows no structs
of msgspec, and drops nulls (from defaults and examples), so schemas and examples are added here, as
is what all routes answer alike.
"""

from __future__ import annotations

import functools
import json
import re
from http import HTTPStatus
from typing import Any

import msgspec
from fastapi.openapi.utils import get_openapi

from ..core.settings import Settings
from ..wire import engine_models, event_batch, models, pool_models, schedule_batch
from ..wire.answers import JSON
from .examples import ANSWERS, BODIES
from .rest_route import REF
from .routes import rest_routes

BODY_MODULES = (models, pool_models, event_batch, schedule_batch, engine_models)
TITLE = "Tiffin conductor"
VERSION = "1"
DESCRIPTION = """\
Decides where requests to large language models run: which instance computes the prompt, which one
answers, and which KV cache blocks are brought there from where. Bytes of prompts never pass.

- Bodies are JSON, `Content-Type: application/json`; unknown fields are refused. `null` is a field
  left out.
- Times are seconds, sizes bytes or tokens; `..._at` are Unix times. Infinity is `null`.
- With tokens, send `Authorization: Bearer TOKEN`; each route says which right it takes.
- What is not a success has one shape, OpenAI's. Show `message` to people, decide by `code`:

```json
{"error": {"message": "no instance 'i1' is registered", "type": "invalid_request_error",
           "code": "unknown_instance", "param": null, "tiffin": null}}
```

| code | status | |
|---|---|---|
| `invalid_request` | 400 | what was sent makes no sense; the message says what to send instead |
| `invalid_json` | 400 | the body is not JSON |
| `incomplete` | 400 | the body ended early |
| `host_not_allowed` | 400 | an instance is where the setting `instances.allowed_hosts` lets none |
| `not_authorized` | 401 | no token, or one that is not known |
| `missing_right` | 403 | the token does not allow this |
| `unknown_model`, `unknown_instance`, `unknown_request` | 404 | never there, gone, or expired |
| `unknown_node` | 404 | not in the pool, or the conductor follows none |
| `no_such_route` | 404 | |
| `method_not_allowed` | 405 | |
| `too_slow` | 408 | the body took longer than 30 s |
| `conflict` | 409 | it contradicts what is known |
| `too_large` | 413 | the body has more than 1.25 MiB |
| `unsupported_media_type` | 415 | the body is not declared as JSON |
| `wrong_host` | 421 | without tokens, the service is only called localhost or 127.0.0.1 |
| `invalid_body` | 422 | JSON that does not fit; `param` is the field |
| `rejected_...` | 429, 503 | a rejection, by its reason; schedule lists them |
| `busy`, `too_many_streams` | 503 | come back after `Retry-After` |
| `unavailable` | 503 | an engine that was to be added does not answer |
| `internal_error` | 500 | a defect; the log has it |
"""

# Statuses of every route, of those that need a token, and of those with a body.
_ALWAYS, _GUARDED, _WITH_BODY = (400, 421), (401, 403), (408, 413, 415, 422, 503)
_ERROR = {JSON: {"schema": {"$ref": REF.format("ErrorReply")}}}
_RETRY_AFTER = {
    "Retry-After": {"description": "Whole seconds.", "schema": {"type": "integer", "minimum": 1}}
}


@functools.cache
def document() -> dict[str, Any]:
    """The OpenAPI 3.1 document."""
    described = get_openapi(
        title=TITLE, version=VERSION, description=DESCRIPTION, routes=rest_routes()
    )
    for operations in described["paths"].values():
        for operation in operations.values():
            _complete(operation)
    names = sorted(set(re.findall(REF.format(r"(\w+)"), json.dumps(described["paths"]))))
    known = {name: kind for bodies in BODY_MODULES for name, kind in vars(bodies).items()}
    known["Settings"] = Settings
    kinds = [known[name] for name in names]
    _, schemas = msgspec.json.schema_components(kinds, ref_template=REF.format("{name}"))
    described["components"]["schemas"] = dict(sorted(schemas.items()))
    return described


# RFC 9110 names these so; Python's names are older before 3.13, and the page must not depend on it.
_PHRASES = {413: "Content Too Large", 422: "Unprocessable Content"}


def _phrase(status: int) -> str:
    return _PHRASES.get(status) or HTTPStatus(status).phrase


def _complete(operation: dict[str, Any]) -> None:
    """Add to an operation what follows from the rest of it."""
    text, responses = operation["description"], operation["responses"]
    operation["summary"] = re.split(r"[.:;]\s", text, maxsplit=1)[0].rstrip(".").replace("\n", " ")
    statuses = list(_ALWAYS)
    if "security" in operation:
        words = [f"`{required['token'][0]}`" for required in operation["security"]]
        operation["description"] = f"{text}\n\nRight: {' or '.join(words)}."
        statuses += _GUARDED
    if "HTTPValidationError" in json.dumps(responses.get("422")):
        del responses["422"]  # FastAPI's answer for parameters, which is a 400 here
    if "requestBody" in operation:
        statuses += _WITH_BODY
    for status in statuses:
        responses.setdefault(str(status), {"description": _phrase(status)})
    for status in sorted(responses):
        described = responses[status] = responses.pop(status)
        if int(status) >= 400:
            described["content"] = _ERROR
            if status in ("429", "503"):
                described["headers"] = _RETRY_AFTER
    name = operation["operationId"]
    if name in BODIES:
        operation["requestBody"]["content"][JSON]["example"] = BODIES[name]
    if name in ANSWERS:
        responses["200"]["content"][JSON]["example"] = ANSWERS[name]
    if name == "readyz":
        responses["503"] = {**responses["200"], "description": responses["503"]["description"]}
