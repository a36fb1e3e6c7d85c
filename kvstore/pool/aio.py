"""The asyncio client of a pool of many nodes.

Bulk bytes are received by blocking system calls, which cost a fraction of what an event loop costs
per gigabyte (docs/decisions/tcp.md), so each verb runs in a worker thread. A cancelled call returns
only when its thread has let go of the caller's memory, at the latest when its time is up.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

from ..aio import AsyncBlocks, AsyncClient, AsyncSlots, Opening, in_thread
from ..verbs import DEFAULT_TIMEOUT_S, Hit, PutResult, Verify
from .client import PoolClient
from .open import open_pool

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ..client import LeasedBlocks, Slots
    from ..keys import Prefix
    from ..schema import HeadRange, LayerRange
    from ..url import Pool

# Calls of one client that run side by side; more wait for their turn. Each is a thread that sleeps
# in system calls.
CALLS = 16


class AsyncPoolClient(AsyncClient):
    """What `AsyncClient.open("redis://...")` returns: the verbs of `PoolClient`, awaited."""

    def __init__(self, client: PoolClient) -> None:
        self._client = client
        self._access = client._access
        self._threads = ThreadPoolExecutor(CALLS, thread_name_prefix="tiffin-aio")

    @classmethod
    async def open_pool(cls, target: Pool, verify: Verify, name: str) -> AsyncPoolClient:
        """Open the pool that `target` names."""
        return cls(await asyncio.to_thread(open_pool, target, verify, name))

    async def _call(self, verb: Callable[..., Any], *args: Any, **options: Any) -> Any:
        self._check(options.get("timeout_s", DEFAULT_TIMEOUT_S))
        return await in_thread(partial(verb, *args, **options), self._threads)

    async def match(self, prefix: Prefix, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> Hit:
        """See `PoolClient.match`."""
        hit: Hit = await self._call(self._client.match, prefix, timeout_s=timeout_s)
        return hit

    async def exists(self, prefix: Prefix, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> list[bool]:
        """See `PoolClient.exists`."""
        flags: list[bool] = await self._call(self._client.exists, prefix, timeout_s=timeout_s)
        return flags

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
            blocks: LeasedBlocks = await self._call(
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
        timeout_s: float = DEFAULT_TIMEOUT_S,
        replicas: int = 1,
        sync: bool = True,
    ) -> PutResult:
        """See `PoolClient.put`."""
        result: PutResult = await self._call(
            self._client.put, prefix, payloads, timeout_s=timeout_s, replicas=replicas, sync=sync
        )
        return result

    def reserve(
        self, prefix: Prefix, *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> Opening[AsyncSlots]:
        """See `PoolClient.reserve`; await it, or enter it with `async with`."""

        async def run() -> AsyncSlots:
            slots: Slots = await self._call(self._client.reserve, prefix, timeout_s=timeout_s)
            return _AsyncPoolSlots(slots, self._threads)

        return Opening(run())

    async def pin(
        self,
        prefix: Prefix,
        *,
        ttl_s: float | None = None,
        hard: bool = False,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> int:
        """See `PoolClient.pin`."""
        return int(
            await self._call(
                self._client.pin, prefix, ttl_s=ttl_s, hard=hard, timeout_s=timeout_s
            )
        )

    async def unpin(self, prefix: Prefix, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> int:
        """See `PoolClient.unpin`."""
        return int(await self._call(self._client.unpin, prefix, timeout_s=timeout_s))

    async def remove(self, prefix: Prefix, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> int:
        """See `PoolClient.remove`."""
        return int(await self._call(self._client.remove, prefix, timeout_s=timeout_s))

    async def replicate(
        self, prefix: Prefix, to: Sequence[int], *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> dict[int, int]:
        """See `PoolClient.replicate`."""
        counts: dict[int, int] = await self._call(
            self._client.replicate, prefix, to, timeout_s=timeout_s
        )
        return counts

    async def evacuate(self, node: int, *, timeout_s: float = 600.0) -> int:
        """See `PoolClient.evacuate`."""
        return int(await self._call(self._client.evacuate, node, timeout_s=timeout_s))

    async def statistics(self, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> dict[str, Any]:
        """See `PoolClient.statistics`."""
        numbers: dict[str, Any] = await self._call(self._client.statistics, timeout_s=timeout_s)
        return numbers

    async def close(self) -> None:
        """See `PoolClient.close`. Cuts what is under way and waits for its threads."""
        if self._access is None:
            return
        self._access = None
        await asyncio.to_thread(self._client.close)
        await asyncio.to_thread(self._threads.shutdown)


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

    def __init__(self, slots: Slots, threads: ThreadPoolExecutor) -> None:
        self.__dict__.update(slots.__dict__)
        self._inner = slots
        self._threads = threads

    async def commit(self) -> None:  # type: ignore[override]
        """Send or publish what was written."""
        self._end()
        await in_thread(self._inner.commit, self._threads)
        self.stored = self._inner.stored

    def abort(self) -> None:
        """Give the slots back unwritten."""
        self._end()
        self._inner.abort()
