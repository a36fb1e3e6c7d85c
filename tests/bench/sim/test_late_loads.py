"""Loads that are told late: what they say of the past is not taken for the present."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tiffin.bench.sim.cluster.simulation import SimulationOptions, simulate
from tiffin.bench.sim.results.outcomes import summarise
from tiffin.bench.traces.trace import Trace, TraceRequest

OPTIONS = SimulationOptions(prefill=4, decode=2)


def trace() -> Trace:
    dice, at_s, requests = random.Random(3), 0.0, []
    while at_s < 100.0:
        at_s += dice.expovariate(5.0)
        requests.append(TraceRequest(at_s, dice.randint(600, 8000), dice.randint(2, 100)))
    return Trace("poisson", tuple(requests))


TRACE = trace()
IN_TIME = summarise(TRACE, simulate(TRACE, OPTIONS))


@pytest.mark.parametrize("late_s", [0.5, 2.0, 5.0])
def test_late_loads_that_tell_their_age_cost_nothing(late_s: float) -> None:
    late = summarise(TRACE, simulate(TRACE, replace(OPTIONS, load_late_s=late_s)))
    assert late.ttft_s.mean == pytest.approx(IN_TIME.ttft_s.mean, rel=0.01)
    assert late.ttft_error_p90 == pytest.approx(IN_TIME.ttft_error_p90, abs=0.02)


def test_those_of_unknown_age_cost_nothing_if_they_are_not_too_late() -> None:
    options = replace(OPTIONS, load_late_s=0.8, load_age_told=False)
    late = summarise(TRACE, simulate(TRACE, options))
    assert late.ttft_s.mean == pytest.approx(IN_TIME.ttft_s.mean, rel=0.01)
    assert late.ttft_error_p90 == pytest.approx(IN_TIME.ttft_error_p90, abs=0.02)
