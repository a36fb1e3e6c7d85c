"""Carries out the conductor's orders to nodes: copies of hot blocks, over the simulated network."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tiffin.conductor.pool.orders import Copy, Drop, Ended, NodeSpace

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tiffin.conductor.pool.orders import Order

    from ..nodes.network import Network
    from ..nodes.node_cache import NodeCache


class OrderCarrier:
    """`caches` are those of the nodes, by name; `ended` is told each outcome. As a real node, one
    copies what the source still has, and evicts by its own order: a drop is only a hint."""

    def __init__(
        self,
        network: Network,
        caches: Mapping[str, NodeCache],
        block_bytes: int,
        ended: Callable[[Ended], None],
    ) -> None:
        self._network, self._caches, self._block_bytes = network, caches, block_bytes
        self._ended = ended
        self.copied_bytes = 0

    def spaces(self) -> dict[str, NodeSpace]:
        """All nodes, as the directory lists them."""
        return {
            name: NodeSpace(
                name,
                cache.capacity_blocks * self._block_bytes,
                cache.free_blocks * self._block_bytes,
            )
            for name, cache in self._caches.items()
        }

    def carry(self, order: Order) -> None:
        """Carry out one order. Drains are not simulated: other orders fail."""
        if isinstance(order, Drop):
            self._ended(Ended(order.number, blocks=len(order.keys)))
        elif isinstance(order, Copy):
            self._copy(order)
        else:
            self._ended(Ended(order.number, error="NotSimulated"))

    def _copy(self, order: Copy) -> None:
        source, target = self._caches[order.source], self._caches[order.target]
        keys = order.keys[: source.match(order.keys)]
        nbytes = len(keys) * self._block_bytes
        self.copied_bytes += nbytes

        def arrived() -> None:
            target.put(keys)
            self._ended(Ended(order.number, blocks=len(keys)))

        self._network.send(order.source, order.target, nbytes, arrived)
