"""How an asyncio client reaches its node; compare `node_link.py`.

Calls of one client run concurrently on one connection: a reply is matched to its caller by request
id. As there, an exception of a signal handler may come between any two steps; it may also end the
loop's run, whose tasks are then cancelled, or never wake again. So replies wait in an inbox until
their callers have them (`frame_queues.py`, `loop_threads.py`); a reply whose caller is gone is
dropped, and the lease that it granted goes back (`lease_lifetime.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Protocol, TypeVar

from tiffin.messenger.signal_safe import later

from .. import deadlines
from ..deadlines import GRACE_S
from ..errors import ClientClosed, DeadlineExceeded, ProtocolError, TiffinError
from .connection import HANDSHAKE_S, NodeAnswer, connected, raise_refusal
from .frame_queues import remaining_s
from .loop_threads import Mailbox, ThreadCall, abandonable, in_thread, settle
from .node_link import CLOSE_S, CLOSED, CallGate, LocalSession, open_links

if TYPE_CHECKING:
    from pathlib import Path

    from ..node.core import messages
    from .connection import Connection
    from .region_mapping import Mapping


T = TypeVar("T")


class AsyncLink(Protocol):
    """The interface of a connection that the asyncio client needs; compare `node_link.NodeLink`."""

    gate: CallGate

    @property
    def mapping(self) -> Mapping:
        """See `NodeLink.mapping`."""

    async def call(self, request: messages.Request, timeout_s: float) -> NodeAnswer:
        """Send one request and wait for its reply."""

    def post(self, request: messages.Request) -> None:
        """Send a request that gets no reply; does not wait for the node."""

    async def close(self) -> None:
        """Say goodbye to the node and unmap the region."""


async def _until(end: float, future: asyncio.Future[T]) -> T:
    """Wait for the future's result until `end`, a `time.monotonic()`. Raises DeadlineExceeded."""
    try:
        async with asyncio.timeout(end - time.monotonic()):
            return await future
    except TimeoutError as error:
        raise DeadlineExceeded("the node did not answer within the deadline") from error


class AsyncLocalLink(LocalSession):
    """An asyncio client in the node's own process."""

    async def call(self, request: messages.Request, timeout_s: float) -> NodeAnswer:
        """See `NodeLink.call`."""
        end = time.monotonic() + deadlines.left_s(timeout_s + GRACE_S)
        future: asyncio.Future[NodeAnswer] = asyncio.get_running_loop().create_future()
        self.hand_in(request, partial(Mailbox.of_running_loop().put, future))
        return self.answered(request, await _until(end, future))

    async def close(self) -> None:
        """See `LocalLink.close`."""
        await in_thread(self.end)


class _Calls:
    """The calls in flight on one connection, whose replies a reader of the loop fetches."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        # The error of a lost connection: no more replies come.
        self.lost: TiffinError | None = None
        self.loop = asyncio.get_running_loop()
        self._waiting: dict[int, asyncio.Future[NodeAnswer | None]] = {}
        self._descriptor = connection.sock.fileno()
        # An `add_reader` that was interrupted may be half done, and would not add it again.
        self.loop.remove_reader(self._descriptor)
        self.loop.add_reader(self._descriptor, self._fetch)

    async def answer(self, request: messages.Request, end: float) -> NodeAnswer:
        """The reply to `request`, which has its id. Raises DeadlineExceeded, NodeUnavailable,
        ProtocolError, ClientClosed."""
        future: asyncio.Future[NodeAnswer | None] = self.loop.create_future()
        try:
            self._waiting[request.id] = future
            await self._send(request, end)
            answer = await _until(end, future)
        finally:
            self._waiting.pop(request.id, None)
        if answer is None:
            raise self.why()
        return answer

    async def _send(self, request: messages.Request, end: float) -> None:
        try:
            if self.lost is None and not self.connection.offer(request):
                # The socket is full, and other calls of this client may be waiting for it too.
                await abandonable(partial(self.connection.send, request, end))
        except OSError as error:
            if self.lost is None:
                self._break(error)
        if self.lost is not None:
            raise self.why()

    def why(self) -> TiffinError:
        """A new copy of the error `lost` for each caller."""
        assert self.lost is not None
        return type(self.lost)(*self.lost.args)

    def _fetch(self) -> None:
        try:
            self.connection.hand_out(self._arrived)
        except (OSError, ProtocolError) as error:
            self._break(error)
        except BaseException:
            later(self._fetch_soon)  # the socket does not signal again what was received already
            raise

    def _fetch_soon(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed
            self.loop.call_soon_threadsafe(self._fetch)

    def _arrived(self, reply: messages.AnyReply) -> None:
        future = self._waiting.get(reply.id)
        if future is None or future.cancelled():
            self.connection.refuse(reply)
        elif not future.done():  # else this reply comes again, after an interrupted `hand_out`
            future.set_result(self.connection.lend(reply))

    def _break(self, error: OSError | ProtocolError) -> None:
        # If this is interrupted, the loop calls `_fetch` for the connection again, and this starts
        # over.
        self.connection.broken = True
        self.end(error if isinstance(error, ProtocolError) else self.connection.gone(error))
        later(self.connection.hang_up)

    def end(self, lost: TiffinError) -> None:
        """Stop fetching replies, and fail the calls in flight with the error `lost`."""
        self.lost = lost
        if self.loop.is_closed():
            return
        for future in list(self._waiting.values()):
            settle(future, None)
        self.loop.remove_reader(self._descriptor)


class AsyncSocketLink:
    """An asyncio client's link to a node daemon on this host; reconnects like `SocketLink`."""

    def __init__(self, path: Path, name: str) -> None:
        self._path = path
        self._name = name
        self.gate = CallGate()
        self._ids = count(1)
        self._closed = False
        self._changing = threading.Lock()  # guards changes of `_connection` in any thread
        self._connection: Connection | None = None
        self._calls: _Calls | None = None
        self._connecting: ThreadCall[None] | None = None
        open_links.add(self)

    @property
    def mapping(self) -> Mapping:
        """See `NodeLink.mapping`."""
        connection = self._connection
        if self._closed or connection is None:
            raise ClientClosed(CLOSED)
        return connection.mapping

    def forget(self) -> None:
        """See `SocketLink.forget`; the loop itself does not survive a fork either."""
        self._closed = True
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.forget()

    async def connect(self, timeout_s: float = HANDSHAKE_S) -> None:
        """Connect, if there is no connection. Raises DeadlineExceeded, NodeUnavailable, ..."""
        await self._connected(time.monotonic() + timeout_s)

    async def call(self, request: messages.Request, timeout_s: float) -> NodeAnswer:
        """See `NodeLink.call`."""
        end = time.monotonic() + deadlines.left_s(timeout_s + GRACE_S)
        calls = self._live() or await self._connected(end)
        connection = calls.connection
        connection.mapping.of(request)  # before the send: an error leaves no reservation
        request.id = next(self._ids)
        answer = await calls.answer(request, end)
        raise_refusal(answer.reply)
        connection.ended(request)
        return answer

    def _live(self) -> _Calls | None:
        """The `_Calls` of this loop and the connection; None without a healthy connection. Raises
        ClientClosed."""
        calls, connection = self._calls, self._connection
        if self._closed:
            raise ClientClosed(CLOSED)
        if connection is None or connection.broken:
            return None
        if (
            calls is None
            or calls.connection is not connection
            or calls.loop is not asyncio.get_running_loop()
        ):
            calls = self._calls = _Calls(connection)
        return calls

    async def _connected(self, end: float) -> _Calls:
        """As `_live`, but connects if there is no connection. Only one task at a time connects; the
        other tasks wait for its connection."""
        while (calls := self._live()) is None:
            work, is_ours = self._connecting, False
            loop = asyncio.get_running_loop()
            if work is None or work.ended.done() or work.ended.get_loop() is not loop:
                timeout_s = remaining_s(end)
                work, is_ours = ThreadCall(partial(self._reach, timeout_s)), True
                self._connecting = work
                later(work)
            await asyncio.wait([work.ended], timeout=end - time.monotonic())
            if not work.ended.done():
                raise DeadlineExceeded("no connection to the node within the deadline")
            if is_ours:
                work.take()
        return calls

    def _reach(self, timeout_s: float) -> None:
        connection = connected(self._path, self._name, timeout_s)
        with self._changing:
            is_wanted = not self._closed
            if is_wanted:
                old, self._connection = self._connection, connection
        if not is_wanted:
            connection.close()
        elif old is not None:
            old.mapping.close()  # of the node that went away; views of it stay valid

    def post(self, request: messages.Request) -> None:
        """See `NodeLink.post`."""
        connection = self._connection
        if connection is not None:
            connection.post(request)

    async def close(self) -> None:
        """See `SocketLink.close`."""
        polite = await in_thread(partial(self.gate.close, CLOSE_S))
        self._closed = True
        if self._calls is not None:
            self._calls.end(ClientClosed(CLOSED))
        await in_thread(partial(self._hang_up, polite))

    def _hang_up(self, polite: bool) -> None:
        with self._changing:
            connection, self._connection = self._connection, None
        if connection is not None:
            connection.close(polite=polite)
