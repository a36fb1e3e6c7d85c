"""The bounded queue between the feeds' threads and the thread that owns the index.

Backpressure: a feed that is faster than the index's owner blocks, which is safe, because the events
it follows are numbered, so that it detects lost ones. `close` releases the feeds that are blocked.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

from ..errors import ConductorError

if TYPE_CHECKING:
    from collections.abc import Callable

    from .index_updates import NodeNews

# At most a million keys of 16 bytes are queued, in 256 full updates: 64 MB.
KEYS_WAITING_MAX = 1 << 20
# The most updates in the queue, for small ones; some hundred bytes each.
UPDATES_WAITING_MAX = 65_536


class InboxClosed(ConductorError):
    """The inbox is closed, and its owner takes no more updates; the feed must end."""


class UpdateInbox:
    """A queue of updates. Thread-safe.

    `wake` is a callback for an update that was put into the empty inbox, in the thread that put it:
    with asyncio, a `loop.call_soon_threadsafe` of the consumer. It must not block.
    """

    def __init__(
        self, wake: Callable[[], None] | None = None, keys_max: int = KEYS_WAITING_MAX
    ) -> None:
        self._wake = wake
        self._keys_max = keys_max
        self._changed = threading.Condition()
        self._updates: deque[NodeNews] = deque()
        self._keys = 0
        self._closed = False

    def __len__(self) -> int:
        return len(self._updates)

    def __call__(self, update: NodeNews) -> None:
        """Put an update; blocks while the inbox is full. Raises InboxClosed."""
        keys = _count(update)
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._has_room(keys))
            if self._closed:
                raise InboxClosed("the inbox is closed: nobody takes updates any more")
            was_empty = not self._updates
            self._updates.append(update)
            self._keys += keys
        if was_empty and self._wake is not None:
            self._wake()

    def take(self, keys_max: int = 16_384) -> list[NodeNews]:
        """Remove and return the oldest updates, of about `keys_max` keys together. If there are
        more, they stay: check `len` and call it again after the pending placement decisions."""
        taken: list[NodeNews] = []
        with self._changed:
            while self._updates and keys_max > 0:
                update = self._updates.popleft()
                taken.append(update)
                keys = _count(update)
                self._keys -= keys
                keys_max -= max(1, keys)
            self._changed.notify_all()
        return taken

    def close(self) -> None:
        """Discard all updates; a thread that puts one, now or later, gets InboxClosed."""
        with self._changed:
            self._closed = True
            self._updates.clear()
            self._keys = 0
            self._changed.notify_all()

    def _has_room(self, keys: int) -> bool:
        if not self._updates:
            return True
        return self._keys + keys <= self._keys_max and len(self._updates) < UPDATES_WAITING_MAX


def _count(update: NodeNews) -> int:
    return len(getattr(update, "keys", ()))
