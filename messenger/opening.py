"""A stream on its way: what there is of it while it is being opened, so that another can end it.

An opener connects, shakes hands and says hello, and may wait for the peer at each. It only knows
its deadline; whoever gives the peer up meanwhile (`StreamPool.cut`) must not wait for that. So the
pool says which opening the thread works on, and `tcp.connect` tells it what there is by now.

Nor must whoever gives up only the call that waits: `Caller.cut` ends what that one call opens, or
its waiting for streams that others use, and leaves the peer to them.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from contextvars import ContextVar
from typing import TYPE_CHECKING

from .errors import Abandoned

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from .stream import Stream


class Opening:
    """One call of an opener: nothing at first, then a socket that connects, then a stream."""

    __slots__ = ("_lock", "_what", "was_cut")

    def __init__(self) -> None:
        self.was_cut = False
        self._what: socket.socket | Stream | None = None
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def in_this_thread(self) -> Iterator[None]:
        """`current` is this one during the block."""
        token = _here.set(self)
        try:
            yield
        finally:
            _here.reset(token)

    def has(self, what: socket.socket | Stream) -> None:
        """From here on `cut` ends this. Raises ConnectionAbortedError if it came before."""
        with self._lock:
            self._what = what
            if self.was_cut:
                raise ConnectionAbortedError("it was cut")

    def close(self, sock: socket.socket) -> None:
        """Close a socket that led nowhere, at a moment when nobody cuts it: its descriptor may be
        another's at once."""
        with self._lock:
            self._what = None
            sock.close()

    def cut(self) -> None:
        """End it, from any thread: the opener fails now, or with its next step."""
        with self._lock:
            self.was_cut = True
            if isinstance(self._what, socket.socket):
                with contextlib.suppress(OSError):  # it led nowhere already
                    # Also of a socket that still connects. An SSLSocket's own would read.
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


def current() -> Opening:
    """What this thread opens; one that nobody knows if no pool has asked for it."""
    return _here.get() or Opening()


class Caller:
    """Who waits for streams, in one or more threads, and may be told to wait no more.

    After a cut no stream is opened or waited for; those that the caller has, and idle ones, can
    still be used. Threads that work for a caller have to run in a copy of its context.
    """

    __slots__ = ("_ends", "_lock", "was_cut")

    def __init__(self) -> None:
        self.was_cut = False
        self._ends: list[Callable[[], None]] = []
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def in_this_thread(self) -> Iterator[None]:
        """`calling` is this one during the block."""
        token = _caller.set(self)
        try:
            yield
        finally:
            _caller.reset(token)

    @contextlib.contextmanager
    def waits(self, end: Callable[[], None]) -> Iterator[None]:
        """During the block, and not after it, a cut calls `end`, which must neither wait nor raise.
        Raises Abandoned if the cut came before."""
        with self._lock:
            self.check()
            self._ends.append(end)
        try:
            yield
        finally:
            with self._lock:
                self._ends.remove(end)

    def check(self) -> None:
        """Raise Abandoned after a cut."""
        if self.was_cut:
            raise Abandoned("the call was given up while it waited for a connection")

    def cut(self) -> None:
        """Wait no more; from any thread, and at once."""
        with self._lock:
            self.was_cut = True
            for end in self._ends:
                end()


def calling() -> Caller:
    """For whom this thread works; one that nobody cuts if nobody said so."""
    return _caller.get() or Caller()


_caller: ContextVar[Caller | None] = ContextVar("caller", default=None)
_here: ContextVar[Opening | None] = ContextVar("opening", default=None)
