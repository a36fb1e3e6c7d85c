"""A stream on its way: what there is of it while it is being opened, so that another can end it.

An opener connects, shakes hands and says hello, and may wait for the peer at each. It only knows
its deadline; whoever gives the peer up meanwhile (`StreamPool.cut`) must not wait for that. So the
pool says which opening the thread works on, and `tcp.connect` tells it what there is by now.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

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


_here: ContextVar[Opening | None] = ContextVar("opening", default=None)
