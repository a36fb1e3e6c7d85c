"""The leases under which an engine loads blocks of its own host: the scheduler side takes them, and
keeps each until all workers have read the blocks. Pure but for the release of a lease."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ...client.blocks.block_places import BlockPlaces, RegionId
    from ...client.verbs.leased_blocks import LeasedBlocks
    from .orders import LoadOrder

# How long a lease waits for the engine to have pages for its request. Leased blocks can't be
# evicted; without a lease a load takes its own.
HOLD_S = 2.0


class HeldBlocks(NamedTuple):
    """Blocks under a lease, and where they lie."""

    leased: LeasedBlocks
    places: BlockPlaces


class HeldLeases:
    """All leases of one engine, whose loads `ranks` workers report. Used by one thread."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._waiting: dict[str, tuple[HeldBlocks, float]] = {}  # by request, and until when
        self._loading: dict[int, tuple[HeldBlocks, int]] = {}  # by load, and workers at it
        self._mapped: Counter[RegionId] = Counter()  # how many workers can read it
        self._region: RegionId | None = None  # where the last lease was

    def readable(self) -> bool:
        """Whether there is memory that all workers can read."""
        return any(count >= self._ranks for count in self._mapped.values())

    @property
    def held_bytes(self) -> int:
        """Bytes of all blocks under leases."""
        return sum(len(held.places) * held.places.block_bytes for held in self._every())

    def keep(self, request_id: str, held: HeldBlocks, now: float) -> bool:
        """Keep a request's lease until its load is ordered. False, and the lease is released, if
        some worker can't read the memory."""
        self._region = held.places.region
        if self._mapped[self._region] < self._ranks:
            held.leased.release()
            return False
        self.drop(request_id)
        self._waiting[request_id] = held, now + HOLD_S
        return True

    def drop(self, request_id: str) -> None:
        """Release a request's lease, unless its load is ordered."""
        held, _ = self._waiting.pop(request_id, (None, 0.0))
        if held is not None:
            held.leased.release()

    def ordered(self, loads: Iterable[LoadOrder]) -> None:
        """Keep the leases of these loads until all workers have ended them."""
        for load in loads:
            if load.held is not None:
                held, _ = self._waiting.pop(load.request_id)
                self._loading[load.number] = held, self._ranks

    def ended(self, loads: Mapping[int, int]) -> None:
        """So many workers have ended these loads."""
        for number, workers in loads.items():
            held, left = self._loading.pop(number)
            if left > workers:
                self._loading[number] = held, left - workers
            else:
                held.leased.release()

    def mapped(self, regions: Mapping[RegionId, int]) -> None:
        """So many workers more can read this memory."""
        self._mapped.update(regions)

    def expire(self, now: float) -> list[str]:
        """Release the leases that have waited too long; returns their requests."""
        late = [request_id for request_id, (_, until) in self._waiting.items() if now >= until]
        for request_id in late:
            self.drop(request_id)
        return late

    def leave_regions(self) -> list[RegionId]:
        """Memory in which no block is held, and none will be: leases come from other memory now.
        Each is returned once."""
        left = [region for region in self._mapped if region != self._region]
        if self._region is None or not left:  # as in nearly every step
            return []
        used = {held.places.region for held in self._every()}
        left = [region for region in left if region not in used]
        for region in left:
            del self._mapped[region]
        return left

    def close(self) -> None:
        """Release all leases."""
        for held in self._every():
            held.leased.release()
        self._waiting.clear()
        self._loading.clear()

    def _every(self) -> list[HeldBlocks]:
        return [held for held, _ in (*self._waiting.values(), *self._loading.values())]
