"""The pool's verbs: what to ask of whom, and what follows from the answers.

As in `kvstore/verbs.py`, a verb is a generator: it yields steps, gets their outcomes, and returns
its result; it does no I/O and has no clock but `context.now`. The engine carries steps out over
real connections, the cluster simulation over a simulated network with a virtual clock.

The directory is a hint. A node that it names and that has not (any more) what it should have costs
one question; a node that it does not name costs a miss; what arrives proves itself either way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from ..errors import TiffinError
from .plan import Costs, Run, plan_reads

if TYPE_CHECKING:
    from ..keys import Prefix
    from ..node import messages
    from .fetch import Fetched

# Runs of one prompt that are read at the same time, from as many nodes.
TOGETHER_MAX = 4
# Why a node is not asked again in this call, or, if it was given up in haste, once more at the end;
# the other reasons are about one block.
_NODE_FAILED = ("lost", "stalled", "deadline")


@dataclass(slots=True)
class Read:
    """Read the run's blocks into their places. Answered by `Fetched`, never by an exception but for
    the caller's mistakes. `patience`: it gives up when nothing arrives for so many `hedge_s`; None:
    only at the deadline."""

    run: Run
    deadline: float
    patience: int | None


@dataclass(slots=True)
class Ask:
    """Send `request` to `node`; answered by its reply, or raises."""

    node: int
    request: messages.Request
    timeout_s: float


@dataclass(slots=True)
class Together:
    """Carry these out side by side; answered by their outcomes, a TiffinError for each failure."""

    steps: list[Any]


Step = Read | Ask | Together
T = TypeVar("T")
Verb = Generator[Step, Any, T]


@dataclass(frozen=True, slots=True)
class Context:
    """What a verb knows of its surroundings."""

    now: Callable[[], float]
    costs: Costs
    # Whether a second replica may be tried before the first has had its whole deadline.
    may_hedge: Callable[[], bool] = lambda: True


@dataclass(slots=True)
class Outcome:
    """Leading blocks that were read, and why there are not more. `sources` has a node per block."""

    blocks: int = 0
    reason: str | None = None
    generations: dict[int, int] = field(default_factory=dict)
    sources: dict[int, int] = field(default_factory=dict)
    # Blocks that the directory placed at a node which did not have them: (node, key).
    stale: list[tuple[int, bytes]] = field(default_factory=list)
    retries: int = 0


def read(
    prefix: Prefix,
    start: int,
    deadline: float,
    context: Context,
    located: Sequence[Sequence[int]],
    without: Collection[int] = (),
    tried: tuple[Run, Fetched] | None = None,
) -> Verb[Outcome]:
    """Read the leading blocks of `prefix` from block `start` on, wherever they are, but not from
    the nodes `without`: those were asked before. `located`: whom to ask for each of these blocks.
    `tried`: what became of a run that was read already."""
    reading = _Reading(prefix, start, deadline, context)
    if start >= len(prefix):
        return reading.outcome
    reading.holders = [set(nodes).difference(without) for nodes in located]
    if tried is not None:
        reading.take(*tried)
    while runs := reading.next_runs():
        steps: list[Step] = [Read(run, deadline, reading.patience(run)) for run in runs]
        # One is nearly always all there is, and needs no other thread.
        outcomes = (yield Together(steps)) if len(steps) > 1 else [(yield steps[0])]
        for run, fetched in zip(runs, outcomes, strict=True):
            if isinstance(fetched, TiffinError):
                raise fetched
            reading.note(run, fetched)
        if reading.complete:
            break
    return reading.finish()


def sole_run(
    located: Sequence[Sequence[int]], start: int, context: Context, without: Collection[int]
) -> Run | None:
    """All that is wanted as one run, if one node that is well is said to have it, and no other."""
    holders = located[0] if located else ()
    if len(holders) != 1 or holders[0] in without or located.count(holders) < len(located):
        return None
    if context.costs.seconds(holders[0], 0) == math.inf:
        return None
    return Run(holders[0], start, start + len(located), others=False)


def whole(run: Run, fetched: Fetched) -> Outcome:
    """The outcome of a read that was this run."""
    positions = range(run.start, run.stop)
    generations = dict(zip(positions, fetched.generations, strict=True))
    return Outcome(run.stop, None, generations, dict.fromkeys(positions, run.node))


class _Reading:
    """The state of one `read`."""

    def __init__(self, prefix: Prefix, start: int, deadline: float, context: Context) -> None:
        self._prefix = prefix
        self._start = start
        self._stop = len(prefix)
        self._deadline = deadline
        self._context = context
        self._why: dict[int, str] = {}
        self._failed: set[int] = set()
        self._late: dict[int, int] = {}  # given up in haste: the last time, of all such times
        self._haste = 0  # how many times
        self._asked = False  # who has no time to wait still gets what is there
        self.holders: list[set[int]] = []
        # What the caller has already counts, also when nothing more can be read.
        self.outcome = Outcome(start)

    def next_runs(self) -> list[Run]:
        """What to read next: nothing when all is there, nobody has more, or time is up."""
        if self._asked and self._context.now() >= self._deadline:
            return []
        self._asked = True
        done = self.outcome.generations
        runs: list[Run] = []
        position, stop, size = self._start, self._stop, self._prefix.schema.extent_bytes
        while position < stop and len(runs) < TOGETHER_MAX:
            if position in done:
                position += 1
                continue
            end = position
            while end < stop and end not in done:
                end += 1
            holders = self.holders[position - self._start : end - self._start]
            able = [self._able(nodes) for nodes in holders] if self._why else holders
            found = plan_reads(able, position, size, self._context.costs)
            runs += found
            position = end
            if not found or found[-1].stop < end:
                break  # what comes behind a block that nobody has is of no use
        return runs[:TOGETHER_MAX]

    def _able(self, nodes: set[int]) -> set[int]:
        """Whom to ask: who was given up in haste only where nobody else is left, and then the one
        whose last turn is longest ago."""
        able = nodes - self._failed
        others = able - self._late.keys()
        return others or set(sorted(able, key=self._late.__getitem__)[:1])

    @property
    def complete(self) -> bool:
        """Whether all that was asked for is there."""
        return len(self.outcome.generations) == self._stop - self._start

    def patience(self, run: Run) -> int | None:
        """See `Read.patience`. A node has the whole deadline where there is no other, or no budget
        for it. Where all others were only silent too, they take turns, longer and longer ones: each
        of them may be dead, or have stood still for a moment."""
        if not self._context.may_hedge():
            return None
        if run.others:
            return 1
        return 2 << self._haste // 2 if self._may_wake(run) else None

    def _may_wake(self, run: Run) -> bool:
        """Whether each of these blocks is also at another node that is not taken for dead."""
        return all(
            any(
                node != run.node and self._context.costs.seconds(node, 0) < math.inf
                for node in self.holders[position - self._start] - self._failed
            )
            for position in range(run.start, run.stop)
        )

    def take(self, run: Run, fetched: Fetched) -> None:
        """`note` a run that was read before there was a plan."""
        self._asked = True
        self.note(run, fetched)

    def note(self, run: Run, fetched: Fetched) -> None:
        """Take what arrived; remember whom not to ask again for what."""
        outcome = self.outcome
        for index, generation in enumerate(fetched.generations[: fetched.blocks]):
            outcome.generations[run.start + index] = generation
            outcome.sources[run.start + index] = run.node
        at = run.start + fetched.blocks
        if at >= run.stop:
            return
        outcome.retries += 1
        if fetched.blocks and fetched.reason in (None, "no_room"):
            return  # as much as goes at a time: the rest is asked for next
        reason = fetched.reason or "miss"
        if self._why.get(at, "miss") == "miss":  # what the first said tells more than a stale hint
            self._why[at] = reason
        if reason in _NODE_FAILED:
            if reason == "stalled":
                self._haste += 1
                self._late[run.node] = self._haste
            else:
                self._failed.add(run.node)
            return
        self.holders[at - self._start].discard(run.node)
        if reason == "miss":
            outcome.stale.append((run.node, self._prefix.keys[at]))

    def finish(self) -> Outcome:
        """The leading blocks, and what became of the first that is not among them."""
        outcome, at = self.outcome, self._start
        while at in outcome.generations:
            at += 1
        outcome.blocks = at
        if at < self._stop:
            late = self._context.now() >= self._deadline
            alone = "lost" if self.holders[at - self._start] else "miss"
            outcome.reason = self._why.get(at, "deadline" if late else alone)
        return outcome


def ask_all(
    nodes: Sequence[int], make: Callable[[], messages.Request], timeout_s: float
) -> Verb[dict[int, Any]]:
    """The same request to many nodes; replies, or the errors, by node."""
    if not nodes:
        return {}
    outcomes = yield Together([Ask(node, make(), timeout_s) for node in nodes])
    return dict(zip(nodes, outcomes, strict=True))
