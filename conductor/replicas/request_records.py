"""Converts in-flight requests to words for other conductors, and back for a takeover. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..core.inflight_requests import InflightRequest, RequestPhase
from ..records import Decision, Objectives, Request
from .bulletins import SECONDS_MAX, Placed

if TYPE_CHECKING:
    from ..state.instance_table import Cluster


def placed_word(
    flight: InflightRequest,
    cluster: Cluster,
    *,
    claim: int,
    keyless: Placed | None,
    ttl_s: float,
    unix_offset_s: float,
) -> Placed:
    """The word for an in-flight request. `keyless` is the previous owner's word for a request that
    was taken over and whose keys are not known."""
    request, decision, keys = flight.request, flight.decision, flight.request.keys
    return Placed(
        request_id=request.id,
        claim=claim,
        decided_at=flight.decided_at + unix_offset_s,
        ttl_s=min(ttl_s, SECONDS_MAX),
        blocks=keyless.blocks if keyless else len(keys),
        last_key=keyless.last_key if keyless else keys[-1] if keys else b"",
        model=request.model,
        prompt_tokens=request.prompt_tokens,
        priority=request.priority,
        tenant=request.tenant,
        output_class=request.output_class,
        objective_ttft_s=request.objectives.ttft_s,
        objective_tbt_s=request.objectives.tbt_s,
        prefill=decision.prefill,
        decode=decision.decode,
        policy=decision.policy,
        predicted_ttft_s=_seconds(decision.predicted_ttft_s),
        predicted_tbt_s=_seconds(decision.predicted_tbt_s),
        cached_tokens=decision.cached_tokens,
        available_tokens=decision.available_tokens,
        fetches=decision.fetches,
        layerwise=decision.layerwise,
        wait_for=decision.wait_for,
        output_tokens_max=decision.output_tokens_max,
        degraded=decision.degraded,
        shards=decision.shards,
        alternatives=decision.alternatives,
        own_s=_seconds(flight.own_s),
        prefill_s=_seconds(flight.prefill_s),
        prefill_tokens=flight.prefill_tokens,
        shares={cluster.name(row): tokens for row, tokens in flight.shares.items()},
        heavy=flight.heavy,
        prefilled=flight.phase is not RequestPhase.PREFILL,
    )


def decision_of(placed: Placed, decided_at: float) -> Decision:
    """The decision, without candidates; `decided_at` by this machine's clock."""
    names = (
        "request_id", "prefill", "decode", "policy", "predicted_ttft_s", "predicted_tbt_s",
        "cached_tokens", "available_tokens", "fetches", "layerwise", "wait_for",
        "output_tokens_max", "degraded", "shards", "alternatives",
    )  # fmt: skip
    told = {name: getattr(placed, name) for name in names}
    return Decision(**told, decided_at=decided_at, expires_at=decided_at + placed.ttl_s)


def left_of(placed: Placed) -> list[str]:
    """The instances with work left for the request."""
    return [placed.decode] if placed.prefilled else [placed.prefill, placed.decode]


def flight_of(
    placed: Placed,
    request: Request | None,
    cluster: Cluster,
    *,
    decided_at: float,
    ttl_s: float,
    now: float,
) -> InflightRequest:
    """The in-flight request for the conductor that takes it over now. Its instances must be in the
    cluster. Without `request` its keys are not known."""
    asked = request or Request(
        placed.request_id,
        placed.model,
        placed.prompt_tokens,
        objectives=Objectives(placed.objective_ttft_s, placed.objective_tbt_s),
        priority=placed.priority,
        tenant=placed.tenant,
        output_class=placed.output_class,
    )
    return InflightRequest(
        request=asked,
        decision=decision_of(placed, decided_at),
        prefill_row=cluster.row(placed.prefill),
        decode_row=cluster.row(placed.decode),
        own_s=placed.own_s,
        prefill_s=placed.prefill_s,
        prefill_tokens=placed.prefill_tokens,
        shares={cluster.row(name): n for name, n in placed.shares.items() if name in cluster},
        heavy=placed.heavy,
        decided_at=decided_at,
        expires_at=now + ttl_s,
        first_token_at=now,  # whenever it was: it is not observed here
    )


def _seconds(value: float) -> float:
    return min(max(value, 0.0), SECONDS_MAX)
