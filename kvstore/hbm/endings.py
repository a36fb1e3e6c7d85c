"""What has to wait for the end of work on a device: memory is let go of behind it, not before."""

from __future__ import annotations

import logging
import math
import threading
import time
from typing import TYPE_CHECKING

from tiffin.messenger.errors import MessengerError

if TYPE_CHECKING:
    from collections.abc import Callable

    from .memory import Passed

log = logging.getLogger(__name__)

# Between two looks at events: a fiftieth of a decode step, and no load on a core.
POLL_S = 0.0005
# Of who waits for the end of all, as a store that closes.
NAP_S_MAX = 0.05


class Endings:
    """Actions, each behind something that passes. Thread-safe; an action runs once, without a lock
    of this class, in whichever thread looks after its time has come."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[tuple[Passed, Callable[[], None], Callable[[], None]]] = []

    def forget(self) -> None:
        """In a forked child: what is waited for is the parent's."""
        self._lock, self._waiting = threading.Lock(), []

    def add(
        self,
        passed: Passed,
        action: Callable[[], None],
        failed: Callable[[], None] = lambda: None,
    ) -> None:
        """Do `action` when `passed` is done: now, if it is. If it fails, never: what the action
        would let go of may still be written to; `failed` is done then."""
        with self._lock:
            self._waiting.append((passed, action, failed))
        self.look()

    def look(self) -> None:
        """Do what has become due."""
        if not self._waiting:
            return
        with self._lock:
            looked = [(_state(one[0]), one) for one in self._waiting]
            self._waiting = [one for done, one in looked if done is False]
        for done, (_, action, failed) in looked:
            if done is not False:
                _attempt(action if done else failed)

    def wait(self, timeout_s: float = math.inf) -> bool:
        """Until nothing is left that can pass; whether that was so in time."""
        deadline, nap_s = time.monotonic() + timeout_s, POLL_S
        self.look()
        while self._waiting and time.monotonic() < deadline:
            time.sleep(nap_s)
            nap_s = min(2 * nap_s, NAP_S_MAX)
            self.look()
        return not self._waiting

    def __len__(self) -> int:
        return len(self._waiting)


def has_passed(passed: Passed) -> bool:
    """Whether it is done. What has failed never is."""
    return bool(_state(passed))


def _attempt(action: Callable[[], None]) -> None:
    """Whoever looks is mostly another than who began it, and must not answer for what fails."""
    try:
        action()
    except Exception:
        log.exception("what a copy or a stream held could not be let go of")


def _state(passed: Passed) -> bool | None:
    """Whether it is done; None if it never will be."""
    try:
        return passed.done()
    except MessengerError:
        return None
