"""How much longer than predicted a time may be taken to get: by what became of the admitted. Pure.

Who is admitted at a prediction of just the objective is late as often as not: predictions err, and
at the limit requests are admitted when the error is low. So admission multiplies a prediction by a
margin, at least 1, and learns it from its outcomes: if one of the admitted was late, the margin
grows a little, if one was in time, it shrinks by so much less that both balance when a share of
`late_share` is late. That is adaptive conformal inference (Gibbs and Candès, NeurIPS 2021): it
holds the share in the long run whatever the errors are like, and also when they depend on what was
admitted, as here.

Those who were in time tell of the margin only if it refused somebody meanwhile. Else the cluster
was not full, and the margin would be gone when it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .gaps import Gaps

# By how much the margin grows while as many are late, in a row, as are in flight: until these have
# ended, nothing is known of what a change did. Twice the error of the latency model, 5%.
STEP_SHARE = 0.1
# What the latency model errs by, before anything was observed.
FIRST = 1.05
# Of a shorter answer, less than ten gaps count, and one of them is that before it has joined a
# batch: it tells of that, and no margin for steps would make it shorter.
GAPS_MIN = 100
# A prediction that is wrong by more is no prediction.
MARGIN_MAX = 2.0


@dataclass(slots=True)
class Margin:
    """The factor for one kind of prediction."""

    factor: float = FIRST
    refused_at: float = -inf  # when somebody was last refused by this prediction

    def ended(self, *, late: bool, late_share: float, decided_at: float, in_flight: int) -> None:
        """One who was admitted at `decided_at` was late, or in time. `in_flight`: how many are
        admitted now and have not ended."""
        step = STEP_SHARE / max(in_flight, 1)
        if late:
            self.factor = min(self.factor + step * (1.0 - late_share), MARGIN_MAX)
        elif self.refused_at >= decided_at:
            self.factor = max(self.factor - step * late_share, 1.0)


@dataclass(slots=True)
class _Promise:
    ttft_s: float
    tbt_s: float
    decided_at: float


class Margins:
    """Those for the time to the first token, and for that between tokens. Not thread-safe.

    The caller reports each admitted request by `admitted`, and then by `first_token` and `ended`;
    others are ignored.
    """

    def __init__(self, late_share: float) -> None:
        self.late_share = late_share
        self.ttft = Margin()
        self.tbt = Margin()
        self._promises: dict[str, _Promise] = {}

    def refused(self, reason: str, now: float) -> None:
        """Somebody was refused, for a reason as in `Rejection`."""
        if reason == "ttft":
            self.ttft.refused_at = now
        elif reason == "tbt":
            self.tbt.refused_at = now

    def admitted(self, request_id: str, ttft_s: float, tbt_s: float, now: float) -> None:
        """A request may rely on these times; infinite for none."""
        if min(ttft_s, tbt_s) < inf:
            self._promises[request_id] = _Promise(ttft_s, tbt_s, now)

    def first_token(self, request_id: str, now: float) -> None:
        """Its first token has come."""
        promise = self._promises.get(request_id)
        if promise is not None and promise.ttft_s < inf:
            self._learn(self.ttft, promise, late=now - promise.decided_at > promise.ttft_s)
            promise.ttft_s = inf

    def ended(self, request_id: str, gaps: Gaps | None) -> None:
        """It has ended with these gaps between tokens; None if it was given up."""
        promise = self._promises.pop(request_id, None)
        if promise is None or promise.tbt_s == inf or gaps is None or gaps.count < GAPS_MIN:
            return
        tbt_s = gaps.tbt_s()
        assert tbt_s is not None, "it has gaps"
        self._learn(self.tbt, promise, late=tbt_s > promise.tbt_s)

    def _learn(self, margin: Margin, promise: _Promise, *, late: bool) -> None:
        margin.ended(
            late=late,
            late_share=self.late_share,
            decided_at=promise.decided_at,
            in_flight=len(self._promises) + 1,
        )
