"""Connection pool of the streams to one peer: it reuses idle streams and bounds their number.

The pool hands out the most recently used idle stream first, so that the extra streams of a burst
become idle and are closed. It checks that an idle stream is still connected before it hands it out:
a restarted peer costs its clients a reconnect, not an error.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from typing import TYPE_CHECKING

from ..errors import MessengerError, PeerLost, TransferTimeout
from .pending_connect import PendingConnect, calling

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from .stream import Stream

# An idle stream occupies a thread and a descriptor of the peer, and there may be a hundred clients.
_IDLE_S_MAX = 60.0
# How long `close` waits for the threads that use a stream: each notices the cut in its next call.
CLOSE_S = 5.0
_CLOSED = "this transport is closed"


class StreamPool:
    """Up to `streams_max` streams from `opener(deadline)`; thread-safe."""

    def __init__(self, opener: Callable[[float], Stream], streams_max: int) -> None:
        self.streams_max = streams_max
        self._opener = opener
        self._closed = False
        self.forget()
        _open_pools.add(self)

    def forget(self) -> None:
        """Reset the pool; also called in a forked child, where the connections are the parent's.
        Only the child's descriptors are closed here, and the peer does not notice."""
        for stream in getattr(self, "_busy", ()):
            stream.forget()
        for stream, _ in getattr(self, "_idle", ()):
            stream.forget()
        for opening in getattr(self, "_openings", ()):
            opening.forget()
        # Invariant: len(_idle) + len(_busy) + len(_openings) <= streams_max.
        self._lock = threading.RLock()  # small reads take it, not the condition: 1 us less
        self._changed = threading.Condition(self._lock)
        self._waiting = 0  # threads that wait for `_changed`
        self._idle: list[tuple[Stream, float]] = []  # with the time of its return, the latest last
        self._busy: set[Stream] = set()
        self._openings: set[PendingConnect] = set()

    def stream(self, deadline: float) -> AbstractContextManager[Stream]:
        """A stream for the block. The pool takes it back if the block ends without an exception and
        nothing is pending on it, and else closes it. Raises PeerLost, TransferTimeout, what the
        opener raises, and Abandoned if the `Caller` was cut."""
        return _Turn(self, deadline)

    def cut(self) -> None:
        """Cut all streams, also those being opened: a thread that waits on one gets PeerLost at
        once. New streams can be opened afterwards."""
        with self._changed:
            idle = [stream for stream, _ in self._idle]
            ends: list[Stream | PendingConnect] = [*self._busy, *idle, *self._openings]
        for one in ends:
            one.cut()

    def close(self) -> None:
        """Cut all streams, open no more, and wait until none is in use; CLOSE_S at most."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self.cut()
        with self._changed:
            self._waiting += 1
            self._changed.wait_for(lambda: not self._busy and not self._openings, CLOSE_S)
            idle, self._idle = self._idle, []
        for stream, _ in idle:
            stream.close()

    def counts(self) -> tuple[int, int]:
        """The numbers of idle streams and of streams in use."""
        with self._changed:
            return len(self._idle), len(self._busy) + len(self._openings)

    def _check_out(self, deadline: float) -> Stream:
        while not isinstance(stream := self._take(deadline), PendingConnect):
            if stream.alive():
                return stream
            self._check_in(stream, clean=False)
        return self._open(stream, deadline)

    def _open(self, opening: PendingConnect, deadline: float) -> Stream:
        caller = calling()
        try:
            with caller.waits(opening.cut), opening.in_this_thread():
                stream = self._opener(deadline)
        except BaseException as error:
            with self._changed:
                self._openings.discard(opening)
                self._changed.notify_all()
            if isinstance(error, MessengerError):
                caller.check()  # after a cut the error is no sign of an unhealthy peer
            raise
        with self._changed:
            self._openings.discard(opening)
            self._busy.add(stream)
            closed = self._closed
        if closed:
            self._check_in(stream, clean=False)
            raise PeerLost(_CLOSED)
        return stream

    def _take(self, deadline: float) -> Stream | PendingConnect:
        """An idle stream, or a reserved place to open one; waits until there is either."""
        with self._lock:
            found = self._find()
        return self._wait(deadline) if found is None else found

    def _find(self) -> Stream | PendingConnect | None:
        """An idle stream, or a reserved place to open one; None if all are in use. Call it with the
        lock held. Raises PeerLost."""
        if self._closed:
            raise PeerLost(_CLOSED)
        if self._idle:
            stream, _ = self._idle.pop()
            self._busy.add(stream)
            return stream
        if len(self._busy) + len(self._openings) < self.streams_max:
            opening = PendingConnect()
            self._openings.add(opening)
            return opening
        return None

    def _wait(self, deadline: float) -> Stream | PendingConnect:
        """As `_find`, but waits until the deadline. Raises TransferTimeout."""
        caller = calling()
        with caller.waits(self._wake), self._changed:  # in the order in which a cut takes the locks
            self._waiting += 1
            try:
                while (found := self._find()) is None:
                    caller.check()
                    left_s = min(deadline - time.monotonic(), threading.TIMEOUT_MAX)
                    if left_s <= 0 or not self._changed.wait(left_s):
                        raise TransferTimeout(
                            f"all {self.streams_max} streams to the peer were in use until the "
                            "deadline"
                        )
                return found
            finally:
                self._waiting -= 1

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _check_in(self, stream: Stream, *, clean: bool) -> None:
        ended = []
        with self._lock:
            self._busy.discard(stream)
            now = time.monotonic()
            if clean and stream.idle and not self._closed:
                self._idle.append((stream, now))
            else:
                ended.append(stream)
            while self._idle and self._idle[0][1] < now - _IDLE_S_MAX:
                ended.append(self._idle.pop(0)[0])
            if self._waiting:
                self._changed.notify_all()
        for one in ended:
            one.close()


class _Turn:
    """The use of a stream for one `with` block. A class, as a generator takes 1 us longer."""

    __slots__ = ("_caller", "_deadline", "_pool", "_stream")

    def __init__(self, pool: StreamPool, deadline: float) -> None:
        self._pool = pool
        self._deadline = deadline

    def __enter__(self) -> Stream:
        self._stream = stream = self._pool._check_out(self._deadline)
        caller = calling()
        self._caller = caller if caller.breaks else None
        if self._caller is not None:
            try:
                caller.uses(stream.cut)
            except BaseException:
                self._pool._check_in(stream, clean=True)
                raise
        return stream

    def __exit__(self, _: object, error: BaseException | None, trace: object) -> None:
        caller = self._caller
        if caller is not None:
            caller.used(self._stream.cut)
        self._pool._check_in(self._stream, clean=error is None)
        if caller is not None and isinstance(error, MessengerError):
            caller.check()  # after a cut the error is no sign of an unhealthy peer


_open_pools: weakref.WeakSet[StreamPool] = weakref.WeakSet()


def _forget_all() -> None:
    for pool in list(_open_pools):
        pool.forget()


os.register_at_fork(after_in_child=_forget_all)
