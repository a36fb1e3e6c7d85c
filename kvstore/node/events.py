"""What became findable in a node, where, and what ceased to be; numbered, for those who follow it.

A block is where it is read from: in DRAM, whether or not NVMe has it as well, or on NVMe alone.

Pure and without a lock: it belongs to the core, which is called under the node's lock. Followers
ask for what came `since` the last number that they have seen. One that is too slow is told so
(None) and takes the inventory instead; the node never waits for anybody.
"""

from __future__ import annotations

from typing import NamedTuple

from ..errors import InvalidInput
from . import messages
from .records import IN_DRAM, IN_NVME

# A follower may be this far behind: at 5,000 new blocks a second, 13 s. 1.1 MiB of tables, and at
# most 3 MiB of keys that are in no index any more.
EVENTS_KEPT = 65_536

# An event's byte: the tier (IN_DRAM or IN_NVME), 0 for a block that was removed; and whether it was
# findable before, in the other tier.
_TIER, _MOVED = IN_DRAM | IN_NVME, 4
_TIERS = bytes(event & _TIER for event in range(256))
_ADDED = bytes(bool(event & _TIER) for event in range(256))
_NEWS = bytes(not event & _MOVED for event in range(256))


class Events(NamedTuple):
    """Events `first_seq` and following: `tiers[i]` is where key i is from now on, IN_DRAM or
    IN_NVME, or 0 if it is here no more. `news[i]` is 0 if it was here before, in the other tier.

    `keys` are joined, 16 bytes each. `newest_seq` is the number of the last event that there was,
    so a follower knows how far behind it is.
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
    node appends at every commit, whether anybody listens or not.
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
        """The block can be found from now on, in this tier."""
        self._append(key, tier)

    def moved(self, key: bytes, tier: int) -> None:
        """The block could be found before; from now on it is in this tier."""
        self._append(key, tier | _MOVED)

    def removed(self, key: bytes) -> None:
        """The block can be found no more."""
        self._append(key, 0)

    def _append(self, key: bytes, event: int) -> None:
        self.seq = seq = self.seq + 1
        place = seq % self._kept
        self._keys[place] = key
        self._events[place] = event

    def since(self, seq: int, limit: int) -> Events | None:
        """Up to `limit` events after number `seq`, oldest first; O(events returned).

        None is a gap: some of them are forgotten, or `seq` is another node's. Take the inventory.
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
        return Events(seq + 1, tiers, news, b"".join(keys), self.seq)

    def page(self, request: messages.Events) -> messages.EventPage:
        """The answer to a follower."""
        found = self.since(request.after, messages.EVENTS_MAX)
        if found is None:
            return messages.EventPage(request.id, self.seq + 1, b"", b"", gap=True)
        added = found.tiers.translate(_ADDED)
        return messages.EventPage(request.id, found.first_seq, added, found.keys, tiers=found.tiers)
