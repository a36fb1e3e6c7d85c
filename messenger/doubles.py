"""Test doubles: transports that inject faults, for tests of code that uses transports.

Each wraps an unmodified transport, and can be wrapped again. `Relay` does the same one level below:
it is a TCP proxy between a client and a listener that delays their bytes or cuts connections.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from typing import TYPE_CHECKING, Protocol

from .errors import PeerLost, TransferTimeout
from .transport import NOTHING, Range, Served

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .shm.host_copy import ByteArray
    from .transport import Arrived, Transport


class _Move(Protocol):
    """The wrapped transport's `read` or `write`, of a grant that is fixed."""

    def __call__(
        self,
        ranges: Sequence[Range],
        arrays: Sequence[ByteArray],
        deadline: float,
        arrived: Arrived | None = None,
    ) -> Served: ...


class Wrapper:
    """A transport that forwards every call; the base class of the doubles.

    A double overrides `reading` and `writing`, which inject the fault around a call of `move`.
    """

    def __init__(self, inner: Transport) -> None:
        self.inner = inner
        self.name = inner.name

    def read(
        self,
        grant: int,
        ranges: Sequence[Range],
        targets: Sequence[ByteArray],
        *,
        deadline: float,
        arrived: Arrived | None = None,
    ) -> Served:
        """See `Transport.read`."""

        def move(
            ranges: Sequence[Range],
            arrays: Sequence[ByteArray],
            deadline: float,
            arrived: Arrived | None = None,
        ) -> Served:
            return self.inner.read(grant, ranges, arrays, deadline=deadline, arrived=arrived)

        return self.reading(move, ranges, targets, deadline, arrived)

    def write(
        self,
        grant: int,
        ranges: Sequence[Range],
        sources: Sequence[ByteArray],
        *,
        deadline: float,
    ) -> Served:
        """See `Transport.write`."""

        def move(
            ranges: Sequence[Range],
            arrays: Sequence[ByteArray],
            deadline: float,
            arrived: Arrived | None = None,
        ) -> Served:
            return self.inner.write(grant, ranges, arrays, deadline=deadline)

        return self.writing(move, ranges, sources, deadline)

    def close(self) -> None:
        """Close the wrapped transport."""
        self.inner.close()

    def reading(
        self,
        move: _Move,
        ranges: Sequence[Range],
        targets: Sequence[ByteArray],
        deadline: float,
        arrived: Arrived | None,
    ) -> Served:
        """Carry out one `read` by calling `move`."""
        return move(ranges, targets, deadline, arrived)

    def writing(
        self,
        move: _Move,
        ranges: Sequence[Range],
        sources: Sequence[ByteArray],
        deadline: float,
    ) -> Served:
        """Carry out one `write` by calling `move`."""
        return move(ranges, sources, deadline)


class Delayed(Wrapper):
    """Each call begins `delay_s` later; raises TransferTimeout if that is past the deadline."""

    def __init__(self, inner: Transport, delay_s: float) -> None:
        super().__init__(inner)
        self.delay_s = delay_s

    def reading(
        self,
        move: _Move,
        ranges: Sequence[Range],
        targets: Sequence[ByteArray],
        deadline: float,
        arrived: Arrived | None,
    ) -> Served:
        """Wait, then read."""
        self._wait(deadline)
        return move(ranges, targets, deadline, arrived)

    def writing(
        self,
        move: _Move,
        ranges: Sequence[Range],
        sources: Sequence[ByteArray],
        deadline: float,
    ) -> Served:
        """Wait, then write."""
        self._wait(deadline)
        return move(ranges, sources, deadline)

    def _wait(self, deadline: float) -> None:
        left_s = deadline - time.monotonic()
        time.sleep(max(0.0, min(self.delay_s, left_s)))
        if left_s <= self.delay_s:
            raise TransferTimeout("delayed beyond the deadline")


class Lossy(Wrapper):
    """The connection breaks after `nbytes` more bytes, perhaps in the middle of a range, and stays
    broken until the test sets `nbytes` again."""

    def __init__(self, inner: Transport, nbytes: int) -> None:
        super().__init__(inner)
        self.nbytes = nbytes

    def reading(
        self,
        move: _Move,
        ranges: Sequence[Range],
        targets: Sequence[ByteArray],
        deadline: float,
        arrived: Arrived | None,
    ) -> Served:
        """Read the ranges before the break; the target of the broken range gets wrong bytes."""
        whole = self._whole(ranges)
        if whole == len(ranges):
            return move(ranges, targets, deadline, arrived)
        served = move(ranges[:whole], targets[:whole], deadline, arrived)
        targets[whole][: self.nbytes] = 0xAA
        return self._judge(served, whole)

    def writing(
        self,
        move: _Move,
        ranges: Sequence[Range],
        sources: Sequence[ByteArray],
        deadline: float,
    ) -> Served:
        """Write the ranges before the break."""
        whole = self._whole(ranges)
        if whole == len(ranges):
            return move(ranges, sources, deadline)
        return self._judge(move(ranges[:whole], sources[:whole], deadline), whole)

    def _whole(self, ranges: Sequence[Range]) -> int:
        """How many ranges pass before the break; `nbytes` keeps the bytes left for the next one."""
        for index, (_, length) in enumerate(ranges):
            if length > self.nbytes:
                return index
            self.nbytes -= length
        return len(ranges)

    def _judge(self, served: Served, whole: int) -> Served:
        if served.ranges < whole:  # the grant ended before the connection broke
            return served
        self.nbytes = 0
        raise PeerLost("lost by a test", served)


class Corrupting(Wrapper):
    """Flips a bit in every `every`th range that is moved, as a broken network card would."""

    def __init__(self, inner: Transport, every: int = 1) -> None:
        super().__init__(inner)
        self.every = every
        self.corrupted = 0
        self._passed = 0

    def reading(
        self,
        move: _Move,
        ranges: Sequence[Range],
        targets: Sequence[ByteArray],
        deadline: float,
        arrived: Arrived | None,
    ) -> Served:
        """Read, and corrupt each range before its arrival is reported."""

        def corrupt(index: int) -> None:
            self._corrupt(targets[index])
            if arrived is not None:
                arrived(index)

        return move(ranges, targets, deadline, corrupt)

    def writing(
        self,
        move: _Move,
        ranges: Sequence[Range],
        sources: Sequence[ByteArray],
        deadline: float,
    ) -> Served:
        """Write a corrupted copy; the caller's sources stay as they are."""
        copies = [source.copy() for source in sources]
        for one in copies:
            self._corrupt(one)
        return move(ranges, copies, deadline)

    def _corrupt(self, array: ByteArray) -> None:
        self._passed += 1
        if len(array) and self._passed % self.every == 0:
            array[self._passed % len(array)] ^= 0x10
            self.corrupted += 1


class Cut(Wrapper):
    """A path that works until `cut`, and again after `mend`."""

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner)
        self._cut = False

    def cut(self) -> None:
        """Make every call raise PeerLost, and an in-flight read at its next range."""
        self._cut = True

    def mend(self) -> None:
        """Undo `cut`."""
        self._cut = False

    def reading(
        self,
        move: _Move,
        ranges: Sequence[Range],
        targets: Sequence[ByteArray],
        deadline: float,
        arrived: Arrived | None,
    ) -> Served:
        """Read until `cut`."""
        self._check(NOTHING)
        nbytes = 0

        def check(index: int) -> None:
            nonlocal nbytes
            self._check(Served(index, nbytes))
            nbytes += ranges[index].length
            if arrived is not None:
                arrived(index)

        return move(ranges, targets, deadline, check)

    def writing(
        self,
        move: _Move,
        ranges: Sequence[Range],
        sources: Sequence[ByteArray],
        deadline: float,
    ) -> Served:
        """Write unless the path is cut."""
        self._check(NOTHING)
        return move(ranges, sources, deadline)

    def _check(self, served: Served) -> None:
        if self._cut:
            raise PeerLost("cut by a test", served)


class Counting(Wrapper):
    """Counts requests and the bytes served."""

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner)
        self._lock = threading.Lock()
        self.reads = self.writes = 0
        self.asked: list[Range] = []
        self.served_bytes = 0

    def reading(
        self,
        move: _Move,
        ranges: Sequence[Range],
        targets: Sequence[ByteArray],
        deadline: float,
        arrived: Arrived | None,
    ) -> Served:
        """Count the request and its bytes, and read."""
        with self._lock:
            self.reads += 1
            self.asked += ranges
        return self._served(move(ranges, targets, deadline, arrived))

    def writing(
        self,
        move: _Move,
        ranges: Sequence[Range],
        sources: Sequence[ByteArray],
        deadline: float,
    ) -> Served:
        """Count the request and its bytes, and write."""
        with self._lock:
            self.writes += 1
            self.asked += ranges
        return self._served(move(ranges, sources, deadline))

    def _served(self, served: Served) -> Served:
        with self._lock:
            self.served_bytes += served.nbytes
        return served


class Relay:
    """A TCP proxy between clients and a listener: connect to `address` instead of the target's.

    `pause` holds all bytes back, as a network partition without a reset would; `cut` ends all
    connections; `cut_after` ends them all once so many more bytes have come from the target.
    """

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._flowing = threading.Event()
        self._flowing.set()
        self._left_bytes: float = float("inf")
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._listening.getsockname()
        self._start(self._accept)

    def pause(self) -> None:
        """Hold all bytes back. Connections stay open."""
        self._flowing.clear()

    def resume(self) -> None:
        """Forward bytes again after `pause`."""
        self._flowing.set()

    def cut(self) -> None:
        """End all connections; new ones can be made."""
        with self._lock:
            for one in self._sockets:
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)

    def cut_after(self, nbytes: int) -> None:
        """End all connections, and refuse new ones, once so many more bytes came from the target.
        `mend` undoes it."""
        self._left_bytes = nbytes

    def mend(self) -> None:
        """Undo `cut_after`."""
        self._left_bytes = float("inf")

    def close(self) -> None:
        """End all connections, stop listening, and join all threads."""
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()  # from here on there are no new connections
        self._listening.close()
        self.resume()
        self.cut()
        for thread in self._threads:
            thread.join()

    def _start(self, work: Callable[..., None], *arguments: socket.socket) -> None:
        thread = threading.Thread(target=work, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(self._target)
            except OSError:
                client.close()
                continue
            with self._lock:
                self._sockets |= {client, server}
            self._start(self._carry, client, server)

    def _carry(self, client: socket.socket, server: socket.socket) -> None:
        """Forward both directions of one connection."""
        up = threading.Thread(target=self._pump, args=(client, server, False), daemon=True)
        up.start()
        self._pump(server, client, True)
        up.join()
        with self._lock:
            self._sockets -= {client, server}
        client.close()
        server.close()

    def _pump(self, source: socket.socket, sink: socket.socket, counted: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(64 << 10):
                self._flowing.wait()
                if counted:
                    data = data[: max(0, int(min(self._left_bytes, len(data))))]
                    self._left_bytes -= len(data)
                sink.sendall(data)
                if self._left_bytes <= 0:
                    break
        for one in (source, sink):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
