"""Finds a Python that has vLLM and Tiffin."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from ...suite import Missing

_LOOK_S = 60.0
# Says what is missing, without the ten seconds that importing vLLM takes. `vllm serve` looks for a
# distribution of its own name, which the wheel for CPUs does not have.
_LOOK = """
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
lacking = [name for name in ("vllm", "transformers", "tiffin") if find_spec(name) is None]
if "vllm" not in lacking:
    try:
        version("vllm")
    except PackageNotFoundError:
        lacking.append("the distribution vllm")
print(", ".join(lacking))
"""
_HOW = """
In the root of Tiffin's repository, `make engines` makes an environment that has what is needed, on
a machine without a GPU too (3 GB). Then:

    tiffin demo --engine vllm --vllm .venv-engines/bin/python

TIFFIN_VLLM may name that Python as well. By hand: docs/vllm.md, Install."""


def find(chosen: Path | None) -> Path:
    """`chosen`, or this Python. Raises Missing."""
    named = str(chosen or sys.executable)
    try:
        done = subprocess.run(
            [named, "-c", _LOOK],
            capture_output=True,
            text=True,
            timeout=_LOOK_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise Missing(f"{named} is no Python that runs: {error}{_HOW}") from error
    lacking = done.stdout.strip()
    if lacking:
        raise Missing(f"{named} does not have: {lacking}.{_HOW}")
    return Path(named)
