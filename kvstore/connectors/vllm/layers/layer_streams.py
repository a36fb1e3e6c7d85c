"""Loads of blocks that another engine is writing: layer after layer, as it publishes them.

A thread per load waits for the next blocks that the writer has reserved, which are those of one
step of its engine, and copies each of their layers to the pages. They count as loaded once the
stream has ended without an error: then they are stored, and their headers have the checksums of
what was copied.
"""

from __future__ import annotations

import logging
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from ....errors import CorruptBlock, DeadlineExceeded, NodeUnavailable, StaleLease
from ..pool_link import at_node

if TYPE_CHECKING:
    from ....client.client import Client
    from ....format.schema import HeadRange
    from ..orders import LoadOrder
    from ..pages.copier import EngineCopier
    from ..pool_link import PoolLink

log = logging.getLogger(__name__)

# The writer's ends, not the pool's: it was too slow, or gave its blocks up.
_WRITER_FAILED = (CorruptBlock, DeadlineExceeded, StaleLease)


class LayerStreams:
    """Such loads of one worker; `load` is called in threads. `heads`: the worker's. `timeout_s`:
    how long one of them waits for the next blocks, and for each layer."""

    def __init__(
        self, link: PoolLink, copier: EngineCopier, heads: HeadRange | None, timeout_s: float
    ) -> None:
        self._link, self._copier, self._heads = link, copier, heads
        self._timeout_s = timeout_s

    def load(self, order: LoadOrder) -> int:
        """Fill the order's pages; returns how many of its leading blocks are in them once the
        writer has stored them all, or writes no more. Raises TiffinError if the pool fails."""
        loaded = 0
        while loaded < len(order.prefix):
            rest = order.rest(loaded, self._copier.pages)
            blocks = self._link.call(partial(self._next, rest), self._timeout_s)
            if not blocks:
                break
            part = next(rest.parts(blocks, self._copier.pages))
            copied = self._link.call(partial(self._copy, part))
            loaded += copied
            if copied < blocks:
                break
        return loaded

    def _next(self, order: LoadOrder, client: Client) -> int:
        """How many leading blocks are stored or being written; waits for the first one."""
        found = client.match(
            order.prefix, writing=True, at_least=1, timeout_s=self._timeout_s,
            **at_node(client, order.node),
        )  # fmt: skip
        return found.blocks

    def _copy(self, order: LoadOrder, client: Client) -> int:
        """Copy the blocks of the order, layer after layer; returns how many are loaded: all, or
        none."""
        where: dict[str, Any] = at_node(client, order.node)
        began, name = time.monotonic(), order.request_id
        stream = client.stream(order.prefix, heads=self._heads, timeout_s=self._timeout_s, **where)
        try:
            with stream:
                count = stream.blocks
                for layer in stream:
                    memories = [block.bytes for block in layer.blocks]
                    self._copier.scatter_layer(
                        layer.index, memories, order.pages, order.skipped_pages
                    )
                    log.debug("%s: layer %d of %d blocks loaded", name, layer.index, count)
        except _WRITER_FAILED as error:
            log.warning("%s: %s after %.2f s", name, error, time.monotonic() - began)
            return 0
        except NodeUnavailable:
            if order.node is None:
                raise
            log.warning("%s: the node that the blocks are written at does not answer", name)
            return 0
        return count
