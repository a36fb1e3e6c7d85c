"""Mooncake's policies of eviction (arXiv 2407.00079, table 1): one cache for all, over its size.

The trace is a look-alike. The policies are the store's own; two of them differ from the paper's of
that name, so these stand beside them: the paper's LFU does not age, and its LengthAware is an LFU
that evicts the deeper of two blocks that were used as often.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tiffin.kvstore.memory.eviction import LFU, LRU, LengthAware

from ....plots import Line, Plot
from ....sim.nodes.block_cache import BlockCache, CachedBlock
from ...evidence import Comparison, Evidence, Statement
from ...registry import reproduction
from ...setups.toolagent_look_alike import toolagent

if TYPE_CHECKING:
    from collections.abc import Callable

    from tiffin.kvstore.memory.eviction import EvictionPolicy

    from ....traces.trace import Trace
    from ...registry import Effort, Tell

CAPACITIES_BLOCKS = (1_000, 10_000, 30_000, 50_000, 100_000)
UNLIMITED_BLOCKS = 10**9
# Share of all blocks that is hit, in percent, by capacity; the last one without limit.
PUBLISHED = {
    "LRU": (30, 40, 48, 50, 51, 51),
    "LFU": (30, 35, 43, 49, 51, 51),
    "LengthAware": (30, 35, 42, 48, 50, 51),
}
_DEPTHS = 1 << 20  # more than any block's depth


class UnagedLFU(LFU[CachedBlock]):
    """Counts uses since the block came, for ever."""

    def left(self, entry: CachedBlock) -> None:
        """Nothing ages."""


class UsesThenDepth(UnagedLFU):
    """Of the blocks with the fewest uses, the deepest leaves first."""

    def _rank(self, entry: CachedBlock) -> int:
        return entry.visits * _DEPTHS - entry.depth


POLICIES: dict[str, Callable[[], EvictionPolicy[CachedBlock]]] = {
    "LRU": LRU,
    "LFU": LFU,
    "LengthAware": LengthAware,
    "LFU without ageing": UnagedLFU,
    "LengthAware by uses, then depth": UsesThenDepth,
}


_NOTE = """The store's LFU ages, and its LengthAware orders by depth alone: as the paper defines
them, both deviate as much as LRU does. With small caches all find more than in the paper, whose
trace for this table has other hits than the one of figure 9 that the look-alike is fitted to (51%
without limit, and 59.5%)."""


@reproduction("mooncake-eviction-policies", "Eviction", "Mooncake, arXiv 2407.00079v1, table 1")
def eviction_policies(effort: Effort, tell: Tell) -> Evidence:
    """Share of blocks that is hit, under each policy, over capacities."""
    trace = toolagent(effort.seeds[0])
    found: dict[str, list[float]] = {}
    for name, policy in POLICIES.items():
        tell(name)
        found[name] = [
            100 * block_hit_share(trace, blocks, policy()) for blocks in CAPACITIES_BLOCKS
        ]
    unlimited = 100 * block_hit_share(trace, UNLIMITED_BLOCKS, LRU())
    comparisons = [Comparison("hits, no limit", PUBLISHED["LRU"][-1], unlimited, "%")]
    for name, ours in found.items():
        published = PUBLISHED[name.partition(" ")[0]]
        comparisons += [
            Comparison(f"hits, {name}, {blocks:,} blocks", published[at], ours[at], "%")
            for at, blocks in enumerate(CAPACITIES_BLOCKS)
        ]
    return Evidence(tuple(comparisons), _statements(found), (_plot(found),), (_NOTE,))


def block_hit_share(trace: Trace, blocks: int, order: EvictionPolicy[CachedBlock]) -> float:
    """Share of all blocks of all prompts, partial ones included, that is there when it comes."""
    cache, hits = BlockCache(blocks, order), 0
    for request in trace.requests:
        keys = tuple(block.to_bytes(8) for block in trace.full_blocks(request))
        hits += cache.match(keys)
        cache.put(keys)
    return hits / sum(len(request.blocks) for request in trace.requests)


def _statements(found: dict[str, list[float]]) -> tuple[Statement, ...]:
    middle = range(1, len(CAPACITIES_BLOCKS))  # with 1,000 blocks, the paper's are equal
    rivals = [name for name in found if name != "LRU"]
    best = all(found["LRU"][at] >= max(found[name][at] for name in rivals) - 0.05 for at in middle)
    ten = CAPACITIES_BLOCKS.index(10_000)
    lru = found["LRU"]
    return (
        Statement(
            "LRU is the best of them at every size",
            best,
            ", ".join(f"{name} {hits[ten]:.1f}%" for name, hits in found.items())
            + " in 10,000 blocks",
        ),
        Statement(
            "more than 50,000 blocks add little",
            lru[-1] - lru[-2] < 0.05 * lru[-1],
            f"{lru[-2]:.1f}% in 50,000, {lru[-1]:.1f}% in 100,000",
        ),
    )


def _plot(found: dict[str, list[float]]) -> Plot:
    sizes = tuple(float(blocks) for blocks in CAPACITIES_BLOCKS)
    lines = [Line(f"{name}, here", sizes, tuple(hits)) for name, hits in found.items()]
    lines += [
        Line(f"{name}, paper", sizes, tuple(map(float, hits[:-1])), "dots")
        for name, hits in PUBLISHED.items()
    ]
    title = "Which blocks leave first"
    labels = ("capacity, blocks", "hits, % of blocks")
    return Plot("mooncake-eviction-policies", title, *labels, tuple(lines), log_x=True)
