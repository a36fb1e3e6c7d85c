"""The list of the first run on a GPU names what exists."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import zipfile
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


def _piece(name: str, code: str, limit_s: int = 60) -> Any:
    return FIRST_RUN.Piece(name, limit_s, ("-c", code))


def test_all_take_eight_minutes_at_most() -> None:
    assert sum(piece.limit_s for piece in PIECES) <= 470  # and a little to begin and to end


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
    arguments = [*FIRST_RUN._TESTS, "--collect-only", "-qq", *tests]
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
    found = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
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
    (tmp_path / "bench-one.json").write_text('{"rows": "old"}')
    line = FIRST_RUN.run(_piece("bench-one", "print('{\"new\": 1}'); print('done')"), tmp_path, 60)
    assert (line["exit"], line["said"]) == (0, {"new": 1})
    assert "tail" not in line


def test_of_a_report_the_rows_are_told_also_when_it_was_cut_off(tmp_path: Path) -> None:
    rows = [{"name": "gather", "value": {"p50": 1234.5}, "unit": "GB/s", "ratio": 0.951}]
    report = json.dumps({"rows": rows})
    code = f"import sys; print({report!r}, file=open(sys.argv[2] + '/bench-one.json', 'w')); 1 / 0"
    line = FIRST_RUN.run(_piece("bench-one", code), tmp_path, 60)
    assert line["said"] == {"gather": "1234 GB/s, 0.95 of the limit"}
    assert line["exit"] == 1
    assert "ZeroDivisionError" in line["tail"]


@pytest.mark.slow
def test_a_piece_that_fails_or_hangs_does_not_keep_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces = (
        _piece("driver", 'print(\'{"card": "one"}\')', limit_s=4),
        # It has what the first one leaves of its limit.
        _piece("hangs", "import signal; print('here'); signal.pause()", limit_s=0),
        _piece("ends", "import os; os._exit(3)"),
        _piece("last", "pass"),
    )
    monkeypatch.setattr(FIRST_RUN, "PIECES", pieces)
    monkeypatch.setattr(FIRST_RUN, "unpack", lambda *_: None)
    for name in ("PYTHONPATH", "HF_HUB_OFFLINE", "PYTHONUNBUFFERED", "PYTHONFAULTHANDLER"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
    monkeypatch.setenv("OUT", str(tmp_path))
    assert FIRST_RUN.main() == 1
    lines = [json.loads(line) for line in (tmp_path / "first_run.jsonl").read_text().splitlines()]
    assert [line["result"] for line in lines] == ["passed", "failed", "failed", "passed"]
    assert {line["card"] for line in lines} == {"one"}
    hangs, ends = lines[1:3]
    assert hangs["exit"].startswith("more than ")
    assert "here" in hangs["tail"]
    assert 'File "<string>", line 1' in hangs["tail"]  # where it was
    assert ends["exit"] == 3


@pytest.mark.slow
def test_a_gpu_that_torch_does_not_see_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torch, driver = pytest.importorskip("torch"), _module("driver")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(driver, "Path", lambda _: HERE)
    with pytest.raises(SystemExit, match="there is a GPU, but none for torch"):
        driver.main()
    assert json.loads(capsys.readouterr().out)["card"] == FIRST_RUN.NO_GPU


def _wheel(folder: Path, name: str) -> None:
    with zipfile.ZipFile(folder / f"{name}-1-py3-none-any.whl", "w") as packed:
        packed.writestr(f"{name}.py", "")


def test_what_is_here_is_kept_and_what_is_not_is_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FIRST_RUN, "HERE", FIRST_RUN.WHEELS_FOR)
    packages = tmp_path / "packages"
    _wheel(tmp_path, "pytest")
    FIRST_RUN.unpack(tmp_path, packages)
    assert not packages.exists()
    _wheel(tmp_path, "tiffin_needs")
    FIRST_RUN.unpack(tmp_path, packages)
    assert [path.name for path in packages.iterdir()] == ["tiffin_needs.py"]
    monkeypatch.setattr(FIRST_RUN, "HERE", ((3, 11), "x86_64"))
    with pytest.raises(SystemExit, match=r"for Python 3.12 on x86_64"):
        FIRST_RUN.unpack(tmp_path, packages)


def test_without_wheels_it_says_how_to_get_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(SystemExit, match=r"collect_wheels\.sh"):
        FIRST_RUN.unpack(tmp_path, tmp_path / "packages")


@pytest.mark.slow
def test_the_model_of_a_gpu_has_a_billion_parameters() -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(_module("llama").config(gpu=True))
    assert 1.0e9 < sum(one.numel() for one in model.parameters()) < 1.3e9
