"""One tier's bytes as the core sees them: where they are, what state they are in, who may leave.

The ledger is the conservation law of the design, kept as four counters:

    free + reserved + committed + quarantined == capacity

`free` is the arena's; the other three move with `Replica.state`, in `_enter` and `_leave` and
nowhere else, so that `check()` can hold at every quiet moment. EVICTING counts as committed: its
bytes are still readable.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

from ..arena import cheapest_window
from ..block import BlockState
from .records import Block, Pin, Replica

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from ..arena import Arena
    from ..eviction import EvictionPolicy
    from ..tiers.base import TierName

# Members of an enum cost 0.08 us to look up in their class, which shows where it is done per block.
_UNPINNED = Pin.NONE

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
        self.soft: OrderedDict[Replica, None] = OrderedDict()
        self.bytes_in = {"reserved": 0, "committed": 0, "quarantined": 0}
        self.evicting_bytes = 0
        self.blocks = 0
        self.writable = True

    # -- extents ---------------------------------------------------------------------------------

    def allocate(self, block: Block, length: int, generation: int) -> Replica | None:
        """A RESERVED replica of `length` bytes (rounded up to the granule), or None."""
        length = self.arena.round_up(length)
        offset = self.arena.allocate(length)
        if offset is None:
            return None
        replica = Replica(block, self.tier, offset, length, generation)
        self._enter(replica)
        return replica

    def adopt(self, replica: Replica) -> None:
        """Take an extent that a restart found; raises if it overlaps another."""
        self.arena.claim(replica.offset, replica.length)
        self._enter(replica)

    def set_state(self, replica: Replica, state: BlockState) -> None:
        """Move a replica to another state, and its bytes to that state's account."""
        self._leave(replica)
        replica.state = state
        self._enter(replica)

    def free(self, replica: Replica) -> None:
        """Give the extent back. The caller has made sure that nobody holds it."""
        assert replica.holds == 0, replica
        self.withdraw(replica)
        self._leave(replica)
        self.arena.free(replica.offset, replica.length)

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

    def offer(self, replica: Replica) -> None:
        """Make an unheld, committed replica a candidate for eviction (its newest)."""
        pin = replica.block.pin
        if pin is Pin.NONE:
            self.policy.add(replica)
        elif pin is Pin.SOFT:
            self.soft[replica] = None

    def withdraw(self, replica: Replica) -> None:
        """It is held, hard pinned or gone: no candidate any more."""
        if replica.block.pin is Pin.SOFT:
            self.soft.pop(replica, None)
        else:
            self.policy.discard(replica)

    def offer_all(self, replicas: Sequence[Replica]) -> None:
        """`offer` each, in order: the blocks of one lease at once."""
        unpinned = [replica for replica in replicas if replica.block.pin is _UNPINNED]
        self.policy.add_all(unpinned)
        if len(unpinned) < len(replicas):
            for replica in replicas:
                if replica.block.pin is not _UNPINNED:
                    self.offer(replica)

    def withdraw_all(self, replicas: Sequence[Replica]) -> None:
        """`withdraw` each."""
        self.policy.discard_all(replicas)
        if self.soft:
            for replica in replicas:
                self.soft.pop(replica, None)

    def victims(self) -> Iterator[Replica]:
        """Candidates in eviction order, each removed as it is given; soft pins come last.

        The caller evicts it or gives it back with `spare`. Ends after one pass over what was there
        at the start, so that sparing everything terminates.
        """
        for _ in range(len(self.policy)):
            replica = self.policy.pop()
            if replica is None:
                break
            yield replica
        for _ in range(len(self.soft)):
            yield self.soft.popitem(last=False)[0]

    def candidates(self) -> Iterator[Replica]:
        """All candidates, roughly in eviction order, soft pins last; they stay where they are."""
        return chain(self.policy, self.soft)

    def spare(self, replicas: Iterable[Replica]) -> None:
        """Put back victims that could not leave now (they still have descendants)."""
        for replica in replicas:
            if replica.block.pin is Pin.SOFT:
                self.soft[replica] = None
            else:
                self.policy.spare(replica)

    def window(self, candidates: list[Replica], need_bytes: int) -> list[Replica]:
        """The candidates whose leaving opens one run of `need_bytes` at the fewest bytes evicted.

        Called only when eviction in policy order freed enough bytes but no run was long enough:
        O(n log n) in the candidates.
        """
        chosen = cheapest_window(
            list(self.arena.free_runs), [(r.offset, r.length) for r in candidates], need_bytes
        )
        return [candidates[i] for i in chosen]

    # -- looking ---------------------------------------------------------------------------------

    @property
    def used_bytes(self) -> int:
        """Everything that is not free."""
        return self.arena.used_bytes

    def statistics(self) -> SpaceStatistics:
        """Counters of this moment."""
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
