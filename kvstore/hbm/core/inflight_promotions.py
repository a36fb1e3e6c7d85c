"""In-flight promotions: which blocks callers are fetching from the pool. Pure; part of
`LockedCore`, used under its lock.

A prefix that all requests of a burst share is fetched once: the others wait for the first. And a
block that a client removes during its promotion must not be published at the end.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


@dataclass(eq=False, slots=True)
class InflightPromotion:
    """Blocks that one caller is promoting; `removed` are those removed in the meantime."""

    keys: frozenset[bytes]
    removed: set[bytes] = field(default_factory=set)


class InflightPromotions:
    """All promotions in flight."""

    def __init__(self) -> None:
        self._open: set[InflightPromotion] = set()
        self._callers: Counter[bytes] = Counter()  # promotions in flight per key; never zero

    def unclaimed(self, keys: Sequence[bytes]) -> int:
        """Count the leading `keys` that no caller is promoting."""
        return next((i for i, key in enumerate(keys) if key in self._callers), len(keys))

    def begin(self, keys: Iterable[bytes]) -> InflightPromotion:
        """Register a promotion of `keys`, whether or not other callers promote them too."""
        arrival = InflightPromotion(frozenset(keys))
        self._open.add(arrival)
        self._callers.update(arrival.keys)
        return arrival

    def end(self, arrival: InflightPromotion) -> None:
        """Unregister a promotion that has succeeded or failed."""
        self._open.remove(arrival)
        for key in arrival.keys:
            self._callers[key] -= 1
            if not self._callers[key]:
                del self._callers[key]

    def remove(self, keys: Iterable[bytes]) -> None:
        """Mark `keys` as removed in all promotions in flight."""
        gone = frozenset(keys)
        for arrival in self._open:
            arrival.removed |= arrival.keys & gone
