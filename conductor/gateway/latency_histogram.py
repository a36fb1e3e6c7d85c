"""Latencies by role, model and instance, as a Prometheus histogram that quantiles can be read from.

Each bucket's bound is 4.9% above the one before. Prometheus interpolates within a bucket, so
whatever the latencies are, its quantile is less than 5% from the exact one. Gaps between tokens of
a GPU hardly vary, and all lie in one or two buckets: buckets of 10% would be as much off.

A histogram of `prometheus_client` walks through its buckets at each observation, 3 us for so many,
and writes them at 6 us each: with a hundred instances no stream would go on for 0.3 s at a scrape.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Collection

_PER_DECADE = 48  # the least with which bounds grow by less than 5%
_LEAST, _DECADES = -3, 5  # from 1 ms to 100 s
_BUCKETS = (
    *(f"{10 ** (_LEAST + n / _PER_DECADE):.5g}" for n in range(_DECADES * _PER_DECADE + 1)),
    "+Inf",
)
BOUNDS_S = tuple(float(bound) for bound in _BUCKETS[:-1])
_ESCAPED = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})


class Labels(NamedTuple):
    """`role`: "prefill" or "decode", of the two instances of a request that is split; "mixed", of
    one that runs on one instance."""

    role: str
    model: str
    instance: str


class _Series:
    __slots__ = ("counts", "total_s")

    def __init__(self) -> None:
        self.counts = [0] * len(_BUCKETS)
        self.total_s = 0.0


class LatencyHistogram:
    """See the module. From 1 ms to 100 s. For one thread."""

    def __init__(self, name: str, what: str) -> None:
        self._name, self._what = name, what
        self._series: dict[Labels, _Series] = {}

    def observe(self, labels: Labels, seconds: float, times: int = 1) -> None:
        """Count a latency, `times` times."""
        if not times:
            return
        series = self._series.get(labels)
        if series is None:
            series = self._series[labels] = _Series()
        series.counts[bisect_left(BOUNDS_S, seconds)] += times
        series.total_s += seconds * times

    def keep(self, instances: Collection[str]) -> None:
        """Drop the latencies of all other instances."""
        self._series = {key: one for key, one in self._series.items() if key.instance in instances}

    def text(self) -> str:
        """In Prometheus' text format."""
        name = self._name
        lines = [f"# HELP {name} {self._what}\n# TYPE {name} histogram\n"]
        for labels, series in self._series.items():
            shown = ",".join(
                f'{label}="{value.translate(_ESCAPED)}"'
                for label, value in zip(Labels._fields, labels, strict=True)
            )
            head = f'{name}_bucket{{{shown},le="'
            count = 0
            for bound, number in zip(_BUCKETS, series.counts, strict=True):
                count += number
                lines.append(f'{head}{bound}"}} {count}\n')
            lines.append(f"{name}_count{{{shown}}} {count}\n")
            lines.append(f"{name}_sum{{{shown}}} {series.total_s}\n")
        return "".join(lines)
