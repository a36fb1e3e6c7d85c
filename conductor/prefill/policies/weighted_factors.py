"""The policy "weighted_factors": one latency cost of weighted factors. Pure.

That of Fregly, "AI Systems Performance Engineering" (O'Reilly, 2025), chapter 17, Table 17-3:

    cost = 3 · KV occupancy, % + 1 · active requests + 0.5 · memory bandwidth in use, %
         - 10 · (it has the prefix) - 1 · (it had the prefix a moment ago)

The lowest is chosen. The book takes the factors from telemetry; here they are

    KV occupancy       what is reserved or reported in HBM, and prompts that wait, of the capacity
    active requests    those that wait, are prefilled or decode
    memory bandwidth   the part of a decode step that reads KV: its step time less that of an empty
                       context
    has the prefix     it and its node have the longest part of the prompt that any one holder has:
                       blocks, or parts of the first one if nobody has blocks
    a moment ago       a request with the same first blocks is being prefilled there

It knows no times and fetches nothing. Percentages are of 100, as in the book's code, so a prefix is
worth some 3 points of occupancy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..local_cost import Compute, own
from ..policy_registry import Choice, lowest, register
from .simple import local_choice

if TYPE_CHECKING:
    from ..policy_registry import Floats, PolicyQuestion


@register("weighted_factors")
class WeightedFactors:
    """The lowest weighted sum of factors."""

    name = "weighted_factors"

    def choose(self, question: PolicyQuestion) -> Choice:
        """The cost has no unit. Terms are the factors, before their weights."""
        weights = question.settings.weighted_factors
        factors = _factors(question)
        cost = (
            weights.occupancy * factors["occupancy_percent"]
            + weights.active * factors["active_requests"]
            + weights.bandwidth * factors["bandwidth_percent"]
            - weights.match * factors["match"]
            - weights.recent * factors["recent"]
        )
        at = lowest(cost, question.dice)
        return local_choice(question, at, cost, own(question, Compute(question)), **factors)


def _factors(question: PolicyQuestion) -> dict[str, Floats]:
    cluster, rows = question.cluster, question.rows
    batch, context = cluster.batch.take(rows), cluster.context_tokens.take(rows)
    used = np.maximum(cluster.kv_used_tokens.take(rows), context)
    used = used + cluster.queued_tokens.take(rows)
    capacity = np.maximum(cluster.kv_capacity_tokens.take(rows), 1)
    reading_s = cluster.d2.take(rows) * context
    step_s = cluster.d0.take(rows) + cluster.d1.take(rows) * batch + reading_s
    has = (question.local_blocks == question.best_blocks) & (question.best_blocks > 0)
    parts = question.cached_part_tokens
    if parts is not None and not question.best_blocks:
        has = (parts == parts.max()) & (parts > 0)
    computing = question.computing.match(question.request.keys, question.now)
    recent = rows == (-1 if computing is None else computing.row)
    return {
        "occupancy_percent": 100.0 * np.minimum(used / capacity, 1.0),
        "active_requests": (cluster.queued.take(rows) + batch).astype(np.float64),
        "bandwidth_percent": 100.0 * reading_s / np.maximum(step_s, 1e-9),
        "match": has.astype(np.float64),
        "recent": recent.astype(np.float64),
    }
