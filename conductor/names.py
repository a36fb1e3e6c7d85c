"""Names that come and go: numbers for them, and when they are forgotten. Pure.

Instances, nodes and models have small numbers, so that what is known of them is columns. In a
cluster whose pods have new names every day numbers run out unless they are given again, and whoever
gets one must not look like the one before. A node's name is kept as long as

- an instance is registered on it,
- it has blocks in the index, or a feed speaks of it,
- or a request in flight fetches from it;

all else that is known of a node, its ways to others above all, goes with its name. A name in
others' reports is no reason to keep anything. A model's name is kept as long as an instance has it,
and some that no instance has are, because who asks for those is told to wait and not that there is
no such model.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from .cluster import Cluster
    from .feeds.routed import Holdings
    from .ledger import Ledger
    from .transfers import Transfers

# How often it is looked for names to forget.
SWEEP_S = 10.0
# More names than twice as many as were left the last time, and this, and it is looked at once.
CROWDED_MIN = 1024


class Numbers:
    """Numbers of names, from 0 on, the lowest first. Names are iterated over oldest first."""

    def __init__(self) -> None:
        self._of: dict[str, int] = {}
        self._free: list[int] = []  # a heap

    def __len__(self) -> int:
        return len(self._of)

    def __iter__(self) -> Iterator[str]:
        return iter(self._of)

    def find(self, name: str) -> int | None:
        """The number of a name that has one."""
        return self._of.get(name)

    def give(self, name: str) -> int:
        """The number of a name, given if it has none."""
        number = self._of.get(name)
        if number is None:
            number = heapq.heappop(self._free) if self._free else len(self._of)
            self._of[name] = number
        return number

    def take_back(self, name: str) -> int:
        """The name has no number any more; another one will get it. Raises KeyError."""
        number = self._of.pop(name)
        heapq.heappush(self._free, number)
        return number

    def take_back_all_but(self, kept: Collection[str], busy: Collection[int] = ()) -> list[int]:
        """Take back the numbers of all names but the `kept` ones, and but those that are `busy`.
        Returns them."""
        given = list(self._of.items())
        return [self.take_back(name) for name, n in given if name not in kept and n not in busy]

    def lower(self, name: str) -> tuple[int, int] | None:
        """Give a name the lowest free number instead of its own: (its own, its new one). None if
        that would be higher. Raises KeyError."""
        old = self._of[name]
        if not self._free or self._free[0] > old:
            return None
        new = self._of[name] = heapq.heapreplace(self._free, old)
        return old, new


class Names:
    """Forgets names that nothing refers to. Not thread-safe."""

    def __init__(
        self, cluster: Cluster, holdings: Holdings, transfers: Transfers, ledger: Ledger
    ) -> None:
        self._cluster, self._holdings = cluster, holdings
        self._transfers, self._ledger = transfers, ledger
        self._next_at = float("-inf")
        self._crowded_at = CROWDED_MIN

    def tick(self, now: float) -> None:
        """Let time pass."""
        if now >= self._next_at:
            self._next_at = now + SWEEP_S
            self.sweep()

    def make_room(self) -> None:
        """A new name is coming: forget others, if there are many. However fast they come, there are
        no more than some times as many as are in use."""
        if self._count() >= self._crowded_at:
            self.sweep()

    def sweep(self) -> None:
        """Forget what is not in use. Costs a look at each name and each request in flight."""
        specs = self._cluster.specs
        beside = {spec.node for spec in specs if spec is not None and spec.node}
        followed = self._holdings.forget_idle_nodes(beside)
        fetched_from = {number for flight in self._ledger for number, _ in flight.transfers}
        self._transfers.forget(self._cluster.forget_nodes(beside | followed, fetched_from))
        self._cluster.forget_models()
        self._crowded_at = 2 * self._count() + CROWDED_MIN

    def _count(self) -> int:
        return self._cluster.names_numbered + len(self._holdings.index.numbers())
