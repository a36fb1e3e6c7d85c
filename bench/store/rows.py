"""A measurement: samples, their spread, the limit beside it, and whether the target was met.

The measured action and its limit take turns (A B A B ...), so that a machine that slows down slows
both: the ratio of the medians then stays valid, while the absolute numbers do not.
"""

from __future__ import annotations

import gc
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

MICROSECONDS = 1e6
MILLISECONDS = 1e3


@dataclass(frozen=True, slots=True)
class Spread:
    """Percentiles of the samples. `best` is the least disturbed sample."""

    p20: float
    p50: float
    p80: float
    best: float
    samples: int

    @classmethod
    def of(cls, samples: Sequence[float], *, lower_is_better: bool) -> Spread:
        """Percentiles of at least one sample."""
        p20, p50, p80 = (float(p) for p in np.percentile(samples, (20, 50, 80)))
        best = min(samples) if lower_is_better else max(samples)
        return cls(p20, p50, p80, float(best), len(samples))


@dataclass(frozen=True, slots=True)
class Target:
    """A bound on the median, or on the ratio of the medians."""

    quantity: Literal["p50", "ratio"]
    sense: Literal["<=", ">="]
    bound: float

    def holds(self, row: Row) -> bool:
        """Whether this row meets the target."""
        value = row.ratio if self.quantity == "ratio" else row.value.p50
        return value <= self.bound if self.sense == "<=" else value >= self.bound

    def text(self, unit: str) -> str:
        """For people: `p50 <= 150 us`, `ratio >= 0.9`."""
        suffix = "" if self.quantity == "ratio" else f" {unit}"
        return f"{self.quantity} {self.sense} {self.bound:g}{suffix}"


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement. A row without targets is for information only."""

    name: str
    what: str
    unit: str
    value: Spread
    limit_what: str
    limit: Spread
    targets: tuple[Target, ...] = ()
    note: str = ""

    @property
    def ratio(self) -> float:
        """Median of the value over median of the limit."""
        return self.value.p50 / self.limit.p50

    @property
    def best_ratio(self) -> float:
        """Best sample of the value over best sample of the limit."""
        return self.value.best / self.limit.best

    @property
    def met(self) -> bool | None:
        """Whether every target is met; None if there is none."""
        return all(target.holds(self) for target in self.targets) if self.targets else None

    @property
    def target_text(self) -> str:
        """All targets in words, or "information"."""
        return " and ".join(t.text(self.unit) for t in self.targets) or "information"

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return {
            **asdict(self),
            "ratio": self.ratio,
            "best_ratio": self.best_ratio,
            "target": self.target_text,
            "met": self.met,
        }


def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True)
class Side:
    """One of the sides that take turns: `action` is timed; `prepare` before it and `reset` after it
    are not."""

    action: Callable[[], object]
    reset: Callable[[], object] = _nothing
    prepare: Callable[[], object] = _nothing


def interleave(sides: Sequence[Side], *, rounds: int, batch: int = 1) -> list[list[float]]:
    """Seconds of every call, per side: `batch` calls of each side in turn, `rounds` times.

    Each side first runs twice, unmeasured, to warm caches, page tables and pools. The garbage
    collector stays on, as in the programs that use the store, and has just run a full collection.
    """
    for _ in range(2):
        for side in sides:
            side.prepare()
            side.action()
            side.reset()
    gc.collect()
    seconds: list[list[float]] = [[] for _ in sides]
    for _ in range(rounds):
        for side, taken in zip(sides, seconds, strict=True):
            for _ in range(batch):
                side.prepare()
                start_s = time.perf_counter()
                side.action()
                taken.append(time.perf_counter() - start_s)
                side.reset()
    return seconds


def timed(action: Callable[[], object], calls: int) -> list[float]:
    """Seconds of each of `calls` calls. The caller must have warmed up the action, and not cleared
    the caches since, as `interleave` does by a garbage collection."""
    seconds = []
    for _ in range(calls):
        start_s = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - start_s)
    return seconds


def times(seconds: Sequence[float], scale: float) -> Spread:
    """Durations in units of 1/`scale` seconds."""
    return Spread.of([s * scale for s in seconds], lower_is_better=True)


def rates(seconds: Sequence[float], nbytes: int) -> Spread:
    """Bandwidths in GB/s of calls that moved `nbytes` each."""
    return Spread.of([nbytes / s / 1e9 for s in seconds], lower_is_better=False)


def single(value: float) -> Spread:
    """A number that was measured once, or counted."""
    return Spread(value, value, value, value, 1)
