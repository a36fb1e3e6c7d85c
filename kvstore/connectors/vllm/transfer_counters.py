"""What the connector counts: plain numbers by name, which travel from workers to vLLM's metrics.

hit_tokens/TIER      tokens that the engine is to load, by where the pool had them
hit_tokens/hbm       of the loaded tokens, those that came from the tier in the GPU's memory
loaded_tokens, load_seconds, load_failures/REASON
streamed_tokens      of the loaded tokens, those of blocks that another engine was writing
saved_tokens, save_seconds, save_failures/REASON
lookups, lookup_seconds, lookup_failures/REASON
"""

from __future__ import annotations

import threading
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

# The names with a label in them, and the label; the others are names of counters as they are.
LABELS = {
    "hit_tokens": "tier",
    "load_failures": "reason",
    "save_failures": "reason",
    "lookup_failures": "reason",
}
PLAIN = (
    "loaded_tokens",
    "streamed_tokens",
    "load_seconds",
    "saved_tokens",
    "save_seconds",
    "lookups",
    "lookup_seconds",
)


class TransferCounters:
    """Counters since they were last taken. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def add(self, name: str, amount: float = 1, label: str = "") -> None:
        """Count `amount` more of `name`, one of PLAIN, or with its label, of LABELS."""
        with self._lock:
            self._counts[f"{name}/{label}" if label else name] += amount  # type: ignore[assignment]

    def take(self) -> dict[str, float]:
        """The counts, which begin anew."""
        if not self._counts:  # as in most steps
            return {}
        with self._lock:
            counts, self._counts = self._counts, Counter()
        return dict(counts)


def joined(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    """The sums of two counts."""
    return {name: one.get(name, 0) + other.get(name, 0) for name in (*one, *other)}


def split(name: str) -> tuple[str, str]:
    """The name of a count and its label, "" without one."""
    name, _, label = name.partition("/")
    return name, label
