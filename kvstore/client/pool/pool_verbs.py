"""The pool's verbs: which requests go to which nodes, and what follows from the replies.

A verb is a generator: it yields steps, gets their outcomes, and returns its result; it does no I/O
and has no clock but `context.now`. `VerbDriver` carries the steps out.

A read is one plan. The home node (the node on this host, over shared memory) is its first replica
and is asked for the whole prefix, since that costs less than to ask the directory what it has. For
what home lacks, the directory is asked once. It is a hint: a stale entry, for a node that does not
have the block any more, costs one request; a missing entry costs a miss; in either case the reader
verifies each block that arrives.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from ...errors import TiffinError
from .replica_choice import LATE_S, Costs, ReplicaRun, plan_reads

if TYPE_CHECKING:
    from ...directory.base import NodeRecord
    from ...format.keys import Prefix
    from ...node.core import messages

# The home node in a plan. No node has this number; home's own in the directory changes, and may not
# be known yet.
HOME = -1
# The most runs of one prompt that are read in parallel, from up to as many nodes.
TOGETHER_MAX = 4
# Reasons for which the node is not asked again in this call or, if it stalled and was given up
# early, only as the last candidate; the other reasons are about one block.
_NODE_FAILED = ("lost", "stalled", "deadline")


@dataclass(slots=True)
class ReadOutcome:
    """The leading blocks of a run that arrived whole and verified. `reason` is why there are not
    more: a `Reason` in lower case, or "lost" (the node or the link to it), "stalled" (it sends
    nothing). `generations` has one per block; none for blocks that were leased in place."""

    blocks: int
    reason: str | None
    generations: list[int] = field(default_factory=list)
    nbytes: int = 0
    seconds: float = 0.0
    answered: bool = False  # whether the node sent any reply


@dataclass(slots=True)
class Read:
    """Read the run's blocks into their targets, or lease them in place at home. Its outcome is a
    `ReadOutcome`; it raises only for the caller's mistakes. `patience`: the read gives up when
    nothing arrives for so many `hedge_s`; None: only at the deadline."""

    run: ReplicaRun
    deadline: float
    patience: int | None


@dataclass(slots=True)
class Locate:
    """Ask the directory for the nodes to ask for each block from `start` on; its outcome is a list
    of them, or None if the directory does not answer."""

    start: int


@dataclass(slots=True)
class CopyHome:
    """Copy the blocks from `start` on, whose holders are `located`, into the home node. Its outcome
    is whether more leading blocks are there now."""

    start: int
    located: Sequence[tuple[int, ...]]
    deadline: float


@dataclass(slots=True)
class AskNode:
    """Send `request` to `node`; its outcome is the reply, or it raises. `record`: of a node that
    the directory need not list any more."""

    node: int
    request: messages.Request
    timeout_s: float
    record: NodeRecord | None = None


@dataclass(slots=True)
class Together:
    """Carry out these steps in parallel; its outcome is a list of theirs, a TiffinError for each
    failure."""

    steps: list[Any]


Step = Read | Locate | CopyHome | AskNode | Together
T = TypeVar("T")
Verb = Generator[Step, Any, T]


@dataclass(frozen=True, slots=True)
class Context:
    """What a verb depends on: a clock, the costs of the links, and the budget for hedges."""

    now: Callable[[], float]
    costs: Costs
    # Whether the budget allows a hedge: to try a second replica before the first one's deadline.
    may_hedge: Callable[[], bool] = lambda: True


class HomeState(Protocol):
    """What a plan asks of the home node's link and of the policy that copies blocks there."""

    @property
    def number(self) -> int | None:
        """Its number in the directory; None while the directory does not list it."""

    @property
    def away(self) -> bool:
        """Whether it is silent, and asked only where no other node can serve the request."""

    @property
    def lost(self) -> bool:
        """Whether it did not answer the last request."""

    def wants(self, prefix: Prefix, start: int) -> bool:
        """Whether to copy blocks from `start` on there, if other nodes have them."""

    def saw(self, prefix: Prefix, start: int, stop: int) -> None:
        """Note that blocks [start, stop) were read from other nodes."""


@dataclass(frozen=True, slots=True)
class _HomeCosts:
    """The costs of reads for one call, with the TCP port of a silent home node: the same process
    serves it. The call that found home silent asks it last, since no other node may have the
    blocks; a call that began while home was silent takes it for dead."""

    costs: Costs
    home: HomeState
    was_away: bool

    def seconds(self, node: int, nbytes: int) -> float:
        """See `Costs.seconds`."""
        seconds = self.costs.seconds(node, nbytes)
        if node != self.home.number or not self.home.away:
            return seconds
        return math.inf if self.was_away else LATE_S + seconds


@dataclass(slots=True)
class Outcome:
    """The number of leading blocks that were read, and why there are not more. `at_home`: how many
    of them were read at the home node."""

    blocks: int = 0
    reason: str | None = None
    at_home: int = 0
    generations: dict[int, int] = field(default_factory=dict)


def get(prefix: Prefix, deadline: float, context: Context, home: HomeState | None) -> Verb[Outcome]:
    """Read the leading blocks of `prefix`: at home, then from the nodes that have the rest."""
    if home is None or not len(prefix):
        return (yield from _elsewhere(prefix, 0, deadline, context))
    context = replace(context, costs=_HomeCosts(context.costs, home, home.away))
    outcome = Outcome()
    here = yield from _at_home(outcome, prefix, deadline)
    if outcome.at_home == len(prefix):
        return outcome
    begin = outcome.at_home
    located = yield Locate(begin)
    if located and not home.lost and home.wants(prefix, begin):
        part = leading(located, home.number)
        if part and (yield CopyHome(begin, part, deadline)):
            here = (yield from _at_home(outcome, prefix, deadline)) or here
    start = outcome.at_home
    # Home is not asked again over TCP: it could wait for room that its own answer takes.
    without = () if here is None or home.number is None else (home.number,)
    if located is None:
        rest = Outcome(start, "directory" if start < len(prefix) else None)
    else:
        rest = yield from read(prefix, start, deadline, context, located[start - begin :], without)
    home.saw(prefix, start, rest.blocks)
    outcome.generations |= rest.generations
    outcome.blocks, outcome.reason = rest.blocks, _reason(rest, start, here)
    return outcome


def _at_home(outcome: Outcome, prefix: Prefix, deadline: float) -> Verb[ReadOutcome | None]:
    """Read the blocks that `outcome` lacks at home, and note them there. Returns None if the home
    node does not answer."""
    start = outcome.at_home
    here = yield Read(ReplicaRun(HOME, start, len(prefix), others=True), deadline, 1)
    if not here.answered:
        return None
    outcome.generations.update(enumerate(here.generations, start=start))
    outcome.blocks = outcome.at_home = start + here.blocks
    return cast("ReadOutcome", here)


def leading(located: Sequence[tuple[int, ...]], without: int | None) -> Sequence[tuple[int, ...]]:
    """The holders of the leading blocks that another node than `without` has."""
    held = [tuple(n for n in nodes if n != without) for nodes in located]
    return held[: next((i for i, nodes in enumerate(held) if not nodes), len(held))]


def _reason(rest: Outcome, at_home: int, here: ReadOutcome | None) -> str | None:
    """Why there are not more blocks. The home node's own reason tells more than a miss at the other
    nodes, or a directory that does not answer."""
    why = here.reason if here is not None else None
    if rest.blocks > at_home or why is None or rest.reason not in ("miss", "directory"):
        return rest.reason
    return rest.reason if why == "miss" else why


def _elsewhere(prefix: Prefix, start: int, deadline: float, context: Context) -> Verb[Outcome]:
    """Read the blocks from `start` on from any node."""
    if start >= len(prefix):
        return Outcome(start)
    located = yield Locate(start)
    if located is None:
        return Outcome(start, "directory")
    return (yield from read(prefix, start, deadline, context, located))


def read(
    prefix: Prefix,
    start: int,
    deadline: float,
    context: Context,
    located: Sequence[Sequence[int]],
    without: Collection[int] = (),
) -> Verb[Outcome]:
    """Read the leading blocks of `prefix` from block `start` on, from any node but those in
    `without`, which the caller asked before. `located`: the nodes to ask for each of these blocks.

    Nearly always one node has all blocks. It is asked at once; a plan, which takes as long as the
    bytes of a small block, is made only for the blocks that it lacks.
    """
    run = sole_run(located, start, context, without)
    tried: Any = None
    if run is not None:
        tried = yield Read(run, deadline, None)
        if tried.blocks == run.stop - run.start:
            return whole(run, tried)
    reading = _Reading(prefix, start, deadline, context)
    if start >= len(prefix):
        return reading.outcome
    reading.holders = [set(nodes).difference(without) for nodes in located]
    if run is not None:
        reading.take(run, tried)
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
    return Outcome(run.stop, None, 0, dict(zip(positions, fetched.generations, strict=True)))


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
        at = run.start + fetched.blocks
        if at >= run.stop:
            return
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
