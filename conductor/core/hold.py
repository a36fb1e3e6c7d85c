"""What is told of a held request to whoever waits for its release. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ..errors import UnknownRequest
from ..prefill.wait_estimate import FETCH_AHEAD_S_MAX
from .inflight_requests import RequestPhase

if TYPE_CHECKING:
    from .conductor import Conductor

# An instance with this label asks which of its requests to compute next.
PULLS_LABEL = "pulls"


@dataclass(frozen=True, slots=True)
class Hold:
    """Whether a request may be sent to its instance.

    `state`: "held"; "released"; or "moved", when one of its instances has gone or gets nothing new:
    then ask for a decision again. `place` among those held there of its class and higher ones, 1
    for the first; `release_s`: until its release, as predicted. `first_token_s`, of a released one:
    until its prefill should be done.
    """

    state: Literal["held", "released", "moved"]
    place: int = 0
    release_s: float = 0.0
    first_token_s: float = 0.0


def hold_of(core: Conductor, request_id: str, now: float) -> Hold:
    """Whether a request is held. Raises UnknownRequest."""
    flight = core.ledger.get(request_id)
    if flight is None:
        raise UnknownRequest(f"no request {request_id!r} is in flight")
    if flight.phase is not RequestPhase.PREFILL:
        return Hold("released")
    row = flight.prefill_row
    if row < 0:
        return Hold("moved")
    if not core.dispatch.holds(request_id):
        return Hold("released", first_token_s=core.queues.running_s(row, now))
    if not core.takes_both(flight):
        return Hold("moved")
    begins_at = flight.decided_at + flight.decision.predicted_ttft_s - flight.own_s
    fetch_s = min(max(0.0, flight.ready_at - flight.decided_at), FETCH_AHEAD_S_MAX)
    release_s = max(0.0, begins_at - core.settings.queue.ahead_s - fetch_s - now)
    return Hold("held", core.queues.place(row, flight.request.priority), release_s)
