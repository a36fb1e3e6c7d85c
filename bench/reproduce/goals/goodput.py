"""Goodput of the conversation trace: the highest rate at which 90% of its requests have a first
token within 30 s and times between tokens within 100 ms.

Half of the nodes prefill; beside that stands the default policy with the roles that the planner's
formulas give the same nodes. Nobody is refused: a refused request would be one that missed its
objectives. The baselines that prefill and decode on the same GPUs are those of Mooncake's
evaluation, vLLM's modes on as many nodes. It is the first ten minutes of the trace, and half an
hour with the full effort.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ...sim.cluster.colocated import ColocatedOptions, simulate_colocated, summarise_colocated
from ...sim.cluster.oracle import POLICY as ORACLE
from ...sim.cluster.simulation import SimulationOptions
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
    from ...sim.instances.engine_options import EngineOptions
    from ...traces.trace import Trace
    from ..registry import Tell

POLICIES = tuple(dict.fromkeys((DEFAULT, "joint", ALGORITHM_1, ORACLE)))
PLANNED = f"{DEFAULT}, roles as planned"
OVER_ALGORITHM_1, OVER_COLOCATED = 1.15, 3.0

_ROLES = """With half of the nodes decoding, steps are far below 100 ms at any of these rates, and
only the queues of prompts end the goodput: there the oracle is no better than Algorithm 1, so no
placement is. What gains is another split of the roles: "roles as planned" has the one that the
planner's formulas give, which the conductor gets to by role flips."""

OPTIONS = SimulationOptions(ttft_s=TTFT_S, tbt_s=TBT_S)


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


@reproduction(
    "goals-goodput",
    "Goals: goodput of conversations",
    "no paper; Mooncake's Algorithm 1, and vLLM as in FAST '25, section 5.2",
)
def conversations(effort: Effort, tell: Tell) -> Evidence:
    """Of all policies and of all engines."""
    found: dict[str, list[float]] = {}
    # The trace itself, then those like it.
    seeds = (None, *effort.seeds) if effort.is_full else (None,)
    for seed in seeds:
        whole = conversation() if seed is None else look_alike(conversation(), seed)
        trace = window(whole, 0.0, lasts_s(effort))
        for policy in POLICIES:
            tell(f"seed {seed}, {policy}")
            options = replace(OPTIONS, seed=seed or 0)
            found.setdefault(policy, []).append(goodput(trace, options, policy))
        roles = replace(planned(trace), seed=seed or 0)
        tell(f"seed {seed}, {PLANNED}")
        found.setdefault(PLANNED, []).append(goodput(trace, roles, DEFAULT))
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
    return Evidence(goals=goals, grids=(table,), notes=(_ROLES,))


def _cell(rates: dict[str, Interval], other: str, least: float) -> Cell:
    ours, theirs = rates[DEFAULT].mean, rates[other].mean
    figure = f"{ours:.2f}/s, {ours / theirs:.2f} × {theirs:.2f}/s"
    return Cell(f"{DEFAULT} and {other}", least * theirs / ours, figure)
