"""Time to the first token on slow and on fast networks, beside a greedy scheduler that knows
everything.

Each node has one card, of 10 to 800 Gb/s. Two workloads: questions about documents of some 16,000
tokens, and the conversation trace. The documents come at two a second, the conversations at half of
the rate at which Algorithm 1 saturates, or slower where the KV that is handed over would fill more
than half of all cards: what a network cannot carry, no scheduler makes it.

The first token comes from the prefill. The second one waits for the hand-over as well, so where
cards are slow that is what people wait for: it is compared with a hand-over over idle cards and a
step of an idle instance, and with what the greedy scheduler's placement gives.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

from ...sim.cluster.options import SHIPPED
from ...sim.cluster.oracle import POLICY as ORACLE
from ...traces.generator import generate
from ...traces.look_alike import look_alike
from ...traces.scaling import at_rate, window
from ..evidence import Evidence, Grid
from ..registry import Effort, reproduction
from ..setups.contest import Interval, Scenario, contest, mean_ttft_s
from ..setups.inputs import conversation
from ..setups.judged import Cell, judged
from ..setups.saturation import saturating_factor
from .first_tokens import (
    ALGORITHM_1,
    DEFAULT,
    HALF,
    LONG_S,
    NEAR_GREEDY,
    SECOND,
    SHORT_S,
    second_token,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from ...sim.cluster.simulation import SimulationOptions
    from ...sim.results.outcomes import Summary
    from ...traces.trace import Trace
    from ..registry import Tell
    from ..setups.contest import Results

GIGABITS = (10, 24, 100, 800)
POLICIES = tuple(dict.fromkeys((DEFAULT, ALGORITHM_1, ORACLE)))
CARDS_SHARE = 0.5

_SHARED = """Transfers are booked at both ends until they have ended, KV on its way to the instances
that decode included. With hand-overs booked for no time, the documents on 24 Gb/s took the default
policy 7.8 times as long as the oracle."""

_SECOND = """Cards that are half full in the mean are full for a while whenever several long prompts
end together. Their hand-overs share the receiver's card, so each of them takes as long as all, and
nothing holds any back. Where prompts are prefilled does not help: the greedy scheduler's waits are
longer in the mean on 10 and 24 Gb/s. Its p99 is shorter for the documents on 10 Gb/s, where some
wait for two minutes."""

DOCUMENT_RATE = 2.0
DOCUMENTS, DOCUMENTS_SHORT = 3_000, 1_000
WORKLOADS = ("documents", "conversations")


def card(gigabits: float) -> SimulationOptions:
    """The cluster with one such card in each node."""
    return replace(SHIPPED, bandwidth_bytes_s=gigabits * 1e9 / 8)


@cache
def _at_fast(workload: str, seed: int, full: bool) -> Trace:
    """A workload at its rate, if the network is fast enough for it."""
    if workload == "documents":
        trace = generate("long-document", DOCUMENTS if full else DOCUMENTS_SHORT, seed)
        return at_rate(trace, DOCUMENT_RATE / trace.rate)
    trace = window(look_alike(conversation(), seed), 0.0, LONG_S if full else SHORT_S)
    options = replace(SHIPPED, order="arrival", policy=ALGORITHM_1, seed=seed)
    return at_rate(trace, HALF * saturating_factor(trace, options))


def slowed(trace: Trace, options: SimulationOptions) -> Trace:
    """The trace, or slower: its KV fills at most half of all cards that send."""
    sent_bytes_s = trace.prompt_tokens / trace.span_s * options.token_bytes
    most_bytes_s = CARDS_SHARE * options.prefill * options.bandwidth_bytes_s
    return at_rate(trace, min(1.0, most_bytes_s / sent_bytes_s))


@reproduction(
    "goals-networks",
    "Goals: first tokens over slow and fast networks",
    "no paper; a greedy scheduler with exact knowledge",
)
def networks(effort: Effort, tell: Tell) -> Evidence:
    """Both workloads on each network."""
    seeds = effort.costly_seeds
    found: dict[str, Results] = {}
    for workload in WORKLOADS:
        for gigabits in GIGABITS:
            options = card(gigabits)

            def trace(
                seed: int, workload: str = workload, options: SimulationOptions = options
            ) -> Trace:
                return slowed(_at_fast(workload, seed, effort.is_full), options)

            title = f"{workload}, {gigabits} Gb/s"
            scenario = Scenario(title, trace, options)
            found[title] = contest(scenario, seeds, tell, POLICIES)
    means = {title: mean_ttft_s(results) for title, results in found.items()}
    p99s = {title: _second_p99_s(results) for title, results in found.items()}
    cards = f"cards of {', '.join(map(str, GIGABITS))} Gb/s:"
    goals = (
        judged(
            f"{cards} mean TTFT ≤ {NEAR_GREEDY:g} × the greedy oracle's",
            [_over(title, each) for title, each in means.items()],
        ),
        judged(
            f"{cards} mean wait from the first to the second token ≤ {SECOND:g} × that on idle "
            "cards",
            [second_token(title, results[DEFAULT]) for title, results in found.items()],
        ),
        judged(
            f"{cards} p99 of the wait from the first to the second token ≤ {NEAR_GREEDY:g} × the "
            "greedy oracle's",
            [_over(title, each) for title, each in p99s.items()],
        ),
    )
    grids = (
        _grid("Mean TTFT, s", means),
        _grid(
            "Mean wait from the first to the second token, s",
            {
                title: _intervals(results, lambda one: one.second_s.mean)
                for title, results in found.items()
            },
        ),
        _grid("p99 of that wait, s", p99s),
    )
    return Evidence(goals=goals, grids=grids, notes=(_SHARED, _SECOND), settings=SHIPPED.shown)


Figures = dict[str, "Interval"]  # by policy


def _intervals(results: Results, of: Callable[[Summary], float]) -> Figures:
    return {policy: Interval.of([of(one) for one in each]) for policy, each in results.items()}


def _second_p99_s(results: Results) -> Figures:
    return _intervals(results, lambda one: one.second_s.p99)


def _over(title: str, figures: Figures) -> Cell:
    ours, greedy = figures[DEFAULT].mean, figures[ORACLE].mean
    text = f"{ours:.2f} s, {ours / greedy:.3f} × {greedy:.2f} s"
    return Cell(title, ours / greedy / NEAR_GREEDY, text)


def _grid(title: str, found: dict[str, Figures]) -> Grid:
    rows = tuple(
        (name, *(figures[policy].shown(".3f") for policy in POLICIES))
        for name, figures in found.items()
    )
    return Grid(title, ("workload and card", *POLICIES), rows)
