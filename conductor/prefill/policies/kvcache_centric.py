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

Three things differ from the paper, and each lowers TTFT where many prompts wait:

- Blocks come while the request waits in the queue, so the longer of the two counts.
- The own prefix includes blocks that prompts queued there before it will have computed by its turn.
- What is lowest is the TTFT and the delay of others (`delayed_others.py`): where many wait, a fetch
  that comes later than computing, and saves GPU time, is better for all of them together.

What the paper leaves open:

- An own prefix of 0 makes the ratio infinite: such an instance may fetch.
- A transfer that costs more than computing is not made, whatever the ratio. The paper has this in
  its text, not in the algorithm.
- Own blocks that are not in HBM cost their loading time, and are not used when computing is faster.
- When no instance could become the fastest by fetching, no fetch is evaluated: the terms of all
  candidates are then those of computing the blocks that they lack.
- Of several places with the longest prefix, the one that would finish sending it first is the
  source.
- Costs within `near_share` of the lowest are ties: of these, the instance with the least work to
  load blocks and compute is chosen, then the one with the fewest decodes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..delayed_others import DelayedOthers
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
        """The cost is the predicted TTFT, and the delay of others, in seconds."""
        threshold = question.settings.kvcache_centric.balancing_threshold
        compute = Compute(question)
        others = DelayedOthers(question)
        best = extend(question, own(question, compute), compute, threshold=threshold, others=others)
        delayed_s = others.seconds(best.turn_s, best.own_s)
        cost_s = best.ttft_s + delayed_s
        waits_s = handover_waits_s(question, best.ttft_s, best.own_s)
        choice = best.choice(quickest(question, cost_s, best.own_s, waits_s), cost_s)
        choice.terms["handover_wait_s"] = waits_s
        choice.terms["others_s"] = delayed_s
        return choice
