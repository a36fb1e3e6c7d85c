"""The unix socket server of a node daemon, in front of `Node.submit`.

One event loop thread handles the protocol. A connection begins with `Hello`; the reply to a
session's first one carries the DRAM region's descriptor, and bulk bytes never pass through the
socket. A client is a session of several connections, one for each call that it makes at a time, and
its leases are the session's. A call that a client gave up, whatever it had come to, is over when
the client says so on another connection (`Settle`): the connection is closed, and what was granted
over it ends, but for the leases that the client knows.

An error on a connection ends that connection: after a malformed frame the server sends a refusal
and closes; when a frame does not become complete before its timeout, the server closes.

Access control: the socket is 0600 in a 0700 directory, and the server also checks the peer's user
id that the kernel reports. After a session's last connection breaks, the kernel reports through a
pidfd when the client's process is dead; until then extents that it could still write to stay
quarantined.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import secrets
import select
import socket
import struct
import threading
import time
from typing import TYPE_CHECKING, cast

from tiffin.messenger.errors import FrameError
from tiffin.messenger.log_rate_limit import Ration
from tiffin.messenger.wire.framing import FrameDecoder, encode_frame

from ...errors import InvalidInput, NodeUnavailable, ProtocolError, TiffinError
from ..core import messages
from ..node import LEASES_MAX
from .socket_file import SocketFile

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from ..core.records import Session
    from ..node import Node

log = logging.getLogger(__name__)
log.addFilter(Ration())

# One process per GPU and a few tools make some dozens; the default limit of descriptors is 1,024,
# and a session needs one besides its connections.
CONNECTIONS_MAX = 400
# Of these, for one process: its connections, and sessions that broke while it held leases. Without
# this limit, one process that breaks connections could use up those of all clients.
PROCESS_CONNECTIONS_MAX = 100
# A frame of 1 MiB takes a millisecond on a unix socket; a client that needs this long is broken or
# hostile.
FRAME_TIMEOUT_S = 10.0
_SWEEP_S = 2.0
# `NOT_A_MESSAGE` includes two errors that msgspec does not wrap: for text that is not UTF-8, and
# for arrays nested too deeply.
_NOT_A_REQUEST = (FrameError, *messages.NOT_A_MESSAGE)
# Enough reads to drain a socket's buffers; bounded, so that a client that keeps sending does not
# block the event loop.
_LAST_READS = 16
_NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
_SO_PEERPIDFD = 77  # Linux 6.5; not in Python's socket module


class ClientSession:
    """One client's session at this server, and its open connections by number."""

    def __init__(self, server: UnixServer, name: bytes, session: Session, pid: int) -> None:
        self.name = name
        self.began = secrets.token_bytes(16)  # `Welcome.session`
        self.session = session
        self.pid = pid
        self.pidfd: int | None = None
        self.polite = False  # the client said goodbye
        self.connections: dict[int, ClientConnection] = {}
        self._node = server.node
        # Leases that were granted over each connection; some may have ended.
        self._granted: dict[int, set[int]] = {}

    def granted(self, number: int, lease: int) -> None:
        """Note that a lease was granted over this connection."""
        granted = self._granted.setdefault(number, set())
        granted.add(lease)
        if len(granted) > 2 * LEASES_MAX:
            granted &= self._held(granted)

    def _held(self, leases: Iterable[int]) -> set[int]:
        return {lease for lease in leases if lease in self.session.leases}

    def leave(self, number: int) -> bool:
        """A connection has ended; what was granted over it goes on, until it is settled. Whether it
        was the last one."""
        was_here = self.connections.pop(number, None) is not None
        if still := self._held(self._granted.pop(number, ())):
            self._granted[number] = still
        return was_here and not self.connections

    def settle(self, request: messages.Settle, number: int) -> int:
        """Carry out the request, which came over connection `number`; returns how many leases have
        ended. What waits on a connection that has broken before ends at its own deadline."""
        doubtful: set[int] = set()
        lost = [one for one in request.connections if one != number]
        for one in lost:
            doubtful |= self._granted.pop(one, set())
        gone = [self.connections.pop(one) for one in lost if one in self.connections]
        self._node.withdraw(self.session, [one.reply for one in gone])
        for connection in gone:
            connection.hang_up()
        ended = self._held(doubtful.difference(request.live))
        self._node.give_back(self.session, ended)
        return len(ended)

    def hang_up(self) -> None:
        """Abort all connections: the client's process is dead."""
        for connection in list(self.connections.values()):
            connection.hang_up()

    def close(self) -> None:
        """Close all connections, after a goodbye."""
        self.polite = True
        for connection in list(self.connections.values()):
            connection.close()


class ClientConnection(asyncio.BufferedProtocol):
    """One connection of a client."""

    def __init__(self, server: UnixServer) -> None:
        self._server = server
        self._node = server.node
        self._decoder = FrameDecoder()
        self._transport: asyncio.Transport | None = None
        self._client: ClientSession | None = None
        self._number = 0
        self._loop_thread = threading.get_ident()
        self.pid = 0
        # Since when an incomplete frame waits for its rest, or the connection for its hello.
        self.waiting_since: float | None = time.monotonic()

    # -- asyncio.BufferedProtocol ------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Accept if there is room and the peer is the same user (or root)."""
        # uvloop's transports do everything that asyncio.Transport does, but do not derive from it.
        self._transport = cast("asyncio.Transport", transport)
        sock = transport.get_extra_info("socket")
        self.pid, uid = _peer(sock)
        try:
            self._server.check_room(self.pid)
            if uid not in (0, os.getuid()):
                raise InvalidInput(f"user {uid} may not use a node of user {os.getuid()}")
        except TiffinError as error:
            self._refuse(0, error)
        else:
            self._server.connections.add(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        """The buffer into which the loop receives."""
        return self._decoder.get_buffer(sizehint)

    def buffer_updated(self, nbytes: int) -> None:
        """Carry out every complete request."""
        try:
            self._decoder.buffer_updated(nbytes)
            bodies = self._decoder.take()
            for body in bodies:
                self._request(messages.request_decoder.decode(body))
        except _NOT_A_REQUEST as error:
            self._refuse(0, ProtocolError(f"not a request: {error}"))
            return
        if self._client is None:
            return
        if not self._decoder.pending_bytes:
            self.waiting_since = None
        elif bodies or self.waiting_since is None:
            # More bytes of the same frame do not restart its timeout.
            self.waiting_since = time.monotonic()

    def pause_writing(self) -> None:
        """Backpressure: the client does not read its replies, so stop reading its requests."""
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        """End the backpressure: the client reads its replies again."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        """Leave the session."""
        self._server.connections.discard(self)
        client = self._client
        if client is not None:
            client.polite = client.polite or self._left_a_goodbye()
            if client.leave(self._number):
                self._server.ended(client)
        self._transport = None

    def _left_a_goodbye(self) -> bool:
        """Whether the unread requests include a goodbye. If a client closes while a reply to it is
        in flight, the reply breaks the connection before the server has read the last request."""
        assert self._transport is not None
        with (
            contextlib.suppress(OSError, *_NOT_A_REQUEST),
            socket.socket(fileno=os.dup(self._transport.get_extra_info("socket").fileno())) as sock,
        ):
            sock.setblocking(False)
            for _ in range(_LAST_READS):
                self._decoder.buffer_updated(sock.recv_into(self._decoder.get_buffer()))
                for body in self._decoder.take():
                    if isinstance(messages.request_decoder.decode(body), messages.Goodbye):
                        return True
        return False

    # -- requests ----------------------------------------------------------------------------------

    def _request(self, request: messages.Request) -> None:
        client = self._client
        if client is not None and isinstance(request, messages.Goodbye):
            client.polite = True
        if self._transport is None or self._transport.is_closing():
            return
        if client is None and isinstance(request, messages.Hello):
            self._hello(request)
        elif client is None or isinstance(request, messages.Hello):
            self._refuse(request.id, ProtocolError("a connection begins with one hello"))
        elif isinstance(request, messages.Goodbye):
            client.close()
        elif isinstance(request, messages.Settle):
            self.reply(messages.Done(request.id, client.settle(request, self._number)))
        else:
            self._node.submit(client.session, request, self.reply)

    def _hello(self, hello: messages.Hello) -> None:
        assert self._transport is not None
        sock = self._transport.get_extra_info("socket")
        try:
            messages.check_version(hello.version, "the client", "this node")
            client, is_new = self._server.join(self, hello, sock)
        except TiffinError as error:
            self._refuse(hello.id, error)
            return
        self._client, self._number = client, hello.connection
        region, version = self._node.dram.region, messages.PROTOCOL_VERSION
        region_bytes = region.nbytes if is_new else 0
        welcome = messages.Welcome(
            hello.id, version, self._node.name, region_bytes, session=client.began
        )
        if not is_new:
            self._write(welcome)
            return
        # Nothing was written yet, so the transport's buffer is empty and the descriptor can be sent
        # directly on the socket with the frame.
        try:
            with socket.socket(fileno=os.dup(sock.fileno())) as direct:
                frame = encode_frame(messages.encoder.encode(welcome))
                socket.send_fds(direct, [frame], [region.fd])
        except OSError as error:
            log.warning("a client left during its hello: %s", error)
            self._transport.abort()

    def reply(self, reply: messages.AnyReply) -> None:
        """Send a reply, unless its request has the id UNAWAITED. Thread-safe."""
        if reply.id == messages.UNAWAITED:
            if isinstance(reply, messages.Refused):
                log.debug("unawaited request refused: %s: %s", reply.error, reply.message)
        elif threading.get_ident() == self._loop_thread:
            self._write(reply)
        else:
            self._server.loop.call_soon_threadsafe(self._write, reply)

    def _write(self, reply: messages.AnyReply) -> None:
        client, lease = self._client, getattr(reply, "lease", 0)
        if self._transport is not None and not self._transport.is_closing():
            if client is not None and lease:
                client.granted(self._number, lease)
            self._transport.write(encode_frame(messages.encoder.encode(reply)))
        elif client is not None and lease:
            # Later: the node may be in the middle of the request.
            self._server.loop.call_soon(self._node.give_back, client.session, (lease,))

    def _refuse(self, request_id: int, error: TiffinError) -> None:
        """Send a refusal and close the connection."""
        log.warning("refusing a connection: %s", error)
        self._write(messages.refusal(request_id, error))
        if self._transport is not None:
            self._transport.close()

    def close(self) -> None:
        """Close the connection when its replies are sent."""
        if self._transport is not None:
            self._transport.close()

    def hang_up(self) -> None:
        """Abort the connection: the client was too slow or gave it up, or its process is dead."""
        if self._transport is not None:
            self._transport.abort()


class UnixServer:
    """Listens on `path` for one node. `async with` it; raises as `SocketFile.listen`.

    A socket whose file was removed, as cleaners of temporary folders do, is made again; while that
    fails, `socket.healthy` in the node's statistics is false.
    """

    def __init__(self, node: Node, path: Path) -> None:
        self.node = node
        self._file = SocketFile(path)
        self.connections: set[ClientConnection] = set()
        self._clients: dict[bytes, ClientSession] = {}
        self.loop = asyncio.get_running_loop()
        self._listener: asyncio.AbstractServer | None = None
        self._sweeper: asyncio.TimerHandle | None = None
        self._relisten: asyncio.Task[None] | None = None
        self._awaited: dict[int, tuple[int, Session]] = {}  # by pidfd

    async def __aenter__(self) -> UnixServer:
        await self._listen()
        self.node.extra_numbers["socket"] = lambda: {
            "path": str(self._file.path),
            "healthy": self._file.is_there(),
        }
        self._sweep()
        return self

    async def _listen(self) -> None:
        sock = self._file.listen()
        if self._listener is not None:
            self._listener.close()  # connections that it has accepted go on
        self._listener = await self.loop.create_unix_server(
            lambda: ClientConnection(self), sock=sock
        )

    async def __aexit__(self, *_: object) -> None:
        if self._sweeper is not None:
            self._sweeper.cancel()
        if self._relisten is not None:
            self._relisten.cancel()
        if self._listener is not None:
            self._listener.close()
        for connection in list(self.connections):
            connection.hang_up()
        await asyncio.sleep(0)
        for pidfd in list(self._awaited):
            self._exited(pidfd)
        self._file.remove()

    def check_room(self, pid: int) -> None:
        """Raises NodeUnavailable for too many connections, in total or of this process."""
        pids = [connection.pid for connection in self.connections]
        pids += [awaited for awaited, _ in self._awaited.values()]
        if len(pids) >= CONNECTIONS_MAX:
            raise NodeUnavailable(f"this node has {CONNECTIONS_MAX} clients already")
        if pids.count(pid) >= PROCESS_CONNECTIONS_MAX:
            raise NodeUnavailable(
                f"process {pid} has {PROCESS_CONNECTIONS_MAX} connections, or broke as many while "
                "it held leases; close clients, or restart it"
            )

    def join(
        self, connection: ClientConnection, hello: messages.Hello, sock: socket.socket
    ) -> tuple[ClientSession, bool]:
        """The session of a connection's hello, and whether it is new. Raises NodeUnavailable,
        InvalidInput, ProtocolError."""
        name = hello.session or secrets.token_bytes(16)
        client = self._clients.get(name)
        is_new = client is None
        if client is None:
            pidfd = _pidfd(sock, connection.pid)
            session = self.node.connect(hello.name, hello.pid)
            client = self._clients[name] = ClientSession(self, name, session, connection.pid)
            client.pidfd = pidfd
            if pidfd is not None:
                # A socket can outlive its process, in a child that inherited it.
                self.loop.add_reader(pidfd, client.hang_up)
        elif client.pid != connection.pid:
            raise InvalidInput("this session is another process's: open a client of your own")
        elif len(client.connections) >= messages.CONNECTIONS_MAX:
            raise NodeUnavailable(f"a client has at most {messages.CONNECTIONS_MAX} connections")
        elif hello.connection in client.connections:
            raise ProtocolError(f"this session has a connection {hello.connection} already")
        client.connections[hello.connection] = connection
        return client, is_new

    def ended(self, client: ClientSession) -> None:
        """End a session whose last connection has ended, now or when its process is dead."""
        del self._clients[client.name]
        pidfd, session = client.pidfd, client.session
        if pidfd is None:
            self.node.disconnect(session, fenced=True)
            return
        self.loop.remove_reader(pidfd)
        if self.node.disconnect(session, fenced=client.polite or _has_exited(pidfd)):
            os.close(pidfd)
        else:
            self._awaited[pidfd] = client.pid, session
            self.loop.add_reader(pidfd, self._exited, pidfd)

    def _exited(self, pidfd: int) -> None:
        _, session = self._awaited.pop(pidfd)
        self.loop.remove_reader(pidfd)
        os.close(pidfd)
        self.node.fence(session)

    def _sweep(self) -> None:
        oldest = time.monotonic() - FRAME_TIMEOUT_S
        for connection in list(self.connections):
            if connection.waiting_since is not None and connection.waiting_since < oldest:
                log.warning("hanging up on a client that took too long over one frame")
                connection.hang_up()
        if not self._file.is_there() and (self._relisten is None or self._relisten.done()):
            self._relisten = self.loop.create_task(self._listen_again())
        self._sweeper = self.loop.call_later(_SWEEP_S, self._sweep)

    async def _listen_again(self) -> None:
        """After somebody removed the socket's file, or another node took its place."""
        path = self._file.path
        try:
            await self._listen()
        except TiffinError as error:
            log.error("clients no longer find this node at %s: %s", path, error)
        else:
            log.warning("the socket %s was removed; this node listens there again", path)


def _peer(sock: socket.socket) -> tuple[int, int]:
    """The ids of the connecting process and its user, as the kernel reports them."""
    pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, uid


def _pidfd(sock: socket.socket, pid: int) -> int | None:
    """A descriptor that becomes readable when the peer's process ends; None on systems without it.

    Raises NodeUnavailable when this node has no descriptors left: without a pidfd the node would
    take the client for dead when its connection ends.
    """
    try:
        try:
            return int(sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD))
        except OSError as error:
            if error.errno in _NO_DESCRIPTORS:
                raise
        return os.pidfd_open(pid)
    except OSError as error:
        if error.errno in _NO_DESCRIPTORS:
            raise NodeUnavailable(f"this node takes no more clients: {error}") from error
    log.warning("no pidfd for process %d: what it holds is freed when its connection ends", pid)
    return None


def _has_exited(pidfd: int) -> bool:
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(0))
