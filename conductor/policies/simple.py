"""Policies that do not look at the cache, or at nothing: to compare with, and for short prompts.

What the chosen instance happens to have is used, and predicted, by all of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .base import Choice, lowest, register
from .local import Compute, own, start_s

if TYPE_CHECKING:
    from .base import Floats, Question
    from .local import Own


def local_choice(question: Question, at: int, cost: Floats, own: Own, **terms: Floats) -> Choice:
    """A choice that uses what the instance and its node have, and fetches nothing."""
    ttft_s = start_s(question.queue_s, own.load_s, overlap=False) + own.compute_s
    seconds = {"queue_s": question.queue_s, "load_s": own.load_s, "prefill_s": own.compute_s}
    return Choice(at, cost, ttft_s, int(own.blocks[at]), seconds | terms)


def _choice(question: Question, at: int, cost: Floats) -> Choice:
    return local_choice(question, at, cost, own(question, Compute(question)))


def _all_but(question: Question, at: int) -> Floats:
    """A cost of 0 for one candidate and of 1 for all others."""
    cost = np.ones(len(question.rows))
    cost[at] = 0.0
    return cost


@register("random")
class Random:
    """Any instance, each as likely."""

    name = "random"

    def choose(self, question: Question) -> Choice:
        """The cost is 0 for the one and 1 for all others."""
        at = question.dice.randrange(len(question.rows))
        return _choice(question, at, _all_but(question, at))


@register("round_robin")
class RoundRobin:
    """One after the other, by row. Instances may come and go: the next one is the one after the
    last row that was given something, per model."""

    name = "round_robin"

    def __init__(self) -> None:
        self._last: dict[str, int] = {}  # per model, of which somebody registers each

    def choose(self, question: Question) -> Choice:
        """The cost is 0 for the one and 1 for all others."""
        model, rows = question.request.model, question.rows
        at = int(np.searchsorted(rows, self._last.get(model, -1), side="right")) % len(rows)
        self._last[model] = int(rows[at])
        return _choice(question, at, _all_but(question, at))


@register("least_loaded")
class LeastLoaded:
    """The shortest queue, in seconds."""

    name = "least_loaded"

    def choose(self, question: Question) -> Choice:
        """The cost is the wait in seconds."""
        at = lowest(question.queue_s, question.dice)
        return _choice(question, at, question.queue_s)


@register("power_of_two")
class PowerOfTwo:
    """The shorter queue of two instances that are drawn at random (Mitzenmacher, 2001): nearly as
    even as the shortest of all, and many conductors that know little of each other do not all
    choose the same one."""

    name = "power_of_two"

    def choose(self, question: Question) -> Choice:
        """The cost is the wait in seconds; more than any wait for those that were not drawn."""
        count, queue_s = len(question.rows), question.queue_s
        drawn = question.dice.sample(range(count), min(2, count))
        cost = queue_s + (1.0 + queue_s.max())
        cost[drawn] = queue_s[drawn]
        return _choice(question, lowest(cost, question.dice), cost)
