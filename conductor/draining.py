"""Emptying a node, or an instance, before it leaves or changes its role. Pure.

A node that is stopped without notice takes its blocks with it, and what only it had is computed
again. So it is emptied first, and the most valuable goes first, because the time may not suffice:

    CLOSING   the node is told to take nothing new
    HOT       what is popular and on no other node is copied away, the hottest prefix first
    REST      the node hands over everything else that is unique, by itself (`Evacuate`)
    DONE      nobody else lacks anything of it
    LATE      the deadline came first; `Progress` says what would be lost
    FAILED    the node would not hand over the rest, or nobody had room for it
    LOST      the node went away before that
    CANCELLED it stays, and takes new blocks again: it is told, or somebody else has told it

An instance has requests instead of blocks to wait for: nothing new is assigned to it, and it is
done when the last request has ended. Its HBM can't be copied from here; engines with a store write
through to their node, which stays. What they have not written, hot blocks that no node has, is
counted, so that who decides can see what the change will cost.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from msgspec import Meta

from .orders import LOST_S, NO_PARENT, ORDER_BLOCKS_MAX, Admit, Copy, Evacuate

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from .orders import Ended, Order, Pool
    from .popularity import HotPrefix

# A node that is not listed for so long is gone: longer than all take to come back after the
# directory has lost its data.
GONE_S = 10.0
# A node that hands over the rest until the deadline says a moment later how far it has come.
_ANSWER_S = 10.0


class DrainSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How nodes and instances are emptied."""

    deadline_s: Annotated[float, Meta(gt=0, le=86_400)] = 600.0
    """For one node or instance, unless the caller says otherwise."""

    hot_max: Annotated[int, Meta(ge=0, le=4096)] = 1024
    """Prefixes that are copied in the order of their popularity; the rest goes as it lies."""

    orders_max: Annotated[int, Meta(ge=1, le=64)] = 4
    """Copies under way from a node that is drained: it still serves."""

    tries_max: Annotated[int, Meta(ge=1, le=16)] = 3
    """Targets that are tried for one block, and times that a node is told to hand over the rest, or
    that it takes new blocks again."""


class Phase(StrEnum):
    """Where a drain is."""

    CLOSING = "closing"
    HOT = "hot"
    REST = "rest"
    WAITING = "waiting"  # an instance, for its requests
    DONE = "done"
    LATE = "late"
    FAILED = "failed"
    LOST = "lost"
    CANCELLED = "cancelled"


ENDED = (Phase.DONE, Phase.LATE, Phase.FAILED, Phase.LOST, Phase.CANCELLED)


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a drain is, of a node or of an instance (`kind`). `unique_blocks` are hot ones that
    nobody else has yet; `moved_blocks` and `moved_bytes` were copied as hot ones; the node itself
    counts at the end that `handed_over` are elsewhere, and `left_blocks` are not; `failures` are
    orders that failed. `requests` are an instance's that have not ended."""

    name: str
    phase: Phase
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
    """One node that is being emptied. Call `step` every second or so, and `ended` for each order.

    `numbers` gives orders their numbers. The orders of a drain that has ended are void.
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
        self.phase = Phase.CLOSING
        self.deadline = begun_at + (deadline_s or self.settings.deadline_s)
        self._numbers = numbers
        self._under_way: dict[int, tuple[Order, float]] = {}
        # What was copied, whether or not the index has heard of it; and who has not taken what.
        self._moved: set[bytes] = set()
        self._refused: dict[bytes, set[str]] = {}
        self._tries = 0
        self._listed_at = begun_at
        self._was_closed = False  # and the directory knew
        self._openings = 0  # times that the node is still to be told that it takes new blocks
        self._unique_blocks = self._left_blocks = 0
        self._moved_blocks = self._moved_bytes = self._handed_over = self._failures = 0

    @property
    def opening(self) -> bool:
        """Whether it was cancelled, and the node has not said yet that it takes new blocks."""
        return self.phase is Phase.CANCELLED and bool(self._openings or self._under_way)

    def step(self, pool: Pool | None, now: float) -> list[Order]:
        """What to order now; nothing once it has ended, but for what a cancelled one takes back.
        Without a `pool` nobody knows its nodes just now, and only time passes."""
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
            self.phase = Phase.LOST
        elif now >= self.deadline + answer_s:
            self.phase = Phase.LATE
        elif pool is not None and listed:
            return self._go_on(pool, now)
        return []

    def _go_on(self, pool: Pool, now: float) -> list[Order]:
        if self.phase is Phase.CLOSING:
            return self._close(now)
        draining = pool.nodes[self.node].draining
        if self._was_closed and not draining:  # somebody has opened it, or it was restarted
            self.phase = Phase.CANCELLED
            self._under_way.clear()
        self._was_closed |= draining
        if self.phase is Phase.HOT:
            orders: list[Order] = [*self._move_hot(pool, now)]
            if orders or self._under_way:
                return orders
            self.phase = Phase.REST
        if self.phase is Phase.REST and not self._under_way:
            return self._hand_over(now)
        return []

    def ended(self, outcome: Ended, now: float) -> None:
        """What became of an order of this drain; others are ignored."""
        counts = self.phase not in ENDED or self.opening
        order, _ = self._under_way.pop(outcome.number, (None, 0.0))
        if order is None or not counts:
            return
        self._failures += bool(outcome.error)
        if isinstance(order, Admit) and order.on:
            self._openings = self._openings if outcome.error else 0
        elif isinstance(order, Admit):
            if self.phase is Phase.CLOSING:
                # A node that can't be told may still be copied from; it only fills up again.
                self.phase = Phase.HOT
        elif isinstance(order, Copy):
            self._copied(order, min(max(0, outcome.blocks), len(order.keys)))
        elif isinstance(order, Evacuate) and not outcome.error:
            self._handed_over, self._left_blocks = outcome.blocks, outcome.left
            if not outcome.left:
                self.phase = Phase.DONE
            elif now >= self.deadline:
                self.phase = Phase.LATE

    def cancel(self) -> None:
        """It stays, also if the drain has ended: the node is to take new blocks again, which the
        next steps tell it. What was copied remains where it is."""
        self.phase = Phase.CANCELLED
        # It is opened after the order to close it has ended, not before.
        self._under_way = {n: o for n, o in self._under_way.items() if isinstance(o[0], Admit)}
        self._openings = self.settings.tries_max

    def progress(self, now: float) -> Progress:
        """How far it is."""
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
            self.phase = Phase.FAILED
            return []
        self._tries += 1
        return [self._begin(Evacuate(self._numbers(), self.node, self.deadline - now), now)]

    def _move_hot(self, pool: Pool, now: float) -> list[Copy]:
        """Copies of unique blocks, of the hottest prefix first, heads before tails."""
        if len(self._under_way) >= self.settings.orders_max:
            return []
        going = {key for order, _ in self._under_way.values() for key in _keys(order)}
        orders: list[Copy] = []
        self._unique_blocks = 0
        only_here = _OnlyHere(self.node, pool)
        for prefix in pool.hot(self.settings.hot_max, now):
            unique = [i for i in only_here.of(prefix.keys) if prefix.keys[i] not in self._moved]
            self._unique_blocks += len(unique)
            for begin, end in _runs([i for i in unique if prefix.keys[i] not in going]):
                if len(self._under_way) < self.settings.orders_max:
                    copy = self._copy(prefix, begin, end, pool)
                    if copy is not None:
                        self._begin(copy, now)
                        orders.append(copy)
        return orders

    def _copy(self, prefix: HotPrefix, begin: int, end: int, pool: Pool) -> Copy | None:
        """An order to the best target that has not refused it; None if nobody is left."""
        keys = prefix.keys[begin : min(end, begin + ORDER_BLOCKS_MAX)]
        refused = self._refused.get(keys[0], set())
        if len(refused) >= self.settings.tries_max:
            return None
        targets = [n for n in pool.takers(prefix.model) if n != self.node and n not in refused]
        targets = targets or [n for n in pool.takers("") if n != self.node and n not in refused]
        if not targets:
            return None
        nbytes = len(keys) * prefix.block_bytes
        has = pool.leading(prefix.keys[:begin]) if begin else {}
        promised = self._promised()

        def rank(name: str) -> tuple[bool, int, float, str]:
            # Beside the blocks before them, if there is room: there they will be looked for.
            free_bytes = pool.nodes[name].free_bytes - promised.get(name, 0)
            return free_bytes < nbytes, -has.get(name, 0), -free_bytes, name

        target = min(targets, key=rank)
        parent = prefix.keys[begin - 1] if begin else NO_PARENT
        reason = f"{self.node} is drained; wanted {prefix.popularity:.1f} times"
        return Copy(self._numbers(), keys, parent, begin, self.node, target, nbytes, reason)

    def _promised(self) -> dict[str, int]:
        """Bytes that are under way to each target."""
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
    """Which blocks a node has and nobody else, as far as is known; another node that is being
    drained does not count. Keys are chained, so each is looked at once, however many prefixes begin
    with it, and neighbours with the same holders are judged together."""

    def __init__(self, node: str, pool: Pool) -> None:
        self._node, self._pool = node, pool
        self._others = {name for name, one in pool.nodes.items() if not one.draining} - {node}
        # Of each key that was looked at: whether the node has it, and all before it.
        self._here: dict[bytes, bool] = {}
        self._judged: dict[int, tuple[bool, bool]] = {}

    def of(self, keys: Sequence[bytes]) -> list[int]:
        """Indices of those of the node's leading blocks of a prompt that nobody else has, without
        those that were looked at before."""
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
        """Whether the node is among these holders, and whether another one is."""
        found = self._judged.get(holders)
        if found is None:
            names = self._pool.nodes_of(holders)
            found = self._judged[holders] = self._node in names, bool(names & self._others)
        return found


class InstanceDrain:
    """One instance that is given nothing new until its requests have ended."""

    def __init__(
        self,
        instance: str,
        begun_at: float,
        settings: DrainSettings | None = None,
        *,
        deadline_s: float | None = None,
    ) -> None:
        self.instance = instance
        self.phase = Phase.WAITING
        self.deadline = begun_at + (deadline_s or (settings or DrainSettings()).deadline_s)
        self._requests = 0
        self._unique_blocks = 0

    def step(self, requests: int | None, now: float, *, unique_blocks: int = 0) -> Phase:
        """`requests` of it are in flight (None: it is gone); `unique_blocks` hot ones are in its
        HBM only (`unique_in_hbm`). The phase then."""
        if self.phase in ENDED:
            return self.phase
        self._requests, self._unique_blocks = requests or 0, unique_blocks
        if requests is None:
            self.phase = Phase.LOST
        elif not requests:
            self.phase = Phase.DONE
        elif now >= self.deadline:
            self.phase = Phase.LATE
        return self.phase

    def cancel(self) -> None:
        """It stays as it is."""
        if self.phase not in ENDED:
            self.phase = Phase.CANCELLED

    def progress(self, now: float) -> Progress:
        """How far it is."""
        left_s = max(0.0, self.deadline - now) if self.phase not in ENDED else 0.0
        return Progress(
            self.instance,
            self.phase,
            left_s,
            self._unique_blocks,
            requests=self._requests,
            kind="instance",
        )


def unique_in_hbm(hot: Sequence[HotPrefix], pool: Pool) -> dict[str, int]:
    """How many hot blocks are in each instance's HBM and nowhere else: lost with its cache. Those
    that have none are left out. One look at each block, whoever has it, and for all instances."""
    seen: set[bytes] = set()
    alone: Counter[int] = Counter()
    for prefix in hot:
        for key in reversed(prefix.keys):
            if key in seen:
                break  # keys are chained: those before it came with it
            seen.add(key)
            for run in pool.index.match((key,)).runs:
                if run.holders.bit_count() == 1:
                    alone[run.holders.bit_length() - 1] += 1
    labels = {number: pool.index.label(number).rpartition("/") for number in alone}
    return {name: alone[number] for number, (name, _, tier) in labels.items() if tier == "hbm"}


def _keys(order: Order) -> Collection[bytes]:
    return order.keys if isinstance(order, Copy) else ()


def _runs(indices: Sequence[int]) -> list[tuple[int, int]]:
    """Consecutive ones together, as [begin, end)."""
    runs: list[tuple[int, int]] = []
    for index in indices:
        if runs and runs[-1][1] == index:
            runs[-1] = runs[-1][0], index + 1
        else:
            runs.append((index, index + 1))
    return runs
