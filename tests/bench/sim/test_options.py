"""What can be simulated beside the default: pipelines, overlap, tiers, orders, waiting users."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from tiffin.bench.sim.cluster.simulation import SimulationOptions, simulate
from tiffin.bench.sim.instances.prefill_work import prefill_work
from tiffin.bench.sim.nodes.node_cache import NodeCache, TierChange
from tiffin.bench.sim.results.outcomes import summarise
from tiffin.bench.traces.generator import generate
from tiffin.bench.traces.scaling import at_rate
from tiffin.bench.traces.trace import Trace, TraceRequest
from tiffin.conductor.cost import latency_profiles

PROFILE = latency_profiles.load(latency_profiles.DEFAULT)
ONE = SimulationOptions(prefill=1, decode=1)
C0, C1, C2 = PROFILE.prefill


def prefill_s(tokens: int, cached: int = 0) -> float:
    return C0 + C1 * (tokens - cached) + C2 * (tokens**2 - cached**2)


def request(at_s: float, tokens: int, *blocks: int, output: int = 1) -> TraceRequest:
    return TraceRequest(at_s, tokens, output, blocks)


@pytest.fixture(scope="module")
def trace() -> Trace:
    return at_rate(generate("multi-turn", 300, seed=5), 1.5)


class TestPrefillWork:
    def test_chunks_add_up_to_the_whole_and_a_fixed_part_each(self) -> None:
        whole = prefill_work(PROFILE, 10_000, 2_000, 0, 1)
        assert whole == pytest.approx([prefill_s(10_000, 2_000)] * 3)
        chunks = prefill_work(PROFILE, 10_000, 2_000, 1_000, 1)
        assert chunks.gpu_s == pytest.approx(whole.gpu_s + 7 * C0)
        parts = [prefill_s(end, end - 1_000) for end in range(3_000, 10_001, 1_000)]
        assert chunks.done_s == pytest.approx(sum(parts))

    def test_a_pipeline_is_free_before_it_is_done(self) -> None:
        """Four nodes, eight chunks: the last chunk goes through the other three when the first
        node is free."""
        alone, piped = (prefill_work(PROFILE, 8_000, 0, 1_000, stages) for stages in (1, 4))
        assert piped.gpu_s == pytest.approx(alone.gpu_s)
        assert piped.occupied_s == pytest.approx(alone.gpu_s / 4)
        last_s = prefill_s(8_000, 7_000)
        assert piped.done_s == pytest.approx(piped.occupied_s + last_s * 3 / 4)


class TestOverlap:
    def test_of_what_is_loaded_the_first_layer_is_waited_for(self) -> None:
        turns = tuple(request(at_s, 8192, *range(16)) for at_s in (0.0, 60.0))
        whole_s = 8191 * ONE.token_bytes / ONE.settings().transfers.dram_bandwidth_bytes_s
        for layerwise, waits_s in ((False, whole_s), (True, whole_s / ONE.layers)):
            options = replace(ONE, layerwise=layerwise)
            again = simulate(Trace("two", turns), options).jobs[1]
            assert again.ttft_s == pytest.approx(waits_s + prefill_s(8192, 8191), abs=1e-6)

    def test_of_the_hand_over_the_last_layer_is(self) -> None:
        one = Trace("one", (request(0.0, 8192, *range(16), output=2),))
        step_s = PROFILE.decode[0] + PROFILE.decode[1] + PROFILE.decode[2] * 8193
        whole_s = 8192 * ONE.token_bytes / ONE.bandwidth_bytes_s
        (job,) = simulate(one, replace(ONE, layerwise=True)).jobs
        last_s = ONE.latency_s + whole_s / ONE.layers
        assert job.gaps_s == pytest.approx([last_s + step_s], abs=1e-6)
        slow = replace(ONE, layerwise=True, bandwidth_bytes_s=1e8)  # far slower than computing
        (job,) = simulate(one, slow).jobs
        assert job.gaps_s[0] > 8192 * ONE.token_bytes / 1e8 - prefill_s(8192)


class TestTiers:
    @staticmethod
    def keys(*blocks: int) -> tuple[bytes, ...]:
        return tuple(block.to_bytes(16) for block in blocks)

    def test_what_memory_evicts_is_on_disk_and_every_change_is_told(self) -> None:
        told: list[TierChange] = []
        cache = NodeCache(hbm_blocks=2, dram_blocks=3, nvme_blocks=9, changed=told.append)
        cache.put(self.keys(1, 2, 3))
        cache.put(self.keys(1, 4, 5))
        assert cache.by_tier(self.keys(1, 2, 3)) == (1, 0, 2)
        assert cache.by_tier(self.keys(1, 4, 5)) == (2, 1, 0)
        held = Counter[tuple[str, bytes]]()
        for change in told:
            held.update((change.tier, key) for key in change.added)
            held.subtract((change.tier, key) for key in change.removed)
        assert set(held.values()) <= {0, 1}
        assert Counter(tier for tier, _ in held.elements()) == {"hbm": 2, "dram": 3, "nvme": 2}

    def test_blocks_are_loaded_at_the_speed_of_their_tier(self) -> None:
        """Memory for 16 blocks: another prompt drives the first one out to the disk."""
        other = request(60.0, 8192, *range(100, 116))
        turns = (request(0.0, 8192, *range(16)), other, request(120.0, 8192, *range(16)))
        disk = replace(ONE, cache_tokens=8192, nvme_cache_tokens=81_920)
        ways = disk.settings().transfers
        jobs = simulate(Trace("three", turns), disk).jobs
        assert jobs[2].by_tier == {"nvme": 8191}
        whole_s = 8191 * ONE.token_bytes / ways.nvme_bandwidth_bytes_s
        assert jobs[2].ttft_s == pytest.approx(whole_s + prefill_s(8192, 8191), abs=1e-6)
        jobs = simulate(Trace("three", turns), replace(disk, hbm_cache_tokens=81_920)).jobs
        assert jobs[2].by_tier == {"hbm": 8191}
        assert jobs[2].ttft_s == pytest.approx(prefill_s(8192, 8191), abs=1e-6)

    def test_what_is_loaded_later_than_computed_is_computed(self) -> None:
        """A disk that reads a token in 10 ms, which computing does in 0.1 ms."""
        slow = replace(ONE, cache_tokens=8192, nvme_cache_tokens=81_920, token_bytes=50_000_000)
        other = request(600.0, 8192, *range(100, 116))
        turns = (request(0.0, 8192, *range(16)), other, request(1200.0, 8192, *range(16)))
        last = simulate(Trace("three", turns), slow).jobs[2]
        assert (last.cached_tokens, last.by_tier) == (0, {})

    @pytest.mark.slow
    def test_more_of_a_tier_is_no_worse(self, trace: Trace) -> None:
        few = SimulationOptions(prefill=2, decode=2, cache_tokens=100_000)
        more = replace(few, nvme_cache_tokens=3_000_000)
        found = [summarise(trace, simulate(trace, options)) for options in (few, more)]
        assert found[1].hit_share > found[0].hit_share
        assert found[1].ttft_s.mean < found[0].ttft_s.mean


def test_the_conductors_order_lets_short_prompts_pass() -> None:
    """All at once: a long one is computed, then the shortest of those that have not aged."""
    lengths = (16_384, 8_192, 1_024, 2_048)
    turns = tuple(request(0.0, tokens) for tokens in lengths)
    for order, first in (("arrival", [0, 1, 2, 3]), ("conductor", [0, 2, 3, 1])):
        options = replace(ONE, order=order, late_s=0.01, queue_order="shortest-first")  # type: ignore[arg-type]
        jobs = simulate(Trace("four", turns), options).jobs
        times = [job.first_token_s or 0.0 for job in jobs]
        assert sorted(range(4), key=times.__getitem__) == first


def test_whoever_waits_for_an_answer_asks_after_it() -> None:
    first = request(0.0, 1024, 0, 1, output=100)
    asks = request(1.0, 2048, 0, 1, 2, 3, output=100)  # a second later, before the answer
    trace = Trace("two", (first, asks))
    opened, closed = (simulate(trace, replace(ONE, closed=one)) for one in (False, True))
    assert opened.jobs[1].trace.arrival_s == 1.0
    assert closed.jobs[1].trace.arrival_s == closed.jobs[0].ended_s
    assert closed.jobs[0].ended_s is not None
    assert closed.jobs[0].ended_s > 1.0


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        {"noise": 0.3, "late_jitter_s": 0.5},
        {"load_late_s": 3.0, "load_noise": 0.5},
        {"layerwise": True, "chunk_tokens": 1024, "stages": 2},
        {"order": "conductor", "closed": True},
        {"hbm_cache_tokens": 200_000, "cache_tokens": 400_000, "nvme_cache_tokens": 2_000_000},
    ],
)
def test_whatever_is_simulated_serves_everybody_and_is_repeated(
    trace: Trace, more: dict[str, object]
) -> None:
    options = SimulationOptions(prefill=2, decode=2, **more)  # type: ignore[arg-type]
    first, again = (simulate(trace, options) for _ in range(2))
    assert all(job.ended_s is not None for job in first.jobs)
    assert [job.ended_s for job in first.jobs] == [job.ended_s for job in again.jobs]
    assert all(sum(job.by_tier.values()) == job.cached_tokens for job in first.jobs)


@pytest.mark.slow
def test_who_hears_of_loads_late_and_wrongly_decides_otherwise() -> None:
    """Of documents that need no cache, the least loaded instance is chosen by what is heard."""
    trace = at_rate(generate("long-document", 200, seed=1), 3.0)
    options = SimulationOptions(prefill=4, decode=4, policy="least_loaded")
    wrong = replace(options, load_late_s=5.0, load_age_told=False, load_noise=2.0)
    known, guessed = (
        [job.decision.prefill for job in simulate(trace, one).jobs if job.decision]
        for one in (options, wrong)
    )
    assert len(known) == len(guessed) == 200
    assert guessed != known


@pytest.mark.slow
def test_noise_keeps_the_mean(trace: Trace) -> None:
    """Twice as many seconds are as likely as half as many, and in the mean it is the profile's."""
    found = [
        summarise(trace, simulate(trace, SimulationOptions(prefill=8, decode=8, noise=noise)))
        for noise in (0.0, 0.2)
    ]
    assert found[1].compute_s == pytest.approx(found[0].compute_s, rel=0.05)
    assert found[1].compute_s != found[0].compute_s
