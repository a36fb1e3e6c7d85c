"""What a client knows of its ways to nodes: speed, latency, health, and the budget for hedging."""

from __future__ import annotations

import math
import threading
import time
from dataclasses import dataclass
from typing import Any

# Averages follow a change within about ten observations.
_WEIGHT = 0.2
# Until a way was measured: an ordinary data-centre network, so that it is tried.
DEFAULT_LATENCY_S = 0.0005
DEFAULT_BANDWIDTH = 1.25e9
# A transfer below this says something about latency, above it about bandwidth.
_BANDWIDTH_BYTES_MIN = 1 << 20

# A node that failed is not asked for this long, doubled at each failure in a row: long enough to
# not pay for it with every get, short enough to be back soon after a restart.
DOWN_MIN_S = 0.5
DOWN_MAX_S = 10.0

# Hedged reads that may happen in a row although the share would not allow them: the first sick node
# is met before any share was saved up.
HEDGES_SAVED_MAX = 10.0


@dataclass(slots=True)
class _Link:
    latency_s: float = DEFAULT_LATENCY_S
    bandwidth_bytes_s: float = DEFAULT_BANDWIDTH
    nbytes: int = 0
    reads: int = 0
    failures: int = 0
    failures_in_a_row: int = 0
    down_until: float = -math.inf


class Links:
    """Statistics per node number; `seconds` is what plans are made with. Thread-safe."""

    def __init__(self, hedge_share: float = 0.1) -> None:
        self._links: dict[int, _Link] = {}
        self._lock = threading.Lock()
        self._hedge_share = hedge_share
        self._hedges_left = HEDGES_SAVED_MAX if hedge_share else 0.0

    def seconds(self, node: int, nbytes: int, now: float | None = None) -> float:
        """How long a read should take; infinite while the node is taken for dead."""
        link = self._links.get(node)
        if link is None:
            return DEFAULT_LATENCY_S + nbytes / DEFAULT_BANDWIDTH
        if (time.monotonic() if now is None else now) < link.down_until:
            return math.inf
        return link.latency_s + nbytes / link.bandwidth_bytes_s

    def moved(self, node: int, nbytes: int, seconds: float, now: float) -> None:
        """A read has succeeded."""
        with self._lock:
            link = self._well(node)
            link.nbytes += nbytes
            link.reads += 1
            self._hedges_left = min(HEDGES_SAVED_MAX, self._hedges_left + self._hedge_share)
            if nbytes >= _BANDWIDTH_BYTES_MIN and seconds > link.latency_s:
                rate = nbytes / (seconds - link.latency_s)
                link.bandwidth_bytes_s += _WEIGHT * (rate - link.bandwidth_bytes_s)
            elif nbytes < _BANDWIDTH_BYTES_MIN:
                link.latency_s += _WEIGHT * (seconds - link.latency_s)

    def answered(self, node: int, seconds: float, now: float) -> None:
        """A message was answered."""
        with self._lock:
            self._well(node)

    def failed(self, node: int, now: float) -> None:
        """The node, or the way to it, did not answer."""
        with self._lock:
            link = self._links.setdefault(node, _Link())
            link.failures += 1
            down_s = min(DOWN_MAX_S, DOWN_MIN_S * 2**link.failures_in_a_row)
            link.failures_in_a_row = min(link.failures_in_a_row + 1, 16)
            link.down_until = now + down_s

    def may_hedge(self) -> bool:
        """Whether the budget allows asking a second replica before the first had its time."""
        return self._hedges_left >= 1.0

    def hedged(self) -> None:
        """A second replica is being asked."""
        with self._lock:
            self._hedges_left = max(0.0, self._hedges_left - 1.0)

    def statistics(self) -> dict[int, dict[str, Any]]:
        """Plain numbers per node."""
        now = time.monotonic()
        with self._lock:
            return {
                node: {
                    "latency_s": link.latency_s,
                    "bandwidth_bytes_s": link.bandwidth_bytes_s,
                    "bytes": link.nbytes,
                    "reads": link.reads,
                    "failures": link.failures,
                    "up": now >= link.down_until,
                }
                for node, link in self._links.items()
            }

    def _well(self, node: int) -> _Link:
        link = self._links.setdefault(node, _Link())
        link.failures_in_a_row = 0
        link.down_until = -math.inf
        return link
