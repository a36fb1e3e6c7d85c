"""Every folder with code is in the wheel."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_package_is_listed() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    tops = ("kvstore", "messenger", "kernels", "conductor", "bench")
    found = [init.parent for top in tops for init in (ROOT / top).rglob("__init__.py")]
    names = {".".join(("tiffin", *folder.relative_to(ROOT).parts)) for folder in found}
    assert len(names) > 50
    assert names <= set(settings["tool"]["setuptools"]["packages"])
