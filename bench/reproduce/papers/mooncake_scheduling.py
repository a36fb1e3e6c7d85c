"""Mooncake's comparison of schedulers (FAST '25, figure 5): the conversation trace on 16 nodes.

The rate is not published. Here it is the trace's own, on 8 and 8 instances.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...sim.outcomes import summarise
from ...sim.simulation import SimulationOptions, simulate
from ..evidence import Comparison, Evidence, Statement
from ..inputs import conversation
from ..registry import reproduction

if TYPE_CHECKING:
    from ..registry import Effort, Tell

# Mean TTFT in seconds, by our name of the policy; text of section 5.
PUBLISHED_TTFT_S = {
    "random": 19.65,
    "least_loaded": 5.27,
    "prefix_aware": 3.58,
    "kvcache_centric": 3.07,
}


@reproduction("mooncake-scheduling", "Schedulers compared", "Mooncake, FAST '25, figure 5")
def scheduling(effort: Effort, tell: Tell) -> Evidence:
    """Mean TTFT under each policy."""
    found = {}
    for policy in PUBLISHED_TTFT_S:
        tell(policy)
        options = SimulationOptions(policy=policy, seed=effort.seeds[0])
        outcome = simulate(conversation(), options)
        found[policy] = summarise(conversation(), outcome).ttft_s.mean
    comparisons = [
        Comparison(f"mean TTFT, {policy}", published, found[policy], "s")
        for policy, published in PUBLISHED_TTFT_S.items()
    ]
    order = sorted(found, key=lambda policy: found[policy], reverse=True)
    figures = ", ".join(f"{policy} {found[policy]:.2f} s" for policy in order)
    same = order == list(PUBLISHED_TTFT_S)
    return Evidence(tuple(comparisons), (Statement("the order of the four", same, figures),))
