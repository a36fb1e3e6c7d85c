"""The log of blocks added, removed and moved between tiers; numbered events for its subscribers.

The tier of a block is the one that serves its reads: DRAM, whether or not NVMe has a replica too;
NVMe only if DRAM has none.

Pure and without a lock: it is part of the core, which the node calls under its lock. Subscribers
request the events `since` the last number that they have seen. A subscriber that is too slow gets
None and takes the inventory instead; the node never waits for a subscriber.
"""

from __future__ import annotations

from typing import NamedTuple

from ...errors import InvalidInput
from . import messages
from .records import IN_DRAM, IN_NVME

# Limit on how far a subscriber may lag: at 5,000 new blocks a second, 13 s. 0.6 MiB of tables, and
# at most 3 MiB of keys that are in no index any more.
EVENTS_KEPT = 65_536

# An event's byte: the tier (IN_DRAM or IN_NVME), 0 for a removed block; and _MOVED if the block was
# already findable, in the other tier.
_TIER, _MOVED = IN_DRAM | IN_NVME, 4
_TIERS = bytes(event & _TIER for event in range(256))
_ADDED = bytes(bool(event & _TIER) for event in range(256))
_NEWS = bytes(not event & _MOVED for event in range(256))


class NodeEvents(NamedTuple):
    """Events `first_seq` and following: `tiers[i]` is the tier of key i from this event on, IN_DRAM
    or IN_NVME, or 0 if it was removed. `news[i]` is 0 if it was in the other tier before.

    `keys` are joined, 16 bytes each. `newest_seq` is the number of the newest event in the log,
    from which a subscriber computes its lag.
    """

    first_seq: int
    tiers: bytes
    news: bytes
    keys: bytes
    newest_seq: int

    @property
    def last_seq(self) -> int:
        """The number of the last of these events; `first_seq - 1` if there are none."""
        return self.first_seq + len(self.tiers) - 1


class EventLog:
    """A ring of the last `events_kept` events.

    Event n is at place n % events_kept, so appending is two stores and reading is two slices: a
    node appends at every commit, with or without subscribers.
    """

    __slots__ = ("_events", "_kept", "_keys", "seq")

    def __init__(self, events_kept: int = EVENTS_KEPT) -> None:
        if events_kept < 1:
            raise InvalidInput(f"a log keeps at least one event, not {events_kept}")
        self.seq = 0  # the number of the last event; the first is 1
        self._kept = events_kept
        self._keys: list[bytes] = [b""] * events_kept
        self._events = bytearray(events_kept)

    def added(self, key: bytes, tier: int = IN_DRAM) -> None:
        """Log that a block was added, in this tier."""
        self._append(key, tier)

    def moved(self, key: bytes, tier: int) -> None:
        """Log that a block that was findable before moved to this tier."""
        self._append(key, tier | _MOVED)

    def removed(self, key: bytes) -> None:
        """Log that a block was removed."""
        self._append(key, 0)

    def _append(self, key: bytes, event: int) -> None:
        self.seq = seq = self.seq + 1
        place = seq % self._kept
        self._keys[place] = key
        self._events[place] = event

    def since(self, seq: int, limit: int) -> NodeEvents | None:
        """Up to `limit` events after number `seq`, oldest first; O(events returned).

        None is a gap: the log no longer has some of them, or `seq` is of another node. The caller
        takes the inventory instead.
        """
        if not max(0, self.seq - self._kept) <= seq <= self.seq:
            return None
        count = max(0, min(limit, self.seq - seq))
        begin = (seq + 1) % self._kept
        end = begin + count
        keys, events = self._keys[begin:end], bytes(self._events[begin:end])
        if end > self._kept:  # around the end of the ring
            keys += self._keys[: end - self._kept]
            events += bytes(self._events[: end - self._kept])
        tiers, news = events.translate(_TIERS), events.translate(_NEWS)
        return NodeEvents(seq + 1, tiers, news, b"".join(keys), self.seq)

    def page(self, request: messages.Events) -> messages.EventPage:
        """The reply to an `Events` request."""
        found = self.since(request.after, messages.EVENTS_MAX)
        if found is None:
            return messages.EventPage(request.id, self.seq + 1, b"", b"", gap=True)
        added = found.tiers.translate(_ADDED)
        return messages.EventPage(request.id, found.first_seq, added, found.keys, tiers=found.tiers)
