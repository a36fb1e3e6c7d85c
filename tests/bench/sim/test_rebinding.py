"""Bindings of spread contexts move while requests run: the conductor decides, a group does it."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest

from tiffin.bench.sim.clock import VirtualClock
from tiffin.bench.sim.instances.lockstep_group import LockstepGroup, Shards
from tiffin.bench.sim.instances.sim_request import SimRequest
from tiffin.bench.traces.trace import TraceRequest
from tiffin.conductor.core import Conductor
from tiffin.conductor.core.settings import Settings, patched
from tiffin.conductor.cost import latency_profiles
from tiffin.conductor.decode.rebinding import BoundRequest, rebindings
from tiffin.conductor.records import Decision, InstanceSpec, Request, RequestEvent, Role

if TYPE_CHECKING:
    from tiffin.conductor.cost.latency_profiles import Profile
    from tiffin.conductor.pool.instance_orders import RebindRequest

DENSE = latency_profiles.load(latency_profiles.DEFAULT)
# Where a request in the batch costs ten times as much beside its context: experts are read for it.
EXPERTS = msgspec.structs.replace(
    DENSE, decode=(DENSE.decode[0], 10 * DENSE.decode[1], DENSE.decode[2])
)
ROUTES_S = 0.001  # what a change of routes takes
SIZE, LOOK_S = 4, 0.5


def moves(
    batch: list[int], bound: list[tuple[int, tuple[int, ...], int]], cost: float
) -> list[tuple[int, int]]:
    """With steps of a second per request: which bindings move, by (source, target)."""
    requests = [BoundRequest(f"{at}", *one) for at, one in enumerate(bound)]
    found = rebindings(requests, np.array(batch, float), np.ones(len(batch)), cost)
    return [(one.source, one.target) for one in found]


def test_from_the_fullest_to_the_emptiest_member() -> None:
    assert moves([5, 3, 0], [(0, (0, 1), 10)], 1.0) == [(0, 1)], "2 is no member"
    assert moves([6, 3, 0], [(0, (0, 1), 10), (0, (0, 2), 10)], 1.0) == [(0, 2), (0, 1)]
    assert moves([5, 4, 9], [(0, (0, 1), 10)], 1.0) == [], "another is as full: nothing is gained"
    assert moves([5, 4], [(0, (0, 1), 10)], 1.0) == [], "there it would be one of five again"


def test_only_if_it_is_worth_its_cost() -> None:
    """A second per step, of as many steps as are left."""
    for left, cost, moved in ((10, 9.0, True), (10, 10.0, False), (0, 0.0, False)):
        assert bool(moves([5, 3], [(0, (0, 1), left)], cost)) is moved


def test_where_two_are_equally_full_both_have_to_move() -> None:
    bound = [(0, (0, 2), 10), (1, (1, 2), 10)]
    assert moves([5, 5, 0], bound, 1.0) == [(0, 2), (1, 2)]
    assert moves([5, 5, 0], bound, 6.0) == [], "two cost more than a step of one second less gains"
    assert moves([5, 5, 0], bound[:1], 0.0) == []


class Pool:
    """A conductor with four instances that decode in step, and long contexts spread over them."""

    def __init__(
        self, profile: Profile, seed: int, rebind_s: float | None = None, orders: str = "rebind"
    ) -> None:
        """`rebind_s`: of the settings; None: bindings stay. `orders`: what instances carry out."""
        spreads = {
            "enabled": True,
            "rebind_s": rebind_s or 0.0,
            "rebind_every_s": 0.0 if rebind_s is None else LOOK_S,
            "buckets": [[8_192, 1], [65_536, 2], [262_144, 4]],
        }
        settings = patched(Settings(), {"spread": spreads, "admission": {"mode": "off"}})
        self.core = Conductor(settings, dice=random.Random(seed), profile=lambda name: profile)
        self.clock, self.moved, self.refused = VirtualClock(), 0, 0
        self.orders, self.refuses = orders, random.Random(seed)
        self.group = LockstepGroup(
            *(self.clock, profile, SIZE, 1_000_000, settings.spread.exchange_s), self._ended
        )
        self.core.register(self._spec("p", Role.PREFILL), 0.0)
        for number in range(SIZE):
            self.core.register(self._spec(f"{number}", Role.DECODE), 0.0)
        self.jobs: list[SimRequest] = []
        self.short_elsewhere = False

    def _spec(self, name: str, role: Role) -> InstanceSpec:
        labels = {"orders_url": "simulated", "orders": self.orders}
        profile = latency_profiles.DEFAULT
        return InstanceSpec(name, "m", role, profile, node=f"n{name}", labels=labels)

    def run(self, requests: list[TraceRequest]) -> float:
        """Mean seconds per token."""
        for number, request in enumerate(requests):
            job = SimRequest(f"{number}", request, ())
            self.jobs.append(job)
            self.clock.at(request.arrival_s, lambda job=job: self._arrive(job))  # type: ignore[misc]
        self.clock.at(0.5, self._tick)
        self.clock.run(lambda: any(job.ended_s is None for job in self.jobs))
        gaps_s = [gap for job in self.jobs for gap in job.gaps_s]
        return sum(gaps_s) / len(gaps_s)

    def _arrive(self, job: SimRequest) -> None:
        now, tokens = self.clock.now_s, job.trace.output_tokens
        request = Request(job.name, "m", job.trace.prompt_tokens, output_tokens=tokens)
        decision = self.core.schedule(request, now)
        assert isinstance(decision, Decision)
        for kind in ("prefill_done", "first_token"):
            self.core.observe(RequestEvent(job.name, kind), now)
        shards = decision.shards or ((decision.decode, request.prompt_tokens + tokens),)
        names = [int(name) for name, _ in shards]
        binding = int(decision.decode)
        if self.short_elsewhere and binding:
            job.cut_at(100)
        held = tuple(share for _, share in shards)
        self.group.join(job, Shards(tuple(names), held, binding))

    def _tick(self) -> None:
        now = self.clock.now_s
        for job in self.jobs:
            if job.ended_s is None and job.trace.arrival_s < now:
                self.core.observe(RequestEvent(job.name, "alive"), now)
        for order in self.core.steering.tick(None, now).rebinds:
            self._carry_out(order)
        self.clock.after(LOOK_S, self._tick)

    def _carry_out(self, order: RebindRequest) -> None:
        """The group changes its routes, but now and then an instance does not answer."""
        name, error = order.request_id, "no answer" if self.refuses.random() < 0.05 else ""
        if error:
            self.refused += 1
        else:
            self.moved += 1
            self.group.rebind(name, int(order.target), self.core.settings.spread.rebind_s)
        told_s = self.clock.now_s + ROUTES_S
        self.clock.at(told_s, lambda: self.core.rebinder.ended(name, told_s, error))

    def _ended(self, job: SimRequest) -> None:
        job.ended_s = self.clock.now_s
        self.core.observe(RequestEvent(job.name, "finished"), self.clock.now_s)


def traffic(seed: int) -> list[TraceRequest]:
    """Answers of very different lengths to prompts of 4 to 100 thousand tokens."""
    dice, now, found = random.Random(seed), 0.0, []
    for _ in range(250):
        now += dice.expovariate(8.0)
        prompt = round(2 ** dice.uniform(12, 16.5))
        found.append(TraceRequest(now, prompt, round(2 ** dice.uniform(4, 11))))
    return found


def at_once(seed: int) -> list[TraceRequest]:
    """40 requests of 80 thousand tokens, each on all four instances."""
    dice = random.Random(seed)
    return [TraceRequest(n * 1e-3, 80_000 + dice.randint(0, 100), 2000) for n in range(40)]


def nothing_is_left(pool: Pool) -> bool:
    cluster = pool.core.cluster
    columns = (cluster.own_batch, cluster.own_context_tokens, cluster.heavy)
    left = (pool.group.batch, pool.group.held_tokens, *columns)
    return not any(column.any() for column in left)


def loaded(profile: Profile, seed: int, rebind_s: float | None = None, **more: str) -> Pool:
    """All were to have long answers; those bound to one instance have, the others are short: so
    that one of the four has all that are left."""
    pool = Pool(profile, seed, rebind_s, **more)
    pool.short_elsewhere = True
    return pool


def test_where_one_instance_has_all_the_long_answers_they_are_shared() -> None:
    for profile, gain in ((EXPERTS, 0.85), (DENSE, 0.98)):
        still, moving = loaded(profile, 1), loaded(profile, 1, ROUTES_S)
        still_s, moving_s = still.run(at_once(1)), moving.run(at_once(1))
        assert moving_s < gain * still_s
        assert moving.moved >= 5
        assert nothing_is_left(moving)


def test_where_the_load_is_even_nothing_is_moved() -> None:
    for profile in (EXPERTS, DENSE):
        pool = Pool(profile, 1, ROUTES_S)
        assert pool.run(at_once(1)) == Pool(profile, 1).run(at_once(1))
        assert pool.moved == pool.refused == 0


def test_what_can_not_be_told_is_not_moved() -> None:
    pool = loaded(EXPERTS, 1, ROUTES_S, orders="hand_over")
    assert pool.run(at_once(1)) == loaded(EXPERTS, 1).run(at_once(1))
    assert pool.moved == pool.refused == 0


@pytest.mark.slow
def test_steps_are_shorter_when_bindings_move_and_nothing_is_lost() -> None:
    """By some per cent, where a request in the batch costs something; else nothing is moved."""
    seeds = range(3)
    still = [Pool(EXPERTS, seed).run(traffic(seed)) for seed in seeds]
    pools = [Pool(EXPERTS, seed, ROUTES_S) for seed in seeds]
    moving = [pool.run(traffic(seed)) for seed, pool in zip(seeds, pools, strict=True)]
    assert all(pool.moved > 50 for pool in pools)
    assert sum(moving) < 0.98 * sum(still)
    assert any(pool.refused for pool in pools)
    assert all(map(nothing_is_left, pools))
    costly = Pool(DENSE, 0, 0.025)
    assert costly.run(traffic(0)) == Pool(DENSE, 0).run(traffic(0))
    assert costly.moved == 0
