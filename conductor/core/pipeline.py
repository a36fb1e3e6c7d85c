"""One decision: a plan of the request (`request_plan.py`), then admission. Pure.

Nothing is reserved here. An accepted request is returned as an `InflightRequest`, whose load the
ledger reserves; a rejected one is returned with a `Ghost`, from which the shadow accounts tell
later whether the rejection was right.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import inf
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..admission import admission
from ..admission.admission import AdmissionForecast, Outlook
from ..admission.counterfactual import Ghost
from ..admission.hedging import second_route
from ..decode.load_forecast import relief_s
from ..decode.selection import DecodeChoice
from ..errors import UnknownModel
from ..prefill.disaggregation import (
    layerwise,
)
from ..records import Decision, PromptKeys, Rejection
from .explain import best_of
from .inflight_requests import InflightRequest, SecondPlace
from .request_plan import (
    able,
    cached_tokens_of,
    degraded_plan,
    left_alone,
    plan_request,
    prompt_tokens_of,
)
from .silence import silent
from .transfer_bookings import fetched_moves, handed_over_moves

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from ..admission.admission import Verdict
    from ..admission.degradation import Step
    from ..prefill.policy_registry import Choice, PolicyQuestion
    from ..records import Request
    from ..state.instance_table import Cluster
    from .explain import Candidates
    from .request_plan import Parts, RequestPlan

    Rows = NDArray[np.int64]


class RefusedRequest(NamedTuple):
    """A rejection, and its ghost for the shadow accounts; None without a candidate instance and for
    a full queue."""

    rejection: Rejection
    ghost: Ghost | None = None
    computed_tokens: int | None = None  # of its prompt, where it would have run


@dataclass(slots=True)
class Accepted:
    """A request whose load is still to be reserved, with the verdict of admission."""

    flight: InflightRequest
    verdict: Verdict
    plan: RequestPlan = field(repr=False)


def decide(parts: Parts, request: Request, now: float) -> Accepted | RefusedRequest:
    """Decide where a request runs, or why it is rejected. Raises UnknownModel, and InvalidRequest
    for a priority class that does not exist and for objectives out of range.

    Instances with different key spaces can't read each other's blocks: each group with one space
    has a plan of its own. Of plans with nearly the same time to the first token chance decides, by
    how many instances could prefill. Keys of an unknown space, which clients made, count in all.
    """
    names = parts.view.key_spaces(request.model)
    if len(names) < 2 and not request.others and request.key_space in ("", *names):
        return _decide(parts, request, now)
    keys = request.keys_by_space
    anywhere = keys.get("", PromptKeys())
    ways = [
        _decide(parts, request.in_space(keys.get(name, anywhere)._replace(space=name)), now)
        for name in names or ("",)
    ]
    accepted = [one for one in ways if isinstance(one, Accepted)]
    if not accepted:
        refused = [one for one in ways if isinstance(one, RefusedRequest)]
        return min(refused, key=_predicted_s)
    *least, ttft_s = min(map(_rank, accepted))
    most = (*least, ttft_s * (1.0 + parts.settings.policy.near_share))
    near = [one for one in accepted if _rank(one) <= most]
    (best,) = parts.dice.choices(near, [len(one.plan.question.rows) for one in near])
    best.flight.asked = request  # as it may be asked again
    return best


def _rank(way: Accepted) -> tuple[int, bool, float]:
    """As it is before degraded, prefilled by who does that before by who decodes, then by the time
    to the first token."""
    placement = way.plan.placement
    alone = placement is not None and placement.reason == "no_prefill"
    return len(way.verdict.steps), alone, way.plan.forecast.ttft_s


def _predicted_s(way: RefusedRequest) -> float:
    ttft_s = way.rejection.predicted_ttft_s
    return inf if ttft_s is None else ttft_s


def _decide(parts: Parts, request: Request, now: float) -> Accepted | RefusedRequest:
    prefill, decode = able(parts, request)
    if not len(decode) or not (len(prefill) or left_alone(parts, request)):
        return _nobody(parts, request, now, "no_decode" if len(prefill) else "no_prefill")
    plan = plan_request(parts, request, prefill, decode, now)
    outlook = Outlook(request, plan.forecast)

    def again(steps: tuple[Step, ...]) -> AdmissionForecast | None:
        nonlocal plan
        other = degraded_plan(parts, request, steps, now)
        if other is None:
            return None
        plans[steps] = other
        return other.forecast

    def relief(tbt_s: float) -> float | None:
        context = request.prompt_tokens + plan.output_tokens
        return relief_s(parts.horizon, parts.cluster, plan.decode_row, tbt_s, now, context)

    plans: dict[tuple[Step, ...], RequestPlan] = {}
    verdict = admission.decide(
        outlook, parts.settings.admission, parts.dice, again=again, relief=relief
    )
    plan = plans.get(tuple(step for step in verdict.steps if step != "relax"), plan)
    if not verdict.admitted:
        return _refused(parts, request, plan, verdict, now)
    return Accepted(_flight(parts, request, plan, verdict, now), verdict, plan)


def _flight(
    parts: Parts, request: Request, plan: RequestPlan, verdict: Verdict, now: float
) -> InflightRequest:
    cluster, settings, question, choice = parts.cluster, parts.settings, plan.question, plan.choice
    row, at, served = plan.prefill_row, choice.at, question.request
    cached_tokens = cached_tokens_of(question, at, choice.cached_blocks)
    capped = verdict.output_tokens_max
    decode, second = cluster.name(plan.decode_row), _second(parts, request, plan)
    decision = Decision(
        request_id=request.id,
        prefill=cluster.name(row),
        decode=decode,
        policy=settings.policy.name,
        predicted_ttft_s=plan.forecast.ttft_s,
        predicted_tbt_s=plan.tbt_s,
        cached_tokens=cached_tokens,
        available_tokens=max(_available_tokens(question), cached_tokens),
        fetches=choice.fetches,
        layerwise=layerwise(settings.disaggregation, request.prompt_tokens),
        output_tokens_max=capped,
        degraded=verdict.degraded,
        shards=_shards(cluster, plan),
        alternatives=() if second is None else ((cluster.name(second.row), decode),),
        candidates=best_of(
            cluster, question.rows, at, choice.cost, choice.terms, settings.core.explained_max
        ),
        decode_candidates=_decode_candidates(parts, plan),
        left_out=_left_out(parts, plan, prefill=True),
        decode_left_out=_left_out(parts, plan, prefill=False),
        decided_at=now,
        expires_at=now + settings.core.decision_ttl_s,
        output_tokens=plan.output_tokens,
        output_source=plan.length.source,
        model=served.model if served.model != request.model else "",
    )
    own_s = max(plan.computing_s, 1e-6)
    grows = settings.decode.reserve == "dynamic" and plan.spread is None
    tokens = request.prompt_tokens + (0 if grows else plan.output_tokens)
    if plan.placement is not None:
        why = plan.placement
        decision = replace(
            decision, placement=why.reason, local_s=why.local_s, remote_s=why.remote_s
        )
    return InflightRequest(
        request=served,
        asked=request,
        decision=decision,
        prefill_row=row,
        decode_row=plan.decode_row,
        own_s=own_s,
        prefill_s=max(choice.own_s, 1e-6),
        ready_at=now + choice.ready_s if choice.ready_s else 0.0,
        prefill_tokens=max(request.prompt_tokens - decision.cached_tokens, 1),
        shares=_shares(plan, tokens),
        grows=grows,
        heavy=parts.lengths.heavy(plan.output_tokens),
        decided_at=now,
        expires_at=decision.expires_at,
        alone=_alone_there(question, choice),
        hbm_blocks=int(question.hbm_blocks[at]),
        part_tokens=cached_tokens_of(question, at, 0),
        fetches=fetched_moves(cluster, choice.fetches, row),
        handover=handed_over_moves(cluster, row, _handed_over_bytes(plan)),
        handover_s=plan.handover_s,
        prefilled_s=plan.prefilled_s,
        overlapped=question.overlapped,
        second=second,
    )


def _available_tokens(question: PolicyQuestion) -> int:
    """Tokens of the prompt that some holder has: blocks in the pool, parts on one instance."""
    parts = question.cached_part_tokens
    tokens = prompt_tokens_of(question, question.pool_blocks)
    return tokens if parts is None else max(tokens, int(parts.max()))


def _handed_over_bytes(plan: RequestPlan) -> dict[int, float]:
    """By row, what is sent there of the prompt's KV: its share of a context that is spread."""
    if plan.handover is None:
        return {}
    nbytes = plan.handover.nbytes
    if plan.spread is None:
        return {plan.decode_row: float(nbytes[plan.decode.at])}
    tokens = sum(plan.spread.tokens)
    parts = zip(plan.spread.members, plan.spread.tokens, strict=True)
    return {int(plan.decode_rows[at]): float(nbytes[at]) * own / tokens for at, own in parts}


def _shares(plan: RequestPlan, tokens: int) -> dict[int, int]:
    if plan.spread is None:
        return {plan.decode_row: tokens}
    rows = plan.decode_rows[list(plan.spread.members)].tolist()
    return dict(zip(rows, plan.spread.tokens, strict=True))


def _shards(cluster: Cluster, plan: RequestPlan) -> tuple[tuple[str, int], ...]:
    if plan.spread is None:
        return ()
    return tuple((cluster.name(row), tokens) for row, tokens in _shares(plan, 0).items())


def _decode_candidates(parts: Parts, plan: RequestPlan) -> Candidates:
    decode = plan.decode
    cost = decode.cost if isinstance(decode, DecodeChoice) else decode.tbt_s
    at = plan.spread.binding if plan.spread is not None else decode.at
    most = parts.settings.core.explained_max
    return best_of(parts.cluster, plan.decode_rows, at, cost, decode.terms, most)


def _left_out(parts: Parts, plan: RequestPlan, *, prefill: bool) -> Mapping[str, int]:
    """How many instances of the model are not among the candidates that are shown, by why: "lost",
    "draining", "other_role", "excluded" by the request, "not_compared" since the way was decided
    before the instance, and "dearer" than those."""
    request, rows = plan.question.request, plan.question.rows if prefill else plan.decode_rows
    ready, excluded = parts.view.rows(request.model, prefill=prefill), 0
    if request.exclude:
        cluster = parts.cluster
        out = [cluster.row(name) for name in request.exclude if name in cluster]
        excluded = int(np.isin(ready, out).sum())
    dearer = max(0, len(rows) - parts.settings.core.explained_max)
    found = {
        **parts.view.absent(request.model, prefill=prefill),
        "excluded": excluded,
        "not_compared": len(ready) - excluded - len(rows),
        "dearer": dearer,
    }
    return _counts(tuple((why, count) for why, count in found.items() if count > 0))


@lru_cache(maxsize=256)
def _counts(found: tuple[tuple[str, int], ...]) -> Mapping[str, int]:
    """These counts as one object for all decisions, as most have the same."""
    return MappingProxyType(dict(found))


def _second(parts: Parts, request: Request, plan: RequestPlan) -> SecondPlace | None:
    """The second prefill instance of a hedged request; None if the request is not hedged."""
    if not parts.races.may_race(request):
        return None
    question, choice = plan.question, plan.choice
    nodes = parts.cluster.node.take(question.rows)
    other = second_route(choice.ttft_s, choice.at, parts.settings.racing, nodes)
    if other is None:
        return None
    row, queue = int(question.rows[other]), parts.queues.at(int(question.rows[other]))
    if queue is not None and len(queue) >= parts.settings.queue.waiting_max:
        return None
    own_s = float(choice.ttft_s[other]) - float(question.queue_s[other])
    cached = cached_tokens_of(question, other, int(question.local_blocks[other]))
    return SecondPlace(row, max(own_s, 1e-6), max(request.prompt_tokens - cached, 1))


def _refused(
    parts: Parts, request: Request, plan: RequestPlan, verdict: Verdict, now: float
) -> RefusedRequest:
    rejection = verdict.rejection(request.id, now)
    question, choice = plan.question, plan.choice
    most = parts.settings.core.explained_max
    candidates = best_of(parts.cluster, question.rows, choice.at, choice.cost, choice.terms, most)
    rejection = replace(
        rejection,
        candidates=candidates,
        decode_candidates=_decode_candidates(parts, plan),
        left_out=_left_out(parts, plan, prefill=True),
        decode_left_out=_left_out(parts, plan, prefill=False),
        placement=plan.placement.reason if plan.placement is not None else "",
        output_tokens=plan.output_tokens,
        output_source=plan.length.source,
    )
    row = plan.decode_row
    joining = parts.cluster.d1[row] + parts.cluster.d2[row] * request.prompt_tokens
    ghost = Ghost(
        prefill_row=plan.prefill_row,
        decode_row=row,
        objectives=request.objectives,
        own_s=plan.computing_s,
        decode_s=admission.expected_decode_s(
            parts.settings.admission, plan.output_tokens, plan.tbt_s
        ),
        rejected_at=now,
        joining_s=float(joining),
    )
    cached = cached_tokens_of(question, choice.at, choice.cached_blocks)
    computed = request.prompt_tokens - cached
    return RefusedRequest(rejection, ghost, computed)


def _nobody(parts: Parts, request: Request, now: float, reason: str) -> RefusedRequest:
    if parts.cluster.model_number(request.model) is None:
        raise UnknownModel(f"no instance has registered model {request.model!r}")
    role = reason.removeprefix("no_")
    but = " but those that it excludes" if request.exclude else ""
    text = f"no instance{but} is ready to {role} {request.model!r}: register one, or wait"
    text = "; ".join((text, *silent(parts.cluster, now, request.model)))
    retry_s = parts.settings.core.heartbeat_timeout_s
    return RefusedRequest(
        Rejection(request.id, reason, text, retry_after_s=retry_s, decided_at=now)
    )


def _alone_there(question: PolicyQuestion, choice: Choice) -> bool:
    """Whether a prefill begins at once: nothing is ahead of it, or has to come first."""
    idle = not question.cluster.queued[question.rows[choice.at]]
    return idle and not choice.fetches
