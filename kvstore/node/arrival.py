"""Where the reply to one request arrives, perhaps from another thread."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from . import messages


class Arrival:
    """One reply, awaited by one thread. A reply that comes when nobody waits for it any more goes
    to `too_late`."""

    __slots__ = ("_arrived", "_late", "_lock", "_too_late", "reply")

    def __init__(self, too_late: Callable[[messages.AnyReply], None]) -> None:
        self.reply: messages.AnyReply | None = None
        self._too_late = too_late
        self._late = False
        self._lock = threading.Lock()
        self._arrived = threading.Lock()
        self._arrived.acquire()

    def put(self, reply: messages.AnyReply) -> None:
        """Hand the reply over."""
        with self._lock:
            self.reply = reply
            late = self._late
        self._arrived.release()
        if late:
            self._too_late(reply)

    def here(self, timeout_s: float) -> bool:
        """Wait a while; whether the reply is here."""
        if self.reply is None and self._arrived.acquire(timeout=timeout_s):
            self._arrived.release()
        return self.reply is not None

    def wait(self, timeout_s: float) -> messages.AnyReply | None:
        """The reply, or None if none came in time."""
        if self.reply is None:
            self._arrived.acquire(timeout=timeout_s)
        with self._lock:
            self._late = self.reply is None
            return self.reply
