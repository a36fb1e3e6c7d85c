"""Refusals replayed: one request more, and all else as it was."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tiffin.bench.sim.cluster.refusals import replay_refusals
from tiffin.bench.sim.cluster.simulation import SimulationOptions, simulate
from tiffin.bench.sim.results.outcomes import attained
from tiffin.bench.traces.trace import Trace, TraceRequest
from tiffin.conductor.cost import latency_profiles

CLUSTER = SimulationOptions(prefill=6, decode=1, layerwise=True, ttft_s=30.0, tbt_s=0.036)


def poisson(rate: float, seconds: float, prompt: int = 8000, answer: int = 200) -> Trace:
    dice, at_s, requests = random.Random(5), 0.0, []
    while at_s < seconds:
        at_s += dice.expovariate(rate)
        requests.append(TraceRequest(at_s, prompt, answer))
    return Trace("poisson", tuple(requests))


@pytest.mark.slow
def test_who_would_have_been_late_alone_would_have_been_late() -> None:
    options = replace(CLUSTER, admission="early", prefill=2, decode=2, ttft_s=0.5)
    slow = poisson(0.2, 60.0, prompt=4000)  # 0.53 s alone: refused, and late by 0.03 s
    found = replay_refusals(slow, options, latency_profiles.load)
    assert found.refused == len(found.replayed) == len(slow.requests)
    assert found.met_share == 0.0
    # With an hour to wait everybody is taken.
    kind = replay_refusals(slow, replace(options, ttft_s=3600.0), latency_profiles.load)
    assert (kind.refused, kind.replayed, kind.met_share) == (0, (), 0.0)


@pytest.mark.slow
def test_a_refusal_that_saves_others_is_not_wrong() -> None:
    """In a full batch, one more is too many for all who are in it."""
    found = replay_refusals(
        poisson(4.0, 60.0), replace(CLUSTER, admission="early"), latency_profiles.load, 20
    )
    assert len(found.replayed) == 20 < found.refused
    assert {one.reason for one in found.replayed} == {"tbt"}
    assert found.wrong_share <= found.met_share
    assert sum(one.broken for one in found.replayed) > 0


@pytest.mark.slow
def test_the_simulation_that_is_replayed_is_the_one_without_replays() -> None:
    trace, options = poisson(4.0, 40.0), replace(CLUSTER, admission="predictive")
    plain = simulate(trace, options)
    found = replay_refusals(trace, options, latency_profiles.load, 3)
    assert [(job.rejected, job.ended_s) for job in found.outcome.jobs] == [
        (job.rejected, job.ended_s) for job in plain.jobs
    ]


@pytest.mark.slow
def test_the_admitted_are_in_time_however_many_come() -> None:
    """A step that is too long is too long for the whole batch, so admitting too many leaves nobody
    in time. By the modes that have no margin, most of the admitted are late."""
    trace = poisson(4.0, 90.0)
    met_of, share_of = {}, {}
    for mode in ("baseline", "early", "predictive"):
        jobs = simulate(trace, replace(CLUSTER, admission=mode)).jobs
        ended = [job for job in jobs if job.ended_s is not None and job.trace.arrival_s > 30.0]
        met = [job for job in ended if attained(job, CLUSTER.ttft_s, CLUSTER.tbt_s)]
        met_of[mode], share_of[mode] = len(met), len(met) / len(ended)
    assert met_of["predictive"] > 1.2 * max(met_of["baseline"], met_of["early"])
    assert share_of["predictive"] > 2 * max(share_of["baseline"], share_of["early"])
    assert share_of["predictive"] > 0.75
