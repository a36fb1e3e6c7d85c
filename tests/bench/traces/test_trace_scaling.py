"""Scaling: a trace faster, shorter or for more tenants keeps all that is not meant to change."""

from __future__ import annotations

import pytest
from tracesupport import shipped_slice

from tiffin.bench.traces.ideal_cache import hit_share
from tiffin.bench.traces.scaling import at_rate, followed, window, with_tenants
from tiffin.bench.traces.statistics import describe
from tiffin.kvstore.errors import InvalidInput

SLICE = shipped_slice()


def test_at_rate_changes_arrivals_only() -> None:
    fast = at_rate(SLICE, 4)
    assert fast.rate == pytest.approx(4 * SLICE.rate)
    assert [r.blocks for r in fast.requests] == [r.blocks for r in SLICE.requests]
    arrivals = [r.arrival_s for r in fast.requests]
    assert arrivals == sorted(arrivals)
    assert describe(fast).gap_variation == pytest.approx(describe(SLICE).gap_variation)


def test_windows_divide_the_trace() -> None:
    parts = [window(SLICE, start, start + 1000) for start in range(0, 4000, 1000)]
    assert sum(len(part.requests) for part in parts) == len(SLICE.requests)
    assert all(0 <= r.arrival_s < 1000 for part in parts for r in part.requests)


def test_one_part_that_follows_another_keeps_its_gaps_and_blocks() -> None:
    first, then = window(SLICE, 0, 300), at_rate(window(SLICE, 300, 600), 2)
    both = followed(first, then).requests
    assert both[: len(first.requests)] == first.requests
    later = both[len(first.requests) :]
    assert [r.blocks for r in later] == [r.blocks for r in then.requests]
    apart = [r.arrival_s - first.requests[-1].arrival_s for r in later]
    assert apart == pytest.approx([r.arrival_s for r in then.requests])


def test_tenants_share_nothing_and_keep_what_each_shares() -> None:
    three = with_tenants(SLICE, 3, seed=1)
    one = describe(SLICE).sharing
    all_ = describe(three).sharing
    assert one is not None
    assert all_ is not None
    assert len(three.requests) == 3 * len(SLICE.requests)
    assert all_.distinct_blocks == 3 * one.distinct_blocks
    assert all_.infinite_hit == pytest.approx(one.infinite_hit, rel=0.03)  # copies wrap around
    assert [r.arrival_s for r in three.requests] == sorted(r.arrival_s for r in three.requests)
    assert three.span_s == pytest.approx(SLICE.span_s, rel=0.01)
    assert with_tenants(SLICE, 3, seed=1) == three
    assert with_tenants(SLICE, 3, seed=2) != three


def test_one_tenant_is_the_trace_with_other_ids() -> None:
    one = with_tenants(SLICE, 1, seed=0)
    assert hit_share(one, 100) == hit_share(SLICE, 100)


def test_impossible_scales_are_refused() -> None:
    for impossible in (0, -1):
        with pytest.raises(InvalidInput):
            at_rate(SLICE, impossible)
        with pytest.raises(InvalidInput):
            with_tenants(SLICE, impossible, seed=0)
