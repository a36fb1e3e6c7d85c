"""Cancellation of a pending connect: another thread can end a stream that is still being opened.

An opener connects, does the TLS handshake and sends the hello, and may wait for the peer in each
step, until its deadline. A thread that gives up the peer meanwhile (`StreamPool.cut`) must not wait
for that deadline. So the pool sets the `PendingConnect` of the opening thread, and `tcp.connect`
registers the socket, and later the stream, with it.

Cancelling a single call must not wait either: `Caller.cut` ends the connects of that one call and
its wait for busy streams, and leaves the peer's other calls alone.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from contextvars import ContextVar
from typing import TYPE_CHECKING

from ..errors import Abandoned

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from .stream import Stream


class PendingConnect:
    """One call of an opener: it has nothing at first, then a connecting socket, then a stream."""

    __slots__ = ("_lock", "_what", "was_cut")

    def __init__(self) -> None:
        self.was_cut = False
        self._what: socket.socket | Stream | None = None
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def in_this_thread(self) -> Iterator[None]:
        """`current` returns this object during the block, in this thread's context."""
        token = _here.set(self)
        try:
            yield
        finally:
            _here.reset(token)

    def has(self, what: socket.socket | Stream) -> None:
        """Register the socket or stream that `cut` shall end from now on. Raises
        ConnectionAbortedError if `cut` was called before."""
        with self._lock:
            self._what = what
            if self.was_cut:
                raise ConnectionAbortedError("it was cut")

    def close(self, sock: socket.socket) -> None:
        """Close the socket of a failed connect, under the lock that `cut` takes: the kernel may
        reuse the descriptor at once, and `cut` must not shut down another connection."""
        with self._lock:
            self._what = None
            sock.close()

    def cut(self) -> None:
        """Cancel the connect, from any thread: the opener fails now, or in its next step."""
        with self._lock:
            self.was_cut = True
            if isinstance(self._what, socket.socket):
                with contextlib.suppress(OSError):  # the connect has failed already
                    # Works on a socket that still connects, too. SSLSocket's own method would read.
                    socket.socket.shutdown(self._what, socket.SHUT_RDWR)
            elif self._what is not None:
                self._what.cut()

    def forget(self) -> None:
        """In a forked child: close the child's descriptor; the connection stays the parent's."""
        self._lock = threading.Lock()  # another thread may have held it
        if isinstance(self._what, socket.socket):
            self._what.close()
        elif self._what is not None:
            self._what.forget()


def current() -> PendingConnect:
    """The pending connect of this thread; a new, unregistered one outside a pool's opener."""
    return _here.get() or PendingConnect()


class Caller:
    """A cancellable call that waits for streams, in one or more threads.

    After a cut the call opens no stream and waits for none. Without `breaks` it can still use idle
    streams and those that it has checked out; with `breaks` the cut also ends its checked-out
    streams, and the pool gives it no other. Threads that work for a caller have to run in a copy of
    its context.
    """

    __slots__ = ("_ends", "_lock", "breaks", "was_cut")

    def __init__(self, *, breaks: bool = False) -> None:
        self.was_cut = False
        self.breaks = breaks
        self._ends: list[Callable[[], None]] = []
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def in_this_thread(self) -> Iterator[None]:
        """`calling` returns this object during the block, in this thread's context."""
        token = _caller.set(self)
        try:
            yield
        finally:
            _caller.reset(token)

    @contextlib.contextmanager
    def waits(self, end: Callable[[], None]) -> Iterator[None]:
        """During the block, and not after it, a cut calls the callback `end`, which must neither
        wait nor raise. Raises Abandoned if the cut came before."""
        self.uses(end)
        try:
            yield
        finally:
            self.used(end)

    def uses(self, end: Callable[[], None]) -> None:
        """Register the callback `end`, as in `waits`, until `used`. Raises Abandoned."""
        with self._lock:
            self.check()
            self._ends.append(end)

    def used(self, end: Callable[[], None]) -> None:
        """Unregister the callback `end`."""
        with self._lock:
            self._ends.remove(end)

    def check(self) -> None:
        """Raise Abandoned after a cut."""
        if self.was_cut:
            raise Abandoned("the call was given up while it waited for a connection")

    def cut(self) -> None:
        """Cancel the call's waits at once, from any thread."""
        with self._lock:
            self.was_cut = True
            for end in self._ends:
                end()


def calling() -> Caller:
    """The caller for which this thread works; a new one, never cut, if the context has none."""
    return _caller.get() or Caller()


def given_up_with(end: Callable[[], None]) -> contextlib.AbstractContextManager[None]:
    """During the block, a cut of this thread's call calls the callback `end` (`Caller.waits`)."""
    caller = _caller.get()
    return contextlib.nullcontext() if caller is None else caller.waits(end)


_caller: ContextVar[Caller | None] = ContextVar("caller", default=None)
_here: ContextVar[PendingConnect | None] = ContextVar("opening", default=None)
