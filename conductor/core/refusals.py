"""Rejections of requests that have a plan: after their prefill, and by full queues. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..admission import admission
from ..admission.admission import AdmissionForecast, Outlook
from ..cost.latency_model import decode_step_s
from ..records import Rejection
from .inflight_requests import RequestPhase

if TYPE_CHECKING:
    import random

    from ..admission.admission import Verdict
    from ..state.instance_table import Cluster
    from .inflight_requests import InflightRequest
    from .settings import Settings


def checked_again(
    flight: InflightRequest, cluster: Cluster, settings: Settings, dice: random.Random
) -> Verdict:
    """The second check of mode "baseline": by the load that is there when the prefill is done."""
    row, c = flight.decode_row, cluster
    more = flight.phase is RequestPhase.PREFILL  # else the columns already count the request
    batch = int(c.batch[row]) + more
    context = float(c.context_tokens[row]) + more * flight.request.prompt_tokens
    tbt_s = decode_step_s(c.d0.item(row), c.d1.item(row), c.d2.item(row), batch, context)
    forecast = AdmissionForecast(flight.decision.predicted_ttft_s, tbt_s, tbt_s)
    return admission.decide_decode(Outlook(flight.request, forecast), settings.admission, dice)


def queue_full(
    flight: InflightRequest, settings: Settings, dice: random.Random, now: float
) -> Rejection:
    """Its instance has as many waiting as may wait."""
    wait_s = flight.prefilled_s - flight.own_s
    return Rejection(
        flight.request.id,
        "queue_full",
        f"{flight.decision.prefill} has as many waiting as settings.queue.waiting_max allows",
        flight.decision.predicted_ttft_s,
        flight.decision.predicted_tbt_s,
        admission.retry_after_s(wait_s, settings.admission, dice),
        candidates=flight.decision.candidates,
        decided_at=now,
    )


def preempted(victim: InflightRequest, by: str, now: float) -> Rejection:
    """It left a full queue for the request `by`."""
    return Rejection(
        victim.request.id,
        "preempted",
        f"it had to leave a full queue for {by!r}, which is of a higher class: send it again",
        retry_after_s=max(1.0, victim.decision.predicted_ttft_s),
        decided_at=now,
    )
