"""The reproduction's caches, on a trace that can be counted by hand."""

from __future__ import annotations

import pytest

from tiffin.bench.reproduce.papers.mooncake.mooncake_eviction import (
    POLICIES,
    UNLIMITED_BLOCKS,
    block_hit_share,
)
from tiffin.bench.traces.trace import Trace, TraceRequest


def trace(*chains: tuple[int, ...]) -> Trace:
    return Trace("by hand", tuple(TraceRequest(0.0, 512 * len(one), 1, one) for one in chains))


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_without_a_limit_all_policies_are_one(policy: type) -> None:
    found = trace((1, 2, 3), (1, 2, 4), (1, 2, 3))
    assert block_hit_share(found, UNLIMITED_BLOCKS, policy()) == 5 / 9


def test_who_leaves_first() -> None:
    """Block 1 was used twice and block 2 last. Which of them leaves for block 3?"""
    old, new = trace((1,), (1,), (2,), (3,), (1,)), trace((1,), (1,), (2,), (3,), (2,))
    hits = {
        name: (5 * block_hit_share(old, 2, policy()), 5 * block_hit_share(new, 2, policy()))
        for name, policy in POLICIES.items()
    }
    assert hits["LRU"] == (1, 2)
    assert hits["LFU without ageing"] == (2, 1)


def test_the_deeper_of_two_equals_leaves_first() -> None:
    """Two chains of one and two blocks: the second one's tail leaves for block 4."""
    chains = ((2, 3), (1,), (4,))
    for name in ("LengthAware", "LengthAware by uses, then depth"):
        again = block_hit_share(trace(*chains, (2, 3)), 3, POLICIES[name]())
        assert again * 6 == 1, "block 2 is there, block 3 is not"


def test_use_counts_for_more_than_depth_in_the_papers_length_aware() -> None:
    chains = ((2, 3), (2, 3), (1,), (4,), (2, 3))
    hits = {
        name: block_hit_share(trace(*chains), 3, policy()) * 8 for name, policy in POLICIES.items()
    }
    assert hits["LengthAware by uses, then depth"] == 4
    assert hits["LengthAware"] == 3
