"""Small numbers for names, and garbage collection of names that are no longer in use. Pure.

Instances, nodes and models have small numbers, so that their state can be kept in columns. In a
cluster whose pods have new names every day numbers would run out, so they are reused; a reused
number must not carry state of its earlier name. A node's name is kept as long as

- an instance is registered on it,
- it has blocks in the index, or an event feed follows it,
- or something is in flight from it or to it;

all other state of a node, above all its links to other nodes, is dropped with its name. That other
nodes report links to a name does not keep it. A model's name is kept as long as an instance serves
it. Some models without instances are kept too: a request for one of them is rejected with a retry
time, instead of as an unknown model.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from ..core.transfer_bookings import TransferBookings
    from ..cost.transfer_model import TransferModel
    from ..events.routed_blocks import Holdings
    from .instance_table import Cluster

# Seconds between sweeps for unused names.
SWEEP_S = 10.0
# A sweep runs at once when there are more names than twice those left by the last sweep, plus this.
CROWDED_MIN = 1024


class IdAllocator:
    """Allocates numbers to names, the lowest free one first, from 0 on. Iteration yields the names,
    oldest first."""

    def __init__(self) -> None:
        self._of: dict[str, int] = {}
        self._free: list[int] = []  # a heap

    def __len__(self) -> int:
        return len(self._of)

    def __iter__(self) -> Iterator[str]:
        return iter(self._of)

    def find(self, name: str) -> int | None:
        """The number of a name, or None."""
        return self._of.get(name)

    def give(self, name: str) -> int:
        """The number of a name, allocated if it has none."""
        number = self._of.get(name)
        if number is None:
            number = heapq.heappop(self._free) if self._free else len(self._of)
            self._of[name] = number
        return number

    def take_back(self, name: str) -> int:
        """Free the number of a name for reuse. Returns it. Raises KeyError."""
        number = self._of.pop(name)
        heapq.heappush(self._free, number)
        return number

    def take_back_all_but(self, kept: Collection[str], busy: Collection[int] = ()) -> list[int]:
        """Free the numbers of all names, except the names in `kept` and the numbers in `busy`.
        Returns the freed numbers."""
        given = list(self._of.items())
        return [self.take_back(name) for name, n in given if name not in kept and n not in busy]

    def lower(self, name: str) -> tuple[int, int] | None:
        """Give a name the lowest free number instead of its own. Returns (old number, new number),
        or None if no lower number is free. Raises KeyError."""
        old = self._of[name]
        if not self._free or self._free[0] > old:
            return None
        new = self._of[name] = heapq.heapreplace(self._free, old)
        return old, new


class Names:
    """Garbage collection: forgets names that are not in use. Not thread-safe."""

    def __init__(
        self,
        cluster: Cluster,
        holdings: Holdings,
        transfers: TransferModel,
        bookings: TransferBookings,
    ) -> None:
        self._cluster, self._holdings = cluster, holdings
        self._transfers, self._bookings = transfers, bookings
        self._next_at = float("-inf")
        self._crowded_at = CROWDED_MIN

    def tick(self, now: float) -> None:
        """Advance time: sweep every `SWEEP_S` seconds."""
        if now >= self._next_at:
            self._next_at = now + SWEEP_S
            self.sweep()

    def make_room(self) -> None:
        """Sweep before a new name is added, if there are many. So the number of names stays within
        a small multiple of those in use, however fast new names arrive."""
        if self._count() >= self._crowded_at:
            self.sweep()

    def sweep(self) -> None:
        """Forget the names that are not in use. Visits each name and each booked transfer."""
        specs = self._cluster.specs
        beside = {spec.host for spec in specs if spec is not None}
        followed = self._holdings.forget_idle_nodes(beside)
        freed = self._cluster.forget_nodes(beside | followed, self._bookings.nodes())
        self._transfers.forget(freed)
        self._cluster.forget_models()
        self._crowded_at = 2 * self._count() + CROWDED_MIN

    def _count(self) -> int:
        return self._cluster.names_numbered + len(self._holdings.index.numbers())
