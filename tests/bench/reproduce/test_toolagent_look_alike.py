"""How like the look-alike is to Mooncake's trace of tools and agents, of which only statistics are
published."""

from __future__ import annotations

from collections import Counter

import pytest

from tiffin.bench.reproduce.papers.mooncake.mooncake_hit_rate import CAPACITIES_TOKENS, TOOL_AGENT
from tiffin.bench.reproduce.setups.toolagent_look_alike import GRAIN_S, REQUESTS, toolagent
from tiffin.bench.traces.ideal_cache import hit_share
from tiffin.bench.traces.statistics import describe

TRACE = toolagent(0)


@pytest.mark.slow
def test_lengths_and_rate_are_those_of_the_paper() -> None:
    found = describe(TRACE)
    assert found.requests == REQUESTS
    assert found.span_s == pytest.approx(3600, rel=0.03)
    assert found.prompt_tokens.mean == pytest.approx(7590, rel=0.03)
    assert found.output_tokens.mean == pytest.approx(182, rel=0.04)
    assert all(request.arrival_s % GRAIN_S == 0 for request in TRACE.requests)


@pytest.mark.slow
def test_hits_over_capacity_are_those_of_figure_9() -> None:
    """Within two points of a hundred; the smallest cache, of 19 blocks, within four."""
    for tokens, published in zip(CAPACITIES_TOKENS, TOOL_AGENT, strict=True):
        hits = 100 * hit_share(TRACE, int(tokens / TRACE.block_tokens))
        assert hits == pytest.approx(published, abs=4 if tokens == 1e4 else 2)


def test_blocks_are_as_unequal_as_in_the_paper() -> None:
    """More than half of them were never used again, and some more than ten thousand times."""
    uses = Counter(block for request in TRACE.requests for block in request.blocks)
    assert sum(count == 1 for count in uses.values()) > 0.5 * len(uses)
    assert max(uses.values()) > 10_000


def test_ids_are_chained_and_a_third_share_twelve_blocks() -> None:
    before: dict[int, tuple[int, ...]] = {}
    for request in TRACE.requests:
        for place, block in enumerate(request.blocks):
            chain = request.blocks[max(0, place - 1) : place]
            assert before.setdefault(block, chain) == chain
    (_, often) = Counter(request.blocks[:12] for request in TRACE.requests).most_common(1)[0]
    assert often / REQUESTS == pytest.approx(0.33, abs=0.02)


@pytest.mark.slow
def test_the_same_seed_gives_the_same_trace() -> None:
    toolagent.cache_clear()
    assert toolagent(0) == TRACE
    assert toolagent(1) != TRACE
