"""`tiffin demo --engine vllm`: with a real vLLM; and what it says where there is none.

TIFFIN_VLLM=/path/to/venv/bin/python pytest -m slow tests/bench/test_demo_vllm.py
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from typing import TYPE_CHECKING

import psutil
import pytest
import typer
from typer.testing import CliRunner

from tiffin.bench.demo.cli import demo

if TYPE_CHECKING:
    from pathlib import Path

VARIABLE = "TIFFIN_VLLM"
VLLM = os.environ.get(VARIABLE, "")
DEMO = [sys.executable, "-m", "tiffin.bench.demo", "--engine", "vllm"]
PATIENCE_S = 60.0
RUN_S = 600.0


def run(*options: str, vllm: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*DEMO, *options],
        env={**os.environ, VARIABLE: vllm, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed")
def test_without_vllm_it_says_how_to_get_one(tmp_path: Path) -> None:
    done = run("--out", str(tmp_path))
    assert done.returncode == 3
    assert f"{sys.executable} does not have: vllm" in done.stderr
    assert "make engines" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_python_that_is_none() -> None:
    done = run("--vllm", "/nowhere/python")
    assert done.returncode == 3
    assert "/nowhere/python is no Python that runs" in done.stderr
    assert "make engines" in done.stderr


@pytest.mark.parametrize("option", ["--nodes", "--nvme", "--overload"])
def test_options_of_the_other_engine_are_refused(option: str) -> None:
    app = typer.Typer()
    app.command()(demo)
    done = CliRunner().invoke(app, ["--engine", "vllm", option, "1"])
    assert done.exit_code == 2
    assert f"{option}: not with --engine vllm" in done.output


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not VLLM, reason=f"{VARIABLE} names no Python that has vLLM")
class TestWithVllm:
    def test_it_shows_what_the_pool_gains(self, tmp_path: Path) -> None:
        done = run("--quick", "--json", "--out", str(tmp_path), vllm=VLLM)
        assert done.returncode == 0, done.stderr
        summary = json.loads(done.stdout)
        assert summary["identical"]
        assert summary["handed_rate"] == 1.0
        assert 0.0 < summary["hit_rate"] <= summary["reusable_rate"]
        assert summary["expected_rate"] == summary["hit_rate"]
        assert summary["as_expected"] == summary["requests"]
        rows = json.loads((tmp_path / "demo-vllm.json").read_text())
        assert len(rows["without the pool"]) == len(rows["with the pool"]) == summary["requests"]
        chosen = {one["request_id"]: one for one in rows["decisions"]}
        for one in rows["with the pool"]:
            assert (one["prefill"], one["decode"]) == ("prefill-1", "decode-1")
            assert chosen[one["id"]]["prefill"] == "prefill-1"

    def test_interrupted_it_leaves_no_process(self, tmp_path: Path) -> None:
        process = psutil.Popen(
            [*DEMO, "--quick", "--out", str(tmp_path)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + PATIENCE_S
        started: list[psutil.Process] = []
        while sum("vllm" in " ".join(one.cmdline()) for one in started) < 2:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
            started = process.children(recursive=True)
        process.send_signal(signal.SIGINT)
        assert process.wait(RUN_S) == 130
        assert not psutil.wait_procs(started, PATIENCE_S)[1]
