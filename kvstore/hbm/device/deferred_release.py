"""Deferred releases: memory is released only after the end of the device work that uses it."""

from __future__ import annotations

import logging
import math
import threading
import time
from typing import TYPE_CHECKING

from tiffin.messenger.errors import MessengerError

if TYPE_CHECKING:
    from collections.abc import Callable

    from .device_memory import Passed

log = logging.getLogger(__name__)

# The interval between polls of events: a fiftieth of a decode step, and no load on a core.
POLL_S = 0.0005
# The longest interval between polls in `DeferredReleases.wait`, as in the close of a store.
NAP_S_MAX = 0.05


class DeferredReleases:
    """Callbacks, each of which runs once, after some device work has ended. Thread-safe; a callback
    runs without a lock of this class, in the first thread that calls `look` (or `add`, `wait`)
    after that."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[tuple[Passed, Callable[[], None], Callable[[], None]]] = []

    def forget(self) -> None:
        """In a forked child: drop all callbacks, as the device work is the parent's."""
        self._lock, self._waiting = threading.Lock(), []

    def add(
        self,
        passed: Passed,
        action: Callable[[], None],
        failed: Callable[[], None] = lambda: None,
    ) -> None:
        """Run `action` once `passed` is done, at once if it is. If `passed` fails, run `failed`
        instead: the device may still write to the memory that `action` would release."""
        with self._lock:
            self._waiting.append((passed, action, failed))
        self.look()

    def look(self) -> None:
        """Run the callbacks that are due."""
        if not self._waiting:
            return
        with self._lock:
            looked = [(_state(one[0]), one) for one in self._waiting]
            self._waiting = [one for done, one in looked if done is False]
        for done, (_, action, failed) in looked:
            if done is not False:
                _attempt(action if done else failed)

    def wait(self, timeout_s: float = math.inf) -> bool:
        """Wait until no callback is left; returns whether that was so within `timeout_s`."""
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
    """Whether the work is done; False for work that has failed."""
    return bool(_state(passed))


def _attempt(action: Callable[[], None]) -> None:
    """Run a callback and log its exception, as the thread that runs it is seldom the one that added
    it, and must not see its errors."""
    try:
        action()
    except Exception:
        log.exception("what a copy or a stream held could not be let go of")


def _state(passed: Passed) -> bool | None:
    """Whether the work is done; None if it failed, and its end can't be known."""
    try:
        return passed.done()
    except MessengerError:
        return None
