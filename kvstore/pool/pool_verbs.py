"""The pool's verbs: which requests go to which nodes, and what follows from the replies.

As in `kvstore/verbs/block_verbs.py`, a verb is a generator: it yields steps, gets their outcomes,
and returns its result; it does no I/O and has no clock but `context.now`. The engine carries steps
out over real connections, the cluster simulation over a simulated network with a virtual clock.

The directory is a hint. A stale entry, for a node that does not have the block any more, costs one
request; a missing entry costs a miss; in either case the reader verifies each block that arrives.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from ..errors import TiffinError
from .replica_choice import Costs, ReplicaRun, plan_reads

if TYPE_CHECKING:
    from ..format.keys import Prefix
    from ..node.core import messages
    from .remote.block_read import ReadOutcome

# The most runs of one prompt that are read in parallel, from up to as many nodes.
TOGETHER_MAX = 4
# Reasons for which the node is not asked again in this call or, if it stalled and was given up
# early, only as the last candidate; the other reasons are about one block.
_NODE_FAILED = ("lost", "stalled", "deadline")


@dataclass(slots=True)
class Read:
    """Read the run's blocks into their targets. Its outcome is a `ReadOutcome`; it raises only for
    the caller's mistakes. `patience`: the read gives up when nothing arrives for so many `hedge_s`;
    None: only at the deadline."""

    run: ReplicaRun
    deadline: float
    patience: int | None


@dataclass(slots=True)
class AskNode:
    """Send `request` to `node`; its outcome is the reply, or it raises."""

    node: int
    request: messages.Request
    timeout_s: float


@dataclass(slots=True)
class Together:
    """Carry out these steps in parallel; its outcome is a list of theirs, a TiffinError for each
    failure."""

    steps: list[Any]


Step = Read | AskNode | Together
T = TypeVar("T")
Verb = Generator[Step, Any, T]


@dataclass(frozen=True, slots=True)
class Context:
    """What a verb depends on: a clock, the costs of the links, and the budget for hedges."""

    now: Callable[[], float]
    costs: Costs
    # Whether the budget allows a hedge: to try a second replica before the first one's deadline.
    may_hedge: Callable[[], bool] = lambda: True


@dataclass(slots=True)
class Outcome:
    """The number of leading blocks that were read, and why there are not more. `sources` has a node
    per block."""

    blocks: int = 0
    reason: str | None = None
    generations: dict[int, int] = field(default_factory=dict)
    sources: dict[int, int] = field(default_factory=dict)
    # Stale entries of the directory, for blocks that the node did not have: (node, key).
    stale: list[tuple[int, bytes]] = field(default_factory=list)
    retries: int = 0


def read(
    prefix: Prefix,
    start: int,
    deadline: float,
    context: Context,
    located: Sequence[Sequence[int]],
    without: Collection[int] = (),
    tried: tuple[ReplicaRun, ReadOutcome] | None = None,
) -> Verb[Outcome]:
    """Read the leading blocks of `prefix` from block `start` on, from any node but those in
    `without`, which the caller asked before. `located`: the nodes to ask for each of these blocks.
    `tried`: a run that was read already, and its outcome."""
    reading = _Reading(prefix, start, deadline, context)
    if start >= len(prefix):
        return reading.outcome
    reading.holders = [set(nodes).difference(without) for nodes in located]
    if tried is not None:
        reading.take(*tried)
    while runs := reading.next_runs():
        steps: list[Step] = [Read(run, deadline, reading.patience(run)) for run in runs]
        # Nearly always there is only one run, which needs no other thread.
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
) -> ReplicaRun | None:
    """All wanted blocks as one run, if the directory lists the same one node for each of them and
    that node is not taken for dead; else None."""
    holders = located[0] if located else ()
    if len(holders) != 1 or holders[0] in without or located.count(holders) < len(located):
        return None
    if context.costs.seconds(holders[0], 0) == math.inf:
        return None
    return ReplicaRun(holders[0], start, start + len(located), others=False)


def whole(run: ReplicaRun, fetched: ReadOutcome) -> Outcome:
    """The outcome of a read that consists of this run, all of whose blocks arrived."""
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
        self._late: dict[int, int] = {}  # nodes that stalled: the value of `_haste` at the latest
        self._haste = 0  # how many reads were given up early because the node stalled
        self._asked = False  # the first request goes out even if the deadline has passed
        self.holders: list[set[int]] = []
        # The blocks before `start`, which the caller has, count even if no more can be read.
        self.outcome = Outcome(start)

    def next_runs(self) -> list[ReplicaRun]:
        """The runs to read next: none when all blocks are read, no node has more of them, or the
        deadline has passed."""
        if self._asked and self._context.now() >= self._deadline:
            return []
        self._asked = True
        done = self.outcome.generations
        runs: list[ReplicaRun] = []
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
                break  # blocks after one that no node has are of no use
        return runs[:TOGETHER_MAX]

    def _able(self, nodes: set[int]) -> set[int]:
        """The candidates among `nodes`: a node that stalled only where no other is left, and then
        the one that stalled longest ago."""
        able = nodes - self._failed
        others = able - self._late.keys()
        return others or set(sorted(able, key=self._late.__getitem__)[:1])

    @property
    def complete(self) -> bool:
        """Whether all wanted blocks are read."""
        return len(self.outcome.generations) == self._stop - self._start

    def patience(self, run: ReplicaRun) -> int | None:
        """See `Read.patience`. A node has the whole time until the deadline where there is no other
        candidate, or no budget for a hedge. Where all other candidates have only stalled too, they
        are tried in turn, with a timeout that grows: each may be dead, or have been suspended for a
        moment."""
        if not self._context.may_hedge():
            return None
        if run.others:
            return 1
        return 2 << self._haste // 2 if self._may_wake(run) else None

    def _may_wake(self, run: ReplicaRun) -> bool:
        """Whether each block of the run has another holder that is not taken for dead."""
        return all(
            any(
                node != run.node and self._context.costs.seconds(node, 0) < math.inf
                for node in self.holders[position - self._start] - self._failed
            )
            for position in range(run.start, run.stop)
        )

    def take(self, run: ReplicaRun, fetched: ReadOutcome) -> None:
        """`note` a run that was read before the first plan."""
        self._asked = True
        self.note(run, fetched)

    def note(self, run: ReplicaRun, fetched: ReadOutcome) -> None:
        """Record the blocks that arrived, and which node not to ask again for which block."""
        outcome = self.outcome
        for index, generation in enumerate(fetched.generations[: fetched.blocks]):
            outcome.generations[run.start + index] = generation
            outcome.sources[run.start + index] = run.node
        at = run.start + fetched.blocks
        if at >= run.stop:
            return
        outcome.retries += 1
        if fetched.blocks and fetched.reason in (None, "no_room"):
            return  # as many blocks as fit one lease: the next run asks for the rest
        reason = fetched.reason or "miss"
        # The first failure tells more than the miss of a stale directory entry.
        if self._why.get(at, "miss") == "miss":
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
        """The outcome: the leading blocks, and the reason why the next one was not read."""
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
    """Send the same request to many nodes; replies or errors by node."""
    if not nodes:
        return {}
    outcomes = yield Together([AskNode(node, make(), timeout_s) for node in nodes])
    return dict(zip(nodes, outcomes, strict=True))
