"""The asyncio client of a pool of many nodes.

Bulk bytes are received by blocking system calls, which cost a fraction of what an event loop costs
per gigabyte (docs/decisions/tcp.md), so each verb runs in a worker thread. A cancelled call returns
only when its thread no longer uses the caller's memory, at the latest at its deadline; the leases
and slots that the thread got by then are given back. The thread does not wait for a connection any
more.
"""

from __future__ import annotations

import time
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from tiffin.messenger.signal_safe import Forsaken
from tiffin.messenger.tcp.pending_connect import Caller

from .. import deadlines
from ..client.async_client import AsyncBlocks, AsyncClient, AsyncSlots, OpeningClient
from ..connection.loop_threads import ConcurrencyLimit, NotBegun, ThreadCall, in_thread
from ..errors import ClientBusy, ClientClosed
from ..streaming.layer_stream import AsyncLayerStream
from ..verbs.arguments import verb
from ..verbs.block_verbs import DEFAULT_TIMEOUT_S, Verb
from ..verbs.drivers import drive
from .client import PoolClient
from .failover_source import interruptible
from .home.home_prefetch import AsyncHomePrefetch
from .open_pool import open_pool
from .signal_safe_verbs import give_back

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from ..client.client import LeasedBlocks, Slots
    from ..format.keys import Prefix
    from ..format.schema import AnyShard, HeadRange, LayerRange
    from ..url import Pool
    from ..verbs.arguments import Verify

P = ParamSpec("P")
T = TypeVar("T")

# Calls of one client that run in parallel; further calls wait for their turn until their deadline.
# Each is a thread that sleeps in system calls.
CALLS = 16
# How long `close` waits for the threads of the calls that it has cut.
CLOSE_S = 5.0


def _awaited(
    method: Callable[Concatenate[PoolClient, P], T],
) -> Callable[Concatenate[AsyncPoolClient, P], Coroutine[Any, Any, T]]:
    """The verb of `PoolClient` as a coroutine: a thread carries it out."""

    @wraps(method)
    async def awaited(client: AsyncPoolClient, /, *args: P.args, **options: P.kwargs) -> T:
        return await client._call(partial(method, client._client), *args, **options)

    return verb(awaited)


class AsyncPoolClient(AsyncClient):
    """What `AsyncClient.open("redis://...")` returns: the verbs of `PoolClient`, awaited."""

    match = _awaited(PoolClient.match)
    exists = _awaited(PoolClient.exists)
    put = _awaited(PoolClient.put)
    pin = _awaited(PoolClient.pin)
    unpin = _awaited(PoolClient.unpin)
    remove = _awaited(PoolClient.remove)
    replicate = _awaited(PoolClient.replicate)
    evacuate = _awaited(PoolClient.evacuate)
    nodes = _awaited(PoolClient.nodes)
    statistics = _awaited(PoolClient.statistics)

    def __init__(self, client: PoolClient) -> None:
        self._client = client
        self._access = client._access
        self._turns = ConcurrencyLimit(CALLS)
        self._closed = False

    @classmethod
    async def open_pool(cls, target: Pool, verify: Verify, name: str) -> AsyncPoolClient:
        """Open the pool that `target` names."""
        work, cut = _given_up_together(partial(open_pool, target, verify, name))
        return cls(await work.outlast(undo=give_back, cancel=cut))

    async def _call(self, verb: Callable[..., T], *args: Any, **options: Any) -> T:
        timeout_s = options.get("timeout_s", DEFAULT_TIMEOUT_S)
        began = time.monotonic()

        def action() -> T:
            if "timeout_s" in options:  # less the time that the call waited for its turn
                options["timeout_s"] = max(0.0, timeout_s - (time.monotonic() - began))
            return verb(*args, **options)

        return await self._run(action, timeout_s)

    async def _run(self, action: Callable[[], T], wait_s: float = DEFAULT_TIMEOUT_S) -> T:
        if self._closed:
            raise ClientClosed("this client is closed; open another")
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
    ) -> AsyncHomePrefetch:
        """See `PoolClient.prefetch`."""
        call = self._call(self._client.prefetch, prefix, timeout_s=timeout_s)
        return AsyncHomePrefetch(await call)

    @verb
    def get(
        self,
        prefix: Prefix,
        *,
        into: Any = None,
        layers: LayerRange | None = None,
        heads: HeadRange | None = None,
        verify: Verify | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> OpeningClient[AsyncBlocks]:
        """See `PoolClient.get`; await it, or enter it with `async with`."""

        async def run() -> AsyncBlocks:
            blocks = await self._call(
                self._client.get,
                prefix,
                into=into,
                layers=layers,
                heads=heads,
                verify=verify,
                timeout_s=timeout_s,
            )
            return _AsyncPoolBlocks(blocks)

        return OpeningClient(run())

    @verb
    def reserve(
        self,
        prefix: Prefix,
        *,
        shard: AnyShard | None = None,
        by_layer: bool = False,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        node: int | None = None,
    ) -> OpeningClient[AsyncSlots]:
        """See `PoolClient.reserve`; await it, or enter it with `async with`."""

        async def run() -> AsyncSlots:
            slots = await self._call(
                self._client.reserve,
                prefix,
                shard=shard,
                by_layer=by_layer,
                timeout_s=timeout_s,
                node=node,
            )
            return _AsyncPoolSlots(slots, self._run)

        return OpeningClient(run())

    @verb
    def stream(
        self,
        prefix: Prefix,
        *,
        heads: HeadRange | None = None,
        verify: Verify | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        ahead: int = 1,
        node: int | None = None,
    ) -> AsyncLayerStream:
        """See `PoolClient.stream`; for `async for` and `async with`."""
        source = self._client._layer_source(prefix, heads, verify, timeout_s, ahead, node)
        run = partial(drive, link=self._client._home)  # type: ignore[arg-type]

        def step(verb: Verb[Any]) -> Coroutine[Any, Any, Any]:
            return interruptible(source, self._run(partial(run, verb)))

        stream = AsyncLayerStream(source, step, timeout_s)
        Forsaken.when(stream, source.release_dropped)
        return stream

    async def close(self) -> None:
        """See `PoolClient.close`. Cuts the calls in flight and waits for their threads."""
        self._access, self._closed = None, True
        if not self._inherited:
            await in_thread(self._close)

    def _close(self) -> None:
        self._client.close()
        self._turns.outlast(CLOSE_S)


def _given_up_together(action: Callable[[], T]) -> tuple[ThreadCall[T], Callable[[], None]]:
    """The action as a `ThreadCall`, and a function that gives it up: the action then opens no
    connection and waits for none."""
    caller = Caller()

    def carry_out() -> T:
        with caller.in_this_thread():
            return action()

    return ThreadCall(carry_out), caller.cut


class _AsyncPoolBlocks(AsyncBlocks):
    """`LeasedBlocks` of a pool, for `async with`."""

    def __init__(self, blocks: LeasedBlocks) -> None:
        super().__init__(blocks, 0, None)
        self._make = blocks.__getitem__  # it knows at which node each block is
        self._blocks = blocks

    def release(self) -> None:
        """See `LeasedBlocks.release`."""
        super().release()
        self._blocks.release()


class _AsyncPoolSlots(AsyncSlots):
    """`Slots` of a pool, for `async with`."""

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
        await self._run(partial(self._inner.publish, layer, timeout_s=timeout_s))
        self.node, self.resident, self.busy = (
            self._inner.node,
            self._inner.resident,
            self._inner.busy,
        )

    async def commit(self) -> None:  # type: ignore[override]
        """Commit the slots: send the bytes that were written and are not sent yet."""
        self._check_published()
        self._end()
        await self._run(self._inner.commit)
        self.stored, self.pending = self._inner.stored, self._inner.pending

    def abort(self) -> None:
        """Give the slots back unwritten."""
        if self._inherited:
            return
        self._end()
        self._inner.abort()
