"""Writes docs/conductor/rest.md from the OpenAPI document.

`python -m tiffin.conductor.api.reference FILE`, or without a name to stdout.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from .openapi import document

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
            parts += [f"### {method.upper()} {path}\n", operation["description"] + "\n"]
            parts += _section(operation, described["components"]["schemas"])
    return "\n".join(parts).rstrip() + "\n"


def _section(operation: Schema, schemas: dict[str, Schema]) -> list[str]:
    lines: list[str] = []
    if "parameters" in operation:
        rows = [(p["name"], p["schema"], p["description"]) for p in operation["parameters"]]
        lines += _table("parameter", [(name, _type(kind), what) for name, kind, what in rows])
    if "requestBody" in operation:
        lines += _content("Body", operation["requestBody"], schemas)
    others = []
    for status, answer in operation["responses"].items():
        if status in ("200", "204"):
            lines += _content("Answer", answer, schemas)
        else:
            others.append(f"{status}: {answer['description']}")
    return [*lines, f"Else {' '.join(others)}\n"]


def _content(title: str, described: Schema, schemas: dict[str, Schema]) -> list[str]:
    """A body or an answer: its fields, and its example."""
    ((media, content),) = described.get("content", {"": {}}).items()
    name = _named(content.get("schema", {}))
    if name == "Settings":
        groups = ", ".join(f"`{group}`" for group in schemas[name]["properties"])
        return [f"{title}: all settings, in the groups {groups}; `/docs` has every field.\n"]
    if not name:
        return [f"{title}: {f'`{media}`' if media else '204, nothing'}.\n"]
    lines = [f"{title}:\n", *_fields(name, schemas, [])]
    if "example" in content:
        lines.append(f"```json\n{json.dumps(content['example'], indent=1)}\n```\n")
    return lines


def _fields(name: str, schemas: dict[str, Schema], seen: list[str]) -> list[str]:
    """Tables of a struct's fields, and of those of the structs that it contains."""
    if name in seen:
        return []
    seen.append(name)
    schema, rows, inner = schemas[name], [], list[str]()
    for field, described in schema["properties"].items():
        choices = [described, *described.get("anyOf", ())]
        what = next((one["description"] for one in choices if "description" in one), "")
        default = described.get("default")
        if name.endswith("Body") and field in schema.get("required", ()):
            what += " **Needed.**"
        elif default not in (None, "", [], {}) and not isinstance(default, dict):
            what += f" Default: `{json.dumps(default)}`."
        rows.append((field, _type(described), what.strip()))
        inner += map(_named, [*choices, described.get("items", {})])
    title = [f"`{_plain(name)}`: {' '.join(schema['description'].split())}\n"]
    lines = (title if len(seen) > 1 else []) + _table("field", rows)
    for one in filter(None, inner):
        lines += _fields(one, schemas, seen)
    return lines


def _table(title: str, rows: list[tuple[str, str, str]]) -> list[str]:
    return [f"| {title} | | |\n|---|---|---|", *("| `{}` | {} | {} |".format(*r) for r in rows), ""]


def _type(schema: Schema) -> str:
    """A JSON schema's type and bounds in a few words."""
    if "$ref" in schema:
        return f"`{_plain(_named(schema))}`"
    if "anyOf" in schema:
        return " or ".join(_type(one) for one in schema["anyOf"])
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    kind = str(schema.get("type", "any"))
    if kind == "array":
        return f"list of {_type(schema.get('items', {}))}"
    bounds = [f"{sign} {schema[name]:,}" for name, sign in _SIGNS.items() if name in schema]
    return f"{kind} {', '.join(bounds)}".rstrip()


def _named(schema: Schema) -> str:
    """The name of the struct that a schema refers to; "" if it is none."""
    return str(schema.get("$ref", "")).rpartition("/")[2]


def _plain(name: str) -> str:
    return re.sub("(Body|Reply)$", "", name).lower()


if __name__ == "__main__":
    if sys.argv[1:]:
        Path(sys.argv[1]).write_text(render(), encoding="utf-8")
    else:
        sys.stdout.write(render())
