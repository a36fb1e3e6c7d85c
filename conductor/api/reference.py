"""Writes docs/conductor/rest.md from the OpenAPI document.

`python -m tiffin.conductor.api.reference FILE`, or without a name to stdout.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from ..core.settings import Settings
from .openapi import DESCRIPTION, TITLE, document, statuses, summary
from .route_table import IN_PATH, ROUTES, SETTINGS, Route

HEAD = f"""\
# REST: the {TITLE.partition(" ")[2]}'s routes

<!-- Written by `python -m tiffin.conductor.api.reference docs/conductor/rest.md`. -->

{DESCRIPTION.strip()}

A running conductor serves this at `/docs`, to try out, and as OpenAPI 3.1 at `/openapi.json`. How
to run it, tokens and metrics: [service.md](service.md).

- Bodies are JSON, `Content-Type: application/json`; unknown fields are refused. `null` is a field
  left out.
- Times are seconds, sizes bytes or tokens; `..._at` are Unix times. Infinity is `null`.
- With tokens, send `Authorization: Bearer TOKEN`; each route says which right it takes.
- What is not a success has one shape, OpenAI's. Show `message` to people, decide by `code`:

```json
{{"error": {{"message": "no instance 'i1' is registered", "type": "invalid_request_error",
           "code": "unknown_instance", "param": null, "tiffin": null}}}}
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
| `rejected_...` | 429, 503 | a rejection, by its reason; see [schedule](#post-v1schedule) |
| `busy`, `too_many_streams` | 503 | come back after `Retry-After` |
| `internal_error` | 500 | a defect; the log has it |
"""

SCHEDULE = """\
**Rejections.** 429 is for load: come back after `Retry-After` (whole seconds, from the prediction),
or ask another conductor. 503 is for nothing that could serve it. Both carry
`x-tiffin-reject-reason`, and in `error.tiffin` the `reason`, what was predicted and every term:

| reason | status | |
|---|---|---|
| `ttft`, `tbt` | 429 | an objective would be missed |
| `kv_room` | 429 | no decode instance has room for the context |
| `queue_full` | 429 | as many wait as may |
| `preempted` | 429 | it waited, and had to leave for one of a higher class |
| `no_prefill`, `no_decode` | 503 | no instance with this role is ready |
"""


def render() -> str:
    """Render the page as Markdown."""
    described = document(Settings)
    parts = [HEAD]
    for tag in dict.fromkeys(route.tag for route in ROUTES):
        parts.append(f"## {tag.capitalize()}\n")
        parts += [_section(route, described) for route in ROUTES if route.tag == tag]
    return "\n".join(parts).rstrip() + "\n"


def _section(route: Route, described: dict[str, Any]) -> str:
    schemas = described["components"]["schemas"]
    lines = [f"### {route.pattern}", "", summary(route)[1]]
    if route.right is not None:
        lines[-1] += f" Right: {route.rights}."
    lines.append("")
    parameters = [IN_PATH[name] for name in re.findall(r"{(\w+)}", route.path)]
    parameters += route.query
    if parameters:
        lines += ["| parameter | | |", "|---|---|---|"]
        lines += [f"| `{p.name}` | {_type(p.schema)} | {p.what} |" for p in parameters]
        lines.append("")
    if route.body is dict:
        lines += ["Body: an object, as in the answer.", ""]
    elif isinstance(route.body, type):
        lines += ["Body:", "", *_fields(route.body.__name__, schemas, [])]
    if route.body_example is not None:
        lines += ["```json", json.dumps(route.body_example, indent=1), "```", ""]
    lines += _answer(route, schemas)
    if route.name == "schedule":
        lines += [SCHEDULE]
    others = [
        f"{status}: {what}" for status, what in sorted(statuses(route).items()) if status >= 300
    ]
    lines += ["Else " + " ".join(others), ""]
    return "\n".join(lines)


def _answer(route: Route, schemas: dict[str, Any]) -> list[str]:
    if route.reply is None:
        return [f"Answer: {f'`{route.text}`' if route.text else '204, nothing'}.", ""]
    if route.reply == SETTINGS:
        return [
            "Answer: all settings. Their groups are "
            + ", ".join(f"`{name}`" for name in schemas["Settings"]["properties"])
            + "; `/docs` has every field with its bounds.",
            "",
        ]
    assert isinstance(route.reply, type)
    lines = ["Answer:", "", *_fields(route.reply.__name__, schemas, [])]
    if route.reply_example is not None:
        lines += ["```json", json.dumps(route.reply_example, indent=1), "```", ""]
    return lines


def _fields(name: str, schemas: dict[str, Any], seen: list[str]) -> list[str]:
    """Markdown tables of a struct's fields, and of the structs that it contains."""
    if name in seen:
        return []
    seen.append(name)
    schema = schemas[name]
    lines = [f"{schema['description']}", ""] if len(seen) > 1 else []
    if len(seen) > 1:
        lines[0] = f"`{_plain(name)}`: {lines[0]}"
    lines += ["| field | | |", "|---|---|---|"]
    inner: list[str] = []
    for field, described in schema["properties"].items():
        choices = [described, *described.get("anyOf", ())]
        what = next((one["description"] for one in choices if "description" in one), "")
        if field in schema.get("required", ()):
            needed = " **Needed.**" if name.endswith("Body") else ""
        else:
            default = described.get("default")
            given = default not in (None, "", {}, []) and not isinstance(default, dict)
            needed = f" Default: `{json.dumps(default)}`." if given else ""
        lines.append(f"| `{field}` | {_type(described)} | {(what + needed).strip()} |")
        inner += re.findall(r"#/components/schemas/(\w+)", json.dumps(described))
    lines.append("")
    for one in inner:
        lines += _fields(one, schemas, seen)
    return lines


def _type(schema: dict[str, Any]) -> str:
    """A JSON schema's type and bounds in a few words."""
    if "$ref" in schema:
        return f"`{_plain(schema['$ref'].rpartition('/')[2])}`"
    if "anyOf" in schema:
        return " or ".join(_type(one) for one in schema["anyOf"])
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    kind = str(schema.get("type", "any"))
    if kind == "array":
        return f"list of {_type(schema.get('items', {}))}"
    bounds = [
        f"{sign} {schema[name]:,}"
        for name, sign in (
            ("minimum", "≥"),
            ("exclusiveMinimum", ">"),
            ("maximum", "≤"),
            ("exclusiveMaximum", "<"),
        )
        if name in schema
    ]
    return f"{kind} {', '.join(bounds)}".rstrip()


def _plain(name: str) -> str:
    """A struct's name in lower case, without the suffix `Body` or `Reply`."""
    return name.removesuffix("Body").removesuffix("Reply").lower()


def main(arguments: list[str]) -> None:
    """Write the page to the file named in `arguments`, or print it."""
    if arguments:
        Path(arguments[0]).write_text(render(), encoding="utf-8")
    else:
        sys.stdout.write(render())


if __name__ == "__main__":
    main(sys.argv[1:])
