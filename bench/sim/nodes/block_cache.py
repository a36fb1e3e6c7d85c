"""A node's memory for blocks, with the store's own order of eviction."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tiffin.kvstore.memory.eviction import LRU

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tiffin.kvstore.memory.eviction import EvictionPolicy


class CachedBlock:
    """A block that is there; see `Evictable`."""

    __slots__ = ("depth", "key", "visits")

    def __init__(self, key: bytes, depth: int) -> None:
        self.key, self.depth, self.visits = key, depth, 0


class BlockCache:
    """Blocks by key, at most `capacity_blocks`. The head of a chain counts as used last. `order`:
    one of the store's policies of eviction, LRU by default."""

    def __init__(
        self, capacity_blocks: int, order: EvictionPolicy[CachedBlock] | None = None
    ) -> None:
        self.capacity_blocks = capacity_blocks
        self._blocks: dict[bytes, CachedBlock] = {}
        # Not `or`: a policy without candidates is false.
        self._order: EvictionPolicy[CachedBlock] = LRU() if order is None else order

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, key: bytes) -> bool:
        return key in self._blocks

    @property
    def keys(self) -> list[bytes]:
        """All keys, heads of chains first."""
        return [one.key for one in sorted(self._blocks.values(), key=lambda one: one.depth)]

    def clear(self) -> list[bytes]:
        """Forget all blocks; returns their keys."""
        keys = self.keys
        for block in self._blocks.values():
            self._order.discard(block)
        self._blocks.clear()
        return keys

    def match(self, keys: Sequence[bytes]) -> int:
        """How many leading blocks of a prompt are there."""
        return next((at for at, key in enumerate(keys) if key not in self._blocks), len(keys))

    def use(self, keys: Sequence[bytes]) -> None:
        """A prompt's leading blocks, which are there, are read."""
        for key in reversed(keys):
            self._order.add(self._blocks[key])

    def put(self, keys: Sequence[bytes]) -> tuple[list[bytes], list[bytes]]:
        """Store a prompt's leading blocks. Returns the keys of new ones and of evicted ones."""
        kept = keys[: self.capacity_blocks]
        added = [key for key in kept if key not in self._blocks]
        for depth, key in enumerate(kept):
            self._blocks.setdefault(key, CachedBlock(key, depth))
        self.use(kept)
        removed = []
        while len(self._blocks) > self.capacity_blocks:
            victim = self._order.pop()
            assert victim is not None, "all blocks are candidates"
            self._order.left(victim)
            del self._blocks[victim.key]
            removed.append(victim.key)
        return added, removed
