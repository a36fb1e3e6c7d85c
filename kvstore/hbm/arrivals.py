"""Who is bringing which blocks up from the pool. Pure; belongs to the desk, under its lock.

A prefix that every request of a burst has is fetched once: the others wait for the first. And what
is removed while it is on its way must not be published when it comes.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


@dataclass(eq=False, slots=True)
class Arrival:
    """Blocks that one caller brings; `removed` are those that somebody removed meanwhile."""

    keys: frozenset[bytes]
    removed: set[bytes] = field(default_factory=set)


class Arrivals:
    """All that are under way."""

    def __init__(self) -> None:
        self._open: set[Arrival] = set()
        self._callers: Counter[bytes] = Counter()  # of each key; none is zero

    def unclaimed(self, keys: Sequence[bytes]) -> int:
        """How many leading ones of `keys` nobody brings."""
        return next((i for i, key in enumerate(keys) if key in self._callers), len(keys))

    def begin(self, keys: Iterable[bytes]) -> Arrival:
        """Somebody brings these from now on, whoever else does."""
        arrival = Arrival(frozenset(keys))
        self._open.add(arrival)
        self._callers.update(arrival.keys)
        return arrival

    def end(self, arrival: Arrival) -> None:
        """They came, or will not come."""
        self._open.remove(arrival)
        for key in arrival.keys:
            self._callers[key] -= 1
            if not self._callers[key]:
                del self._callers[key]

    def remove(self, keys: Iterable[bytes]) -> None:
        """What is on its way of these is not wanted any more."""
        gone = frozenset(keys)
        for arrival in self._open:
            arrival.removed |= arrival.keys & gone
