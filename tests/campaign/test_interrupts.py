"""A short run of the campaign of interrupts for each kind of client."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from .interrupts import KINDS

PIECE = 200
ROOT = Path(__file__).parents[2]


def interrupted(kind: str, number: int, timeout_s: float) -> None:
    """Run it in a process of its own: alarms belong to the main thread, and pytest uses one too."""
    if kind == "hbm":
        pytest.importorskip("torch")
    ended = subprocess.run(
        [
            *(sys.executable, "-W", "ignore", "-m", "tests.campaign", "interrupts"),
            *("--kind", kind, "--number", str(number), "--seed", "7"),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    reports = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]
    assert len(reports) == 1, ended.stderr[-5000:]
    (report,) = reports
    for what in ("wrong", "untyped", "late", "leaks"):
        assert report[what] == []
    assert ended.returncode == 0, ended.stderr[-5000:]
    assert report["interrupts"] >= number
    assert report["checked_blocks"] > 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", KINDS)
def test_hundreds_of_them_break_nothing(kind: str) -> None:
    interrupted(kind, PIECE, 1700)
