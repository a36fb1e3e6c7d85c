"""Latencies by role, model and instance, as a Prometheus histogram that quantiles can be read from.

Its buckets are the E24 series (IEC 60063), which grows by some 10%: a quantile lies at most that
far from the one that Prometheus interpolates. A histogram of `prometheus_client` walks through its
buckets at each observation, 3 us for so many; tokens come by the ten thousand in a second.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

_E24 = (
    10, 11, 12, 13, 15, 16, 18, 20, 22, 24, 27, 30,
    33, 36, 39, 43, 47, 51, 56, 62, 68, 75, 82, 91,
)  # fmt: skip
BOUNDS_S = (*(step * 10.0**power for power in range(-4, 1) for step in _E24), 100.0)
_BUCKETS = (*(f"{bound:.4g}" for bound in BOUNDS_S), "+Inf")


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


class LatencyHistogram(Collector):
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

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """For `prometheus_client`."""
        family = HistogramMetricFamily(self._name, self._what, labels=Labels._fields)
        for labels, series in self._series.items():
            counts = zip(_BUCKETS, accumulate(series.counts), strict=True)
            family.add_metric(labels, list(counts), series.total_s)
        yield family
