"""Buffer of the requests that arrived since the last tick, counted together at the tick. Pure.

Counting the prefix of one prompt takes 70 us, half as long as the placement decision for it. So
counting is deferred to the next tick, and a random sample stands for a large number of prompts: a
hot prefix is hot in any sample.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from ..state.sliced_work import finished
from .popularity import Group

if TYPE_CHECKING:
    import random

    from ..records import InstanceSpec, Request
    from ..state.sliced_work import Work
    from .popularity import Popularity

# More requests than one process can place within a tick of a tenth of a second.
SEEN_MAX = 4096
# Requests that are counted per tick: 1 % of a core.
COUNTED_MAX = 16


class ArrivalBuffer:
    """Counts prompts for `popularity`. Not thread-safe."""

    def __init__(self, popularity: Popularity, dice: random.Random) -> None:
        self._popularity = popularity
        self._dice = dice
        self._seen: deque[tuple[Request, InstanceSpec]] = deque(maxlen=SEEN_MAX)
        self._counting = False

    def came(self, request: Request, prefill: InstanceSpec) -> None:
        """Buffer a request that the conductor assigned to a prefill instance."""
        self._seen.append((request, prefill))

    def count(self, now: float) -> None:
        """See `counting`, which does this in pieces."""
        finished(self.counting(now))

    def counting(self, now: float) -> Work[None]:
        """Add the buffered requests to `popularity`: their prefixes, and the demand per node. While
        that is going on, another one leaves further requests for the next time."""
        if not self._counting:
            self._counting = True
            try:
                yield from self._count(now)
            finally:
                self._counting = False

    def _count(self, now: float) -> Work[None]:
        seen = list(self._seen)
        self._seen.clear()
        some = seen if len(seen) <= COUNTED_MAX else self._dice.sample(seen, COUNTED_MAX)
        for request, spec in some:
            weight = len(seen) / len(some)
            yield from self._popularity.making_room(len(request.keys), now)
            shared = self._popularity.seen(
                request.keys, now,
                group=Group(request.model, request.key_space),
                block_bytes=spec.block_bytes, weight=weight,
            )  # fmt: skip
            if shared and spec.node:
                self._popularity.wanted(request.keys[:shared], spec.node, now, weight=weight)
            yield
