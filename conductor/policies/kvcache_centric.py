"""Mooncake's Algorithm 1 (arXiv 2407.00079; FAST '25), the default.

    longest = the longest prefix that any place has
    for each instance:
        if longest / own prefix < balancing threshold:
            TTFT = queue + prefill(own prefix)
        else:
            TTFT = queue + transfer(longest - own prefix) + prefill(longest)
    choose the lowest TTFT

An instance that fetches becomes a holder: hot prefixes replicate where they are needed, without
anybody predicting what will be hot.

What the paper leaves open:

- An own prefix of 0 makes the ratio infinite: such an instance may fetch.
- A transfer that takes longer than computing is not made, whatever the ratio. The paper says so in
  its text, not in the algorithm.
- Own blocks that are not in HBM cost their loading, and are left when computing is faster.
- When nobody could become the fastest by fetching, nobody's fetching is computed: the terms of the
  others are then those of computing what they lack.
- Of several that have the longest prefix, the one that would send it first is asked.
- TTFTs within `near_share` of the lowest are equal: of these, who has the least to bring and to
  compute is chosen, then who has the fewest decodes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .base import Choice, quickest, register
from .fetching import extend
from .local import Compute, own

if TYPE_CHECKING:
    from .base import Question


@register("kvcache_centric")
class KvcacheCentric:
    """The lowest TTFT, of recomputing or fetching what an instance lacks."""

    name = "kvcache_centric"

    def choose(self, question: Question) -> Choice:
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
        at = quickest(question, best.ttft_s, best.transfer_s + best.compute_s)
        terms = {
            "queue_s": question.queue_s,
            "load_s": mine.load_s,
            "transfer_s": best.transfer_s,
            "prefill_s": best.compute_s,
        }
        fetches = best.fetches(at, int(mine.blocks[at]))
        return Choice(at, best.ttft_s, best.ttft_s, int(best.blocks[at]), terms, fetches)
