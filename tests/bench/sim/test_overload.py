"""Overload: the second check of mode "baseline", and the loads of both pools over time."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tiffin.bench.sim.cluster.load_series import LoadSeries, correlation
from tiffin.bench.sim.cluster.simulation import SimulationOptions, conductor_of, simulate
from tiffin.bench.traces.trace import Trace, TraceRequest
from tiffin.conductor.cost import latency_profiles
from tiffin.conductor.records import Objectives

if TYPE_CHECKING:
    from tiffin.bench.sim.cluster.simulation import Profiles
    from tiffin.conductor.core import Conductor

PROFILE = latency_profiles.load(latency_profiles.DEFAULT)


def poisson(rate: float, seconds: float, prompt: int = 4000, answer: int = 200) -> Trace:
    dice, at_s, requests = random.Random(5), 0.0, []
    while at_s < seconds:
        at_s += dice.expovariate(rate)
        requests.append(TraceRequest(at_s, prompt, answer))
    return Trace("poisson", tuple(requests))


def test_the_baseline_refuses_after_the_prefill_and_wastes_it() -> None:
    options = SimulationOptions(prefill=4, decode=1, ttft_s=30.0, tbt_s=0.035)
    trace = poisson(5.0, 60.0)
    outcome = simulate(trace, replace(options, admission="baseline"))
    late = [job for job in outcome.jobs if job.rejected and job.compute_s]
    assert late
    assert all(job.rejected == "tbt" and job.ended_s is None for job in late)
    served = [job for job in outcome.jobs if job.ended_s is not None]
    refused = [job for job in outcome.jobs if job.rejected]
    assert len(served) + len(refused) == len(trace.requests)
    to_decode = sum(n for (_, at), n in outcome.moved_bytes.items() if at.startswith("decode"))
    assert to_decode == 4000 * len(served) * options.token_bytes, "nothing of the refused moves"
    early = simulate(trace, replace(options, admission="early"))
    assert not any(job.rejected and job.compute_s for job in early.jobs)


def test_a_sample_is_the_mean_over_the_pool_as_a_share_of_the_objective() -> None:
    series = LoadSeries()
    series.sample(0.0, np.array([10.0, 20.0]), [0.05, 0.07], Objectives(30.0, 0.1))
    series.sample(1.0, np.array([10.0, 20.0]), [0.05, 0.07], Objectives())
    times_s, prefill, decode = series.between(0.0, 2.0)
    assert times_s.tolist() == [0.0, 1.0]
    assert prefill.tolist() == pytest.approx([0.5, 0.0])
    assert decode.tolist() == pytest.approx([0.6, 0.0])


def test_the_load_of_idle_decode_is_that_of_an_empty_step() -> None:
    options = SimulationOptions(prefill=1, decode=2, ttft_s=30.0, tbt_s=0.1)
    outcome = simulate(Trace("one", (TraceRequest(30.0, 4000, 1),)), options)
    _, prefill, decode = outcome.loads.between(0.0, 30.0)
    assert not prefill.any()
    assert decode == pytest.approx(np.full(len(decode), PROFILE.decode[0] / 0.1))


def test_opposite_swings_have_a_correlation_of_minus_one() -> None:
    swing = np.sin(np.arange(200) * 2 * np.pi / 20)
    assert correlation(swing, -swing) == pytest.approx(-1.0)
    assert correlation(swing, -np.roll(swing, 5), lag=5) == pytest.approx(-1.0)
    assert correlation(swing, np.ones(200)) == 0.0


def test_queues_and_swinging_loads_are_not_taken_for_slow_hardware() -> None:
    """The hardware is exactly as fast as its profile says; half of each prompt is cached, prompts
    wait, and the batch grows. So the factors that the conductor learns stay near 1."""
    shared = tuple(range(8))
    requests = [
        TraceRequest(n / 12.0, 8192, 100, (*shared, *range(100 + 8 * n, 108 + 8 * n)))
        for n in range(400)
    ]
    options = SimulationOptions(prefill=4, decode=1, ttft_s=600.0, tbt_s=1.0)
    made: list[Conductor] = []

    def core(options: SimulationOptions, profiles: Profiles) -> Conductor:
        made.append(conductor_of(options, profiles))
        return made[0]

    simulate(Trace("half", tuple(requests)), options, core=core)
    found, now = made[0].calibration, 400 / 12.0
    for name in made[0].cluster.names:
        for factors in (found.prefill, found.decode):
            assert factors.factor(name, options.profile, now) == pytest.approx(1.0, abs=0.05)
