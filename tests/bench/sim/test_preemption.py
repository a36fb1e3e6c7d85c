"""Answers of unknown length: who has no room leaves, comes back, and loses no token."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tiffin.bench.sim.clock import VirtualClock
from tiffin.bench.sim.cluster.simulation import SimulationOptions, simulate
from tiffin.bench.sim.instances.decode_instance import DecodeInstance
from tiffin.bench.sim.instances.sim_request import SimRequest
from tiffin.bench.sim.results.outcomes import summarise
from tiffin.bench.traces.generator import generate
from tiffin.bench.traces.scaling import at_rate
from tiffin.bench.traces.trace import TraceRequest
from tiffin.conductor.cost import latency_profiles

PROFILE = latency_profiles.load(latency_profiles.DEFAULT)
D0, D1, D2 = PROFILE.decode


def decode(
    capacity: int, comes_back_s: float | None, *lengths: tuple[int, int]
) -> tuple[DecodeInstance, list[SimRequest], float]:
    """Requests of (prompt, output) tokens, all there at 0; and when the last one has ended."""
    clock = VirtualClock()
    cost = None if comes_back_s is None else (lambda tokens: comes_back_s)
    one = DecodeInstance("d", clock, PROFILE, capacity, 256, lambda job: None, cost)
    jobs = [
        SimRequest(str(number), TraceRequest(0.0, *both), ()) for number, both in enumerate(lengths)
    ]
    for job in jobs:
        job.first_token_s = 0.0
    clock.at(0.0, lambda: [one.join(job) for job in jobs] and None)
    clock.run(lambda: True)
    return one, jobs, clock.now_s


def test_with_room_for_all_nobody_leaves_and_nothing_changes() -> None:
    lengths = (100, 9), (200, 5), (50, 20)
    known, unknown = (decode(10_000, cost, *lengths) for cost in (None, 1.0))
    assert unknown[0].preempted == 0
    assert unknown[2] == pytest.approx(known[2])
    for a, b in zip(known[1], unknown[1], strict=True):
        assert a.gaps_s == pytest.approx(b.gaps_s)


def test_the_last_to_join_leaves_and_comes_back_when_there_is_room() -> None:
    """Room for 210 tokens of two contexts of 101 each. The first one begins; three steps together,
    then one alone to its end, then the other."""
    one, (first, second), _ = decode(210, 1.0, (100, 12), (100, 12))
    assert one.preempted == 1
    begin_s = D0 + D1 + D2 * 101
    together = [D0 + 2 * D1 + D2 * (203 + 2 * step) for step in range(3)]
    alone = [D0 + D1 + D2 * (105 + step) for step in range(7)]
    assert first.gaps_s == pytest.approx([begin_s, *together, *alone])
    again = [D0 + D1 + D2 * (104 + step) for step in range(8)]
    again[0] += sum(alone) + 1.0
    assert second.gaps_s == pytest.approx([begin_s + together[0], *together[1:], *again])


@pytest.mark.parametrize("capacity", [150, 400, 1000])
def test_nobody_loses_a_token(capacity: int) -> None:
    lengths = [(30 + 7 * n % 60, 2 + 11 * n % 50) for n in range(40)]
    one, jobs, _ = decode(capacity, 0.1, *lengths)
    assert [len(job.gaps_s) for job in jobs] == [output - 1 for _, output in lengths]
    assert (one.batch, one.context_tokens) == (0, 0)
    assert all(gap > 0 for job in jobs for gap in job.gaps_s)


@pytest.mark.slow
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_a_cluster_with_little_memory_serves_everybody(preemption: str) -> None:
    trace = at_rate(generate("multi-turn", 200, seed=2), 4.0)
    options = SimulationOptions(prefill=4, decode=1, kv_capacity_tokens=60_000)
    known = simulate(trace, options)
    unknown = simulate(trace, replace(options, preemption=preemption))  # type: ignore[arg-type]
    assert unknown.preempted > 0
    assert known.preempted == 0
    for outcome in (known, unknown):
        served = [job for job in outcome.jobs if job.ended_s is not None]
        assert len(served) == len(trace.requests)
    assert summarise(trace, unknown).tbt_s.p99 > 0
