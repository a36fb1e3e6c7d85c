"""Histograms without a lock: the same text as those of the library."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from tiffin.conductor.web.tally import Tally

BOUNDS = (5e-5, 0.1, 1.0, 2.5)


class Collected:
    """A collector of one tally."""

    def __init__(self, tally: Tally) -> None:
        self._tally = tally

    def collect(self) -> list[object]:
        return [self._tally.family()]


@given(st.lists(st.sampled_from(BOUNDS) | st.floats(0.0, 4.0)))
def test_it_shows_what_a_histogram_of_the_library_shows(values: list[float]) -> None:
    theirs, ours = CollectorRegistry(), CollectorRegistry()
    histogram = Histogram("a", "What.", registry=theirs, buckets=BOUNDS)
    tally = Tally("a", "What.", BOUNDS)
    ours.register(Collected(tally))  # type: ignore[arg-type]
    for value in values:
        histogram.observe(value)
        tally.observe(value)
    shown = [
        [line for line in generate_latest(one).decode().splitlines() if "_created" not in line]
        for one in (theirs, ours)
    ]
    assert shown[0] == shown[1]


def test_what_is_no_duration_is_not_counted() -> None:
    tally = Tally("a", "What.", BOUNDS)
    for value in (-1.0, math.nan, math.inf):
        tally.observe(value)
    assert [sample.value for sample in tally.family().samples] == [0.0] * 7
