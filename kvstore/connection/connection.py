"""One connection to a node's daemon on this host: the handshake, the region that comes with it, and
the leases on that region.

Both clients use it; `node_link.py` waits for replies in threads, `async_node_link.py` in tasks.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from array import array
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from tiffin.messenger.errors import FrameError, RegionError
from tiffin.messenger.shm.region import Region
from tiffin.messenger.signal_safe import Forsaken
from tiffin.messenger.wire.framing import FrameDecoder, encode_frame

from .. import deadlines, errors
from ..errors import DeadlineExceeded, NodeUnavailable, ProtocolError, TiffinError
from ..node.core import messages
from ..text import check_socket_path
from .frame_queues import Inbox, Outbox, remaining_s
from .lease_lifetime import Lending, undo
from .region_mapping import Mapping

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
HANDSHAKE_S = 10.0


class NodeAnswer(NamedTuple):
    """A reply, and the region that its offsets are for (`Mapping.of`); a reconnect maps another."""

    reply: Any
    memory: Bytes


def raise_refusal(reply: messages.AnyReply) -> messages.AnyReply:
    """The reply; if it is a refusal, raises the error that it names."""
    if isinstance(reply, messages.Refused):
        kind = getattr(errors, reply.error, None)
        if not (isinstance(kind, type) and issubclass(kind, TiffinError)):
            kind = ProtocolError
        raise kind(reply.message)
    return reply


class Connection:
    """One connection to a daemon, the region that came with it, and the leases on that region.

    One thread at a time fetches replies. A connection that is dropped without `close` closes itself
    once the last leased memory of the region is gone.
    """

    def __init__(self, path: Path, sock: socket.socket, mapping: Mapping) -> None:
        self.mapping = mapping
        self.sock = sock
        self.broken = False
        self._path = path
        # Deadlines are kept here: a socket with a timeout makes two more system calls per call.
        sock.setblocking(False)
        self._outbox = Outbox(sock)
        self._inbox: Inbox[messages.AnyReply] = Inbox(sock, messages.reply_decoder.decode)
        # Not bound methods: a reference cycle with this object would keep the region mapped until
        # the garbage collector runs.
        self._lending = Lending(partial(_post, self._outbox), partial(_unread, self._inbox))
        Forsaken.when(self, partial(_forsaken, self._outbox, self._lending))

    def send(self, request: messages.Request, deadline: float) -> None:
        """Send a request that has its id. Raises DeadlineExceeded, OSError."""
        self._outbox.send(_frame(request), deadline)

    def offer(self, request: messages.Request) -> bool:
        """Send a request that has its id, if that does not block; whether it was sent. Raises
        OSError."""
        return self._outbox.offer(_frame(request))

    def receive(self, request: messages.Request, deadline: float) -> NodeAnswer:
        """The reply to `request`. Replies to earlier requests, which no caller waits for any more,
        are refused. Raises DeadlineExceeded, OSError, ProtocolError."""
        found: list[NodeAnswer] = []

        def take(reply: messages.AnyReply) -> None:
            if reply.id == request.id:
                found.append(self.lend(reply))
            else:
                self.refuse(reply)

        while True:
            self._inbox.hand_out(take)
            if found:
                return found[-1]
            try:
                self._inbox.receive(deadline)
            except TimeoutError as error:
                raise DeadlineExceeded("the node did not answer within the deadline") from error
            except (FrameError, *messages.NOT_A_MESSAGE) as error:
                raise self._garbage(error) from error

    def hand_out(self, take: Callable[[messages.AnyReply], None]) -> None:
        """Call `take` with each reply that has arrived; once more with one whose `take` was
        interrupted. Raises OSError, ProtocolError."""
        try:
            self._inbox.look()
        except (FrameError, *messages.NOT_A_MESSAGE) as error:
            raise self._garbage(error) from error
        finally:
            self._inbox.hand_out(take)

    def lend(self, reply: messages.AnyReply) -> NodeAnswer:
        """The answer for the caller that waits for this reply: a lease that it grants lasts as long
        as the answer's memory."""
        grants_slots = isinstance(reply, messages.Reserved)
        memory = self.mapping.writable() if grants_slots else self.mapping.memory
        return NodeAnswer(reply, self._lending.lend(memory, reply))

    def refuse(self, reply: messages.AnyReply) -> None:
        """Give back the lease or reservation of a reply that no caller waits for."""
        request = undo(reply)
        if request is not None:
            self.post(request)

    def _garbage(self, error: Exception) -> ProtocolError:
        return ProtocolError(f"the node at {self._path} sent garbage: {error}")

    def gone(self, why: object) -> NodeUnavailable:
        """The error to raise in place of an OSError."""
        return NodeUnavailable(f"lost the node at {self._path}: {why}")

    def hear(self) -> None:
        """Receive the replies that have arrived, and refuse them all. Raises OSError."""
        with contextlib.suppress(ProtocolError):  # the next call raises it
            self.hand_out(self.refuse)

    def ended(self, request: messages.Request) -> None:
        """Note that the node has carried out this request, which may end a lease."""
        self._lending.ended(request)

    def post(self, request: messages.Request) -> None:
        """Send a request that gets no reply."""
        _post(self._outbox, request)
        self.ended(request)

    def hang_up(self, *, polite: bool = False) -> None:
        """Close the socket. `polite`: say goodbye, because no thread of this process touches the
        region any more."""
        self.broken = True
        self._lending.forget()
        self._outbox.close(_goodbye() if polite else b"")

    def close(self, *, polite: bool = True) -> None:
        """Hang up and unmap; views of the region stay valid."""
        self.hang_up(polite=polite)
        self.mapping.close()

    def forget(self) -> None:
        """In a forked child: close the child's descriptor."""
        self.sock.close()


def _frame(request: messages.Request) -> bytes:
    return encode_frame(messages.encoder.encode(request))


def _goodbye() -> bytes:
    return _frame(messages.Goodbye(messages.UNAWAITED))


def _post(outbox: Outbox, request: messages.Request) -> None:
    request.id = messages.UNAWAITED
    outbox.post(_frame(request))


def _unread(inbox: Inbox[messages.AnyReply], lease: int) -> bool:
    """Whether the reply that grants this lease is still in the inbox; it is then lent once more."""
    return any(getattr(reply, "lease", 0) == lease for reply in inbox.waiting)


def _forsaken(outbox: Outbox, lending: Lending) -> None:
    """Close a connection that was dropped without `close`, once its leases have ended. Without a
    goodbye the node would keep later grants until this process is dead."""
    lending.outlive(lambda: outbox.close(_goodbye()))


def connected(path: Path, name: str, timeout_s: float) -> Connection:
    """Connect and shake hands. Raises as `handshake`."""
    sock, _, mapping = handshake(path, name, timeout_s)
    return Connection(path, sock, mapping)


def handshake(
    path: Path, name: str, timeout_s: float = HANDSHAKE_S
) -> tuple[socket.socket, messages.Welcome, Mapping]:
    """Connect, say hello, and map the region whose descriptor comes back, all within `timeout_s`.

    Raises NodeUnavailable, VersionMismatch, ProtocolError; InvalidInput for a path that is too
    long for a socket.
    """
    check_socket_path(path)
    timeout_s = deadlines.left_s(timeout_s)
    deadline = time.monotonic() + timeout_s
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(remaining_s(deadline))
        sock.connect(str(path))
        _check_owner(sock, path)
        hello = messages.Hello(0, messages.PROTOCOL_VERSION, name, os.getpid())
        sock.settimeout(remaining_s(deadline))  # each timeout is for one operation
        with contextlib.suppress(BrokenPipeError):  # the node refused already; its reply says why
            sock.sendall(encode_frame(messages.encoder.encode(hello)))
        sock.settimeout(remaining_s(deadline))
        return sock, *_welcome(path, *_received(sock))
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
    data, ancillary, _, _ = sock.recvmsg(65536, room, socket.MSG_CMSG_CLOEXEC)
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


def _welcome(path: Path, data: bytes, descriptors: list[int]) -> tuple[messages.Welcome, Mapping]:
    try:
        welcome = _read_welcome(path, data)
        if len(descriptors) != 1:
            raise ProtocolError(f"{path} did not answer with a welcome and a region")
    except TiffinError:
        for descriptor in descriptors:
            os.close(descriptor)
        raise
    try:
        return welcome, Mapping(Region.attach(descriptors[0], welcome.region_bytes))
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
    messages.check_version(reply.version, f"the node at {path}", "this client")
    return reply
