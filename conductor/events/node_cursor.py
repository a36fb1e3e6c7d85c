"""Cursor into a node's events: the next request, and the index updates in its reply. Pure.

    inventory   all pages of one state; a page of another state: begin again
    events      the events since then; after a gap, or on a new connection: back to the inventory
    spaces      every second between events: what the keys of the engines there are made of

A new connection may lead to a node that has restarted and counts from the beginning, so earlier
sequence numbers are void. The known blocks stay in the index until the inventory is complete, or
until the node has not answered for so long (LOST_S) that no client can read from it.

A node reports for each block the tier that it is read from. A block both in the node's memory and
on its disk is reported in memory only. For a node of an older version, which reports no tiers, all
blocks count as in memory.
"""

from __future__ import annotations

import math
from itertools import groupby
from typing import TYPE_CHECKING

from tiffin.kvstore.errors import ProtocolError
from tiffin.kvstore.format.header import KEY_BYTES
from tiffin.kvstore.node.core import messages
from tiffin.kvstore.node.core.records import IN_DRAM, IN_NVME
from tiffin.messenger.health import Health

from .index_updates import (
    NODE_TIERS,
    Added,
    Announced,
    Cleared,
    Heard,
    HolderInventory,
    Removed,
    slices,
)

if TYPE_CHECKING:
    import random

    from .index_updates import NodeNews

# The interval between polls of a node; after a full page of events the next poll is at once.
POLL_S = 0.1
# The interval between questions for the key spaces of the engines at a node.
SPACES_S = 1.0
# The interval between `Heard` updates while there is no news.
HEARD_S = 1.0
# Back-off after failures: doubled from the first to the last.
BACKOFF_S = (0.1, 10.0)
# A node counts as lost after this time without an answer, which is also the lifetime of a
# registration in the directory (REGISTRATION_TTL_S of `kvstore.directory.base`).
LOST_S = 10.0

# A node's tier byte for a block: the tier that it is read from, or 0 if the node does not have it.
_TIERS = {IN_DRAM: "dram", IN_NVME: "nvme"}
_DRAM = _TIERS[IN_DRAM]
_IN_DRAM, _HELD, _KNOWN = bytes((IN_DRAM,)), bytes(_TIERS), bytes((0, *_TIERS))
_IN_DRAM_IF_ADDED = bytes(IN_DRAM * bool(added) for added in range(256))


class NodeCursor:
    """The cursor of one node. Not thread-safe.

    `due_at` is when to send the next request. Invariant: `_seq` is meaningful exactly while
    `_pages` is None.
    """

    def __init__(self, name: str, now: float, dice: random.Random) -> None:
        self.name = name
        self.due_at = now
        self.resyncs = 0
        self._dice = dice
        self._health = Health(*BACKOFF_S, dice.random)
        self._seq = 0
        self._pages: tuple[int, int] | None = (0, -1)  # keys so far, and of which state
        self._answered_at = now
        self._said_at = -math.inf
        self._has_disk = False  # whether the node ever reported a block on disk
        self._begun: set[str] = set()  # tiers of which the inventory under way has sent a part
        self._spaces_seq, self._spaces_at = 0, -math.inf
        self._asks_spaces = False
        self._holds = False  # whether updates were sent that a Cleared has to undo

    @property
    def failures(self) -> int:
        """How many requests in a row failed."""
        return self._health.failures

    @property
    def synced(self) -> bool:
        """Whether the inventory is complete and events are being followed."""
        return self._pages is None

    def request(self) -> messages.Request:
        """The next request to send."""
        if self._asks_spaces:
            return messages.Spaces(0, self._spaces_seq)
        if self._pages is not None:
            return messages.Inventory(0, after=self._pages[0])
        return messages.Events(0, after=self._seq)

    def connected(self) -> None:
        """Begin again: the next answer comes over a new connection."""
        self._begin_again()

    def answered(self, reply: object, now: float) -> list[NodeNews]:
        """The updates in the reply to `request`. Raises ProtocolError for an invalid reply, which
        counts as no answer: call `failed`."""
        if isinstance(reply, messages.SpacesPage):
            updates = self._spaces(reply, now)
        elif isinstance(reply, messages.KeyPage):
            updates = self._page(reply, now)
        elif isinstance(reply, messages.EventPage):
            updates = self._events(reply, now)
        else:
            raise ProtocolError(f"{self.name} answered with {type(reply).__name__}")
        self._health.answered()
        self._answered_at = now
        self._asks_spaces = self.synced and now >= self._spaces_at + SPACES_S
        return updates

    def failed(self, now: float) -> list[NodeNews]:
        """Handle a missing or invalid answer: back off, and begin again."""
        self._health.failed(now)
        self.due_at = self._health.retry_at
        self._begin_again()
        if self._holds and now >= self._answered_at + LOST_S:
            self._holds = False
            return [Cleared(self.name, NODE_TIERS)]
        return []

    # -- inside ----------------------------------------------------------------------------------

    def _begin_again(self) -> None:
        self._pages = (0, -1)
        self._spaces_seq, self._spaces_at, self._asks_spaces = 0, -math.inf, False

    def _spaces(self, page: messages.SpacesPage, now: float) -> list[NodeNews]:
        if not self._asks_spaces:
            raise ProtocolError(f"{self.name} sent key spaces that nobody asked for")
        self._spaces_at = now
        known, self._spaces_seq = self._spaces_seq, page.seq
        return [] if page.seq == known else [Announced(self.name, tuple(page.spaces))]

    def _page(self, page: messages.KeyPage, now: float) -> list[NodeNews]:
        if self._pages is None:
            raise ProtocolError(f"{self.name} sent an inventory that nobody asked for")
        keys = _split(self.name, page.keys)
        count, seq = self._pages
        if count and page.seq != seq:
            # The node no longer keeps the state that the pages before came from: begin again after
            # a random delay.
            self._begin_again()
            self.due_at = now + POLL_S * self._dice.random()
            return []
        if page.more and not keys:
            raise ProtocolError(f"{self.name} sent an empty page of an inventory that goes on")
        tiers = self._tiers(page.tiers, _IN_DRAM * len(keys), _HELD)
        if not count:
            self._begun.clear()
        updates = self._stock(keys, tiers, page)
        self._holds, self.due_at = True, now
        if page.more:
            self._pages = (count + len(keys), page.seq)
        else:
            self._pages, self._seq, self._said_at = None, page.seq, now
            self.resyncs += 1
        return updates

    def _events(self, page: messages.EventPage, now: float) -> list[NodeNews]:
        if self._pages is not None:
            raise ProtocolError(f"{self.name} sent events that nobody asked for")
        if page.gap:
            self._begin_again()
            self.due_at = now
            return []
        keys = _split(self.name, page.keys)
        if len(keys) != len(page.added) or page.first != self._seq + 1:
            raise ProtocolError(
                f"{self.name} sent {len(page.added)} events from {page.first} on with {len(keys)} "
                f"keys, instead of those after {self._seq}"
            )
        tiers = self._tiers(page.tiers, page.added.translate(_IN_DRAM_IF_ADDED), _KNOWN)
        self._seq += len(keys)
        self.due_at = now if len(keys) == messages.EVENTS_MAX else now + POLL_S
        if not keys and now < self._said_at + HEARD_S:
            return []
        self._said_at = now
        return self._in_order(keys, tiers) or [
            Heard(self.name, tier, self._seq) for tier in self._spoken_of()
        ]

    def _tiers(self, said: bytes, unsaid: bytes, known: bytes) -> bytes:
        """A tier byte per key: the node's own, or the default for a node that reports no tiers."""
        if said and (len(said) != len(unsaid) or said.translate(None, known)):
            raise ProtocolError(f"{self.name} sent {len(unsaid)} keys in tiers {said[:100]!r}")
        self._has_disk = self._has_disk or IN_NVME in said
        return said or unsaid

    def _spoken_of(self) -> tuple[str, ...]:
        """The tiers to send updates for: the disk only once the node has reported one."""
        return NODE_TIERS if self._has_disk else (_DRAM,)

    def _stock(self, keys: list[bytes], tiers: bytes, page: messages.KeyPage) -> list[NodeNews]:
        """The updates of one inventory page, tier by tier. The disk's inventory begins with the
        first page that reports a block on disk; the last page ends the inventory of every tier that
        has begun."""
        updates: list[NodeNews] = []
        for number, tier in _TIERS.items():
            if tier not in self._spoken_of():
                continue
            parts = list(slices([k for k, t in zip(keys, tiers, strict=True) if t == number]))
            for at, part in enumerate(parts):
                first, last = tier not in self._begun, not page.more and at == len(parts) - 1
                self._begun.add(tier)
                if part or first or last:
                    updates.append(HolderInventory(self.name, tier, part, first, last, page.seq))
        return updates

    def _in_order(self, keys: list[bytes], tiers: bytes) -> list[NodeNews]:
        """The updates for events, in order, as runs of keys that are now in the same tier, or in
        none. A block is added to its new tier before it is removed from the old one, so that the
        index never shows it as gone."""
        updates: list[NodeNews] = []
        start, seq = 0, self._seq - len(keys)
        for number, run in groupby(tiers):
            stop = start + len(list(run))
            for part in slices(keys[start:stop]):
                seq += len(part)
                here = _TIERS.get(number, "")
                if here:
                    updates.append(Added(self.name, here, part, seq))
                updates += [
                    Removed(self.name, tier, part, seq)
                    for tier in self._spoken_of()
                    if tier != here
                ]
            start = stop
        return updates


def _split(name: str, joined: bytes) -> list[bytes]:
    if len(joined) % KEY_BYTES:
        raise ProtocolError(f"{name} sent keys of {len(joined)} bytes, not of {KEY_BYTES} each")
    return [joined[at : at + KEY_BYTES] for at in range(0, len(joined), KEY_BYTES)]
