"""One connection to a node's daemon on this host: the handshake, and one call at a time."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import struct
import time
from array import array
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

from tiffin.messenger.errors import FrameError, RegionError
from tiffin.messenger.shm.region import Region
from tiffin.messenger.tcp.pending_connect import given_up_with
from tiffin.messenger.wire.framing import FRAME_BYTES_MAX, FrameDecoder, encode_frame

from ... import deadlines, errors
from ...errors import ClientClosed, DeadlineExceeded, NodeUnavailable, ProtocolError, TiffinError
from ...node.core import messages
from ...text import check_socket_path
from .region_mapping import Mapping

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
HANDSHAKE_S = 10.0
# A node answers most calls in 20 to 60 us, and on a virtual machine it takes as long again to wake
# a client that has gone to sleep: looking 50 times, about 2 us each, took a get of 16 blocks from
# 140 to 98 us and a match of 256 from 110 to 75, and cost nothing where both share one core.
LOOKS = 50
# On a busy core each look may take as long as other work occupies it: see
# `messenger/tcp/stream.py`.
LOOKING_S = 0.001
# How long a call that was given up may go on, and what it ends with.
GIVEN_UP = "not asked any more: the call was given up"
NOTICE_S = 0.05
# Replies have some hundred bytes; a page of an inventory has 1 MiB.
_RECEIVE_BYTES = 64 << 10
_LENGTH = struct.Struct("<I")


class NodeAnswer(NamedTuple):
    """A reply, and the region that its offsets are for (`Mapping.of`); a reconnect maps another."""

    reply: Any
    memory: Bytes


class Greeted(NamedTuple):
    """A connection that the node has welcomed. `mapping`: of a new session only."""

    sock: socket.socket
    welcome: messages.Welcome
    mapping: Mapping | None

    def drop(self) -> None:
        """Close it."""
        self.sock.close()
        if self.mapping is not None:
            self.mapping.close()


def raise_refusal(reply: messages.AnyReply) -> messages.AnyReply:
    """The reply; if it is a refusal, raises the error that it names."""
    if isinstance(reply, messages.Refused):
        kind = getattr(errors, reply.error, None)
        if not (isinstance(kind, type) and issubclass(kind, TiffinError)):
            kind = ProtocolError
        raise kind(reply.message)
    return reply


class Connection:
    """One connection of a session. A call that did not end, for whatever reason, leaves it
    unusable: then somebody else tells the node so (`Connections`)."""

    def __init__(self, path: Path, number: int, sock: socket.socket, mapping: Mapping) -> None:
        """`mapping` is the region that its replies are for."""
        self.number = number
        self.mapping = mapping
        # Whether a call has it: a weak reference to something that ends with the call.
        self.user: Callable[[], object] = nobody
        self.idle_since = 0.0
        self.given_up = False  # whether the caller does not wait any more
        self.unread = False  # whether the node may not have read all that was posted over it
        self.half_sent = False  # whether the node may lack the end of a request
        self._path = path
        # Deadlines are kept here: a socket with a timeout makes two more system calls per call.
        sock.setblocking(False)
        self._sock = sock
        self._ids = count(1)

    def call(self, request: messages.Request, deadline: float) -> messages.AnyReply:
        """Send a request, wait for its reply. Raises DeadlineExceeded, OSError, ProtocolError."""
        request.id = next(self._ids)
        self._send(encode_frame(messages.encoder.encode(request)), deadline)
        try:
            reply: messages.AnyReply = messages.reply_decoder.decode(self._receive(deadline))
        except (FrameError, *messages.NOT_A_MESSAGE) as error:
            raise self._garbage(error) from error
        if reply.id != request.id:
            raise self._garbage(f"a reply to request {reply.id} instead of {request.id}")
        self.unread = False
        return reply

    def post(self, request: messages.Request, deadline: float) -> bool:
        """Send a request that gets no reply; False if the socket took nothing of it by now. Raises
        DeadlineExceeded, OSError."""
        request.id = messages.UNAWAITED
        frame = encode_frame(messages.encoder.encode(request))
        self.half_sent = self.unread = True
        try:
            sent = self._sock.send(frame)
        except BlockingIOError:
            self.half_sent = False
            return False
        self._send(frame[sent:], deadline)
        return True

    def gone(self, why: object) -> NodeUnavailable:
        """The error to raise in place of an OSError."""
        return NodeUnavailable(f"lost the node at {self._path}: {why}")

    def give_up(self) -> None:
        """End the call that waits, soon, from any thread; the node does not notice."""
        self.given_up = True

    def cut(self) -> None:
        """End the call that waits and the connection, from any thread."""
        _shut(self._sock)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._sock.fileno() < 0

    def close(self) -> None:
        """Close the descriptor, which no thread uses any more."""
        self._sock.close()

    def _garbage(self, why: object) -> ProtocolError:
        return ProtocolError(f"the node at {self._path} sent garbage: {why}")

    def _send(self, frame: bytes, deadline: float) -> None:
        self.half_sent = True
        rest = memoryview(frame)
        while rest:
            try:
                rest = rest[self._sock.send(rest) :]
            except BlockingIOError:
                self._wait(select.POLLOUT, deadline, "took no request")
        self.half_sent = False

    def _receive(self, deadline: float) -> bytes:
        """The body of the next frame. Raises DeadlineExceeded, ConnectionError at the end of the
        connection, OSError, FrameError."""
        data = self._some(deadline)
        while len(data) < _LENGTH.size:
            data += self._some(deadline)
        (length,) = _LENGTH.unpack_from(data)
        if length > FRAME_BYTES_MAX:
            raise FrameError(f"a frame of {length} bytes; the limit is {FRAME_BYTES_MAX}")
        parts, missing_bytes = [data], _LENGTH.size + length - len(data)
        while missing_bytes > 0:
            parts.append(self._some(deadline))
            missing_bytes -= len(parts[-1])
        if missing_bytes:
            raise FrameError(f"{-missing_bytes} bytes after a reply")
        return b"".join(parts)[_LENGTH.size :]

    def _some(self, deadline: float) -> bytes:
        """The bytes that come next. Looks LOOKS times before it sleeps, and yields the core (and
        Python's lock) between looks, so that it does not hold up a node on the same core."""
        give_up = time.monotonic() + LOOKING_S
        for _ in range(LOOKS):
            if (data := self._look()) is not None:
                return data
            os.sched_yield()
            if time.monotonic() > give_up:
                break
        while (data := self._look()) is None:
            self._wait(select.POLLIN, deadline, "did not answer")
        return data

    def _look(self) -> bytes | None:
        try:
            data = self._sock.recv(_RECEIVE_BYTES)
        except BlockingIOError:
            return None
        if not data:
            raise ConnectionResetError("it closed the connection")
        return data

    def _wait(self, event: int, deadline: float, what: str) -> None:
        """Sleep until the socket is ready for `event`, or broken. Raises ClientClosed for a call
        that was given up."""
        poller = select.poll()
        try:
            poller.register(self._sock, event)
        except ValueError as error:  # its descriptor is -1
            raise OSError(errno.EBADF, "this connection was closed") from error
        while not poller.poll(1000 * min(remaining_s(deadline), NOTICE_S)):
            if self.given_up:
                raise ClientClosed(GIVEN_UP)
            if time.monotonic() >= deadline:
                raise DeadlineExceeded(f"the node {what} within the deadline")


def _shut(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def nobody() -> None:
    """The user of a connection that no call has any more."""


def remaining_s(deadline: float) -> float:
    """The time until the deadline; never zero."""
    # Zero would mean "do not block at all": an overdue call looks at least once.
    return max(0.001, deadline - time.monotonic())


def handshake(path: Path, hello: messages.Hello, timeout_s: float = HANDSHAKE_S) -> Greeted:
    """Connect, say hello, and map the region if its descriptor comes back, all within `timeout_s`.

    Raises NodeUnavailable, VersionMismatch, ProtocolError; InvalidInput for a path that is too
    long for a socket; OSError without a descriptor for one.
    """
    check_socket_path(path)
    timeout_s = deadlines.left_s(timeout_s)
    deadline = time.monotonic() + timeout_s
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with given_up_with(partial(_shut, sock)):
            sock.settimeout(remaining_s(deadline))
            sock.connect(str(path))
            _check_owner(sock, path)
            sock.settimeout(remaining_s(deadline))  # each timeout is for one operation
            with contextlib.suppress(BrokenPipeError):  # it has refused already, and says why
                sock.sendall(encode_frame(messages.encoder.encode(hello)))
            sock.settimeout(remaining_s(deadline))
            received = _received(sock)
        return Greeted(sock, *_welcome(path, *received))
    except TiffinError:
        sock.close()
        raise
    except OSError as error:
        sock.close()
        raise NodeUnavailable(
            f"no node answers at {path}: {error}. Start one with: tiffin node --socket {path}"
        ) from error


def _received(sock: socket.socket) -> tuple[bytes, list[int]]:
    """A message and its descriptors, which no child of this process inherits: `socket.recv_fds`
    ignores its flags up to Python 3.13."""
    room = socket.CMSG_LEN(array("i").itemsize)
    data, ancillary, flags, _ = sock.recvmsg(65536, room, socket.MSG_CMSG_CLOEXEC)
    if flags & socket.MSG_CTRUNC and not ancillary:  # the kernel had no number for it
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    descriptors = array("i")
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(content[: len(content) - len(content) % descriptors.itemsize])
    return data, list(descriptors)


def _check_owner(sock: socket.socket, path: Path) -> None:
    """Raise NodeUnavailable unless this user or root listens at the socket: the listener serves
    this client's KV."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(credentials)
    if uid not in (0, os.getuid()):
        raise NodeUnavailable(f"the node at {path} runs as another user (id {uid}); not trusted")


def _welcome(
    path: Path, data: bytes, descriptors: list[int]
) -> tuple[messages.Welcome, Mapping | None]:
    try:
        welcome = _read_welcome(path, data)
        if len(descriptors) != bool(welcome.region_bytes):
            raise ProtocolError(f"{path} did not answer with a welcome and a region")
    except TiffinError:
        for descriptor in descriptors:
            os.close(descriptor)
        raise
    if not descriptors:
        return welcome, None
    try:
        return welcome, Mapping(Region.attach(descriptors[0], welcome.region_bytes))
    except RegionError as error:
        kind = NodeUnavailable if errors.lacks_descriptors(error) else ProtocolError
        raise kind(f"the region of {path} can't be mapped: {error}") from error


def _read_welcome(path: Path, data: bytes) -> messages.Welcome:
    try:
        bodies = FrameDecoder().feed(data)
        reply = messages.reply_decoder.decode(bodies[0]) if bodies else None
    except (FrameError, *messages.NOT_A_MESSAGE) as error:
        raise ProtocolError(f"{path} is not a Tiffin node: {error}") from error
    if reply is None:
        raise NodeUnavailable(f"the node at {path} closed the connection instead of a welcome")
    raise_refusal(reply)
    if not isinstance(reply, messages.Welcome):
        raise ProtocolError(f"{path} did not answer with a welcome and a region")
    messages.check_version(reply.version, f"the node at {path}", "this client")
    return reply
