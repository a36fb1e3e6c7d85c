"""The serving side of TCP: accept connections, authenticate peers, serve ranges of grants.

Each connection has a thread that blocks in system calls: bulk bytes are copied between the grant's
arrays and the socket without a buffer in between, and the thread releases the GIL meanwhile. A
`Conversation`, the application's side of the connection, decides what the connection may do. Until
the conversation trusts the peer, the listener accepts only messages of up to 64 KiB, for
`hello_timeout_s` in total.

A slow or hostile peer can't block the server. Unauthenticated peers have a bounded number of
connections, and a new connection replaces the oldest, so that a flood of half-open connections
can't lock out other peers. The listener cuts a trusted peer that for `stall_s` neither sends the
bytes it announced nor receives the bytes it requested, and a trusted peer whose transfer is slower
than a mebibyte per second.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import select
import socket
import ssl
import threading
import time
import weakref
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from ..errors import FrameError, GrantError, MessengerError, PeerLost
from ..log_rate_limit import Ration
from ..transport import Served
from ..wire import frames
from ..wire.frames import LAST_GRANT, RANGE_BYTES_MAX, Kind
from ..wire.framing import FRAME_BYTES_MAX
from ..wire.ranges import RangePiece, lay_out
from .stream import PlainStream, Stream
from .tls_stream import TlsStream

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from ..shm.host_copy import ByteArray
    from ..transport import Grants
    from ..wire.frame_tags import BytesTag, FrameSeals

_log = logging.getLogger(__name__)
_log.addFilter(Ration())

# Limit of a message from an unauthenticated peer: a hello and its proof are a few hundred bytes.
_STRANGER_BYTES_MAX = 64 << 10
# Of a WRITE that is refused, or reaches past its grant's end: so many bytes are read and discarded
# to find the next frame. It is the payload of 16 large blocks; beyond, a new connection is cheaper.
_DRAIN_BYTES_MAX = 1 << 30
_DRAIN_STEP_BYTES = 256 << 10
# A transfer slower than this for its whole length occupies a thread and a grant to no use.
_BYTES_S_MIN = 1 << 20
# Limits of a small READ (a few ranges of a few blocks), whose plan is cached: the request's bytes,
# the grant's arrays.
_FEW_BYTES, _FEW_ARRAYS = 512, 8
# Back-off after an accept that failed for lack of descriptors or memory; and the interval between
# two log lines about such failures.
_ACCEPT_RETRY_S = 0.1
_LOG_EVERY_S = 10.0
_FOREVER = math.inf


class Answer(NamedTuple):
    """The application's answer to a message."""

    body: bytes | None  # None: no reply frame
    grant: int = 0  # becomes LAST_GRANT of this stream; 0: the stream has none
    seals: FrameSeals | None = None  # for all frames after this answer, in both directions


class Conversation(Protocol):
    """The application's side of one accepted connection; only the connection's thread calls it."""

    # False until the application has authenticated the peer: READ and WRITE end the connection,
    # messages are limited to 64 KiB, and hello_timeout_s runs.
    trusted: bool
    grants: Grants
    # Set by the listener: whether the peer has closed its end. For a `message` that takes long.
    hung_up: Callable[[], bool]
    # Set by the listener: the local address (host, port) to which the peer has connected.
    reached: tuple[str, int]

    def greet(self) -> bytes | None:
        """The first message to send on accept, such as a challenge."""

    def message(self, body: bytes | memoryview) -> Answer:
        """Answer a message. May block; has to return soon after `Listener.close` began. Any
        exception ends the connection."""

    def closed(self) -> None:
        """The connection has ended and its thread no longer accesses its grants. Called exactly
        once, also for connections that never became trusted."""


class Listener:
    """Accepts on (host, port), exactly as given, until `close`. One thread per connection.

    The connection's thread calls `converse` with the peer's address ("host:port"); an exception
    from it ends that connection. Constant after construction: `address`, the bound address (port 0
    requests any free port). Raises OSError if the address cannot be bound.
    """

    def __init__(
        self,
        address: tuple[str, int],
        converse: Callable[[str], Conversation],
        *,
        tls: ssl.SSLContext | None = None,
        connections_max: int = 512,
        untrusted_max: int = 128,
        hello_timeout_s: float = 5.0,
        stall_s: float = 30.0,
    ) -> None:
        self.converse = converse
        self.tls = tls
        self.hello_timeout_s = hello_timeout_s
        self.stall_s = stall_s
        self._connections_max = connections_max
        self._untrusted_max = untrusted_max
        self._lock = threading.Lock()
        # Ordered by age, as dictionaries keep insertion order. A connection is in one of these
        # until its thread ends.
        self._untrusted: dict[_Connection, None] = {}
        self._trusted: dict[_Connection, None] = {}
        self._leaving: dict[_Connection, None] = {}  # cut to make room
        self._cut_count = self._refused_count = self._accepted_count = 0
        self._closed = threading.Event()
        self._socket = _bind(address)
        self.address: tuple[str, int] = self._socket.getsockname()[:2]
        self._acceptor = threading.Thread(
            target=self._accept_all, name=f"tiffin-accept-{self.address[1]}", daemon=True
        )
        self._acceptor.start()
        _open_listeners.add(self)

    def statistics(self) -> dict[str, int]:
        """Current trusted and untrusted connections, and counters since the start."""
        with self._lock:
            return {
                "trusted": len(self._trusted),
                "untrusted": len(self._untrusted),
                "accepted": self._accepted_count,
                "refused": self._refused_count,
                "crowded_out": self._cut_count,
            }

    def close(self) -> None:
        """Stop accepting, cut every connection, and join every thread."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the acceptor
        if threading.current_thread() is not self._acceptor:
            self._acceptor.join()
        self._socket.close()
        with self._lock:
            connections = [*self._untrusted, *self._trusted, *self._leaving]
        for connection in connections:
            connection.cut()
        for connection in connections:
            connection.join()

    def _accept_all(self) -> None:
        logged_at = -math.inf
        while not self._closed.is_set():
            try:
                sock, peer = self._socket.accept()
            except OSError as error:
                if self._closed.is_set():
                    return
                if error.errno in _PEERS_FAULT:
                    continue
                now = time.monotonic()
                if now - logged_at > _LOG_EVERY_S:
                    logged_at = now
                    _log.warning("cannot accept a connection on %s: %s", self.address, error)
                # `accept` needs a free descriptor before Linux checks whether a connection is
                # waiting. If one is, close the oldest untrusted connection to free a descriptor.
                waiting = select.poll()
                waiting.register(self._socket, select.POLLIN)
                if waiting.poll(_ACCEPT_RETRY_S * 1000):
                    with self._lock:
                        self._crowd_out()
                self._closed.wait(_ACCEPT_RETRY_S)
            else:
                self._admit(sock, f"{peer[0]}:{peer[1]}")

    def _admit(self, sock: socket.socket, peer: str) -> None:
        connection = _Connection(self, sock, peer)
        with self._lock:
            self._accepted_count += 1
            if len(self._untrusted) >= self._untrusted_max or self._full():
                self._crowd_out()
            full = self._full() or len(self._leaving) >= self._connections_max
            if full:
                self._refused_count += 1
            else:
                self._untrusted[connection] = None
        if full:
            _log.warning("refused %s: %d connections are the limit", peer, self._connections_max)
            sock.close()
            return
        try:
            connection.start()
        except RuntimeError as error:  # no more threads
            _log.warning("refused %s: %s", peer, error)
            self._gone(connection)
            sock.close()

    def _full(self) -> bool:
        return len(self._untrusted) + len(self._trusted) >= self._connections_max

    def _crowd_out(self) -> None:
        """Cut the oldest untrusted connection. It no longer counts towards the limits; its thread
        ends later. Call this with the lock held."""
        oldest = next(iter(self._untrusted), None)
        if oldest is not None:
            self._cut_count += 1
            del self._untrusted[oldest]
            self._leaving[oldest] = None
            oldest.cut()

    def _trust(self, connection: _Connection) -> None:
        with self._lock:
            if connection in self._untrusted:
                del self._untrusted[connection]
                self._trusted[connection] = None

    def _gone(self, connection: _Connection) -> None:
        with self._lock:
            for book in (self._untrusted, self._trusted, self._leaving):
                book.pop(connection, None)

    def forget(self) -> None:
        """In a forked child: close the sockets, which are the parent's and must not outlive it."""
        self._closed.set()
        self._socket.close()
        for connection in [*self._untrusted, *self._trusted, *self._leaving]:
            connection.forget()


class _Connection:
    """One accepted connection and its thread."""

    def __init__(self, listener: Listener, sock: socket.socket, peer: str) -> None:
        self._listener = listener
        self._socket: socket.socket | None = sock  # until a stream owns it
        self._stream: Stream | None = None
        self._peer = peer
        self._last_grant = 0
        self._lock = threading.Lock()
        self._cut = False
        self._hello_deadline = time.monotonic() + listener.hello_timeout_s
        self._thread = threading.Thread(target=self._run, name=f"tiffin-tcp-{peer}", daemon=True)
        self.start = self._thread.start
        self.join = self._thread.join

    def cut(self) -> None:
        """End the connection, from any thread."""
        with self._lock:
            self._cut = True
            if self._stream is not None:
                self._stream.cut()
            elif self._socket is not None:
                with contextlib.suppress(OSError):
                    socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def forget(self) -> None:
        """See `Listener.forget`."""
        if self._stream is not None:
            self._stream.forget()
        elif self._socket is not None:
            self._socket.close()

    def _run(self) -> None:
        try:
            self._converse()
        except MessengerError as error:
            _log.debug("%s: %s", self._peer, error)
        except OSError as error:
            _log.debug("%s: %s", self._peer, error)
        except Exception:  # noqa: BLE001 - the application's; it ends its connection, not the server
            _log.exception("an error of the application ended the connection of %s", self._peer)
        finally:
            with self._lock:
                sock, self._socket = self._socket, None
            if sock is not None:
                sock.close()
            self._listener._gone(self)

    def _converse(self) -> None:
        assert self._socket is not None
        reached = self._socket.getsockname()[:2]
        stream = self._open_stream()
        try:
            conversation = self._listener.converse(self._peer)
            conversation.hung_up = stream.hung_up
            conversation.reached = reached
            try:
                self._serve(stream, conversation)
            finally:
                stream.close()
                conversation.closed()
        finally:
            stream.close()

    def _open_stream(self) -> Stream:
        sock, tls = self._socket, self._listener.tls
        assert sock is not None
        tune(sock)
        if tls is not None:
            sock.settimeout(max(0.001, self._hello_deadline - time.monotonic()))
            sock = tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
            with self._lock:
                self._socket = sock  # the old socket is detached
                if self._cut:
                    raise PeerLost("cut before the handshake")
            sock.do_handshake()
        with self._lock:
            self._stream = TlsStream(sock) if isinstance(sock, ssl.SSLSocket) else PlainStream(sock)
            self._socket = None
            if self._cut:
                self._stream.cut()
            return self._stream

    def _serve(self, stream: Stream, conversation: Conversation) -> None:
        self._introduce(stream, conversation)
        stall_s = self._listener.stall_s
        while True:
            # An answer stays queued only if the next frame has arrived already: the data of a READ
            # that follows its message at once is sent in one packet with the reply to the message.
            if not stream.ahead_bytes:
                stream.flush(_FOREVER, stall_s)
            kind, body = stream.receive_frame(_FOREVER, stall_s)
            if kind is Kind.MESSAGE:
                stream.flush(_FOREVER, stall_s)
                self._answer(stream, conversation, body)
            elif kind is Kind.READ:
                self._send_ranges(stream, conversation.grants, bytes(body))
            elif kind is Kind.WRITE:
                self._receive_ranges(stream, conversation.grants, *frames.parse_request(body))
            else:
                raise FrameError(f"a client that sends {kind.name}")

    def _introduce(self, stream: Stream, conversation: Conversation) -> None:
        """Exchange messages until the application trusts the peer or `hello_timeout_s` is over."""
        deadline = self._hello_deadline
        greeting = conversation.greet()
        if greeting is not None:
            stream.message(greeting)
        stream.message_bytes_max = _STRANGER_BYTES_MAX
        while not conversation.trusted:
            stream.flush(deadline)
            kind, body = stream.receive_frame(deadline, None)
            if kind is not Kind.MESSAGE:
                raise FrameError(f"{kind.name} before the peer has said who it is")
            self._answer(stream, conversation, body)
        stream.message_bytes_max = FRAME_BYTES_MAX
        self._listener._trust(self)

    def _answer(self, stream: Stream, conversation: Conversation, body: bytes | memoryview) -> None:
        reply, self._last_grant, seals = conversation.message(body)
        if reply is not None:
            stream.message(reply)
        if seals is not None:
            stream.protect(seals)

    def _send_ranges(self, stream: Stream, grants: Grants, body: bytes) -> None:
        grant, stall_s = frames.grant_of(body), self._listener.stall_s
        alike = grant == LAST_GRANT and len(body) <= _FEW_BYTES
        try:
            with grants.open(self._granted(grant), writes=False) as arrays:
                plan = _plan_of_few if alike and len(arrays) <= _FEW_ARRAYS else _plan
                answer, served, pieces = plan(body, tuple(map(len, arrays)))
                stream.send_frame(answer, _views(arrays, pieces))
                stream.flush(_deadline(served.nbytes, stall_s), stall_s)
        except GrantError as error:
            stream.send_frame(frames.refusal(Kind.DATA, str(error)))

    def _receive_ranges(
        self, stream: Stream, grants: Grants, grant: int, ranges: NDArray[np.uint64]
    ) -> None:
        stall_s = self._listener.stall_s
        if len(ranges) and int(ranges[:, 1].max()) > RANGE_BYTES_MAX:
            raise FrameError(f"a WRITE of a range above {RANGE_BYTES_MAX} bytes")
        announced_bytes = int(ranges[:, 1].sum())
        deadline = _deadline(announced_bytes, stall_s)
        served = Served(0, 0)
        shown = stream.begin_bytes()
        try:
            with grants.open(self._granted(grant), writes=True) as arrays:
                served, pieces = lay_out(ranges, [len(array) for array in arrays])
                views = _views(arrays, pieces)
                stream.receive_bytes(views, deadline, stall_s)
                if shown is not None:
                    shown.update(views)
            reply = frames.answer(Kind.WRITTEN, served)
        except GrantError as error:
            served = Served(0, 0)
            reply = frames.refusal(Kind.WRITTEN, str(error))
        _drain(stream, announced_bytes - served.nbytes, deadline, stall_s, shown)
        if shown is not None:
            stream.end_bytes(shown, deadline, stall_s)
        stream.send_frame(reply)

    def _granted(self, grant: int) -> int:
        if grant != LAST_GRANT:
            return grant
        if not self._last_grant:
            raise GrantError("the last message on this connection was not answered with a grant")
        return self._last_grant


def _plan(body: bytes, sizes: tuple[int, ...]) -> tuple[bytes, Served, tuple[RangePiece, ...]]:
    """How to serve a READ of a grant whose arrays have these sizes: the answer's head, and the
    pieces of the arrays that follow it. Raises FrameError."""
    served, pieces = lay_out(frames.parse_request(body)[1], sizes)
    return frames.answer(Kind.DATA, served), served, tuple(pieces)


# Small reads of different blocks often have equal requests and array sizes, hence equal plans.
_plan_of_few = lru_cache(maxsize=256)(_plan)


def _views(arrays: Sequence[ByteArray], pieces: Sequence[RangePiece]) -> list[memoryview]:
    views = [array.data for array in arrays]
    return [views[array][start:stop] for array, start, stop in pieces]


def _deadline(nbytes: int, stall_s: float) -> float:
    return time.monotonic() + stall_s + nbytes / _BYTES_S_MIN


def _drain(
    stream: Stream, nbytes: int, deadline: float, stall_s: float, shown: BytesTag | None
) -> None:
    """Read and discard the raw bytes of a WRITE that have no place in the grant. Raises FrameError
    if there are more than _DRAIN_BYTES_MAX of them."""
    if nbytes > _DRAIN_BYTES_MAX:
        raise FrameError(f"{nbytes} bytes of a WRITE have no place")
    scratch = np.empty(min(nbytes, _DRAIN_STEP_BYTES), np.uint8).data
    while nbytes:
        step = min(nbytes, len(scratch))
        stream.receive_bytes([scratch[:step]], deadline, stall_s)
        if shown is not None:
            shown.update([scratch[:step]])
        nbytes -= step


def tune(sock: socket.socket) -> None:
    """Set the socket options of every connection, at both ends: no delay, and keep-alive."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # Keep-alive detects an idle peer that vanished without closing after 30 + 3 x 10 seconds.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)


def _bind(address: tuple[str, int]) -> socket.socket:
    host, port = address
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, _, _, _, target = found[0]
    return socket.create_server(target[:2], family=family, backlog=1024)


# Errors of `accept` that mean the peer's connection was closed or broken before it was accepted.
_PEERS_FAULT = {
    errno.ECONNABORTED,
    errno.EPROTO,
    errno.EPERM,
    errno.ENETDOWN,
    errno.ENOPROTOOPT,
    errno.EHOSTDOWN,
    errno.EHOSTUNREACH,
    errno.EOPNOTSUPP,
    errno.ENETUNREACH,
}

_open_listeners: weakref.WeakSet[Listener] = weakref.WeakSet()


def _forget_all() -> None:
    for listener in list(_open_listeners):
        listener.forget()


os.register_at_fork(after_in_child=_forget_all)
