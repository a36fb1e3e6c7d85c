"""What the planner needs to know of the prompts of an interval: sums, and means of them. Pure.

Prefill of a prompt of n tokens, p of them cached, takes c0 + c1 x + c2 q with x = n - p computed
tokens and q = n² - p². The time of the mean prompt is not the mean time: of one prompt of 100,000
tokens among nine of 1,000 the squares are nine times the square of their mean. So q is summed
itself; and since a queue's wait grows with the mean *square* of the time (Pollaczek and Khinchine),
x², x q and q² as well.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple, Self

if TYPE_CHECKING:
    from collections.abc import Sequence


class PromptMoments(NamedTuple):
    """Means over prompts of x, q, x², x q and q²: see the top of the file."""

    computed: float
    quadratic: float
    computed_squared: float
    computed_quadratic: float
    quadratic_squared: float

    def mean_s(self, latency: Sequence[float]) -> float:
        """The mean prefill time on an instance."""
        c0, c1, c2 = latency[:3]
        return c0 + c1 * self.computed + c2 * self.quadratic

    def variation(self, latency: Sequence[float]) -> float:
        """The coefficient of variation of the prefill time; 0 if prefill takes no time."""
        (c0, c1, c2), mean_s = latency[:3], self.mean_s(latency)
        if mean_s <= 0:
            return 0.0
        squared = (
            c0 * c0
            + 2 * c0 * (c1 * self.computed + c2 * self.quadratic)
            + c1 * c1 * self.computed_squared
            + 2 * c1 * c2 * self.computed_quadratic
            + c2 * c2 * self.quadratic_squared
        )
        return math.sqrt(max(0.0, squared - mean_s * mean_s)) / mean_s


class PromptSums(NamedTuple):
    """Sums over prompts: how many, their tokens, and what `PromptMoments` are the means of."""

    requests: float = 0.0
    prompt_tokens: float = 0.0
    computed: float = 0.0
    quadratic: float = 0.0
    computed_squared: float = 0.0
    computed_quadratic: float = 0.0
    quadratic_squared: float = 0.0

    @classmethod
    def of(cls, prompt_tokens: int, computed_tokens: int) -> Self:
        """Of one prompt, `computed_tokens` of which are not cached."""
        n, x = float(prompt_tokens), float(min(computed_tokens, prompt_tokens))
        q = n * n - (n - x) ** 2
        return cls(1.0, n, x, q, x * x, x * q, q * q)

    def plus(self, other: Sequence[float]) -> Self:
        """The sums of both."""
        return type(self)(*(a + b for a, b in zip(self, other, strict=True)))

    def moments(self) -> PromptMoments:
        """The means. Of at least one prompt."""
        return PromptMoments(*(total / self.requests for total in self[2:]))


NO_PROMPTS = PromptSums()
