"""A recording of a simulation; makes the support module of this folder importable."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tiffin.bench.traces.generator import generate
from tiffin.bench.traces.scaling import at_rate

sys.path.insert(0, str(Path(__file__).parent))

if TYPE_CHECKING:
    from tiffin.bench.sim.cluster.simulation import SimulationOutcome
    from tiffin.bench.traces.trace import Trace


@pytest.fixture(scope="session")
def conversations() -> Trace:
    """Twice as many as three instances can prefill at leisure."""
    return at_rate(generate("multi-turn", 300, seed=3), 2.0)


@pytest.fixture(scope="session")
def truth(
    conversations: Trace, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, SimulationOutcome]:
    """A recording, and what really happened."""
    from whatifsupport import TRUTH, record

    path = tmp_path_factory.mktemp("recordings") / "chat.jsonl"
    return path, record(conversations, TRUTH, path)
