"""The three fleets are short of what their names say, and goodput counts what it should."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from tiffin.bench.reproduce.setups.fleets import (
    FLEETS,
    Fleet,
    decode_rate,
    goodput,
    offered,
    prefill_rate,
    token_goodput,
)
from tiffin.bench.reproduce.setups.inputs import conversation
from tiffin.bench.sim.cluster.simulation import simulate
from tiffin.bench.sim.instances.sim_request import SimRequest
from tiffin.bench.traces.scaling import window
from tiffin.bench.traces.trace import Trace, TraceRequest

PREFILL_BOUND, BALANCED, DECODE_BOUND = FLEETS


@cache
def some() -> Trace:
    return window(conversation(), 0.0, 150.0)


def test_the_formulas_say_what_each_fleet_has_less_of() -> None:
    def prefills_for_each_answered(fleet: Fleet) -> float:
        options = fleet.options()
        return prefill_rate(some(), options) / decode_rate(some(), options)

    assert prefills_for_each_answered(PREFILL_BOUND) < 0.6
    assert prefills_for_each_answered(BALANCED) == pytest.approx(1, abs=0.2)
    assert prefills_for_each_answered(DECODE_BOUND) > 1.7


def loads(fleet: Fleet) -> tuple[float, float]:
    """How busy GPUs that prefill are, and steps as shares of the objective, at what it can do."""
    trace = offered(some(), fleet.rate(some()))
    outcome = simulate(trace, fleet.options("off"))
    busy_s = sum(job.compute_s for job in outcome.jobs)
    _, _, steps = outcome.loads.between(0.2 * trace.span_s, 0.9 * trace.span_s)
    return busy_s / fleet.prefill / trace.span_s, float(steps.mean())


@pytest.mark.slow
def test_a_simulation_agrees() -> None:
    short, short_steps = loads(PREFILL_BOUND)
    idle, steps = loads(DECODE_BOUND)
    assert short > 0.9
    assert idle < 0.6
    assert steps > 1.3 * short_steps


def test_goodput_is_of_the_requests_in_the_middle() -> None:
    """Eleven requests, one in a second; those from the third to the tenth count."""
    options = replace(BALANCED.options(), ttft_s=1.0, tbt_s=None)

    def job(number: int, ttft_s: float) -> SimRequest:
        at_s = float(number)
        request = TraceRequest(at_s, 100, 1)
        return SimRequest(f"r{number}", request, (), first_token_s=at_s + ttft_s, ended_s=at_s + 9)

    in_time = [job(number, 0.5) for number in range(11)]
    assert goodput(in_time, options) == pytest.approx(1.0)
    late = [job(number, 2.0 if number == 5 else 0.5) for number in range(11)]
    assert goodput(late, options) == pytest.approx(6 / 7)
    edges = [job(number, 2.0 if number in (0, 1, 9, 10) else 0.5) for number in range(11)]
    assert goodput(edges, options) == pytest.approx(1.0)
    assert token_goodput(late, options) == pytest.approx(101 * 6 / 7)
