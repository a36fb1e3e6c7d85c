"""How blocks come, move between the tiers and leave. Pure: decides, never moves a byte.

What must be done by the shell is appended to `actions`, in order: an `Erase` before the `Move` that
may write over the same extent. The shell reports each move's end through `moved`.

How a replica leaves its tier (`evict`), in this order of preference:

1. it has a copy in the other tier: drop this one, at once;
2. it is in DRAM and NVMe takes it: demote, and the bytes are free when the write has ended;
3. no resident block descends from it: drop the block;
4. otherwise it stays: its descendants must leave first.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from ..block import BlockState
from ..tiers.base import TierName
from .following import Published
from .records import IN_DRAM, IN_NVME, Block, Erase, Move, MoveOutcome, Pin, Priority, Replica
from .resident import ResidentBlocks
from .shared import SharedWrites

if TYPE_CHECKING:
    from .space import TierSpace

# How many blocks a window may choose from: enough for a run of any block size, at 0.5 us each.
WINDOW_CANDIDATES = 4096

# Below this, tables are too small (some MiB) to be worth a look.
COMPACT_BLOCKS_MIN = 65_536


class Residency(ResidentBlocks):
    """The resident blocks, those that are being written, and what is ordered to make room."""

    def __init__(
        self, dram: TierSpace, nvme: TierSpace | None, *, demote_on_second_use: bool = False
    ) -> None:
        super().__init__(dram, nvme)
        self.demote_on_second_use = demote_on_second_use
        self.writing: dict[bytes, Replica] = {}
        self.shared = SharedWrites()  # those of `writing` that several ranks write together
        self.published = Published()  # what followers may read of those of `writing`
        self.actions: list[Erase | Move] = []
        self.moves: set[Move] = set()
        self._peak_blocks = 0

    # -- writing ---------------------------------------------------------------------------------

    def begin_write(
        self, key: bytes, parent: Block | None, depth: int, length: int, generation: int
    ) -> Replica | None:
        """Reserve a DRAM extent for a new block, or None when no room could be made now.

        The writer holds the replica; the parent counts the block as its child from here on, so that
        making room for a block never drops the block's own ancestors.
        """
        if parent is not None and parent.depth >= depth:
            parent = None  # a client's mistake; a cycle of parents would have no end
        if parent is not None:
            parent.children += 1
        block = Block(key, parent, depth)
        replica = None
        if self.make_room(self.dram, length):
            replica = self.dram.allocate(block, length, generation)
        if replica is None:
            if parent is not None:
                parent.children -= 1
            return None
        replica.holds = 1
        self.writing[key] = replica
        return replica

    def commit_write(self, replica: Replica) -> None:
        """The writer is done, or the last of its writers, and its header was checked: the block
        becomes visible."""
        block = replica.block
        self.published.pop(replica, None)
        self.shared.pop(replica, None)  # its hold is the one that ends below
        del self.writing[block.key]
        self.dram.set_state(replica, BlockState.COMMITTED)
        self._attach(replica)
        self.index[block.key] = block
        self.events.added(block.key)
        self.counters.commits += 1
        self.counters.commit_bytes += replica.length
        self.unhold(replica)

    def cancel_write(self, replica: Replica, *, fenced: bool) -> None:
        """The write will not be committed. Unless the writer is `fenced` (it acknowledged, or its
        process is dead) it may still write, so the extent stays QUARANTINED under its hold. One
        rank of several cancels the block for all of them; each is fenced on its own."""
        if replica.state is BlockState.RESERVED:  # else another rank was first
            block = replica.block
            del self.writing[block.key]
            if block.parent is not None:
                block.parent.children -= 1
            self.dram.set_state(replica, BlockState.QUARANTINED)
            self.counters.aborts += 1
            self.published.pop(replica, None)
            if self.shared.pop(replica, None) is not None:
                self.unhold(replica)
        if fenced:
            self.unhold(replica)

    # -- making room -----------------------------------------------------------------------------

    def make_room(
        self, space: TierSpace, length: int, priority: Priority = Priority.DEMOTE_NOW
    ) -> bool:
        """True when `length` bytes can be allocated in `space` right now.

        False does not mean never: `space.evicting_bytes` may be on their way to NVMe.
        """
        length = space.arena.round_up(length)
        arena = space.arena
        if length > arena.capacity_bytes:
            return False
        while not arena.fits(length):
            # What is on its way out already is not ordered twice by everyone who waits for it.
            if space.evicting_bytes and arena.free_bytes + space.evicting_bytes >= length:
                return False
            if arena.free_bytes >= length:
                # Enough bytes, but in no single run: more of the same would not help.
                return self._open_window(space, length, priority) and arena.fits(length)
            if not self._evict_some(space, length, priority):
                return False
        return True

    def _evict_some(self, space: TierSpace, length: int, priority: Priority) -> bool:
        """Evict in policy order until `length` bytes are free or on their way, at most one pass;
        True if any block left, or began to."""
        spared: list[Replica] = []
        evicted = False
        for victim in space.victims():
            if not self.evict(victim, priority):
                spared.append(victim)
                continue
            evicted = True
            if space.arena.free_bytes + space.evicting_bytes >= length:
                break
        # Before anything else is evicted: a block that is spared must not be freed meanwhile.
        space.spare(spared)
        return evicted

    def _open_window(self, space: TierSpace, length: int, priority: Priority) -> bool:
        """Evict neighbours, so that one run of `length` bytes appears; False if none can."""
        # In eviction order: only the next few to leave pay for a hole.
        leaving = filter(self._may_leave, space.candidates())
        chosen = space.window(list(islice(leaving, WINDOW_CANDIDATES)), length)
        self.counters.window_evictions += bool(chosen)
        for replica in chosen:
            space.withdraw(replica)
            if not self.evict(replica, priority):
                space.offer(replica)
        return bool(chosen)

    def trim(self, high_watermark: float, low_watermark: float) -> None:
        """Start demotions when DRAM is fuller than `high_watermark`, enough to reach the low one.

        Only with an NVMe tier that takes them: dropping blocks before someone needs the room would
        only lose hits.
        """
        space, capacity = self.dram, self.dram.arena.capacity_bytes
        leaving = space.used_bytes - space.evicting_bytes
        if self.nvme is None or not self.nvme.writable or leaving <= high_watermark * capacity:
            return
        spared = []
        for victim in space.victims():
            if not self.evict(victim, Priority.DEMOTE_AHEAD, may_drop=False):
                spared.append(victim)
            if space.used_bytes - space.evicting_bytes <= low_watermark * capacity:
                break
        space.spare(spared)

    # -- leaving ---------------------------------------------------------------------------------

    def evict(self, replica: Replica, priority: Priority, *, may_drop: bool = True) -> bool:
        """Make this replica leave (the cases are on top of this file); False if it stays."""
        block = replica.block
        if replica.holds:
            return self._demote_written_back(replica, priority)
        in_dram = replica.tier is TierName.DRAM
        if (block.nvme if in_dram else block.dram) is not None:
            self.retire(replica)
            self.counters.evictions += 1
            return True
        if in_dram and self._demotable(block) and self._demote(replica, priority):
            return True
        return may_drop and self._drop_leaf(block)

    def _demote_written_back(self, replica: Replica, priority: Priority) -> bool:
        """A candidate that is held is being written back: let it leave when that has ended."""
        move = replica.block.move
        if move is None or move.source is not replica or replica.holds > 1:
            return False
        move.priority = priority
        self.actions.append(move)  # again: it may wait behind others of the old priority
        self.dram.set_state(replica, BlockState.EVICTING)
        return True

    def _drop_leaf(self, block: Block) -> bool:
        if block.children:
            return False
        self.drop(block)
        self.counters.evictions += 1
        return True

    def _may_leave(self, replica: Replica) -> bool:
        block = replica.block
        if replica.holds or block.pin is Pin.HARD:
            return False
        if replica.tier is TierName.DRAM:
            return block.nvme is not None or self._demotable(block) or not block.children
        return block.dram is not None or not block.children

    def _demotable(self, block: Block) -> bool:
        if self.nvme is None or not self.nvme.writable:
            return False
        # A block whose descendants are resident goes along whatever the admission rule says:
        # without it they could never be matched.
        return not self.demote_on_second_use or block.uses > 1 or block.children > 0

    def _demote(self, source: Replica, priority: Priority) -> bool:
        target = self._place_in_nvme(source)
        if target is None:
            return False
        self.dram.set_state(source, BlockState.EVICTING)
        source.holds += 1
        self._start(Move(source.block, source, target, priority))
        # A chain is worth its disk only from its head on: after a crash of the node, blocks whose
        # ancestors were in DRAM alone could never be matched.
        ancestor = source.block.parent
        while ancestor is not None and self.write_back(ancestor):
            ancestor = ancestor.parent
        return True

    def write_back(self, block: Block) -> bool:
        """Begin to copy a block that is only in DRAM to NVMe; False if there is nothing to do."""
        source = block.dram
        if source is None or block.nvme is not None or block.move is not None:
            return False
        if self.nvme is None or not self.nvme.writable:
            return False
        # Held without leaving the eviction order: being copied is not being used.
        source.holds += 1
        target = self._place_in_nvme(source)
        if target is None:
            self._unhold_untouched(source)
            return False
        self._start(Move(block, source, target, Priority.WRITE_BACK))
        return True

    def _place_in_nvme(self, source: Replica) -> Replica | None:
        assert self.nvme is not None
        if not self.make_room(self.nvme, source.length):
            return None
        return self.nvme.allocate(source.block, source.length, source.generation)

    def _free(self, replica: Replica) -> None:
        super()._free(replica)
        if replica.tier is TierName.NVME:
            self.actions.append(Erase(replica.offset, replica.length))

    # -- moving ----------------------------------------------------------------------------------

    def promote(self, block: Block) -> Move | None:
        """Begin to bring an NVMe block into DRAM, or join the move that already does."""
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
        move = Move(block, source, target, Priority.PROMOTE)
        self._start(move)
        return move

    def _start(self, move: Move) -> None:
        move.target.holds += 1
        move.block.move = move
        self.moves.add(move)
        self.actions.append(move)

    def moved(self, move: Move, outcome: MoveOutcome) -> None:
        """A move has ended; the caller then settles `move.tickets`."""
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
        """A demotion was written: its DRAM replica leaves, unless a reader came in the meantime."""
        self.dram.set_state(source, BlockState.COMMITTED)
        if source.holds == 1 and source.block.pin is not Pin.HARD:
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
        """Give back what tables of a much larger past still take: a dict never shrinks by itself.

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
        assert all(self.writing.get(replica.key) is replica for replica in self.published)
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
        candidate = replica in space.policy or replica in space.soft
        move = replica.block.move
        if move is None or move.priority is not Priority.WRITE_BACK:
            assert candidate == (replica.holds == 0 and replica.block.pin is not Pin.HARD), replica
        assert replica.state in (BlockState.COMMITTED, BlockState.EVICTING), replica
