"""Statistics, against slow models and against what is known of the shipped slice."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tracesupport import shipped_slice, trace_of

from tiffin.bench.demo.engines.trace import load_slice, reusable_tokens
from tiffin.bench.traces.ideal_cache import IdealCache, hit_share
from tiffin.bench.traces.statistics import Spread, describe, gap_variation
from tiffin.bench.traces.trace import Trace, TraceRequest
from tiffin.bench.traces.turns import depths, previous_turns

CHAINS = st.lists(st.lists(st.integers(0, 9), max_size=6, unique=True).map(tuple), max_size=30)


@given(CHAINS, st.integers(1, 8))
@settings(max_examples=100)
def test_the_ideal_cache_is_a_dictionary_of_last_uses(
    chains: list[tuple[int, ...]], capacity: int
) -> None:
    cache = IdealCache(capacity)
    used: dict[int, int] = {}
    clock = 0
    for chain in chains:
        expected = 0
        while expected < len(chain) and chain[expected] in used:
            expected += 1
        assert cache.serve(chain) == expected
        for block in reversed(chain):
            clock += 1
            used[block] = clock
        used = dict(sorted(used.items(), key=lambda item: item[1])[-capacity:])


@given(CHAINS)
@settings(max_examples=50)
def test_more_capacity_never_hits_less(chains: list[tuple[int, ...]]) -> None:
    trace = trace_of((0,), *(chain for chain in chains if chain))
    shares = [hit_share(trace, capacity) for capacity in (1, 2, 4, 8, None)]
    assert shares == sorted(shares)


def test_the_slice_hits_what_the_demo_can_reuse() -> None:
    trace = shipped_slice()
    hit = hit_share(trace, None) * trace.prompt_tokens
    again = reusable_tokens(load_slice())
    assert again <= hit <= again + 512 * len(trace.requests)  # the demo recomputes a last token
    assert hit / trace.prompt_tokens == pytest.approx(0.488, abs=0.001)


def test_partial_blocks_are_never_hit() -> None:
    request = TraceRequest(0.0, 600, 1, (1, 2))
    trace = Trace("x", (request, replace(request, arrival_s=1.0)))
    assert hit_share(trace, None) == pytest.approx(512 / 1200)


def test_percentiles_are_values_by_nearest_rank() -> None:
    assert Spread.of(range(1, 101)) == Spread(50.5, 50, 90, 99, 100)
    assert Spread.of([7]) == Spread(7.0, 7, 7, 7, 7)


def test_gaps_vary_by_nothing_if_regular_and_more_in_bursts() -> None:
    assert gap_variation([0.0, 1.0, 2.0]) == 0.0
    assert gap_variation([0.0, 0.0, 0.0, 9.0]) == pytest.approx(2**0.5)
    assert gap_variation([1.0]) == gap_variation([1.0, 1.0]) == 0.0


def test_a_turn_goes_on_with_the_longest_earlier_prompt_once() -> None:
    trace = trace_of((0, 1), (0, 2), (0, 1, 3), (0, 1, 3, 4), (0, 1, 5), (0, 2))
    assert previous_turns(trace) == [None, None, 0, 2, None, None]
    assert depths(previous_turns(trace)) == [1, 1, 2, 3, 1, 1]


def test_a_turn_has_room_for_the_answer_before_it() -> None:
    assert previous_turns(trace_of((0, 1), (0, 1, 2), answer=511)) == [None, 0]
    assert previous_turns(trace_of((0, 1), (0, 1, 2), answer=512)) == [None, None]


def test_a_trace_without_ids_has_no_sharing() -> None:
    statistics = describe(Trace("x", (TraceRequest(0.0, 9, 1), TraceRequest(2.0, 9, 1))))
    assert statistics.sharing is None
    assert statistics.rate == 0.5
