"""From the core's records to what travels, and back. Pure."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ..errors import InvalidRequest
from ..records import Decision, InstanceSpec, Load, Objectives, Request, RequestEvent, Role
from .keying import parse_keys
from .models import (
    ID_MAX,
    CandidateReply,
    DecisionReply,
    DrainReply,
    EntryReply,
    FetchReply,
    FlipReply,
    HotPrefixReply,
    InstanceBody,
    InstanceReply,
    PlanReply,
    ReasonReply,
    RouteReply,
    ShardReply,
    WishReply,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ..core import InstanceView
    from ..draining import Progress
    from ..flips import Flip
    from ..planner import Plan
    from ..popularity import HotPrefix
    from ..records import Candidate, Rejection
    from .keying import Models
    from .models import EventBody, LoadBody, ScheduleBody


def check_id(text: str, what: str) -> str:
    """`text`, if it can be the id of a request or an instance, or a node's name. Raises
    InvalidRequest."""
    if not 0 < len(text) <= ID_MAX or not text.isprintable() or "/" in text:
        raise InvalidRequest(
            f"{what} is 1 to {ID_MAX} printable characters without a slash; this has {len(text)}"
        )
    return text


def to_request(body: ScheduleBody, models: Models) -> Request:
    """What the core is asked. Raises InvalidRequest where the forms of a prompt contradict."""
    prompt_tokens = body.prompt_tokens
    keys: tuple[bytes, ...] = ()
    if body.token_ids is not None:
        if body.block_keys is not None or prompt_tokens is not None:
            raise InvalidRequest("token_ids say all: send no block_keys and no prompt_tokens")
        prompt_tokens = len(body.token_ids)
        keys = models.keys(body.model, body.token_ids, body.namespace)
    elif body.namespace:
        raise InvalidRequest("namespace goes with token_ids: block_keys have it in them")
    elif prompt_tokens is None:
        raise InvalidRequest(
            "send token_ids, or prompt_tokens, alone or with block_keys: how long is the prompt?"
        )
    elif body.block_keys is not None:
        keys = parse_keys(body.block_keys)
    wishes = body.objectives
    return Request(
        id=check_id(body.request_id, "request_id"),
        model=body.model,
        prompt_tokens=prompt_tokens,
        keys=keys,
        objectives=Objectives(wishes.ttft_s, wishes.tbt_s),
        priority=body.priority,
        tenant=body.tenant,
        output_tokens=body.output_tokens,
        output_tokens_max=body.output_tokens_max,
        output_class=body.output_class,
        urgent=body.urgent,
        exclude=tuple(check_id(name, "exclude") for name in body.exclude),
    )


def to_event(request_id: str, kind: str, body: EventBody) -> RequestEvent:
    """What became of a request. Raises InvalidRequest for what does not go with such an event."""
    if body.tokens and kind != "tokens":
        raise InvalidRequest(f'tokens goes with the event "tokens", not with {kind!r}')
    if body.route is None:
        return RequestEvent(request_id, kind, body.tokens)
    if kind not in ("prefill_done", "first_token"):
        raise InvalidRequest(f"route goes with prefill_done and first_token, not with {kind!r}")
    names = (check_id(name, "an instance's id") for name in (body.route.prefill, body.route.decode))
    return RequestEvent(request_id, kind, route=(next(names), next(names)))


def to_spec(instance: str, body: InstanceBody) -> InstanceSpec:
    """What the instance says of itself. Raises InvalidRequest where something is missing."""
    if body.model is None or body.role is None or body.profile is None:
        raise InvalidRequest(
            f"{instance!r} is registered with model, role and profile; a heartbeat alone has load "
            "and nothing else"
        )
    return InstanceSpec(
        id=instance,
        model=body.model,
        role=Role(body.role),
        profile=body.profile,
        url=body.url,
        node=body.node,
        block_tokens=body.block_tokens,
        block_bytes=body.block_bytes,
        kv_capacity_tokens=body.kv_capacity_tokens,
        batch_max=body.batch_max,
        fetches=body.fetches,
        labels=dict(body.labels),
    )


def is_heartbeat(body: InstanceBody) -> bool:
    """Whether it has `load` and nothing else."""
    return body.load is not None and body == InstanceBody(load=body.load)


def to_load(body: LoadBody) -> Load:
    """What an instance counts."""
    return Load(
        queued_prefill_tokens=body.queued_prefill_tokens,
        queued=body.queued,
        running=body.running,
        context_tokens=body.context_tokens,
        kv_used_tokens=body.kv_used_tokens,
    )


def decision_reply(decision: Decision, url: Callable[[str], str], now: float) -> DecisionReply:
    """Without the candidates: with a thousand instances they are a hundred times as long."""
    return DecisionReply(
        request_id=decision.request_id,
        prefill=decision.prefill,
        decode=decision.decode,
        prefill_url=url(decision.prefill),
        decode_url=url(decision.decode),
        policy=decision.policy,
        predicted_ttft_s=decision.predicted_ttft_s,
        predicted_tbt_s=decision.predicted_tbt_s,
        cached_tokens=decision.cached_tokens,
        available_tokens=decision.available_tokens,
        fetches=[
            FetchReply(
                start=one.start,
                stop=one.stop,
                source=one.source,
                nbytes=one.nbytes,
                seconds=one.seconds,
            )
            for one in decision.fetches
        ],
        layerwise=decision.layerwise,
        wait_for=decision.wait_for,
        output_tokens_max=decision.output_tokens_max,
        degraded=list(decision.degraded),
        shards=[ShardReply(instance=name, tokens=count) for name, count in decision.shards],
        alternatives=[RouteReply(prefill=a, decode=b) for a, b in decision.alternatives],
        expires_in_s=max(0.0, decision.expires_at - now),
    )


def entry_reply(
    entry: Decision | Rejection, unix_s: Callable[[float], float], candidates: int
) -> EntryReply:
    """An entry of the log with so many of its candidates, the cheapest first."""
    shown = cheapest(entry.candidates, candidates)
    if isinstance(entry, Decision):
        return EntryReply(
            outcome="decision",
            request_id=entry.request_id,
            decided_at=unix_s(entry.decided_at),
            predicted_ttft_s=entry.predicted_ttft_s,
            predicted_tbt_s=entry.predicted_tbt_s,
            policy=entry.policy,
            prefill=entry.prefill,
            decode=entry.decode,
            cached_tokens=entry.cached_tokens,
            available_tokens=entry.available_tokens,
            wait_for=entry.wait_for,
            degraded=list(entry.degraded),
            candidates_count=len(entry.candidates),
            candidates=shown,
            decode_candidates=cheapest(entry.decode_candidates, candidates),
        )
    return EntryReply(
        outcome="rejection",
        request_id=entry.request_id,
        decided_at=unix_s(entry.decided_at),
        predicted_ttft_s=entry.predicted_ttft_s,
        predicted_tbt_s=entry.predicted_tbt_s,
        reason=entry.reason,
        message=entry.message,
        retry_after_s=entry.retry_after_s,
        terms=dict(entry.terms),
        candidates_count=len(entry.candidates),
        candidates=shown,
    )


def cheapest(candidates: Iterable[Candidate], count: int) -> list[CandidateReply]:
    """The `count` of lowest cost; what cannot be costed comes last."""
    if count <= 0:
        return []
    ordered = sorted(candidates, key=lambda c: math.inf if math.isnan(c.cost) else c.cost)
    return [
        CandidateReply(instance=one.instance, cost=one.cost, terms=dict(one.terms))
        for one in ordered[:count]
    ]


def instance_reply(view: InstanceView) -> InstanceReply:
    """An instance, for a list."""
    spec = view.spec
    return InstanceReply(
        id=spec.id,
        model=spec.model,
        role=view.role.value,
        status=view.status.value,
        profile=spec.profile,
        url=spec.url,
        node=spec.node,
        block_tokens=spec.block_tokens,
        block_bytes=spec.block_bytes,
        kv_capacity_tokens=spec.kv_capacity_tokens,
        batch_max=spec.batch_max,
        fetches=spec.fetches,
        labels=spec.labels,
        heard_s=view.heard_s,
        load=dict(view.load),
    )


def hot_reply(prefix: HotPrefix) -> HotPrefixReply:
    """A hot prefix, by the key of its last block."""
    return HotPrefixReply(
        model=prefix.model,
        blocks=len(prefix.keys),
        last_key=prefix.keys[-1].hex() if prefix.keys else "",
        popularity=prefix.popularity,
        share=prefix.share,
        rate_s=prefix.rate_s,
        block_bytes=prefix.block_bytes,
    )


def plan_reply(model: str, plan: Plan, unix_s: Callable[[float], float]) -> PlanReply:
    """What is planned for a model."""
    return PlanReply(
        model=model,
        planned_at=unix_s(plan.at),
        mode=plan.mode,
        prefill=plan.prefill,
        decode=plan.decode,
        mixed=plan.mixed,
        load=plan.load,
        serves_rate=plan.serves_rate,
        best_prefill=plan.best_prefill,
        instances_wanted=plan.instances_wanted,
        flip=WishReply(instance=plan.flip[0], role=plan.flip[1].value) if plan.flip else None,
        flip_now=plan.flip_now,
        held_back=plan.held_back,
        reasons=[
            ReasonReply(name=one.name, value=one.value, unit=one.unit, why=one.why)
            for one in plan.reasons
        ],
    )


def flip_reply(flip: Flip, unix_s: Callable[[float], float]) -> FlipReply:
    """Where a flip is."""
    return FlipReply(
        instance=flip.instance,
        old=flip.old.value,
        new=flip.new.value,
        step=flip.step.value,
        began_at=unix_s(flip.began_at),
        ends_at=unix_s(flip.until),
        why=flip.why,
    )


def drain_reply(progress: Progress) -> DrainReply:
    """How far a drain is."""
    return DrainReply(
        kind=progress.kind,
        name=progress.name,
        phase=progress.phase.value,
        left_s=progress.left_s,
        unique_blocks=progress.unique_blocks,
        moved_blocks=progress.moved_blocks,
        moved_bytes=progress.moved_bytes,
        handed_over=progress.handed_over,
        left_blocks=progress.left_blocks,
        failures=progress.failures,
        requests=progress.requests,
    )
