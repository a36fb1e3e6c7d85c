"""Counters and histograms for Prometheus that are quick to count with. For one thread.

Those of `prometheus_client` take a lock for each of several numbers, and a histogram walks through
its buckets: 3 to 5 us an observation, where a dozen events of each answer are observed twice. Here
a count is a number in a list, and families of `prometheus_client` are made at a scrape.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.utils import floatToGoString

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from prometheus_client.metrics_core import Metric


class Tally:
    """The counter of one combination of label values."""

    __slots__ = ("total",)

    def __init__(self) -> None:
        self.total = 0.0

    def add(self, amount: float = 1.0) -> None:
        """Count so much more."""
        self.total += amount


class PlainCounter:
    """A counter with labels, and the collector of it. `name` without `_total`."""

    def __init__(self, name: str, what: str, labels: Sequence[str] = ()) -> None:
        self._name, self._what, self._labels = name, what, labels
        self._tallies: dict[tuple[str, ...], Tally] = {}
        if not labels:
            self.of()  # shown as 0 before there is anything to count

    def of(self, *values: str) -> Tally:
        """The tally of these label values; of a hot path, to be kept."""
        found = self._tallies.get(values)
        if found is None:
            found = self._tallies[values] = Tally()
        return found

    def collect(self) -> Iterator[Metric]:
        """The metric of now."""
        family = CounterMetricFamily(self._name, self._what, labels=self._labels)
        for values, tally in self._tallies.items():
            family.add_metric(values, tally.total)
        yield family


class Buckets:
    """The histogram of one combination of label values. `bounds`: in order, each one the most that
    its bucket has."""

    __slots__ = ("_bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count a value; what is not finite or is negative is left out."""
        if 0.0 <= value < math.inf:
            self.counts[bisect_left(self._bounds, value)] += 1
            self.total += value


class PlainHistogram:
    """A histogram with labels, and the collector of it."""

    def __init__(
        self, name: str, what: str, bounds: tuple[float, ...], labels: Sequence[str] = ()
    ) -> None:
        self._name, self._what, self._labels = name, what, labels
        self._bounds = bounds
        self._series: dict[tuple[str, ...], Buckets] = {}
        every = (*bounds, math.inf)
        self._shown = [floatToGoString(bound) for bound in every]  # type: ignore[no-untyped-call]
        if not labels:
            self.of()

    def of(self, *values: str) -> Buckets:
        """The buckets of these label values; of a hot path, to be kept."""
        found = self._series.get(values)
        if found is None:
            found = self._series[values] = Buckets(self._bounds)
        return found

    def collect(self) -> Iterator[Metric]:
        """The metric of now."""
        family = HistogramMetricFamily(self._name, self._what, labels=self._labels)
        for values, series in self._series.items():
            count, buckets = 0, []
            for bound, number in zip(self._shown, series.counts, strict=True):
                count += number
                buckets.append((bound, count))
            family.add_metric(values, buckets, series.total)
        yield family
