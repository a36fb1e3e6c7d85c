"""How like Mooncake's synthetic workload its look-alike is."""

from __future__ import annotations

import pytest

from tiffin.bench.reproduce.setups.synthetic_look_alike import (
    PARTS,
    REQUESTS,
    likeness,
    synthetic_look_alike,
)

# Shares of what is published. The rare ones (the hottest block, what a small cache hits) are of few
# sessions; the rest is nearer.
NEAR, RARE = 0.2, 0.5


@pytest.mark.parametrize("seed", [0, 1])
def test_it_is_near_all_that_is_published(seed: int) -> None:
    for one in likeness(synthetic_look_alike(seed)):
        rare = "hottest" in one.what or "1M" in one.what or "4M" in one.what
        assert one.ours == pytest.approx(one.published, rel=RARE if rare else NEAR), one.what


def test_it_is_a_trace_of_three_parts_that_share_nothing() -> None:
    trace = synthetic_look_alike(0)
    assert len(trace.requests) == REQUESTS
    arrivals = [request.arrival_s for request in trace.requests]
    assert arrivals == sorted(arrivals)
    assert arrivals[0] == 0.0
    parts = [{block % len(PARTS) for block in request.blocks} for request in trace.requests]
    assert all(len(part) == 1 for part in parts)
    for at in range(len(PARTS)):
        assert sum(part == {at} for part in parts) > REQUESTS / 4


def test_the_same_seed_gives_the_same_trace() -> None:
    first, other = synthetic_look_alike(0), synthetic_look_alike(1)
    synthetic_look_alike.cache_clear()
    assert synthetic_look_alike(0) == first != other
