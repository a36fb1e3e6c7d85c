"""Instances that step together: closed forms, and conservation."""

from __future__ import annotations

import random

import pytest

from tiffin.bench.sim.clock import VirtualClock
from tiffin.bench.sim.instances.lockstep_group import LockstepGroup, Shards
from tiffin.bench.sim.instances.sim_request import SimRequest
from tiffin.bench.traces.trace import TraceRequest
from tiffin.conductor.cost import latency_profiles

PROFILE = latency_profiles.load(latency_profiles.DEFAULT)
EXCHANGE_S = 1e-3


def job(name: str, prompt: int, output: int) -> SimRequest:
    return SimRequest(name, TraceRequest(0.0, prompt, output), ())


class Group:
    def __init__(self, size: int, capacity: int = 1_000_000) -> None:
        self.clock, self.ended = VirtualClock(), dict[str, float]()
        self.group = LockstepGroup(
            *(self.clock, PROFILE, size, capacity, EXCHANGE_S),
            lambda job: self.ended.update({job.name: self.clock.now_s}),
        )

    def run(self) -> None:
        self.clock.run(lambda: True)


def step_s(batch: int, tokens: int) -> float:
    d0, d1, d2 = PROFILE.decode
    return d0 + d1 * batch + d2 * tokens


def test_a_step_takes_as_long_as_that_of_the_fullest() -> None:
    one = Group(2)
    short, long = job("short", 1000, 11), job("long", 100_000, 11)
    one.group.join(short, Shards((0,), (1011,), 0))
    one.clock.run(lambda: False)
    one.group.join(long, Shards((1,), (100_011,), 1))
    one.run()
    assert short.gaps_s[-1] == pytest.approx(step_s(1, 100_011))
    assert short.gaps_s[0] == pytest.approx(step_s(1, 1011))
    assert len(short.gaps_s) == len(long.gaps_s) == 10


def test_shards_halve_the_context_and_cost_an_exchange() -> None:
    one = Group(2)
    long = job("long", 100_000, 11)
    one.group.join(long, Shards((0, 1), (50_006, 50_005), 0))
    one.run()
    assert long.gaps_s == pytest.approx([step_s(1, 50_006) + EXCHANGE_S] * 10)


def test_who_does_not_fit_waits() -> None:
    one = Group(1, capacity=1500)
    one.group.join(job("first", 1000, 11), Shards((0,), (1011,), 0))
    one.group.join(job("second", 1000, 11), Shards((0,), (1011,), 0))
    one.run()
    assert one.ended["second"] == pytest.approx(2 * one.ended["first"])


def test_all_get_their_tokens_and_nothing_is_held_at_the_end() -> None:
    one, chance, jobs = Group(4), random.Random(3), list[SimRequest]()
    for number in range(200):
        jobs.append(job(f"r{number}", chance.randint(100, 50_000), chance.randint(2, 50)))
        tokens = jobs[-1].trace.prompt_tokens + jobs[-1].trace.output_tokens
        member = chance.randrange(4)
        at_s = chance.uniform(0, 20)
        one.clock.at(
            at_s,
            lambda job=jobs[-1], member=member, tokens=tokens: one.group.join(  # type: ignore[misc]
                job, Shards((member,), (tokens,), member)
            ),
        )
    one.run()
    assert len(one.ended) == 200
    assert all(len(job.gaps_s) == job.trace.output_tokens - 1 for job in jobs)
    assert not one.group.batch.any()
    assert not one.group.held_tokens.any()
