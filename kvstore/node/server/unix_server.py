"""The unix socket server of a node daemon, in front of `Node.submit`.

One event loop thread handles the protocol. A connection begins with `Hello`; its reply carries the
DRAM region's descriptor, and from then on bulk bytes never pass through the socket. An error on a
connection ends that connection: after a malformed frame the server sends a refusal and closes; when
a frame does not become complete before its timeout, the server closes.

Access control: the socket is 0600 in a 0700 directory, and the server also checks the peer's user
id that the kernel reports. After a connection breaks, the kernel reports through a pidfd when the
client's process is dead; until then extents that it could still write to stay quarantined.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import select
import socket
import struct
import threading
import time
from typing import TYPE_CHECKING, cast

from tiffin.messenger.errors import FrameError
from tiffin.messenger.log_rate_limit import Ration
from tiffin.messenger.wire.framing import FrameDecoder, encode_frame

from ...errors import InvalidInput, NodeUnavailable, ProtocolError, TiffinError, VersionMismatch
from ..core import messages
from .socket_file import SocketFile

if TYPE_CHECKING:
    from pathlib import Path

    from ..core.records import Session
    from ..node import Node

log = logging.getLogger(__name__)
log.addFilter(Ration())

# One process per GPU and a few tools make some dozens; the default limit of descriptors is 1,024,
# and each connection needs two.
CONNECTIONS_MAX = 400
# Of these, for one process: its connections, and those that broke while it held leases. Without
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


class ClientConnection(asyncio.BufferedProtocol):
    """One client's connection."""

    def __init__(self, server: UnixServer) -> None:
        self._server = server
        self._node = server.node
        self._decoder = FrameDecoder()
        self._transport: asyncio.Transport | None = None
        self._session: Session | None = None
        self._pidfd: int | None = None
        self._loop_thread = threading.get_ident()
        self._polite = False
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
            self._pidfd = _pidfd(sock, self.pid)
        except TiffinError as error:
            self._refuse(0, error)
        else:
            self._server.connections.add(self)
            if self._pidfd is not None:
                # A socket can outlive its process, in a child that inherited it.
                self._server.loop.add_reader(self._pidfd, self.hang_up)

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
        if self._session is None:
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
        """End the session, now or when its process is dead."""
        self._server.connections.discard(self)
        if self._session is not None and not self._polite:
            self._polite = self._left_a_goodbye()
        self._transport = None
        session, self._session = self._session, None
        pidfd, self._pidfd = self._pidfd, None
        if pidfd is not None:
            self._server.loop.remove_reader(pidfd)
        if session is None:
            _close(pidfd)
            return
        dead = self._polite or pidfd is None or _exited(pidfd)
        if self._node.disconnect(session, fenced=dead) or pidfd is None:
            _close(pidfd)
        else:
            self._server.fence_at_exit(pidfd, self.pid, session)

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
        if self._session is not None and isinstance(request, messages.Goodbye):
            self._polite = True
        if self._transport is None or self._transport.is_closing():
            return
        if self._session is not None and not isinstance(request, messages.Hello):
            if isinstance(request, messages.Goodbye):
                self._transport.close()
            else:
                self._node.submit(self._session, request, self.reply)
        elif self._session is None and isinstance(request, messages.Hello):
            self._hello(request)
        else:
            self._refuse(request.id, ProtocolError("a connection begins with one hello"))

    def _hello(self, hello: messages.Hello) -> None:
        try:
            messages.check_version(hello.version, "the client", "this node")
        except VersionMismatch as error:
            self._refuse(hello.id, error)
            return
        self._session = self._node.connect(hello.name, hello.pid)
        region = self._node.dram.region
        welcome = messages.Welcome(
            hello.id, messages.PROTOCOL_VERSION, self._node.name, region.nbytes
        )
        assert self._transport is not None
        # Nothing was written yet, so the transport's buffer is empty and the descriptor can be sent
        # directly on the socket with the frame.
        descriptor = os.dup(self._transport.get_extra_info("socket").fileno())
        try:
            with socket.socket(fileno=descriptor) as sock:
                frame = encode_frame(messages.encoder.encode(welcome))
                socket.send_fds(sock, [frame], [region.fd])
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
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(encode_frame(messages.encoder.encode(reply)))

    def _refuse(self, request_id: int, error: TiffinError) -> None:
        """Send a refusal and close the connection."""
        log.warning("refusing a connection: %s", error)
        self._write(messages.refusal(request_id, error))
        if self._transport is not None:
            self._transport.close()

    def hang_up(self) -> None:
        """Abort the connection: the client was too slow, or its process is dead."""
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

    def fence_at_exit(self, pidfd: int, pid: int, session: Session) -> None:
        """Fence a session whose connection broke, which frees its extents, once its process is
        dead."""
        self._awaited[pidfd] = pid, session
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


def _exited(pidfd: int) -> bool:
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(0))


def _close(descriptor: int | None) -> None:
    if descriptor is not None:
        os.close(descriptor)
