"""The health of a node or a server as one client sees it, and when to ask it again. Pure.

It is *well* while it answers. It is *late* after it was silent for the short time that it has where
another can be asked: it may only be slow, so it stays the last candidate. It is *dead* after any
other failure, and is left alone until `retry_at`. Each failure in a row doubles that rest; one
answer ends it. With `jitter`, clients that failed together do not all retry at the same moment.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

# The rests of a node: long enough to not pay for a dead one with every get, short enough to use it
# soon after its restart.
FIRST_S = 0.5
MAX_S = 10.0
_DOUBLINGS_MAX = 16


class Health:
    """The health of one node or server, by the clock of whoever passes `now`. Not thread-safe."""

    __slots__ = ("_first_s", "_jitter", "_max_s", "failures", "late", "retry_at")

    def __init__(
        self,
        first_s: float = FIRST_S,
        max_s: float = MAX_S,
        jitter: Callable[[], float] | None = None,
    ) -> None:
        """`first_s`: the rest after the first failure; `max_s`: the longest one. `jitter()`, from 0
        to 1, makes each rest between half and all as long."""
        self._first_s = first_s
        self._max_s = max_s
        self._jitter = jitter
        self.failures = 0  # in a row
        self.retry_at = -math.inf
        self.late = False

    @property
    def well(self) -> bool:
        """Whether it has not failed since its last answer."""
        return not self.failures

    def rests(self, now: float) -> bool:
        """Whether it failed and its rest is not over."""
        return now < self.retry_at

    def answered(self) -> None:
        """Record an answer."""
        self.failures, self.late, self.retry_at = 0, False, -math.inf

    def failed(self, now: float, *, late: bool = False) -> None:
        """Record a failure; `late`: it was silent for a short time only."""
        self.failures += 1
        self.late = late
        self.retry_at = now + self._rest_s()

    def admits(self, now: float) -> bool:
        """Whether to ask it now, as a circuit breaker tells: always while it is well, else one
        probe per rest. If it is not well, True makes the caller the probe."""
        if self.well:
            return True
        if self.rests(now):
            return False
        self.retry_at = now + self._rest_s()
        return True

    def _rest_s(self) -> float:
        rest_s = min(self._max_s, self._first_s * 2.0 ** min(self.failures - 1, _DOUBLINGS_MAX))
        return rest_s if self._jitter is None else rest_s * (1 + self._jitter()) / 2
