"""Writes docs/conductor/rest.md from the OpenAPI document.

`python -m tiffin.conductor.api.reference FILE`, or without a name to stdout.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from .openapi import BODY_MODULES, document

Schema = dict[str, Any]

HEAD = """\
# REST: the conductor's routes

<!-- Written by `python -m tiffin.conductor.api.reference docs/conductor/rest.md`. -->

A running conductor serves this at `/docs`, to try out, and as OpenAPI 3.1 at `/openapi.json`. How
to run it, tokens and metrics: [service.md](service.md).

"""
_SIGNS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}


def render() -> str:
    """Render the page as Markdown."""
    described = document()
    parts, tag = [HEAD + described["info"]["description"]], ""
    for path, operations in described["paths"].items():
        for method, operation in operations.items():
            if operation["tags"][0] != tag:
                tag = operation["tags"][0]
                parts.append(f"## {tag.capitalize()}\n")
            parts.append(f"### {method.upper()} {path}\n\n{operation['description']}\n")
            parts += _operation(operation)
    parts.append("## Fields\n")
    for name, schema in described["components"]["schemas"].items():
        if any(hasattr(bodies, name) for bodies in BODY_MODULES):  # settings are at /docs alone
            parts.append(f"### {name}\n\n{' '.join(schema['description'].split())}\n")
            parts += _fields(schema)
    return "\n".join(parts).rstrip() + "\n"


def _operation(operation: Schema) -> list[str]:
    lines, others = [], []
    if "parameters" in operation:
        rows = [(one["name"], one["schema"], "") for one in operation["parameters"]]
        lines += _table("parameter", rows)
    if "requestBody" in operation:
        lines += _content("Body", operation["requestBody"])
    for status, answer in operation["responses"].items():
        if int(status) < 300:
            lines += _content(f"Answer {status}", answer)
        else:
            others.append(f"{status} {answer['description']}".rstrip("."))
    return [*lines, f"Else: {'; '.join(others)}.\n"]


def _content(title: str, described: Schema) -> list[str]:
    """A body or an answer, and its example."""
    ((media, content),) = described.get("content", {"nothing": {}}).items()
    lines = [f"{title}: {_type(content['schema']) if '$ref' in str(content) else media}\n"]
    if "example" in content:
        lines.append(f"```json\n{json.dumps(content['example'], indent=1)}\n```\n")
    return lines


def _fields(schema: Schema) -> list[str]:
    needed = schema.get("required", ())
    rows = [(n, s, " **Needed.**" if n in needed else "") for n, s in schema["properties"].items()]
    return _table("field", rows)


def _table(title: str, rows: list[tuple[str, Schema, str]]) -> list[str]:
    lines = [f"| {title} | | |\n|---|---|---|"]
    for name, schema, more in rows:
        kinds = [schema, *schema.get("anyOf", ())]
        what = next((one["description"] for one in kinds if "description" in one), "")
        default = schema.get("default")
        if default not in (None, "", [], {}) and not isinstance(default, dict):
            more += f" Default: `{json.dumps(default)}`."
        lines.append(f"| `{name}` | {_type(schema)} | {(what + more).strip()} |")
    return [*lines, ""]


def _type(schema: Schema) -> str:
    """A JSON schema's type and bounds in a few words."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"`{name}`" if name == "Settings" else f"[`{name}`](#{name.lower()})"
    if "anyOf" in schema:
        return " or ".join(_type(one) for one in schema["anyOf"])
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    kind = str(schema.get("type", "any"))
    if kind == "array":
        return f"list of {_type(schema.get('items', {}))}"
    bounds = [f"{sign} {schema[name]:,}" for name, sign in _SIGNS.items() if name in schema]
    return f"{kind} {', '.join(bounds)}".rstrip()


if __name__ == "__main__":
    if sys.argv[1:]:
        Path(sys.argv[1]).write_text(render(), encoding="utf-8")
    else:
        sys.stdout.write(render())
