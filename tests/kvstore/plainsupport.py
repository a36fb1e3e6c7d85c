"""Commands of `tiffin` one after the other in one process, with and without optional libraries."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

# Without a module means as if it were not installed: `find_spec` has to say so as well.
_RUN = """
import contextlib, importlib.machinery, io, json, sys, traceback

asked = json.load(sys.stdin)
absent = set(asked["without"])

class Present(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in absent else super().find_spec(name, path, target)

    find_distributions = staticmethod(importlib.machinery.PathFinder.find_distributions)

sys.meta_path[sys.meta_path.index(importlib.machinery.PathFinder)] = Present

from tiffin.kvstore.cli import main

found = []
for words in asked["commands"]:
    sys.argv, said, status = ["tiffin", *words], io.StringIO(), 0
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            main()
        except SystemExit as end:
            status = end.code or 0
        except BaseException:
            traceback.print_exc()
            status = "crashed"
    found.append([status, said.getvalue()])
imported = {name.partition(".")[0] for name in sys.modules}
json.dump({"commands": found, "imported": sorted(imported)}, sys.stdout)
"""


@dataclass(frozen=True)
class Said:
    """How a command ended (an exit status, or "crashed"), and all that it printed."""

    status: int | str
    text: str

    @property
    def line(self) -> str:
        """The only line."""
        (line,) = self.text.splitlines()
        return line


def run_all(
    python: str | Path,
    commands: Iterable[Sequence[str]],
    environment: Mapping[str, str],
    folder: Path,
    *,
    without: Iterable[str] = (),
) -> tuple[list[Said], set[str]]:
    """What each command said, and the modules that all of them have imported."""
    asked: dict[str, Any] = {"commands": list(commands), "without": list(without)}
    done = subprocess.run(
        [str(python), "-c", _RUN], input=json.dumps(asked), env=dict(environment), cwd=folder,
        capture_output=True, text=True, timeout=150, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    return [Said(*one) for one in found["commands"]], set(found["imported"])
