"""What a client knows of its ways to nodes: speed, latency, health, and the budget for hedging.

The averages are the messenger's (`LinkStatistics`); here is what a pool adds to them: which node
they belong to, when it is left alone, and how often something may be asked for twice.
"""

from __future__ import annotations

import math
import threading
import time
from typing import Any

from tiffin.messenger.links import LinkStatistics

from .plan import LATE_S

# A node that failed is not asked for this long, doubled at each failure in a row: long enough to
# not pay for it with every get, short enough to be back soon after a restart.
DOWN_MIN_S = 0.5
DOWN_MAX_S = 10.0
_DOUBLINGS_MAX = 16

# Hedged reads that may happen in a row although the share would not allow them: the first sick node
# is met before any share was saved up.
HEDGES_SAVED_MAX = 10.0


class _Way:
    """The way to one node."""

    __slots__ = ("down_until", "failures_in_a_row", "late", "statistics")

    def __init__(self) -> None:
        self.statistics = LinkStatistics("tcp")
        self.failures_in_a_row = 0
        self.down_until = -math.inf
        self.late = False  # it was given up in haste, and may be well


# Of a node that was not asked for anything yet.
_UNKNOWN = LinkStatistics("tcp")


class Links:
    """Statistics per node number; `seconds` is what plans are made with. Thread-safe."""

    def __init__(self, hedge_share: float = 0.1) -> None:
        self._ways: dict[int, _Way] = {}
        self._lock = threading.Lock()
        self._hedge_share = hedge_share
        self._hedges_left = HEDGES_SAVED_MAX if hedge_share else 0.0

    def seconds(self, node: int, nbytes: int, now: float | None = None) -> float:
        """How long a read should take. See `Costs.seconds`."""
        way = self._ways.get(node)
        if way is None:
            return _UNKNOWN.predicted_s(nbytes)
        if way.failures_in_a_row and (time.monotonic() if now is None else now) < way.down_until:
            return LATE_S + way.statistics.predicted_s(nbytes) if way.late else math.inf
        return way.statistics.predicted_s(nbytes)

    def down(self, now: float) -> set[int]:
        """The nodes that are left alone: they are taken for dead, or were given up."""
        with self._lock:
            return {node for node, way in self._ways.items() if now < way.down_until}

    def moved(self, node: int, nbytes: int, seconds: float) -> None:
        """A read has succeeded."""
        with self._lock:
            self._well(node).statistics.observe(nbytes, seconds)
            self._hedges_left = min(HEDGES_SAVED_MAX, self._hedges_left + self._hedge_share)

    def answered(self, node: int) -> None:
        """A message was answered. How long that took says little: it may have waited for room."""
        with self._lock:
            self._well(node)

    def failed(self, node: int, now: float, *, late: bool = False) -> None:
        """The node, or the way to it, did not answer; `late`: not in the little time that it had
        while another could be asked."""
        with self._lock:
            way = self._way(node)
            way.statistics.errors += 1
            down_s = min(DOWN_MAX_S, DOWN_MIN_S * 2**way.failures_in_a_row)
            way.failures_in_a_row = min(way.failures_in_a_row + 1, _DOUBLINGS_MAX)
            way.down_until = now + down_s
            way.late = late

    def may_hedge(self) -> bool:
        """Whether the budget allows asking a second replica before the first had its time."""
        return self._hedges_left >= 1.0

    def hedged(self) -> None:
        """A second replica is being asked."""
        with self._lock:
            self._hedges_left = max(0.0, self._hedges_left - 1.0)

    def keep(self, nodes: set[int]) -> None:
        """Forget nodes that are not in the pool any more: their numbers never come back."""
        with self._lock:
            self._ways = {node: way for node, way in self._ways.items() if node in nodes}

    def statistics(self) -> dict[int, dict[str, Any]]:
        """Plain numbers per node."""
        now = time.monotonic()
        with self._lock:
            return {
                node: {**way.statistics.as_dict(), "up": now >= way.down_until}
                for node, way in self._ways.items()
            }

    def _way(self, node: int) -> _Way:
        way = self._ways.get(node)
        if way is None:
            way = self._ways[node] = _Way()
        return way

    def _well(self, node: int) -> _Way:
        way = self._way(node)
        way.failures_in_a_row = 0
        way.down_until = -math.inf
        return way
