"""What it is worth that the conductor knows the blocks in nodes, where engines keep few themselves.

Engines have room for 250,000 tokens in HBM, their nodes for 3 million each. Four systems with the
same engines:

    key spaces       the conductor knows what engines and nodes have
    events alone     it knows what engines have: it can't name the blocks in nodes, and plans as if
                     nothing were there; engines find all the same what their node has
    round robin      engines and nodes find what they have, and nobody looks where
    without a pool   round robin, and engines have their own cache alone

Times to the first token at half of the rate at which Algorithm 1 saturates, and the rate at which
nine of ten have their first token in time.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ...sim.cluster.options import SHIPPED
from ...sim.cluster.simulation import simulate
from ...sim.results.goodput import highest_rate
from ...sim.results.outcomes import attained_share, summarise
from ...traces.scaling import at_rate, window
from ..evidence import Evidence, Grid
from ..registry import Effort, reproduction
from ..setups.inputs import conversation
from ..setups.judged import Cell, judged
from ..setups.saturation import saturating_factor
from .first_tokens import ALGORITHM_1, DEFAULT, HALF, lasts_s
from .networks import card

if TYPE_CHECKING:
    from ...sim.cluster.options import SimulationOptions
    from ...sim.results.outcomes import Summary
    from ...traces.trace import Trace
    from ..registry import Tell

KNOWN, EVENTS, ROBIN, NO_POOL = WAYS = (
    "key spaces", "events alone", "round robin", "without a pool",
)  # fmt: skip
ENGINE_TOKENS = 250_000
GIGABITS = (24, 100)
BETTER = 1.15
TTFT_S = 10.0

_REFUSED = """Where more comes than can be served in time, admission by prediction refuses the
longest prompts, which are most of the work and few of the requests: at 1.5 times saturation all
systems have 6.9 to 7.4 requests in time per second, with key spaces 1.02 times as many as with
events alone."""

Found = dict[str, dict[str, "Summary"]]  # by place, by way


def system(way: str, gigabits: float) -> SimulationOptions:
    """The cluster of one of `WAYS`."""
    options = replace(card(gigabits), hbm_cache_tokens=ENGINE_TOKENS, policy=DEFAULT)
    if way in (ROBIN, NO_POOL):
        options = replace(options, policy="round_robin", order="arrival")
    if way == NO_POOL:
        options = replace(options, cache_tokens=0)
    return replace(options, knows_nodes=way != EVENTS)


@reproduction(
    "goals-key-spaces",
    "Goals: what the conductor knows of nodes' blocks",
    "no paper; the same engines without it, and without a pool",
)
def key_spaces(effort: Effort, tell: Tell) -> Evidence:
    """At half load, near saturation, and above it."""
    part = window(conversation(), 0.0, lasts_s(effort))
    half: Found = {}
    rates: dict[str, dict[str, float]] = {}
    for gigabits in GIGABITS:
        place = f"{gigabits} Gb/s"
        options = replace(system(KNOWN, gigabits), order="arrival", policy=ALGORITHM_1)
        trace = at_rate(part, HALF * saturating_factor(part, options))
        half[place], rates[place] = {}, {}
        for way in WAYS:
            options = system(way, gigabits)
            tell(f"{place}, {way}, half load")
            half[place][way] = summarise(trace, simulate(trace, options))
            tell(f"{place}, {way}, goodput")
            rates[place][way] = _goodput(part, options)
    means = {at: {way: one.ttft_s.mean for way, one in ways.items()} for at, ways in half.items()}
    goals = [
        judged(
            f"mean TTFT at half load ≤ that with {other} / {BETTER:g}",
            [_cell(at, ways[other], ways[KNOWN]) for at, ways in means.items()],
        )
        for other in (EVENTS, ROBIN)
    ] + [
        judged(
            f"goodput at TTFT ≤ {TTFT_S:g} s ≥ {BETTER:g} × that with {other}",
            [_cell(at, ways[KNOWN], ways[other]) for at, ways in rates.items()],
        )
        for other in (EVENTS, ROBIN)
    ]
    columns = ("cards", "system", "TTFT mean, s", "p50", "p99", "found")
    in_time = tuple((at, *(f"{ways[way]:.2f}" for way in WAYS)) for at, ways in rates.items())
    grids = (
        Grid("At half load", columns, _rows(half)),
        Grid("Goodput, requests/s", ("cards", *WAYS), in_time),
    )
    return Evidence(goals=tuple(goals), grids=grids, notes=(_REFUSED,), settings=SHIPPED.shown)


def _goodput(trace: Trace, options: SimulationOptions) -> float:
    """Requests per second of which nine in ten have their first token in time."""

    def attained(factor: float) -> float:
        share = attained_share(simulate(at_rate(trace, factor), options).jobs, TTFT_S, None)
        assert share is not None, "there is an objective"
        return share

    return highest_rate(attained, start=2.0, precision=0.02) * trace.rate


def _cell(place: str, more: float, less: float) -> Cell:
    return Cell(place, BETTER * less / more, f"{more / less:.2f} ×: {more:.2f} and {less:.2f}")


def _rows(found: Found) -> tuple[tuple[str, ...], ...]:
    return tuple(
        (
            *(place, way, f"{one.ttft_s.mean:.2f}", f"{one.ttft_s.p50:.2f}"),
            *(f"{one.ttft_s.p99:.1f}", f"{one.hit_share:.1%}"),
        )
        for place, ways in found.items()
        for way, one in ways.items()
    )
