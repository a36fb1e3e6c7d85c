"""Prompts that have come since the last tick, to be counted all at once. Pure.

Counting what a prompt begins with takes 70 us, half as long as to decide about it. So it waits for
the next tick, and of many prompts some stand for all: what is hot is hot in any of them.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random

    from .popularity import Popularity
    from .records import InstanceSpec, Request

# More than one process can decide about in a tick of a tenth of a second.
SEEN_MAX = 4096
# Counted of one tick: 1 % of a core.
COUNTED_MAX = 16


class Arrivals:
    """Counts prompts for `popularity`. Not thread-safe."""

    def __init__(self, popularity: Popularity, dice: random.Random) -> None:
        self._popularity = popularity
        self._dice = dice
        self._seen: deque[tuple[Request, InstanceSpec]] = deque(maxlen=SEEN_MAX)

    def came(self, request: Request, prefill: InstanceSpec) -> None:
        """A request was given to an instance."""
        self._seen.append((request, prefill))

    def count(self, now: float) -> None:
        """What they began with, and on which nodes it was wanted."""
        seen = list(self._seen)
        self._seen.clear()
        some = seen if len(seen) <= COUNTED_MAX else self._dice.sample(seen, COUNTED_MAX)
        for request, spec in some:
            weight = len(seen) / len(some)
            shared = self._popularity.seen(
                request.keys, now,
                model=request.model, block_bytes=spec.block_bytes, weight=weight,
            )  # fmt: skip
            if shared and spec.node:
                self._popularity.wanted(request.keys[:shared], spec.node, now, weight=weight)
