"""A future for the reply to one request, which another thread may set."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


class PendingReply(Generic[T]):
    """One reply, awaited by one thread. A reply that arrives after the waiting thread has given up
    is passed to the callback `too_late`, or dropped."""

    __slots__ = ("_arrived", "_late", "_lock", "_too_late", "reply")

    def __init__(self, too_late: Callable[[T], None] | None = None) -> None:
        self.reply: T | None = None
        self._too_late = too_late
        self._late = False
        self._lock = threading.Lock()
        self._arrived = threading.Lock()
        self._arrived.acquire()

    def put(self, reply: T) -> None:
        """Set the reply; called once, from any thread."""
        with self._lock:
            late = self._late
            if not late:
                self.reply = reply
                self._arrived.release()
        if late and self._too_late is not None:
            self._too_late(reply)

    def here(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s`; returns whether the reply has arrived."""
        if self.reply is None and self._arrived.acquire(timeout=timeout_s):
            self._arrived.release()
        return self.reply is not None

    def wait(self, timeout_s: float) -> T | None:
        """The reply, or None after a timeout: a reply that arrives later is too late."""
        if self.reply is None:
            self._arrived.acquire(timeout=timeout_s)
        with self._lock:
            self._late = self.reply is None
            return self.reply

    def give_up(self) -> None:
        """Give up: discard a reply that has arrived; a later one is too late. A thread that waits
        gets None."""
        with self._lock:
            if not self._late and self.reply is None:
                self._arrived.release()
            self._late, self.reply = True, None
