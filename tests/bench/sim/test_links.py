"""Slow network cards: the conductor books what moves, knows the links, and is near the oracle."""

from __future__ import annotations

import random
from dataclasses import replace
from statistics import fmean
from typing import TYPE_CHECKING

import pytest

from tiffin.bench.sim.cluster.oracle import Oracle
from tiffin.bench.sim.cluster.simulation import SimulationOptions, simulate
from tiffin.bench.traces.generator import generate
from tiffin.bench.traces.scaling import at_rate
from tiffin.conductor.core import Conductor
from tiffin.conductor.core.settings import patched

if TYPE_CHECKING:
    from collections.abc import Callable

    from tiffin.bench.sim.cluster.simulation import Profiles, SimulationOutcome
    from tiffin.bench.traces.trace import Trace

# One card of 24 Gb/s per node: what is handed over fills half of all cards.
SLOW = SimulationOptions(bandwidth_bytes_s=24e9 / 8)


@pytest.fixture(scope="module")
def documents() -> Trace:
    """Questions about long documents: most of their bytes are handed over, few are computed."""
    return at_rate(generate("long-document", 500, seed=0), 2.0)


def keeping(
    cores: list[Conductor], believed_bytes_s: float | None = None
) -> Callable[[SimulationOptions, Profiles], Conductor]:
    """Makes a core that takes links for as fast as `believed_bytes_s`, and keeps it in `cores`."""

    def core(options: SimulationOptions, profiles: Profiles) -> Conductor:
        settings = options.settings()
        if believed_bytes_s is not None:
            ways = {"link_bandwidth_bytes_s": believed_bytes_s}
            settings = patched(settings, {"transfers": ways})
        cores.append(Conductor(settings, dice=random.Random(options.seed), profile=profiles))
        return cores[-1]

    return core


def mean_ttft_s(outcome: SimulationOutcome) -> float:
    return fmean(job.ttft_s for job in outcome.jobs if job.ttft_s is not None)


@pytest.mark.slow
@pytest.mark.parametrize("layerwise", [False, True])
def test_what_is_handed_over_is_not_in_the_way(documents: Trace, layerwise: bool) -> None:
    """With hand-overs that are booked for no time, means are 1.5 to 2.1 s: the oracle's is 0.9."""
    cores: list[Conductor] = []
    options = replace(SLOW, layerwise=layerwise)
    ours = simulate(documents, options, core=keeping(cores))
    mark = simulate(documents, options, scheduler=Oracle)
    assert mean_ttft_s(ours) < 1.15 * mean_ttft_s(mark)
    assert len(cores[0].bookings) == 0, "and all that was booked has ended"
    assert cores[0].transfers.idle


@pytest.mark.slow
@pytest.mark.parametrize("believed_bytes_s", [1e9, 12e9])
def test_the_speed_of_links_is_found(documents: Trace, believed_bytes_s: float) -> None:
    """Four times faster or slower than it was told; the events of transfers come 0.1 to 0.2 s
    late, and most transfers have company."""
    cores: list[Conductor] = []
    options = replace(SLOW, late_jitter_s=0.1)
    simulate(documents, options, core=keeping(cores, believed_bytes_s))
    transfers = cores[0].transfers
    took_s = [float(transfers.seconds(-1, 0, -1, size)) for size in (10**9, 2 * 10**9)]
    assert 1e9 / (took_s[1] - took_s[0]) == pytest.approx(SLOW.bandwidth_bytes_s, rel=0.05)
