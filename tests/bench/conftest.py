"""What the benchmarks' tests share: the modules here can be imported, and fakegpu.py is quick."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A machine that measures the CPU as it would a GPU, without its pauses."""
    pytest.importorskip("torch")
    import fakegpu

    from tiffin.bench.kernels import device

    monkeypatch.setattr(device, "_WARM_S", 0.0)
    monkeypatch.setattr(device, "_FLUSH_BYTES", 1 << 10)
    return fakegpu.fake_gpu()
