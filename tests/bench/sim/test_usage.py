"""Bytes by purpose, hits by tier, and how even the work is."""

from __future__ import annotations

import pytest

from tiffin.bench.sim.cluster.simulation import SimulationOptions, simulate
from tiffin.bench.sim.results.outcomes import summarise
from tiffin.bench.sim.results.usage import jain
from tiffin.bench.traces.generator import generate
from tiffin.bench.traces.scaling import at_rate
from tiffin.bench.traces.trace import Trace, TraceRequest


def test_jains_index() -> None:
    assert jain([2.0, 2.0, 2.0]) == 1.0
    assert jain([1.0, 0.0, 0.0, 0.0]) == 0.25
    assert jain([1.0, 3.0]) == pytest.approx(0.8)
    assert jain([0.0, 0.0]) == 1.0


def test_all_bytes_and_hits_have_a_purpose() -> None:
    trace = at_rate(generate("tool-agent", 300, seed=1), 2.0)
    options = SimulationOptions(prefill=4, decode=2, replication=False)
    summary = summarise(trace, simulate(trace, options))
    used = summary.usage
    assert used.fetched_bytes > 0
    assert used.handed_over_bytes == trace.prompt_tokens * options.token_bytes
    assert used.copied_bytes == 0, "nothing was ordered ahead of need"
    assert used.fetched_bytes + used.handed_over_bytes == summary.moved_bytes
    assert sum(used.hit_share_by_tier.values()) == pytest.approx(summary.hit_share)
    assert set(used.hit_share_by_tier) == {"dram", "fetched"}
    assert 0.25 < used.evenness <= 1.0


@pytest.mark.slow
def test_copies_that_the_conductor_orders_are_apart() -> None:
    trace = at_rate(generate("tool-agent", 300, seed=1), 2.0)
    options = SimulationOptions(prefill=4, decode=2, replication=True)
    used = summarise(trace, simulate(trace, options)).usage
    assert used.copied_bytes > 0
    assert used.copied_bytes % (trace.block_tokens * options.token_bytes) == 0


def test_one_request_is_as_uneven_as_can_be() -> None:
    trace = Trace("one", (TraceRequest(0.0, 4_096, 2),))
    used = summarise(trace, simulate(trace, SimulationOptions(prefill=4))).usage
    assert used.evenness == pytest.approx(1 / 4)
