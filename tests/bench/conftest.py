"""Fixtures of the benchmarks' tests; makes the support modules of this folder importable."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A Machine that measures the CPU in the way of a GPU, without the pauses."""
    pytest.importorskip("torch")
    import fakegpu

    from tiffin.bench.kernels import device

    monkeypatch.setattr(device, "_WARM_S", 0.0)
    monkeypatch.setattr(device, "_FLUSH_BYTES", 1 << 10)
    return fakegpu.fake_gpu()
