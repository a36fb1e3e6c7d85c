"""Policies that choose without the cache: random, round robin, and by queueing time.

They are baselines for comparison, and for short prompts. All of them use the blocks that the chosen
instance happens to have cached, also in the predictions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..local_cost import Compute, own, turn_s
from ..policy_registry import Choice, lowest, register

if TYPE_CHECKING:
    from ..local_cost import Own
    from ..policy_registry import Floats, PolicyQuestion


def local_choice(
    question: PolicyQuestion, at: int, cost: Floats, own: Own, **terms: Floats
) -> Choice:
    """A choice that uses the cached blocks of the instance and its node, without fetches."""
    queue_s, own_s = turn_s(question), own.load_s + own.compute_s
    seconds = {"queue_s": queue_s, "load_s": own.load_s, "prefill_s": own.compute_s}
    blocks = int(own.blocks[at])
    return Choice(at, cost, queue_s + own_s, blocks, float(own_s[at]), seconds | terms)


def _choice(question: PolicyQuestion, at: int, cost: Floats) -> Choice:
    return local_choice(question, at, cost, own(question, Compute(question)))


def _all_but(question: PolicyQuestion, at: int) -> Floats:
    """A cost of 0 for one candidate and of 1 for all others."""
    cost = np.ones(len(question.rows))
    cost[at] = 0.0
    return cost


@register("random")
class Random:
    """A random instance, uniformly distributed."""

    name = "random"

    def choose(self, question: PolicyQuestion) -> Choice:
        """The cost is 0 for the chosen instance and 1 for all others."""
        at = question.dice.randrange(len(question.rows))
        return _choice(question, at, _all_but(question, at))


@register("round_robin")
class RoundRobin:
    """The instances in turn, by row. Instances may come and go: the next one is the first after the
    last row that was chosen for the model and key space."""

    name = "round_robin"

    def __init__(self) -> None:
        # Only of models with registered instances.
        self._last: dict[tuple[str, str], int] = {}

    def choose(self, question: PolicyQuestion) -> Choice:
        """The cost is 0 for the chosen instance and 1 for all others."""
        request, rows = question.request, question.rows
        of = request.model, request.key_space
        at = int(np.searchsorted(rows, self._last.get(of, -1), side="right")) % len(rows)
        self._last[of] = int(rows[at])
        return _choice(question, at, _all_but(question, at))


@register("least_loaded")
class LeastLoaded:
    """The shortest queue, in seconds."""

    name = "least_loaded"

    def choose(self, question: PolicyQuestion) -> Choice:
        """The cost is the queueing time in seconds."""
        at = lowest(question.queue_s, question.dice)
        return _choice(question, at, question.queue_s)


@register("power_of_two")
class PowerOfTwo:
    """The shorter queue of two random instances (Mitzenmacher, 2001): balances nearly as evenly as
    the shortest queue of all, and many conductors with little information about each other do not
    all choose the same instance."""

    name = "power_of_two"

    def choose(self, question: PolicyQuestion) -> Choice:
        """The cost is the queueing time in seconds; for instances that were not drawn, more than
        any queueing time."""
        count, queue_s = len(question.rows), question.queue_s
        drawn = question.dice.sample(range(count), min(2, count))
        cost = queue_s + (1.0 + queue_s.max())
        cost[drawn] = queue_s[drawn]
        return _choice(question, lowest(cost, question.dice), cost)
