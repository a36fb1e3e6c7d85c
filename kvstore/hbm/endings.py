"""What has to wait for the end of work on a device: memory is let go of behind it, not before."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from tiffin.messenger.errors import MessengerError

if TYPE_CHECKING:
    from collections.abc import Callable

    from .memory import Passed

# Between two looks at events: a fiftieth of a decode step, and no load on a core.
POLL_S = 0.0005


class Endings:
    """Actions, each behind something that passes. Thread-safe; an action runs once, without a lock
    of this class, in whichever thread looks after its time has come."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[tuple[Passed, Callable[[], None]]] = []

    def add(self, passed: Passed, action: Callable[[], None]) -> None:
        """Do `action` when `passed` is done: now, if it is. If it fails, never: what the action
        would let go of may still be written to."""
        with self._lock:
            self._waiting.append((passed, action))
        self.look()

    def look(self) -> None:
        """Do what has become due."""
        if not self._waiting:
            return
        with self._lock:
            looked = [(_state(passed), passed, action) for passed, action in self._waiting]
            self._waiting = [(passed, action) for done, passed, action in looked if done is False]
        for done, _, action in looked:
            if done:
                action()

    def wait(self, timeout_s: float) -> bool:
        """Until nothing is left that can pass; whether that was so in time."""
        deadline = time.monotonic() + timeout_s
        self.look()
        while self._waiting and time.monotonic() < deadline:
            time.sleep(POLL_S)
            self.look()
        return not self._waiting

    def __len__(self) -> int:
        return len(self._waiting)


def has_passed(passed: Passed) -> bool:
    """Whether it is done. What has failed never is."""
    return bool(_state(passed))


def _state(passed: Passed) -> bool | None:
    """Whether it is done; None if it never will be."""
    try:
        return passed.done()
    except MessengerError:
        return None
