"""Mooncake's Algorithm 1 (arXiv 2407.00079; FAST '25), the default.

    longest = the longest prefix that any place has
    for each instance:
        if longest / own prefix < balancing threshold:
            TTFT = queue + load + prefill(own prefix)
        else:
            TTFT = max(queue, transfer(longest - own prefix)) + load + prefill(longest)
    choose the lowest TTFT

An instance that fetches becomes a holder: hot prefixes get replicas where they are needed, without
a prediction of hot prefixes.

Two things differ from the paper, and each lowers TTFT where many prompts wait:

- Blocks come while the request waits in the queue, so the longer of the two counts.
- The own prefix includes blocks that prompts queued there before it will have computed by its turn.

What the paper leaves open:

- An own prefix of 0 makes the ratio infinite: such an instance may fetch.
- A transfer that takes longer than computing is not made, whatever the ratio. The paper has this in
  its text, not in the algorithm.
- Own blocks that are not in HBM cost their loading time, and are not used when computing is faster.
- When no instance could become the fastest by fetching, no fetch is evaluated: the terms of all
  candidates are then those of computing the blocks that they lack.
- Of several places with the longest prefix, the one that would finish sending it first is the
  source.
- TTFTs within `near_share` of the lowest are ties: of these, the instance with the least work to
  load blocks and compute is chosen, then the one with the fewest decodes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..handover_wait import handover_waits_s
from ..local_cost import Compute, own
from ..policy_registry import quickest, register
from ..remote_fetch import extend

if TYPE_CHECKING:
    from ..policy_registry import Choice, PolicyQuestion


@register("kvcache_centric")
class KvcacheCentric:
    """The lowest TTFT, where each instance recomputes or fetches the blocks that it lacks."""

    name = "kvcache_centric"

    def choose(self, question: PolicyQuestion) -> Choice:
        """The cost is the predicted TTFT in seconds."""
        threshold = question.settings.kvcache_centric.balancing_threshold
        compute = Compute(question)
        best = extend(question, own(question, compute), compute, threshold=threshold, to_win=True)
        ttft_s = best.ttft_s
        waits_s = handover_waits_s(question, ttft_s, best.own_s)
        choice = best.choice(quickest(question, ttft_s, best.own_s, waits_s), ttft_s)
        choice.terms["handover_wait_s"] = waits_s
        return choice
