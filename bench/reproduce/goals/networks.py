"""Time to the first token on slow and on fast networks, beside a greedy scheduler that knows
everything.

Each node has one card, of 10 to 800 Gb/s. Two workloads: questions about documents of some 16,000
tokens, and the conversation trace. The documents come at two a second, the conversations at half of
the rate at which Algorithm 1 saturates, or slower where the KV that is handed over would fill more
than half of all cards: what a network cannot carry, no scheduler makes it.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from ...sim.cluster.oracle import POLICY as ORACLE
from ...sim.cluster.simulation import SimulationOptions
from ...traces.generator import generate
from ...traces.look_alike import look_alike
from ...traces.scaling import at_rate, window
from ..evidence import Evidence, Grid
from ..registry import Effort, reproduction
from ..setups.contest import Scenario, contest, mean_ttft_s
from ..setups.inputs import conversation
from ..setups.judged import Cell, judged
from ..setups.saturation import saturating_factor
from .first_tokens import ALGORITHM_1, DEFAULT, HALF, LONG_S, NEAR_GREEDY, SHORT_S

if TYPE_CHECKING:
    from ...traces.trace import Trace
    from ..registry import Tell
    from ..setups.contest import Interval

GIGABITS = (10, 24, 100, 800)
POLICIES = tuple(dict.fromkeys((DEFAULT, ALGORITHM_1, ORACLE)))
CARDS_SHARE = 0.5

_SHARED = """Transfers are booked at both ends until they have ended, KV on its way to the instances
that decode included. With hand-overs booked for no time, the documents on 24 Gb/s took the default
policy 7.8 times as long as the oracle."""

DOCUMENT_RATE = 2.0
DOCUMENTS, DOCUMENTS_SHORT = 3_000, 1_000
WORKLOADS = ("documents", "conversations")


def card(gigabits: float) -> SimulationOptions:
    """The cluster with one such card in each node."""
    return SimulationOptions(bandwidth_bytes_s=gigabits * 1e9 / 8)


@cache
def _at_fast(workload: str, seed: int, full: bool) -> Trace:
    """A workload at its rate, if the network is fast enough for it."""
    if workload == "documents":
        trace = generate("long-document", DOCUMENTS if full else DOCUMENTS_SHORT, seed)
        return at_rate(trace, DOCUMENT_RATE / trace.rate)
    trace = window(look_alike(conversation(), seed), 0.0, LONG_S if full else SHORT_S)
    options = SimulationOptions(policy=ALGORITHM_1, seed=seed)
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
    found: dict[str, dict[str, Interval]] = {}
    for workload in WORKLOADS:
        for gigabits in GIGABITS:
            options = card(gigabits)

            def trace(
                seed: int, workload: str = workload, options: SimulationOptions = options
            ) -> Trace:
                return slowed(_at_fast(workload, seed, effort.is_full), options)

            title = f"{workload}, {gigabits} Gb/s"
            scenario = Scenario(title, trace, options)
            found[title] = mean_ttft_s(contest(scenario, seeds, tell, POLICIES))
    cells = [
        Cell(
            title,
            means[DEFAULT].mean / means[ORACLE].mean / NEAR_GREEDY,
            f"{means[DEFAULT].mean:.2f} s, {means[DEFAULT].mean / means[ORACLE].mean:.3f} × "
            f"{means[ORACLE].mean:.2f} s",
        )
        for title, means in found.items()
    ]
    goal = judged(
        f"cards of {', '.join(map(str, GIGABITS))} Gb/s: mean TTFT ≤ {NEAR_GREEDY:g} × the greedy "
        "oracle's",
        cells,
    )
    rows = tuple(
        (title, *(means[policy].shown(".3f") for policy in POLICIES))
        for title, means in found.items()
    )
    table = Grid("Mean TTFT, s", ("workload and card", *POLICIES), rows)
    return Evidence(goals=(goal,), grids=(table,), notes=(_SHARED,))
