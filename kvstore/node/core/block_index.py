"""The index of resident blocks: their tiers, their hold counts and their parents. Pure.

The bookkeeping under `placement.py`, which decides on placement and eviction. Nothing here makes
room or orders I/O from the shell.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...format.header import BlockState
from ...tiers.base import TierName
from .event_log import EventLog
from .records import IN_DRAM, IN_NVME, BlockRecord, Counters, PinLevel, Replica

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .tier_ledger import TierSpace

_COMMITTED = BlockState.COMMITTED  # see `tier_ledger.py`

# 2,048 ancestors are a million tokens: 0.5 ms.
ANCESTORS_MAX = 2048


class ResidentBlocks:
    """The index of resident blocks over one DRAM tier and, optionally, one NVMe tier."""

    def __init__(self, dram: TierSpace, nvme: TierSpace | None) -> None:
        self.dram = dram
        self.nvme = nvme
        self.index: dict[bytes, BlockRecord] = {}
        self.pins: dict[bytes, float] = {}  # end time by key; removed together with the block
        self.counters = Counters()
        self.events = EventLog()  # every change of `index` and of tiers, for its subscribers

    def space(self, tier: TierName) -> TierSpace:
        """The arena, ledger and eviction order of a tier."""
        if tier is TierName.DRAM:
            return self.dram
        assert self.nvme is not None
        return self.nvme

    # -- holding ---------------------------------------------------------------------------------

    def hold(self, replica: Replica) -> None:
        """Add a hold on the extent: until `unhold` it can't be evicted, nor its bytes be reused."""
        self.space(replica.tier).withdraw(replica)
        replica.holds += 1

    def unhold(self, replica: Replica) -> None:
        """Remove a hold. The last `unhold` of a QUARANTINED extent frees it."""
        assert replica.holds > 0, replica
        replica.holds -= 1
        if replica.holds:
            return
        if replica.state is BlockState.QUARANTINED:
            self._free(replica)
        elif replica.state is BlockState.COMMITTED:
            self.space(replica.tier).offer(replica)

    def _unhold_untouched(self, replica: Replica) -> None:
        """`unhold` after a write-back or a failed move: the replica keeps its place in the
        eviction order."""
        space = self.space(replica.tier)
        if replica.holds == 1 and replica in space:
            replica.holds = 0
            space.recall(replica)
        else:
            self.unhold(replica)

    def hold_all(self, replicas: Sequence[Replica]) -> None:
        """`hold` each of one lease's DRAM replicas: the hot path of every get."""
        for replica in replicas:
            replica.holds += 1
        self.dram.withdraw_all(replicas)

    def unhold_all(self, replicas: Sequence[Replica]) -> None:
        """`unhold` each of one lease's DRAM replicas, the tail of the chain first: eviction
        policies see its head as used last."""
        offered = []
        for replica in reversed(replicas):
            if replica.holds == 1 and replica.state is _COMMITTED:
                replica.holds = 0
                offered.append(replica)
            else:
                self.unhold(replica)
        self.dram.offer_all(offered)

    def touch(self, block: BlockRecord) -> None:
        """Record a use of the block without a lease."""
        for replica in block.replicas():
            if replica.holds == 0 and block.pin is PinLevel.NONE:
                self.space(replica.tier).policy.touch(replica)

    def touch_ancestors(self, block: BlockRecord) -> None:
        """Record a use of the block's ancestors: a use of a block is also a use of its prefix, so
        no ancestor may look older to the eviction policy.

        A no-op for a call that began at its prompt's first block, as nearly all calls do. Stops
        after ANCESTORS_MAX, so that reading a very long chain slice by slice stays linear.
        """
        ancestor = block.parent
        for _ in range(ANCESTORS_MAX):
            if ancestor is None:
                break
            self.touch(ancestor)
            ancestor = ancestor.parent

    def relink(self, block: BlockRecord, parent: BlockRecord) -> None:
        """Set the parent of `block`, perhaps to a record that is newer than the block: this rejoins
        a chain whose head was lost and stored again."""
        if block.parent is parent or parent.depth >= block.depth:
            return
        self._leave_parent(block)
        block.parent = parent
        parent.children += 1

    def _leave_parent(self, block: BlockRecord) -> None:
        """Unlink `block` from its parent; a parent without children may be evicted."""
        parent, block.parent = block.parent, None
        if parent is not None:
            parent.children -= 1
            if not parent.children:
                self._reconsider(parent)

    def _reconsider(self, block: BlockRecord) -> None:
        """Recall the block's spared replicas: the reason to keep them may be gone."""
        for replica in block.replicas():
            self.space(replica.tier).recall(replica)

    # -- a restart -------------------------------------------------------------------------------

    def adopt(self, key: bytes, offset: int, length: int, generation: int) -> None:
        """Add a block that a restarted node found on NVMe, and does not have again; `link` sets the
        parents afterwards."""
        assert self.nvme is not None
        block = BlockRecord(key, None, 0)
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
        adopted = [self.index[key] for key in parents]
        for block in adopted:
            parent = self.index.get(parents[block.key])
            if parent is not None and parent is not block:
                block.parent = parent
                parent.children += 1
        self._number(adopted)
        for block in sorted(adopted, key=lambda b: -b.depth):
            assert block.nvme is not None
            self.nvme.offer(block.nvme)

    def _number(self, adopted: list[BlockRecord]) -> None:
        """Set the depth of these blocks; walks each chain once."""
        unnumbered = set(adopted)
        for block in adopted:
            path: list[BlockRecord] = []
            seen: BlockRecord | None = block
            # Ends at a cycle of parents too, which only a forged slab could hold.
            while seen is not None and seen in unnumbered:
                unnumbered.remove(seen)
                path.append(seen)
                seen = seen.parent
            cycle = seen is not None and seen in path
            depth = 0 if seen is None or cycle else seen.depth + 1
            for member in reversed(path):
                member.depth = depth
                depth += 1
        for block in adopted:
            # Only in a cycle is a parent not above its child: break the cycle there.
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
        self._reconsider(block)  # a replica whose block has a second one may be evicted

    def _tell_tier(self, block: BlockRecord, before: int) -> None:
        """Log an event if reads of an indexed block are now served from another tier."""
        tier = block.tier
        if tier and tier != before and self.index.get(block.key) is block:
            self.events.moved(block.key, tier)

    def drop(self, block: BlockRecord) -> None:
        """Remove a block from the node: from the index at once; its extents are freed when their
        last hold ends."""
        if block.move is not None:
            block.move.cancelled = True
        for replica in block.replicas():
            self._detach(replica)
        self._forget(block)

    def retire(self, replica: Replica) -> None:
        """Remove this replica from its tier, and the block from the node if it was the last one."""
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

    def _forget(self, block: BlockRecord) -> None:
        if self.index.get(block.key) is block:
            del self.index[block.key]
            self.events.removed(block.key)
            self.pins.pop(block.key, None)
        self._leave_parent(block)

    def _free(self, replica: Replica) -> None:
        """Free the extent of a dropped replica without holds."""
        self.space(replica.tier).free(replica)
