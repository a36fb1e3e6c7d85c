"""The asyncio client: the same verbs, awaited.

Calls of one client run side by side on one connection (`aiolink.py`). Copies and checksums of
payload bytes run in worker threads, so the loop is never held for longer than a small frame takes.
`get` and `reserve` can be awaited, or entered directly:

    async with client.get(prefix) as blocks: ...
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from . import verbs
from .aiolink import AsyncLink, AsyncLocalLink, AsyncSocketLink
from .client import ClientBase, LeasedBlocks, Slots
from .node.node import Node
from .node.records import Pin
from .streaming import AsyncLayerStream, NearFollowing, check_ahead, publish
from .url import Daemon, Pool, parse_url
from .verbs import DEFAULT_TIMEOUT_S, Call, Hit, Post, PutResult, Verb, Verify

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator, Sequence
    from concurrent.futures import Executor
    from types import TracebackType

    from .keys import Prefix
    from .schema import HeadRange, LayerRange, Shard

T = TypeVar("T")


async def drive(verb: Verb[T], link: AsyncLink) -> T:
    """Carry out a verb's steps, awaiting each."""
    outcome: Any = None
    failure: BaseException | None = None
    while True:
        try:
            step = verb.send(outcome) if failure is None else verb.throw(failure)
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]
        outcome = failure = None
        try:
            if isinstance(step, Call):
                outcome = await link.call(step.request, step.timeout_s)
            elif isinstance(step, Post):
                link.post(step.request)
            else:
                outcome = await in_thread(partial(link.gate.run, step.action))
        except BaseException as error:  # noqa: BLE001 - the verb cleans up, then raises it again
            failure = error


async def in_thread(
    action: Callable[[], T],
    threads: Executor | None = None,
    cancelled: Callable[[], None] = lambda: None,
) -> T:
    """Run `action` in a worker and, even if cancelled, return only when it has ended: until then it
    touches memory whose lease the caller would give back. `cancelled()` may hasten that."""
    running = asyncio.get_running_loop().run_in_executor(threads, action)
    cancellation: asyncio.CancelledError | None = None
    while not running.done():
        try:
            await asyncio.wait([running])
        except asyncio.CancelledError as error:  # perhaps not the last one
            cancellation = error
            cancelled()
    if cancellation is not None:
        raise cancellation
    return running.result()


class Opening(Generic[T]):
    """What `get`, `reserve` and `open` return: await it, or enter it with `async with`."""

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


class AsyncBlocks(LeasedBlocks):
    """`LeasedBlocks` for `async with`."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if not self._released:
            self.release()


class AsyncSlots(Slots):
    """`Slots` for `async with`; `commit` is a coroutine."""

    _link: AsyncLink  # type: ignore[assignment]

    async def publish(  # type: ignore[override]
        self, layer: int, *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> None:
        """See `Slots.publish`."""
        self._check_open()
        verb = publish(self._slots, self._lease, layer, verbs.check_timeout(timeout_s))
        await drive(verb, self._link)

    async def commit(self) -> None:  # type: ignore[override]
        """Checksum and publish what was written. Raises StaleLease if the reservation expired."""
        self._begin_commit()
        try:
            self._settle(
                await drive(verbs.commit(self.prefix, self._slots, self._lease), self._link)
            )
        finally:
            for slot in self._slots:
                slot.let_go()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._ended:
            return
        if kind is None:
            await self.commit()
        else:
            self.abort()


class AsyncClient(ClientBase):
    """Asyncio client; `async with AsyncClient.open(url) as client`. Verbs as in `Client`."""

    def __init__(self, link: AsyncLink, verify: str) -> None:
        super().__init__(verify)
        self._link = link

    @classmethod
    def open(
        cls, url: str, *, verify: Verify = "always", name: str = "", populate: bool = False
    ) -> Opening[AsyncClient]:
        """Open the node that `url` names; await it, or enter it. As `Client.open`."""
        verbs.check_verify(verify)
        return Opening(cls._open(url, verify, verbs.check_name(name), populate))

    @classmethod
    async def _open(cls, url: str, verify: Verify, name: str, populate: bool) -> AsyncClient:
        target = parse_url(url)
        if isinstance(target, Pool):
            from .pool.aio import AsyncPoolClient  # it builds on this module

            return await AsyncPoolClient.open_pool(target, verify, name)
        if isinstance(target, Daemon):
            link = AsyncSocketLink(target.path, name)
            await link.connect()
            if populate:
                await asyncio.to_thread(link.populate)
            return cls(link, verify)
        node = await asyncio.to_thread(Node, target.options, name=name or "embedded")
        return cls(AsyncLocalLink(node, name, owns_node=True), verify)

    @classmethod
    async def attach(cls, node: Node, *, verify: Verify = "always", name: str = "") -> AsyncClient:
        """A client of a node that runs in this process and stays open after the client."""
        return cls(AsyncLocalLink(node, name, owns_node=False), verify)

    async def match(self, prefix: Prefix, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> Hit:
        """See `Client.match`."""
        return await drive(verbs.match(prefix, self._check(timeout_s)), self._link)

    async def exists(self, prefix: Prefix, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> list[bool]:
        """See `Client.exists`."""
        return await drive(verbs.exists(prefix, self._check(timeout_s)), self._link)

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
        """See `Client.get`; await it, or enter it with `async with`."""

        async def run() -> AsyncBlocks:
            self._check(timeout_s)
            access = self._reading(verify)
            if into is None:
                found = verbs.get(prefix, access, layers, heads, timeout_s)
                blocks, lease = await drive(found, self._link)
                return AsyncBlocks(blocks, lease, self._link)  # type: ignore[arg-type]
            copied = verbs.get_into(prefix, access, into, layers, heads, timeout_s)
            return AsyncBlocks(await drive(copied, self._link), 0, None)

        return Opening(run())

    async def put(
        self,
        prefix: Prefix,
        payloads: Sequence[Any],
        *,
        shard: Shard | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> PutResult:
        """See `Client.put`."""
        self._check(timeout_s)
        verb = verbs.put(prefix, payloads, self._link.memory.nbytes, timeout_s, shard)
        return await drive(verb, self._link)

    def reserve(
        self,
        prefix: Prefix,
        *,
        shard: Shard | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> Opening[AsyncSlots]:
        """See `Client.reserve`; await it, or enter it with `async with`."""

        async def run() -> AsyncSlots:
            verb = verbs.reserve(prefix, self._check(timeout_s), shard)
            return AsyncSlots(prefix, await drive(verb, self._link), self._link)  # type: ignore[arg-type]

        return Opening(run())

    def stream(
        self,
        prefix: Prefix,
        *,
        heads: HeadRange | None = None,
        verify: Verify | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        ahead: int = 1,
    ) -> AsyncLayerStream:
        """See `Client.stream`; for `async for` and `async with`."""
        self._check(timeout_s)
        check_ahead(ahead)
        following = NearFollowing(prefix, self._reading(verify), timeout_s, heads)
        return AsyncLayerStream(following, lambda verb: drive(verb, self._link))

    async def pin(
        self,
        prefix: Prefix,
        *,
        ttl_s: float | None = None,
        hard: bool = False,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> int:
        """See `Client.pin`."""
        level = Pin.HARD if hard else Pin.SOFT
        return await drive(verbs.pin(prefix, level, ttl_s, self._check(timeout_s)), self._link)

    async def unpin(self, prefix: Prefix, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> int:
        """See `Client.unpin`."""
        return await drive(verbs.pin(prefix, Pin.NONE, None, self._check(timeout_s)), self._link)

    async def remove(self, prefix: Prefix, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> int:
        """See `Client.remove`."""
        return await drive(verbs.remove(prefix, self._check(timeout_s)), self._link)

    async def statistics(self, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> dict[str, Any]:
        """See `Client.statistics`."""
        return await drive(verbs.statistics(self._check(timeout_s)), self._link)

    async def close(self) -> None:
        """See `Client.close`. Waits, in a worker thread, for copies that are running."""
        self._access = None
        await asyncio.to_thread(self._link.gate.close)
        if isinstance(self._link, AsyncLocalLink):
            await asyncio.to_thread(self._link.close)  # may write back to NVMe
        else:
            self._link.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
