"""A fair lock, for calls that take turns at one connection."""

from __future__ import annotations

import threading
from collections import deque


class FairTurns:
    """A fair lock: one caller at a time, in the order in which they entered the queue. A caller
    that enters again goes to the end, so that calls which wait at home in slices do not starve the
    others. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queue: deque[threading.Lock] = deque()  # the first has the turn: its lock is free

    def __len__(self) -> int:
        """How many callers have the turn or wait for it."""
        return len(self._queue)

    def enter(self) -> threading.Lock:
        """Join the queue: a ticket, for `wait` and `leave`."""
        ticket = threading.Lock()
        with self._lock:
            if self._queue:
                ticket.acquire()
            self._queue.append(ticket)
        return ticket

    def wait(self, ticket: threading.Lock, timeout_s: float) -> bool:
        """Whether the ticket's turn comes within `timeout_s`; it keeps its place in the queue."""
        return ticket.acquire(timeout=timeout_s)

    def leave(self, ticket: threading.Lock) -> None:
        """End the turn, or stop waiting for it."""
        with self._lock:
            first = self._queue[0] is ticket
            self._queue.remove(ticket)
            if first and self._queue:
                self._queue[0].release()
