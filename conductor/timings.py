"""What was predicted for a request, beside what then happened. Pure: takes `now`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .records import Decision, RequestEvent

# A request that is not heard of any more leaves when so many newer ones have come: 20 MB.
WATCHED_MAX = 100_000


@dataclass(slots=True)
class _Watched:
    decided_at: float  # the decision's own time, which tells it from another of the same request
    began_at: float
    ttft_s: float
    tbt_s: float
    route: tuple[str, str]
    last_token_at: float | None = None


@dataclass(frozen=True, slots=True)
class Observed:
    """`kind` "ttft" or "tbt": predicted and observed seconds; of `tokens` tokens (1 for ttft)."""

    kind: str
    predicted_s: float
    observed_s: float
    tokens: int = 1


class Timings:
    """Turns events of requests into observations."""

    def __init__(self, watched_max: int = WATCHED_MAX) -> None:
        self._watched: dict[str, _Watched] = {}
        self._watched_max = watched_max

    def __len__(self) -> int:
        return len(self._watched)

    def begin(self, decision: Decision, now: float) -> None:
        """A request was sent on its way. The same decision again, a repeated call, changes nothing;
        another one, of a request that was preempted and sent again, begins anew."""
        known = self._watched.get(decision.request_id)
        if known is not None:
            if known.decided_at == decision.decided_at:
                return
            del self._watched[decision.request_id]  # and is the youngest again
        if len(self._watched) >= self._watched_max:
            del self._watched[next(iter(self._watched))]  # the oldest
        self._watched[decision.request_id] = _Watched(
            decision.decided_at, now, decision.predicted_ttft_s, decision.predicted_tbt_s,
            (decision.prefill, decision.decode),
        )  # fmt: skip

    def forget(self, request_id: str) -> None:
        """It was given up."""
        self._watched.pop(request_id, None)

    def observe(self, event: RequestEvent, now: float) -> Observed | None:
        """What an event says about a prediction, if anything.

        Time between tokens is the mean since the last event with tokens: who reports every 16
        tokens is not asked for each one's time.
        """
        watched = self._watched.get(event.request_id)
        if watched is None:
            return None
        if event.kind in ("finished", "cancelled"):
            del self._watched[event.request_id]
            return None
        if event.kind == "first_token" and watched.last_token_at is None:
            watched.last_token_at = now
            if event.route not in (None, watched.route):
                return None  # another route has won a race; this one's time was not predicted
            return Observed("ttft", watched.ttft_s, now - watched.began_at)
        if event.kind == "tokens" and event.tokens > 0:
            since, watched.last_token_at = watched.last_token_at, now
            if since is not None:
                tbt_s = (now - since) / event.tokens
                return Observed("tbt", watched.tbt_s, tbt_s, event.tokens)
        return None
