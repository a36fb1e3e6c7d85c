"""A cluster that changes: closed forms, conservation, flips and the autoscaler."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from tiffin.bench.sim.cluster.elastic_cluster import (
    ElasticOptions,
    ElasticOutcome,
    simulate_elastic,
)
from tiffin.bench.traces.phases import Phase, RequestKind, in_phases
from tiffin.bench.traces.trace import Trace, TraceRequest
from tiffin.conductor.cost import latency_profiles
from tiffin.conductor.pool.role_flip import Step
from tiffin.conductor.records import Role

PROFILE = latency_profiles.load(latency_profiles.DEFAULT)
P, D, M = Role.PREFILL, Role.DECODE, Role.MIXED
PLANNER = {"mode": "act", "interval_s": 20.0, "confirm": 2, "cooldown_s": 0.0, "ttft_s": 3.0}
PROMPTS, ANSWERS = RequestKind((4000, 6000), (2, 20)), RequestKind((100, 200), (400, 600))


def prefill_s(tokens: int) -> float:
    c0, c1, c2 = PROFILE.prefill
    return c0 + c1 * tokens + c2 * tokens**2


def gaps_s(context: int, count: int) -> list[float]:
    """Of one request alone in a batch."""
    d0, d1, d2 = PROFILE.decode
    return [d0 + d1 + d2 * (context + 1 + step) for step in range(count)]


def one(trace: Trace, instances: dict[Role, int]) -> list[float]:
    (job,) = simulate_elastic(trace, ElasticOptions(instances)).jobs
    assert job.ttft_s == pytest.approx(prefill_s(3000))
    return job.gaps_s


ALONE = Trace("one", (TraceRequest(1.0, 3000, 4),))


def test_one_request_on_one_that_does_both() -> None:
    assert one(ALONE, {M: 1}) == pytest.approx(gaps_s(3000, 3))


def test_one_request_on_two_that_share_the_work_waits_for_its_kv_as_well() -> None:
    options = ElasticOptions({})
    moved_s = options.latency_s + 3000 * options.token_bytes / options.bandwidth_bytes_s
    expected = gaps_s(3000, 3)
    assert one(ALONE, {P: 1, D: 1}) == pytest.approx([expected[0] + moved_s, *expected[1:]])


def test_a_prompt_delays_the_next_token_of_who_decodes_beside_it() -> None:
    requests = (TraceRequest(0.0, 100, 100), TraceRequest(1.0, 3000, 1))
    first, _ = simulate_elastic(Trace("two", requests), ElasticOptions({M: 1})).jobs
    longest_s = max(first.gaps_s)
    assert longest_s == pytest.approx(prefill_s(3000), rel=0.1)
    assert sum(gap > 0.1 for gap in first.gaps_s) == 1


@cache
def turning(mode: str) -> ElasticOutcome:
    """From long prompts to long answers, on a fleet that should have more of the former."""
    phases = (Phase(120.0, 6.0, (PROMPTS,)), Phase(120.0, 8.0, (ANSWERS,)))
    options = ElasticOptions({P: 3, D: 3}, {"planner": {**PLANNER, "mode": mode}})
    return simulate_elastic(in_phases(phases, 1), options)


@pytest.mark.slow
def test_roles_follow_the_load_and_no_request_is_lost() -> None:
    outcome = turning("act")
    assert all(job.ended_s is not None for job in outcome.jobs)
    assert outcome.flips
    assert {flip.step for flip in outcome.flips} == {Step.READY}
    assert max(sample.prefill for sample in outcome.fleet) > 3
    for sample in outcome.fleet:
        assert sample.paid == 6
        assert sample.prefill + sample.decode <= 6
        assert min(sample.prefill, sample.decode) >= 1


@pytest.mark.slow
def test_with_flips_first_tokens_come_sooner() -> None:
    def mean_ttft_s(outcome: ElasticOutcome) -> float:
        return sum(job.ttft_s or 0.0 for job in outcome.jobs) / len(outcome.jobs)

    assert mean_ttft_s(turning("act")) < mean_ttft_s(turning("off"))


def test_equal_arguments_give_equal_outcomes() -> None:
    trace = in_phases((Phase(60.0, 2.0, (PROMPTS, ANSWERS)),), 5)
    options = ElasticOptions({P: 2, D: 2}, {"planner": PLANNER}, autoscale=True, seed=3)
    first, again = (simulate_elastic(trace, options) for _ in range(2))
    assert [job.ended_s for job in first.jobs] == [job.ended_s for job in again.jobs]
    assert first.instance_s == again.instance_s


@pytest.mark.slow
def test_instances_start_when_the_load_rises_and_leave_when_it_falls() -> None:
    phases = tuple(
        Phase(120.0, rate, (RequestKind((2000, 4000), (50, 100)),)) for rate in (1, 6, 1)
    )
    options = ElasticOptions(
        {P: 1, D: 1}, {"planner": PLANNER}, autoscale=True, start_s=20.0, seed=0
    )
    trace = in_phases(phases, 0)
    outcome = simulate_elastic(trace, options)
    assert all(job.ended_s is not None for job in outcome.jobs)
    peak = max(sample.paid for sample in outcome.fleet)
    assert peak > 3
    assert outcome.fleet[-1].paid < peak
    # What is paid for is what was there, from its order until it was empty.
    by_second = sum(sample.paid for sample in outcome.fleet) * options.heartbeat_s
    assert outcome.instance_s == pytest.approx(by_second, rel=0.02)
    fixed = simulate_elastic(trace, replace(options, autoscale=False))
    assert fixed.instance_s == pytest.approx(2 * fixed.fleet[-1].at_s, rel=0.02)


@pytest.mark.slow
def test_a_fleet_grows_for_those_whom_it_refuses() -> None:
    """With admission no instance is overloaded, and only the refused show what is missing."""
    phases = (Phase(400.0, 6.0, (RequestKind((2000, 4000), (50, 100)),)),)
    changes = {"planner": PLANNER, "admission": {"mode": "early"}}
    options = ElasticOptions(
        {P: 1, D: 1}, changes, autoscale=True, start_s=20.0, ttft_s=1.0, tbt_s=0.1, seed=0
    )
    outcome = simulate_elastic(in_phases(phases, 0), options)
    refused = [job.trace.arrival_s for job in outcome.jobs if job.rejected]
    assert sum(at < 60.0 for at in refused) > 100
    late = [job for job in outcome.jobs if job.trace.arrival_s > 200.0]
    assert sum(bool(job.rejected) for job in late) < 0.02 * len(late)
    fixed = simulate_elastic(in_phases(phases, 0), replace(options, autoscale=False))
    assert sum(bool(job.rejected) for job in fixed.jobs) > 3 * len(refused)


def test_phases_have_their_rates_and_kinds() -> None:
    trace = in_phases((Phase(500.0, 4.0, (PROMPTS,)), Phase(500.0, 1.0, (ANSWERS,))), 2)
    early = [request for request in trace.requests if request.arrival_s < 500.0]
    late = [request for request in trace.requests if request.arrival_s >= 500.0]
    assert len(early) == pytest.approx(2000, rel=0.1)
    assert len(late) == pytest.approx(500, rel=0.2)
    assert all(4000 <= request.prompt_tokens <= 6000 for request in early)
    assert all(400 <= request.output_tokens <= 600 for request in late)
    assert [one.arrival_s for one in trace.requests] == sorted(r.arrival_s for r in trace.requests)
