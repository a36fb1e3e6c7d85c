"""What comes next is fetched while the caller works on what it has.

One thread per stream, and only while it has something to do: it ends when as much waits as may
wait and nobody takes it for a while, or when what it waits for does not come in time and nobody
asks. So a stream that was dropped without being closed leaves no thread behind.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Generic, TypeVar

from ..errors import ClientClosed
from ..link import GRACE_S

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

# To start a thread takes some 0.1 ms, so it waits a moment for the caller to take something.
_IDLE_S = 1.0


class NotYet(Exception):
    """What was fetched did not come in time; `error` is for who waits for it."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


class Ahead(Generic[T]):
    """Calls `fetch()` in a thread of its own, as long as fewer than `limit` results wait to be
    taken, or somebody waits for one. None is the last result.

    `fetch` waits until `due(began)` at most and raises NotYet then; whatever else it raises is
    raised by the `take` whose turn it is. Thread-safe; one thread takes.
    """

    def __init__(self, fetch: Callable[[], T | None], limit: int, timeout_s: float) -> None:
        self._fetch = fetch
        self._limit = limit
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._results: deque[T | None] = deque()
        self._failure: BaseException | None = None
        self._asked_at: float | None = None  # since when somebody waits
        self._thread: threading.Thread | None = None
        self._running = False
        self._finished = False  # the last result has been fetched
        self._stopped = False

    def take(self) -> T | None:
        """The next result, waited for; None after the last. Raises what `fetch` raised,
        ClientClosed once it was stopped."""
        with self._changed:
            self._asked_at = time.monotonic()
            try:
                while not self._results:
                    if self._stopped:
                        raise ClientClosed("this stream has ended; begin another")
                    if self._failure is not None:
                        failure, self._failure = self._failure, None
                        raise failure
                    if self._finished:
                        return None
                    self._start()
                    self._changed.wait()
            finally:
                self._asked_at = None
            result = self._results.popleft()
            self._start()
            self._changed.notify_all()
            return result

    def due(self, began: float) -> float:
        """Until when a fetch that `began` then may wait: as long as the caller would, counted from
        when it asked, however long before the fetch has begun."""
        with self._changed:
            if self._stopped:
                return -math.inf
            return (began if self._asked_at is None else self._asked_at) + self._timeout_s

    def halt(self) -> None:
        """Nothing more is fetched or taken; returns at once. From any thread."""
        with self._changed:
            self._stopped = True
            self._results.clear()
            self._changed.notify_all()

    def stop(self, cut: Callable[[], None]) -> bool:
        """`halt`, and return when the thread has ended; whether it had to be `cut` off."""
        self.halt()
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return False
        interruption: BaseException | None = None
        was_cut = False
        while thread.is_alive():  # Ctrl-C or not: it writes into memory of this stream
            try:
                thread.join(None if was_cut else GRACE_S)
            except BaseException as error:  # noqa: BLE001 - raised again below
                interruption = error
            if thread.is_alive() and not was_cut:
                was_cut = True
                cut()
        if interruption is not None:
            raise interruption
        return was_cut

    def _start(self) -> None:
        """See that the thread runs, unless it ended with what is not told yet. Under the lock."""
        if self._running or self._stopped or self._finished or self._failure is not None:
            return
        self._thread = threading.Thread(target=self._run, name="tiffin-ahead", daemon=True)
        self._running = True
        try:
            self._thread.start()
        except BaseException:
            self._thread, self._running = None, False
            raise

    def _run(self) -> None:
        while self._wanted():
            try:
                result = self._fetch()
            except NotYet as late:
                if not self._goes_on(late.error):
                    return
            except BaseException as error:  # noqa: BLE001 - raised in the caller's thread, by `take`
                self._end(error)
                return
            else:
                with self._changed:
                    self._finished = result is None
                    if not self._stopped:
                        self._results.append(result)
                    self._changed.notify_all()

    def _wanted(self) -> bool:
        """Whether to fetch one more; waits a while to be needed. After False the thread ends."""
        until = time.monotonic() + _IDLE_S
        with self._changed:
            while self._running and not (self._stopped or self._finished):
                if len(self._results) < self._limit + (self._asked_at is not None):
                    return True
                left_s = until - time.monotonic()
                if left_s <= 0:
                    break
                self._changed.wait(left_s)
            self._running = False
            return False

    def _goes_on(self, error: Exception) -> bool:
        """Whether to wait once more for what is late. After False the thread ends."""
        with self._changed:
            asked_at = self._asked_at
            if asked_at is None:
                self._running = False  # the next `take` begins anew
                return False
            if time.monotonic() >= asked_at + self._timeout_s:
                self._end(error)
                return False
            return True  # it was asked for in this moment

    def _end(self, error: BaseException) -> None:
        """The next `take` raises it. This thread must end: who takes may start another at once."""
        with self._changed:
            self._failure = error
            self._running = False
            self._changed.notify_all()
