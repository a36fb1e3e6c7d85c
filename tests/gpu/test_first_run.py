"""The list of the first run on a GPU names what exists."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def _pieces() -> Any:
    spec = importlib.util.spec_from_file_location("gpu_first_run", HERE / "first_run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.PIECES


PIECES = _pieces()


def test_all_take_eight_minutes_at_most() -> None:
    assert sum(piece.limit_s for piece in PIECES) <= 480


@pytest.mark.parametrize("test", [test for piece in PIECES for test in piece.tests])
def test_the_tests_are_there(test: str) -> None:
    file, _, name = test.partition("::")
    assert re.search(rf"^def {name}\(", (ROOT / file).read_text(), re.MULTILINE)


@pytest.mark.parametrize("piece", [piece for piece in PIECES if not piece.tests])
def test_the_programs_are_there(piece: Any) -> None:
    if piece.arguments[0] != "-m":
        assert (ROOT / piece.arguments[0]).is_file()
    else:
        assert importlib.util.find_spec(piece.arguments[1]) is not None
