"""The greedy scheduler with exact knowledge: what it predicts happens."""

from __future__ import annotations

from functools import partial

import pytest

from tiffin.bench.sim.cluster.oracle import POLICY, Oracle
from tiffin.bench.sim.cluster.simulation import SimulationOptions, simulate
from tiffin.bench.sim.results.outcomes import summarise
from tiffin.bench.traces.generator import generate
from tiffin.bench.traces.scaling import at_rate
from tiffin.bench.traces.trace import Trace, TraceRequest

SHARED = tuple(range(64))
OPTIONS = SimulationOptions(prefill=2, decode=2)


def test_alone_it_knows_its_ttft_exactly() -> None:
    (job,) = simulate(Trace("one", (TraceRequest(1.0, 8192, 3),)), OPTIONS, scheduler=Oracle).jobs
    assert job.decision is not None
    assert job.decision.policy == POLICY
    assert job.ttft_s == pytest.approx(job.decision.predicted_ttft_s)


def test_queues_blocks_and_transfers_are_known_exactly() -> None:
    """A prompt is computed; a long one makes its instance busy; a third fetches to the other."""
    turns = (
        TraceRequest(0.0, 32_768, 1, SHARED),
        TraceRequest(100.0, 65_536, 1, (*SHARED, *range(1000, 1064))),
        TraceRequest(100.5, 33_280, 1, (*SHARED, 2000)),
        TraceRequest(100.7, 8_192, 1, tuple(range(3000, 3016))),
    )
    jobs = simulate(Trace("turns", turns), OPTIONS, scheduler=Oracle).jobs
    fetched = jobs[2].decision
    assert fetched is not None
    assert [(one.start, one.stop) for one in fetched.fetches] == [(0, 64)]
    assert jobs[2].cached_tokens == 32_768
    for job in jobs:
        assert job.decision is not None
        assert job.ttft_s == pytest.approx(job.decision.predicted_ttft_s, rel=1e-6)


def test_slow_links_are_left_alone() -> None:
    turns = (
        TraceRequest(0.0, 32_768, 1, SHARED),
        TraceRequest(100.0, 65_536, 1, (*SHARED, *range(1000, 1064))),
        TraceRequest(100.5, 33_280, 1, (*SHARED, 2000)),
    )
    slow = SimulationOptions(prefill=2, decode=2, bandwidth_bytes_s=1e8)
    *_, last = simulate(Trace("turns", turns), slow, scheduler=Oracle).jobs
    assert last.decision is not None
    assert last.decision.fetches == ()


def test_blocks_that_are_being_computed_are_counted_where_one_waits_for_them() -> None:
    """Both prompts are the same, and the second comes while the first is computed."""
    twice = tuple(TraceRequest(at_s, 32_768, 1, SHARED) for at_s in (0.0, 3.9))
    first, second = simulate(Trace("twice", twice), OPTIONS, scheduler=Oracle).jobs
    assert first.decision is not None
    assert second.decision is not None
    assert second.decision.prefill == first.decision.prefill
    assert second.cached_tokens == 32_767


def test_who_pays_for_work_waits_to_save_it() -> None:
    """A busy instance has a prompt's blocks; a free one would compute them anew a second sooner."""
    turns = (
        TraceRequest(0.0, 32_768, 1, SHARED),
        TraceRequest(100.0, 40_000, 1),
        TraceRequest(100.5, 33_280, 1, (*SHARED, 3000)),
    )
    slow = SimulationOptions(prefill=2, decode=2, bandwidth_bytes_s=1e8)
    cached = [
        simulate(Trace("turns", turns), slow, scheduler=partial(Oracle, work_weight=weight))
        .jobs[-1]
        .cached_tokens
        for weight in (0.0, 4.0)
    ]
    assert cached == [0, 32_768]


def test_of_equal_instances_one_is_taken_whose_card_is_free() -> None:
    """Nobody waits for a GPU, but the KV of the first is still on its way."""
    turns = tuple(TraceRequest(at_s, 8_192, 2) for at_s in (0.0, 2.0))
    slow = SimulationOptions(prefill=2, decode=2, bandwidth_bytes_s=1e9)
    first, second = simulate(Trace("two", turns), slow, scheduler=Oracle).jobs
    assert first.decision is not None
    assert second.decision is not None
    assert second.decision.prefill != first.decision.prefill


def test_decodes_are_spread() -> None:
    turns = tuple(TraceRequest(at_s, 4_096, 2_000) for at_s in (0.0, 2.0, 4.0, 6.0))
    jobs = simulate(Trace("long answers", turns), OPTIONS, scheduler=Oracle).jobs
    places = [job.decision.decode for job in jobs if job.decision]
    assert sorted(places) == ["decode-0", "decode-0", "decode-1", "decode-1"]


@pytest.mark.slow
def test_it_is_a_mark_for_policies() -> None:
    """Not a bound; but no policy that guesses is far below."""
    trace = at_rate(generate("multi-turn", 400, seed=3), 2.0)
    options = SimulationOptions(prefill=4, decode=4)
    knowing = summarise(trace, simulate(trace, options, scheduler=Oracle))
    guessing = summarise(trace, simulate(trace, options))
    assert knowing.ttft_s.mean < guessing.ttft_s.mean * 1.05
    assert abs(knowing.ttft_bias) < 0.03
    assert knowing.requests == guessing.requests
