"""Quantiles as Prometheus reads them from a histogram of the gateway, and as they are."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Any

from prometheus_client.parser import text_string_to_metric_families

if TYPE_CHECKING:
    from collections.abc import Sequence

SHARES = (0.5, 0.95, 0.99)


def samples(text: bytes, name: str) -> list[Any]:
    """All samples of this name in the text of /metrics."""
    families = text_string_to_metric_families(text.decode())
    return [one for family in families for one in family.samples if one.name == name]


def total(text: bytes, name: str, **labels: str) -> float:
    """The sum of all samples with these labels."""
    return sum(one.value for one in _matching(text, name, labels))


def quantile(text: bytes, name: str, share: float, before: bytes = b"", **labels: str) -> float:
    """Prometheus' `histogram_quantile`, linear within a bucket, of what was observed since
    `before`."""
    counts: Counter[float] = Counter()
    for scrape, sign in ((text, 1), (before, -1)):
        for one in _matching(scrape, f"{name}_bucket", labels):
            counts[float(one.labels["le"])] += sign * one.value
    buckets = sorted(counts.items())
    rank = share * buckets[-1][1]
    below, low = 0.0, 0.0
    for high, count in buckets:
        if count >= rank:
            return low + (high - low) * (rank - below) / (count - below)
        below, low = count, high
    raise AssertionError("no bucket")


def exact(seconds: Sequence[float], share: float) -> float:
    """The least of them that this share does not exceed."""
    return sorted(seconds)[math.ceil(share * len(seconds)) - 1]


def _matching(text: bytes, name: str, labels: dict[str, str]) -> list[Any]:
    return [one for one in samples(text, name) if labels.items() <= one.labels.items()]
