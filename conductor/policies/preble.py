"""Preble's E2 (arXiv 2407.00023): exploit what is cached, or explore by load.

    load     = queued prefill + what the running requests will still decode      [seconds]
    evict    = tokens that have to leave · evicted_reuse · c1
    explore  = load + evict + prefill of what is not there

    if the longest prefix of any instance is more than `exploit_share` of the prompt:
        the least loaded of those that have it ...
        ... unless its load is more than `rebalance_ratio` of the lowest one
    else: the lowest `explore`

Preble sums the load over a window of three minutes, from what it sent where. Here it is what waits
and runs now, which the cluster's columns know. Preble also copies a subtree once its TTFT doubles;
here an overloaded holder loses its privilege, and whoever is explored instead becomes a holder.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .base import Choice, lowest, register
from .local import Compute, own
from .simple import local_choice

if TYPE_CHECKING:
    from .base import Floats, Question


@register("preble")
class Preble:
    """Exploit or explore."""

    name = "preble"

    def choose(self, question: Question) -> Choice:
        """The cost is in seconds. When exploiting, those that do not have the prefix cost more than
        all that have it."""
        settings = question.settings.preble
        mine = own(question, Compute(question))
        load = question.queue_s + _decode_s(question)
        longest = int(mine.blocks.max())
        cached_tokens = longest * question.block_tokens
        cost = load + _evict_s(question) + mine.load_s + mine.compute_s
        if cached_tokens > settings.exploit_share * question.request.prompt_tokens:
            holds = mine.blocks == longest
            if not self._overloaded(question, float(load[holds].min()), float(load.min())):
                cost = np.where(holds, load, cost + load[holds].max() + 1.0)
        at = lowest(cost, question.dice)
        return local_choice(question, at, cost, mine, load_cost_s=load)

    def _overloaded(self, question: Question, holder_s: float, lowest_s: float) -> bool:
        settings = question.settings.preble
        limit_s: float = max(settings.rebalance_min_s, settings.rebalance_ratio * lowest_s)
        return holder_s > limit_s


def _decode_s(question: Question) -> Floats:
    """How long what runs will still run, if each answers the mean: a step decodes all of them."""
    c, rows = question.cluster, question.rows
    batch = c.batch[rows]
    step_s = c.d0[rows] + c.d1[rows] * batch + c.d2[rows] * c.context_tokens[rows]
    left_s: Floats = np.where(batch > 0, question.settings.preble.output_tokens * step_s, 0.0)
    return left_s


def _evict_s(question: Question) -> Floats:
    """What it costs to compute again, later, what has to leave HBM for this prompt."""
    c, rows = question.cluster, question.rows
    hbm_tokens = question.hbm_blocks * question.block_tokens
    needed = question.request.prompt_tokens - hbm_tokens
    free = c.kv_capacity_tokens[rows] - c.kv_used_tokens[rows]
    evicted = np.maximum(needed - np.maximum(free, 0), 0)
    cost_s: Floats = question.settings.preble.evicted_reuse * c.c1[rows] * evicted
    return cost_s
