"""How a client reaches its node: a call in the same process, or frames over a unix socket.

A link assigns request ids, carries one request and its reply, and knows the region in which the
node's blocks lie. It decides nothing. When a call ran out of time its reply may still come: if that
late reply grants a lease, the link gives the lease back, so that nothing stays held for nobody.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import select
import socket
import struct
import threading
import time
import weakref
from collections import deque
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from tiffin.messenger import gate
from tiffin.messenger.errors import FrameError, RegionError
from tiffin.messenger.region import Region
from tiffin.messenger.wire import FrameDecoder, encode_frame

from . import errors
from .errors import (
    ClientClosed,
    DeadlineExceeded,
    NodeUnavailable,
    ProtocolError,
    TiffinError,
    VersionMismatch,
)
from .node import messages
from .node.arrival import Arrival

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from .node.node import Node

    Bytes = NDArray[np.uint8]

log = logging.getLogger(__name__)
_CLOSED = "this client is closed (a forked child has to open its own)"

# A node answers parked requests at their deadline; this much later the node itself is late.
GRACE_S = 0.25

# A node answers most calls in 20 to 60 us, and on a virtual machine it takes as long again to wake
# a client that has gone to sleep: looking 50 times, about 2 us each, took a get of 16 blocks from
# 140 to 98 us and a match of 256 from 110 to 75, and cost nothing where both share one core.
LOOKS = 50
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
HANDSHAKE_S = 10.0
GOODBYE_S = 1.0
# Frames of some 20 bytes that wait for a node that takes none (a socket's buffer has room for 278
# before): a client may hold 4,096 leases (`node.LEASES_MAX`), and report as many blocks.
LATE_MAX = 8192
# As good as no end: the connection's ends the wait.
_LATE_S = 86_400.0


class Answer(NamedTuple):
    """A reply, and the region its offsets are for: after a reconnect, another one."""

    reply: Any
    memory: Bytes


class Gate(gate.Gate):
    """Steps that touch the region, in any thread; after `close` they raise ClientClosed.

    A client that said goodbye while one of its threads still copies would write into memory that is
    somebody else's by then.
    """

    def __init__(self) -> None:
        super().__init__(lambda: ClientClosed(_CLOSED))


class Link(Protocol):
    """What the verbs need of a connection."""

    gate: Gate

    @property
    def memory(self) -> Bytes:
        """The node's DRAM region, uint8."""

    def call(self, request: messages.Request, timeout_s: float) -> Answer:
        """One request, one reply. Raises what the node refused with, DeadlineExceeded,
        NodeUnavailable, ClientClosed."""

    def post(self, request: messages.Request) -> None:
        """Send what gets no reply; does not wait for the node."""

    def close(self) -> None:
        """Say goodbye and let go of the region."""


def raise_refusal(reply: messages.AnyReply) -> messages.AnyReply:
    """The reply, unless it is a refusal: then the error it names is raised."""
    if isinstance(reply, messages.Refused):
        kind = getattr(errors, reply.error, None)
        if not (isinstance(kind, type) and issubclass(kind, TiffinError)):
            kind = ProtocolError
        raise kind(reply.message)
    return reply


def check_version(version: int, where: str) -> None:
    """Raise VersionMismatch unless the node at `where` speaks this client's version."""
    if version != messages.PROTOCOL_VERSION:
        raise VersionMismatch(
            f"the node at {where} speaks protocol {version}, this client "
            f"{messages.PROTOCOL_VERSION}; run the same version of tiffin on both sides"
        )


def undo(reply: messages.AnyReply) -> messages.Request | None:
    """The request that gives back what a late reply granted, if it granted anything."""
    if isinstance(reply, messages.Leased) and reply.lease:
        return messages.Release(0, reply.lease)
    if isinstance(reply, messages.Reserved) and reply.lease:
        return messages.Abort(0, reply.lease)
    return None


class LocalLink:
    """A client in the node's own process."""

    def __init__(self, node: Node, name: str, *, owns_node: bool) -> None:
        self._node = node
        self._owns_node = owns_node
        self._session = node.connect(name, os.getpid())
        self.gate = Gate()
        self._ids = count(1)
        self._closed = False
        self._memory: Bytes | None = node.dram.region.array

    @property
    def memory(self) -> Bytes:
        """The node's DRAM region, uint8."""
        if self._memory is None:
            raise ClientClosed("this client is closed")
        return self._memory

    def call(self, request: messages.Request, timeout_s: float) -> Answer:
        """See `Link.call`."""
        if self._closed:
            raise ClientClosed("this client is closed")
        request.id = next(self._ids)
        arrival = Arrival(self._undo)
        self._node.submit(self._session, request, arrival.put)
        reply = arrival.wait(timeout_s + GRACE_S)
        if reply is None:
            raise DeadlineExceeded(f"no answer within {timeout_s} s")
        return Answer(raise_refusal(reply), self.memory)

    def _undo(self, reply: messages.AnyReply) -> None:
        correction = undo(reply)
        if correction is not None:
            # In a thread of its own: this one is inside the node's call.
            threading.Thread(target=self.post, args=(correction,), daemon=True).start()

    def post(self, request: messages.Request) -> None:
        """See `Link.post`."""
        if not self._closed:
            request.id = messages.UNAWAITED
            self._node.submit(self._session, request, drop)

    def close(self) -> None:
        """End the session; close the node if this link opened it."""
        self.gate.close()
        if self._closed:
            return
        self._closed = True
        self._memory = None
        self._node.disconnect(self._session, fenced=True)
        if self._owns_node:
            self._node.close()


def drop(reply: messages.AnyReply) -> None:
    """Nobody waits for this reply."""
    if isinstance(reply, messages.Refused):
        log.debug("unawaited request refused: %s: %s", reply.error, reply.message)


class Outbox:
    """What goes out on one connection that does not block: calls in turn, and posts, which never
    wait for the node.

    What it does not take at once is sent by a thread, as soon as it does. Breaking the connection
    instead would lose the posts: the leases that they end would be held until this process is dead.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._turn = threading.Lock()  # of who sends: frames go out whole
        self._posting = threading.Lock()
        self._late: deque[bytes] | None = None  # while a thread sends them
        self._thread: threading.Thread | None = None

    def send(self, frame: bytes, deadline: float) -> None:
        """Send a frame behind the posts. Raises DeadlineExceeded if its turn did not come,
        TimeoutError when a part may be out, and what the socket raises."""
        if not self._turn.acquire(timeout=_remaining_s(deadline)):
            raise DeadlineExceeded("the node took no request within the deadline")
        try:
            _send_all(self._sock, frame, deadline)
        finally:
            self._turn.release()

    def post(self, frame: bytes) -> None:
        """Send a frame, now or later; GRACE_S at most passes, behind another thread's call. With
        LATE_MAX waiting the connection ends; on one that broke nothing happens."""
        with self._posting:
            if self._late is None:
                self._post_first(frame)
            elif len(self._late) < LATE_MAX:
                self._late.append(frame)
            else:
                log.warning("the node took none of %d frames; hanging up", LATE_MAX)
                self._cut()

    def _post_first(self, frame: bytes) -> None:
        sends, sent = self._turn.acquire(timeout=GRACE_S), 0
        try:
            if sends:
                with contextlib.suppress(BlockingIOError):
                    sent = self._sock.send(frame)
            if sent < len(frame):
                self._start([frame[sent:]], sends)
                sends = False  # the thread's turn now: a part may be out
        except (OSError, RuntimeError) as error:  # broken, or no thread can be started
            log.debug("a post was lost with its connection: %s", error)
            self._late = None
            self._cut()
        finally:
            if sends:
                self._turn.release()

    def _start(self, frames: list[bytes], sends: bool) -> None:
        thread = threading.Thread(
            target=self._send_late, args=(sends,), name="tiffin-late-posts", daemon=True
        )
        self._late = deque(frames)
        thread.start()
        self._thread = thread

    def _send_late(self, sends: bool) -> None:
        if not sends:
            self._turn.acquire()  # from a call, which has a deadline
        try:
            while (frame := self._next_late()) is not None:
                _send_all(self._sock, frame, time.monotonic() + _LATE_S)
        except OSError as error:
            log.debug("posts were lost with their connection: %s", error)
            self._cut()
            with self._posting:
                self._late = None
        finally:
            self._turn.release()

    def _next_late(self) -> bytes | None:
        with self._posting:
            if self._late:
                return self._late.popleft()
            self._late = None
            return None

    def close(self, goodbye: bytes = b"") -> None:
        """Close the socket, after a `goodbye` if it can be sent within GOODBYE_S."""
        deadline = time.monotonic() + GOODBYE_S
        try:
            if goodbye:
                self.send(goodbye, deadline)
        except (OSError, DeadlineExceeded) as error:
            log.debug("no goodbye: %s", error)
        with self._posting:
            self._cut()  # wakes the thread, and no other is started
        if self._thread is not None:
            self._thread.join()
        self._sock.close()

    def _cut(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)


class SocketLink:
    """A client of a node daemon on this host, over its unix socket. Calls from several threads take
    turns; open one client per thread to let them wait side by side.

    When the node goes away, the call that notices raises NodeUnavailable, and the next one connects
    again: a node that was restarted is found without doing anything. Leases do not survive.
    """

    def __init__(self, path: Path, name: str) -> None:
        self._path = path
        self._name = name
        self.gate = Gate()
        self._ids = count(1)
        self._lock = threading.Lock()
        self._closed = False
        self._socket: socket.socket | None = None
        self._outbox: Outbox | None = None
        self._region: Region | None = None
        self._memory: Bytes | None = None
        self._connect(HANDSHAKE_S)
        open_links.add(self)

    def _connect(self, timeout_s: float) -> None:
        sock, _, region = handshake(self._path, self._name, timeout_s)
        # Deadlines are kept by `_wait`: a socket with a timeout asks the kernel twice more a call.
        sock.setblocking(False)
        if self._region is not None:
            self._region.close()  # of the node that went away; views of it stay valid
        self._decoder = FrameDecoder()
        self._ready: list[messages.AnyReply] = []
        self._socket, self._region, self._memory = sock, region, region.array
        self._outbox = Outbox(sock)

    @property
    def memory(self) -> Bytes:
        """The node's DRAM region as mapped here, uint8."""
        if self._memory is None:
            raise ClientClosed(_CLOSED)
        return self._memory

    def populate(self) -> None:
        """Fill this process's page tables for the whole region: about 0.2 s per GiB, once, instead
        of a page fault at each first touch of 4 KiB."""
        if self._region is not None:
            self._region.populate()

    def call(self, request: messages.Request, timeout_s: float) -> Answer:
        """See `Link.call`."""
        deadline = time.monotonic() + timeout_s + GRACE_S
        if not self._lock.acquire(timeout=timeout_s + GRACE_S):
            raise DeadlineExceeded("calls of other threads took all the time; open one client each")
        try:
            if self._socket is None and not self._closed:
                self._connect(_remaining_s(deadline))
            reply = raise_refusal(self._receive(self._send(request, deadline), deadline))
            return Answer(reply, self.memory)
        finally:
            self._lock.release()

    def post(self, request: messages.Request) -> None:
        """See `Link.post`. Takes no turn: a thread may give back the very room that another waits
        for. A connection that broke has nothing left to give back."""
        request.id = messages.UNAWAITED
        outbox = self._outbox
        if outbox is not None:
            outbox.post(encode_frame(messages.encoder.encode(request)))

    def close(self) -> None:
        """Say goodbye and unmap."""
        self.gate.close()
        with self._lock:
            if self._closed:
                return
            self._closed = True
            outbox, self._outbox, self._socket, self._memory = self._outbox, None, None, None
            if self._region is not None:
                self._region.close()
            if outbox is not None:
                outbox.close(
                    encode_frame(messages.encoder.encode(messages.Goodbye(messages.UNAWAITED)))
                )

    def forget(self) -> None:
        """In a forked child: the connection and the region are the parent's. The region is not even
        mapped here (see `Region`), so touching it would end the process."""
        self._lock, self.gate = threading.Lock(), Gate()
        self._closed = True
        self._memory = self._outbox = None
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _send(self, request: messages.Request, deadline: float) -> int:
        request.id = next(self._ids)
        outbox = self._outbox
        if outbox is None:
            raise ClientClosed(_CLOSED)
        frame = encode_frame(messages.encoder.encode(request))
        try:
            outbox.send(frame, deadline)
        except OSError as error:
            raise self._broken(error) from error
        return request.id

    def _receive(self, wanted: int, deadline: float) -> messages.AnyReply:
        while True:
            while self._ready:
                reply = self._ready.pop(0)
                if reply.id == wanted:
                    return reply
                self._discard(reply)
            self._fill(deadline)

    def _discard(self, reply: messages.AnyReply) -> None:
        """A reply that nobody waits for any more."""
        correction = undo(reply)
        if correction is not None:
            self.post(correction)

    def _fill(self, deadline: float) -> None:
        sock = self._live()
        try:
            received = _receive(sock, self._decoder.get_buffer(), deadline)
        except TimeoutError as error:
            raise DeadlineExceeded("the node did not answer within the deadline") from error
        except OSError as error:
            raise self._broken(error) from error
        if received == 0:
            raise self._broken("it closed the connection")
        try:
            self._decoder.buffer_updated(received)
            self._ready.extend(messages.reply_decoder.decode(b) for b in self._decoder.take())
        except (FrameError, *messages.NOT_A_MESSAGE) as error:
            self._broken(error)
            raise ProtocolError(f"the node at {self._path} sent garbage: {error}") from error

    def _live(self) -> socket.socket:
        if self._socket is None:
            raise ClientClosed(_CLOSED)
        return self._socket

    def _broken(self, why: object) -> NodeUnavailable:
        outbox, self._outbox, self._socket = self._outbox, None, None
        if outbox is not None:
            outbox.close()
        return NodeUnavailable(f"lost the node at {self._path}: {why}")


open_links: weakref.WeakSet[Any] = weakref.WeakSet()  # both clients', for `_forget_all`


def _forget_all() -> None:
    for link in list(open_links):
        link.forget()


os.register_at_fork(after_in_child=_forget_all)


def handshake(
    path: Path, name: str, timeout_s: float = HANDSHAKE_S
) -> tuple[socket.socket, messages.Welcome, Region]:
    """Connect, say hello, and map the region whose descriptor comes back.

    Raises NodeUnavailable, VersionMismatch, ProtocolError.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(timeout_s)
        sock.connect(str(path))
        _check_owner(sock, path)
        hello = messages.Hello(0, messages.PROTOCOL_VERSION, name, os.getpid())
        with contextlib.suppress(BrokenPipeError):  # it refused us already, and says why
            sock.sendall(encode_frame(messages.encoder.encode(hello)))
        data, descriptors, _, _ = socket.recv_fds(sock, 65536, 1, socket.MSG_CMSG_CLOEXEC)
        return sock, *_welcome(path, data, descriptors)
    except TiffinError:
        sock.close()
        raise
    except OSError as error:
        sock.close()
        raise NodeUnavailable(
            f"no node answers at {path}: {error}. Start one with: tiffin node --socket {path}"
        ) from error


def _check_owner(sock: socket.socket, path: Path) -> None:
    """Whoever listens there serves our KV: it has to be this user, or root."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(credentials)
    if uid not in (0, os.getuid()):
        raise NodeUnavailable(f"the node at {path} runs as another user (id {uid}); not trusted")


def _welcome(path: Path, data: bytes, descriptors: list[int]) -> tuple[messages.Welcome, Region]:
    try:
        welcome = _read_welcome(path, data)
        if len(descriptors) != 1:
            raise ProtocolError(f"{path} did not answer with a welcome and a region")
    except TiffinError:
        for descriptor in descriptors:
            os.close(descriptor)
        raise
    try:
        return welcome, Region.attach(descriptors[0], welcome.region_bytes)  # takes it over
    except RegionError as error:
        raise ProtocolError(f"the region of {path} can't be mapped: {error}") from error


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
    check_version(reply.version, str(path))
    return reply


def _receive(sock: socket.socket, buffer: memoryview, deadline: float) -> int:
    """Receive from a socket that does not block: look LOOKS times, then sleep until bytes come.

    Yields the core (and Python's lock) between looks, so a node that shares it is not held up.
    Raises TimeoutError at the deadline, and what the socket raises.
    """
    for _ in range(LOOKS):
        try:
            return sock.recv_into(buffer)
        except BlockingIOError:
            os.sched_yield()
    while True:
        _wait(sock, select.POLLIN, deadline)
        with contextlib.suppress(BlockingIOError):
            return sock.recv_into(buffer)


def _send_all(sock: socket.socket, frame: bytes, deadline: float) -> None:
    """Send all of `frame` on a socket that does not block; nearly always it takes it at once.

    Raises TimeoutError at the deadline, when a part may be out, and what the socket raises.
    """
    sent = 0
    while True:
        with contextlib.suppress(BlockingIOError):
            sent += sock.send(memoryview(frame)[sent:] if sent else frame)
        if sent == len(frame):
            return
        _wait(sock, select.POLLOUT, deadline)


def _wait(sock: socket.socket, event: int, deadline: float) -> None:
    """Sleep until the socket is ready for `event`, or broken; raises TimeoutError, OSError."""
    poller = select.poll()
    try:
        poller.register(sock, event)
    except ValueError as error:  # its descriptor is -1
        raise OSError(errno.EBADF, "this connection was closed") from error
    if not poller.poll(1000 * _remaining_s(deadline)):
        raise TimeoutError("the socket was not ready within the deadline")


def _remaining_s(deadline: float) -> float:
    # Zero would mean "do not block at all": let an overdue call look at least once.
    return max(0.001, deadline - time.monotonic())
