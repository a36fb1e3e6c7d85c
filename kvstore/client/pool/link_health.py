"""A client's statistics of its links to nodes: speed, latency, health, and the budget for hedging.

The messenger computes the averages (`LinkStatistics`); the pool adds which node they belong to, the
node's `Health`, and how many reads may be hedged.
"""

from __future__ import annotations

import math
import threading
import time
from typing import Any

from tiffin.messenger.health import Health
from tiffin.messenger.link_health import LinkHealth, LinkStatistics

from .replica_choice import LATE_S

# Hedged reads that may happen in a row although the share would not allow them: the client meets
# the first sick node before it has saved up any share.
HEDGES_SAVED_MAX = 10.0


# The statistics of a node that the client has not asked for anything yet.
_UNKNOWN = LinkStatistics("tcp")


class Links:
    """Statistics per node number; `plan_reads` compares nodes by `seconds`. Thread-safe."""

    def __init__(self, hedge_share: float = 0.1) -> None:
        self._ways: dict[int, LinkHealth] = {}
        self._lock = threading.Lock()
        self._hedge_share = hedge_share
        self._hedges_left = HEDGES_SAVED_MAX if hedge_share else 0.0

    def seconds(self, node: int, nbytes: int, now: float | None = None) -> float:
        """How long a read should take. See `Costs.seconds`."""
        way = self._ways.get(node)
        if way is None:
            return _UNKNOWN.predicted_s(nbytes)
        seconds, health = way.statistics.predicted_s(nbytes), way.health
        if health.well or not health.rests(time.monotonic() if now is None else now):
            return seconds
        return LATE_S + seconds if health.late else math.inf

    def down(self, now: float) -> set[int]:
        """The nodes that failed, or were late, and are left alone."""
        with self._lock:
            return {node for node, way in self._ways.items() if way.health.rests(now)}

    def moved(self, node: int, nbytes: int, seconds: float) -> None:
        """Note a read that succeeded."""
        with self._lock:
            self._way(node).succeeded(nbytes, seconds)
            self._hedges_left = min(HEDGES_SAVED_MAX, self._hedges_left + self._hedge_share)

    def answered(self, node: int) -> None:
        """Note that the node answered a message. How long that took says little: the request may
        have waited for room."""
        with self._lock:
            self._way(node).health.answered()

    def failed(self, node: int, now: float, *, late: bool = False) -> None:
        """Note a failure of the node or the link to it. `late`: the node did not answer within the
        short time that it has where another node can be asked."""
        with self._lock:
            self._way(node).failed(now, late=late)

    def may_hedge(self) -> bool:
        """Whether the budget allows a hedge: to ask a second replica before the first one's
        deadline."""
        return self._hedges_left >= 1.0

    def hedged(self) -> None:
        """Take one hedge from the budget."""
        with self._lock:
            self._hedges_left = max(0.0, self._hedges_left - 1.0)

    def keep(self, nodes: set[int]) -> None:
        """Forget nodes that are not in the pool any more: node numbers are never reused."""
        with self._lock:
            self._ways = {node: way for node, way in self._ways.items() if node in nodes}

    def statistics(self) -> dict[int, dict[str, Any]]:
        """Statistics per node, as plain numbers."""
        now = time.monotonic()
        with self._lock:
            return {
                node: {**way.statistics.as_dict(), "up": not way.health.rests(now)}
                for node, way in self._ways.items()
            }

    def _way(self, node: int) -> LinkHealth:
        way = self._ways.get(node)
        if way is None:
            way = self._ways[node] = LinkHealth("tcp", Health())
        return way
