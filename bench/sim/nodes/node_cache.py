"""What one prefill instance and its node keep of blocks: HBM, DRAM and NVMe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tiffin.kvstore.memory.eviction import make_policy

from .block_cache import BlockCache

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

TIERS = ("hbm", "dram", "nvme")


@dataclass(frozen=True, slots=True)
class TierChange:
    """Keys that a tier has since then, or no longer."""

    tier: str
    added: list[bytes]
    removed: list[bytes]


class NodeCache:
    """Blocks by tier; a capacity of 0 is no tier. A block is stored in HBM and DRAM at once, as an
    engine's connector does, each with an order of eviction of its own; what DRAM evicts goes to
    NVMe. Without `write_through` it is stored in HBM alone, and in DRAM by `save`. `policy`: the
    name of one of the store's. `changed` is told each change."""

    def __init__(
        self,
        *,
        hbm_blocks: int = 0,
        dram_blocks: int = 0,
        nvme_blocks: int = 0,
        write_through: bool = True,
        policy: str = "lru",
        changed: Callable[[TierChange], None] = lambda change: None,
    ) -> None:
        self._changed, self._write_through = changed, write_through
        self._hbm, self._dram, self._nvme = (
            BlockCache(blocks, make_policy(policy))
            for blocks in (hbm_blocks, dram_blocks, nvme_blocks)
        )

    @property
    def capacity_blocks(self) -> int:
        """Of memory."""
        return self._dram.capacity_blocks

    @property
    def free_blocks(self) -> int:
        """Of memory."""
        return self._dram.capacity_blocks - len(self._dram)

    def match(self, keys: Sequence[bytes]) -> int:
        """How many leading blocks of a prompt are in any tier."""
        return sum(self.by_tier(keys))

    def by_tier(self, keys: Sequence[bytes]) -> tuple[int, int, int]:
        """The same, by tier: each block counts at the fastest one that has it."""
        hbm = self._hbm.match(keys)
        if not self._nvme.capacity_blocks:
            return hbm, max(self._dram.match(keys) - hbm, 0), 0
        dram = nvme = 0
        for key in keys[hbm:]:
            if key in self._dram:
                dram += 1
            elif key in self._nvme:
                nvme += 1
            else:
                break
        return hbm, dram, nvme

    def put(self, keys: Sequence[bytes]) -> None:
        """Store a prompt's leading blocks, or use those that are there."""
        if not keys:
            return
        if self._hbm.capacity_blocks:
            self._tell("hbm", *self._hbm.put(keys))
        if self._write_through:
            self._put_dram(keys)

    def only_in_hbm(self) -> list[bytes]:
        """Keys of the blocks that are in no other tier, heads of chains first."""
        return [key for key in self._hbm.keys if key not in self._dram and key not in self._nvme]

    def save(self) -> None:
        """Store as many of them in DRAM as it has room for."""
        self._put_dram(self.only_in_hbm()[: self.free_blocks])

    def clear_hbm(self) -> None:
        """Forget what is in HBM."""
        self._tell("hbm", [], self._hbm.clear())

    def __contains__(self, key: bytes) -> bool:
        return any(key in tier for tier in (self._hbm, self._dram, self._nvme))

    def _put_dram(self, keys: Sequence[bytes]) -> None:
        added, evicted = self._dram.put(keys)
        self._tell("dram", added, evicted)
        if self._nvme.capacity_blocks and evicted:
            # The tail of a chain is evicted first, and the store wants its head first.
            self._tell("nvme", *self._nvme.put(evicted[::-1]))

    def _tell(self, tier: str, added: list[bytes], removed: list[bytes]) -> None:
        if added or removed:
            self._changed(TierChange(tier, added, removed))
