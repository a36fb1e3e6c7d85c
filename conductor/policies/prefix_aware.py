"""SGLang's `cache_aware`: follow the longest prefix while the load is balanced.

    load = requests that wait or run
    1. if max(load) - min(load) > abs threshold and max(load) > rel threshold · min(load):
       the least loaded
    2. else if the best match is more than `match_threshold` of the prompt: the best match
    3. else: the least loaded

In step 3, SGLang takes the instance with the smallest tree, whatever its load. Its users report
that misses then pile up on one instance, whose cache they flush, which makes more misses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .base import Choice, lowest, register
from .local import Compute, own
from .simple import local_choice

if TYPE_CHECKING:
    from .base import Floats, Question


@register("prefix_aware")
class PrefixAware:
    """Prefix first, load when it is uneven."""

    name = "prefix_aware"

    def choose(self, question: Question) -> Choice:
        """The cost is the load in requests, or the prompt's blocks that the instance lacks; of
        equal matches, the less loaded one."""
        cluster, rows = question.cluster, question.rows
        mine = own(question, Compute(question))
        load: Floats = (cluster.queued[rows] + cluster.batch[rows]).astype(float)
        cost = self._unmatched(question, load) if self._follows(question, load) else load
        at = lowest(cost, question.dice)
        return local_choice(question, at, cost, mine, load=load)

    def _follows(self, question: Question, load: Floats) -> bool:
        settings = question.settings.prefix_aware
        high, low = float(load.max()), float(load.min())
        uneven = high - low > settings.balance_abs_threshold
        if uneven and high > settings.balance_rel_threshold * low:
            return False
        matched = int(question.local_blocks.max()) * question.block_tokens
        return matched > settings.match_threshold * question.request.prompt_tokens

    def _unmatched(self, question: Question, load: Floats) -> Floats:
        """Blocks that are lacking, and less than one more for the load."""
        blocks = len(question.request.keys) - question.local_blocks
        cost: Floats = blocks + load / (load.max() + 1.0)
        return cost
