"""The policy "algorithm_1", Mooncake's Algorithm 1 to the letter (arXiv 2407.00079; FAST '25).

    best_len, best = the longest prefix of any place, and that place
    for each instance:
        if best_len / prefix_len < balancing threshold:
            TTFT = queue + prefill(prefix_len)
        else:
            TTFT = transfer(best, best_len - prefix_len) + queue + prefill(best_len)
    choose the lowest TTFT, the first one of equal ones

It is there to compare with; `kvcache_centric` is the same algorithm with what a cluster needs
besides. To the letter means:

- A transfer is made whenever the ratio says so, also if computing would be faster.
- `prefix_len` are all blocks that the instance and its node have now, in any tier; loading them
  takes no time. Blocks that are being computed do not count.
- The best match is the longest prefix alone, whatever its place is sending: of equal ones the
  first. So a hot prefix is fetched from one place.

Two things are not in the paper. The ratio of a prefix_len of 0 is infinite: such an instance
fetches. And an instance that cannot fetch uses what it has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..block_sources import places_of
from ..local_cost import Compute, turn_s
from ..policy_registry import Choice, register
from ..remote_fetch import Longest

if TYPE_CHECKING:
    from ...records import Fetch
    from ..policy_registry import PolicyQuestion


@register("algorithm_1")
class Algorithm1:
    """Mooncake's Algorithm 1, nothing added."""

    name = "algorithm_1"

    def choose(self, question: PolicyQuestion) -> Choice:
        """The cost is the predicted TTFT in seconds."""
        threshold = question.settings.algorithm_1.balancing_threshold
        prefix, best = question.held_blocks, _best_match(question)
        blocks, transfer_s = prefix, np.zeros(len(prefix))
        if best is not None:
            fetches = best.blocks >= threshold * prefix  # also for a prefix of 0
            fetches &= question.cluster.fetches.take(question.rows)
            blocks = np.where(fetches, np.maximum(best.blocks, prefix), prefix)
            transfer_s = np.where(fetches, best.transfer_s(prefix), 0.0)
        prefill_s = Compute(question).seconds(blocks)
        queue_s = turn_s(question)
        ttft_s = transfer_s + queue_s + prefill_s
        at = int(ttft_s.argmin())
        terms = {"queue_s": queue_s, "transfer_s": transfer_s, "prefill_s": prefill_s}
        fetched: tuple[Fetch, ...] = ()
        if best is not None and blocks[at] > prefix[at]:
            fetched = best.fetches(at, int(prefix[at]))
        own_s, ready_s = float(prefill_s[at]), float(transfer_s[at])
        return Choice(at, ttft_s, ttft_s, int(blocks[at]), own_s, terms, fetched, ready_s)


def _best_match(question: PolicyQuestion) -> Longest | None:
    """The first place with the longest leading part of the prompt; None if nobody has any."""
    places = places_of(question)
    if not len(places):
        return None
    _, whole = places.lengths(question.match)
    at = int(whole.argmax())
    return Longest(question, places, at, int(whole[at])) if whole[at] else None
