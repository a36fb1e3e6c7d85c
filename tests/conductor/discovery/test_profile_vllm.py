"""`tiffin profile` of a real vLLM, and a conductor that then predicts by it.

TIFFIN_VLLM=/path/to/venv/bin/python pytest -m slow tests/conductor/discovery/test_profile_vllm.py
"""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from directory.ports import free_port
from serversupport import Process
from vllmsupport import MARKS, Vllm, make_model

from tiffin.conductor.client import ConductorClient
from tiffin.conductor.cost import latency_profiles

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = MARKS

# Relative errors of its own points, mean: what the page states, for a machine with other load.
STATED = 0.25


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vllm]:
    folder = tmp_path_factory.mktemp("profile")
    make_model(folder / "model", hidden=256, layers=4)
    engine = Vllm("vllm-0", folder / "model")
    try:
        engine.start()
        engine.wait()
        yield engine
    finally:
        engine.close()


def test_a_profile_predicts_its_own_points(vllm: Vllm, tmp_path: Path) -> None:
    folder = tmp_path / "profiles"
    folder.mkdir()
    command = [sys.executable, "-c", Process.CODE, "profile", vllm.url]
    command += ["--name", "tiny.cpu", "--out", str(folder / "tiny.json"), "--batch-max", "4"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=600)
    print(said.stdout)
    assert said.returncode == 0, said.stderr
    made = latency_profiles.from_file(folder / "tiny.json")
    assert made.prefill_fit is not None
    assert made.decode_fit is not None
    assert made.prefill_fit.error_mean < STATED
    assert made.decode_fit.error_mean < STATED
    assert made.prefill_error(made.checks.prefill).mean < 2 * STATED, "outliers, too"
    whole = {row[0] for row in made.checks.prefill}
    cached = [row for row in made.checks.prefill if row[1] > row[0] / 2]
    assert len(whole) == 5
    assert cached, "vLLM has found what was sent before"
    url = f"http://127.0.0.1:{free_port()}"
    options = ("--listen", url.removeprefix("http://"), "--profiles", str(folder))
    with Process(*options) as conductor:
        conductor.wait_until_it_answers(url)
        with ConductorClient(url) as client:
            assert vllm.add_to(client, "tiny.cpu").profile == "tiny.cpu"
