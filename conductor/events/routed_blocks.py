"""Applies feed updates to the prefix index, and predicts blocks from routing decisions. Pure.

An engine without events has the blocks that it computed, until it evicts them: the index assumes
that a prompt's blocks are on the instance to which the prompt was routed, for `ROUTED_S` from the
last time. For an engine that publishes events the index follows the events, but these are some
milliseconds late, and in a burst of one prompt those milliseconds decide whether the prompt is
computed once or ten times. So there the same guess is made for `PREDICTED_S` only; by then the
engine's events have confirmed it, or it was wrong.

A block that an engine has reported, but may have removed in events that were lost (doubted), is
between the two: the index keeps it for `ROUTED_S` more, and longer if further prompts that use it
are routed there.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from .index_updates import (
    NODE_TIERS,
    Added,
    Cleared,
    Doubted,
    Gone,
    Heard,
    HolderInventory,
    Removed,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from ..state.prefix_index import PrefixIndex
    from .index_updates import Update

# Lifetimes of guesses: of approximate routing (an engine without events), and for the gap between a
# decision and its events. Dynamo's defaults.
ROUTED_S = 120.0
PREDICTED_S = 5.0

# The most guesses per holder; the oldest are evicted. 33 million tokens in blocks of 512.
GUESSES_MAX = 65_536


class _Guesses:
    """Blocks that a holder is assumed to have until a time; per holder number, the earliest first.

    Invariant: every guessed block is in the index only because of its guess.
    """

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index
        self._until: dict[int, OrderedDict[bytes, float]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._until.values()))

    def put(self, number: int, keys: Iterable[bytes], until: float) -> None:
        """Add or renew guesses until `until`, which is not before an earlier `until` of this
        number."""
        ends = self._until.setdefault(number, OrderedDict())
        for key in keys:
            ends.pop(key, None)
            ends[key] = until
        excess = len(ends) - GUESSES_MAX
        if excess > 0:
            oldest = [ends.popitem(last=False)[0] for _ in range(excess)]
            self._index.remove(number, oldest, 0.0, guess=True)

    def known(self, number: int, keys: Iterable[bytes]) -> list[bytes]:
        """The keys among `keys` that are guesses."""
        ends = self._until.get(number)
        return [key for key in keys if key in ends] if ends else []

    def settle(self, number: int, keys: Iterable[bytes]) -> None:
        """Forget guesses for these keys, since an event has settled them."""
        ends = self._until.get(number)
        if ends:
            for key in keys:
                ends.pop(key, None)

    def hasten(self, number: int, until: float) -> None:
        """Let all guesses of a number end at `until` at the latest."""
        for key, end in self._until.get(number, {}).items():
            self._until[number][key] = min(end, until)

    def forget(self, number: int) -> None:
        """Forget all guesses of a number, since events have settled them."""
        self._until.pop(number, None)

    def expire(self, now: float) -> int:
        """Remove expired guesses from the index; returns how many blocks."""
        count = 0
        for number, ends in list(self._until.items()):
            ended = []
            while ends and next(iter(ends.values())) <= now:
                ended.append(ends.popitem(last=False)[0])
            if ended:
                self._index.remove(number, ended, now, guess=True)
                count += len(ended)
            if not ends:
                del self._until[number]
        return count


class Holdings:
    """The prefix index, fed by updates and by routing decisions. Not thread-safe."""

    def __init__(self, index: PrefixIndex) -> None:
        self.index = index
        self._routed = _Guesses(index)
        self._doubted = _Guesses(index)
        self._speaking: set[tuple[str, str]] = set()

    @property
    def guessed_blocks(self) -> int:
        """How many pairs of a block and a holder are guesses."""
        return len(self._routed) + len(self._doubted)

    def speaks(self, name: str) -> bool:
        """Whether this instance's own feed has sent updates. Updates of a node with the same name
        do not count: they are about other tiers."""
        return (name, "hbm") in self._speaking

    def reported(self, name: str, keys: Sequence[bytes]) -> int:
        """Of blocks that the index has in an instance's HBM, how many come before the first one
        that is only a guess."""
        number = self.index.find(name, "hbm")
        if number is None:
            return 0
        guesses = {*self._routed.known(number, keys), *self._doubted.known(number, keys)}
        if not guesses:
            return len(keys)
        return next(at for at, key in enumerate(keys) if key in guesses)

    def routed(self, name: str, keys: Sequence[bytes], now: float) -> None:
        """Record that a prompt with these blocks was routed to this instance, or used there again.
        Raises InvalidRequest when there are too many holders."""
        number = self.index.holder(name, "hbm")
        self._doubted.put(number, self._doubted.known(number, keys), now + ROUTED_S)
        guesses = self.index.missing(number, keys)
        guesses += self._routed.known(number, keys)
        self.index.add(number, guesses, now, guess=True)
        lasts_s = PREDICTED_S if self.speaks(name) else ROUTED_S
        self._routed.put(number, guesses, now + lasts_s)

    def expire(self, now: float) -> int:
        """Remove expired guesses; returns how many blocks. Call it often: it only checks the oldest
        guess of each holder."""
        return self._routed.expire(now) + self._doubted.expire(now)

    def drop_instance(self, name: str) -> None:
        """An instance has left: forget it, and keep the blocks of a node with the same name. Blocks
        that its engine reported in other tiers are removed by its feed's `Gone`."""
        self._drop(name, ("hbm",))

    def forget_idle_nodes(self, beside: Collection[str]) -> set[str]:
        """Forget nodes without blocks and without a feed that are not in `beside`, the nodes beside
        instances. Returns the names of the nodes kept. An instance's HBM does not count as a
        node."""
        known: set[str] = set()
        kept: set[str] = set()
        for number in self.index.numbers():
            name, _, tier = self.index.label(number).rpartition("/")
            if tier in NODE_TIERS:
                known.add(name)
                if self.index.blocks_of(number) or (name, tier) in self._speaking or name in beside:
                    kept.add(name)
        for name in known - kept:
            self._drop(name, NODE_TIERS)
        return kept

    def _drop(self, name: str, tiers: Iterable[str]) -> None:
        for tier in tiers:
            number = self.index.find(name, tier)
            if number is not None:
                self._settle_all(number)
            self._speaking.discard((name, tier))
        self.index.drop(name, tiers)

    def apply(self, update: Update, now: float) -> None:
        """Apply a feed's update. Raises InvalidRequest when there are too many holders."""
        if isinstance(update, Gone):
            self._drop(update.name, update.tiers)
        elif isinstance(update, Cleared):
            self._cleared(update, now)
        else:
            number = self.index.holder(update.name, update.tier)
            self._spoke(update.name, update.tier, now)
            self._apply(number, update, now)

    def _apply(
        self, number: int, update: Added | Removed | HolderInventory | Doubted | Heard, now: float
    ) -> None:
        index = self.index
        if isinstance(update, Doubted):
            held = set(index.missing(number, update.keys))
            kept = [key for key in update.keys if key not in held]
            self._doubted.put(number, kept, now + ROUTED_S)
            return
        if isinstance(update, Added):
            index.add(number, update.keys, now)
            self._settle(number, update.keys)
        elif isinstance(update, Removed):
            index.remove(number, update.keys, now)
            self._settle(number, update.keys)
        elif isinstance(update, HolderInventory):
            self._take_inventory(number, update, now)
        index.heard(number, now)

    def _take_inventory(self, number: int, part: HolderInventory, now: float) -> None:
        if part.first:
            self.index.begin_inventory(number)
        self.index.inventory(number, part.keys)
        if part.last:
            self.index.end_inventory(number, now)
            self._settle_all(number)

    def _cleared(self, update: Cleared, now: float) -> None:
        for tier in update.tiers:
            number = self.index.find(update.name, tier)
            if number is not None:
                self._settle_all(number)
                self.index.abandon_inventory(number)
                self.index.clear(number, now)
            self._spoke(update.name, tier, now)

    def _spoke(self, name: str, tier: str, now: float) -> None:
        if (name, tier) not in self._speaking:
            self._speaking.add((name, tier))
            number = self.index.find(name, tier)
            if number is not None:
                self._routed.hasten(number, now + PREDICTED_S)

    def _settle(self, number: int, keys: Sequence[bytes]) -> None:
        self._routed.settle(number, keys)
        self._doubted.settle(number, keys)

    def _settle_all(self, number: int) -> None:
        self._routed.forget(number)
        self._doubted.forget(number)
