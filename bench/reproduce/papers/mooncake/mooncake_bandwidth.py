"""Mooncake's sweep over the network's bandwidth (FAST '25, figure 13), on a look-alike of its
synthetic workload.

How many nodes prefill is not published, nor whether anything decodes. Here 10 nodes prefill and
answers have one token, as in figure 10: only then does recomputing everything take what the paper
says.

The paper's transfers are those of all that the pool has: its theoretical times are those of 4.7 GB,
which is the mean hit of the prompts that have one. So blocks are fetched here in two ways:
*always*, from a node drawn by chance, and *as the conductor decides*, which prefers nodes that have
them, and does not fetch what is computed sooner. Congestion is that of the shared cards of
`sim/nodes/network.py`; nothing is added to it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING

import numpy as np

from tiffin.conductor.cost import latency_profiles
from tiffin.conductor.cost.latency_model import prefill_s

from ....plots import Line, Plot
from ....sim.clock import VirtualClock
from ....sim.cluster.simulation import simulate
from ....sim.nodes.network import Network
from ....traces.ideal_cache import IdealCache
from ...evidence import Comparison, Evidence, Statement
from ...registry import reproduction
from ...setups.mooncake_systems import MOONCAKE_CLUSTER
from ...setups.synthetic_look_alike import synthetic_look_alike

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ....sim.nodes.network import CompletedTransfer
    from ....traces.trace import Trace
    from ...registry import Effort, Tell

PREFILL_NODES = 10
# By Gbit/s: mean TTFT, and mean seconds of a transfer, observed and theoretical.
PUBLISHED = {
    24: (5.10, 3.65, 1.54),
    40: (2.40, 1.13, 0.94),
    80: (1.73, 0.51, 0.48),
    100: (1.60, 0.40, 0.38),
    160: (1.41, 0.25, 0.24),
    320: (1.25, 0.125, 0.12),
    400: (1.25, 0.10, 0.10),
}
PUBLISHED_RECOMPUTED_S = 2.62


@dataclass(frozen=True, slots=True)
class Point:
    """Means over the seeds: TTFT, seconds of a transfer and of one that has its cards alone, and
    share of the prompts with one."""

    ttft_s: float
    transfer_s: float = 0.0
    alone_s: float = 0.0
    fetching: float = 0.0

    @property
    def congestion(self) -> float:
        """How many times its theoretical time a transfer takes."""
        return self.transfer_s / self.alone_s if self.alone_s else 1.0


_NOTE = """At 24 and 40 Gbit/s the cards are nearly full, where seeds differ by a factor of
two. From there on TTFT is 0.2 to 0.4 s shorter than the paper's, which is neither computing nor
queueing by the paper's own figures. What the paper calls congestion comes out of cards that are
shared, with nothing added. The conductor fetches for one prompt in eight at 24 Gbit/s, and never
loses to computing."""


@reproduction(
    "mooncake-bandwidth",
    "The network's bandwidth (a look-alike of the synthetic workload)",
    "Mooncake, FAST '25, figure 13",
)
def bandwidth(effort: Effort, tell: Tell) -> Evidence:
    """TTFT and transfer times over the bandwidth, beside computing everything."""
    traces = [_without_answers(synthetic_look_alike(seed)) for seed in effort.seeds]
    recomputed = _mean([always_fetched(one, reuse=False) for one in traces])
    always, decided = {}, {}
    for gbit_s in PUBLISHED:
        tell(f"{gbit_s} Gbit/s")
        rate = gbit_s * 1e9 / 8
        always[gbit_s] = _mean([always_fetched(one, bandwidth_bytes_s=rate) for one in traces])
        decided[gbit_s] = _mean([conducted(one, rate) for one in traces])
    comparisons = [
        Comparison("mean TTFT, nothing reused", PUBLISHED_RECOMPUTED_S, recomputed.ttft_s, "s")
    ]
    for gbit_s, (ttft_s, real_s, alone_s) in PUBLISHED.items():
        at, ours = f"at {gbit_s} Gbit/s", always[gbit_s]
        comparisons += [
            Comparison(f"{at}, always fetched: mean TTFT", ttft_s, ours.ttft_s, "s"),
            Comparison(f"{at}: a transfer, theoretical", alone_s, ours.alone_s, "s"),
            Comparison(f"{at}: a transfer, real", real_s, ours.transfer_s, "s"),
            Comparison(f"{at}: real / theoretical", real_s / alone_s, ours.congestion, "×"),
        ]
    return Evidence(
        tuple(comparisons),
        (*_statements(always, decided, recomputed),),
        (_ttft_plot(always, decided, recomputed), _transfer_plot(always)),
        (_NOTE,),
    )


def _statements(
    always: dict[int, Point], decided: dict[int, Point], recomputed: Point
) -> list[Statement]:
    worth = [gbit_s for gbit_s, one in always.items() if one.ttft_s < recomputed.ttft_s]
    fastest = decided[max(decided)]
    return [
        Statement(
            "at 24 Gbit/s, fetching always is slower than computing everything",
            always[24].ttft_s > recomputed.ttft_s,
            f"{always[24].ttft_s:.2f} s, {recomputed.ttft_s:.2f} s; it pays from"
            f" {min(worth, default=0)} Gbit/s",
        ),
        Statement(
            "more than 100 Gbit/s bring little: less than the half of a second",
            always[100].ttft_s - always[400].ttft_s < 0.5,
            f"{always[100].ttft_s:.2f} s at 100, {always[400].ttft_s:.2f} s at 400 Gbit/s",
        ),
        Statement(
            "transfers are congested below 80 Gbit/s, and hardly above",
            always[24].congestion > 1.5 and always[100].congestion < 1.15,
            ", ".join(f"{gbit_s}: {one.congestion:.2f} ×" for gbit_s, one in always.items()),
        ),
        Statement(
            "as the conductor decides, no bandwidth makes it slower than computing everything",
            all(one.ttft_s < recomputed.ttft_s for one in decided.values()),
            ", ".join(f"{g}: {one.ttft_s:.2f} s" for g, one in decided.items())
            + f"; {decided[24].fetching:.0%} of the prompts fetch at 24, {fastest.fetching:.0%} at"
            f" 400 Gbit/s; congestion {decided[24].congestion:.2f} × at 24",
        ),
    ]


def _without_answers(trace: Trace) -> Trace:
    return replace(trace, requests=tuple(replace(r, output_tokens=1) for r in trace.requests))


def conducted(trace: Trace, bandwidth_bytes_s: float) -> Point:
    """Blocks are fetched as the conductor decides."""
    options = replace(
        MOONCAKE_CLUSTER, prefill=PREFILL_NODES, decode=1, bandwidth_bytes_s=bandwidth_bytes_s
    )
    outcome = simulate(trace, options)
    return _point([job.ttft_s or 0.0 for job in outcome.jobs], outcome.transfers, bandwidth_bytes_s)


def _point(
    ttft_s: Sequence[float], transfers: Sequence[CompletedTransfer], bandwidth_bytes_s: float
) -> Point:
    if not transfers:
        return Point(float(np.mean(ttft_s)))
    return Point(
        float(np.mean(ttft_s)),
        float(np.mean([one.seconds for one in transfers])),
        float(np.mean([one.nbytes for one in transfers])) / bandwidth_bytes_s,
        len(transfers) / len(ttft_s),
    )


def _mean(points: Sequence[Point]) -> Point:
    rows = [(one.ttft_s, one.transfer_s, one.alone_s, one.fetching) for one in points]
    return Point(*np.mean(rows, axis=0).tolist())


# -- everything is fetched -------------------------------------------------------------------------


class _Node:
    """Prompts one after the other, each when its blocks have come."""

    def __init__(self, name: str, clock: VirtualClock, ended: Callable[[int], None]) -> None:
        self.name, self._clock, self._ended = name, clock, ended
        self._queue: deque[int] = deque()
        self._seconds: dict[int, float] = {}
        self._fetching: set[int] = set()
        self._computing = False
        self.work_s = 0.0  # of all prompts that wait or are computed

    def enqueue(self, number: int, seconds: float) -> None:
        """A prompt that takes so many seconds, and whose blocks are not there."""
        self._queue.append(number)
        self._seconds[number] = seconds
        self._fetching.add(number)
        self.work_s += seconds

    def fetched(self, number: int) -> None:
        """They are."""
        self._fetching.remove(number)
        self._go_on()

    def _go_on(self) -> None:
        if self._computing or not self._queue or self._queue[0] in self._fetching:
            return
        self._computing = True
        number = self._queue.popleft()
        self._clock.after(self._seconds[number], lambda: self._computed(number))

    def _computed(self, number: int) -> None:
        self._computing = False
        self.work_s -= self._seconds.pop(number)
        self._ended(number)
        self._go_on()


def always_fetched(
    trace: Trace, *, bandwidth_bytes_s: float = 50e9, reuse: bool = True, seed: int = 0
) -> Point:
    """Each prompt goes to the node with the least work, and all that the pool has of it comes from
    another one, drawn by chance. Without `reuse` the pool has nothing."""
    options = MOONCAKE_CLUSTER
    clock, chance = VirtualClock(), Random(seed)
    network = Network(clock, bandwidth_bytes_s, options.latency_s)
    profile = latency_profiles.load(options.profile)
    pool = IdealCache(None if reuse else 0)
    ttft_s = [0.0] * len(trace.requests)

    def ended(number: int) -> None:
        ttft_s[number] = clock.now_s - trace.requests[number].arrival_s

    nodes = [_Node(f"prefill-{number}", clock, ended) for number in range(PREFILL_NODES)]

    def arrive(number: int) -> None:
        request = trace.requests[number]
        hit = pool.serve(trace.full_blocks(request)) * trace.block_tokens
        cached = min(hit, request.prompt_tokens - 1)
        node = min(nodes, key=lambda one: one.work_s)
        node.enqueue(number, float(prefill_s(*profile.prefill, request.prompt_tokens, cached)))
        source = chance.choice([one for one in nodes if one is not node]).name
        nbytes = hit * options.token_bytes
        network.send(source, node.name, nbytes, lambda: node.fetched(number))

    for number, request in enumerate(trace.requests):
        clock.at(request.arrival_s, lambda number=number: arrive(number))  # type: ignore[misc]
    clock.run(lambda: True)
    return _point(ttft_s, network.completed, bandwidth_bytes_s)


# -- plots -----------------------------------------------------------------------------------------


def _ttft_plot(always: dict[int, Point], decided: dict[int, Point], recomputed: Point) -> Plot:
    x = tuple(float(gbit_s) for gbit_s in PUBLISHED)
    lines = (
        Line("always fetched", x, tuple(one.ttft_s for one in always.values())),
        Line("as the conductor decides", x, tuple(one.ttft_s for one in decided.values())),
        Line("nothing reused", x, (recomputed.ttft_s,) * len(x)),
        Line("paper", x, tuple(row[0] for row in PUBLISHED.values()), "dots"),
        Line("paper, nothing reused", x, (PUBLISHED_RECOMPUTED_S,) * len(x), "dots"),
    )
    return Plot("mooncake-bandwidth", "Mean TTFT", "Gbit/s of a node", "s", lines, log_x=True)


def _transfer_plot(always: dict[int, Point]) -> Plot:
    x = tuple(float(gbit_s) for gbit_s in PUBLISHED)
    lines = (
        Line("real", x, tuple(one.transfer_s for one in always.values())),
        Line("theoretical", x, tuple(one.alone_s for one in always.values())),
        Line("real, paper", x, tuple(row[1] for row in PUBLISHED.values()), "dots"),
        Line("theoretical, paper", x, tuple(row[2] for row in PUBLISHED.values()), "dots"),
    )
    title = "Mean seconds of a transfer"
    return Plot("mooncake-transfers", title, "Gbit/s of a node", "s", lines, log_x=True, log_y=True)
