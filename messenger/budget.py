"""Backpressure: a bound on the bytes in flight, and a queue of transfers by priority.

All transfers in flight compete for the same memory and network: the bound keeps a burst of
replication from adding its bytes in front of the few that a decode waits for. Transfers get room
strictly by priority, and within a priority first come, first served; a small transfer does not
overtake a large one, which would otherwise starve.
"""

from __future__ import annotations

import contextlib
import heapq
import os
import threading
import time
import weakref
from enum import IntEnum
from itertools import count
from typing import TYPE_CHECKING

from .errors import TransferTimeout

if TYPE_CHECKING:
    from collections.abc import Iterator

# Eighty milliseconds of loopback TCP, or twenty of a 100 Gb/s network: enough to keep any link
# busy, and the longest time that an urgent transfer waits for those in flight.
IN_FLIGHT_BYTES = 256 << 20
# What one transfer over one TCP stream counts for at most: more than kernels buffer of it. Four
# such transfers fill a peer's share, so that a peer that hangs can't take the room of all others.
STREAM_BYTES = 32 << 20
PEER_BYTES = 4 * STREAM_BYTES


_all: weakref.WeakSet[Budget] = weakref.WeakSet()


class Priority(IntEnum):
    """Priority of a transfer; lower values go first."""

    DECODE = 0  # a request that generates tokens, or is about to
    PREFILL = 1
    BACKGROUND = 2  # replication, demotion, repair


class Budget:
    """A bound of `limit_bytes` in flight for all transfers that share it; thread-safe."""

    def __init__(self, limit_bytes: int = IN_FLIGHT_BYTES) -> None:
        self.limit_bytes = limit_bytes
        self.forget()
        _all.add(self)

    def forget(self) -> None:
        """Reset; also called in a forked child, where the bytes in flight are the parent's."""
        self._changed = threading.Condition()
        self._used_bytes = 0
        self._waiting: list[tuple[int, int]] = []  # a heap of (priority, turn)
        self._turns = count()

    @property
    def used_bytes(self) -> int:
        """Bytes in flight."""
        return self._used_bytes

    @property
    def waiting(self) -> int:
        """The number of queued transfers."""
        return len(self._waiting)

    @contextlib.contextmanager
    def hold(self, nbytes: int, priority: Priority, deadline: float) -> Iterator[None]:
        """Reserve room for `nbytes` during the block; a request above the limit takes the whole
        limit.

        Raises TransferTimeout if there is no room by the deadline (`time.monotonic()`).
        """
        taken_bytes = min(nbytes, self.limit_bytes)
        self._take(taken_bytes, priority, deadline)
        try:
            yield
        finally:
            with self._changed:
                self._used_bytes -= taken_bytes
                self._changed.notify_all()

    def _take(self, nbytes: int, priority: Priority, deadline: float) -> None:
        with self._changed:
            turn = (int(priority), next(self._turns))
            heapq.heappush(self._waiting, turn)
            try:
                while self._waiting[0] != turn or not self._fits(nbytes):
                    left_s = deadline - time.monotonic()
                    if left_s <= 0 or not self._changed.wait(min(left_s, threading.TIMEOUT_MAX)):
                        raise TransferTimeout(
                            f"no room for {nbytes} bytes in flight by the deadline: "
                            f"{self._used_bytes} of {self.limit_bytes} are used"
                        )
                self._used_bytes += nbytes
            finally:
                self._waiting.remove(turn)
                heapq.heapify(self._waiting)
                self._changed.notify_all()

    def _fits(self, nbytes: int) -> bool:
        return self._used_bytes + nbytes <= self.limit_bytes


# The budget of all transfers of the process.
SHARED = Budget()


def _forget_all() -> None:
    for budget in list(_all):
        budget.forget()


os.register_at_fork(after_in_child=_forget_all)
