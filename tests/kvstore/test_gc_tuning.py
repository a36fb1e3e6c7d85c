"""Memory that a peak has left goes back to the system."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tiffin.kvstore import gc_tuning

# In a process of its own: what is free in this one's heap is of other tests.
_PEAK = """
import re
from pathlib import Path
from tiffin.kvstore.gc_tuning import collect_all

def own_kib():
    return int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

peak = [bytes(2000) for _ in range(20_000)]  # 40 MB: longer ones than Python's own heap takes
kept = peak[::50]
del peak
before = own_kib()
collect_all()
print(before - own_kib())
"""


@pytest.mark.skipif(gc_tuning._trim is None, reason="the C library is not glibc")
def test_what_a_peak_has_left_goes_back() -> None:
    told = subprocess.run(
        [sys.executable, "-c", _PEAK], check=True, capture_output=True, text=True, timeout=100
    ).stdout
    assert int(told) > 10 * 1024
