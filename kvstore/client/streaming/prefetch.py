"""Prefetch for streams: a thread fetches the next layers while the caller works on earlier ones.

One thread per stream, which runs only while it has something to do. It ends when the queue of
results has been full for `_IDLE_S`, or when a fetch times out and no `take` is waiting. So a stream
that was dropped without being closed leaves no thread behind.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Generic, TypeVar

from ... import deadlines
from ...deadlines import GRACE_S
from ...errors import ClientClosed, DeadlineExceeded

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

# How long the thread waits for room in a full queue before it ends: to start one takes some 0.1 ms.
_IDLE_S = 1.0


class FetchTimedOut(Exception):
    """The fetch timed out; the waiting `take`, if any, raises `error`."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


class Prefetcher(Generic[T]):
    """Calls `fetch()` in a thread of its own while fewer than `limit` results are queued, or while
    a `take` waits for one. None is the last result.

    `fetch` waits until `due(began)` at most and raises FetchTimedOut then; the next `take` raises
    any other exception of `fetch`. Thread-safe, but only one thread may call `take`.
    """

    def __init__(self, fetch: Callable[[], T | None], limit: int, timeout_s: float) -> None:
        self._fetch = fetch
        self._limit = limit
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._results: deque[T | None] = deque()
        self._failure: BaseException | None = None
        self._asked_at: float | None = None  # when the waiting `take` began; None without one
        self._thread: threading.Thread | None = None
        self._running = False
        self._finished = False  # the last result has been fetched
        self._stopped = False

    def take(self) -> T | None:
        """Wait for the next result; None after the last. Raises the exception of `fetch`,
        DeadlineExceeded at the deadline of the call, ClientClosed once prefetching was stopped."""
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
                    left_s = deadlines.left_s(math.inf)
                    if not left_s:
                        raise DeadlineExceeded("what was to come next did not come in time")
                    self._changed.wait(min(left_s, threading.TIMEOUT_MAX))
            finally:
                self._asked_at = None
            result = self._results.popleft()
            self._start()
            self._changed.notify_all()
            return result

    def due(self, began: float) -> float:
        """The deadline of a fetch that started at `began`: `timeout_s` from the start of the
        waiting `take`, or from `began` if none waits. In the past once stopped."""
        with self._changed:
            if self._stopped:
                return -math.inf
            return (began if self._asked_at is None else self._asked_at) + self._timeout_s

    def halt(self) -> None:
        """Stop prefetching and drop the queued results; returns at once. Thread-safe."""
        with self._changed:
            self._stopped = True
            self._results.clear()
            self._changed.notify_all()

    def stop(self, cut: Callable[[], None]) -> bool:
        """`halt`, and wait until the thread has ended. If it has not within GRACE_S, calls `cut` to
        interrupt its fetch. Returns whether `cut` was called."""
        self.halt()
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return False
        interruption: BaseException | None = None
        was_cut = False
        # Wait even after Ctrl-C: the thread writes into memory of this stream.
        while thread.is_alive():
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
        """Start the thread if it does not run, unless its failure is still to be raised by `take`.
        Call under the lock."""
        if self._running or self._stopped or self._finished or self._failure is not None:
            return
        self._thread = threading.Thread(target=self._run, name="tiffin-prefetch", daemon=True)
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
            except FetchTimedOut as late:
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
        """Whether to fetch one more; waits up to `_IDLE_S` for room in the queue. After False the
        thread must end."""
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
        """Whether to retry a fetch that timed out. After False the thread must end."""
        with self._changed:
            asked_at = self._asked_at
            if asked_at is None:
                self._running = False  # the next `take` starts a new thread
                return False
            if time.monotonic() >= asked_at + self._timeout_s:
                self._end(error)
                return False
            return True  # a `take` began to wait only now, and its own timeout is not over

    def _end(self, error: BaseException) -> None:
        """Have the next `take` raise `error`. The thread must end: that `take` may start another
        thread at once."""
        with self._changed:
            self._failure = error
            self._running = False
            self._changed.notify_all()
