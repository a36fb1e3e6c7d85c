"""Closed loop: the conductor learns how fast simulated hardware is, and takes no load for it.

The conductor knows a profile, and the simulated hardware is up to 1.4 times as slow. Prompts queue,
share prefixes, are fetched and handed over; batches grow and drain. Whatever the load is, the
factors in force have to be those of the hardware, within 5%.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
from msgspec import structs

from tiffin.bench.sim.cluster.elastic_cluster import ElasticOptions, simulate_elastic
from tiffin.bench.sim.cluster.simulation import SimulationOptions, simulate
from tiffin.bench.sim.instances.prefill_work import slowed
from tiffin.bench.traces.trace import Trace, TraceRequest
from tiffin.conductor.core import Conductor
from tiffin.conductor.cost import latency_profiles
from tiffin.conductor.cost.latency_model import prefill_s
from tiffin.conductor.records import Decision, Rejection, Request, Role

if TYPE_CHECKING:
    from tiffin.conductor.cost.latency_profiles import Profile

PROFILE = latency_profiles.load(latency_profiles.DEFAULT)
# A factor is learnt in steps of 3%; until then it is on its way.
LEARNT_S = 60.0


class Watched(Conductor):
    """Keeps the factors of all instances, as they are in force in their columns."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.seen: list[tuple[float, dict[str, tuple[float, float]]]] = []

    def tick(self, now: float) -> list[str]:
        c = self.cluster
        c1, d0 = PROFILE.prefill[1], PROFILE.decode[0]
        rows = {name: c.row(name) for name in c.names}
        found = {name: (float(c.c1[row] / c1), float(c.d0[row] / d0)) for name, row in rows.items()}
        self.seen.append((now, found))
        return super().tick(now)

    def learnt(self, role: Role) -> list[tuple[str, float]]:
        """All factors that instances had for the work of `role`, after `LEARNT_S`."""
        return [
            (name, factors[role is Role.DECODE])
            for now, found in self.seen
            for name, factors in found.items()
            if now >= LEARNT_S and name.startswith((role, "instance"))
        ]


def trace(rate: float, seconds: float, drain_s: float = 0.0) -> Trace:
    """Conversations; in the last `drain_s` seconds, few requests come."""
    dice, at_s, requests, before = random.Random(5), 0.0, [], [(0,)]
    while at_s < seconds + drain_s:
        at_s += dice.expovariate(rate if at_s < seconds else rate / 15)
        shared = dice.choice(before[-50:]) if dice.random() < 0.5 else ()
        new = range(len(requests) * 100 + 1, len(requests) * 100 + dice.randint(2, 12))
        blocks = (*shared[: dice.randint(0, len(shared))], *new)
        before.append(blocks)
        prompt, answer = len(blocks) * 512 - 100, dice.randint(50, 400)
        requests.append(TraceRequest(at_s, prompt, answer, blocks))
    return Trace("conversations", tuple(requests))


def learnt(prefill: float, decode: float, load: Trace, **options: Any) -> Watched:
    """A conductor that has seen hardware that is slower than its profile."""
    made: list[Watched] = []

    def core(options: SimulationOptions, profiles: object) -> Conductor:
        made.append(Watched(settings=options.settings(), dice=random.Random(1)))
        return made[0]

    def profiles(name: str) -> Profile:
        return slowed(latency_profiles.load(name), prefill, decode)

    given = SimulationOptions(prefill=4, decode=2, **options)
    simulate(load, given, core=core, profiles=profiles)
    return made[0]


STEADY, OVERLOAD, DRAIN = trace(4.0, 100.0), trace(9.0, 80.0), trace(9.0, 60.0, drain_s=80.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("load", "options", "prefill", "decode"),
    [
        (STEADY, {}, 1.0, 1.0),
        (STEADY, {}, 1.4, 1.0),
        (STEADY, {}, 1.0, 1.4),
        (STEADY, {"layerwise": True}, 1.0, 1.0),
        (STEADY, {"load_late_s": 3.0, "load_noise": 0.3}, 1.4, 1.4),
        (STEADY, {"bandwidth_bytes_s": 1.5e9}, 1.0, 1.0),  # hand-overs take seconds
        (STEADY, {"bandwidth_bytes_s": 1.5e9}, 1.4, 1.4),
        (OVERLOAD, {}, 1.0, 1.0),  # more than can be served
        (OVERLOAD, {}, 1.4, 1.4),
        (DRAIN, {}, 1.0, 1.0),
        (DRAIN, {}, 1.4, 1.4),
    ],
)
def test_what_is_learnt_is_the_hardware(
    load: Trace, options: dict[str, Any], prefill: float, decode: float
) -> None:
    made = learnt(prefill, decode, load, **options)
    for role, truth in ((Role.PREFILL, prefill), (Role.DECODE, decode)):
        factors = made.learnt(role)
        assert len({name for name, _ in factors}) == (4 if role is Role.PREFILL else 2)
        for _, factor in factors:
            assert factor == pytest.approx(truth, rel=0.05)


@pytest.mark.slow
def test_noise_is_averaged() -> None:
    """Times that vary by 10%: nineteen of twenty factors are within 5%."""
    made = learnt(1.4, 1.4, trace(4.0, 200.0), noise=0.1)
    factors = [factor for _, factor in made.learnt(Role.PREFILL)]
    near = [factor for factor in factors if factor == pytest.approx(1.4, rel=0.05)]
    assert len(near) >= 0.95 * len(factors)


def test_what_is_not_a_multiple_is_learnt_too() -> None:
    """Each prefill takes 0.2 s more than by the profile: as much again as that of a short one."""
    c0, c1, c2 = PROFILE.prefill

    def core(options: SimulationOptions, profiles: object) -> Conductor:
        made.append(Watched(settings=options.settings(), dice=random.Random(1)))
        return made[0]

    def profiles(name: str) -> Profile:
        return structs.replace(latency_profiles.load(name), prefill=(c0 + 0.2, c1, c2))

    made: list[Watched] = []
    simulate(STEADY, SimulationOptions(prefill=4, decode=2), core=core, profiles=profiles)
    cluster = made[0].cluster
    for row in [cluster.row(f"prefill-{number}") for number in range(4)]:
        found = [float(column[row]) for column in (cluster.c0, cluster.c1, cluster.c2)]
        for tokens, cached in ((924, 0), (3000, 2500), (3000, 0), (6000, 5000), (6000, 0)):
            real_s = prefill_s(c0 + 0.2, c1, c2, tokens, cached)
            assert prefill_s(*found, tokens, cached) == pytest.approx(real_s, rel=0.1)


class Placed(Conductor):
    """Keeps where prompts are computed."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.at: list[str] = []

    def schedule(self, request: Request, now: float) -> Decision | Rejection:
        decided = super().schedule(request, now)
        if isinstance(decided, Decision) and now >= LEARNT_S:
            self.at.append(decided.prefill)
        return decided


def test_noise_does_not_choose_between_equals() -> None:
    """Of two alike that idle, one looks a little faster for as long as it is not asked more."""
    shares = []
    for seed in range(3):
        dice, made = random.Random(seed), []

        def core(options: SimulationOptions, profiles: object) -> Conductor:
            made.append(Placed(settings=options.settings(), dice=random.Random(1)))  # noqa: B023
            return made[0]  # noqa: B023

        new = [TraceRequest(3.0 * at, dice.randint(600, 6000), 100, ()) for at in range(200)]
        options = SimulationOptions(prefill=2, decode=1, noise=0.2)
        simulate(Trace("new", tuple(new)), options, core=core, profiles=latency_profiles.load)
        shares.append(made[0].at.count("prefill-0") / len(made[0].at))
    assert all(0.3 < share < 0.7 for share in shares), shares


@pytest.mark.slow
def test_one_that_is_slow_is_known_and_the_others_are_not_blamed() -> None:
    made = learnt(1.0, 1.0, trace(5.0, 120.0), slowness={"prefill-1": 1.4})
    for name, factor in made.learnt(Role.PREFILL):
        assert factor == pytest.approx(1.4 if name == "prefill-1" else 1.0, rel=0.05)


@pytest.mark.parametrize(("prefill", "decode"), [(1.0, 1.0), (1.4, 1.4), (1.4, 1.0), (1.0, 1.4)])
@pytest.mark.parametrize("rate", [1.0, 2.5], ids=["light", "steady"])
def test_what_does_both_is_told_apart(prefill: float, decode: float, rate: float) -> None:
    """Instances that compute prompts between the steps of their decodes, which thus take longer."""
    made: list[Watched] = []

    def core(options: ElasticOptions) -> Conductor:
        made.append(Watched(settings=options.settings(), dice=random.Random(1)))
        return made[0]

    options = ElasticOptions(instances={Role.MIXED: 3})
    simulate_elastic(
        trace(rate, 150.0),
        options,
        core=core,
        profiles=lambda name: slowed(latency_profiles.load(name), prefill, decode),
    )
    for role, truth in ((Role.PREFILL, prefill), (Role.DECODE, decode)):
        factors = [factor for _, factor in made[0].learnt(role)]
        near = [factor for factor in factors if factor == pytest.approx(truth, rel=0.05)]
        assert len(near) >= 0.95 * len(factors)
