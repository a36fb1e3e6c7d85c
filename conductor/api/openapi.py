"""Builds the OpenAPI document from the route table and the structs that validate bodies."""

from __future__ import annotations

import inspect
import re
from typing import TYPE_CHECKING, Any

import msgspec

from ..wire.models import ErrorReply, HealthReply
from .route_table import IN_PATH, ROUTES, SETTINGS, Parameter, Route

if TYPE_CHECKING:
    from collections.abc import Iterable

TITLE = "Tiffin conductor"
DESCRIPTION = """\
Decides where requests to large language models run: which instance computes the prompt, which one
answers, and which KV cache blocks are brought there from where. Bytes of prompts never pass.
"""
VERSION = "1"

_REF = "#/components/schemas/{name}"
# Statuses of every route that needs a token, and of every route with a body.
_GUARDED = ((401, "No token, or one that is not known."), (403, "The token lacks the right."))
_WITH_BODY = (
    (408, "The body came too slowly."),
    (413, "The body is too large."),
    (415, "The body is not declared as JSON."),
    (422, "The body is JSON that does not fit."),
    (503, "Too much is being received at the moment."),
)
_ALWAYS = (
    (400, "What was sent makes no sense; the message says what to send instead."),
    (421, "Without tokens only this machine is answered, under a name of it."),
)
_CODE_SPAN = re.compile(r"\s+")


def document(settings: type) -> dict[str, Any]:
    """The OpenAPI 3.1 document. `settings` is the type of the core's settings."""
    used: dict[str, type] = {"ErrorReply": ErrorReply, "HealthReply": HealthReply}
    for route in ROUTES:
        for kind in (route.body, route.reply):
            if kind == SETTINGS:
                used[settings.__name__] = settings
            elif isinstance(kind, type) and kind is not dict:
                used[kind.__name__] = kind
    _, schemas = msgspec.json.schema_components(list(used.values()), ref_template=_REF)
    paths: dict[str, Any] = {}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, settings)
    return {
        "openapi": "3.1.0",
        "info": {"title": TITLE, "description": DESCRIPTION, "version": VERSION},
        "paths": paths,
        "components": {
            "schemas": {name: _tidy(schema) for name, schema in sorted(schemas.items())},
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def summary(route: Route) -> tuple[str, str]:
    """A route's summary, which is the first sentence of its docstring, and its whole
    description."""
    text = _CODE_SPAN.sub(" ", inspect.getdoc(route.handler) or "").strip()
    first = re.split(r"(?<=[.:;])\s", text, maxsplit=1)[0]
    return first.rstrip(".:;"), text


def statuses(route: Route) -> dict[int, str]:
    """Every HTTP status that a route answers, and what it means."""
    given = dict(_ALWAYS)
    if route.right is not None:
        given.update(_GUARDED)
    if route.body is not None:
        given.update(_WITH_BODY)
    for status, what in route.others:
        given[status] = f"{what} {given[status]}" if status == 503 and status in given else what
    return {_success(route): "Done." if _success(route) == 204 else "The answer."} | given


def _operation(route: Route, settings: type) -> dict[str, Any]:
    short, long = summary(route)
    operation: dict[str, Any] = {
        "operationId": route.name,
        "tags": [route.tag],
        "summary": short,
        "description": long,
        "parameters": list(_parameters(route)),
        "responses": {
            str(status): _response(route, status, what, settings)
            for status, what in sorted(statuses(route).items())
        },
    }
    if route.right is not None:
        operation["security"] = [{"token": []}]
        operation["description"] += f" Takes a token with the right {route.rights}."
    if route.body is not None:
        content = {"schema": _reference(route.body, settings)}
        if route.body_example is not None:
            content["example"] = route.body_example
        operation["requestBody"] = {
            "required": route.body_needed,
            "content": {"application/json": content},
        }
    return operation


def _parameters(route: Route) -> Iterable[dict[str, Any]]:
    for name in re.findall(r"{(\w+)}", route.path):
        yield _parameter(IN_PATH[name], "path")
    for parameter in route.query:
        yield _parameter(parameter, "query")


def _parameter(parameter: Parameter, where: str) -> dict[str, Any]:
    return {
        "name": parameter.name,
        "in": where,
        "required": where == "path",
        "description": parameter.what,
        "schema": parameter.schema,
    }


def _response(route: Route, status: int, what: str, settings: type) -> dict[str, Any]:
    described: dict[str, Any] = {"description": what}
    if status in (429, 503) and route.reply is not HealthReply:
        described["headers"] = {
            "Retry-After": {
                "description": "Whole seconds.",
                "schema": {"type": "integer", "minimum": 1},
            }
        }
    if status == 204:
        return described
    if status != _success(route) and not (status == 503 and route.reply is HealthReply):
        described["content"] = {"application/json": {"schema": _reference(ErrorReply, settings)}}
    elif route.text:
        described["content"] = {route.text: {"schema": {"type": "string"}}}
    else:
        assert route.reply is not None
        content = {"schema": _reference(route.reply, settings)}
        if route.reply_example is not None:
            content["example"] = route.reply_example
        described["content"] = {"application/json": content}
    return described


def _reference(kind: type | str, settings: type) -> dict[str, Any]:
    if kind is dict:
        return {"type": "object"}
    name = settings.__name__ if kind == SETTINGS else getattr(kind, "__name__", "")
    return {"$ref": _REF.format(name=name)}


def _success(route: Route) -> int:
    return 204 if route.reply is None and not route.text else 200


def _tidy(schema: Any) -> Any:
    """A schema with its descriptions as one paragraph each: the line breaks in docstrings are
    those of the source."""
    if isinstance(schema, dict):
        return {
            key: _CODE_SPAN.sub(" ", value).strip()
            if key == "description" and isinstance(value, str)
            else _tidy(value)
            for key, value in schema.items()
        }
    return [_tidy(one) for one in schema] if isinstance(schema, list) else schema
