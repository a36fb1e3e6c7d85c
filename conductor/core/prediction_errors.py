"""Predicted and observed TTFT, TBT and cached tokens of requests. Pure: takes `now`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from ..records import Decision, RequestEvent

# A request without further events is dropped after this many newer requests: 20 MB.
WATCHED_MAX = 100_000


@dataclass(slots=True)
class _Watched:
    decided_at: float  # the decision's time, which identifies it among decisions for one request
    began_at: float
    ttft_s: float
    tbt_s: float
    route: tuple[str, str]
    cached_tokens: int | None  # None once the engine's own number was compared with it
    last_token_at: float | None = None


class ObservedTimes(msgspec.Struct, frozen=True, gc=False):
    """Predicted and observed seconds of `kind` "ttft" or "tbt", over `tokens` tokens (ttft: 1)."""

    kind: str
    predicted_s: float
    observed_s: float
    tokens: int = 1


class Timings:
    """Turns events of requests into observed times. Keeps at most `watched_max` requests."""

    def __init__(self, watched_max: int = WATCHED_MAX) -> None:
        self._watched: dict[str, _Watched] = {}
        self._watched_max = watched_max

    def __len__(self) -> int:
        return len(self._watched)

    def begin(self, decision: Decision, now: float) -> None:
        """Start timing a request. Idempotent for a repeated decision; a new decision (the request
        was preempted and sent again) restarts the timing."""
        known = self._watched.get(decision.request_id)
        if known is not None:
            if known.decided_at == decision.decided_at:
                return
            del self._watched[decision.request_id]  # so that it is the youngest again
        if len(self._watched) >= self._watched_max:
            del self._watched[next(iter(self._watched))]  # the oldest
        self._watched[decision.request_id] = _Watched(
            decision.decided_at, now, decision.predicted_ttft_s, decision.predicted_tbt_s,
            (decision.prefill, decision.decode), decision.cached_tokens,
        )  # fmt: skip

    def forget(self, request_id: str) -> None:
        """Stop timing a request that was given up."""
        self._watched.pop(request_id, None)

    def expected_tokens(self, event: RequestEvent) -> int | None:
        """How many cached tokens the decision counted on, of a request whose engine tells what it
        found; None where another route tells, or it was told before."""
        watched = self._watched.get(event.request_id)
        if watched is None or event.route not in (None, watched.route):
            return None
        expected, watched.cached_tokens = watched.cached_tokens, None
        return expected

    def observe(self, event: RequestEvent, now: float) -> ObservedTimes | None:
        """The observed time that an event gives for a prediction, or None.

        Time between tokens is the mean since the last event with tokens: a client may report every
        16 tokens instead of each one.
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
                return None  # a hedged route won; the prediction was for the chosen route
            return ObservedTimes("ttft", watched.ttft_s, now - watched.began_at)
        if event.kind == "tokens" and event.tokens > 0:
            since, watched.last_token_at = watched.last_token_at, now
            if since is not None:
                tbt_s = (now - since) / event.tokens
                return ObservedTimes("tbt", watched.tbt_s, tbt_s, event.tokens)
        return None
