"""Which blocks this node has, in which tiers, who holds them, what they descend from. Pure.

The books of `residency.py`, which decides who comes and who leaves. Nothing here looks for room or
orders anything of the shell.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..block import BlockState
from ..tiers.base import TierName
from .events import EventLog
from .records import IN_DRAM, IN_NVME, Block, Counters, Pin, Replica

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .space import TierSpace

_COMMITTED = BlockState.COMMITTED  # see `space.py`

# 2,048 ancestors are a million tokens: 0.5 ms.
ANCESTORS_MAX = 2048


class ResidentBlocks:
    """The index of resident blocks over one DRAM tier and, optionally, one NVMe tier."""

    def __init__(self, dram: TierSpace, nvme: TierSpace | None) -> None:
        self.dram = dram
        self.nvme = nvme
        self.index: dict[bytes, Block] = {}
        self.pins: dict[bytes, float] = {}  # until when; an entry leaves with its block
        self.counters = Counters()
        self.events = EventLog()  # every change of `index` and of tiers, for followers

    def space(self, tier: TierName) -> TierSpace:
        """The tier's bytes."""
        if tier is TierName.DRAM:
            return self.dram
        assert self.nvme is not None
        return self.nvme

    # -- holding ---------------------------------------------------------------------------------

    def hold(self, replica: Replica) -> None:
        """One more user of the extent: it can't be evicted, nor its bytes be used again."""
        self.space(replica.tier).withdraw(replica)
        replica.holds += 1

    def unhold(self, replica: Replica) -> None:
        """One user less; the last one out of an unwanted extent frees it."""
        assert replica.holds > 0, replica
        replica.holds -= 1
        if replica.holds:
            return
        if replica.state is BlockState.QUARANTINED:
            self._free(replica)
        elif replica.state is BlockState.COMMITTED:
            self.space(replica.tier).offer(replica)

    def _unhold_untouched(self, replica: Replica) -> None:
        """`unhold` after a write-back: the replica keeps its place in the eviction order."""
        space = self.space(replica.tier)
        if replica.holds == 1 and (replica in space.policy or replica in space.soft):
            replica.holds = 0
        else:
            self.unhold(replica)

    def hold_all(self, replicas: Sequence[Replica]) -> None:
        """`hold` each of one lease's DRAM replicas: the hot path of every get."""
        for replica in replicas:
            replica.holds += 1
        self.dram.withdraw_all(replicas)

    def unhold_all(self, replicas: Sequence[Replica]) -> None:
        """`unhold` each of one lease's DRAM replicas, the tail of the chain first: the policies
        see its head as used last."""
        offered = []
        for replica in reversed(replicas):
            if replica.holds == 1 and replica.state is _COMMITTED:
                replica.holds = 0
                offered.append(replica)
            else:
                self.unhold(replica)
        self.dram.offer_all(offered)

    def touch(self, block: Block) -> None:
        """The block was wanted again, without a lease."""
        for replica in block.replicas():
            if replica.holds == 0 and block.pin is Pin.NONE:
                self.space(replica.tier).policy.touch(replica)

    def touch_ancestors(self, block: Block) -> None:
        """Whoever uses a block has used what comes before it: none of it may look older.

        Nothing to do for a call that began at its prompt's first block, which is nearly every one.
        Stops after ANCESTORS_MAX, so that reading a very long chain slice by slice stays linear.
        """
        ancestor = block.parent
        for _ in range(ANCESTORS_MAX):
            if ancestor is None:
                break
            self.touch(ancestor)
            ancestor = ancestor.parent

    def relink(self, block: Block, parent: Block) -> None:
        """`block` descends from `parent`, perhaps from an object that came after it did: a chain
        whose head was lost and put again is one chain again."""
        if block.parent is parent or parent.depth >= block.depth:
            return
        if block.parent is not None:
            block.parent.children -= 1
        block.parent = parent
        parent.children += 1

    # -- a restart -------------------------------------------------------------------------------

    def adopt(self, key: bytes, offset: int, length: int, generation: int) -> None:
        """A block that an NVMe restart found; `link` sets the parents afterwards."""
        assert self.nvme is not None
        block = Block(key, None, 0)
        replica = Replica(block, TierName.NVME, offset, length, generation)
        self.nvme.adopt(replica)
        self.nvme.set_state(replica, BlockState.COMMITTED)
        self._attach(replica)
        self.index[key] = block
        self.events.added(key, IN_NVME)

    def link(self, parents: dict[bytes, bytes]) -> None:
        """Restore the chains after `adopt`: `parents` maps each adopted key to its parent's key.

        Deeper blocks are offered to eviction first, as if a reader had touched each chain from its
        tail to its head.
        """
        assert self.nvme is not None
        for key, parent_key in parents.items():
            parent = self.index.get(parent_key)
            if parent is not None and parent_key != key:
                self.index[key].parent = parent
                parent.children += 1
        self._number()
        for block in sorted(self.index.values(), key=lambda b: -b.depth):
            if block.nvme is not None:
                self.nvme.offer(block.nvme)

    def _number(self) -> None:
        """Set every block's depth, each chain walked once."""
        depths: dict[Block, int] = {}
        for block in self.index.values():
            path: list[Block] = []
            seen: Block | None = block
            # The second bound ends a cycle of parents, which only a forged slab could hold.
            while seen is not None and seen not in depths and len(path) <= len(self.index):
                path.append(seen)
                seen = seen.parent
            depth = depths[seen] + 1 if seen is not None and seen in depths else 0
            for member in reversed(path):
                member.depth = depths[member] = depth
                depth += 1
        for block in self.index.values():
            # Only a cycle has a parent that is not above its child: break it there.
            if block.parent is not None and block.parent.depth >= block.depth:
                block.parent.children -= 1
                block.parent = None

    # -- replicas --------------------------------------------------------------------------------

    def _attach(self, replica: Replica) -> None:
        block = replica.block
        if replica.tier is TierName.DRAM:
            block.dram = replica
            block.where |= IN_DRAM
        else:
            block.nvme = replica
            block.where |= IN_NVME

    def _tell_tier(self, block: Block, before: int) -> None:
        """Followers learn it when a block that can be found is read from another tier now."""
        tier = block.tier
        if tier and tier != before and self.index.get(block.key) is block:
            self.events.moved(block.key, tier)

    def drop(self, block: Block) -> None:
        """The block leaves the node: out of the index at once, its bytes when nobody holds them."""
        if block.move is not None:
            block.move.cancelled = True
        for replica in block.replicas():
            self._detach(replica)
        self._forget(block)

    def retire(self, replica: Replica) -> None:
        """This replica leaves its tier; the block leaves the node if it was the last one."""
        block, tier = replica.block, replica.block.tier
        self._detach(replica)
        if not block.where and block.move is None:
            self._forget(block)
        else:
            self._tell_tier(block, tier)

    def _detach(self, replica: Replica) -> None:
        block = replica.block
        if replica.tier is TierName.DRAM:
            block.dram = None
            block.where &= ~IN_DRAM
        else:
            block.nvme = None
            block.where &= ~IN_NVME
        space = self.space(replica.tier)
        space.withdraw(replica)
        space.set_state(replica, BlockState.QUARANTINED)
        if replica.holds == 0:
            self._free(replica)

    def _forget(self, block: Block) -> None:
        if self.index.get(block.key) is block:
            del self.index[block.key]
            self.events.removed(block.key)
            self.pins.pop(block.key, None)
        if block.parent is not None:
            block.parent.children -= 1
            block.parent = None

    def _free(self, replica: Replica) -> None:
        """Nobody holds the extent of this unwanted replica any more."""
        self.space(replica.tier).free(replica)
