"""One decision: prefill by policy, decode by predicted time and room, then admission. Pure.

Nothing is changed here. What was decided comes back as a `Flight`, whose load the ledger reserves;
what was refused comes back with the ghost that tells later whether that was right.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from . import admission
from .admission import Forecast, Outlook
from .decode import DecodeChoice, DecodeQuestion, NoDecode, choose_only
from .decode import choose as choose_decode
from .disaggregation import Situation, layerwise, place
from .errors import UnknownModel
from .explain import best_of
from .horizon import expected_load, expected_load_of, relief_s
from .ledger import Flight
from .racing import second_route
from .records import Decision, Rejection
from .shadow import Ghost
from .spread import Spread, members_wanted, spread
from .transfers import TIERS

if TYPE_CHECKING:
    import random

    from numpy.typing import NDArray

    from .admission import Step, Verdict
    from .calibration import Calibration
    from .cluster import Cluster
    from .computing import Computing
    from .explain import Candidates
    from .horizon import Horizon
    from .lengths import Lengths
    from .policies.base import Choice, Policy, Question
    from .queues import Queues
    from .racing import Races
    from .records import Request
    from .settings import Settings
    from .transfers import Transfers
    from .view import View

    Rows = NDArray[np.int64]

_HBM = TIERS.index("hbm")


@dataclass(slots=True)
class Parts:
    """What decisions are made from."""

    cluster: Cluster
    view: View
    queues: Queues
    transfers: Transfers
    computing: Computing
    horizon: Horizon
    lengths: Lengths
    calibration: Calibration
    races: Races
    settings: Settings
    policy: Policy
    dice: random.Random


@dataclass(slots=True)
class Plan:
    """One way to serve a request: where, and what is predicted for it."""

    question: Question
    choice: Choice
    decode_rows: Rows
    decode: DecodeChoice | NoDecode
    spread: Spread | None
    output_tokens: int
    tbt_s: float
    forecast: Forecast

    @property
    def prefill_row(self) -> int:
        return int(self.question.rows[self.choice.at])

    @property
    def decode_row(self) -> int:
        at = self.spread.binding if self.spread is not None else self.decode.at
        return int(self.decode_rows[at])


class Refused(NamedTuple):
    """A rejection, and what it is followed by in the shadow accounts, if it can be."""

    rejection: Rejection
    ghost: Ghost | None = None


@dataclass(slots=True)
class Accepted:
    """A flight to be reserved, with what admission said."""

    flight: Flight
    verdict: Verdict
    plan: Plan = field(repr=False)


def decide(parts: Parts, request: Request, now: float) -> Accepted | Refused:
    """Where a request runs, or why not. Raises UnknownModel, and InvalidRequest for a class of
    priority that does not exist and for objectives that make no sense."""
    prefill, decode = _able(parts, request)
    if not len(prefill) or not len(decode):
        return _nobody(parts, request, now, "no_decode" if len(prefill) else "no_prefill")
    plan = _plan(parts, request, prefill, decode, now)
    outlook = Outlook(request, plan.forecast)

    def again(steps: tuple[Step, ...]) -> Forecast | None:
        nonlocal plan
        other = _degraded(parts, request, steps, now)
        if other is None:
            return None
        plans[steps] = other
        return other.forecast

    def relief(tbt_s: float) -> float | None:
        context = request.prompt_tokens + plan.output_tokens
        return relief_s(parts.horizon, parts.cluster, plan.decode_row, tbt_s, now, context)

    plans: dict[tuple[Step, ...], Plan] = {}
    verdict = admission.decide(
        outlook, parts.settings.admission, parts.dice, again=again, relief=relief
    )
    plan = plans.get(tuple(step for step in verdict.steps if step != "relax"), plan)
    if not verdict.admitted:
        return _refused(parts, request, plan, verdict, now)
    return Accepted(_flight(parts, request, plan, verdict, now), verdict, plan)


def _able(parts: Parts, request: Request) -> tuple[Rows, Rows]:
    """Rows that may prefill, and that may decode it."""
    able = [parts.view.rows(request.model, prefill=prefill) for prefill in (True, False)]
    if request.exclude:
        cluster = parts.cluster
        out = [cluster.row(name) for name in request.exclude if name in cluster]
        able = [rows[np.isin(rows, out, invert=True)] for rows in able]
    return able[0], able[1]


# -- one way to serve it ---------------------------------------------------------------------------


def _plan(parts: Parts, request: Request, prefill: Rows, decode: Rows, now: float) -> Plan:
    """Where it is prefilled, by policy, and where it is decoded.

    Conditional disaggregation: an instance that does both goes on with what it has computed, if
    that is in time. One that decodes, and could prefill, computes itself what is not worth sending
    elsewhere.
    """
    cluster = parts.cluster
    question = parts.view.question(
        request,
        prefill,
        parts.transfers,
        parts.computing,
        parts.queues,
        parts.settings,
        parts.dice,
        now,
    )
    choice = parts.policy.choose(question)
    row = int(prefill[choice.at])
    if cluster.decodes[row]:
        alone = _alone(parts, question, choice, row, now)
        objective_s = request.objectives.tbt_s
        if alone.forecast.room and (objective_s is None or alone.tbt_s <= objective_s):
            return alone
    plan = _decoded(parts, question, choice, decode, now)
    target = plan.decode_row
    if cluster.decodes[row] or not cluster.prefills[target] or plan.spread is not None:
        return plan
    at = int(np.searchsorted(prefill, target))
    situation = Situation(
        prompt_tokens=request.prompt_tokens,
        cached_tokens=_tokens(question, int(question.local_blocks[at])),
        prefill_queue=int(cluster.queued[row]),
        running_decodes=int(cluster.batch[target]),
    )
    if place(parts.settings.disaggregation, situation).remote:
        return plan
    return _at_one(parts, request, target, now)


def _at_one(parts: Parts, request: Request, row: int, now: float) -> Plan:
    """All of it on one instance."""
    rows = np.array([row])
    return _plan(parts, request, rows, rows, now)


def _alone(parts: Parts, question: Question, choice: Choice, row: int, now: float) -> Plan:
    """The plan that goes on where it was prefilled: `_decoded` of one row."""
    rows = question.rows[choice.at : choice.at + 1]
    if parts.settings.spread.enabled:
        return _decoded(parts, question, choice, rows, now)
    request, cluster, settings = question.request, parts.cluster, parts.settings.decode
    ttft_s, queue_s = choice.ttft_s.item(choice.at), question.queue_s.item(choice.at)
    output_tokens = parts.lengths.predict(request).tokens
    batch, context = expected_load_of(parts.horizon, cluster, row, now + ttft_s, now)
    chosen = choose_only(
        request, cluster, row, output_tokens, settings,
        batch=batch, context_tokens=context, heavy=parts.lengths.heavy(output_tokens),
    )  # fmt: skip
    tbt_s = float(chosen.tbt_s[0])
    forecast = Forecast(
        ttft_s=ttft_s,
        tbt_now_s=_tbt_now_s(parts, row, request.prompt_tokens + output_tokens / 2),
        tbt_then_s=tbt_s,
        queue_s=min(queue_s, ttft_s),
        room=isinstance(chosen, DecodeChoice),
        room_ever=_fits_ever(parts, request, output_tokens, rows),
    )
    return Plan(question, choice, rows, chosen, None, output_tokens, tbt_s, forecast)


def _decoded(parts: Parts, question: Question, choice: Choice, decode: Rows, now: float) -> Plan:
    """The plan with the best of these rows to decode."""
    settings, request = parts.settings, question.request
    ttft_s = float(choice.ttft_s[choice.at])
    output_tokens = parts.lengths.predict(request).tokens
    row = int(question.rows[choice.at])
    batch, context = expected_load(parts.horizon, parts.cluster, decode, now + ttft_s, now)
    asked = DecodeQuestion(
        request=request,
        cluster=parts.cluster,
        rows=decode,
        output_tokens=output_tokens,
        settings=settings.decode,
        dice=parts.dice,
        batch=batch,
        context_tokens=context,
        heavy=parts.lengths.heavy(output_tokens),
        move_s=_move_s(parts, question, row, decode, now),
        enforce=False,  # admission judges it, with its class and after what may be taken away
    )
    chosen = choose_decode(asked)
    apart = _spread(settings, asked)
    at = apart.binding if apart is not None else chosen.at
    if apart is not None:
        tbt_s = apart.tbt_s
    elif isinstance(chosen, DecodeChoice):
        tbt_s = float(chosen.tbt_s[at])
    else:
        tbt_s = chosen.best_tbt_s or 0.0
    forecast = Forecast(
        ttft_s=ttft_s,
        tbt_now_s=_tbt_now_s(parts, int(decode[at]), request.prompt_tokens + output_tokens / 2),
        tbt_then_s=tbt_s,
        queue_s=min(float(question.queue_s[choice.at]), ttft_s),
        room=apart is not None or isinstance(chosen, DecodeChoice),
        room_ever=_fits_ever(parts, request, output_tokens, decode),
    )
    return Plan(question, choice, decode, chosen, apart, output_tokens, tbt_s, forecast)


def _degraded(parts: Parts, request: Request, steps: tuple[Step, ...], now: float) -> Plan | None:
    """The plan with some things taken away from the request; None if that can't be."""
    prefill, decode = _able(parts, request)
    if "cap_output" in steps:
        cap = parts.settings.admission.output_tokens_cap
        wanted = request.output_tokens
        request = replace(
            request,
            output_tokens_max=cap,
            output_tokens=None if wanted is None else min(wanted, cap),
        )
    if "local_prefill" in steps:
        prefill = np.intersect1d(prefill, decode, assume_unique=True)
        if not len(prefill):
            return None
        plan = _plan(parts, request, prefill, prefill, now)
        return _at_one(parts, request, plan.prefill_row, now)
    return _plan(parts, request, prefill, decode, now)


def _move_s(
    parts: Parts, question: Question, row: int, decode: Rows, now: float
) -> NDArray[np.float64]:
    """How long the prompt's context takes from the prefill instance to each decode instance: none
    to itself, and none as far as it moves layer by layer while the rest is computed."""
    cluster = parts.cluster
    if len(decode) == 1 and decode[0] == row:
        return np.zeros(1)
    tokens = question.request.prompt_tokens
    nbytes = int(cluster.block_bytes[row]) * tokens / question.block_tokens
    source = int(cluster.node[row])
    seconds = parts.transfers.seconds(source, _HBM, cluster.node.take(decode), nbytes, now)
    return np.where(decode == row, 0.0, seconds)


def _spread(settings: Settings, asked: DecodeQuestion) -> Spread | None:
    """Over which instances a context is spread that one should not hold alone; None: over none."""
    if not settings.spread.enabled:
        return None
    capacity = float(np.median(asked.cluster.kv_capacity_tokens.take(asked.rows)))
    context = asked.request.prompt_tokens + asked.output_tokens
    if members_wanted(context, capacity, settings.spread) < 2:
        return None
    found = spread(asked, settings.spread)
    return found if isinstance(found, Spread) else None


def _fits_ever(parts: Parts, request: Request, output_tokens: int, rows: Rows) -> bool:
    """Whether some instance could hold context and answer, were it alone there. Spread over several
    they may fit where this says no: then there is room."""
    capacity = int(parts.cluster.kv_capacity_tokens.take(rows).max(initial=0))
    usable = capacity * (1.0 - parts.settings.decode.reserve_share)
    return request.prompt_tokens + output_tokens <= usable


def _tbt_now_s(parts: Parts, row: int, context_tokens: float) -> float:
    c = parts.cluster
    batch, context = c.batch.item(row) + 1, c.context_tokens.item(row) + context_tokens
    return c.d0.item(row) + c.d1.item(row) * batch + c.d2.item(row) * context


# -- what comes of it ------------------------------------------------------------------------------


def _flight(parts: Parts, request: Request, plan: Plan, verdict: Verdict, now: float) -> Flight:
    cluster, settings, question, choice = parts.cluster, parts.settings, plan.question, plan.choice
    row, at = plan.prefill_row, choice.at
    capped = verdict.output_tokens_max
    decision = Decision(
        request_id=request.id,
        prefill=cluster.name(row),
        decode=cluster.name(plan.decode_row),
        policy=settings.policy.name,
        predicted_ttft_s=plan.forecast.ttft_s,
        predicted_tbt_s=plan.tbt_s,
        cached_tokens=_tokens(question, choice.cached_blocks),
        available_tokens=_tokens(question, question.pool_blocks),
        fetches=choice.fetches,
        layerwise=layerwise(settings.disaggregation, request.prompt_tokens),
        wait_for=choice.wait_for,
        output_tokens_max=capped,
        degraded=verdict.degraded,
        shards=_shards(cluster, plan),
        alternatives=_alternatives(parts, request, plan),
        candidates=best_of(
            cluster, question.rows, at, choice.cost, choice.terms, settings.core.explained_max
        ),
        decode_candidates=_decode_candidates(parts, plan),
        decided_at=now,
        expires_at=now + settings.core.decision_ttl_s,
    )
    own_s = max(plan.forecast.ttft_s - plan.forecast.queue_s, 1e-6)
    tokens = request.prompt_tokens + plan.output_tokens
    names = decision.prefill, decision.decode
    return Flight(
        request=request,
        decision=decision,
        prefill_row=row,
        decode_row=plan.decode_row,
        own_s=own_s,
        prefill_s=own_s,
        prefill_tokens=max(request.prompt_tokens - decision.cached_tokens, 1),
        shares=_shares(plan, tokens),
        heavy=parts.lengths.heavy(plan.output_tokens),
        decided_at=now,
        expires_at=decision.expires_at,
        factor=parts.calibration.factor(names[0], _profile(cluster, row)),
        tbt_factor=parts.calibration.tbt_factor(names[1], _profile(cluster, plan.decode_row)),
        hbm_blocks=int(question.hbm_blocks[at]),
        transfers=tuple((_node(cluster, fetch.source), fetch.nbytes) for fetch in choice.fetches),
    )


def _shares(plan: Plan, tokens: int) -> dict[int, int]:
    if plan.spread is None:
        return {plan.decode_row: tokens}
    rows = plan.decode_rows[list(plan.spread.members)].tolist()
    return dict(zip(rows, plan.spread.tokens, strict=True))


def _shards(cluster: Cluster, plan: Plan) -> tuple[tuple[str, int], ...]:
    if plan.spread is None:
        return ()
    return tuple((cluster.name(row), tokens) for row, tokens in _shares(plan, 0).items())


def _decode_candidates(parts: Parts, plan: Plan) -> Candidates:
    decode = plan.decode
    cost = decode.cost if isinstance(decode, DecodeChoice) else decode.tbt_s
    at = plan.spread.binding if plan.spread is not None else decode.at
    most = parts.settings.core.explained_max
    return best_of(parts.cluster, plan.decode_rows, at, cost, decode.terms, most)


def _alternatives(parts: Parts, request: Request, plan: Plan) -> tuple[tuple[str, str], ...]:
    """The second route of a request that is raced."""
    if not parts.races.may_race(request):
        return ()
    rows, choice = plan.question.rows, plan.choice
    nodes = parts.cluster.node.take(rows)
    other = second_route(choice.ttft_s, choice.at, parts.settings.racing, nodes)
    if other is None:
        return ()
    name = parts.cluster.name
    return ((name(int(rows[other])), name(plan.decode_row)),)


def _refused(parts: Parts, request: Request, plan: Plan, verdict: Verdict, now: float) -> Refused:
    rejection = verdict.rejection(request.id, now)
    question, choice = plan.question, plan.choice
    most = parts.settings.core.explained_max
    candidates = best_of(parts.cluster, question.rows, choice.at, choice.cost, choice.terms, most)
    rejection = replace(rejection, candidates=candidates)
    row = plan.decode_row
    joining = parts.cluster.d1[row] + parts.cluster.d2[row] * request.prompt_tokens
    ghost = Ghost(
        prefill_row=plan.prefill_row,
        decode_row=row,
        objectives=request.objectives,
        own_s=max(plan.forecast.ttft_s - plan.forecast.queue_s, 0.0),
        decode_s=admission.expected_decode_s(
            parts.settings.admission, plan.output_tokens, plan.tbt_s
        ),
        rejected_at=now,
        joining_s=float(joining),
    )
    return Refused(rejection, ghost)


def _nobody(parts: Parts, request: Request, now: float, reason: str) -> Refused:
    if parts.cluster.model_number(request.model) is None:
        raise UnknownModel(f"no instance has registered model {request.model!r}")
    role = reason.removeprefix("no_")
    but = " but those that it excludes" if request.exclude else ""
    text = f"no instance{but} is ready to {role} {request.model!r}: register one, or wait"
    retry_s = parts.settings.core.heartbeat_timeout_s
    return Refused(Rejection(request.id, reason, text, retry_after_s=retry_s, decided_at=now))


def _tokens(question: Question, blocks: int) -> int:
    # The last token is always computed: nothing else gives the first one of the answer.
    return min(blocks * question.block_tokens, question.request.prompt_tokens - 1)


def _profile(cluster: Cluster, row: int) -> str:
    spec = cluster.specs[row]
    return spec.profile if spec is not None else ""


def _node(cluster: Cluster, source: str) -> int:
    """The number of the node that a holder is on."""
    name, _, tier = source.rpartition("/")
    if tier == "hbm":
        return int(cluster.node[cluster.row(name)]) if name in cluster else -1
    return cluster.node_number(name)
