"""Mooncake's pool against caches of each node alone (FAST '25, figure 10): 10 instances that
prefill, 3 million tokens each, answers of one token.

"Local" is the cache-aware routing of the paper without sharing: of all instances, the one with the
lowest TTFT if each had its own blocks only. The rate is not published; here it is the trace's own.
The paper's local hits are near those of one cache of a node's size for all requests, as in its
figure 9, so that stands beside them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ....sim.cluster.simulation import SimulationOptions, simulate
from ....sim.results.outcomes import summarise
from ....traces.ideal_cache import hit_share
from ...evidence import Comparison, Evidence, Statement
from ...registry import reproduction
from ...setups.inputs import conversation
from ...setups.toolagent_look_alike import toolagent

if TYPE_CHECKING:
    from ....sim.results.outcomes import Summary
    from ....traces.trace import Trace
    from ...registry import Effort, Tell

# Hits in percent of prompt tokens and GPU seconds of a prefill, of local caches and of the pool.
PUBLISHED = {
    "conversation": ((16.9, 1.379), (37.5, 1.051)),
    "tool & agent look-alike": ((42.0, 0.703), (58.1, 0.521)),
}
POOL = SimulationOptions(prefill=10, decode=1)
WAYS = {
    "local": replace(POOL, fetches=False),
    "pool": POOL,
    "random": replace(POOL, fetches=False, policy="random"),
}


_NOTE = """The pool's hits are those of the paper, the local ones are not: routing to the instance
with the lowest TTFT keeps conversations together, so each finds most of what it has computed.
Saturation does not explain it (28.2% at 2.2 times the rate). One cache of a node's size that all
would share has 14.4 and 44.3%, near the paper's 16.9 and 42.0."""


@reproduction("mooncake-pooled-cache", "One pool, or each its own", "Mooncake, FAST '25, figure 10")
def pooled_cache(effort: Effort, tell: Tell) -> Evidence:
    """Hits and GPU time of prefills, with local caches and with the pool."""
    comparisons: list[Comparison] = []
    statements: list[Statement] = []
    traces = dict(zip(PUBLISHED, (conversation(), toolagent(effort.seeds[0])), strict=True))
    for name, trace in traces.items():
        found = {}
        for way, options in WAYS.items():
            tell(f"{name}, {way}")
            found[way] = prefilled(trace, replace(options, seed=effort.seeds[0]))
        comparisons += _comparisons(name, found)
        one = 100 * hit_share(trace, POOL.cache_tokens // trace.block_tokens)
        alone = f"{name}, hits, local, as one cache of a node's size"
        comparisons.append(Comparison(alone, PUBLISHED[name][0][0], one, "%"))
        statements.append(
            Statement(
                f"the pool has more hits than local caches, {name}",
                found["pool"].hit_share > found["local"].hit_share,
                ", ".join(
                    f"{way} {100 * one.hit_share:.1f}%, {one.compute_s:.3f} s, "
                    f"TTFT {one.ttft_s.mean:.2f} s"
                    for way, one in found.items()
                ),
            )
        )
    return Evidence(tuple(comparisons), tuple(statements), notes=(_NOTE,))


def prefilled(trace: Trace, options: SimulationOptions) -> Summary:
    """The trace with answers of one token."""
    short = replace(trace, requests=tuple(replace(r, output_tokens=1) for r in trace.requests))
    return summarise(short, simulate(short, options))


def _comparisons(name: str, found: dict[str, Summary]) -> list[Comparison]:
    (local_hits, local_s), (pool_hits, pool_s) = PUBLISHED[name]
    local, pool = found["local"], found["pool"]
    return [
        Comparison(f"{name}, hits, local", local_hits, 100 * local.hit_share, "%"),
        Comparison(f"{name}, hits, pool", pool_hits, 100 * pool.hit_share, "%"),
        Comparison(f"{name}, prefill, local", local_s, local.compute_s, "GPU s"),
        Comparison(f"{name}, prefill, pool", pool_s, pool.compute_s, "GPU s"),
        Comparison(
            f"{name}, hits, pool over local",
            pool_hits / local_hits,
            pool.hit_share / local.hit_share,
        ),
        Comparison(
            f"{name}, prefill, pool over local", pool_s / local_s, pool.compute_s / local.compute_s
        ),
    ]
