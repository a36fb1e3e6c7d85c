"""The asyncio client of a pool of many nodes.

Bulk bytes are received by blocking system calls, which cost a fraction of what an event loop costs
per gigabyte (docs/decisions/tcp.md), so each verb runs in a worker thread. A cancelled call returns
only when its thread has let go of the caller's memory, at the latest when its time is up; what the
thread got by then is given back. For a connection it waits no more.
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from tiffin.messenger.opening import Caller

from ..aio import AsyncBlocks, AsyncClient, AsyncSlots, Opening, in_thread
from ..client import LeasedBlocks, Slots, drive
from ..errors import ClientClosed, DeadlineExceeded
from ..streaming import AsyncLayerStream
from ..verbs import DEFAULT_TIMEOUT_S, Hit, PutResult, Verb, Verify
from .client import PoolClient
from .open import open_pool
from .streaming import interruptible

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from ..keys import Prefix
    from ..schema import HeadRange, LayerRange, Shard
    from ..url import Pool

T = TypeVar("T")

# Calls of one client that run side by side; more wait for their turn, as long as they have time.
# Each is a thread that sleeps in system calls.
CALLS = 16


class AsyncPoolClient(AsyncClient):
    """What `AsyncClient.open("redis://...")` returns: the verbs of `PoolClient`, awaited."""

    def __init__(self, client: PoolClient) -> None:
        self._client = client
        self._access = client._access
        self._threads: ThreadPoolExecutor | None = ThreadPoolExecutor(
            CALLS, thread_name_prefix="tiffin-aio"
        )
        # Waited for here, not in the executor's queue, which knows no deadline and no cancelling.
        self._turns = asyncio.Semaphore(CALLS)

    @classmethod
    async def open_pool(cls, target: Pool, verify: Verify, name: str) -> AsyncPoolClient:
        """Open the pool that `target` names."""
        return cls(await _awaited(partial(open_pool, target, verify, name), None))

    async def _call(self, verb: Callable[..., T], *args: Any, **options: Any) -> T:
        timeout_s = options.get("timeout_s", DEFAULT_TIMEOUT_S)
        self._check(timeout_s)
        began = time.monotonic()

        def action() -> T:
            if "timeout_s" in options:  # some of it went by while others had their turn
                options["timeout_s"] = max(0.0, timeout_s - (time.monotonic() - began))
            return verb(*args, **options)

        return await self._run(action, timeout_s)

    async def _run(self, action: Callable[[], T], wait_s: float | None = None) -> T:
        try:
            async with asyncio.timeout(wait_s):
                await self._turns.acquire()
        except TimeoutError:
            raise DeadlineExceeded(
                f"{CALLS} other calls of this client took all the time; open another client"
            ) from None
        try:
            if self._threads is None:
                raise ClientClosed("this client is closed; open another")
            return await _awaited(action, self._threads)
        finally:
            self._turns.release()

    async def match(self, prefix: Prefix, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> Hit:
        """See `PoolClient.match`."""
        return await self._call(self._client.match, prefix, timeout_s=timeout_s)

    async def exists(self, prefix: Prefix, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> list[bool]:
        """See `PoolClient.exists`."""
        return await self._call(self._client.exists, prefix, timeout_s=timeout_s)

    def get(
        self,
        prefix: Prefix,
        *,
        into: Any = None,
        layers: LayerRange | None = None,
        heads: HeadRange | None = None,
        verify: Verify | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> Opening[AsyncBlocks]:
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

        return Opening(run())

    async def put(
        self,
        prefix: Prefix,
        payloads: Sequence[Any],
        *,
        shard: Shard | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        replicas: int = 1,
        sync: bool = True,
        node: int | None = None,
    ) -> PutResult:
        """See `PoolClient.put`."""
        return await self._call(
            self._client.put,
            prefix,
            payloads,
            shard=shard,
            timeout_s=timeout_s,
            replicas=replicas,
            sync=sync,
            node=node,
        )

    def reserve(
        self,
        prefix: Prefix,
        *,
        shard: Shard | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        node: int | None = None,
    ) -> Opening[AsyncSlots]:
        """See `PoolClient.reserve`; await it, or enter it with `async with`."""

        async def run() -> AsyncSlots:
            slots = await self._call(
                self._client.reserve, prefix, shard=shard, timeout_s=timeout_s, node=node
            )
            return _AsyncPoolSlots(slots, self._run)

        return Opening(run())

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
        self._check(timeout_s)
        course = self._client._course(prefix, heads, verify, timeout_s, ahead, node)
        run = partial(drive, link=self._client._home)  # type: ignore[arg-type]

        def step(verb: Verb[Any]) -> Coroutine[Any, Any, Any]:
            return interruptible(course, self._run(partial(run, verb)))

        return AsyncLayerStream(course, step)

    async def pin(
        self,
        prefix: Prefix,
        *,
        ttl_s: float | None = None,
        hard: bool = False,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> int:
        """See `PoolClient.pin`."""
        return await self._call(
            self._client.pin, prefix, ttl_s=ttl_s, hard=hard, timeout_s=timeout_s
        )

    async def unpin(self, prefix: Prefix, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> int:
        """See `PoolClient.unpin`."""
        return await self._call(self._client.unpin, prefix, timeout_s=timeout_s)

    async def remove(self, prefix: Prefix, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> int:
        """See `PoolClient.remove`."""
        return await self._call(self._client.remove, prefix, timeout_s=timeout_s)

    async def replicate(
        self, prefix: Prefix, to: Sequence[int], *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> dict[int, int]:
        """See `PoolClient.replicate`."""
        return await self._call(self._client.replicate, prefix, to, timeout_s=timeout_s)

    async def evacuate(self, node: int, *, timeout_s: float = 600.0) -> int:
        """See `PoolClient.evacuate`."""
        return await self._call(self._client.evacuate, node, timeout_s=timeout_s)

    async def nodes(self) -> dict[int, Any]:
        """See `PoolClient.nodes`."""
        return await self._call(self._client.nodes)

    async def statistics(self, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> dict[str, Any]:
        """See `PoolClient.statistics`."""
        return await self._call(self._client.statistics, timeout_s=timeout_s)

    async def close(self) -> None:
        """See `PoolClient.close`. Cuts what is under way and waits for its threads."""
        threads, self._threads, self._access = self._threads, None, None
        if threads is None:
            return
        await asyncio.to_thread(self._client.close)
        await asyncio.to_thread(threads.shutdown)


async def _awaited(action: Callable[[], T], threads: ThreadPoolExecutor | None) -> T:
    """As `in_thread`; a cancelled call opens no connection any more, and gives back what it got."""
    caller = Caller()
    got: list[T] = []
    failed: list[Exception] = []

    def run() -> None:
        try:
            with caller.in_this_thread():
                got.append(action())
        except Exception as error:  # noqa: BLE001 - raised below, unless nobody waits any more
            failed.append(error)

    try:
        await in_thread(run, threads, caller.cut)
    except asyncio.CancelledError:
        for outcome in got:
            _give_back(outcome)
        raise
    if failed:
        raise failed[0]
    return got[0]


def _give_back(outcome: object) -> None:
    if isinstance(outcome, LeasedBlocks):
        outcome.release()
    elif isinstance(outcome, Slots):
        outcome.abort()
    elif isinstance(outcome, PoolClient):
        outcome.close()


class _AsyncPoolBlocks(AsyncBlocks):
    """`LeasedBlocks` of a pool, for `async with`."""

    def __init__(self, blocks: LeasedBlocks) -> None:
        super().__init__(blocks, 0, None)
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
        """Send or publish what was written."""
        self._end()
        await self._run(self._inner.commit)
        self.stored, self.pending = self._inner.stored, self._inner.pending

    def abort(self) -> None:
        """Give the slots back unwritten."""
        self._end()
        self._inner.abort()
