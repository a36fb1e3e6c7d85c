"""Two traces side by side, statistic by statistic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .statistics import describe

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .statistics import Spread, TraceStatistics
    from .trace import Trace


@dataclass(frozen=True, slots=True)
class Figure:
    """One number of a trace, with its unit ("" for a plain number, "%" for a share)."""

    label: str
    value: float
    unit: str


@dataclass(frozen=True, slots=True)
class ComparedFigure:
    """The same number of two traces."""

    label: str
    unit: str
    original: float
    generated: float

    @property
    def ratio(self) -> float | None:
        """Generated over original; None if the original's is 0."""
        return self.generated / self.original if self.original else None


def compare(original: Trace, generated: Trace) -> list[ComparedFigure]:
    """All figures that both have."""
    theirs = {figure.label: figure for figure in figures(describe(generated))}
    return [
        ComparedFigure(one.label, one.unit, one.value, theirs[one.label].value)
        for one in figures(describe(original))
        if one.label in theirs
    ]


def figures(statistics: TraceStatistics) -> Iterator[Figure]:
    """A trace's statistics as single numbers, in reading order."""
    yield Figure("requests", statistics.requests, "")
    yield Figure("span", statistics.span_s, "s")
    yield Figure("rate", statistics.rate, "requests/s")
    yield Figure("variation of gaps", statistics.gap_variation, "")
    yield from _spread("prompt", statistics.prompt_tokens, "tokens")
    yield from _spread("output", statistics.output_tokens, "tokens")
    if sharing := statistics.sharing:
        yield Figure("distinct blocks", sharing.distinct_blocks, "")
        yield Figure("of these used once", 100 * sharing.used_once, "%")
        for capacity, share in sharing.lru_hit.items():
            yield Figure(f"hit by LRU of {capacity:,} blocks", 100 * share, "%")
        yield Figure("hit without limit", 100 * sharing.infinite_hit, "%")
        yield Figure("later turns", 100 * sharing.later_turns, "%")
        yield from _spread("turn", sharing.turn, "")


def _spread(of: str, spread: Spread, unit: str) -> Iterator[Figure]:
    values = {"mean": spread.mean, "p50": spread.p50, "p90": spread.p90, "p99": spread.p99}
    for name, value in (values | {"max": spread.max}).items():
        yield Figure(f"{of}, {name}", value, unit)
