"""The asyncio client of a pool of many nodes: the verbs of `PoolClient`, awaited."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tiffin.messenger.signal_safe import Forsaken

from ..client.async_client import AsyncClient, AsyncSlots, OpeningClient, awaited
from ..streaming.layer_stream import AsyncLayerStream
from ..verbs.arguments import verb
from ..verbs.block_verbs import DEFAULT_TIMEOUT_S
from .client import PoolClient as PoolClient
from .failover_source import interruptible

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from ..format.keys import Prefix
    from ..format.schema import AnyShard, HeadRange
    from ..verbs.arguments import Verify


class AsyncPoolClient(AsyncClient):
    """What `AsyncClient.open("redis://...")` returns."""

    match = awaited(PoolClient.match)
    put = awaited(PoolClient.put)
    replicate = awaited(PoolClient.replicate)
    evacuate = awaited(PoolClient.evacuate)
    nodes = awaited(PoolClient.nodes)

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
        return self._reserve(prefix, shard=shard, by_layer=by_layer, timeout_s=timeout_s, node=node)

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

        def run(step: Callable[[], Any]) -> Coroutine[Any, Any, Any]:
            return interruptible(source, self._run(step))

        stream = AsyncLayerStream(source, run, timeout_s)
        Forsaken.when(stream, source.release_dropped)
        return stream
