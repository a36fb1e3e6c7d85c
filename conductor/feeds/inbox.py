"""Where feeds put their updates, and the owner of the index takes them out, in another thread.

Bounded: a feed that is faster than the owner waits, which it can afford, because what it follows
numbers its events. `close` lets those go who wait.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

from ..errors import ConductorError

if TYPE_CHECKING:
    from collections.abc import Callable

    from .updates import Update

# A million keys of 16 bytes wait at most, in 256 full updates: 64 MB.
KEYS_WAITING_MAX = 1 << 20
# Of the small ones; some hundred bytes each.
UPDATES_WAITING_MAX = 65_536


class InboxClosed(ConductorError):
    """Nobody takes updates any more; the feed is to end."""


class Inbox:
    """A queue of updates. Thread-safe.

    `wake` is called, by the thread that puts, when the inbox was empty: with asyncio, a
    `loop.call_soon_threadsafe` of what takes. It must not block.
    """

    def __init__(
        self, wake: Callable[[], None] | None = None, keys_max: int = KEYS_WAITING_MAX
    ) -> None:
        self._wake = wake
        self._keys_max = keys_max
        self._changed = threading.Condition()
        self._updates: deque[Update] = deque()
        self._keys = 0
        self._closed = False

    def __len__(self) -> int:
        return len(self._updates)

    def __call__(self, update: Update) -> None:
        """Put an update; waits while there are too many. Raises InboxClosed."""
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

    def take(self, keys_max: int = 16_384) -> list[Update]:
        """The oldest updates, of about `keys_max` keys together; not all of them if there are more:
        look again (`len`) after the decisions that wait."""
        taken: list[Update] = []
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
        """Forget all; who puts, now or later, gets InboxClosed."""
        with self._changed:
            self._closed = True
            self._updates.clear()
            self._keys = 0
            self._changed.notify_all()

    def _has_room(self, keys: int) -> bool:
        if not self._updates:
            return True
        return self._keys + keys <= self._keys_max and len(self._updates) < UPDATES_WAITING_MAX


def _count(update: Update) -> int:
    return len(getattr(update, "keys", ()))
