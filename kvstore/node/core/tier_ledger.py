"""The core's accounts of one tier: its extents, their states, and the eviction order.

The ledger is the conservation law of the design, kept as four counters:

    free + reserved + committed + quarantined == capacity

`free` is the arena's; the other three move with `Replica.state`, in `_enter` and `_leave` and
nowhere else, so that `check()` can hold at every quiet moment. EVICTING counts as committed: its
bytes are still readable.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

from ...format.header import BlockState
from ...memory.eviction import LRU
from .records import BlockRecord, PinLevel, Replica

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ...memory.arena import Arena
    from ...memory.eviction import EvictionPolicy
    from ...tiers.base import TierName

# Looking up an enum member in its class costs 0.08 us, which is measurable once per block.
_UNPINNED = PinLevel.NONE

_LEDGER = {
    BlockState.RESERVED: "reserved",
    BlockState.COMMITTED: "committed",
    BlockState.EVICTING: "committed",
    BlockState.QUARANTINED: "quarantined",
}


@dataclass(frozen=True, slots=True)
class SpaceStatistics:
    """Bytes and blocks of one tier; `free + reserved + committed + quarantined == capacity`."""

    capacity_bytes: int
    free_bytes: int
    reserved_bytes: int
    committed_bytes: int
    quarantined_bytes: int
    largest_free_bytes: int
    evicting_bytes: int
    blocks: int


class TierSpace:
    """The arena, the ledger and the eviction order of one tier."""

    def __init__(self, tier: TierName, arena: Arena, policy: EvictionPolicy[Replica]) -> None:
        self.tier = tier
        self.arena = arena
        self.policy = policy
        self.soft: LRU[Replica] = LRU()
        self.bytes_in = {"reserved": 0, "committed": 0, "quarantined": 0}
        self.evicting_bytes = 0
        self.blocks = 0
        self.writable = True
        # Counts events that may make room where there was none: extents freed, candidates offered.
        self.changes = 0

    # -- extents ---------------------------------------------------------------------------------

    def allocate(self, block: BlockRecord, length: int, generation: int) -> Replica | None:
        """A RESERVED replica of `length` bytes (rounded up to the granule), or None."""
        length = self.arena.round_up(length)
        offset = self.arena.allocate(length)
        if offset is None:
            return None
        replica = Replica(block, self.tier, offset, length, generation)
        self._enter(replica)
        return replica

    def adopt(self, replica: Replica) -> None:
        """Claim an extent that a restarted node found; raises if it overlaps another."""
        self.arena.claim(replica.offset, replica.length)
        self._enter(replica)

    def set_state(self, replica: Replica, state: BlockState) -> None:
        """Move a replica to another state, and its bytes to that state's account."""
        self._leave(replica)
        replica.state = state
        self._enter(replica)

    def free(self, replica: Replica) -> None:
        """Return the extent to the arena. The replica must have no holds."""
        assert replica.holds == 0, replica
        self.withdraw(replica)
        self._leave(replica)
        self.arena.free(replica.offset, replica.length)
        self.changes += 1

    def _enter(self, replica: Replica) -> None:
        self.bytes_in[_LEDGER[replica.state]] += replica.length
        if replica.state is BlockState.EVICTING:
            self.evicting_bytes += replica.length
        self.blocks += replica.state in (BlockState.COMMITTED, BlockState.EVICTING)

    def _leave(self, replica: Replica) -> None:
        self.bytes_in[_LEDGER[replica.state]] -= replica.length
        if replica.state is BlockState.EVICTING:
            self.evicting_bytes -= replica.length
        self.blocks -= replica.state in (BlockState.COMMITTED, BlockState.EVICTING)

    # -- eviction order --------------------------------------------------------------------------

    def __contains__(self, replica: Replica) -> bool:
        """Whether the replica is an eviction candidate; spared candidates count too."""
        return replica in self.policy or replica in self.soft

    @property
    def candidate_count(self) -> int:
        """The number of eviction candidates, spared ones included."""
        return len(self.policy) + len(self.soft)

    def _order(self, replica: Replica) -> EvictionPolicy[Replica]:
        return self.soft if replica.block.pin is PinLevel.SOFT else self.policy

    def offer(self, replica: Replica) -> None:
        """Make an unheld, committed replica a candidate for eviction (the newest)."""
        if replica.block.pin is not PinLevel.HARD:
            self._order(replica).add(replica)
            self.changes += 1

    def withdraw(self, replica: Replica) -> None:
        """Remove a candidate: the replica is held, hard pinned or gone."""
        self._order(replica).discard(replica)

    def offer_all(self, replicas: Sequence[Replica]) -> None:
        """`offer` each, in order: the blocks of one lease at once."""
        unpinned = [replica for replica in replicas if replica.block.pin is _UNPINNED]
        self.policy.add_all(unpinned)
        self.changes += 1
        if len(unpinned) < len(replicas):
            for replica in replicas:
                if replica.block.pin is not _UNPINNED:
                    self.offer(replica)

    def withdraw_all(self, replicas: Sequence[Replica]) -> None:
        """`withdraw` each."""
        self.policy.discard_all(replicas)
        if self.soft:
            self.soft.discard_all(replicas)

    def next_victim(self, *, again: bool = True) -> Replica | None:
        """Remove and return the candidate to evict next; soft pins come last. None if all
        candidates are spared. `again`: see `EvictionPolicy.pop`.

        The caller evicts it or returns it: with `spare`, or with `put_back` at the end of its
        search.
        """
        victim = self.policy.pop(again=again)
        return self.soft.pop(again=again) if victim is None else victim

    def candidates(self) -> Iterator[Replica]:
        """Iterate over all candidates in eviction order, soft pins last; see
        `EvictionPolicy.__iter__`."""
        return chain(self.policy, self.soft)

    def spare(self, replica: Replica) -> None:
        """Set aside a victim that cannot be evicted now: it is no victim again before `recall` or
        its next use."""
        self._order(replica).spare(replica)

    def put_back(self, victims: Sequence[Replica]) -> None:
        """Return victims that were not evicted, in the order of `next_victim`: they are next
        again."""
        for replica in reversed(victims):
            self._order(replica).put_back(replica)

    def recall(self, replica: Replica) -> None:
        """Make a spared replica a victim again: the reason to keep it may be gone."""
        self._order(replica).recall(replica)
        self.changes += 1

    def recall_oldest(self) -> None:
        """`recall` the replica that was spared first: not every reason to keep a block announces
        its end."""
        self.policy.recall_oldest()
        self.soft.recall_oldest()

    # -- looking ---------------------------------------------------------------------------------

    @property
    def used_bytes(self) -> int:
        """Bytes that are not free."""
        return self.arena.used_bytes

    def statistics(self) -> SpaceStatistics:
        """A snapshot of the counters."""
        return SpaceStatistics(
            capacity_bytes=self.arena.capacity_bytes,
            free_bytes=self.arena.free_bytes,
            reserved_bytes=self.bytes_in["reserved"],
            committed_bytes=self.bytes_in["committed"],
            quarantined_bytes=self.bytes_in["quarantined"],
            largest_free_bytes=self.arena.largest_free_bytes,
            evicting_bytes=self.evicting_bytes,
            blocks=self.blocks,
        )

    def check(self) -> None:
        """Assert the conservation law and the arena's own invariants."""
        self.arena.check()
        accounted = self.arena.free_bytes + sum(self.bytes_in.values())
        assert accounted == self.arena.capacity_bytes, (self.tier, self.bytes_in, accounted)
        assert all(count >= 0 for count in self.bytes_in.values()), self.bytes_in
        assert 0 <= self.evicting_bytes <= self.bytes_in["committed"]
