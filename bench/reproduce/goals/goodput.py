"""Goodput of the conversation trace: the highest rate at which 90% of its requests have a first
token within 30 s and times between tokens within 100 ms.

Half of the nodes prefill at first. `planner acting` is the whole system: the planner flips roles
while the trace runs, all settings but its mode are those that the conductor comes with. What comes
before the judged requests makes it flip, the first forty minutes of the trace, at nine tenths of
the rate that as many nodes could prefill. All that disaggregates gets these first, so caches are
warm everywhere, and none of them counts; then the judged ones come, ten minutes of the trace or,
with the full effort, what is left of it, at the rate that is looked for. `roles as planned` begins
with the roles that the planner's formulas give for what comes before, for the default policy and
for Algorithm 1.

Nobody is refused: a refused request would be one that missed its objectives. The baselines that
prefill and decode on the same GPUs are those of Mooncake's evaluation, vLLM's modes on as many
nodes. They begin idle and with empty caches: they can't serve the rate of what comes before.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ...sim.cluster.colocated import ColocatedOptions, simulate_colocated, summarise_colocated
from ...sim.cluster.options import SHIPPED
from ...sim.cluster.oracle import POLICY as ORACLE
from ...sim.results.goodput import highest_rate
from ...traces.look_alike import look_alike
from ...traces.scaling import at_rate, window
from ..evidence import Evidence, Grid
from ..registry import Effort, reproduction
from ..setups.contest import Interval, goodput
from ..setups.fleets import TBT_S, TTFT_S, decode_rate, prefill_rate
from ..setups.inputs import conversation
from ..setups.judged import Cell, judged
from ..setups.mooncake_systems import ENGINES, NODES
from .first_tokens import ALGORITHM_1, DEFAULT, lasts_s

if TYPE_CHECKING:
    from ...sim.cluster.simulation import SimulationOptions
    from ...sim.instances.engine_options import EngineOptions
    from ...traces.trace import Trace
    from ..registry import Tell

ACTING = f"{DEFAULT}, planner acting"
PLANNED = "{}, roles as planned"
OVER_ALGORITHM_1, OVER_COLOCATED = 1.15, 3.0
# Beside the trace itself, with the full effort. Each takes a quarter of an hour.
LOOK_ALIKES = 3
# Of the trace, in its own time, before what is judged.
WARM_UP_S = 2400.0
# Of the rate that half of the nodes can prefill: queues stay short, and flips are due.
WARM_UP_SHARE = 0.9

_ROLES = """With half of the nodes decoding, steps are far below 100 ms at any of these rates, and
only the queues of prompts end the goodput: there the oracle is no better than Algorithm 1, so no
placement is. What gains is another split of the roles, which the planner's flips bring about, and
given that split from the start, Algorithm 1 gains about as much: so the planner is what is compared
here. It takes its time: a flip has to be asked for in three intervals of three minutes, and the
next one comes ten minutes after it at the earliest. In ten minutes of the trace nothing would
flip, and with what comes before two do, so that ten prefill. At these rates ten minutes of the
trace pass in three to five, in which queues may grow to the objective: rates that last are lower,
for all."""

OPTIONS = replace(SHIPPED, ttft_s=TTFT_S, tbt_s=TBT_S)


def colocated_goodput(trace: Trace, engine: EngineOptions) -> float:
    """Requests per second that engines of one kind serve with the objectives met."""
    options = ColocatedOptions(NODES, engine, ttft_s=TTFT_S, tbt_s=TBT_S)

    def attained(factor: float) -> float:
        faster = at_rate(trace, factor)
        share = summarise_colocated(faster, simulate_colocated(faster, options)).attained
        assert share is not None, "there are objectives"
        return share

    return highest_rate(attained, start=0.5, precision=0.05) * trace.rate


def planned(trace: Trace) -> SimulationOptions:
    """As many of the nodes prefill as serve the most requests, by the planner's formulas."""
    splits = [
        replace(OPTIONS, prefill=prefill, decode=NODES - prefill) for prefill in range(1, NODES)
    ]
    return max(
        splits, key=lambda options: min(prefill_rate(trace, options), decode_rate(trace, options))
    )


def systems(warm_up: Trace) -> dict[str, tuple[str, SimulationOptions]]:
    """By name, the policy and the cluster of what disaggregates."""
    roles = planned(warm_up)
    return {
        ACTING: (DEFAULT, replace(OPTIONS, planner="act")),
        **{PLANNED.format(policy): (policy, roles) for policy in (DEFAULT, ALGORITHM_1)},
        **{policy: (policy, OPTIONS) for policy in (DEFAULT, ALGORITHM_1, ORACLE)},
    }


def warmed_up(whole: Trace) -> Trace:
    """What comes before, at its rate."""
    first = window(whole, 0.0, WARM_UP_S)
    return at_rate(first, WARM_UP_SHARE * prefill_rate(first, OPTIONS) / first.rate)


@reproduction(
    "goals-goodput",
    "Goals: goodput of conversations",
    "no paper; Mooncake's Algorithm 1, and vLLM as in FAST '25, section 5.2",
)
def conversations(effort: Effort, tell: Tell) -> Evidence:
    """Of the planner, of policies and of engines."""
    found: dict[str, list[float]] = {}
    # The trace itself, then those like it.
    seeds = (None, *effort.seeds[:LOOK_ALIKES]) if effort.is_full else (None,)
    for seed in seeds:
        whole = conversation() if seed is None else look_alike(conversation(), seed)
        warm_up = warmed_up(whole)
        trace = window(whole, WARM_UP_S, WARM_UP_S + lasts_s(effort))
        for name, (policy, options) in systems(warm_up).items():
            tell(f"seed {seed}, {name}")
            rate = goodput(trace, replace(options, seed=seed or 0), policy, warm_up)
            found.setdefault(name, []).append(rate)
        for name, engine in ENGINES.items():
            tell(f"seed {seed}, {name}")
            found.setdefault(name, []).append(colocated_goodput(trace, engine))
    rates = {name: Interval.of(values) for name, values in found.items()}
    best = max(ENGINES, key=lambda name: rates[name].mean)
    goals = tuple(
        judged(
            f"goodput at TBT ≤ {TBT_S * 1e3:.0f} ms ≥ {least:g} × that of {what}",
            [_cell(rates, other, least)],
        )
        for other, least, what in (
            (ALGORITHM_1, OVER_ALGORITHM_1, "Algorithm 1"),
            (best, OVER_COLOCATED, "the best colocated baseline"),
        )
    )
    order = sorted(rates, key=lambda name: rates[name].mean, reverse=True)
    rows = tuple((name, rates[name].shown(".2f")) for name in order)
    table = Grid("Goodput of conversations", ("scheduler", "requests/s"), rows)
    return Evidence(goals=goals, grids=(table,), notes=(_ROLES,), settings=OPTIONS.shown)


def _cell(rates: dict[str, Interval], other: str, least: float) -> Cell:
    ours, theirs = rates[ACTING].mean, rates[other].mean
    figure = f"{ours:.2f}/s, {ours / theirs:.2f} × {theirs:.2f}/s"
    return Cell(f"{ACTING}, and {other}", least * theirs / ours, figure)
