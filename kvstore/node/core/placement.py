"""How blocks are placed, promoted, demoted and evicted. Pure: decides, never moves a byte.

I/O for the shell is appended to `actions`, in order: an `Erase` before the `Move` that may
overwrite the same extent. The shell reports the end of each move through `moved`, and of each wipe
through `wiped`.

How a replica is evicted from its tier (`evict`), in this order of preference:

1. the block has a replica in the other tier: drop this one, at once;
2. the replica is in DRAM and NVMe accepts it: demote; its bytes are free when the write has ended;
3. no resident block descends from it: drop the block;
4. otherwise it stays: its descendants must leave first.

The cost of making room. At each step an eviction sweep evicts a candidate or spares it. A sweep
does not examine a spared replica again before its next use, or before it is recalled because the
reason to keep it may be gone: its last child left, the block got a second replica, a copy of it
ended. No event says that NVMe has room again; therefore each sweep, and each victim that leaves,
recalls the replica that was spared first. So a retry that fails again, as for every waiting
request, costs a few steps and not a whole sweep.
"""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING

from ...format.header import BlockState
from ...tiers.base import TierName
from .block_index import ResidentBlocks
from .records import (
    IN_DRAM,
    IN_NVME,
    BlockRecord,
    Erase,
    Move,
    MoveOutcome,
    MovePriority,
    PinLevel,
    Published,
    Removal,
    Replica,
    Wipe,
)
from .sharded_writes import SharedWrites
from .windows import LOOKS_MAX, find_window

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .tier_ledger import TierSpace

# Candidates that one eviction sweep examines in vain, some 2 us each, before it is cut short; the
# next sweep continues where it ended. That many candidates may precede the first that can leave:
# with a policy that does not order chains by their use, such as SIEVE, or where the tail of a long
# chain is being read.
VAIN_LOOKS_MAX = 1024

# The same limit for demotion ahead of need, at every commit. Candidates that it skips are dropped
# without waiting when room is needed, so examining more would not shorten any request's wait.
TRIM_LOOKS_MAX = 64

# One part in this many of a tier leaves, before the next search, if its oldest LOOKS_MAX candidates
# can't open a run: so a run that can be opened is there after some 256 searches of 40 ms, and one
# that can't costs a waiting request's time, not the tier.
CUT_SHARE = 256

# Below this number of blocks, tables are too small (some MiB) to be worth compacting.
COMPACT_BLOCKS_MIN = 65_536


class Residency(ResidentBlocks):
    """The resident blocks, the blocks that are being written, and the I/O ordered to make room."""

    def __init__(
        self, dram: TierSpace, nvme: TierSpace | None, *, demote_on_second_use: bool = False
    ) -> None:
        super().__init__(dram, nvme)
        self.demote_on_second_use = demote_on_second_use
        self.writing: dict[bytes, Replica] = {}
        self.begun_writes = 0  # how many blocks were ever in `writing`
        self.shared = SharedWrites()  # the replicas in `writing` that several ranks write together
        self.published = Published()  # segments of `writing` replicas that followers may read
        self.copies: set[Replica] = set()  # the replicas in `writing` that are copies
        self.actions: list[Erase | Move | Wipe] = []
        self.removed: dict[Replica, Removal] = {}  # NVMe replicas, until their wipes are ordered
        self.removals: dict[Removal, None] = {}  # in-flight removals, in their order
        self._removal_numbers = count()
        self._erased = False  # an extent was erased after the last wipe order: not flushed yet
        self._wipes_fail = False
        self.moves: set[Move] = set()
        # Whether the last attempt to make room in DRAM was cut short, so that a retry may succeed;
        # and the number of sweeps that were cut short.
        self.swept_in_part = False
        self.cut_sweeps = 0
        self._peak_blocks = 0
        # Per tier: (`changes`, length) of the last failed search for a window of that many bytes.
        self._windowless: dict[TierName, tuple[int, int]] = {}

    # -- writing ---------------------------------------------------------------------------------

    def begin_write(
        self, key: bytes, parent: BlockRecord | None, depth: int, length: int, generation: int
    ) -> Replica | None:
        """Reserve a DRAM extent for a new block, or None when no room could be made now.

        The writer holds the replica; the parent counts the block as its child from here on, so that
        making room for a block never drops the block's own ancestors.
        """
        if parent is not None and parent.depth >= depth:
            parent = None  # a client error; walking a cycle of parents would not terminate
        if parent is not None:
            parent.children += 1
        block = BlockRecord(key, parent, depth)
        replica = None
        if self.make_room(self.dram, length):
            replica = self.dram.allocate(block, length, generation)
        if replica is None:
            self._leave_parent(block)
            return None
        replica.holds = 1
        self.writing[key] = replica
        self.begun_writes += 1
        return replica

    def commit_write(self, replica: Replica) -> None:
        """Make a block visible: its writer, or the last of its writers, has finished, and its
        header was checked."""
        block = replica.block
        self.published.pop(replica, None)
        self.copies.discard(replica)
        self.shared.pop(replica, None)  # the shared write's hold is the one that ends below
        del self.writing[block.key]
        self.dram.set_state(replica, BlockState.COMMITTED)
        self._attach(replica)
        self.index[block.key] = block
        self.events.added(block.key)
        self.counters.commits += 1
        self.counters.commit_bytes += replica.length
        self.unhold(replica)

    def cancel_write(self, replica: Replica, *, fenced: bool) -> None:
        """Cancel a write: it will not be committed. Unless the writer is `fenced` (it acknowledged,
        or its process is dead) it may still write, so the extent stays QUARANTINED under its hold.
        If several ranks write a block, one rank's cancel ends it for all of them; each rank is
        fenced separately."""
        if replica.state is BlockState.RESERVED:  # otherwise another rank has cancelled it already
            block = replica.block
            del self.writing[block.key]
            self._leave_parent(block)
            self.dram.set_state(replica, BlockState.QUARANTINED)
            self.counters.aborts += 1
            self.published.pop(replica, None)
            self.copies.discard(replica)
            if self.shared.pop(replica, None) is not None:
                self.unhold(replica)
        if fenced:
            self.unhold(replica)

    # -- making room -----------------------------------------------------------------------------

    def make_room(
        self, space: TierSpace, length: int, priority: MovePriority = MovePriority.DEMOTE_NOW
    ) -> bool:
        """Evict until `length` bytes can be allocated in `space`; True if they can right now.

        After False a retry may succeed: demotions of `space.evicting_bytes` to NVMe may be in
        flight.
        """
        length = space.arena.round_up(length)
        arena = space.arena
        if length > arena.capacity_bytes:
            return False
        if space is self.dram:
            self.swept_in_part = False
        while not arena.fits(length):
            # In-flight demotions will free enough: do not evict again for each waiting request.
            if space.evicting_bytes and arena.free_bytes + space.evicting_bytes >= length:
                return False
            # If enough bytes are free, but not in one run, neighbours have to leave.
            make = self._evict_some if arena.free_bytes < length else self._open_window
            if not make(space, length, priority):
                return False
        return True

    def _evict_some(self, space: TierSpace, length: int, priority: MovePriority) -> bool:
        """Evict in policy order until `length` bytes are free or being demoted; True if any block
        left, or began to. Spares candidates that cannot leave."""
        evicted, vain_looks = False, 0
        space.recall_oldest()
        while (victim := space.next_victim()) is not None:
            if self.evict(victim, priority):
                evicted = True
                if space.arena.free_bytes + space.evicting_bytes >= length:
                    break
                space.recall_oldest()
                continue
            space.spare(victim)
            vain_looks += 1
            if vain_looks == VAIN_LOOKS_MAX:
                self._cut_short()
                break
        return evicted

    def _cut_short(self) -> None:
        """Note that making room was cut short here, so that a retry may succeed."""
        self.swept_in_part = True
        self.cut_sweeps += 1

    def _open_window(self, space: TierSpace, length: int, priority: MovePriority) -> bool:
        """Evict neighbouring extents, so that one run of `length` bytes becomes free; False if no
        such eviction is possible."""
        changes = self.dram.changes + (self.nvme.changes if self.nvme is not None else 0)
        changes_then, length_then = self._windowless.get(space.tier, (-1, 0))
        if changes == changes_then and length >= length_then:
            return False  # nothing has changed since the last search failed
        left = 0
        for survives in (self._survives, self._has_twin):
            chosen = find_window(space, length, survives)
            stayed = [replica for replica in chosen if not self.evict(replica, priority)]
            left += len(chosen) - len(stayed)
            if not stayed:
                break
            # NVMe has no room for a block with descendants: they have to be dropped with it.
        if left:
            self.counters.window_evictions += 1
            return True
        if space.candidate_count > LOOKS_MAX:
            # There may be a window among younger blocks. Evict in policy order instead, which opens
            # a run in the end, but not much at a time: it may also be in vain.
            cut_sweeps = self.cut_sweeps
            more = max(length, space.arena.capacity_bytes // CUT_SHARE)
            if self._evict_some(space, space.arena.free_bytes + more, priority):
                self._cut_short()
            if self.cut_sweeps > cut_sweeps:
                return False
        self._windowless[space.tier] = changes, length
        return False

    def trim(self, high_watermark: float, low_watermark: float) -> None:
        """If DRAM use is above `high_watermark`, start enough demotions to reach `low_watermark`.

        Only with a writable NVMe tier: dropping blocks before a request needs the room would only
        lose hits. Examines the next few victims; those that it may not demote keep their place in
        the eviction order.
        """
        space, capacity = self.dram, self.dram.arena.capacity_bytes
        leaving = space.used_bytes - space.evicting_bytes
        if self.nvme is None or not self.nvme.writable or leaving <= high_watermark * capacity:
            return
        kept: list[Replica] = []
        while (victim := space.next_victim(again=not kept)) is not None:
            goes = victim.block.nvme is not None or self._admitted(victim.block)
            if not (goes and self.evict(victim, MovePriority.DEMOTE_AHEAD, may_drop=False)):
                kept.append(victim)
                # `goes`: NVMe has no room now; the next commit retries.
                if goes or len(kept) == TRIM_LOOKS_MAX:
                    break
            if space.used_bytes - space.evicting_bytes <= low_watermark * capacity:
                break
        space.put_back(kept)

    # -- leaving ---------------------------------------------------------------------------------

    def evict(self, replica: Replica, priority: MovePriority, *, may_drop: bool = True) -> bool:
        """Evict this replica (the cases are listed in the module docstring); False if it stays."""
        leaves = self._evict(replica, priority, may_drop)
        if leaves:
            self.space(replica.tier).policy.left(replica)
        return leaves

    def _evict(self, replica: Replica, priority: MovePriority, may_drop: bool) -> bool:
        block = replica.block
        if replica.holds:
            return self._demote_written_back(replica, priority)
        if self._has_twin(replica):
            self.retire(replica)
            self.counters.evictions += 1
            return True
        if self._survives(replica) and self._demote(replica, priority):
            return True
        return may_drop and self._drop_leaf(block)

    def _demote_written_back(self, replica: Replica, priority: MovePriority) -> bool:
        """Turn a write-back into a demotion: a held candidate is being written back, and leaves
        DRAM when that has ended."""
        move = replica.block.move
        if move is None or move.source is not replica or replica.holds > 1:
            return False
        move.priority = priority
        self.actions.append(move)  # submitted again: it may be queued behind others of its old rank
        self._begin_to_leave(replica)
        return True

    def _begin_to_leave(self, source: Replica) -> None:
        self.dram.withdraw(source)
        self.dram.set_state(source, BlockState.EVICTING)

    def _drop_leaf(self, block: BlockRecord) -> bool:
        if block.children:
            return False
        self.drop(block)
        self.counters.evictions += 1
        return True

    def _survives(self, replica: Replica) -> bool:
        """Whether the block stays in the node if this replica is evicted and NVMe has room."""
        in_dram = replica.tier is TierName.DRAM
        return self._has_twin(replica) or (in_dram and self._demotable(replica.block))

    def _has_twin(self, replica: Replica) -> bool:
        """Whether the block has a replica in the other tier too."""
        block = replica.block
        return (block.nvme if replica.tier is TierName.DRAM else block.dram) is not None

    def _demotable(self, block: BlockRecord) -> bool:
        if self.nvme is None or not self.nvme.writable:
            return False
        # A block that cannot be dropped, as it has resident descendants, is demoted regardless of
        # the admission rule: without it no request could match the descendants.
        return self._admitted(block) or block.children > 0

    def _admitted(self, block: BlockRecord) -> bool:
        return not self.demote_on_second_use or block.uses > 1

    def _demote(self, source: Replica, priority: MovePriority) -> bool:
        target = self._place_in_nvme(source)
        if target is None:
            return False
        self._begin_to_leave(source)
        source.holds += 1
        self._start(Move(source.block, source, target, priority))
        # Write back the ancestors too: after a crash of the node, no request could match a block
        # whose ancestors were in DRAM alone.
        ancestor = source.block.parent
        while ancestor is not None and self.write_back(ancestor):
            ancestor = ancestor.parent
        return True

    def write_back(self, block: BlockRecord) -> bool:
        """Start to copy a block that is only in DRAM to NVMe; False if no copy was started."""
        source = block.dram
        if source is None or block.nvme is not None or block.move is not None:
            return False
        if self.nvme is None or not self.nvme.writable:
            return False
        # Held, but still in the eviction order: a copy does not count as a use.
        source.holds += 1
        target = self._place_in_nvme(source)
        if target is None:
            self._unhold_untouched(source)
            return False
        self._start(Move(block, source, target, MovePriority.WRITE_BACK))
        return True

    def _place_in_nvme(self, source: Replica) -> Replica | None:
        assert self.nvme is not None
        if not self.make_room(self.nvme, source.length):
            return None
        return self.nvme.allocate(source.block, source.length, source.generation)

    def _free(self, replica: Replica) -> None:
        removal = self.removed.pop(replica, None)
        if removal is not None:
            replica.holds = 1  # its extent is not reused before the wipe
            self._order_wipe(Wipe(removal, replica))
            return
        super()._free(replica)
        if replica.tier is TierName.NVME:
            self.actions.append(Erase(replica.offset, replica.length))
            self._erased = True

    def remove(self, blocks: Sequence[BlockRecord]) -> Removal:
        """Remove blocks; the removal is durable once it `has_ended`. Readers that hold a lease can
        still read the bytes."""
        removal = Removal(next(self._removal_numbers), len(blocks), failed=self._wipes_fail)
        for block in blocks:
            target = block.move.target if block.move is not None else None
            for replica in (block.nvme, target):
                if replica is not None and replica.tier is TierName.NVME:
                    self.removed[replica] = removal
                    removal.pending += 1
            self.drop(block)
        if self._erased and not removal.pending:
            # These blocks may have been evicted from NVMe before, which erases without a flush.
            removal.pending = 1
            self._order_wipe(Wipe(removal, None))
        if removal.pending:
            self.removals[removal] = None
        self.counters.removals += removal.blocks
        return removal

    def _order_wipe(self, wipe: Wipe) -> None:
        self.actions.append(wipe)
        self._erased = False

    def has_ended(self, removal: Removal) -> bool:
        """Whether a removal has ended, as durable as the disk permits, and all earlier removals
        too: these may still be wiping blocks that this one no longer found."""
        first = next(iter(self.removals), None)
        return first is None or removal.number < first.number

    def wiped(self, wipes: Sequence[Wipe], *, failed: bool) -> None:
        """Record that wipes have ended, and free their extents."""
        if failed:
            self.erasing_failed()
        for removal, replica in wipes:
            removal.failed = self._wipes_fail
            removal.pending -= 1
            if not removal.pending:
                del self.removals[removal]
            if replica is not None:
                replica.holds = 0
                super()._free(replica)

    def erasing_failed(self) -> None:
        """Record that the disk refused a wipe or an erase. The NVMe tier takes no more blocks, and
        later wipes count as failed even if the disk reports success, because a successful flush
        does not repair an earlier failed one."""
        assert self.nvme is not None
        self.nvme.writable = False
        self._wipes_fail = True

    # -- moving ----------------------------------------------------------------------------------

    def promote(self, block: BlockRecord) -> Move | None:
        """Start to promote an NVMe block into DRAM, or return the block's in-flight move. None if
        DRAM has no room."""
        if block.move is not None:
            return block.move
        source = block.nvme
        assert source is not None
        self.hold(source)
        target = None
        if self.make_room(self.dram, source.length):
            target = self.dram.allocate(block, source.length, source.generation)
        if target is None:
            self.unhold(source)
            return None
        move = Move(block, source, target, MovePriority.PROMOTE)
        self._start(move)
        return move

    def _start(self, move: Move) -> None:
        move.target.holds += 1
        move.block.move = move
        self.moves.add(move)
        self.actions.append(move)

    def moved(self, move: Move, outcome: MoveOutcome) -> None:
        """Record that a move has ended; the caller then settles `move.tickets`."""
        self.moves.discard(move)
        block, source, target = move.block, move.source, move.target
        block.move = None
        if outcome is not MoveOutcome.DONE or move.cancelled:
            self._undo(move, outcome)
            return
        self.space(target.tier).set_state(target, BlockState.COMMITTED)
        tier = block.tier
        self._attach(target)
        self._tell_tier(block, tier)
        self.unhold(target)
        if target.tier is TierName.DRAM:
            self.counters.promotions += 1
        elif move.keeps_source:
            self.counters.write_backs += 1
        else:
            self.counters.demotions += 1
        if not move.keeps_source:
            self._settle_source(source)
        elif target.tier is TierName.DRAM:
            self.unhold(source)
        else:
            self._unhold_untouched(source)

    def _settle_source(self, source: Replica) -> None:
        """End a demotion whose write succeeded: its DRAM replica leaves, unless a reader holds it
        by now or the block is hard pinned."""
        self.dram.set_state(source, BlockState.COMMITTED)
        if source.holds == 1 and source.block.pin is not PinLevel.HARD:
            source.holds = 0
            self.retire(source)
            self.counters.evictions += 1
        else:
            self.unhold(source)

    def _undo(self, move: Move, outcome: MoveOutcome) -> None:
        block, source, target = move.block, move.source, move.target
        self.space(target.tier).set_state(target, BlockState.QUARANTINED)
        self.unhold(target)
        if outcome is MoveOutcome.WRITE_FAILED and target.tier is TierName.NVME:
            self.space(target.tier).writable = False
        if outcome is MoveOutcome.CORRUPT:
            self.counters.corrupt += 1
        elif outcome is not MoveOutcome.DONE:
            self.counters.medium_errors += 1
        if source.state is BlockState.EVICTING:
            self.dram.set_state(source, BlockState.COMMITTED)
        bad_source = outcome in (MoveOutcome.CORRUPT, MoveOutcome.READ_FAILED)
        if bad_source and source in block.replicas():
            self.retire(source)
        self._unhold_untouched(source)

    # -- memory ----------------------------------------------------------------------------------

    def compact(self) -> None:
        """Release unused memory of tables that were much larger once: a dict never shrinks itself.

        O(blocks), when three quarters of at least COMPACT_BLOCKS_MIN blocks have gone.
        """
        blocks = len(self.index)
        self._peak_blocks = max(self._peak_blocks, blocks)
        if self._peak_blocks < COMPACT_BLOCKS_MIN or blocks > self._peak_blocks // 4:
            return
        entries = list(self.index.items())
        self.index.clear()
        self.index.update(entries)
        for space in (self.dram, self.nvme):
            if space is not None:
                space.policy.compact()
        self._peak_blocks = blocks

    # -- checking --------------------------------------------------------------------------------

    def check(self) -> None:
        """Assert every invariant of the index, the chains and both ledgers. O(blocks)."""
        spaces = [self.dram] + ([self.nvme] if self.nvme is not None else [])
        for space in spaces:
            space.check()
            for replica in space.candidates():
                assert replica in replica.block.replicas(), replica
        for replica in self.shared:
            assert self.writing.get(replica.key) is replica, replica
            assert replica.holds > 0, replica
        for replica in (*self.published, *self.copies):
            assert self.writing.get(replica.key) is replica, replica
        assert all(replica.holds > 0 for replica in self.removed), self.removed
        children: dict[int, int] = {}
        for block in [*self.index.values(), *(r.block for r in self.writing.values())]:
            if block.parent is not None:
                children[id(block.parent)] = children.get(id(block.parent), 0) + 1
        for key, block in self.index.items():
            assert block.key == key
            assert block.where, block
            assert bool(block.where & IN_DRAM) == (block.dram is not None)
            assert bool(block.where & IN_NVME) == (block.nvme is not None)
            assert block.children == children.get(id(block), 0), block
            for replica in block.replicas():
                self._check_replica(replica)

    def _check_replica(self, replica: Replica) -> None:
        space = self.space(replica.tier)
        candidate = replica in space
        move = replica.block.move
        if move is None or move.priority is not MovePriority.WRITE_BACK:
            assert candidate == (replica.holds == 0 and replica.block.pin is not PinLevel.HARD), (
                replica
            )
        assert replica.state in (BlockState.COMMITTED, BlockState.EVICTING), replica
