"""Conversions between the core's records and the bodies of requests and replies. Pure."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from ..errors import InvalidRequest
from ..records import (
    FOUND_EVENT_KINDS,
    ROUTED_EVENT_KINDS,
    Decision,
    InstanceSpec,
    Load,
    Objectives,
    PromptKeys,
    Request,
    RequestEvent,
    Role,
)
from ..state.request_ids import name_of, parted
from .block_keys import media_of, parse_keys
from .models import (
    ID_MAX,
    BecameReply,
    CandidateReply,
    DecisionReply,
    EntryReply,
    FetchReply,
    HeldReply,
    InstanceBody,
    InstanceReply,
    ReleaseReply,
    RouteReply,
    ShardReply,
)
from .pool_models import DrainReply, FlipReply, HotPrefixReply, PlanReply, ReasonReply, WishReply

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from ..core.hold import Hold
    from ..core.request_outcome import RequestOutcome
    from ..core.state_views import InstanceView
    from ..pool.draining import Progress
    from ..pool.planner import FleetPlan
    from ..pool.popularity import HotPrefix
    from ..pool.role_flip import Flip
    from ..records import Candidate, Rejection
    from .block_keys import KeyedModels
    from .event_batch import EventItem
    from .models import EventBody, LoadBody, ScheduleBody


# Events that may say how many tokens were answered in all.
TOTAL_KINDS = ("tokens", "finished", "cancelled")


def check_id(text: str, what: str) -> str:
    """Returns `text` if it is a valid id of a request or an instance, or a valid name of a node.
    Raises InvalidRequest."""
    if text in (".", ".."):  # no client could ask for it: a URL ends before them
        raise InvalidRequest(f"{what} is {text!r}, which means something else in a URL: rename it")
    if not 0 < len(text) <= ID_MAX or not text.isprintable() or "/" in text:
        raise InvalidRequest(
            f"{what} is 1 to {ID_MAX} printable characters without a slash; this has {len(text)}"
        )
    return text


def to_request(
    body: ScheduleBody,
    tokens: NDArray[np.uint32] | None,
    models: KeyedModels,
    held: Callable[[Sequence[bytes]], int] = lambda _: 0,
) -> Request:
    """The core's request for a body; `tokens` are its token ids, if it has any, and `held` gives
    how many leading blocks somebody has. Raises InvalidRequest if the body gives a prompt in
    contradictory forms."""
    prompt_tokens = body.prompt_tokens
    spaces: Sequence[PromptKeys]
    if tokens is not None:
        if body.block_keys is not None or body.part_keys or prompt_tokens is not None:
            raise InvalidRequest("token_ids say all: send no keys and no prompt_tokens")
        prompt_tokens = len(tokens)
        spaces = models.keys(
            *(body.model, tokens, body.namespace, held),
            salt=body.cache_salt,
            media=media_of(body.media, len(tokens)),
        )
    elif body.namespace or body.cache_salt or body.media:
        raise InvalidRequest(
            "namespace, cache_salt and media go with token_ids: block_keys have them in them"
        )
    elif prompt_tokens is None:
        raise InvalidRequest(
            "send token_ids, or prompt_tokens, alone or with block_keys: how long is the prompt?"
        )
    else:
        blocks = parse_keys(body.block_keys or ())
        spaces = (PromptKeys(blocks, parse_keys(body.part_keys, "part_keys")),)
    wishes = body.objectives
    keys, *others = spaces
    return Request(
        id=name_of(body.tenant, check_id(body.request_id, "request_id")),
        model=body.model,
        prompt_tokens=prompt_tokens,
        keys=keys.blocks,
        part_keys=keys.parts,
        parts_after=keys.after,
        key_space=keys.space,
        others=tuple(others),
        objectives=Objectives(wishes.ttft_s, wishes.tbt_s),
        priority=body.priority,
        tenant=body.tenant,
        output_tokens=body.output_tokens,
        output_tokens_max=body.output_tokens_max,
        output_class=body.output_class,
        urgent=body.urgent,
        exclude=tuple(check_id(name, "exclude") for name in body.exclude),
        first_token_from=body.first_token_from,
    )


def to_event(name: str, kind: str, body: EventBody | EventItem) -> RequestEvent:
    """The event of the request `name`. Raises InvalidRequest for fields that events of this kind do
    not have."""
    total = body.total_tokens
    if body.tokens and kind not in ("tokens", "prefill_began"):
        raise InvalidRequest(f"tokens goes with tokens and prefill_began, not with {kind!r}")
    if total is not None and kind not in TOTAL_KINDS:
        raise InvalidRequest(f"total_tokens goes with {', '.join(TOTAL_KINDS)}, not with {kind!r}")
    if body.tokens and total is not None:
        raise InvalidRequest("send tokens, how many more, or total_tokens, not both")
    if body.found_tokens is not None and kind not in FOUND_EVENT_KINDS:
        raise InvalidRequest(
            f"found_tokens goes with {', '.join(FOUND_EVENT_KINDS)}, not with {kind!r}"
        )
    about: dict[str, Any] = {"age_s": body.age_s, "found_tokens": body.found_tokens}
    if body.route is None:
        return RequestEvent(name, kind, body.tokens, total_tokens=total, **about)
    if kind not in ROUTED_EVENT_KINDS:
        raise InvalidRequest(f"route goes with {', '.join(ROUTED_EVENT_KINDS)}, not with {kind!r}")
    names = (check_id(name, "an instance's id") for name in (body.route.prefill, body.route.decode))
    route = (next(names), next(names))
    return RequestEvent(name, kind, body.tokens, route=route, **about)


def to_spec(instance: str, body: InstanceBody) -> InstanceSpec:
    """The spec that an instance registers. Raises InvalidRequest if a required field is missing."""
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
        prefix_caching=body.prefix_caching,
        labels=dict(body.labels),
        part_tokens=body.part_tokens,
    )


def is_heartbeat(body: InstanceBody) -> bool:
    """Whether the body contains `load` and nothing else."""
    return body.load is not None and body == InstanceBody(load=body.load)


def to_load(body: LoadBody) -> Load:
    """The load that an instance reports."""
    return Load(
        queued_prefill_tokens=body.queued_prefill_tokens,
        queued=body.queued,
        running=body.running,
        context_tokens=body.context_tokens,
        kv_used_tokens=body.kv_used_tokens,
        age_s=body.age_s,
    )


def decision_reply(
    decision: Decision,
    url: Callable[[str], str],
    now: float,
    conductor: str = "",
    hold: Hold | None = None,
    fetch_within_s: float | None = None,
) -> DecisionReply:
    """A decision without its candidates: with a thousand instances they are a hundred times as
    long. `conductor` is the URL of the one that decided; `hold` that of a held request;
    `fetch_within_s`: see `DecisionReply`."""
    return DecisionReply(
        request_id=parted(decision.request_id)[1],
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
                tier=one.tier,
                nbytes=one.nbytes,
                seconds=one.seconds,
            )
            for one in decision.fetches
        ],
        fetch_within_s=fetch_within_s,
        layerwise=decision.layerwise,
        output_tokens_max=decision.output_tokens_max,
        degraded=list(decision.degraded),
        shards=[ShardReply(instance=name, tokens=count) for name, count in decision.shards],
        alternatives=[RouteReply(prefill=a, decode=b) for a, b in decision.alternatives],
        expires_in_s=max(0.0, decision.expires_at - now),
        held=None if hold is None else HeldReply(place=hold.place, release_s=hold.release_s),
        conductor=conductor,
        placement=decision.placement,
        local_s=decision.local_s,
        remote_s=decision.remote_s,
        output_tokens=decision.output_tokens,
        output_source=decision.output_source,
        model=decision.model,
    )


def release_reply(hold: Hold) -> ReleaseReply:
    """Whether a request may be sent now."""
    return ReleaseReply(
        state=hold.state,
        place=hold.place,
        release_s=hold.release_s,
        first_token_s=hold.first_token_s,
    )


def entry_reply(
    entry: Decision | Rejection,
    unix_s: Callable[[float], float],
    became: RequestOutcome | None = None,
) -> EntryReply:
    """An entry of the decision log, without its candidates: `decision_text.py` adds them."""
    tenant, request_id = parted(entry.request_id)
    if isinstance(entry, Decision):
        return EntryReply(
            outcome="decision",
            request_id=request_id,
            tenant=tenant,
            decided_at=unix_s(entry.decided_at),
            predicted_ttft_s=entry.predicted_ttft_s,
            predicted_tbt_s=entry.predicted_tbt_s,
            policy=entry.policy,
            prefill=entry.prefill,
            decode=entry.decode,
            cached_tokens=entry.cached_tokens,
            available_tokens=entry.available_tokens,
            degraded=list(entry.degraded),
            placement=entry.placement,
            local_s=entry.local_s,
            remote_s=entry.remote_s,
            output_tokens=entry.output_tokens,
            output_source=entry.output_source,
            model=entry.model,
            became=None if became is None else became_reply(became, unix_s),
            left_out=dict(entry.left_out),
            decode_left_out=dict(entry.decode_left_out),
            candidates_count=len(entry.candidates),
        )
    return EntryReply(
        outcome="rejection",
        request_id=request_id,
        tenant=tenant,
        decided_at=unix_s(entry.decided_at),
        predicted_ttft_s=entry.predicted_ttft_s,
        predicted_tbt_s=entry.predicted_tbt_s,
        reason=entry.reason,
        message=entry.message,
        retry_after_s=entry.retry_after_s,
        terms=dict(entry.terms),
        placement=entry.placement,
        output_tokens=entry.output_tokens,
        output_source=entry.output_source,
        left_out=dict(entry.left_out),
        decode_left_out=dict(entry.decode_left_out),
        candidates_count=len(entry.candidates),
    )


def became_reply(became: RequestOutcome, unix_s: Callable[[float], float]) -> BecameReply:
    """What became of a request."""
    return BecameReply(
        end=became.end,
        observed_ttft_s=became.ttft_s,
        observed_tbt_s=became.tbt_s,
        output_tokens=became.output_tokens,
        found_tokens=became.found_tokens,
        ended_at=None if became.ended_at is None else unix_s(became.ended_at),
    )


def span_attributes(entry: Decision | Rejection) -> dict[str, str | int | float | bool]:
    """What the span of a decision says of it."""
    if isinstance(entry, Decision):
        return {
            "tiffin.prefill": entry.prefill,
            "tiffin.decode": entry.decode,
            "tiffin.cached_tokens": entry.cached_tokens,
            "tiffin.predicted_ttft_s": entry.predicted_ttft_s,
        }
    return {"tiffin.rejected": entry.reason}


def by_cost(candidates: Iterable[Candidate]) -> list[Candidate]:
    """The candidates by cost, the cheapest first; those whose cost is unknown (NaN) come last."""
    return sorted(candidates, key=lambda c: math.inf if math.isnan(c.cost) else c.cost)


def candidate_reply(candidate: Candidate) -> CandidateReply:
    """A candidate of a decision: an instance with its cost and every term."""
    return CandidateReply(
        instance=candidate.instance, cost=candidate.cost, terms=dict(candidate.terms)
    )


def instance_reply(view: InstanceView, models: KeyedModels) -> InstanceReply:
    """An instance's spec, status and load."""
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
        prefix_caching=spec.prefix_caching,
        part_tokens=spec.part_tokens,
        keyed=models.schema(spec.model) is not None,
        key_space=view.key_space,
        labels=spec.labels,
        heard_s=view.heard_s,
        load=dict(view.load),
        output_caps=dict(view.output_caps),
    )


def hot_reply(prefix: HotPrefix) -> HotPrefixReply:
    """A hot prefix, identified by the key of its last block."""
    return HotPrefixReply(
        model=prefix.group.model,
        blocks=len(prefix.keys),
        last_key=prefix.keys[-1].hex() if prefix.keys else "",
        popularity=prefix.popularity,
        share=prefix.share,
        rate_s=prefix.rate_s,
        block_bytes=prefix.block_bytes,
    )


def plan_reply(model: str, plan: FleetPlan, unix_s: Callable[[float], float]) -> PlanReply:
    """The fleet plan of a model."""
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
    """The state of a role flip."""
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
    """The progress of a drain."""
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
