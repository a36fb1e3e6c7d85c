"""What the reproductions of Mooncake's figures compute, on inputs whose answer is known."""

from __future__ import annotations

import numpy as np
import pytest

from tiffin.bench.reproduce.papers.mooncake.mooncake_bandwidth import always_fetched
from tiffin.bench.reproduce.papers.mooncake.mooncake_capacity import gains
from tiffin.bench.reproduce.setups.mooncake_systems import ENGINES, MOONCAKE, Served, Workload
from tiffin.bench.traces.generator import generate
from tiffin.bench.traces.trace import Trace, TraceRequest
from tiffin.conductor.cost import latency_profiles
from tiffin.conductor.cost.latency_model import prefill_s

PROFILE = latency_profiles.load(latency_profiles.DEFAULT)
TOKEN_BYTES = 327_680


def served(*tbt_s: float, ttft_s: float = 1.0) -> Served:
    """A request for each TBT."""
    return Served(np.full(len(tbt_s), ttft_s), np.array(tbt_s), np.ones(len(tbt_s)))


def test_a_request_counts_if_it_meets_both_objectives() -> None:
    one = served(0.05, 0.15, 0.25, np.inf)
    assert one.effective(30, 0.1) == 25.0
    assert one.effective(30, 0.3) == 75.0
    assert one.effective(0.5, 0.3) == 0.0


def test_a_gain_is_over_the_best_engine() -> None:
    found = {name: served(0.05, 0.25, 0.5, 0.5) for name in ENGINES}
    found["vLLM"] = served(0.05, 0.05, 0.5, 0.5)
    found[MOONCAKE] = served(0.05, 0.05, 0.05, 0.25)
    assert gains(found) == pytest.approx([50.0, 50.0, 100.0])


def test_a_workload_has_the_rate_that_is_asked_for() -> None:
    once, twice = (Workload("synthetic", rate).trace() for rate in (1.0, 2.0))
    assert twice.rate == pytest.approx(2 * once.rate)


class TestAlwaysFetched:
    def test_a_lone_hit_takes_its_bytes_and_what_is_left_to_compute(self) -> None:
        shared = tuple(range(16))
        again = (*shared, *range(100, 116))
        requests = (TraceRequest(0.0, 8192, 1, shared), TraceRequest(60.0, 16_384, 1, again))
        found = always_fetched(Trace("two", requests), bandwidth_bytes_s=10e9)
        moved_s = 8192 * TOKEN_BYTES / 10e9
        first_s = float(prefill_s(*PROFILE.prefill, 8192, 0))
        second_s = float(prefill_s(*PROFILE.prefill, 16_384, 8192))
        assert found.transfer_s == pytest.approx(moved_s + 1e-3, abs=1e-6)
        assert found.alone_s == pytest.approx(moved_s)
        assert found.fetching == 0.5
        assert 2 * found.ttft_s == pytest.approx(first_s + second_s + moved_s + 1e-3, abs=1e-6)

    def test_without_reuse_nothing_moves(self) -> None:
        trace = generate("long-document", 50, seed=1)
        found = always_fetched(trace, reuse=False)
        assert (found.transfer_s, found.fetching, found.congestion) == (0.0, 0.0, 1.0)

    def test_more_bandwidth_is_quicker_and_less_congested(self) -> None:
        trace = generate("long-document", 400, seed=1)
        points = [always_fetched(trace, bandwidth_bytes_s=rate) for rate in (1e9, 3e9, 50e9)]
        assert [one.ttft_s for one in points] == sorted((p.ttft_s for p in points), reverse=True)
        ratios = [one.congestion for one in points]
        assert ratios == sorted(ratios, reverse=True)
        assert ratios[-1] >= 1
