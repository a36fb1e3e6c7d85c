"""Which block leaves next: eviction policies, pure, behind one small interface.

A policy holds the *candidates*: blocks that are committed and that nobody leases or pins. A block
leaves the policy when it is leased and is added again when its last lease ends, so a policy never
offers a block that is being read, and needs no rule about leases. The price is that a position in
a queue does not survive a use. Therefore what a policy learns about a block lives in
`entry.visits`, which stays with the block, and never in its position.

Chains. A block without its ancestors can never be matched, so a chain has to leave from its tail.
The *guarantee* is the node core's count of resident children: a popped block that still has some is
given back with `spare`. A policy only makes that rare: callers add and touch a chain from its tail
to its head, so that the tail is the oldest, and `LengthAware` orders by depth itself.

Spared entries wait aside, behind all others, until as many victims have left as there are spared
entries. So nothing comes round twice within one sweep, no spared block is protected for ever, and
sparing costs at most one wasted `pop` per victim, amortised, however many blocks cannot leave.

Every operation is O(1) amortised; with the buckets of `LFU` and `LengthAware`, at worst O(ranks),
of which there are a few hundred. Queues are `OrderedDict`s with the entry itself as key: some 90
bytes per candidate, removal anywhere, and the oldest in O(1). (A plain `dict` keeps order too, but
finding its oldest key walks over every key deleted before it.) `docs/decisions/eviction.md` says
which policy is for what.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections import OrderedDict
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar

from .errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

# Counts saturate here: Redis's LFU counter has the same 8 bits, and CPython shares integers up to
# 256, so a count (other than an aged one of LFU) costs its entry no memory.
VISITS_MAX = 255


class Evictable(Protocol):
    """What a policy sees of a block. Hashed and compared by identity: no `__eq__` of its own."""

    @property
    def key(self) -> bytes:
        """The block's key. Only `S3FIFO` looks at it, for its memory of evicted blocks."""

    @property
    def depth(self) -> int:
        """Index of the block in its prefix: 0 is the head of the chain. Constant."""

    visits: int
    """The policy's own note about the block: 0 at birth, then written by the policy alone. Its
    meaning differs from policy to policy; nobody else should read it."""


E = TypeVar("E", bound=Evictable)


class EvictionPolicy(ABC, Generic[E]):
    """An order in which candidates leave. No method raises; none does I/O or reads a clock."""

    name: ClassVar[str]

    def __init__(self) -> None:
        self._spared: OrderedDict[E, None] = OrderedDict()
        self._victims_since_spare = 0

    def add(self, entry: E) -> None:
        """`entry` is a candidate from now on, the newest; if it was one already, this is a touch.

        The first `add` of a block is its birth. Each later one is the end of a lease: a use.
        """
        if entry in self:
            self.touch(entry)
        else:
            self._visit(entry)
            self._insert(entry)

    def touch(self, entry: E) -> None:
        """`entry` was used without a lease. Not a candidate: only `entry.visits` changes."""
        if self._holds(entry):
            self._promote(entry)
        else:
            self._visit(entry)

    def discard(self, entry: E) -> None:
        """`entry` is no longer a candidate: leased, pinned or gone. Tolerates that it was none."""
        if self._holds(entry):
            self._remove(entry)
        else:
            self._spared.pop(entry, None)

    def add_all(self, entries: Sequence[E]) -> None:
        """`add` each, in order: the last one is the newest."""
        for entry in entries:
            self.add(entry)

    def discard_all(self, entries: Sequence[E]) -> None:
        """`discard` each."""
        for entry in entries:
            self.discard(entry)

    def pop(self) -> E | None:
        """Remove and return the best victim; None when there are no candidates."""
        if self._spared and self._victims_since_spare >= len(self._spared):
            self._restore()
        entry = self._take()
        if entry is None and self._spared:
            entry = self._spared.popitem(last=False)[0]
        if entry is not None:
            self._victims_since_spare += 1
        return entry

    def spare(self, entry: E) -> None:
        """Take back what `pop` returned, now or later: it cannot leave yet. Not a use.

        It is offered again after all other candidates, or when enough victims have left (see the
        top of this file). A caller that spares gives up after `len(policy)` pops: by then it has
        been offered everything.
        """
        if entry in self:
            return
        self._victims_since_spare = max(0, self._victims_since_spare - 1) if self._spared else 0
        self._spared[entry] = None

    def compact(self) -> None:
        """Give back memory of a much larger past; O(candidates). A policy may not bother."""

    def __len__(self) -> int:
        return self._count() + len(self._spared)

    def __contains__(self, entry: E) -> bool:
        return self._holds(entry) or entry in self._spared

    def __iter__(self) -> Iterator[E]:
        """Every candidate, roughly the best victim first. Not to be changed meanwhile."""
        return chain(*self._lists(), self._spared)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {len(self)} candidates, {len(self._spared)} spared>"

    def _restore(self) -> None:
        for entry in self._spared:
            self._insert(entry)
        self._spared.clear()

    def _visit(self, entry: E) -> None:
        """Note a use in `entry.visits`."""
        entry.visits = min(entry.visits + 1, VISITS_MAX)

    def _promote(self, entry: E) -> None:
        """A use of an entry that is queued."""
        self._remove(entry)
        self._visit(entry)
        self._insert(entry)

    @abstractmethod
    def _insert(self, entry: E) -> None:
        """Queue an entry, as the newest of its rank."""

    @abstractmethod
    def _remove(self, entry: E) -> None:
        """Take a queued entry out."""

    @abstractmethod
    def _take(self) -> E | None:
        """Remove and return the best victim in the queues."""

    @abstractmethod
    def _holds(self, entry: E) -> bool:
        """Whether the entry is queued."""

    @abstractmethod
    def _count(self) -> int:
        """Entries in all queues."""

    @abstractmethod
    def _lists(self) -> list[OrderedDict[E, None]]:
        """All queues, the one that leaves first in front."""


class LRU(EvictionPolicy[E]):
    """The block that was used longest ago. One queue, no assumptions; the default."""

    name = "lru"

    def __init__(self) -> None:
        super().__init__()
        self._queue: OrderedDict[E, None] = OrderedDict()

    # A lease of 16 blocks is 16 discards and 16 adds, so the default policy spells them out. With
    # both done all at once, the core's share of such a lease and its release went from 22 to 10 us.

    def add(self, entry: E) -> None:
        """See `EvictionPolicy.add`."""
        if self._spared:
            self._spared.pop(entry, None)
        if entry.visits < VISITS_MAX:
            entry.visits += 1
        self._queue[entry] = None
        self._queue.move_to_end(entry)

    def discard(self, entry: E) -> None:
        """See `EvictionPolicy.discard`."""
        self._queue.pop(entry, None)
        if self._spared:
            self._spared.pop(entry, None)

    def add_all(self, entries: Sequence[E]) -> None:
        """See `EvictionPolicy.add_all`."""
        if self._spared:
            super().add_all(entries)
            return
        queue, move_to_end = self._queue, self._queue.move_to_end
        for entry in entries:
            if entry.visits < VISITS_MAX:
                entry.visits += 1
            if entry in queue:
                move_to_end(entry)
            else:
                queue[entry] = None

    def discard_all(self, entries: Sequence[E]) -> None:
        """See `EvictionPolicy.discard_all`."""
        if self._spared:
            super().discard_all(entries)
            return
        pop = self._queue.pop
        for entry in entries:
            pop(entry, None)

    def compact(self) -> None:
        """See `EvictionPolicy.compact`."""
        entries = list(self._queue)
        self._queue.clear()
        self._queue.update(dict.fromkeys(entries))

    def _insert(self, entry: E) -> None:
        self._queue[entry] = None

    def _remove(self, entry: E) -> None:
        del self._queue[entry]

    def _take(self) -> E | None:
        return self._queue.popitem(last=False)[0] if self._queue else None

    def _holds(self, entry: E) -> bool:
        return entry in self._queue

    def _count(self) -> int:
        return len(self._queue)

    def _lists(self) -> list[OrderedDict[E, None]]:
        return [self._queue]


class _Ranked(EvictionPolicy[E]):
    """One LRU queue per rank; the lowest rank leaves first. Ranks are few, so a sorted list."""

    def __init__(self) -> None:
        super().__init__()
        self._queues: dict[int, OrderedDict[E, None]] = {}
        self._ranks: list[int] = []  # exactly the keys of _queues, sorted; no queue is empty
        self._entries = 0

    @abstractmethod
    def _rank(self, entry: E) -> int:
        """Must not change while the entry is queued."""

    def _insert(self, entry: E) -> None:
        rank = self._rank(entry)
        if rank not in self._queues:
            self._queues[rank] = OrderedDict()
            insort(self._ranks, rank)
        self._queues[rank][entry] = None
        self._entries += 1

    def _remove(self, entry: E) -> None:
        del self._queues[self._rank(entry)][entry]
        self._shrink(self._rank(entry))

    def _take(self) -> E | None:
        if not self._ranks:
            return None
        rank = self._ranks[0]
        entry = self._queues[rank].popitem(last=False)[0]
        self._shrink(rank)
        return entry

    def _shrink(self, rank: int) -> None:
        self._entries -= 1
        if not self._queues[rank]:
            del self._queues[rank]
            del self._ranks[bisect_left(self._ranks, rank)]

    def _holds(self, entry: E) -> bool:
        return entry in self._queues.get(self._rank(entry), ())

    def _count(self) -> int:
        return self._entries

    def _lists(self) -> list[OrderedDict[E, None]]:
        return [self._queues[rank] for rank in self._ranks]


class LFU(_Ranked[E]):
    """The block with the fewest uses, the oldest among equals, with ageing.

    Without ageing, yesterday's favourites never leave. This is LFU with dynamic ageing (Arlitt et
    al., "Evaluating content management techniques for Web proxy caches", 2000; Squid's LFUDA): the
    policy's age is the count of its latest victim, and a block counts from that age rather than
    from zero, so those that are used now overtake those that were. Halving all counts now and then
    does the same, but is a pass over the tier: 0.2 seconds at 500,000 blocks. `visits`
    is the block's count on that scale, at most `VISITS_MAX` above the age.
    """

    name = "lfu"
    _age = 0

    def _visit(self, entry: E) -> None:
        entry.visits = min(max(entry.visits, self._age) + 1, self._age + VISITS_MAX)

    def _rank(self, entry: E) -> int:
        return entry.visits

    def _take(self) -> E | None:
        entry = super()._take()
        if entry is not None:
            self._age = max(self._age, entry.visits)
        return entry


class LengthAware(_Ranked[E]):
    """The deepest block, the least recently used among equals.

    After Mooncake's LengthAwareCache (Qin et al., arXiv 2407.00079): the head of a prefix is
    shared by more requests than its tail. It keeps many short prefixes rather than a few long
    ones, and is wrong for a pool that exists for a few long documents.
    """

    name = "length-aware"

    def _rank(self, entry: E) -> int:
        return -entry.depth


class SIEVE(EvictionPolicy[E]):
    """A queue in order of arrival, and a hand that sieves it (Zhang et al., NSDI 2024).

    The hand moves from the oldest to the newest, then starts over. A block that was visited since
    it last passed loses its mark and stays; the first unmarked one leaves. A scan of blocks that
    are never used again flows through between the hand and the newest, and does not touch those
    that proved useful.

        oldest [ _behind: passed, kept ] hand [ _ahead: not seen yet ] newest

    Keeping the two sides in two queues is the same algorithm as a linked list with a pointer into
    it, and needs no links. `visits`: 0 unknown, 1 unmarked, 2 marked.
    """

    name = "sieve"

    def __init__(self) -> None:
        super().__init__()
        self._behind: OrderedDict[E, None] = OrderedDict()
        self._ahead: OrderedDict[E, None] = OrderedDict()

    def _visit(self, entry: E) -> None:
        entry.visits = 2 if entry.visits else 1

    def _promote(self, entry: E) -> None:
        self._visit(entry)  # lazily: the hand will see the mark

    def _insert(self, entry: E) -> None:
        self._ahead[entry] = None

    def _remove(self, entry: E) -> None:
        del (self._ahead if entry in self._ahead else self._behind)[entry]

    def _take(self) -> E | None:
        while self._ahead or self._behind:
            if not self._ahead:
                self._ahead, self._behind = self._behind, self._ahead
            entry = self._ahead.popitem(last=False)[0]
            if entry.visits < 2:
                return entry
            entry.visits = 1
            self._behind[entry] = None
        return None

    def _holds(self, entry: E) -> bool:
        return entry in self._ahead or entry in self._behind

    def _count(self) -> int:
        return len(self._ahead) + len(self._behind)

    def _lists(self) -> list[OrderedDict[E, None]]:
        return [self._ahead, self._behind]


class S3FIFO(EvictionPolicy[E]):
    """Three queues: small, main, and a ghost of keys that left (Yang et al., SOSP 2023).

    A new block enters the small queue, a tenth of all, and leaves the pool from there unless it
    was used twice more; then it moves to main, which gives each use, up to three, another round.
    A key that comes back soon after it left goes to main at once. Uses are one number line:

        visits   0 unknown | 1, 2 in small, 0 or 1 uses | 3 ... 6 in main, 0 to 3 uses
    """

    name = "s3fifo"
    _MAIN, _VISITS_MAX = 3, 6  # the paper: promoted after two uses; two bits of frequency
    _SMALL_SHARE = 0.1  # the paper's: 10 % of the cache
    _GHOST_MIN = 128  # so that a small tier remembers at all; some 16 KiB

    def __init__(self) -> None:
        super().__init__()
        self._small: OrderedDict[E, None] = OrderedDict()
        self._main: OrderedDict[E, None] = OrderedDict()
        # Hashes, not keys: a collision promotes one block early, and each is 17 bytes smaller
        self._ghost: OrderedDict[int, None] = OrderedDict()

    def _visit(self, entry: E) -> None:
        if entry.visits == 0 and hash(entry.key) in self._ghost:
            del self._ghost[hash(entry.key)]
            entry.visits = self._MAIN
        else:
            entry.visits = min(entry.visits + 1, self._VISITS_MAX)

    def _promote(self, entry: E) -> None:
        self._visit(entry)  # lazily: the queues look at visits when the entry's turn comes

    def _insert(self, entry: E) -> None:
        (self._main if entry.visits >= self._MAIN else self._small)[entry] = None

    def _remove(self, entry: E) -> None:
        del (self._small if entry in self._small else self._main)[entry]

    def _take(self) -> E | None:
        while self._small or self._main:
            if len(self._small) > self._SMALL_SHARE * self._count() or not self._main:
                entry = self._small.popitem(last=False)[0]
                if entry.visits < self._MAIN:
                    self._remember(entry)
                    return entry
                entry.visits = self._MAIN
            else:
                entry = self._main.popitem(last=False)[0]
                if entry.visits <= self._MAIN:
                    return entry
                entry.visits -= 1
            self._main[entry] = None
        return None

    def _remember(self, entry: E) -> None:
        """The ghost holds as many keys as there are candidates (the paper: as main has)."""
        self._ghost[hash(entry.key)] = None
        while len(self._ghost) > max(self._GHOST_MIN, self._count()):
            self._ghost.popitem(last=False)

    def _holds(self, entry: E) -> bool:
        return entry in self._small or entry in self._main

    def _count(self) -> int:
        return len(self._small) + len(self._main)

    def _lists(self) -> list[OrderedDict[E, None]]:
        return [self._small, self._main]


POLICIES: dict[str, type[EvictionPolicy[Any]]] = {
    policy.name: policy for policy in (LRU, LFU, LengthAware, SIEVE, S3FIFO)
}


def make_policy(name: str) -> EvictionPolicy[Any]:
    """A new, empty policy by its name in `POLICIES`; `InvalidInput` lists the names."""
    if name not in POLICIES:
        raise InvalidInput(f"eviction policy {name!r} is none of {', '.join(POLICIES)}")
    return POLICIES[name]()
