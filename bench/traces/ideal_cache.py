"""How much of its prompts a trace could find in one cache that all instances share.

Nothing is lost and everything takes no time, so no scheduler does better with this eviction.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .trace import Trace


class IdealCache:
    """Full blocks by least recent use; `capacity_blocks` is None for a cache without limit."""

    def __init__(self, capacity_blocks: int | None) -> None:
        self._capacity = capacity_blocks
        self._blocks: OrderedDict[int, None] = OrderedDict()  # the least recently used is first

    def serve(self, chain: tuple[int, ...]) -> int:
        """How many blocks of the chain are hit, up to the first that is missing; all are then used.

        The chain's head counts as used last, as a block is worth nothing without those before it.
        """
        hits = self._hits(chain)
        for block in reversed(chain):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while self._capacity is not None and len(self._blocks) > self._capacity:
            self._blocks.popitem(last=False)
        return hits

    def _hits(self, chain: tuple[int, ...]) -> int:
        for position, block in enumerate(chain):
            if block not in self._blocks:
                return position
        return len(chain)


def hit_share(trace: Trace, capacity_blocks: int | None) -> float:
    """Share of all prompt tokens that are hit."""
    cache = IdealCache(capacity_blocks)
    hits = sum(cache.serve(trace.full_blocks(request)) for request in trace.requests)
    return hits * trace.block_tokens / trace.prompt_tokens if trace.requests else 0.0
