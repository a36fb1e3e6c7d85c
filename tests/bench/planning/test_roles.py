"""Instances of one role: closed forms, and the whole simulation."""

from __future__ import annotations

import random

import numpy as np
import pytest
from planningsupport import profile, requests, stream

from tiffin.bench.planning.attainment import Goals, Unit, tbt_s
from tiffin.bench.planning.batching_role import (
    Engine,
    colocated_s,
    decode_tbt_s,
    longest_gaps_s,
    mean_gap_s,
)
from tiffin.bench.planning.prefill_role import first_tokens_s
from tiffin.bench.planning.workload import Workload, from_trace
from tiffin.bench.sim.cluster.simulation import SimulationOptions, simulate
from tiffin.bench.sim.results.outcomes import longest_gaps_s as of_job
from tiffin.bench.traces.trace import Trace, TraceRequest
from tiffin.conductor.cost import latency_profiles
from tiffin.conductor.cost.latency_model import prefill_s

ENGINE = Engine((0.0, 1e-4, 0.0), (0.02, 1e-4, 0.0), 100_000)


def ttft_s(workload: Workload, **how: int) -> list[float]:
    first_s = first_tokens_s(workload, (0.01, 1e-4, 1e-8), **how)
    return (first_s - workload.arrivals_s).tolist()


# -- prefill ---------------------------------------------------------------------------------------


def test_an_idle_instance_takes_what_the_profile_says() -> None:
    alone_s = float(prefill_s(0.01, 1e-4, 1e-8, 1000, 600))
    assert ttft_s(requests(0.0, 9.0, cached=600)) == pytest.approx([alone_s, alone_s])


def test_prompts_wait_in_order_and_for_the_first_instance_that_is_free() -> None:
    alone_s = float(prefill_s(0.01, 1e-4, 1e-8, 1000, 0))
    at_once = requests(0.0, 0.0, 0.0)
    assert ttft_s(at_once) == pytest.approx([alone_s, 2 * alone_s, 3 * alone_s])
    assert ttft_s(at_once, instances=2) == pytest.approx([alone_s, alone_s, 2 * alone_s])


def test_a_pipeline_takes_as_long_for_one_and_follows_sooner_with_the_next() -> None:
    alone_s = float(prefill_s(0.01, 1e-4, 1e-8, 1000, 0))
    found = ttft_s(requests(0.0, 0.0, 0.0), stages=2)
    assert found == pytest.approx([alone_s, 1.5 * alone_s, 2 * alone_s])


def test_short_prompts_that_wait_are_one_batch() -> None:
    waiting = requests(0.0, 0.001, 0.002, 0.003, prompt=100)
    one_s = 0.01 + 1e-2 + 1e-4
    two_s = 0.01 + 2 * (1e-2 + 1e-4)
    ends_s = [one_s, one_s + two_s, one_s + two_s, 2 * one_s + two_s]
    found = first_tokens_s(waiting, (0.01, 1e-4, 1e-8), batch_tokens=200)
    assert found.tolist() == pytest.approx(ends_s)


@pytest.mark.parametrize("stages", [1, 2])
def test_queues_are_those_of_the_theory(stages: int) -> None:
    """DistServe, OSDI '24, equations 1 and 2; the rate is 0.7 per service time."""
    busy = stream(20_000).faster(7.0)
    first_s = first_tokens_s(busy, profile().prefill, stages=stages)
    load, service_s = 0.7 / stages, 0.1
    expected_s = service_s + load * service_s / stages / (2 * (1 - load))
    assert float(np.mean(first_s - busy.arrivals_s)) == pytest.approx(expected_s, rel=0.05)


# -- decode ----------------------------------------------------------------------------------------


def test_one_request_has_the_gaps_of_its_steps() -> None:
    one = requests(0.0)
    assert decode(one, ENGINE) == pytest.approx([0.0201])


def test_requests_slow_each_other_down_by_what_the_profile_says() -> None:
    assert decode(requests(0.0, 0.0, 0.0), ENGINE) == pytest.approx([0.0203] * 3)


def test_who_finds_no_room_waits_and_that_counts() -> None:
    narrow = Engine(ENGINE.prefill, ENGINE.decode, 1500)
    first, second = decode(requests(0.0, 0.0), narrow)
    assert first == pytest.approx(0.0201)
    assert second == pytest.approx(2 * 0.0201)


def test_a_batch_has_a_limit() -> None:
    small = Engine(ENGINE.prefill, ENGINE.decode, 100_000, batch_max=2)
    first, second, third = decode(requests(0.0, 0.0, 0.0), small)
    assert first == second < third


def test_the_pipeline_s_groups_decode_by_themselves() -> None:
    three = requests(0.0, 0.0, 0.0)
    unit = Unit(profile(), 100_000, stages=3)
    found = tbt_s(three, three.arrivals_s, unit, Goals(1, 1))
    assert found.tolist() == pytest.approx([0.0201] * 3)


def test_measures_of_tbt() -> None:
    after_s = [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7, 1.8, 1.9]
    assert mean_gap_s(0.0, after_s) == pytest.approx(0.19)
    assert longest_gaps_s(0.0, after_s) == pytest.approx(1.0)


# -- both ------------------------------------------------------------------------------------------


def test_while_one_is_prefilled_the_others_stand_still() -> None:
    both = requests(0.0, 0.15)
    first_s, gaps_s = colocated_s(both, ENGINE, mean_gap_s)
    assert first_s[0] == pytest.approx(0.1)
    assert 0.25 < first_s[1] < 0.28, "it waits for a step that has begun"
    assert gaps_s[0] > 0.0201 + 0.1 / 10, "a tenth of the prefill for each of its ten gaps"
    assert gaps_s[1] < 0.0203


def test_nothing_is_lost_and_the_same_comes_out_again() -> None:
    busy = stream(300).faster(5.0)
    first, second = (colocated_s(busy, ENGINE, mean_gap_s) for _ in range(2))
    assert np.array_equal(first[0], second[0])
    assert np.array_equal(first[1], second[1])
    assert (first[0] > busy.arrivals_s).all()
    assert (first[1] >= 0.0201 - 1e-9).all()


def test_roles_are_as_in_the_whole_simulation() -> None:
    """With one instance of each role, nothing shared, and a network that takes no time."""
    dice = random.Random(3)
    at_s, asked = 0.0, []
    for _ in range(150):
        at_s += dice.expovariate(0.6)
        asked.append(TraceRequest(at_s, dice.randint(500, 20_000), dice.randint(2, 300)))
    trace = Trace("test", tuple(asked))
    options = SimulationOptions(prefill=1, decode=1, bandwidth_bytes_s=1e13, latency_s=0.0)
    jobs = simulate(trace, options).jobs
    workload = from_trace(trace, 0)
    used = latency_profiles.load(options.profile)
    first_s = first_tokens_s(workload, used.prefill)
    whole = [job.ttft_s for job in jobs]
    assert (first_s - workload.arrivals_s).tolist() == pytest.approx(whole, abs=1e-6)
    unit = Unit(used, options.kv_capacity_tokens)
    gaps_s = tbt_s(
        workload, first_s, unit, Goals(1, 1, tbt_of=longest_gaps_s, transfer_token_s=327_680 / 1e13)
    )
    assert gaps_s.tolist() == pytest.approx([of_job(job) for job in jobs], rel=1e-6)


def decode(workload: Workload, engine: Engine) -> list[float]:
    times_s = workload.arrivals_s
    return decode_tbt_s(workload, times_s, times_s, engine, mean_gap_s).tolist()
