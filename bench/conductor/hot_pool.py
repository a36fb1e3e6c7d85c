"""A simulated pool for measurements of a conductor: nodes as a directory would list them, and hot
prefixes, each on one node and wanted on several."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tiffin.conductor.events.index_updates import Added
from tiffin.conductor.pool.orders import NodeSpace
from tiffin.conductor.pool.popularity import Group

from .decision import MODEL
from .index import keys_of

if TYPE_CHECKING:
    from tiffin.conductor.core import Conductor

_BLOCKS = 64
_TIMES = 6
_BLOCK_BYTES = 2 << 20
_GIB = 1 << 30


def spaces_with_hot_prefixes(
    core: Conductor, nodes: int, prefixes: int, now: float
) -> dict[str, NodeSpace]:
    """The nodes, by name; the core knows of the prefixes."""
    names = [f"node-{number}" for number in range(nodes)]
    for number in range(prefixes):
        keys = keys_of(_BLOCKS)
        core.apply(Added(names[number % nodes], "dram", keys), now)
        for time in range(_TIMES):
            core.popularity.seen(keys, now, group=Group(MODEL), block_bytes=_BLOCK_BYTES)
            core.popularity.wanted(keys, names[(number + time) % nodes], now)
    return {name: NodeSpace(name, 64 * _GIB, 32 * _GIB) for name in names}
