"""One way to serve a request: prefill by policy, decode by predicted time and room. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from ..admission import admission
from ..admission.admission import AdmissionForecast
from ..admission.degradation import after
from ..cost.latency_model import decode_step_s
from ..decode.context_parallel import ContextSpread, members_wanted, spread
from ..decode.load_forecast import Span, expected_load, expected_load_of
from ..decode.selection import DecodeChoice, DecodeQuestion, NoDecode, choose_only
from ..decode.selection import choose as choose_decode
from ..prefill.disaggregation import (
    PredictedWays,
    PrefillPlacement,
    Situation,
    delay_weight,
    place,
)
from ..prefill.local_cost import turn_s
from . import hand_over

if TYPE_CHECKING:
    import random

    from numpy.typing import NDArray

    from ..admission.degradation import Step
    from ..admission.hedging import Races
    from ..admission.margin import Margins
    from ..cost.transfer_model import TransferModel
    from ..decode.length_predictor import Length
    from ..decode.load_forecast import Horizon
    from ..decode.output_length import Lengths
    from ..prefill.policy_registry import Choice, Policy, PolicyQuestion
    from ..prefill.wait_estimate import Queues
    from ..records import Request
    from ..state.inflight_prefills import Computing
    from ..state.instance_table import Cluster
    from .decision_view import View
    from .hand_over import HandOver
    from .settings import Settings

    Rows = NDArray[np.int64]


@dataclass(slots=True)
class Parts:
    """The state and the settings that decisions are made from."""

    cluster: Cluster
    view: View
    queues: Queues
    transfers: TransferModel
    computing: Computing
    horizon: Horizon
    lengths: Lengths
    races: Races
    margins: Margins
    settings: Settings
    policy: Policy
    dice: random.Random


@dataclass(slots=True)
class RequestPlan:
    """One way to serve a request: its instances, and the predicted TTFT and TBT."""

    question: PolicyQuestion
    choice: Choice
    decode_rows: Rows
    decode: DecodeChoice | NoDecode
    spread: ContextSpread | None
    length: Length
    tbt_s: float
    forecast: AdmissionForecast
    handover: HandOver | None = None  # to each of `decode_rows`; None for the same instance
    first_waits_s: float = 0.0  # for it, of the TTFT
    placement: PrefillPlacement | None = None  # None where there was nothing to decide

    @property
    def output_tokens(self) -> int:
        return self.length.tokens

    @property
    def computing_s(self) -> float:
        """The predicted time to the first token without the queue."""
        return max(self.prefilled_s - self.forecast.queue_s, 0.0)

    @property
    def prefilled_s(self) -> float:
        """Until the prefill is done."""
        return self.forecast.ttft_s - self.first_waits_s

    @property
    def prefill_row(self) -> int:
        return int(self.question.rows[self.choice.at])

    @property
    def decode_row(self) -> int:
        at = self.spread.binding if self.spread is not None else self.decode.at
        return int(self.decode_rows[at])

    @property
    def handover_s(self) -> float:
        """From the end of the prefill until the last one of those that decode has its KV."""
        if self.handover is None:
            return 0.0
        seconds = self.handover.seconds
        members = [self.decode.at] if self.spread is None else list(self.spread.members)
        return float(seconds[members].max())


def able(parts: Parts, request: Request) -> tuple[Rows, Rows]:
    """Candidate rows for the request's prefill, and for its decode, in its key space, without
    excluded instances. KV of an unknown size would be handed over in no time: who hands over such,
    and does not decode, prefills only if all others do so as well."""
    of = request.model, request.key_space
    able = [parts.view.rows(*of, prefill=prefill) for prefill in (True, False)]
    if request.exclude:
        cluster = parts.cluster
        out = [cluster.row(name) for name in request.exclude if name in cluster]
        able = [rows[np.isin(rows, out, invert=True)] for rows in able]
    prefill, decode = able
    sized = parts.cluster.block_bytes.take(prefill) > 0
    if not sized.all():
        sized |= parts.cluster.decodes.take(prefill)
        if sized.any():
            prefill = prefill[sized]
    return prefill, decode


def left_alone(parts: Parts, request: Request) -> bool:
    """Whether all instances that prefill a model are lost or leave, or have another key space: who
    decodes computes, too."""
    cluster, model = parts.cluster, request.model
    return not len(parts.view.rows(model, request.key_space, prefill=True)) and any(
        spec is not None and spec.model == model and bool(cluster.prefills[row])
        for row, spec in enumerate(cluster.specs)
    )


def plan_request(
    parts: Parts, request: Request, prefill: Rows, decode: Rows, now: float
) -> RequestPlan:
    """The plan of a request: the policy chooses the prefill instance, then a decode instance is
    chosen.

    Conditional disaggregation: a mixed-role prefill instance also decodes the request if it has
    room and meets the TBT objective. Whether an instance that decodes prefills as well, or another
    one does, is decided by `disaggregation.place`. Without any to prefill, one that decodes does.
    """
    if not len(prefill):
        best = _chosen(parts, request, decode, decode, now)
        rows = decode[best.choice.at : best.choice.at + 1]
        plan = _chosen(parts, request, rows, rows, now)
        plan.placement = PrefillPlacement(remote=False, reason="no_prefill")
        return plan
    plan = _chosen(parts, request, prefill, decode, now)
    cluster, target = parts.cluster, plan.decode_row
    if plan.spread is not None:
        return plan
    if not cluster.decodes[plan.prefill_row]:
        if not cluster.prefills[target]:
            return plan
        return _placed(parts, _at_one(parts, request, target, now), plan)
    apart = prefill[~cluster.decodes[prefill]]
    form = parts.settings.disaggregation.form
    if form == "local" or not len(apart):
        return plan
    if form == "predicted" and not cluster.batch[plan.prefill_row]:
        return plan  # nobody is held up, and the policy has compared the rest
    return _placed(parts, plan, _chosen(parts, request, apart, decode, now))


def _chosen(parts: Parts, request: Request, prefill: Rows, decode: Rows, now: float) -> RequestPlan:
    """The plan with the prefill instance that the policy chooses."""
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
    if question.cached_part_tokens is not None:
        choice.terms["cached_part_tokens"] = question.cached_part_tokens.astype(np.float64)
    row = int(prefill[choice.at])
    if parts.cluster.decodes[row]:
        alone = _alone(parts, question, choice, row, now)
        objective_s = request.objectives.tbt_s
        good = alone.forecast.room_then and (objective_s is None or alone.tbt_s <= objective_s)
        if good or not parts.cluster.block_bytes[row]:
            return alone
    return _decoded(parts, question, choice, decode, now)


def _placed(parts: Parts, local: RequestPlan, remote: RequestPlan) -> RequestPlan:
    """Of two plans, the one that is better: to prefill on an instance that decodes, or on one that
    does not."""
    cluster, settings = parts.cluster, parts.settings.disaggregation
    question, row = local.question, local.prefill_row
    situation = Situation(
        prompt_tokens=question.request.prompt_tokens,
        cached_tokens=cached_tokens_of(
            question, local.choice.at, int(question.local_blocks[local.choice.at])
        ),
        prefill_queue=int(cluster.queued[remote.prefill_row]),
        running_decodes=int(cluster.batch[row]),
    )
    step_s = _tbt_now_s(parts, row, question.request.prompt_tokens)
    weight = delay_weight(settings, question.request.objectives, step_s, local.output_tokens)
    held_up_s = weight * local.computing_s * situation.running_decodes
    ways = PredictedWays(
        local_s=_arrival_s(parts, local) + held_up_s,
        remote_s=_arrival_s(parts, remote),
    )
    placement = place(settings, situation, ways)
    chosen = remote if placement.remote else local
    chosen.placement = placement
    return chosen


def _arrival_s(parts: Parts, plan: RequestPlan) -> float:
    """Seconds until a request could decode by this plan, and by which its prefill delays others.

    As many requests are expected to come during a wait as were found waiting (Little's law), and
    each of them waits for this prefill as well.
    """
    behind_s = plan.computing_s * int(parts.cluster.queued[plan.prefill_row])
    return plan.prefilled_s + plan.handover_s + behind_s


def _at_one(parts: Parts, request: Request, row: int, now: float) -> RequestPlan:
    """The plan that prefills and decodes on one instance."""
    rows = np.array([row])
    return plan_request(parts, request, rows, rows, now)


def _alone(
    parts: Parts, question: PolicyQuestion, choice: Choice, row: int, now: float
) -> RequestPlan:
    """The plan that decodes on the prefill instance: a faster `_decoded` of one row."""
    rows = question.rows[choice.at : choice.at + 1]
    if parts.settings.spread.enabled:
        return _decoded(parts, question, choice, rows, now)
    request, cluster, settings = question.request, parts.cluster, parts.settings.decode
    ttft_s = choice.ttft_s.item(choice.at)
    queue_s = min(turn_s(question).item(choice.at), ttft_s)
    length = parts.lengths.predict(request)
    output_tokens = length.tokens
    span = _span(parts, question, output_tokens, rows, now + ttft_s, now)
    batch, context, kv_used = expected_load_of(parts.horizon, cluster, row, span, now)
    chosen = choose_only(
        request, cluster, row, output_tokens, settings,
        batch=batch, context_tokens=context, kv_used_tokens=kv_used,
        heavy=parts.lengths.heavy(output_tokens),
    )  # fmt: skip
    tbt_s = float(chosen.tbt_s[0])
    forecast = AdmissionForecast(
        ttft_s=ttft_s,
        tbt_now_s=_tbt_now_s(parts, row, request.prompt_tokens + output_tokens / 2),
        tbt_then_s=tbt_s,
        queue_s=queue_s,
        room_now=_room_now(parts, request, output_tokens, row),
        room_then=isinstance(chosen, DecodeChoice),
        room_ever=_fits_ever(parts, request, output_tokens, rows),
        promised_s=parts.horizon.promised.tightest_of(row),
        ttft_margin=parts.margins.ttft.factor,
        tbt_margin=parts.margins.tbt.factor,
    )
    return RequestPlan(question, choice, rows, chosen, None, length, tbt_s, forecast)


def _decoded(
    parts: Parts, question: PolicyQuestion, choice: Choice, decode: Rows, now: float
) -> RequestPlan:
    """The plan that decodes on the best of the rows `decode`."""
    settings, request = parts.settings, question.request
    ttft_s = float(choice.ttft_s[choice.at])
    length = parts.lengths.predict(request)
    output_tokens = length.tokens
    moved = hand_over.predict(parts.view, parts.transfers, settings, question, choice, decode)
    starts_at = now + ttft_s + float(moved.seconds.min())
    queue_s = min(turn_s(question).item(choice.at), ttft_s)
    span = _span(parts, question, output_tokens, decode, starts_at, now)
    load = expected_load(parts.horizon, parts.cluster, decode, span, now)
    promised_s = parts.horizon.promised.tightest_s(decode)
    asked = DecodeQuestion(
        request=request,
        cluster=parts.cluster,
        rows=decode,
        output_tokens=output_tokens,
        settings=settings.decode,
        dice=parts.dice,
        batch=load.batch,
        context_tokens=load.context_tokens,
        kv_used_tokens=load.kv_used_tokens,
        limits_s=admission.limits_s(
            settings.admission, request, promised_s, parts.margins.tbt.factor
        ),
        heavy=parts.lengths.heavy(output_tokens),
        move_s=moved.seconds,
        enforce=False,  # admission enforces TBT, by priority class and after degradation steps
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
    tbt_now_s = _tbt_now_s(parts, int(decode[at]), request.prompt_tokens + output_tokens / 2)
    # The KV is waited for by the first token, or by the second one: then that is, over the answer,
    # so much for each token.
    moving_s, first_waits_s, waiting_s = float(moved.seconds[at]), 0.0, 0.0
    if request.first_token_from == "decode" and decode[at] != question.rows[choice.at]:
        first_waits_s = moving_s + tbt_s
    else:
        waiting_s = moving_s / max(output_tokens, 1)
        tbt_s, tbt_now_s = tbt_s + waiting_s, tbt_now_s + waiting_s
    forecast = AdmissionForecast(
        ttft_s=ttft_s + first_waits_s,
        tbt_now_s=tbt_now_s,
        tbt_then_s=tbt_s,
        queue_s=queue_s,
        room_now=apart is not None or _room_now(parts, request, output_tokens, int(decode[at])),
        room_then=apart is not None or isinstance(chosen, DecodeChoice),
        room_ever=_fits_ever(parts, request, output_tokens, decode),
        promised_s=float(promised_s[at]),
        waiting_s=waiting_s,
        ttft_margin=parts.margins.ttft.factor,
        tbt_margin=parts.margins.tbt.factor,
    )
    return RequestPlan(
        question, choice, decode, chosen, apart, length, tbt_s, forecast, moved, first_waits_s
    )


def degraded_plan(
    parts: Parts, request: Request, steps: tuple[Step, ...], now: float
) -> RequestPlan | None:
    """The plan after the degradation `steps`; None if no instance can serve the request so."""
    request = after(
        steps,
        request,
        output_tokens_cap=parts.settings.admission.output_tokens_cap,
        smaller_models=parts.settings.admission.smaller_models,
        lowest_class=parts.settings.queue.classes[-1].name,
    )
    names = parts.view.key_spaces(request.model)
    if len(names) > 1 and request.key_space not in names:  # another model
        request = replace(request, key_space=names[0])
    prefill, decode = able(parts, request)
    if "local_prefill" in steps:
        prefill = decode = np.intersect1d(prefill, decode, assume_unique=True)
    alone = "local_prefill" not in steps and left_alone(parts, request)
    if not len(decode) or not (len(prefill) or alone):
        return None
    plan = plan_request(parts, request, prefill, decode, now)
    if "local_prefill" in steps:
        return _at_one(parts, request, plan.prefill_row, now)
    return plan


def _spread(settings: Settings, asked: DecodeQuestion) -> ContextSpread | None:
    """How a context that is too long for one instance is spread over several; None if it is not."""
    if not settings.spread.enabled:
        return None
    capacity = float(np.median(asked.cluster.kv_capacity_tokens.take(asked.rows)))
    context = asked.request.prompt_tokens + asked.output_tokens
    if members_wanted(context, capacity, settings.spread) < 2:
        return None
    found = spread(asked, settings.spread)
    return found if isinstance(found, ContextSpread) else None


def _fits_ever(parts: Parts, request: Request, output_tokens: int, rows: Rows) -> bool:
    """Whether some instance, if it were empty, could hold the request's context and answer. False
    does not rule out a spread over several instances: then the forecast's `room` is true."""
    capacity = int(parts.cluster.kv_capacity_tokens.take(rows).max(initial=0))
    usable = capacity * (1.0 - parts.settings.decode.reserve_share)
    return request.prompt_tokens + output_tokens <= usable


def _room_now(parts: Parts, request: Request, output_tokens: int, row: int) -> bool:
    """Whether there is KV room on an instance now, and a place in its batch."""
    c, share = parts.cluster, 1.0 - parts.settings.decode.reserve_share
    room = c.kv_capacity_tokens.item(row) * share - c.kv_used_tokens.item(row)
    fits = request.prompt_tokens + output_tokens <= room
    return fits and c.batch.item(row) < c.batch_max.item(row)


def _span(
    parts: Parts,
    question: PolicyQuestion,
    output_tokens: int,
    rows: Rows,
    starts_at: float,
    now: float,
) -> Span:
    """From the time when somebody could begin to prefill, on the instance where one waits least,
    until this request has decoded on some of `rows`, at the pace of those there now."""
    pace_s = _pace_s(parts.cluster, rows)
    decode_s = admission.expected_decode_s(parts.settings.admission, output_tokens, pace_s)
    turn_at = min(now + float(turn_s(question).min()), starts_at)
    return Span(turn_at, starts_at + decode_s)


def _pace_s(c: Cluster, rows: Rows) -> float:
    """The mean decode step of some rows now."""
    columns = (c.d0, c.d1, c.d2, c.batch, c.context_tokens)
    if len(rows) == 1:
        row = rows.item()
        return decode_step_s(*(column.item(row) for column in columns))
    return float(decode_step_s(*(column.take(rows) for column in columns)).mean())


def _tbt_now_s(parts: Parts, row: int, context_tokens: float) -> float:
    c = parts.cluster
    batch, context = c.batch.item(row) + 1, c.context_tokens.item(row) + context_tokens
    return decode_step_s(c.d0.item(row), c.d1.item(row), c.d2.item(row), batch, context)


def cached_tokens_of(question: PolicyQuestion, at: int, blocks: int) -> int:
    """Tokens of the prompt that the candidate `at` has in HBM, or in its leading blocks, if it uses
    those."""
    parts = question.cached_part_tokens
    return max(prompt_tokens_of(question, blocks), 0 if parts is None else int(parts[at]))


def prompt_tokens_of(question: PolicyQuestion, blocks: int) -> int:
    """Tokens of the prompt in its leading blocks."""
    # The last prompt token is always computed: only its forward pass gives the first output token.
    return min(blocks * question.block_tokens, question.request.prompt_tokens - 1)
