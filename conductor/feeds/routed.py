"""What engines say they have, and what they are taken to have for what was routed there. Pure.

An engine that says nothing has what was computed on it, until it forgets: blocks are taken to be
where their prompt was routed, for `ROUTED_S` from the last time. An engine that publishes events is
believed, but its events are late by some milliseconds, and in a burst of one prompt those decide
whether the prompt is computed once or ten times: there the same is guessed for `PREDICTED_S` only,
by when the engine has said it itself, or it was not so.

What an engine did say, but may have taken back in events that were lost, is between the two: it is
believed for `ROUTED_S` more, and longer if prompts are routed there that use it.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from ..index import TIERS
from .updates import NODE_TIERS, Added, Cleared, Doubted, Gone, Heard, Inventory, Removed

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from ..index import PrefixIndex
    from .updates import Update

# Of approximate routing and of the gap between a decision and its events; Dynamo's defaults.
ROUTED_S = 120.0
PREDICTED_S = 5.0

# Guesses about one holder, the oldest leave: 33 million tokens in blocks of 512.
GUESSES_MAX = 65_536


class _Guesses:
    """Blocks that holders are taken to have until a time, per number the one that ends first first.

    Invariant: every such block is held in the index because of it.
    """

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index
        self._until: dict[int, OrderedDict[bytes, float]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._until.values()))

    def put(self, number: int, keys: Iterable[bytes], until: float) -> None:
        """Until then, which is not before any earlier `until` of this number."""
        ends = self._until.setdefault(number, OrderedDict())
        for key in keys:
            ends.pop(key, None)
            ends[key] = until
        excess = len(ends) - GUESSES_MAX
        if excess > 0:
            oldest = [ends.popitem(last=False)[0] for _ in range(excess)]
            self._index.remove(number, oldest, 0.0, guess=True)

    def known(self, number: int, keys: Iterable[bytes]) -> list[bytes]:
        """Those of the keys that are guessed."""
        ends = self._until.get(number)
        return [key for key in keys if key in ends] if ends else []

    def settle(self, number: int, keys: Iterable[bytes]) -> None:
        """These are known by better means now."""
        ends = self._until.get(number)
        if ends:
            for key in keys:
                ends.pop(key, None)

    def hasten(self, number: int, until: float) -> None:
        """All of a number end by then."""
        for key, end in self._until.get(number, {}).items():
            self._until[number][key] = min(end, until)

    def forget(self, number: int) -> None:
        """All of a number are known by better means now."""
        self._until.pop(number, None)

    def expire(self, now: float) -> int:
        """What ends now is held no more; returns how many blocks."""
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
    """The index, with what feeds say and what follows from routing. For one thread."""

    def __init__(
        self, index: PrefixIndex, *, routed_s: float = ROUTED_S, predicted_s: float = PREDICTED_S
    ) -> None:
        self.index = index
        self.routed_s = routed_s
        self.predicted_s = predicted_s
        self._routed = _Guesses(index)
        self._doubted = _Guesses(index)
        self._speaking: set[tuple[str, str]] = set()

    @property
    def guessed_blocks(self) -> int:
        """How many pairs of a block and a holder are guesses."""
        return len(self._routed) + len(self._doubted)

    def speaks(self, name: str) -> bool:
        """Whether this instance has said anything itself of what it has; what a node of its name
        says is of other tiers."""
        return (name, "hbm") in self._speaking

    def routed(self, name: str, keys: Sequence[bytes], now: float) -> None:
        """A prompt with these blocks was sent to this instance, or used there again. Raises
        InvalidRequest when there are too many holders."""
        number = self.index.holder(name, "hbm")
        self._doubted.put(number, self._doubted.known(number, keys), now + self.routed_s)
        guesses = self.index.missing(number, keys)
        guesses += self._routed.known(number, keys)
        self.index.add(number, guesses, now, guess=True)
        lasts_s = self.predicted_s if self.speaks(name) else self.routed_s
        self._routed.put(number, guesses, now + lasts_s)

    def expire(self, now: float) -> int:
        """Forget what was guessed for long enough; returns how many blocks. Call it often: it
        costs a look at each holder."""
        return self._routed.expire(now) + self._doubted.expire(now)

    def drop(self, name: str) -> None:
        """An instance and the node of its name have left: forget them."""
        self._drop(name, TIERS)

    def drop_instance(self, name: str) -> None:
        """An instance has left: forget it, and keep what a node of its name has. What its engine
        itself said of other tiers goes when its feed says so."""
        self._drop(name, ("hbm",))

    def forget_idle_nodes(self, beside: Collection[str]) -> set[str]:
        """Forget nodes that have nothing, of which nobody speaks and `beside` which no instance is.
        Returns the names of the others. An instance's own memory is not a node."""
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
        """Take in what a feed says. Raises InvalidRequest when there are too many holders."""
        if isinstance(update, Gone):
            self._drop(update.name, update.tiers)
        elif isinstance(update, Cleared):
            self._cleared(update, now)
        else:
            number = self.index.holder(update.name, update.tier)
            self._spoke(update.name, update.tier, now)
            self._apply(number, update, now)

    def _apply(
        self, number: int, update: Added | Removed | Inventory | Doubted | Heard, now: float
    ) -> None:
        index = self.index
        if isinstance(update, Doubted):
            held = set(index.missing(number, update.keys))
            kept = [key for key in update.keys if key not in held]
            self._doubted.put(number, kept, now + self.routed_s)
            return
        if isinstance(update, Added):
            index.add(number, update.keys, now)
            self._settle(number, update.keys)
        elif isinstance(update, Removed):
            index.remove(number, update.keys, now)
            self._settle(number, update.keys)
        elif isinstance(update, Inventory):
            self._take_inventory(number, update, now)
        index.heard(number, now, update.seq)

    def _take_inventory(self, number: int, part: Inventory, now: float) -> None:
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
                self._routed.hasten(number, now + self.predicted_s)

    def _settle(self, number: int, keys: Sequence[bytes]) -> None:
        self._routed.settle(number, keys)
        self._doubted.settle(number, keys)

    def _settle_all(self, number: int) -> None:
        self._routed.forget(number)
        self._doubted.forget(number)
