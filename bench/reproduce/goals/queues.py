"""What the queue's order gives, and what it costs to hold requests back until their turn.

Two instances that prefill, prompts of log-normal lengths (4,800 tokens in the median) that share
nothing, at random times for ten minutes. All that the conductor hears, and all that it releases, is
0.1 s late. "sent at once": engines compute prompts in order of arrival; "instances ask": each asks
before a prefill which one is next; "held": the conductor releases them, some ahead. To look ahead
is to release one more when all that is ahead should end soon (`ahead_s`). The last table is of one
instance that gets 300 requests at once.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from tiffin.conductor.core import Conductor
from tiffin.conductor.core.settings import patched
from tiffin.conductor.cost import latency_profiles

from ...sim.cluster.simulation import SimulationOptions, simulate
from ...sim.instances.prefill_work import prefill_work
from ...traces.trace import Trace, TraceRequest
from ..evidence import Evidence, Grid, Statement
from ..registry import Effort, reproduction

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from tiffin.conductor.prefill.fairness import Order

    from ...sim.cluster.simulation import Profiles
    from ...sim.instances.sim_request import SimRequest
    from ..registry import Tell

CLASSES = ("high", "normal", "low")
SPAN_S = 600.0
MEDIAN_TOKENS, SIGMA = 4800, 1.0
OUTPUT_TOKENS = 20
ORDERS: tuple[tuple[Order, float], ...] = (
    ("fcfs", 10.0),
    ("shortest-first", 10.0),
    ("shortest-first", 60.0),
    ("longest-first", 60.0),
)
# Of prefill time; above 1 a queue grows as long as requests come.
OVERLOAD, BUSY = 1.15, 0.9
# Of the requests, those of the high class, or of the tenant that does not flood.
FEW_SHARE = 0.1
# Of prompts that come all at once.
MEDIANS = (MEDIAN_TOKENS, MEDIAN_TOKENS // 8)
AT_ONCE_REQUESTS = 300

_SOURCE = "no paper; the queues of the conductor"
_AHEAD = """One ahead without looking ahead costs a round trip for each prompt. With both, only a
prompt does that ends sooner than it was predicted to."""

TWO = SimulationOptions(
    prefill=2,
    decode=2,
    priority=lambda asked: asked.tenant if asked.tenant in CLASSES else "normal",
)
HELD = replace(TWO, order="held")
AT_ONCE, DEFAULT = "sent at once", "held"
WAYS = {
    AT_ONCE: TWO,
    "instances ask": replace(TWO, order="conductor"),
    DEFAULT: HELD,
    "held, 1 ahead": replace(HELD, ahead_max=1),
    "held, 1 ahead, no look ahead": replace(HELD, ahead_max=1, ahead_s=0.0),
    "held, 2 ahead, no look ahead": replace(HELD, ahead_max=2, ahead_s=0.0),
    "held, 4 ahead, no look ahead": replace(HELD, ahead_max=4, ahead_s=0.0),
}


@dataclass(frozen=True, slots=True)
class Times:
    """Of TTFT, in seconds; means over the seeds."""

    mean: float
    p99: float

    @classmethod
    def of(cls, runs: Iterable[Iterable[SimRequest]], tenant: str) -> Times:
        """Of a tenant's jobs that were served, in all runs."""
        found = [
            [job.ttft_s for job in jobs if job.ttft_s is not None and job.trace.tenant == tenant]
            for jobs in runs
        ]
        p99s = [np.quantile(times, 0.99) for times in found]
        return cls(float(np.mean([np.mean(times) for times in found])), float(np.mean(p99s)))

    @property
    def cells(self) -> tuple[str, str]:
        """For a table."""
        return f"{self.mean:.1f}", f"{self.p99:.1f}"


def work_s(asked: Iterable[TraceRequest]) -> float:
    """GPU seconds of their prefills."""
    profile = latency_profiles.load(TWO.profile)
    return sum(prefill_work(profile, one.prompt_tokens, 0, 0, 1).gpu_s for one in asked)


def arrivals(seed: int, load: float, tenant: Callable[[random.Random], str]) -> Trace:
    """Requests of log-normal lengths at random times, which take `load` of both instances."""
    dice = random.Random(seed)
    share_s, found = 0.0, list[TraceRequest]()
    while share_s < load * TWO.prefill * SPAN_S:
        tokens = max(256, round(dice.lognormvariate(np.log(MEDIAN_TOKENS), SIGMA)))
        one = TraceRequest(dice.uniform(0.0, SPAN_S), tokens, OUTPUT_TOKENS, tenant=tenant(dice))
        share_s += work_s([one])
        found.append(one)
    return Trace("arrivals", tuple(sorted(found, key=lambda one: one.arrival_s)))


def under_overload(
    ways: Iterable[str], tenants: tuple[str, str], seeds: Iterable[int], tell: Tell
) -> dict[str, tuple[Times, Times]]:
    """By way, the times of two tenants under overload, of which the first sends a tenth."""

    def tenant(dice: random.Random) -> str:
        return tenants[dice.random() >= FEW_SHARE]

    found = {}
    for way in ways:
        tell(f"{tenants[0]} and {tenants[1]}, {way}")
        runs = [
            simulate(arrivals(seed, OVERLOAD, tenant), replace(WAYS[way], seed=seed)).jobs
            for seed in seeds
        ]
        few, many = (Times.of(runs, name) for name in tenants)
        found[way] = (few, many)
    return found


def by_order(seeds: Iterable[int], tell: Tell) -> dict[tuple[Order, float], Times]:
    """By the order within a tenant, and how long others may be passed in it."""
    found = {}
    for order, aging_s in ORDERS:
        tell(f"{order}, {aging_s:g} s")
        runs = []
        for seed in seeds:
            options = replace(HELD, queue_order=order, seed=seed)
            trace = arrivals(seed, BUSY, lambda dice: "")
            runs.append(simulate(trace, options, core=_ageing(aging_s)).jobs)
        found[order, aging_s] = Times.of(runs, "")
    return found


def _ageing(aging_s: float) -> Callable[[SimulationOptions, Profiles], Conductor]:
    def core(options: SimulationOptions, profiles: Profiles) -> Conductor:
        settings = patched(options.settings(), {"queue": {"aging_s": aging_s}})
        return Conductor(settings, dice=random.Random(options.seed), profile=profiles)

    return core


def idle_shares(seeds: Iterable[int], tell: Tell) -> dict[str, list[float]]:
    """By way, the share of the time until all is done in which the instance stands still; for each
    of `MEDIANS`."""
    found: dict[str, list[float]] = {}
    for way, options in WAYS.items():
        tell(f"300 at once, {way}")
        found[way] = [
            float(np.mean([_idle_share(replace(options, seed=seed), median) for seed in seeds]))
            for median in MEDIANS
        ]
    return found


def _idle_share(options: SimulationOptions, median_tokens: int) -> float:
    dice = random.Random(options.seed)
    asked = tuple(
        TraceRequest(0.0, max(64, round(dice.lognormvariate(np.log(median_tokens), SIGMA))), 2)
        for _ in range(AT_ONCE_REQUESTS)
    )
    jobs = simulate(Trace("at once", asked), replace(options, prefill=1)).jobs
    return 1 - work_s(asked) / max(job.first_token_s or 0.0 for job in jobs)


@reproduction("queues", "Queues: classes, tenants, orders, and what holding costs", _SOURCE)
def queues(effort: Effort, tell: Tell) -> Evidence:
    """Two tenants under overload, orders of a busy queue, and an instance with much to do."""
    seeds = effort.seeds
    classes = under_overload(WAYS, ("high", "low"), seeds, tell)
    tenants = under_overload((AT_ONCE, DEFAULT), ("small", "flooding"), seeds, tell)
    orders = by_order(seeds, tell)
    idle = idle_shares(seeds, tell)
    each_s = [work_s([TraceRequest(0.0, median, 1)]) for median in MEDIANS]
    load = f"TTFT in s, {OVERLOAD:.0%} load, a tenth of it"
    grids = (
        _of_two(f"{load} of a high class", classes, ("high", "low")),
        _of_two(f"{load} of a small tenant", tenants, ("small", "flooding")),
        Grid(
            f"TTFT in s, {BUSY:.0%} load, one tenant",
            ("order", "aging_s", "mean", "p99"),
            tuple((order, f"{s:g}", *times.cells) for (order, s), times in orders.items()),
        ),
        Grid(
            "time in which an instance that has work stands still",
            ("", *(f"prompts of {seconds:.2f} s" for seconds in each_s)),
            tuple((way, *(f"{share:.1%}" for share in found)) for way, found in idle.items()),
        ),
    )
    return Evidence(statements=_said(classes, tenants, orders, idle), grids=grids, notes=(_AHEAD,))


def _of_two(title: str, found: dict[str, tuple[Times, Times]], tenants: tuple[str, str]) -> Grid:
    columns = ("", *(f"{name}, {what}" for name in tenants for what in ("mean", "p99")))
    rows = tuple((way, *few.cells, *many.cells) for way, (few, many) in found.items())
    return Grid(title, columns, rows)


def _said(
    classes: dict[str, tuple[Times, Times]],
    tenants: dict[str, tuple[Times, Times]],
    orders: dict[tuple[Order, float], Times],
    idle: dict[str, list[float]],
) -> tuple[Statement, ...]:
    said = []
    for who, found in (("the high class", classes), ("the small tenant", tenants)):
        few, at_once = found[DEFAULT][0].mean, found[AT_ONCE][0].mean
        text = f"held, {who} waits for a tenth of what it waits where all is sent at once, at most"
        said.append(Statement(text, few <= 0.1 * at_once, f"{few:.1f} s, {at_once:.1f} s"))
        many, before = found[DEFAULT][1].mean, found[AT_ONCE][1].mean
        text = f"and costs the others a sixth more at most ({who})"
        said.append(Statement(text, many <= 7 / 6 * before, f"{many:.1f} s, {before:.1f} s"))
    short, fcfs = orders["shortest-first", 60.0].mean, orders["fcfs", 10.0].mean
    text = "short prompts that may pass others for a minute halve the mean"
    said.append(Statement(text, short <= 0.5 * fcfs, f"{short:.1f} s, {fcfs:.1f} s"))
    still = max(idle[DEFAULT])
    text = "held, an instance that has work stands still for 0.5% of the time at most"
    said.append(Statement(text, still <= 0.005, f"{still:.1%}"))
    return tuple(said)
