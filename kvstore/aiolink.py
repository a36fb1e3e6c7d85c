"""How an asyncio client reaches its node; compare `link.py`.

Calls of one client run side by side on one connection: replies find their callers by request id.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from itertools import count
from typing import TYPE_CHECKING, Protocol, cast

from tiffin.messenger.errors import FrameError
from tiffin.messenger.wire import FrameDecoder, encode_frame

from .errors import (
    ClientClosed,
    DeadlineExceeded,
    NodeUnavailable,
    ProtocolError,
    TiffinError,
)
from .link import (
    GRACE_S,
    HANDSHAKE_S,
    Answer,
    Gate,
    drop,
    handshake,
    open_links,
    raise_refusal,
    undo,
)
from .node import messages

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from tiffin.messenger.region import Region

    from .node.node import Node


class AsyncLink(Protocol):
    """What the asyncio client needs of a connection; compare `link.Link`."""

    gate: Gate

    @property
    def memory(self) -> NDArray[np.uint8]:
        """The node's DRAM region, uint8."""

    async def call(self, request: messages.Request, timeout_s: float) -> Answer:
        """One request, one reply."""

    def post(self, request: messages.Request) -> None:
        """Send without waiting."""

    def close(self) -> None:
        """Say goodbye and let go of the region."""


class _Calls:
    """Requests that wait for their replies, by id."""

    def __init__(self) -> None:
        self._ids = count(1)
        self._waiting: dict[int, asyncio.Future[messages.AnyReply]] = {}

    def number(self, request: messages.Request) -> None:
        request.id = next(self._ids)

    async def wait(
        self,
        request: messages.Request,
        timeout_s: float,
        give_back: Callable[[messages.AnyReply], None],
    ) -> messages.AnyReply:
        """The reply to `request`, which was numbered and is being sent. `give_back` gets a reply
        that its caller does not."""
        future = self._waiting[request.id]
        try:
            async with asyncio.timeout(timeout_s + GRACE_S):
                return raise_refusal(await future)
        except (TimeoutError, asyncio.CancelledError) as error:
            if future.done() and not future.cancelled() and future.exception() is None:
                give_back(future.result())  # it came in the same moment
            if isinstance(error, TimeoutError):
                raise DeadlineExceeded(f"no answer within {timeout_s} s") from error
            raise
        finally:
            self._waiting.pop(request.id, None)

    def expect(self, request: messages.Request) -> None:
        """A reply to `request` will be waited for."""
        self._waiting[request.id] = asyncio.get_running_loop().create_future()

    def arrived(self, reply: messages.AnyReply) -> messages.Request | None:
        """Hand a reply over; if its caller has gone, return the request that undoes it."""
        future = self._waiting.get(reply.id)
        if future is None or future.done():
            return undo(reply)
        future.set_result(reply)
        return None

    def fail(self, error: Exception) -> None:
        """The connection broke: every caller learns it."""
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(error)


class AsyncLocalLink:
    """An asyncio client in the node's own process."""

    def __init__(self, node: Node, name: str, *, owns_node: bool) -> None:
        self._node = node
        self._owns_node = owns_node
        self._loop = asyncio.get_running_loop()
        self._session = node.connect(name, os.getpid())
        self.gate = Gate()
        self._calls = _Calls()
        self._memory: NDArray[np.uint8] | None = node.dram.region.array

    @property
    def memory(self) -> NDArray[np.uint8]:
        """The node's DRAM region, uint8."""
        if self._memory is None:
            raise ClientClosed("this client is closed")
        return self._memory

    async def call(self, request: messages.Request, timeout_s: float) -> Answer:
        """See `Link.call`."""
        if self._memory is None:
            raise ClientClosed("this client is closed")
        self._calls.number(request)
        self._calls.expect(request)
        self._node.submit(self._session, request, self._reply)
        return Answer(await self._calls.wait(request, timeout_s, self._undo), self.memory)

    def post(self, request: messages.Request) -> None:
        """See `Link.post`."""
        if self._memory is not None:
            request.id = messages.UNAWAITED
            self._node.submit(self._session, request, drop)

    def _reply(self, reply: messages.AnyReply) -> None:
        # Called by whichever thread ended the wait; always handed over by way of the loop, because
        # undoing a late grant must not happen inside the node's own call.
        with contextlib.suppress(RuntimeError):  # the loop was closed, and its callers with it
            self._loop.call_soon_threadsafe(self._arrived, reply)

    def _arrived(self, reply: messages.AnyReply) -> None:
        correction = self._calls.arrived(reply)
        if correction is not None:
            self.post(correction)

    def _undo(self, reply: messages.AnyReply) -> None:
        correction = undo(reply)
        if correction is not None:
            self.post(correction)

    def close(self) -> None:
        """End the session; close the node if this link opened it."""
        if self._memory is None:
            return
        self._memory = None
        self._node.disconnect(self._session, fenced=True)
        if self._owns_node:
            self._node.close()


class AsyncSocketLink:
    """An asyncio client of a node daemon on this host; connects again like `SocketLink`."""

    def __init__(self, path: Path, name: str) -> None:
        self._path = path
        self._name = name
        self.gate = Gate()
        self._calls = _Calls()
        self._closed = False
        self._connecting = asyncio.Lock()
        self._connection: _Connection | None = None
        self._region: Region | None = None
        open_links.add(self)

    @property
    def memory(self) -> NDArray[np.uint8]:
        """The node's DRAM region as mapped here, uint8."""
        if self._closed or self._region is None:
            raise ClientClosed("this client is closed")
        return self._region.array

    def populate(self) -> None:
        """See `SocketLink.populate`."""
        if self._region is not None:
            self._region.populate()

    def forget(self) -> None:
        """See `SocketLink.forget`; the loop itself does not survive a fork either."""
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise ClientClosed("this client is closed")

    async def connect(self, timeout_s: float = HANDSHAKE_S) -> _Connection:
        """The live connection, made if there is none: the handshake runs in a worker thread, then
        the loop has the socket."""
        async with self._connecting:
            self._check_open()
            if self._connection is None or self._connection.transport is None:
                sock, _, region = await asyncio.to_thread(
                    handshake, self._path, self._name, timeout_s
                )
                if self._region is not None:
                    self._region.close()  # of the node that went away; views of it stay valid
                self._region = region
                try:
                    self._check_open()  # still
                except ClientClosed:
                    sock.close()
                    region.close()
                    raise
                loop = asyncio.get_running_loop()
                _, self._connection = await loop.create_unix_connection(
                    lambda: _Connection(self._path, self._calls), sock=sock
                )
            return self._connection

    async def call(self, request: messages.Request, timeout_s: float) -> Answer:
        """See `Link.call`."""
        connection = self._connection
        if connection is None or connection.transport is None:
            try:
                async with asyncio.timeout(timeout_s + GRACE_S):  # behind others who connect
                    connection = await self.connect(timeout_s + GRACE_S)
            except TimeoutError as error:
                raise DeadlineExceeded(f"no connection within {timeout_s} s") from error
        self._calls.number(request)
        self._calls.expect(request)
        memory = self.memory  # of this connection, whatever happens while we wait
        connection.send(request)
        return Answer(await self._calls.wait(request, timeout_s, self._undo), memory)

    def post(self, request: messages.Request) -> None:
        """See `Link.post`."""
        if self._connection is not None:
            self._connection.post(request)

    def _undo(self, reply: messages.AnyReply) -> None:
        correction = undo(reply)
        if correction is not None:
            self.post(correction)

    def close(self) -> None:
        """Say goodbye and unmap."""
        if self._closed:
            return
        self.post(messages.Goodbye(0))
        self._closed = True
        if self._connection is not None and self._connection.transport is not None:
            self._connection.transport.close()
        if self._region is not None:
            self._region.close()
        self._calls.fail(ClientClosed("this client was closed"))


class _Connection(asyncio.BufferedProtocol):
    """One socket's life: frames out, replies to their callers."""

    def __init__(self, path: Path, calls: _Calls) -> None:
        self._path = path
        self._calls = calls
        self._decoder = FrameDecoder()
        self.transport: asyncio.WriteTransport | None = None

    def send(self, request: messages.Request) -> None:
        """Write one frame; a connection that broke has released everything already."""
        if self.transport is not None:
            self.transport.write(encode_frame(messages.encoder.encode(request)))

    def post(self, request: messages.Request) -> None:
        """Write one frame that gets no reply."""
        request.id = messages.UNAWAITED
        self.send(request)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The loop has the socket."""
        self.transport = cast("asyncio.WriteTransport", transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the loop should put what it receives."""
        return self._decoder.get_buffer(sizehint)

    def buffer_updated(self, nbytes: int) -> None:
        """Hand complete replies to their callers."""
        try:
            self._decoder.buffer_updated(nbytes)
            replies = [messages.reply_decoder.decode(body) for body in self._decoder.take()]
        except (FrameError, *messages.NOT_A_MESSAGE) as error:
            self._end(ProtocolError(f"the node at {self._path} sent garbage: {error}"))
            return
        for reply in replies:
            correction = self._calls.arrived(reply)
            if correction is not None:
                self.post(correction)

    def connection_lost(self, error: Exception | None) -> None:
        """The node went away."""
        why = error or "it closed the connection"
        self._end(NodeUnavailable(f"lost the node at {self._path}: {why}"))

    def _end(self, error: TiffinError) -> None:
        transport, self.transport = self.transport, None
        if transport is not None:
            transport.close()
            self._calls.fail(error)
