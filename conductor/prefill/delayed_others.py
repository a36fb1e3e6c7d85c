"""By how much a prefill delays others, in seconds of all of them together. Pure.

Who is placed where it has the lowest TTFT takes GPU time of those who come after it: with queues
that do not end, a second of computing that could have been saved is a second for each of them. So
it counts as well, for

- those who will come: as many are expected to come while a request waits as it found waiting
  (Little's law), and each of them waits for its prefill as well. Who comes can be placed anywhere,
  so that is the mean over the candidates of how many wait there, besides the one that is computed;
- those who are there already, and whose blocks still come: an instance computes others meanwhile,
  so one that is placed there and begins before them holds them up until it is done.

In an idle cluster nobody waits, and both are 0.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from .policy_registry import Floats, PolicyQuestion


@dataclass(slots=True)
class DelayedOthers:
    """Those whom the prompt of a question could delay. `behind`: how many will wait for it."""

    question: PolicyQuestion
    behind: float = field(init=False)

    def __post_init__(self) -> None:
        question = self.question
        queued = question.cluster.queued.take(question.rows)
        self.behind = int(np.maximum(queued - 1, 0).sum()) / len(queued)

    def seconds(self, turn_s: Floats, own_s: Floats) -> Floats:
        """[candidates] If it has its turn in `turn_s` and then occupies the instance for
        `own_s`."""
        delayed_s: Floats = self.behind * own_s
        coming = self.question.coming
        if coming is not None:
            overtaken = coming.requests * (coming.ready_s > turn_s)
            delayed_s = delayed_s + overtaken * np.maximum(turn_s + own_s - coming.ready_s, 0.0)
        return delayed_s
