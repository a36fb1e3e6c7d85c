"""Eviction policies: which block to evict next. Pure, behind one small interface.

A policy contains the *candidates*: committed blocks without a lease or a hard pin (a tier keeps
soft-pinned blocks in a second policy). The owner removes a block from the policy when a reader
leases it and adds it again when its last lease ends, so a policy never offers a block that is being
read, and needs no rule about leases. The price is that a block loses its queue position with each
use. Therefore a policy stores its knowledge about a block in `entry.visits`, which stays with the
block, and never in its position.

Chains. A block without its ancestors can never be matched, so a chain has to be evicted from its
tail. The *guarantee* is the node core's count of resident children: it sets a popped block that
still has some aside with `spare`. A policy only makes that rare: callers add and touch a chain from
its tail to its head, so that the tail is the oldest, and `LengthAware` orders by depth itself.

A policy does not offer a spared entry again until it is recalled, because the reason that kept it
has changed, or until it is used. A sweep pops from the front, so the entries that it spares or puts
back would have been evicted before all others: `recall` and `put_back` return them to the front,
and a failed attempt to evict a block does not change the order of eviction. So a sweep is offered
no entry twice, and each block is tried in vain once, not once per sweep, however many cannot be
evicted.

Every operation is O(1) amortised; with the buckets of `LFU` and `LengthAware`, at worst O(ranks),
of which there are a few hundred. Queues are `OrderedDict`s with the entry itself as key: some 90
bytes per candidate, removal anywhere, and the oldest in O(1). (A plain `dict` keeps order too, but
finding its oldest key walks over every key deleted before it.) See `docs/decisions/eviction.md` for
the use of each policy.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections import OrderedDict, deque
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar

from ..errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

# Counts saturate here: Redis's LFU counter has the same 8 bits, and CPython shares integers up to
# 256, so a count (other than an aged one of LFU) costs its entry no memory.
VISITS_MAX = 255


class Evictable(Protocol):
    """The interface of a block to a policy. Hashed and compared by identity: has no `__eq__`."""

    @property
    def key(self) -> bytes:
        """The block's key. Only `S3FIFO` uses it, for its ghost queue of evicted blocks."""

    @property
    def depth(self) -> int:
        """Index of the block in its prefix: 0 is the head of the chain. Constant."""

    visits: int
    """The policy's own note about the block: 0 at birth, then written by the policy alone. Its
    meaning differs from policy to policy; nobody else should read it."""


E = TypeVar("E", bound=Evictable)


class EvictionPolicy(ABC, Generic[E]):
    """An order of eviction of candidates. No method raises; none does I/O or reads a clock."""

    name: ClassVar[str]

    def __init__(self) -> None:
        self._spared: OrderedDict[E, None] = OrderedDict()

    def add(self, entry: E) -> None:
        """Make `entry` the newest candidate; if it was a candidate already, this is a touch.

        The first `add` of a block is its creation. Each later one is the end of a lease: a use.
        """
        if self._holds(entry):
            self._promote(entry)
        else:
            self._spared.pop(entry, None)
            self._visit(entry)
            self._insert(entry)

    def touch(self, entry: E) -> None:
        """Note that `entry` was used without a lease. If it is no candidate, only `entry.visits`
        changes."""
        if entry in self:
            self.add(entry)
        else:
            self._visit(entry)

    def discard(self, entry: E) -> None:
        """Remove a candidate that was leased, pinned or dropped. Idempotent."""
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

    def pop(self, *, again: bool = True) -> E | None:
        """Remove and return the best victim; None when there is none, or only spared ones.

        The caller reports the outcome with `left`, `spare` or `put_back`. A caller that keeps
        popped entries which cannot be evicted passes `again=False`: a policy that gives used blocks
        another round then returns None before it begins one, since no eviction has made that
        necessary.
        """
        return self._take(again)

    def left(self, entry: E) -> None:
        """Note that a candidate leaves the tier to make room: it is evicted or demoted."""

    def spare(self, entry: E) -> None:
        """Set aside a popped entry that cannot be evicted at present. Not a use."""
        if entry not in self:
            self._spared[entry] = None

    def recall(self, entry: E) -> None:
        """Offer a spared entry again, in its old place, as the reason that kept it may be gone."""
        if entry in self._spared:
            del self._spared[entry]
            self._return(entry)

    def recall_oldest(self) -> None:
        """`recall` the entry that was spared first, if there is any."""
        if self._spared:
            self._return(self._spared.popitem(last=False)[0])

    def put_back(self, entry: E) -> None:
        """Undo a `pop`: the entry is the next victim again. Put back several in reverse order."""
        if entry not in self:
            self._return(entry)

    def compact(self) -> None:
        """Release memory left from a time with many more candidates; O(candidates). By default
        this does nothing."""

    def __len__(self) -> int:
        return self._count() + len(self._spared)

    def __contains__(self, entry: E) -> bool:
        return self._holds(entry) or entry in self._spared

    def __iter__(self) -> Iterator[E]:
        """Every candidate in the order in which `pop` would offer them if all of them left, then
        the spared ones. Do not change the policy meanwhile."""
        return chain(self._in_order(), self._spared)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {len(self)} candidates, {len(self._spared)} spared>"

    def _visit(self, entry: E) -> None:
        """Note a use in `entry.visits`."""
        entry.visits = min(entry.visits + 1, VISITS_MAX)

    def _promote(self, entry: E) -> None:
        """Note a use of a queued entry."""
        self._remove(entry)
        self._visit(entry)
        self._insert(entry)

    @abstractmethod
    def _insert(self, entry: E) -> None:
        """Queue an entry, as the newest of its rank."""

    @abstractmethod
    def _return(self, entry: E) -> None:
        """Queue an entry as the oldest of its rank."""

    @abstractmethod
    def _remove(self, entry: E) -> None:
        """Remove a queued entry."""

    @abstractmethod
    def _take(self, again: bool) -> E | None:
        """Remove and return the best victim in the queues; see `pop` for `again`."""

    @abstractmethod
    def _holds(self, entry: E) -> bool:
        """Whether the entry is queued."""

    @abstractmethod
    def _count(self) -> int:
        """The number of entries in all queues."""

    @abstractmethod
    def _in_order(self) -> Iterator[E]:
        """Every queued entry, the best victim first."""


class LRU(EvictionPolicy[E]):
    """Evicts the least recently used block. One queue, no assumptions; the default."""

    name = "lru"

    def __init__(self) -> None:
        super().__init__()
        self._queue: OrderedDict[E, None] = OrderedDict()

    # A lease of 16 blocks is 16 discards and 16 adds, so the default policy implements them inline.
    # With batches of both, the core's share of such a lease and its release went from 22 to 10 us.
    # It does not count visits: the position of a block shows its last use.

    def add(self, entry: E) -> None:
        """See `EvictionPolicy.add`."""
        if self._spared:
            self._spared.pop(entry, None)
        self._queue[entry] = None
        self._queue.move_to_end(entry)

    def discard(self, entry: E) -> None:
        """See `EvictionPolicy.discard`."""
        self._queue.pop(entry, None)
        if self._spared:
            self._spared.pop(entry, None)

    def add_all(self, entries: Sequence[E]) -> None:
        """See `EvictionPolicy.add_all`."""
        queue, move_to_end = self._queue, self._queue.move_to_end
        for entry in entries:
            if entry in queue:
                move_to_end(entry)
            else:
                queue[entry] = None
        if self._spared:
            self._unspare(entries)

    def discard_all(self, entries: Sequence[E]) -> None:
        """See `EvictionPolicy.discard_all`."""
        pop = self._queue.pop
        for entry in entries:
            pop(entry, None)
        if self._spared:
            self._unspare(entries)

    def _unspare(self, entries: Sequence[E]) -> None:
        for entry in entries:
            self._spared.pop(entry, None)

    def _visit(self, entry: E) -> None:
        pass

    def __bool__(self) -> bool:
        return bool(self._queue or self._spared)

    def compact(self) -> None:
        """See `EvictionPolicy.compact`."""
        entries = list(self._queue)
        self._queue.clear()
        self._queue.update(dict.fromkeys(entries))

    def _insert(self, entry: E) -> None:
        self._queue[entry] = None

    def _return(self, entry: E) -> None:
        _put_first(self._queue, entry)

    def _remove(self, entry: E) -> None:
        del self._queue[entry]

    def _take(self, again: bool) -> E | None:
        return self._queue.popitem(last=False)[0] if self._queue else None

    def _holds(self, entry: E) -> bool:
        return entry in self._queue

    def _count(self) -> int:
        return len(self._queue)

    def _in_order(self) -> Iterator[E]:
        return iter(self._queue)


class _Ranked(EvictionPolicy[E]):
    """One LRU queue per rank; evicts the lowest rank first. A sorted list, as ranks are few."""

    def __init__(self) -> None:
        super().__init__()
        self._queues: dict[int, OrderedDict[E, None]] = {}
        self._ranks: list[int] = []  # exactly the keys of _queues, sorted; no queue is empty
        self._entries = 0

    @abstractmethod
    def _rank(self, entry: E) -> int:
        """The entry's rank, which must not change while it is queued."""

    def _insert(self, entry: E) -> None:
        self._queue_of(entry)[entry] = None
        self._entries += 1

    def _return(self, entry: E) -> None:
        _put_first(self._queue_of(entry), entry)
        self._entries += 1

    def _queue_of(self, entry: E) -> OrderedDict[E, None]:
        rank = self._rank(entry)
        if rank not in self._queues:
            self._queues[rank] = OrderedDict()
            insort(self._ranks, rank)
        return self._queues[rank]

    def _remove(self, entry: E) -> None:
        del self._queues[self._rank(entry)][entry]
        self._shrink(self._rank(entry))

    def _take(self, again: bool) -> E | None:
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

    def _in_order(self) -> Iterator[E]:
        return chain.from_iterable(map(self._queues.__getitem__, self._ranks))


class LFU(_Ranked[E]):
    """Evicts the block with the fewest uses, the oldest among equals, with ageing.

    Without ageing, blocks that were once popular are never evicted. This is LFU with dynamic ageing
    (Arlitt et al., "Evaluating content management techniques for Web proxy caches", 2000; Squid's
    LFUDA): the policy's age is the count of its latest victim, and a block's count starts from that
    age rather than from zero, so recently used blocks overtake formerly popular ones. Halving all
    counts at intervals does the same, but is a pass over the tier: 0.2 seconds at 500,000 blocks.
    `visits` is the block's count on that scale, at most `VISITS_MAX` above the age.
    """

    name = "lfu"
    _age = 0

    def _visit(self, entry: E) -> None:
        entry.visits = min(max(entry.visits, self._age) + 1, self._age + VISITS_MAX)

    def _rank(self, entry: E) -> int:
        return entry.visits

    def left(self, entry: E) -> None:
        """See `EvictionPolicy.left`."""
        self._age = max(self._age, entry.visits)


class LengthAware(_Ranked[E]):
    """Evicts the deepest block, the least recently used among equals.

    After Mooncake's LengthAwareCache (Qin et al., arXiv 2407.00079): more requests share the head
    of a prefix than its tail. It keeps many short prefixes rather than a few long ones, and is the
    wrong policy for a pool of a few long documents.
    """

    name = "length-aware"

    def _rank(self, entry: E) -> int:
        return -entry.depth


class SIEVE(EvictionPolicy[E]):
    """A queue in order of arrival, and a hand that moves over it (Zhang et al., NSDI 2024).

    The hand moves from the oldest to the newest, then starts over. A block that was visited since
    the hand last passed loses its mark and stays; the first unmarked block is evicted. A scan of
    blocks that are never used again passes through between the hand and the newest, and does not
    evict the blocks that proved useful.

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

    def _return(self, entry: E) -> None:
        _put_first(self._ahead, entry)

    def _remove(self, entry: E) -> None:
        del (self._ahead if entry in self._ahead else self._behind)[entry]

    def _take(self, again: bool) -> E | None:
        while self._ahead or self._behind:
            if not self._ahead:
                if not again:
                    return None
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

    def _in_order(self) -> Iterator[E]:
        for marked in (False, True):  # the hand passes a marked entry once more
            for queue in (self._ahead, self._behind):
                yield from (entry for entry in queue if (entry.visits == 2) is marked)


class S3FIFO(EvictionPolicy[E]):
    """Three queues: small, main, and a ghost queue of evicted keys (Yang et al., SOSP 2023).

    A new block enters the small queue, a tenth of all, and is evicted from there unless it was used
    twice more; then it moves to main, which gives it another round for each use, up to three. A key
    that returns soon after its eviction goes to main at once. `visits` counts uses over both:

        visits   0 unknown | 1, 2 in small, 0 or 1 uses | 3 ... 6 in main, 0 to 3 uses
    """

    name = "s3fifo"
    _MAIN, _VISITS_MAX = 3, 6  # the paper: promoted after two uses; two bits of frequency
    _SMALL_SHARE = 0.1  # the paper's: 10 % of the cache
    _GHOST_MIN = 128  # so that a small tier has a useful ghost queue; some 16 KiB

    def __init__(self) -> None:
        super().__init__()
        self._small: OrderedDict[E, None] = OrderedDict()
        self._main: OrderedDict[E, None] = OrderedDict()
        # Hashes, not keys: each is 17 bytes smaller, and a collision promotes one block early
        self._ghost: OrderedDict[int, None] = OrderedDict()

    def _visit(self, entry: E) -> None:
        if entry.visits == 0 and hash(entry.key) in self._ghost:
            del self._ghost[hash(entry.key)]
            entry.visits = self._MAIN
        else:
            entry.visits = min(entry.visits + 1, self._VISITS_MAX)

    def _promote(self, entry: E) -> None:
        self._visit(entry)  # lazily: `_take` checks visits when it reaches the entry

    def _insert(self, entry: E) -> None:
        self._queue_of(entry)[entry] = None

    def _return(self, entry: E) -> None:
        _put_first(self._queue_of(entry), entry)

    def _queue_of(self, entry: E) -> OrderedDict[E, None]:
        return self._main if entry.visits >= self._MAIN else self._small

    def _remove(self, entry: E) -> None:
        del (self._small if entry in self._small else self._main)[entry]

    def _take(self, again: bool) -> E | None:
        while self._small or self._main:
            if len(self._small) > self._SMALL_SHARE * self._count() or not self._main:
                entry = self._small.popitem(last=False)[0]
                if entry.visits < self._MAIN:
                    return entry
                entry.visits = self._MAIN
            else:
                entry = self._main.popitem(last=False)[0]
                if entry.visits <= self._MAIN:
                    return entry
                if not again:
                    _put_first(self._main, entry)
                    return None
                entry.visits -= 1
            self._main[entry] = None
        return None

    def left(self, entry: E) -> None:
        """Add an entry evicted from the small queue to the ghost queue, which keeps as many keys as
        there are candidates (in the paper: as many as main has)."""
        if entry.visits >= self._MAIN:
            return
        self._ghost[hash(entry.key)] = None
        while len(self._ghost) > max(self._GHOST_MIN, self._count()):
            self._ghost.popitem(last=False)

    def _holds(self, entry: E) -> bool:
        return entry in self._small or entry in self._main

    def _count(self) -> int:
        return len(self._small) + len(self._main)

    def _in_order(self) -> Iterator[E]:
        # As `_take`, without moving an entry: `again` are those that get another round in main.
        small, main = iter(self._small), ((entry, entry.visits) for entry in self._main)
        again: deque[tuple[E, int]] = deque()
        smalls, mains = len(self._small), len(self._main)
        while smalls or mains:
            if smalls > self._SMALL_SHARE * (smalls + mains) or not mains:
                entry = next(small)
                visits = self._MAIN if entry.visits >= self._MAIN else 0
                smalls -= 1
            else:
                entry, visits = next(main, None) or again.popleft()
                visits = visits - 1 if visits > self._MAIN else 0
                mains -= 1
            if visits:
                again.append((entry, visits))
                mains += 1
            else:
                yield entry


def _put_first(queue: OrderedDict[E, None], entry: E) -> None:
    queue[entry] = None
    queue.move_to_end(entry, last=False)


POLICIES: dict[str, type[EvictionPolicy[Any]]] = {
    policy.name: policy for policy in (LRU, LFU, LengthAware, SIEVE, S3FIFO)
}


def make_policy(name: str) -> EvictionPolicy[Any]:
    """A new, empty policy by its name in `POLICIES`; `InvalidInput` lists the names."""
    if name not in POLICIES:
        raise InvalidInput(f"eviction policy {name!r} is none of {', '.join(POLICIES)}")
    return POLICIES[name]()
