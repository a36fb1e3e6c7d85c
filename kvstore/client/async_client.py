"""The asyncio client: the same verbs, awaited.

A client's concurrent requests are in flight on one connection (`async_node_link.py`). Copies and
checksums of payload bytes run in worker threads, so a client never blocks the event loop for longer
than a small frame takes. `get` and `reserve` can be awaited, or entered directly:

    async with client.get(prefix) as blocks: ...
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from tiffin.messenger.signal_safe import later

from .. import deadlines
from ..blocks.block_views import select
from ..blocks.payload_buffers import target_views
from ..connection.async_node_link import AsyncLink, AsyncLocalLink, AsyncSocketLink
from ..connection.loop_threads import in_thread
from ..errors import open_errors
from ..node.core.records import PinLevel
from ..node.node import Node
from ..streaming.layer_stream import AsyncLayerStream
from ..streaming.local_source import LocalSource
from ..streaming.publish import publish
from ..url import Daemon, Embedded, Pool, parse_url
from ..verbs import block_verbs
from ..verbs.arguments import Verify, opening, verb
from ..verbs.block_verbs import DEFAULT_TIMEOUT_S, Call, Hit, Post, PutResult, Verb
from ..verbs.prefetching import PrefetchState
from .client import ClientBase, LeasedBlocks, Slots
from .prefetch_handles import AsyncPrefetch

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator, Sequence
    from types import TracebackType

    from ..format.keys import Prefix
    from ..format.schema import AnyShard, HeadRange, LayerRange

T = TypeVar("T")


async def drive(verb: Verb[T], link: AsyncLink) -> T:
    """Run a verb's generator over `link`, awaiting each step; return its result."""
    outcome: Any = None
    failure: BaseException | None = None
    try:
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
                    began = time.monotonic()
                    outcome = await in_thread(partial(link.gate.run, step.action))
                    deadlines.worked(time.monotonic() - began)
            except BaseException as error:  # noqa: BLE001 - the verb cleans up, then raises it again
                failure = error
    finally:
        # The exception's traceback refers to this frame: the cycle would keep a lease alive.
        del failure, outcome


async def _in_time(call: Callable[[], Awaitable[T]], timeout_s: float) -> T:
    """Run `call()` under a deadline of `timeout_s`, both from the moment this is awaited."""
    return await deadlines.Within(timeout_s).run_soon(call)


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

    @verb
    async def publish(  # type: ignore[override]
        self, layer: int, *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> None:
        """See `Slots.publish`."""
        await drive(publish(self._slots, self._lease, layer, timeout_s), self._link)
        self._unpublished.discard(layer)

    async def commit(self) -> None:  # type: ignore[override]
        """See `Slots.commit`. Raises StaleLease if the reservation expired."""
        self._begin_commit()
        try:
            self._settle(
                await drive(block_verbs.commit(self.prefix, self._slots, self._lease), self._link)
            )
        finally:
            for slot in self._slots:
                slot.let_go()

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


async def open_link(target: Embedded | Daemon, name: str) -> AsyncLink:
    """See `client.open_link`."""
    if isinstance(target, Daemon):
        link = AsyncSocketLink(target.path, name)
        await link.connect()
        return link
    start = partial(Node, target.options, name=name or "embedded")
    node = await in_thread(start, undo=Node.close)
    try:
        return AsyncLocalLink(node, name, owns_node=True)
    except BaseException:
        later(node.close)
        raise


class AsyncClient(ClientBase):
    """Asyncio client; `async with AsyncClient.open(url) as client`. Verbs as in `Client`."""

    def __init__(self, link: AsyncLink, verify: Verify) -> None:
        super().__init__(verify)
        self._link = link

    @classmethod
    @opening
    def open(
        cls, url: str, *, verify: Verify = "always", name: str = "", populate: bool = False
    ) -> OpeningClient[AsyncClient]:
        """Open the node that `url` names; await it, or enter it. As `Client.open`."""
        return OpeningClient(cls._open(url, verify, name, populate))

    @classmethod
    async def _open(cls, url: str, verify: Verify, name: str, populate: bool) -> AsyncClient:
        with open_errors():
            target = parse_url(url)
            if isinstance(target, Pool):
                from ..pool.async_client import AsyncPoolClient  # imports this module

                return await AsyncPoolClient.open_pool(target, verify, name)
            link = await open_link(target, name)
            if populate:
                await in_thread(link.mapping.populate)
            return cls(link, verify)

    @classmethod
    @opening
    async def attach(cls, node: Node, *, verify: Verify = "always", name: str = "") -> AsyncClient:
        """Connect to a `Node` of this process; closing the client leaves the node open."""
        return cls(AsyncLocalLink(node, name, owns_node=False), verify)

    @verb
    async def match(
        self,
        prefix: Prefix,
        *,
        writing: bool = False,
        at_least: int = 0,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> Hit:
        """See `Client.match`."""
        found = block_verbs.match(prefix, timeout_s, writing=writing, at_least=at_least)
        return await drive(found, self._link)

    @verb
    async def exists(self, prefix: Prefix, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> list[bool]:
        """See `Client.exists`."""
        return await drive(block_verbs.exists(prefix, timeout_s), self._link)

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
        """See `Client.get`; await it, or enter it with `async with`."""

        async def run() -> AsyncBlocks:
            access = self._reading(verify)
            selection = select(prefix.schema, layers, heads)
            if into is None:
                found = block_verbs.get(prefix, access, selection, timeout_s)
                blocks, lease = await drive(found, self._link)
                return AsyncBlocks(blocks, lease, self._link)  # type: ignore[arg-type]
            targets = target_views(into, len(prefix), selection.nbytes)
            copied = block_verbs.get_into(prefix, access, selection, targets, timeout_s)
            return AsyncBlocks(await drive(copied, self._link), 0, None)

        return OpeningClient(_in_time(run, timeout_s))

    @verb
    async def put(
        self,
        prefix: Prefix,
        payloads: Sequence[Any],
        *,
        shard: AnyShard | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> PutResult:
        """See `Client.put`."""
        verb = block_verbs.put(prefix, payloads, self._link.mapping.memory.nbytes, timeout_s, shard)
        return await drive(verb, self._link)

    @verb
    def reserve(
        self,
        prefix: Prefix,
        *,
        shard: AnyShard | None = None,
        by_layer: bool = False,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> OpeningClient[AsyncSlots]:
        """See `Client.reserve`; await it, or enter it with `async with`."""

        async def run() -> AsyncSlots:
            verb = block_verbs.reserve(prefix, timeout_s, shard)
            reserved = await drive(verb, self._link)
            slots = AsyncSlots(prefix, reserved, self._link)  # type: ignore[arg-type]
            return slots._require_layers() if by_layer else slots

        return OpeningClient(_in_time(run, timeout_s))

    @verb
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
        source = LocalSource(prefix, self._reading(verify), timeout_s, heads)
        return AsyncLayerStream(source, lambda verb: drive(verb, self._link), timeout_s)

    @verb
    async def prefetch(
        self, prefix: Prefix, *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> AsyncPrefetch:
        """See `Client.prefetch`."""
        state = PrefetchState(prefix, time.monotonic() + timeout_s)
        await drive(state.look(), self._link)
        return AsyncPrefetch(state, self._check_open, lambda verb: drive(verb, self._link))

    @verb
    async def pin(
        self,
        prefix: Prefix,
        *,
        ttl_s: float | None = None,
        hard: bool = False,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> int:
        """See `Client.pin`."""
        level = PinLevel.HARD if hard else PinLevel.SOFT
        return await drive(block_verbs.pin(prefix, level, ttl_s, timeout_s), self._link)

    @verb
    async def unpin(self, prefix: Prefix, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> int:
        """See `Client.unpin`."""
        return await drive(block_verbs.pin(prefix, PinLevel.NONE, None, timeout_s), self._link)

    @verb
    async def remove(self, prefix: Prefix, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> int:
        """See `Client.remove`."""
        return await drive(block_verbs.remove(prefix, timeout_s), self._link)

    @verb
    async def statistics(self, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> dict[str, Any]:
        """See `Client.statistics`."""
        return await drive(block_verbs.statistics(timeout_s), self._link)

    async def close(self) -> None:
        """See `Client.close`. Waits, in a worker thread, for copies in flight."""
        self._access = None
        if not self._inherited:
            await self._link.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
