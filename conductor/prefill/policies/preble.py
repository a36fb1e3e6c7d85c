"""The policy "preble", Preble's E2 (arXiv 2407.00023): exploit cached blocks, or explore by load.

    load     = queued prefill + remaining decode of the running requests         [seconds]
    evict    = tokens to be evicted · evicted_reuse · c1
    explore  = load + evict + loading of the own cached blocks + prefill of the rest

    if the longest prefix of any instance is more than `exploit_share` of the prompt:
        the least loaded of the instances that have it ...
        ... unless its load is above `rebalance_min_s` and `rebalance_ratio` times the lowest one
    else: the lowest `explore`

Preble sums the load over a window of three minutes, from the requests that it sent to each
instance. Here it is the current queued and running work, from the cluster's columns. Preble also
replicates a subtree once its TTFT doubles; here an overloaded holder loses its preference, and the
instance that is explored instead becomes a holder.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ...cost.latency_model import decode_step_s
from ..local_cost import Compute, own
from ..policy_registry import Choice, lowest, register
from .simple import local_choice

if TYPE_CHECKING:
    from ..policy_registry import Floats, PolicyQuestion


@register("preble")
class Preble:
    """Exploits the longest cached prefix, or explores by load."""

    name = "preble"

    def choose(self, question: PolicyQuestion) -> Choice:
        """The cost is in seconds. When exploiting, instances without the longest prefix cost more
        than all that have it."""
        settings = question.settings.preble
        mine = own(question, Compute(question))
        load = question.queue_s + _decode_s(question)
        tokens = question.tokens(mine.blocks)
        cached_tokens = int(tokens.max())
        cost = load + _evict_s(question) + mine.load_s + mine.compute_s
        if cached_tokens > settings.exploit_share * question.request.prompt_tokens:
            holds = tokens == cached_tokens
            if not self._overloaded(question, float(load[holds].min()), float(load.min())):
                cost = np.where(holds, load, cost + load[holds].max() + 1.0)
        at = lowest(cost, question.dice)
        return local_choice(question, at, cost, mine, load_cost_s=load)

    def _overloaded(self, question: PolicyQuestion, holder_s: float, lowest_s: float) -> bool:
        settings = question.settings.preble
        limit_s: float = max(settings.rebalance_min_s, settings.rebalance_ratio * lowest_s)
        return holder_s > limit_s


def _decode_s(question: PolicyQuestion) -> Floats:
    """Remaining seconds of the running decodes, if each generates the mean number of tokens more;
    one step decodes all of them."""
    c, rows = question.cluster, question.rows
    batch = c.batch[rows]
    step_s = decode_step_s(c.d0[rows], c.d1[rows], c.d2[rows], batch, c.context_tokens[rows])
    left_s: Floats = np.where(batch > 0, question.settings.preble.output_tokens * step_s, 0.0)
    return left_s


def _evict_s(question: PolicyQuestion) -> Floats:
    """Seconds of recomputing later the tokens that have to be evicted from HBM for this prompt."""
    c, rows = question.cluster, question.rows
    hbm_tokens = question.tokens(question.hbm_blocks)
    needed = question.request.prompt_tokens - hbm_tokens
    free = c.kv_capacity_tokens[rows] - c.kv_used_tokens[rows]
    evicted = np.maximum(needed - np.maximum(free, 0), 0)
    cost_s: Floats = question.settings.preble.evicted_reuse * c.c1[rows] * evicted
    return cost_s
