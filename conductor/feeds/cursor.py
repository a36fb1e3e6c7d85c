"""Where a follower is in a node's events: what to ask next, and what the answer says. Pure.

    inventory   all pages of one state; a page of another state: begin again
    events      what came since; a gap, or a new connection: back to the inventory

A new connection may lead to a node that was restarted and counts from the beginning, so numbers of
before say nothing. What was known stays until the inventory is complete, or until the node has
not answered for so long that nobody will get anything from it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from tiffin.kvstore.block import KEY_BYTES
from tiffin.kvstore.errors import ProtocolError
from tiffin.kvstore.node import messages

from .updates import NODE_TIERS, Added, Cleared, Heard, Inventory, Removed, slices

if TYPE_CHECKING:
    import random

    from .updates import Update

# A node that has nothing new is asked so often; one that had is asked again at once.
POLL_S = 0.1
# It is said so often that there is nothing new.
HEARD_S = 1.0
# After failures: doubled from the first to the last.
BACKOFF_S = (0.1, 10.0)
# Of no answer. A registration lives as long (`kvstore.directory.base`), so the directory agrees.
LOST_S = 10.0

# Which tier a block is in, a node's events don't say; read over the network it comes out of DRAM.
_TIER = "dram"


class NodeCursor:
    """One node's. Not for two threads at a time.

    `due_at` is when to ask again. Invariant: `_seq` is meaningful exactly while `_pages` is None.
    """

    def __init__(self, name: str, now: float, dice: random.Random) -> None:
        self.name = name
        self.due_at = now
        self.resyncs = 0
        self.failures = 0  # in a row
        self._dice = dice
        self._seq = 0
        self._pages: tuple[int, int] | None = (0, -1)  # keys so far, and of which state
        self._answered_at = now
        self._said_at = -math.inf
        self._holds = False  # whether anything was said that a Cleared would take back

    @property
    def synced(self) -> bool:
        """Whether the inventory is complete and events are being followed."""
        return self._pages is None

    def request(self) -> messages.Request:
        """What to ask now."""
        if self._pages is not None:
            return messages.Inventory(0, after=self._pages[0])
        return messages.Events(0, after=self._seq)

    def connected(self) -> None:
        """The next answer is of a new connection."""
        self._begin_again()

    def answered(self, reply: object, now: float) -> list[Update]:
        """What the reply to `request` says. Raises ProtocolError for one that cannot be, which is
        no answer: call `failed`."""
        if isinstance(reply, messages.KeyPage):
            updates = self._page(reply, now)
        elif isinstance(reply, messages.EventPage):
            updates = self._events(reply, now)
        else:
            raise ProtocolError(f"{self.name} answered with {type(reply).__name__}")
        self.failures, self._answered_at = 0, now
        return updates

    def failed(self, now: float) -> list[Update]:
        """There was no answer, or none that can be."""
        first_s, last_s = BACKOFF_S
        wait_s = min(last_s, first_s * 2 ** min(self.failures, 16))
        self.failures += 1
        self.due_at = now + wait_s * (0.5 + self._dice.random() / 2)
        self._begin_again()
        if self._holds and now >= self._answered_at + LOST_S:
            self._holds = False
            return [Cleared(self.name, NODE_TIERS)]
        return []

    # -- inside ----------------------------------------------------------------------------------

    def _begin_again(self) -> None:
        self._pages = (0, -1)

    def _page(self, page: messages.KeyPage, now: float) -> list[Update]:
        if self._pages is None:
            raise ProtocolError(f"{self.name} sent an inventory that nobody asked for")
        keys = _split(self.name, page.keys)
        count, seq = self._pages
        if count and page.seq != seq:
            # Somebody else took stock meanwhile: not at the same time again.
            self._begin_again()
            self.due_at = now + POLL_S * self._dice.random()
            return []
        if page.more and not keys:
            raise ProtocolError(f"{self.name} sent an empty page of an inventory that goes on")
        parts = list(slices(keys))
        updates: list[Update] = []
        for at, part in enumerate(parts):
            first = not count and not at
            last = not page.more and at == len(parts) - 1
            updates.append(Inventory(self.name, _TIER, part, first, last, page.seq))
        self._holds, self.due_at = True, now
        if page.more:
            self._pages = (count + len(keys), page.seq)
        else:
            self._pages, self._seq, self._said_at = None, page.seq, now
            self.resyncs += 1
        return updates

    def _events(self, page: messages.EventPage, now: float) -> list[Update]:
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
        self._seq += len(keys)
        self.due_at = now if len(keys) == messages.EVENTS_MAX else now + POLL_S
        if not keys and now < self._said_at + HEARD_S:
            return []
        self._said_at = now
        return self._in_order(keys, page.added) or [Heard(self.name, _TIER, self._seq)]

    def _in_order(self, keys: list[bytes], added: bytes) -> list[Update]:
        """Runs of additions and of removals, in their order."""
        updates: list[Update] = []
        start, seq = 0, self._seq - len(keys)
        while start < len(keys):
            stop = added.find(1 - bool(added[start]), start)
            stop = len(keys) if stop < 0 else stop
            kind = Added if added[start] else Removed
            for part in slices(keys[start:stop]):
                seq += len(part)
                updates.append(kind(self.name, _TIER, part, seq))
            start = stop
        return updates


def _split(name: str, joined: bytes) -> list[bytes]:
    if len(joined) % KEY_BYTES:
        raise ProtocolError(f"{name} sent keys of {len(joined)} bytes, not of {KEY_BYTES} each")
    return [joined[at : at + KEY_BYTES] for at in range(0, len(joined), KEY_BYTES)]
