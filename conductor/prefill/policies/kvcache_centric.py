"""Mooncake's Algorithm 1 (arXiv 2407.00079; FAST '25), the default.

    longest = the longest prefix that any place has
    for each instance:
        if longest / own prefix < balancing threshold:
            TTFT = queue + prefill(own prefix)
        else:
            TTFT = queue + transfer(longest - own prefix) + prefill(longest)
    choose the lowest TTFT

An instance that fetches becomes a holder: hot prefixes get replicas where they are needed, without
a prediction of hot prefixes.

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
from ..policy_registry import Choice, quickest, register
from ..remote_fetch import extend

if TYPE_CHECKING:
    from ..policy_registry import PolicyQuestion


@register("kvcache_centric")
class KvcacheCentric:
    """The lowest TTFT, where each instance recomputes or fetches the blocks that it lacks."""

    name = "kvcache_centric"

    def choose(self, question: PolicyQuestion) -> Choice:
        """The cost is the predicted TTFT in seconds."""
        settings, compute = question.settings.kvcache_centric, Compute(question)
        mine = own(question, compute)
        best = extend(
            question,
            mine,
            compute,
            threshold=settings.balancing_threshold,
            overlap=settings.overlap,
            to_win=True,
        )
        waits_s = handover_waits_s(question, best.ttft_s, best.ttft_s - question.queue_s)
        at = quickest(question, best.ttft_s, best.transfer_s + best.compute_s, waits_s)
        terms = {
            "queue_s": question.queue_s,
            "load_s": mine.load_s,
            "transfer_s": best.transfer_s,
            "prefill_s": best.compute_s,
            "handover_wait_s": waits_s,
        }
        fetches = best.fetches(at, int(mine.blocks[at]))
        return Choice(at, best.ttft_s, best.ttft_s, int(best.blocks[at]), terms, fetches)
