"""The policy "prefix_aware", SGLang's `cache_aware`: the longest prefix while load is balanced.

    load = queued and running requests
    1. if max(load) - min(load) > abs threshold and max(load) > rel threshold · min(load):
       the least loaded
    2. else if the best match is more than `match_threshold` of the prompt: the best match
    3. else: the least loaded

In step 3, SGLang takes the instance with the smallest prefix tree, whatever its load. Its users
report that misses then pile up on one instance and evict its cache, which causes more misses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...state.part_keys import PART_TOKENS
from ..local_cost import Compute, own
from ..policy_registry import Choice, lowest, register
from .simple import local_choice

if TYPE_CHECKING:
    from ..policy_registry import Floats, PolicyQuestion


@register("prefix_aware")
class PrefixAware:
    """The longest prefix, or the least load when the load is uneven."""

    name = "prefix_aware"

    def choose(self, question: PolicyQuestion) -> Choice:
        """The cost is the load in requests, or the number of the prompt's blocks that the instance
        lacks, or of parts where it is known to have some of a block; load breaks ties between equal
        matches."""
        cluster, rows = question.cluster, question.rows
        mine = own(question, Compute(question))
        load: Floats = (cluster.queued[rows] + cluster.batch[rows]).astype(float)
        cost = self._unmatched(question, load) if self._follows(question, load) else load
        at = lowest(cost, question.dice)
        return local_choice(question, at, cost, mine, load=load)

    def _follows(self, question: PolicyQuestion, load: Floats) -> bool:
        settings = question.settings.prefix_aware
        high, low = float(load.max()), float(load.min())
        uneven = high - low > settings.balance_abs_threshold
        if uneven and high > settings.balance_rel_threshold * low:
            return False
        matched = int(question.tokens(question.local_blocks).max())
        return matched > settings.match_threshold * question.request.prompt_tokens

    def _unmatched(self, question: PolicyQuestion, load: Floats) -> Floats:
        """The number of blocks (or parts) that each instance lacks, plus its load scaled to below
        1."""
        local, request = question.local_blocks, question.request
        if question.cached_part_tokens is None:
            lacks: Floats = (len(request.keys) - local).astype(float)
        else:
            lacks = (request.prompt_tokens - question.tokens(local)) / PART_TOKENS
        cost: Floats = lacks + load / (load.max() + 1.0)
        return cost
