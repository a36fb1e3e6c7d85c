"""Tiffin's policy beside those of other systems, and beside a scheduler that knows all.

Dynamo's cost is `kv_cost`, SGLang's routing `prefix_aware`, Preble's E2 `preble`, Mooncake's
Algorithm 1 to the letter `algorithm_1`; ours is `kvcache_centric`, the default. All have the
settings that they come with, and nobody copies blocks ahead of need. `oracle` is greedy with exact
knowledge: no bound, but a mark to be near. There is no paper to compare with: what is said are
statements, which can fail.

Each seed gives another trace that is like the conversation trace, and other dice. Goodput takes
many runs: with the default effort it is that of the first quarter of an hour, where caches are
still cold.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING

from ...plots import Line, Plot
from ...sim.cluster.oracle import POLICY as ORACLE
from ...sim.cluster.simulation import SimulationOptions
from ...traces.generator import generate
from ...traces.look_alike import look_alike
from ...traces.scaling import at_rate, window
from ..evidence import Evidence, Grid, Statement
from ..registry import Effort, reproduction
from ..setups.contest import (
    ALL,
    NEAR_SHARE,
    OURS,
    PEERS,
    Interval,
    Results,
    Scenario,
    contest,
    goodput,
    grid,
    mean_ttft_s,
    statements,
)
from ..setups.inputs import conversation

if TYPE_CHECKING:
    from ...traces.trace import Trace
    from ..registry import Tell

RATES = (1.25, 1.8)
# The one between is for the plot: one seed, and who is worth looking at.
PLOTTED_RATES = (1.25, 1.5, 1.8)
PLOTTED = (ORACLE, OURS, "algorithm_1", "kv_cost", "prefix_aware")
# Of the trace, in its own time, for goodput with the default effort.
SHORT_S = 900.0

# One card of 24 Gb/s per node: the slowest network of Mooncake's figure 13. Questions about 200
# documents of some 16,000 tokens: at two a second, what is handed over to the instances that decode
# fills half of the cards, if it comes evenly from all.
SLOW_BYTES_S = 24e9 / 8
DOCUMENT_REQUESTS, DOCUMENT_RATE = 3_000, 2.0

# Mooncake's objectives for its real workload (table 2 and section 5 of the FAST '25 paper).
TTFT_S, TBT_S = 30.0, 0.1

_COMPUTING = """All but `algorithm_1` count blocks that prompts queued on an instance will have
computed by a prompt's turn."""
_SPREAD = """At 1.8 times the rate some of the traces are beyond what 8 instances can prefill: then
seeds differ by more than policies, and intervals are wide."""
_HANDED_OVER = """What is handed over to the instances that decode fills the cards. The conductor
books it until it has come, plans it from the decision on, and takes, of instances with the same
predicted TTFT, the one whose card is free the soonest: TTFT has no hand-over in it, the times
between tokens have. Preble's and SGLang's policies fetch nothing."""

_SOURCE = "no paper; the policies of Dynamo, SGLang, Preble, Mooncake and Tiffin"


@cache
def _like_conversation(seed: int) -> Trace:
    return look_alike(conversation(), seed)


def _faster(rate: float, seed: int) -> Trace:
    return at_rate(_like_conversation(seed), rate)


def _documents(seed: int) -> Trace:
    return at_rate(generate("long-document", DOCUMENT_REQUESTS, seed), DOCUMENT_RATE)


@reproduction("ours-against-all", "Ours beside all: conversations", _SOURCE)
def conversations(effort: Effort, tell: Tell) -> Evidence:
    """Mean TTFT at two rates, and the curves between them."""
    options = SimulationOptions(replication=False)
    grids: list[Grid] = []
    said: list[Statement] = []
    curves: dict[str, dict[float, float]] = {policy: {} for policy in PLOTTED}
    for rate in PLOTTED_RATES:
        counts = rate in RATES
        trace = partial(_faster, rate)
        scenario = Scenario(f"conversation, {rate:g} ×", trace, options)
        seeds, policies = (effort.seeds, ALL) if counts else (effort.seeds[:1], PLOTTED)
        results = contest(scenario, seeds, tell, policies)
        means = mean_ttft_s(results)
        for policy, points in curves.items():
            points[rate] = means[policy].mean
        if counts:
            grids.append(grid(scenario.title, results))
            said += statements(scenario.title, means)
    lines = [
        Line(policy, tuple(points), tuple(points.values()), "dots" if policy == ORACLE else "line")
        for policy, points in curves.items()
    ]
    plot = Plot(
        "ours-against-all",
        "Traces like Mooncake's conversations, 8 and 8 instances",
        "times the trace's rate",
        "mean TTFT, s",
        tuple(lines),
        log_y=True,
    )
    return Evidence(
        statements=tuple(said), plots=(plot,), grids=tuple(grids), notes=(_COMPUTING, _SPREAD)
    )


@reproduction("ours-against-all-slow-links", "Ours beside all: long prefixes, slow links", _SOURCE)
def slow_links(effort: Effort, tell: Tell) -> Evidence:
    """Documents that many ask about, and cards of 24 Gb/s."""
    options = SimulationOptions(bandwidth_bytes_s=SLOW_BYTES_S, replication=False)
    scenario = Scenario("documents, 24 Gb/s", _documents, options)
    results = contest(scenario, effort.seeds, tell)
    said = statements(scenario.title, mean_ttft_s(results))
    tables = (grid(scenario.title, results), _later_tokens(results))
    return Evidence(statements=tuple(said), grids=tables, notes=(_HANDED_OVER,))


def _later_tokens(results: Results) -> Grid:
    """Times between tokens, with the wait for the hand-over."""
    rows = []
    for policy, found in results.items():
        means = Interval.of([one.tbt_s.mean for one in found])
        tails = Interval.of([one.tbt_s.p99 for one in found])
        rows.append((policy, means.shown(".2f"), tails.shown(".1f")))
    return Grid(
        "and the tokens after the first", ("policy", "TBT mean, s", "TBT p99, s"), tuple(rows)
    )


@reproduction("ours-against-all-goodput", "Ours beside all: goodput", _SOURCE)
def goodputs(effort: Effort, tell: Tell) -> Evidence:
    """The highest rate at which 90% of requests have TTFT ≤ 30 s and TBT ≤ 0.1 s."""
    full = effort.is_full
    options = SimulationOptions(ttft_s=TTFT_S, tbt_s=TBT_S, replication=False)
    seeds = effort.costly_seeds
    found: dict[str, list[float]] = {policy: [] for policy in ALL}
    for seed in seeds:
        whole = _like_conversation(seed)
        trace = whole if full else window(whole, 0.0, SHORT_S)
        for policy in ALL:
            tell(f"seed {seed}, {policy}")
            found[policy].append(goodput(trace, replace(options, seed=seed), policy))
    rates = {policy: Interval.of(values) for policy, values in found.items()}
    order = sorted(rates, key=lambda policy: rates[policy].mean, reverse=True)
    rows = tuple((policy, rates[policy].shown(".2f")) for policy in order)
    title = "conversation, TTFT ≤ 30 s and TBT ≤ 0.1 s for 90%"
    best = max(PEERS, key=lambda peer: rates[peer].mean)
    mine, theirs, mark = (rates[name].mean for name in (OURS, best, ORACLE))
    figures = f"{mine:.2f}/s; {best} {theirs:.2f}/s, the oracle {mark:.2f}/s"
    near = mine >= mark * (1 - NEAR_SHARE)
    said = (
        # Two rates that the bisection cannot tell apart are equal.
        Statement(f"no peer serves more than {OURS}", mine >= theirs * 0.95, figures),
        Statement(f"{OURS} serves nearly what the oracle does", near, figures),
    )
    table = Grid(title, ("policy", "goodput, requests/s"), rows)
    return Evidence(statements=said, grids=(table,))
