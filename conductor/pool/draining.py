"""Draining a node, or an instance, before it leaves or changes its role. Pure.

A node that stops without notice takes its blocks with it, and engines have to recompute the blocks
that only this node had. So the node is drained first, the most valuable blocks first, because the
deadline may be too short for all of them:

    CLOSING   the conductor orders the node to refuse new blocks
    HOT       popular blocks that no other node has are copied away, the hottest prefix first
    REST      the node itself hands over every other block that only it has (`Evacuate`)
    DONE      every block of the node has a replica elsewhere
    LATE      the deadline came first; `Progress` says what would be lost
    FAILED    the node did not hand over the rest, or no other node had room for it
    LOST      the node left the directory before the end
    CANCELLED the node stays, and accepts new blocks again: by an order from here or from elsewhere

Draining an instance waits for requests instead of blocks: the conductor assigns no new request to
it, and the drain is done when the last in-flight request has ended. The conductor can't copy from
an instance's HBM; engines with a store write through to their node, which stays. Hot blocks that
are only in an instance's HBM and on no node are counted, so that an operator can see what the
change will cost.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from msgspec import Meta

from ..state.sliced_work import finished
from .orders import LOST_S, NO_PARENT, ORDER_BLOCKS_MAX, Admit, Copy, Evacuate
from .popularity import EVERYBODY

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from ..state.sliced_work import Work
    from .orders import Ended, Order, PoolView
    from .popularity import HotPrefix

# A node that the directory does not list for this long is gone: longer than it takes all nodes to
# register again after the directory has lost its data.
GONE_S = 10.0
# Grace after the deadline: a node that evacuates until the deadline reports the outcome after it.
_ANSWER_S = 10.0


class DrainSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How nodes and instances are drained."""

    deadline_s: Annotated[float, Meta(gt=0, le=86_400)] = 600.0
    """For one node or instance, unless the caller says otherwise."""

    hot_max: Annotated[int, Meta(ge=0, le=4096)] = 1024
    """Prefixes that are copied in the order of their popularity; the rest goes as it lies."""

    orders_max: Annotated[int, Meta(ge=1, le=64)] = 4
    """Copies under way from a node that is drained: it still serves."""

    tries_max: Annotated[int, Meta(ge=1, le=16)] = 3
    """Targets that are tried for one block, and times that a node is told to hand over the rest, or
    that it takes new blocks again."""


class DrainPhase(StrEnum):
    """The phase of a drain; see the module's text."""

    CLOSING = "closing"
    HOT = "hot"
    REST = "rest"
    WAITING = "waiting"  # an instance, for its in-flight requests to end
    DONE = "done"
    LATE = "late"
    FAILED = "failed"
    LOST = "lost"
    CANCELLED = "cancelled"


ENDED = (DrainPhase.DONE, DrainPhase.LATE, DrainPhase.FAILED, DrainPhase.LOST, DrainPhase.CANCELLED)


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a drain of a node or of an instance (`kind`). `unique_blocks` counts hot blocks
    that have no replica elsewhere yet; `moved_blocks` and `moved_bytes` count what the hot phase
    copied. At the end the node itself reports `handed_over`, its blocks that other nodes have, and
    `left_blocks`, those that they lack. `failures` counts failed orders, `requests` an instance's
    in-flight requests."""

    name: str
    phase: DrainPhase
    left_s: float
    unique_blocks: int = 0
    moved_blocks: int = 0
    moved_bytes: int = 0
    handed_over: int = 0
    left_blocks: int = 0
    failures: int = 0
    requests: int = 0
    kind: Literal["node", "instance"] = "node"


class NodeDrain:
    """The drain of one node. Call `step` every second or so, and `ended` for each order's outcome.

    `numbers` generates the orders' numbers. Outcomes of orders of a drain that has ended are
    ignored.
    """

    def __init__(
        self,
        node: str,
        begun_at: float,
        numbers: Callable[[], int],
        settings: DrainSettings | None = None,
        *,
        deadline_s: float | None = None,
    ) -> None:
        self.node = node
        self.settings = settings or DrainSettings()
        self.phase = DrainPhase.CLOSING
        self.deadline = begun_at + (deadline_s or self.settings.deadline_s)
        self._numbers = numbers
        self._under_way: dict[int, tuple[Order, float]] = {}
        # Blocks that were copied, whether or not the index lists the replica yet; and for each
        # block the targets that did not take it.
        self._moved: set[bytes] = set()
        self._refused: dict[bytes, set[str]] = {}
        self._tries = 0
        self._listed_at = begun_at
        self._was_closed = False  # the directory has listed the node as draining
        self._openings = 0  # attempts left to order the node to accept new blocks
        self._unique_blocks = self._left_blocks = 0
        self._moved_blocks = self._moved_bytes = self._handed_over = self._failures = 0

    @property
    def opening(self) -> bool:
        """Whether the drain was cancelled, and the node has not confirmed yet that it accepts new
        blocks."""
        return self.phase is DrainPhase.CANCELLED and bool(self._openings or self._under_way)

    def step(self, pool: PoolView | None, now: float) -> list[Order]:
        """The orders to send now; none after the drain has ended, except that a cancelled drain
        orders its node to accept blocks again. `pool` is None while the directory does not answer:
        then only deadlines are checked."""
        return finished(self.stepping(pool, now))

    def stepping(self, pool: PoolView | None, now: float) -> Work[list[Order]]:
        """`step` in pieces; the caller may cancel the drain between two of them."""
        if self.phase in ENDED and not self.opening:
            return []
        self._give_up_lost(now)
        listed = pool is not None and self.node in pool.nodes
        if listed or pool is None:
            self._listed_at = now
        if self.opening:
            return self._open(now) if listed else []
        answer_s = _ANSWER_S if self._is_handing_over() else 0.0
        if now >= self._listed_at + GONE_S:
            self.phase = DrainPhase.LOST
        elif now >= self.deadline + answer_s:
            self.phase = DrainPhase.LATE
        elif pool is not None and listed:
            return (yield from self._go_on(pool, now))
        return []

    def _go_on(self, pool: PoolView, now: float) -> Work[list[Order]]:
        if self.phase is DrainPhase.CLOSING:
            return self._close(now)
        draining = pool.nodes[self.node].draining
        if self._was_closed and not draining:  # opened by another order, or restarted
            self.phase = DrainPhase.CANCELLED
            self._under_way.clear()
        self._was_closed |= draining
        if self.phase is DrainPhase.HOT:
            orders: list[Order] = [*(yield from self._move_hot(pool, now))]
            if orders or self._under_way or self.phase is not DrainPhase.HOT:
                return orders
            self.phase = DrainPhase.REST
        if self.phase is DrainPhase.REST and not self._under_way:
            return self._hand_over(now)
        return []

    def ended(self, outcome: Ended, now: float) -> None:
        """Record the outcome of an order of this drain; other outcomes are ignored."""
        counts = self.phase not in ENDED or self.opening
        order, _ = self._under_way.pop(outcome.number, (None, 0.0))
        if order is None or not counts:
            return
        self._failures += bool(outcome.error)
        if isinstance(order, Admit) and order.on:
            self._openings = self._openings if outcome.error else 0
        elif isinstance(order, Admit):
            if self.phase is DrainPhase.CLOSING:
                # A node that did not take the order can still be copied from; it may fill up again.
                self.phase = DrainPhase.HOT
        elif isinstance(order, Copy):
            self._copied(order, min(max(0, outcome.blocks), len(order.keys)))
        elif isinstance(order, Evacuate) and not outcome.error:
            self._handed_over, self._left_blocks = outcome.blocks, outcome.left
            if not outcome.left:
                self.phase = DrainPhase.DONE
            elif now >= self.deadline:
                self.phase = DrainPhase.LATE

    def cancel(self) -> None:
        """Cancel the drain, also one that has ended: the next steps order the node to accept new
        blocks again. Blocks that were copied remain where they are."""
        self.phase = DrainPhase.CANCELLED
        # The node is opened only after a pending order to close it has ended.
        self._under_way = {n: o for n, o in self._under_way.items() if isinstance(o[0], Admit)}
        self._openings = self.settings.tries_max

    def progress(self, now: float) -> Progress:
        """The drain's progress."""
        return Progress(
            self.node,
            self.phase,
            max(0.0, self.deadline - now) if self.phase not in ENDED else 0.0,
            self._unique_blocks,
            self._moved_blocks,
            self._moved_bytes,
            self._handed_over,
            self._left_blocks,
            self._failures,
        )

    # -- steps -------------------------------------------------------------------------------------

    def _close(self, now: float) -> list[Order]:
        if self._under_way:
            return []
        return [self._begin(Admit(self._numbers(), self.node, on=False), now)]

    def _open(self, now: float) -> list[Order]:
        if self._under_way or not self._openings:
            return []
        self._openings -= 1
        return [self._begin(Admit(self._numbers(), self.node, on=True), now)]

    def _is_handing_over(self) -> bool:
        return any(isinstance(order, Evacuate) for order, _ in self._under_way.values())

    def _hand_over(self, now: float) -> list[Order]:
        if self._tries >= self.settings.tries_max:
            self.phase = DrainPhase.FAILED
            return []
        self._tries += 1
        return [self._begin(Evacuate(self._numbers(), self.node, self.deadline - now), now)]

    def _move_hot(self, pool: PoolView, now: float) -> Work[list[Copy]]:
        """Copies of blocks that only this node has: hottest prefix first, heads before tails."""
        if len(self._under_way) >= self.settings.orders_max:
            return []
        going = {key for order, _ in self._under_way.values() for key in _keys(order)}
        orders: list[Copy] = []
        self._unique_blocks = 0
        only_here = _OnlyHere(self.node, pool)
        for prefix in (yield from pool.finding_hot(self.settings.hot_max, now)):
            yield
            if self.phase is not DrainPhase.HOT:
                break
            unique = [i for i in only_here.of(prefix.keys) if prefix.keys[i] not in self._moved]
            self._unique_blocks += len(unique)
            for begin, end in _runs([i for i in unique if prefix.keys[i] not in going]):
                if len(self._under_way) < self.settings.orders_max:
                    copy = self._copy(prefix, begin, end, pool)
                    if copy is not None:
                        self._begin(copy, now)
                        orders.append(copy)
        return orders

    def _copy(self, prefix: HotPrefix, begin: int, end: int, pool: PoolView) -> Copy | None:
        """An order to the best target that has not refused the block; None if no target is left."""
        keys = prefix.keys[begin : min(end, begin + ORDER_BLOCKS_MAX)]
        refused = self._refused.get(keys[0], set())
        if len(refused) >= self.settings.tries_max:
            return None
        targets = [n for n in pool.takers(prefix.group) if n != self.node and n not in refused]
        targets = targets or [
            n for n in pool.takers(EVERYBODY) if n != self.node and n not in refused
        ]
        if not targets:
            return None
        nbytes = len(keys) * prefix.block_bytes
        has = pool.leading(prefix.keys[:begin]) if begin else {}
        promised = self._promised()

        def rank(name: str) -> tuple[bool, int, float, str]:
            # The node with the preceding blocks, if it has room: a prefix match looks there.
            free_bytes = pool.nodes[name].free_bytes - promised.get(name, 0)
            return free_bytes < nbytes, -has.get(name, 0), -free_bytes, name

        target = min(targets, key=rank)
        parent = prefix.keys[begin - 1] if begin else NO_PARENT
        reason = f"{self.node} is drained; wanted {prefix.popularity:.1f} times"
        return Copy(self._numbers(), keys, parent, begin, self.node, target, nbytes, reason)

    def _promised(self) -> dict[str, int]:
        """Bytes of the copies under way to each target."""
        found: dict[str, int] = {}
        for order, _ in self._under_way.values():
            if isinstance(order, Copy):
                found[order.target] = found.get(order.target, 0) + order.nbytes
        return found

    def _copied(self, order: Copy, blocks: int) -> None:
        self._moved_blocks += blocks
        self._moved_bytes += order.nbytes // len(order.keys) * blocks
        self._moved.update(order.keys[:blocks])
        for key in order.keys[blocks:]:
            self._refused.setdefault(key, set()).add(order.target)

    def _begin(self, order: Order, now: float) -> Order:
        self._under_way[order.number] = order, now
        return order

    def _give_up_lost(self, now: float) -> None:
        for number, (order, at) in list(self._under_way.items()):
            patience_s = order.timeout_s if isinstance(order, Evacuate) else 0.0
            if now >= at + LOST_S + patience_s:
                del self._under_way[number]
                self._failures += 1
                if isinstance(order, Copy):
                    self._copied(order, 0)


class _OnlyHere:
    """Finds blocks of which a node has the only replica, as far as the index shows; replicas on
    nodes that are being drained do not count. Keys are chained, so each is looked up once, however
    many prefixes begin with it, and neighbours with the same holders are judged together."""

    def __init__(self, node: str, pool: PoolView) -> None:
        self._node, self._pool = node, pool
        self._others = {name for name, one in pool.nodes.items() if not one.draining} - {node}
        # For each key looked up: whether the node has its block, and all before it.
        self._here: dict[bytes, bool] = {}
        self._judged: dict[int, tuple[bool, bool]] = {}

    def of(self, keys: Sequence[bytes]) -> list[int]:
        """Indices of the node's leading blocks of a prompt that have no other replica, without
        blocks that an earlier call looked up."""
        begin = len(keys)
        while begin and keys[begin - 1] not in self._here:
            begin -= 1
        unique: list[int] = []
        stop = begin
        if not begin or self._here[keys[begin - 1]]:
            for run in self._pool.index.match(keys[begin:]).runs:
                here, elsewhere = self._judge(run.holders)
                if not here:
                    break
                stop = begin + run.stop
                unique += () if elsewhere else range(begin + run.start, stop)
        self._here.update(dict.fromkeys(keys[begin:stop], True))
        self._here.update(dict.fromkeys(keys[stop:], False))
        return unique

    def _judge(self, holders: int) -> tuple[bool, bool]:
        """Whether the node is among these holders, and whether another node is."""
        found = self._judged.get(holders)
        if found is None:
            names = self._pool.nodes_of(holders)
            found = self._judged[holders] = self._node in names, bool(names & self._others)
        return found


class InstanceDrain:
    """The drain of one instance: no new requests until its in-flight requests have ended."""

    def __init__(
        self,
        instance: str,
        begun_at: float,
        settings: DrainSettings | None = None,
        *,
        deadline_s: float | None = None,
    ) -> None:
        self.instance = instance
        self.phase = DrainPhase.WAITING
        self.deadline = begun_at + (deadline_s or (settings or DrainSettings()).deadline_s)
        self._requests = 0
        self._unique_blocks = 0

    def step(self, requests: int | None, now: float, *, unique_blocks: int = 0) -> DrainPhase:
        """Update the drain; returns its phase. `requests` counts the instance's in-flight requests
        (None: the instance is gone), `unique_blocks` the hot blocks that only its HBM has
        (`unique_in_hbm`)."""
        if self.phase in ENDED:
            return self.phase
        self._requests, self._unique_blocks = requests or 0, unique_blocks
        if requests is None:
            self.phase = DrainPhase.LOST
        elif not requests:
            self.phase = DrainPhase.DONE
        elif now >= self.deadline:
            self.phase = DrainPhase.LATE
        return self.phase

    def cancel(self) -> None:
        """Cancel the drain, unless it has ended."""
        if self.phase not in ENDED:
            self.phase = DrainPhase.CANCELLED

    def progress(self, now: float) -> Progress:
        """The drain's progress."""
        left_s = max(0.0, self.deadline - now) if self.phase not in ENDED else 0.0
        return Progress(
            self.instance,
            self.phase,
            left_s,
            self._unique_blocks,
            requests=self._requests,
            kind="instance",
        )


def unique_in_hbm(hot: Sequence[HotPrefix], pool: PoolView) -> Work[dict[str, int]]:
    """How many hot blocks are in each instance's HBM and nowhere else: lost with its cache.
    Instances without such blocks are left out. Each block is looked up once for all instances."""
    seen: set[bytes] = set()
    alone: Counter[int] = Counter()
    for prefix in hot:
        yield
        for key in reversed(prefix.keys):
            if key in seen:
                break  # keys are chained: all keys before it are in `seen` too
            seen.add(key)
            for run in pool.index.match((key,)).runs:
                if run.holders.bit_count() == 1:
                    alone[run.holders.bit_length() - 1] += 1
    labels = {number: pool.index.label(number).rpartition("/") for number in alone}
    return {name: alone[number] for number, (name, _, tier) in labels.items() if tier == "hbm"}


def _keys(order: Order) -> Collection[bytes]:
    return order.keys if isinstance(order, Copy) else ()


def _runs(indices: Sequence[int]) -> list[tuple[int, int]]:
    """Runs of consecutive indices, as [begin, end)."""
    runs: list[tuple[int, int]] = []
    for index in indices:
        if runs and runs[-1][1] == index:
            runs[-1] = runs[-1][0], index + 1
        else:
            runs.append((index, index + 1))
    return runs
