"""The client's side of TCP: connect, and a pool of streams to one peer.

A stream that was used cleanly goes back to the pool; the next user looks whether it still leads
anywhere (a system call that never waits) before it is used again. A transfer that is large enough
is cut in parts, in order, one stream each; the parts are moved at the same time.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
import weakref
from functools import partial
from typing import TYPE_CHECKING

from .errors import PeerLost, TransferTimeout
from .frames import LAST_GRANT, RANGES_MAX
from .listener import Answer, Conversation, Listener, tune
from .ranges import Range, Served
from .stream import PlainStream, Stream, TlsStream, views_of

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Iterator, Sequence

    from .local import ByteArray
    from .transport import Arrived

__all__ = ["LAST_GRANT", "Answer", "Conversation", "Listener", "TcpTransport", "connect"]


def connect(
    address: tuple[str, int],
    deadline: float,
    *,
    tls: ssl.SSLContext | None = None,
    server_hostname: str | None = None,
) -> Stream:
    """A stream to (host, port). With `tls`, the server's certificate has to be for
    `server_hostname`, or else the host. Raises PeerLost, TransferTimeout.

    A host's name is looked up by the system's resolver, which keeps its own time; addresses are not
    looked up at all.
    """
    where = f"{address[0]}:{address[1]}"
    try:
        sock = _open_socket(address, deadline)
        try:
            return _secure(sock, deadline, tls, server_hostname or address[0])
        except BaseException:
            sock.close()
            raise
    except TimeoutError as error:
        raise TransferTimeout(f"no connection to {where} by the deadline") from error
    except OSError as error:
        raise PeerLost(f"no connection to {where}: {error}") from error


def _open_socket(address: tuple[str, int], deadline: float) -> socket.socket:
    failure: OSError = OSError("the name has no address")
    for family, kind, protocol, _, target in socket.getaddrinfo(*address, type=socket.SOCK_STREAM):
        sock = socket.socket(family, kind, protocol)
        try:
            tune(sock)
            sock.settimeout(max(0.001, deadline - time.monotonic()))
            sock.connect(target)
            if sock.getsockname() == sock.getpeername():
                # Nobody listens there, and the kernel chose that very port for our end.
                raise ConnectionRefusedError("connected to itself")
        except OSError as error:
            sock.close()
            failure = error
        except BaseException:
            sock.close()
            raise
        else:
            return sock
    raise failure


def _secure(
    sock: socket.socket, deadline: float, tls: ssl.SSLContext | None, hostname: str
) -> Stream:
    if tls is None:
        return PlainStream(sock)
    sock.settimeout(max(0.001, deadline - time.monotonic()))
    secured = tls.wrap_socket(sock, server_hostname=hostname, do_handshake_on_connect=False)
    try:
        secured.do_handshake()
    except BaseException:
        secured.close()
        raise
    return TlsStream(secured)


class TcpTransport:
    """Ranges of one peer's grants over TCP. See `Transport`.

    `opener(deadline)` connects *and* says hello. At most `streams_max` streams are open; who needs
    one more waits for it.
    """

    name = "tcp"

    def __init__(self, opener: Callable[[float], Stream], *, streams_max: int = 8) -> None:
        self._opener = opener
        self._streams_max = streams_max
        self._changed = threading.Condition()
        self._idle: list[Stream] = []
        self._busy: set[Stream] = set()
        self._opening = 0
        self._closed = False
        _open_transports.add(self)

    @contextlib.contextmanager
    def stream(self, deadline: float) -> Iterator[Stream]:
        """A stream for the block, an idle one or a new one. It is put back if the block ends
        cleanly and nothing is pending on it, and else closed.

        Raises PeerLost, TransferTimeout, and what the opener raises.
        """
        stream = self._check_out(deadline)
        clean = False
        try:
            yield stream
            clean = True
        finally:
            self._check_in(stream, clean=clean)

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
        views_of(ranges, targets, writable=True)
        done = nbytes = 0
        with self.stream(deadline) as stream:
            while done < len(ranges):
                part = ranges[done : done + RANGES_MAX]
                stream.ask_read(grant, part)
                stream.flush(deadline)
                report = None if arrived is None else partial(_report, arrived, done)
                served = stream.receive_data(
                    part, targets[done : done + RANGES_MAX], deadline, report
                )
                done += served.ranges
                nbytes += served.nbytes
                if served.ranges < len(part):
                    break
        return Served(done, nbytes)

    def write(
        self,
        grant: int,
        ranges: Sequence[Range],
        sources: Sequence[ByteArray],
        *,
        deadline: float,
    ) -> Served:
        """See `Transport.write`."""
        views_of(ranges, sources, writable=False)
        done = nbytes = 0
        with self.stream(deadline) as stream:
            while done < len(ranges):
                part = ranges[done : done + RANGES_MAX]
                stream.ask_write(grant, part, sources[done : done + RANGES_MAX])
                stream.flush(deadline)
                served = stream.receive_written(deadline)
                done += served.ranges
                nbytes += served.nbytes
                if served.ranges < len(part):
                    break
        return Served(done, nbytes)

    def cut(self) -> None:
        """The peer is dead: every call under way raises PeerLost now. Later ones connect again."""
        with self._changed:
            streams = [*self._busy, *self._idle]
        for stream in streams:
            stream.cut()

    def close(self) -> None:
        """Cut all streams, and wait until nobody uses one."""
        with self._changed:
            self._closed = True
        self.cut()
        with self._changed:
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._busy and not self._opening)
            idle, self._idle = self._idle, []
        for stream in idle:
            stream.close()

    def forget(self) -> None:
        """In a forked child: the connections are the parent's."""
        for stream in [*self._idle, *self._busy]:
            stream.close()
        self._changed = threading.Condition()
        self._idle, self._busy, self._opening = [], set(), 0

    def _check_out(self, deadline: float) -> Stream:
        while (stream := self._take_idle(deadline)) is not None:
            if stream.alive():
                return stream
            self._check_in(stream, clean=False)
        try:
            stream = self._opener(deadline)
        except BaseException:
            with self._changed:
                self._opening -= 1
                self._changed.notify()
            raise
        with self._changed:
            self._opening -= 1
            self._busy.add(stream)
            closed = self._closed
        if closed:
            self._check_in(stream, clean=False)
            raise PeerLost("this transport is closed")
        return stream

    def _take_idle(self, deadline: float) -> Stream | None:
        """An idle stream, or None and the right to open one."""
        with self._changed:
            while not self._closed:
                if self._idle:
                    stream = self._idle.pop()
                    self._busy.add(stream)
                    return stream
                if len(self._busy) + self._opening < self._streams_max:
                    self._opening += 1
                    return None
                if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                    raise TransferTimeout(
                        f"all {self._streams_max} streams were in use until the deadline"
                    )
            raise PeerLost("this transport is closed")

    def _check_in(self, stream: Stream, *, clean: bool) -> None:
        with self._changed:
            self._busy.discard(stream)
            keep = clean and stream.idle and not self._closed
            if keep:
                self._idle.append(stream)
            self._changed.notify_all()
        if not keep:
            stream.close()


def _report(arrived: Arrived, base: int, index: int) -> None:
    arrived(base + index)


_open_transports: weakref.WeakSet[TcpTransport] = weakref.WeakSet()


def _forget_all() -> None:
    for transport in list(_open_transports):
        transport.forget()


os.register_at_fork(after_in_child=_forget_all)
