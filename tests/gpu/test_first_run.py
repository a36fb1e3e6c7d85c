"""The list of the first run on a GPU names what exists."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def _module(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"gpu_{name}", HERE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


FIRST_RUN = _module("first_run")
PIECES = FIRST_RUN.PIECES


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


@pytest.mark.slow
def test_pytest_finds_every_test() -> None:
    tests = [test for piece in PIECES for test in piece.tests]
    arguments = [*FIRST_RUN._TESTS, "--collect-only", *tests]
    found = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stdout + found.stderr
    ids = {line.partition("[")[0] for line in found.stdout.splitlines()}
    assert set(tests) <= ids


@pytest.mark.parametrize(
    ("needs_gpu", "code", "gpu", "expected"),
    [
        (True, 0, True, "passed"),
        (True, 0, False, "skipped"),
        (True, 1, False, "failed"),
        (False, 0, False, "passed"),
        (False, "more than 20 s", True, "failed"),
    ],
)
def test_what_needs_a_gpu_does_not_pass_without(
    needs_gpu: bool, code: int | str, gpu: bool, expected: str
) -> None:
    piece = FIRST_RUN.Piece("one", 20, (), needs_gpu=needs_gpu)
    assert FIRST_RUN.result(piece, code, gpu=gpu) == expected


def test_the_report_of_an_earlier_run_is_not_told_again(tmp_path: Path) -> None:
    (tmp_path / "bench-one").mkdir()
    (tmp_path / "bench-one" / "old.json").write_text('"old"')
    piece = FIRST_RUN.Piece("bench-one", 20, ("-c", "print('\"new\"')"))
    line = FIRST_RUN.run(piece, tmp_path, gpu=False)
    assert (line["result"], line["said"]) == ("passed", "new")


@pytest.mark.slow
def test_the_model_of_a_gpu_has_a_billion_parameters() -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(_module("llama").config(gpu=True))
    assert 1.0e9 < sum(one.numel() for one in model.parameters()) < 1.3e9
