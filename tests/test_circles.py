"""No file of the store or the messenger imports another in a circle, for types neither."""

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
    # A transport makes calls, a call is of its transport.
    ("messenger/nixl/chunked_call.py", "messenger/nixl/nixl_transport.py"),
}


def imports_of(path: Path) -> set[str]:
    """The files of its package that this one imports: anywhere in it, and for types."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            folder = path.parents[node.level - 1].joinpath(*(node.module or "").split("."))
            files = [folder / f"{alias.name}.py" for alias in node.names]
            files.append(folder.with_suffix(".py"))
            found |= {str(file.relative_to(ROOT)) for file in files if file.exists()}
    return found


@pytest.mark.parametrize(
    ("package", "known"),
    [
        ("kvstore", ("client/client.py", "errors.py")),
        ("messenger", ("shm/host_copy.py", "errors.py")),
    ],
)
def test_there_are_no_circles(package: str, known: tuple[str, str]) -> None:
    graph = {}
    for path in (ROOT / package).rglob("*.py"):
        name = str(path.relative_to(ROOT))
        graph[name] = {other for other in imports_of(path) if (name, other) not in ALLOWED}
    importing, imported = known
    assert f"{package}/{imported}" in graph[f"{package}/{importing}"]
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))
