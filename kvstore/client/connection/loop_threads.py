"""Work that other threads do for the tasks of an event loop.

An exception of a signal handler may end a loop's run between any two steps of asyncio: a callback
that the loop had taken from its queue is lost then, and a `ThreadPoolExecutor` or a `Semaphore` may
be left half changed. So threads do not call into the loop. A thread puts its outcome for a task
into a `Mailbox`, where it stays until the task's future has it; the mailbox's eventfd stays
readable as long, so that after a run that ended before it had looked, the next run looks.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import os
import threading
import time
import weakref
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from tiffin.messenger.signal_safe import Forsaken, Once, later, uninterrupted

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

# How often `ConcurrencyLimit.outlast` polls.
_LOOK_S = 0.001


class Mailbox:
    """A queue of outcomes that other threads have for futures of one loop. The loop refers to it as
    long as the loop is open."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        Forsaken.when(self, partial(os.close, self._fd))
        self._letters: deque[tuple[asyncio.Future[Any], Any]] = deque()

    @classmethod
    def of_running_loop(cls) -> Mailbox:
        """The mailbox of the loop that runs in this thread."""
        loop = asyncio.get_running_loop()
        known = _mailboxes.get(loop)
        found = known() if known is not None else None
        if found is None:
            found = uninterrupted(cls)
            loop.add_reader(found._fd, found._deliver)
            _mailboxes[loop] = weakref.ref(found)
        return found

    def put(self, future: asyncio.Future[T], outcome: T) -> None:
        """Deliver `outcome` to `future`, unless that is done. From any thread."""
        self._letters.append((future, outcome))
        os.eventfd_write(self._fd, 1)

    def _deliver(self) -> None:
        try:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._fd)
            while self._letters:
                settle(*self._letters[0])
                self._letters.popleft()
        except BaseException:
            os.eventfd_write(self._fd, 1)  # the loop's next run calls this again
            raise


# Weak references: each loop keeps its mailbox alive as a reader, and a mailbox may refer to
# futures, and so to its loop.
_mailboxes: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, weakref.ref[Mailbox]] = (
    weakref.WeakKeyDictionary()
)


def settle(future: asyncio.Future[T], outcome: T) -> None:
    """Set a future's result, unless it is done already. Call it in the future's loop."""
    if not future.done():
        future.set_result(outcome)


class NotBegun(Exception):
    """The call waited for a thread until its time was up, and was withdrawn."""


class ThreadCall(Generic[T]):
    """An action that another thread carries out for the task that awaits it, in a copy of the
    task's context."""

    def __init__(self, action: Callable[[], T]) -> None:
        self._mailbox = Mailbox.of_running_loop()
        self._action = action
        self._context = contextvars.copy_context()
        self._to_do = Once()  # taken by the thread that carries it out, or by `_withdraw`
        self._has_ended = False
        self._end = threading.Lock()
        self._end.acquire()
        self._outcome: list[T] = []
        self._error: BaseException | None = None
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def __call__(self) -> None:
        """Carry out the action in this thread, unless it was withdrawn."""
        if not self._to_do.take():
            return
        try:
            self._outcome.append(self._context.run(self._action))
        except BaseException as error:  # noqa: BLE001 - raised in the task that awaits it
            self._error = error
        self._has_ended = True
        self._end.release()
        self._mailbox.put(self.ended, None)

    def _withdraw(self) -> bool:
        """Withdraw the action; False if a thread has begun it."""
        withdrawn = self._to_do.take()
        if withdrawn:
            self._has_ended = True
        return withdrawn

    def take(self) -> T:
        """The action's result, once it has ended; works only once. Raises the action's error."""
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback refers to this frame, which would keep its locals alive
        return self._outcome.pop()

    async def outlast(
        self,
        put: Callable[[Callable[[], None]], None] = later,
        *,
        undo: Callable[[T], object] | None = None,
        cancel: Callable[[], None] = lambda: None,
        begin_within_s: float | None = None,
    ) -> T:
        """Hand the call to `put`, which has a thread carry it out, and return its result. Once the
        action has begun, this returns only when it has ended, whatever is raised meanwhile: it
        touches memory that the caller would give back. On a cancellation, `cancel()` may make the
        action end sooner; CancelledError is raised when it has ended and another thread has given
        its result to `undo`.

        Raises NotBegun if no thread has begun it within `begin_within_s`.
        """
        cancelled = False
        try:
            put(self)
            while not self.ended.done():
                try:
                    await asyncio.wait([self.ended], timeout=begin_within_s)
                except asyncio.CancelledError:
                    if self._withdraw():
                        raise
                    cancelled = True  # another cancellation may follow
                    cancel()
                else:
                    if not self.ended.done() and not cancelled and self._withdraw():
                        raise NotBegun
                begin_within_s = None
            if not cancelled:
                return self.take()
            if undo is not None and self._outcome:
                await in_thread(partial(undo, self._outcome.pop()))
            raise asyncio.CancelledError
        except BaseException:
            if not self._has_ended and not self._withdraw():
                later(cancel)
                self._outlast_here()
            if undo is not None and self._outcome:
                later(partial(undo, self._outcome.pop()))
            raise

    def _outlast_here(self) -> None:
        """Block this thread until the action has ended, whatever is raised meanwhile."""
        while not self._has_ended:
            try:
                self._end.acquire()
                self._end.release()
            except BaseException:  # noqa: BLE001 - the first one is on its way already
                continue


async def in_thread(action: Callable[[], T], *, undo: Callable[[T], object] | None = None) -> T:
    """Run `action` in a thread and, even if cancelled, return only when it has ended: until then it
    touches memory whose lease the caller would give back. If the caller is cancelled, another
    thread gives the result to `undo`."""
    return await ThreadCall(action).outlast(undo=undo)


async def abandonable(action: Callable[[], T]) -> T:
    """Run `action`, which touches no memory of the caller, in a thread. A cancelled caller does not
    wait for it, and its result is dropped."""
    work = ThreadCall(action)
    later(work)
    await work.ended
    return work.take()


class ConcurrencyLimit:
    """Runs at most `most` actions in parallel; further actions wait in a queue."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._waiting: deque[Callable[[], object]] = deque()
        self._changing = threading.Lock()
        self._running = 0

    def put(self, action: Callable[[], object]) -> None:
        """Queue an action; another thread runs it when it is its turn. It must not raise."""
        self._waiting.append(action)
        later(self._serve)

    def _serve(self) -> None:
        while True:
            with self._changing:
                if self._running == self._most or not self._waiting:
                    return
                self._running += 1
                action = self._waiting.popleft()
            action()
            del action
            with self._changing:
                self._running -= 1

    def outlast(self, timeout_s: float) -> bool:
        """Block until no action runs; whether that is so within `timeout_s`. Not in a loop's
        thread."""
        until = time.monotonic() + timeout_s
        while self._running:
            if time.monotonic() >= until:
                return False
            time.sleep(_LOOK_S)
        return True
