"""The asyncio client: the verbs of `Client`, awaited.

Bulk bytes are moved by blocking system calls and by memcpy, which cost a fraction of what an event
loop costs per gigabyte (docs/decisions/tcp.md), so a thread carries out each verb. A cancelled call
returns only when its thread no longer uses the caller's memory, at the latest at its deadline; the
leases and slots that the thread got by then are given back. `get` and `reserve` can be awaited, or
entered directly:

    async with client.get(prefix) as blocks: ...
"""

from __future__ import annotations

import time
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, Self, TypeVar

from tiffin.messenger.tcp.pending_connect import Caller

from .. import deadlines
from ..after_fork import OfOneProcess
from ..errors import ClientBusy, ClientClosed, open_errors
from .client import Client
from .connection.loop_threads import ConcurrencyLimit, NotBegun, ThreadCall, in_thread
from .pool.signal_safe_verbs import give_back
from .streaming.layer_stream import AsyncLayerStream, LayerStream, interruptible
from .verbs.arguments import opening, verb
from .verbs.block_verbs import DEFAULT_TIMEOUT_S
from .verbs.prefetch_handles import AsyncPrefetch
from .verbs.slots import Slots

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Generator
    from types import TracebackType

    from ..format.keys import Prefix
    from ..node.node import Node
    from .verbs.arguments import Verify

P = ParamSpec("P")
T = TypeVar("T")
U = TypeVar("U")

# Calls of one client that run in parallel; further calls wait for their turn until their deadline.
# Each is a thread that sleeps in system calls.
CALLS = 16
# How long `close` waits for the threads of the calls that it has cut.
CLOSE_S = 5.0


class OpeningClient(Generic[T]):
    """The awaitable that `get`, `reserve` and `open` return; also for `async with`."""

    def __init__(self, awaitable: Awaitable[T]) -> None:
        self._awaitable = awaitable
        self._entered: Any = None

    def __await__(self) -> Generator[Any, None, T]:
        return self._awaitable.__await__()

    async def __aenter__(self) -> T:
        self._entered = await self._awaitable
        return await self._entered.__aenter__()  # type: ignore[no-any-return]

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._entered.__aexit__(kind, error, traceback)


def awaited(
    method: Callable[Concatenate[Any, P], T],
) -> Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]]:
    """The verb of a client's class as a coroutine: a thread carries it out."""

    @wraps(method)
    async def called(client: AsyncClient, /, *args: P.args, **options: P.kwargs) -> T:
        return await client._call(getattr(client._client, method.__name__), *args, **options)

    return verb(called)


def entered(
    method: Callable[Concatenate[Any, P], T],
    found: Callable[[AsyncClient, T], U],
) -> Callable[Concatenate[AsyncClient, P], OpeningClient[U]]:
    """As `awaited`, for a verb whose result can be entered at once; `found(client, result)` is the
    result here."""

    @wraps(method)
    def called(client: AsyncClient, /, *args: P.args, **options: P.kwargs) -> OpeningClient[U]:
        async def run() -> U:
            bound = getattr(client._client, method.__name__)
            return found(client, await client._call(bound, *args, **options))

        return OpeningClient(run())

    return verb(called)


def streamed(
    method: Callable[Concatenate[Any, P], LayerStream],
) -> Callable[Concatenate[AsyncClient, P], AsyncLayerStream]:
    """`Client.stream` for asyncio."""

    @wraps(method)
    def called(client: AsyncClient, /, *args: P.args, **options: P.kwargs) -> AsyncLayerStream:
        stream = getattr(client._client, method.__name__)(*args, **options)

        def run(step: Callable[[], Any]) -> Coroutine[Any, Any, Any]:
            running = client._run(step)
            return interruptible(stream._source, running) if client._client.is_pool else running

        return AsyncLayerStream(stream, run)

    return verb(called)


class AsyncClient(OfOneProcess):
    """Asyncio client; `async with AsyncClient.open(url) as client`. Verbs as in `Client`."""

    match = awaited(Client.match)
    exists = awaited(Client.exists)
    get = entered(Client.get, lambda _, blocks: blocks)
    stream = streamed(Client.stream)
    put = awaited(Client.put)
    reserve = entered(Client.reserve, lambda client, slots: AsyncSlots(slots, client._run))
    pin = awaited(Client.pin)
    unpin = awaited(Client.unpin)
    remove = awaited(Client.remove)
    announce = awaited(Client.announce)
    statistics = awaited(Client.statistics)
    nodes = awaited(Client.nodes)
    replicate = awaited(Client.replicate)
    evacuate = awaited(Client.evacuate)

    def __init__(self, client: Client) -> None:
        """The awaited verbs of this client, which is closed with it."""
        self._client = client
        self._turns = ConcurrencyLimit(CALLS)
        self._closed = False

    @classmethod
    @opening
    def open(
        cls, url: str, *, verify: Verify = "always", name: str = "", populate: bool = False
    ) -> OpeningClient[AsyncClient]:
        """Open the node or the pool that `url` names; await it, or enter it. As `Client.open`."""
        how = {"verify": verify, "name": name, "populate": populate}
        return OpeningClient(cls._open(partial(Client.open, url, **how)))  # type: ignore[arg-type]

    @classmethod
    @opening
    async def attach(cls, node: Node, *, verify: Verify = "always", name: str = "") -> AsyncClient:
        """Connect to a `Node` of this process; closing the client leaves the node open."""
        return await cls._open(partial(Client.attach, node, verify=verify, name=name))

    @classmethod
    async def _open(cls, open_client: Callable[[], Client]) -> AsyncClient:
        with open_errors():
            work, cut = _given_up_together(open_client)
            return cls(await work.outlast(undo=Client.close, cancel=cut))

    def _check_open(self) -> None:
        self._check_process()
        if self._closed:
            raise ClientClosed("this client is closed; open another")

    async def _call(self, verb: Callable[..., T], *args: Any, **options: Any) -> T:
        timeout_s = options.get("timeout_s", DEFAULT_TIMEOUT_S)
        began = time.monotonic()

        def action() -> T:
            if "timeout_s" in options:  # less the time that the call waited for its turn
                options["timeout_s"] = max(0.0, timeout_s - (time.monotonic() - began))
            return verb(*args, **options)

        return await self._run(action, timeout_s)

    async def _run(self, action: Callable[[], T], wait_s: float = DEFAULT_TIMEOUT_S) -> T:
        self._check_open()
        work, cut = _given_up_together(action)
        wait_s = deadlines.left_s(wait_s + deadlines.GRACE_S)  # a thread takes some time to wake
        try:
            return await work.outlast(
                self._turns.put, undo=give_back, cancel=cut, begin_within_s=wait_s
            )
        except NotBegun:
            raise ClientBusy(
                f"{CALLS} other calls of this client took all the time; open another client"
            ) from None

    @verb
    async def prefetch(
        self, prefix: Prefix, *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> AsyncPrefetch:
        """See `Client.prefetch`."""
        call = self._call(self._client.prefetch, prefix, timeout_s=timeout_s)
        return AsyncPrefetch(await call)

    async def close(self) -> None:
        """See `Client.close`. Cuts the calls in flight and waits for their threads."""
        self._closed = True
        if not self._inherited:
            await in_thread(self._close)

    def _close(self) -> None:
        self._client.close()
        self._turns.outlast(CLOSE_S)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class AsyncSlots(Slots):
    """`Slots` for `async with`; `publish` and `commit` are coroutines."""

    def __init__(
        self, slots: Slots, run: Callable[[Callable[[], None]], Coroutine[Any, Any, None]]
    ) -> None:
        self.__dict__.update(slots.__dict__)
        self._inner = slots
        self._run = run

    @verb
    async def publish(  # type: ignore[override]
        self, layer: int, *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> None:
        """See `Slots.publish`."""
        inner = self._inner
        await self._run(partial(inner.publish, layer, timeout_s=timeout_s))
        self.node, self.resident, self.busy = inner.node, inner.resident, inner.busy

    async def commit(self) -> None:  # type: ignore[override]
        """See `Slots.commit`. Raises StaleLease if the reservation expired."""
        self._check_published()
        self._end()
        try:
            await self._run(self._inner.commit)
        except BaseException:
            if not self._inner._ended:  # it has not begun
                self._inner.abort()
            raise
        self.stored, self.pending = self._inner.stored, self._inner.pending

    def abort(self) -> None:
        """See `Slots.abort`."""
        if not self._inherited:
            self._end()
            self._inner.abort()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._ended:
            return
        try:
            if kind is None:
                await self.commit()
        finally:
            if not self._ended:
                self.abort()


def _given_up_together(action: Callable[[], T]) -> tuple[ThreadCall[T], Callable[[], None]]:
    """The action as a `ThreadCall`, and a function that gives it up: what it waits for ends, and
    the action then opens no connection and waits for none."""
    caller = Caller()

    def carry_out() -> T:
        with caller.in_this_thread():
            return action()

    return ThreadCall(carry_out), caller.cut
