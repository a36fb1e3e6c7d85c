"""No file of the store imports another in a circle, for types neither."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# A schema makes prefixes, a prefix has its schema: users hold either, and ask it for the other.
ALLOWED = {
    ("kvstore/format/schema.py", "kvstore/format/keys.py"),
    ("kvstore/format/shard.py", "kvstore/format/schema.py"),
}


def imports_of(path: Path) -> set[str]:
    """The files of the store that this one imports: anywhere in it, and for types."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            folder = path.parents[node.level - 1].joinpath(*(node.module or "").split("."))
            files = [folder / f"{alias.name}.py" for alias in node.names]
            files.append(folder.with_suffix(".py"))
            found |= {str(file.relative_to(ROOT)) for file in files if file.exists()}
    return found


def test_the_store_has_no_circles() -> None:
    graph = {}
    for path in (ROOT / "kvstore").rglob("*.py"):
        name = str(path.relative_to(ROOT))
        graph[name] = {other for other in imports_of(path) if (name, other) not in ALLOWED}
    assert "kvstore/errors.py" in graph["kvstore/client/client.py"]
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))
