"""What became of a request, and whether that is worth remembering for longer. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .inflight_requests import InflightRequest

# A prediction is far off if what was observed is more than twice or less than half of it, and by
# more than what a person notices.
FAR_OFF = 2.0
_NOTICED_S = 0.1
# Of TBT, whose objectives are some tens of milliseconds.
_NOTICED_TBT_S = 0.01


@dataclass(frozen=True, slots=True)
class RequestOutcome:
    """What was observed of a request. `end`: "finished", "cancelled", or why it lost its place
    ("expired", "preempted", "rescheduled", "rejected"); "" while it is in flight. `ttft_s` and the
    mean `tbt_s` are None until there is a first, and a second token. `found_tokens` of the prompt:
    what the engine had or loaded, if that was told."""

    end: str
    ttft_s: float | None
    tbt_s: float | None
    output_tokens: int
    found_tokens: int | None = None
    ended_at: float | None = None


def outcome_of(flight: InflightRequest, end: str = "", now: float | None = None) -> RequestOutcome:
    """What is observed of a request so far, or at its end."""
    first, last, tokens = flight.first_token_at, flight.last_token_at, flight.answered_tokens
    ttft_s = None if first is None else max(0.0, first - flight.decided_at)
    tbt_s = None
    if first is not None and last is not None and tokens > 1:
        tbt_s = max(0.0, last - first) / (tokens - 1)
    return RequestOutcome(end, ttft_s, tbt_s, tokens, flight.found_tokens, now)


def notable(flight: InflightRequest, outcome: RequestOutcome) -> str:
    """Why to remember it for longer: "missed" (an objective), "mispredicted", "lost" (it expired);
    "" for what is not."""
    decision, objectives = flight.decision, flight.request.objectives
    if outcome.end == "expired":
        return "lost"
    pairs = ((outcome.ttft_s, objectives.ttft_s), (outcome.tbt_s, objectives.tbt_s))
    if any(seen is not None and most is not None and seen > most for seen, most in pairs):
        return "missed"
    if _far_off(outcome.ttft_s, decision.predicted_ttft_s, _NOTICED_S) or _far_off(
        outcome.tbt_s, decision.predicted_tbt_s, _NOTICED_TBT_S
    ):
        return "mispredicted"
    return ""


def _far_off(observed_s: float | None, predicted_s: float, noticed_s: float) -> bool:
    if observed_s is None or abs(observed_s - predicted_s) <= noticed_s:
        return False
    return not predicted_s / FAR_OFF <= observed_s <= predicted_s * FAR_OFF
