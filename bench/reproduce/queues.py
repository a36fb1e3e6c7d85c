"""What each order of the queue gives, and what holding requests costs, in the simulator.

`python -m tiffin.bench.reproduce.queues [SEEDS]` prints the tables of docs/conductor/queues.md. All
that the conductor hears, and all that it releases, is 0.1 s late; prompts share nothing.
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.table import Table

from tiffin.conductor.core import Conductor
from tiffin.conductor.core.settings import patched
from tiffin.conductor.cost import latency_profiles

from ..sim.cluster.simulation import SimulationOptions, simulate
from ..sim.instances.prefill_work import prefill_work
from ..traces.trace import Trace, TraceRequest
from .evidence import Grid

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from tiffin.conductor.prefill.fairness import Order

    from ..sim.cluster.simulation import Profiles
    from ..sim.instances.sim_request import SimRequest

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
HIGH_SHARE = 0.1
# Of all prefill time, what the tenant that is not flooding asks for.
SMALL_SHARE = 0.1

TWO = SimulationOptions(
    prefill=2,
    decode=2,
    priority=lambda asked: asked.tenant if asked.tenant in CLASSES else "normal",
)
HELD = replace(TWO, order="held")
WAYS = {
    "sent at once": TWO,
    "instances ask": replace(TWO, order="conductor"),
    "held": HELD,
    "held, 1 ahead": replace(HELD, ahead_max=1),
    "held, 1 ahead, no look ahead": replace(HELD, ahead_max=1, ahead_s=0.0),
    "held, 2 ahead, no look ahead": replace(HELD, ahead_max=2, ahead_s=0.0),
    "held, 4 ahead, no look ahead": replace(HELD, ahead_max=4, ahead_s=0.0),
}


@dataclass(frozen=True, slots=True)
class Times:
    """Of TTFT, in seconds."""

    mean: float
    p99: float

    @classmethod
    def of(cls, jobs: Iterable[SimRequest], tenant: str = "") -> Times:
        """Of all jobs that were served, or of a tenant's."""
        times = [
            job.ttft_s
            for job in jobs
            if job.ttft_s is not None and (not tenant or job.trace.tenant == tenant)
        ]
        return cls(float(np.mean(times)), float(np.quantile(times, 0.99)))


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


def _mean(values: Iterable[float]) -> str:
    return f"{np.mean(list(values)):.2f}"


def priorities(seeds: Iterable[int]) -> Grid:
    """A high class under a flood of a low one."""
    title = f"TTFT in s, {OVERLOAD:.0%} load, a tenth of it of the high class"
    return _two(title, WAYS, seeds, ("high", "low"), HIGH_SHARE)


def tenants(seeds: Iterable[int]) -> Grid:
    """A tenant that floods, and a small one."""
    ways = {name: WAYS[name] for name in ("sent at once", "held")}
    title = f"TTFT in s of two tenants, {OVERLOAD:.0%} load"
    return _two(title, ways, seeds, ("small", "flooding"), SMALL_SHARE)


def _two(
    title: str,
    ways: Mapping[str, SimulationOptions],
    seeds: Iterable[int],
    tenants: tuple[str, str],
    share: float,
) -> Grid:
    """The times of two tenants under overload, of which the first sends a `share`."""

    def tenant(dice: random.Random) -> str:
        return tenants[dice.random() >= share]

    rows = []
    for name, options in ways.items():
        runs = [simulate(arrivals(s, OVERLOAD, tenant), replace(options, seed=s)) for s in seeds]
        cells = [
            _mean(getattr(Times.of(run.jobs, who), what) for run in runs)
            for who in tenants
            for what in ("mean", "p99")
        ]
        rows.append((name, *cells))
    columns = ("", *(f"{who}, {what}" for who in tenants for what in ("mean", "p99")))
    return Grid(title, columns, tuple(rows))


def orders(seeds: Iterable[int]) -> Grid:
    """The order within a tenant, and how long short prompts may pass a long one."""
    rows = []
    for order, aging_s in ORDERS:
        found = []
        for seed in seeds:
            options = replace(HELD, queue_order=order, seed=seed)
            trace = arrivals(seed, BUSY, lambda dice: "")
            found.append(Times.of(simulate(trace, options, core=_ageing(aging_s)).jobs))
        figures = (_mean(one.mean for one in found), _mean(one.p99 for one in found))
        rows.append((order, f"{aging_s:g} s", *figures))
    columns = ("", "aging_s", "mean", "p99")
    return Grid(f"TTFT in s by order, {BUSY:.0%} load", columns, tuple(rows))


def _ageing(aging_s: float) -> Callable[[SimulationOptions, Profiles], Conductor]:
    def core(options: SimulationOptions, profiles: Profiles) -> Conductor:
        settings = patched(options.settings(), {"queue": {"aging_s": aging_s}})
        return Conductor(settings, dice=random.Random(options.seed), profile=profiles)

    return core


def idle(seeds: Iterable[int]) -> Grid:
    """All requests at once, for one instance: how long it stands still until the last is done."""
    rows = []
    for name, options in WAYS.items():
        shares = []
        for tokens in (MEDIAN_TOKENS, MEDIAN_TOKENS // 8):
            found = []
            for seed in seeds:
                dice = random.Random(seed)
                asked = tuple(
                    TraceRequest(0.0, max(64, round(dice.lognormvariate(np.log(tokens), SIGMA))), 2)
                    for _ in range(300)
                )
                one = replace(options, prefill=1, seed=seed)
                jobs = simulate(Trace("at once", asked), one).jobs
                last_s = max(job.first_token_s or 0.0 for job in jobs)
                found.append(1 - work_s(asked) / last_s)
            shares.append(f"{np.mean(found):.1%}")
        rows.append((name, *shares))
    each_s = [work_s([TraceRequest(0.0, n, 1)]) for n in (MEDIAN_TOKENS, MEDIAN_TOKENS // 8)]
    columns = ("", *(f"prompts of {seconds:.2f} s" for seconds in each_s))
    return Grid("time in which an instance that has work stands still", columns, tuple(rows))


def main(seeds: int) -> None:
    """Print all tables."""
    console = Console()
    for find in (priorities, orders, tenants, idle):
        grid = find(range(seeds))
        table = Table(*grid.columns, title=grid.title)
        for row in grid.rows:
            table.add_row(*row)
        console.print(table)


if __name__ == "__main__":
    main(int(sys.argv[1]) if sys.argv[1:] else 5)
