"""The client's side of TCP: connect, and read ranges over a pool of streams to one peer.

A large read is split into consecutive parts, one stream each, which move in parallel. The `arrived`
callback reports only ranges that have arrived without a gap before them. Writes share their round
trip with messages, so their caller makes them on a stream (`Stream.ask_write`).
"""

from __future__ import annotations

import contextlib
import contextvars
import errno
import os
import select
import socket
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import GrantError, PeerLost, TransferError, TransferTimeout
from ..transfer_plan import PART_BYTES_MIN, InOrderArrivals, Slice, split
from ..transport import NOTHING, Range, Served
from ..wire.frames import LAST_GRANT, RANGES_MAX
from ..wire.ranges import views_of
from .listener import Answer, Conversation, Listener, tune
from .pending_connect import PendingConnect, current
from .stream import PlainStream, Stream
from .stream_pool import StreamPool
from .tls_stream import TlsStream

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from ..shm.host_copy import ByteArray
    from ..transport import Arrived

__all__ = ["LAST_GRANT", "Answer", "Conversation", "Listener", "TcpTransport", "connect"]

# Streams of one read. One stream moves 3 GB/s with a core at each end; four fill a 100 Gb/s
# network.
_PARALLEL_MAX = 4
# The longest timeout of poll(2), 24 days.
_POLL_MS_MAX = (1 << 31) - 1


def connect(
    address: tuple[str, int],
    deadline: float,
    *,
    tls: ssl.SSLContext | None = None,
    server_hostname: str | None = None,
) -> Stream:
    """A stream to (host, port). With `tls`, the server's certificate has to be for
    `server_hostname`, or else the host. Raises PeerLost, TransferTimeout.

    The system's resolver looks up a host name and has its own timeout; numeric addresses need no
    lookup. Everything else ends at once on a `StreamPool.cut` of the pool that called the opener.
    """
    where = f"{address[0]}:{address[1]}"
    opening = current()
    try:
        sock = _open_socket(address, deadline)
        try:
            stream = _secure(sock, deadline, tls, server_hostname or address[0])
        except BaseException:
            opening.close(sock)
            raise
        try:
            opening.has(stream)
        except BaseException:
            stream.close()
            raise
    except TimeoutError as error:
        raise TransferTimeout(f"no connection to {where} by the deadline") from error
    except (OSError, UnicodeError, OverflowError) as error:  # the last two: bad names and ports
        why = "it was cut" if opening.was_cut else error
        raise PeerLost(f"no connection to {where}: {why}") from error
    return stream


def _open_socket(address: tuple[str, int], deadline: float) -> socket.socket:
    """A socket to the first of the host's addresses that accepts; the time left until the deadline
    is shared between the addresses not tried yet."""
    opening = current()
    failure: OSError = OSError("the name has no address")
    found = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)
    for left, (family, kind, protocol, _, target) in zip(
        range(len(found), 0, -1), found, strict=True
    ):
        sock = socket.socket(family, kind, protocol)
        try:
            tune(sock)
            _connect(sock, target, max(0.001, (deadline - time.monotonic()) / left), opening)
            if sock.getsockname() == sock.getpeername():
                # No process listens there, and the kernel chose the same port for the local end.
                raise ConnectionRefusedError("connected to itself")
        except OSError as error:
            opening.close(sock)
            failure = error
        except BaseException:
            opening.close(sock)
            raise
        else:
            return sock
    raise failure


def _connect(sock: socket.socket, target: Any, timeout_s: float, opening: PendingConnect) -> None:
    """As `socket.connect`, but registers the socket with `opening` once its first packet is sent:
    before that, a `shutdown` has no effect, and Python's own `connect` would keep waiting."""
    sock.setblocking(False)
    failure = sock.connect_ex(target)
    opening.has(sock)
    if failure == errno.EINPROGRESS:
        poller = select.poll()
        poller.register(sock, select.POLLOUT)
        if not poller.poll(min(timeout_s * 1000, _POLL_MS_MAX)):
            raise TimeoutError("timed out")
        failure = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if failure:
        raise OSError(failure, os.strerror(failure))


def _secure(
    sock: socket.socket, deadline: float, tls: ssl.SSLContext | None, hostname: str
) -> Stream:
    if tls is None:
        return PlainStream(sock)
    sock.settimeout(max(0.001, deadline - time.monotonic()))
    secured = tls.wrap_socket(sock, server_hostname=hostname, do_handshake_on_connect=False)
    try:
        current().has(secured)  # the old socket is detached
        secured.do_handshake()
    except BaseException:
        current().close(secured)
        raise
    return TlsStream(secured)


class TcpTransport:
    """Ranges of one peer's grants over TCP. See `Transport`.

    `opener(deadline)` connects *and* sends the hello. At most `streams_max` streams are open; a
    call that needs one more waits for it. A read of 16 MiB or more is spread over up to
    `parallel_max` of them; by default up to four, if the machine has two cores for each: on two
    cores, four streams took 1.3 times as long as one. No byte for `stall_s` raises Stalled.
    """

    name = "tcp"

    def __init__(
        self,
        opener: Callable[[float], Stream],
        *,
        streams_max: int = 8,
        parallel_max: int | None = None,
        stall_s: float = 10.0,
    ) -> None:
        self._pool = StreamPool(opener, streams_max)
        if parallel_max is None:
            parallel_max = min(_PARALLEL_MAX, len(os.sched_getaffinity(0)) // 2)
        self._parallel_max = max(1, min(parallel_max, streams_max))
        self._stall_s = stall_s

    def stream(self, deadline: float) -> AbstractContextManager[Stream]:
        """A stream for a `with` block, an idle one or a new one. The pool takes it back if the
        block ends without an exception and nothing is pending on it, and else closes it.

        Raises PeerLost, TransferTimeout, and what the opener raises.
        """
        return self._pool.stream(deadline)

    def read(
        self,
        grant: int,
        ranges: Sequence[Range],
        targets: Sequence[ByteArray],
        *,
        deadline: float,
        arrived: Arrived | None = None,
        stall_s: float | None = None,
    ) -> Served:
        """See `Transport.read`. `stall_s` overrides the transport's stall timeout for this read."""
        views = views_of(ranges, targets, writable=True)
        stall_s = self._stall_s if stall_s is None else stall_s
        if grant == LAST_GRANT:
            # The stream's last grant belongs to the call that used the stream before this one.
            raise GrantError(f"{LAST_GRANT} is the last grant of one stream, not of a transport")
        if self._parallel_max > 1 and sum(map(len, views)) >= 2 * PART_BYTES_MIN:
            parts = split(ranges, self._parallel_max)
            return _Parts(self._pool, grant, stall_s).move(parts, ranges, views, deadline, arrived)
        with _stream(self._pool, deadline) as stream:
            return _read(_Transfer(stream, grant, deadline, stall_s), ranges, views, arrived)

    def cut(self) -> None:
        """Treat the peer as dead: in-flight calls raise PeerLost at once, later calls reconnect."""
        self._pool.cut()

    def close(self) -> None:
        """Cut all streams, and wait until none is in use."""
        self._pool.close()


class _Transfer(NamedTuple):
    """One stream's share of a read."""

    stream: Stream
    grant: int
    deadline: float
    stall_s: float


def _read(
    transfer: _Transfer,
    ranges: Sequence[Range],
    views: list[memoryview],
    arrived: Arrived | None,
) -> Served:
    """Read frame by frame. A TransferError's `served` counts all frames."""
    stream, grant, deadline, stall_s = transfer
    done = NOTHING
    for start in range(0, max(1, len(ranges)), RANGES_MAX):
        part = ranges[start : start + RANGES_MAX]
        report = partial(_report, arrived, start) if arrived is not None and start else arrived
        try:
            stream.ask_read(grant, part)
            stream.flush(deadline, stall_s)
            served = stream.receive_data_views(
                views[start : start + RANGES_MAX], deadline, report, stall_s
            )
        except TransferError as error:
            error.served = _sum(done, error.served)
            raise
        done = _sum(done, served)
        if served.ranges < len(part):
            break
    return done


class _Parts:
    """A read over several streams, each in a thread of its own but the first."""

    def __init__(self, pool: StreamPool, grant: int, stall_s: float) -> None:
        self._pool = pool
        self._grant = grant
        self._stall_s = stall_s
        self._lock = threading.Lock()
        self._streams: set[Stream] = set()
        self._failure: BaseException | None = None

    def move(
        self,
        parts: list[list[Slice]],
        ranges: Sequence[Range],
        views: list[memoryview],
        deadline: float,
        arrived: Arrived | None,
    ) -> Served:
        """Move all parts. Returns, or raises, only when no thread accesses `views` any more."""
        order = InOrderArrivals(ranges, parts, arrived)

        def run(part: int) -> None:
            try:
                self._run(part, parts[part], ranges, views, deadline, order)
            except BaseException as error:  # noqa: BLE001 - raised again below, in the caller
                self._fail(error)

        threads = [
            threading.Thread(
                target=contextvars.copy_context().run,  # each thread works for the same `Caller`
                args=(run, part),
                name="tiffin-part",
                daemon=True,
            )
            for part in range(1, len(parts))
        ]
        started: list[threading.Thread] = []
        try:
            for thread in threads:
                thread.start()
                started.append(thread)
            run(0)
        except BaseException as error:
            self._fail(error)
            raise
        finally:
            self._join(started)
        if self._failure is not None:
            if isinstance(self._failure, TransferError):
                self._failure.served = order.served
            raise self._failure
        return order.served

    def _run(
        self,
        part: int,
        slices: list[Slice],
        ranges: Sequence[Range],
        views: list[memoryview],
        deadline: float,
        order: InOrderArrivals,
    ) -> None:
        mine = [Range(ranges[i].offset + start, stop - start) for i, start, stop in slices]
        theirs = [views[i][start:stop] for i, start, stop in slices]
        with _stream(self._pool, deadline) as stream:
            with self._lock:
                if self._failure is not None:
                    return
                self._streams.add(stream)
            try:
                transfer = _Transfer(stream, self._grant, deadline, self._stall_s)
                _read(transfer, mine, theirs, lambda _: order.mark(part))
            finally:
                with self._lock:
                    self._streams.discard(stream)

    def _fail(self, error: BaseException) -> None:
        """Note the first failure and cut the streams of the other parts, whose bytes are of no use
        any more."""
        with self._lock:
            if self._failure is None:
                self._failure = error
            for stream in self._streams:
                stream.cut()

    def _join(self, threads: list[threading.Thread]) -> None:
        """Join the threads even on KeyboardInterrupt: they write into the caller's memory."""
        interruption: BaseException | None = None
        for thread in threads:
            while thread.is_alive():
                try:
                    thread.join()
                except BaseException as error:  # noqa: BLE001 - raised again below
                    interruption = error
                    self._fail(error)
        if interruption is not None:
            raise interruption


@contextlib.contextmanager
def _stream(pool: StreamPool, deadline: float) -> Iterator[Stream]:
    """As `pool.stream`; a refused grant (GrantError) ends the transfer but not the stream."""
    refused: GrantError | None = None
    with pool.stream(deadline) as stream:
        try:
            yield stream
        except GrantError as error:
            refused = error
    if refused is not None:
        raise refused


def _sum(one: Served, other: Served) -> Served:
    return Served(one.ranges + other.ranges, one.nbytes + other.nbytes)


def _report(arrived: Arrived, base: int, index: int) -> None:
    arrived(base + index)
