"""Admission control: early admission or rejection by the predicted TTFT and TBT. Pure.

A request that will miss its objectives is useless to its client, and the time spent to compute it
is lost to other requests. So admission decides when the request arrives, before any work is spent
on it, by the load

    load = max(predicted TTFT / TTFT objective, predicted TBT / TBT objective)

The request is admitted if its load is at most the limit of its priority class, 1 for an ordinary
class. `mode` selects the prediction of TBT ("Mooncake", arXiv 2407.00079, section 7):

- "off": every request is admitted.
- "baseline": TTFT only; TBT is checked when the prefill is done (`decide_decode`), as in systems
  whose decode instances do their own admission. A request rejected then has wasted its prefill.
- "early": TBT as if the request began to decode now. No prefill is wasted, but the load now differs
  from that after the prefill, and the prefill and decode pools oscillate: decode is idle, all
  requests are admitted; they arrive together, decode is full, all requests are rejected; prefill is
  idle, and so on.
- "predictive": TBT at the time when the request will begin to decode (`load_forecast.py`).

A request without an objective is never rejected for it. Under load, low classes are rejected first,
as their limit is lower. Before a request is rejected, admission tries the degradation steps that
the settings allow, as few as suffice.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import combinations
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
import numpy as np
from msgspec import Meta

from ..errors import InvalidRequest
from ..records import TOKENS_MAX, Objectives, Rejection
from .degradation import STEPS, Step, possible, relaxed

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from ..records import Request

    # The forecast after these degradation steps; None if they are not possible.
    Again = Callable[[tuple["Step", ...]], "AdmissionForecast | None"]
    # In how many seconds the TBT will be at most this; None if that is beyond the forecast.
    Relief = Callable[[float], float | None]

Mode = Literal["off", "baseline", "early", "predictive"]
Name = Annotated[str, Meta(min_length=1, max_length=64)]
Scale = Annotated[float, Meta(ge=0.1, le=10.0)]
Seconds = Annotated[float, Meta(ge=0.0, le=86_400.0)]
Steps = Annotated[tuple[Step, ...], Meta(max_length=STEPS)]

# Room for all priority classes, and for some that no longer exist.
CLASSES_MAX = 64


def _scales() -> dict[str, float]:
    return {"high": 1.2, "normal": 1.0, "low": 0.8}


class AdmissionSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Which requests are taken. Raises ValueError for a step that is given twice and for a
    `retry_after_s_max` below the least."""

    mode: Mode = "predictive"
    """How load is predicted; see the top of `admission.py`."""

    class_scales: Annotated[dict[Name, Scale], Meta(max_length=CLASSES_MAX)] = msgspec.field(
        default_factory=_scales
    )
    """The load up to which each class of priority is taken; 1 for who is not named. Above 1 a
    prediction that is slightly too late is believed to be wrong: better late than refused. Below 1
    what is left is kept for higher classes, and some are refused who would have been in time."""

    degrade: Steps = ()
    """What is tried before a request is refused, the least harmful first: "cap_output" (its answer
    is cut at `output_tokens_cap`), "local_prefill" (no transfer: its decode instance computes it),
    "relax" (its objectives are `relax_factor` times as long), "smaller_model" (that of
    `smaller_models` answers), "best_effort" (it has no objectives, and waits in the lowest class).
    None unless chosen: a caller who was not told gets another answer than it asked for. The fewest
    steps that suffice are taken."""

    degrade_classes: Annotated[dict[Name, Steps], Meta(max_length=CLASSES_MAX)] = {}
    """The same for classes of priority that have steps of their own."""

    smaller_models: Annotated[dict[Name, Name], Meta(max_length=CLASSES_MAX)] = {}
    """Of "smaller_model": who answers for each model. Both must read prompts with one tokenizer."""

    cap_classes: Annotated[tuple[Name, ...], Meta(max_length=CLASSES_MAX)] = ()
    """Classes of priority whose answers may end early when steps take longer than somebody on the
    same instance was promised, the longest first (`output_caps.py`). None unless chosen."""

    cap_tokens_min: Annotated[int, Meta(ge=1, le=TOKENS_MAX)] = 128
    """No answer is ended before. TetriInfer's bound of a light decode."""

    output_tokens_cap: Annotated[int, Meta(ge=1, le=TOKENS_MAX)] = 256
    """Of "cap_output". The mean answer of published traces has 182 to 343 tokens."""

    relax_factor: Annotated[float, Meta(ge=1.0, le=100.0)] = 2.0
    """Of "relax"."""

    use_lengths: bool = True
    """Whether "predictive" takes each request's own predicted length, or `decode_s` for all."""

    late_share: Annotated[float, Meta(gt=0.0, lt=1.0)] = 0.05
    """Of those whom "predictive" admits in a full cluster, how many may be late: the margin for
    errors of its predictions is learnt so that as many are (`margin.py`). 0 would refuse everybody:
    a prediction that is never wrong does not exist. 5% cost little goodput, and a smaller share
    costs more by what it refuses."""

    decode_s: Seconds = 13.0
    """How long every request decodes, as far as its length is not known: t_d in the paper, which
    gives no number. 182 tokens, the mean of its trace, at the median TBT of 70 ms."""

    retry_after_s_min: Seconds = 1.0
    """Retry-After has whole seconds; less than one would be none."""

    retry_after_s_max: Seconds = 60.0
    """Nobody is sent away for longer: what is predicted so far ahead is not worth waiting for."""

    retry_jitter_share: Annotated[float, Meta(ge=0.0, le=10.0)] = 0.25
    """At most so much is added at random, or all who were refused together come back together."""

    def __post_init__(self) -> None:
        for steps in (self.degrade, *self.degrade_classes.values()):
            if len(set(steps)) < len(steps):
                raise ValueError("degrade: give each step once")
        if self.retry_after_s_max < self.retry_after_s_min:
            raise ValueError("retry_after_s_max: at least retry_after_s_min")

    def scale(self, priority: str) -> float:
        """The load up to which requests of a priority class are admitted."""
        return self.class_scales.get(priority, 1.0)

    def steps(self, request: Request) -> list[Step]:
        """The degradation steps that a request may have to take."""
        listed = self.degrade_classes.get(request.priority, self.degrade)
        cap, smaller = self.output_tokens_cap, self.smaller_models
        return [step for step in listed if possible(step, request, cap, smaller)]


@dataclass(frozen=True, slots=True)
class AdmissionForecast:
    """The predictions for a request on the instances that were chosen for it.

    `queue_s` is the queueing part of `ttft_s`, the part that a later retry can reduce. `tbt_now_s`
    is the time between tokens if the request began to decode now, `tbt_then_s` that when its
    prefill will be done, the highest while it decodes, both with this request in the batch.
    `room_now`, `room_then`: whether its context and answer fit at these times; `room_ever`: whether
    they would fit on an instance without any other request. `promised_s`: the tightest TBT that was
    promised to somebody on that decode instance, and `waiting_s` how much of `tbt_now_s` and
    `tbt_then_s` is waiting of its own, which makes no step longer. `ttft_margin`, `tbt_margin`: the
    factors that mode "predictive" allows for (`margin.py`).
    """

    ttft_s: float
    tbt_now_s: float
    tbt_then_s: float
    queue_s: float = 0.0
    room_now: bool = True
    room_then: bool = True
    room_ever: bool = True
    promised_s: float = math.inf
    waiting_s: float = 0.0
    ttft_margin: float = 1.0
    tbt_margin: float = 1.0


@dataclass(frozen=True, slots=True)
class Outlook:
    """A request, and its forecast without degradation steps."""

    request: Request
    forecast: AdmissionForecast


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a request is admitted, why, and with which degradation steps.

    A `load` of at most `limit` is admitted (mode "off": any); it is that of `forecast` against
    `objectives`, which are those in force after the `steps`. If the request is rejected, they are
    those of the attempt that came nearest, and `reason` ("ttft", "tbt" or "kv_room") is why even
    that one failed. `degraded` describes the steps to the caller. `retry_after_s`: None if no retry
    would help.
    """

    admitted: bool
    load: float
    limit: float
    forecast: AdmissionForecast
    objectives: Objectives
    steps: tuple[Step, ...] = ()
    degraded: tuple[str, ...] = ()
    output_tokens_max: int | None = None
    reason: str = ""
    message: str = ""
    retry_after_s: float | None = None
    terms: dict[str, float] = field(default_factory=dict)

    @property
    def promised(self) -> Objectives:
        """What an admitted request may rely on: its objectives, as far as its class has them."""
        return relaxed(self.objectives, ("relax",), self.limit)

    def rejection(self, request_id: str, now: float) -> Rejection:
        """The rejection for the caller; the verdict must not be admitted."""
        assert not self.admitted
        return Rejection(
            request_id=request_id,
            reason=self.reason,
            message=self.message,
            predicted_ttft_s=self.forecast.ttft_s,
            predicted_tbt_s=self.terms["tbt_s"],
            retry_after_s=self.retry_after_s,
            terms=self.terms,
            decided_at=now,
        )


def decide(
    outlook: Outlook,
    settings: AdmissionSettings,
    dice: random.Random,
    *,
    again: Again | None = None,
    relief: Relief | None = None,
) -> Verdict:
    """Admit or reject a request when it arrives.

    The callback `again` returns the forecast after some degradation steps; it is called only if the
    request would be rejected ("relax" is never among the steps: it changes no prediction). The
    callback `relief` is called to compute Retry-After (`load_forecast.relief_s`). Raises
    InvalidRequest for an objective that is not above 0.
    """
    objectives = outlook.request.objectives
    _check(objectives)
    limit = settings.scale(outlook.request.priority)
    first = _attempt(outlook.forecast, objectives, limit, settings.mode, ())
    if settings.mode == "off" or first.load <= limit:
        return _admit(first, limit, outlook.request, settings)
    nearest = first
    for attempt in _degraded(outlook, settings, again):
        if attempt.load <= limit:
            return _admit(attempt, limit, outlook.request, settings)
        nearest = min(nearest, attempt, key=lambda one: one.load)
    return _refuse(nearest, limit, outlook.request, settings, dice, relief)


def decide_decode(
    outlook: Outlook,
    settings: AdmissionSettings,
    dice: random.Random,
    *,
    relief: Relief | None = None,
) -> Verdict:
    """The second check, when the prefill of a request is done. Only the mode "baseline" rejects
    here: every other mode has decided before. Raises InvalidRequest for an objective that is not
    above 0."""
    objectives = Objectives(tbt_s=outlook.request.objectives.tbt_s)
    _check(objectives)
    limit = settings.scale(outlook.request.priority)
    attempt = _attempt(outlook.forecast, objectives, limit, "early", ())
    if settings.mode != "baseline" or attempt.load <= limit:
        return _admit(attempt, limit, outlook.request, settings)
    return _refuse(attempt, limit, outlook.request, settings, dice, relief)


def limits_s(
    settings: AdmissionSettings, request: Request, promised_s: NDArray[np.float64], margin: float
) -> NDArray[np.float64] | float:
    """Of each candidate to decode, the predicted TBT up to which a request is admitted, without
    degradation. `promised_s` [candidates] and the margin for TBT as in `AdmissionForecast`."""
    if settings.mode not in ("early", "predictive"):
        return math.inf
    limit, objective_s = settings.scale(request.priority), request.objectives.tbt_s
    own_s = math.inf if objective_s is None else limit * objective_s
    within_s = np.minimum(own_s, promised_s * min(limit, 1.0))
    return within_s / margin if settings.mode == "predictive" else within_s


def expected_decode_s(
    settings: AdmissionSettings, output_tokens: int | None, tbt_s: float
) -> float:
    """The predicted decode time of a request: its output length times the predicted time between
    tokens, or the setting `decode_s` if the length is unknown or `use_lengths` is off."""
    if output_tokens is None or not settings.use_lengths:
        return settings.decode_s
    return max(output_tokens - 1, 0) * tbt_s  # the prefill yields the first token


def retry_after_s(wait_s: float, settings: AdmissionSettings, dice: random.Random) -> float:
    """Seconds after which the client should retry, if the capacity should be free in `wait_s`:
    bounded by the settings, with jitter."""
    bounded = min(max(wait_s, settings.retry_after_s_min), settings.retry_after_s_max)
    return bounded * (1.0 + settings.retry_jitter_share * dice.random())


# -- one attempt -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Attempt:
    """A forecast against objectives, after some degradation steps. `loads` by reason."""

    forecast: AdmissionForecast
    objectives: Objectives
    mode: Mode
    steps: tuple[Step, ...]
    loads: dict[str, float]

    @property
    def load(self) -> float:
        return max(self.loads.values(), default=0.0)

    @property
    def tbt_s(self) -> float:
        return self.forecast.tbt_now_s if self.mode == "early" else self.forecast.tbt_then_s

    @property
    def ttft_margin(self) -> float:
        return self.forecast.ttft_margin if self.mode == "predictive" else 1.0

    @property
    def tbt_margin(self) -> float:
        return self.forecast.tbt_margin if self.mode == "predictive" else 1.0

    @property
    def room(self) -> bool:
        return self.forecast.room_now if self.mode == "early" else self.forecast.room_then

    @property
    def own_tbt_load(self) -> float:
        """By its own objective; 0 without one."""
        objective_s = self.objectives.tbt_s
        return 0.0 if objective_s is None else self.tbt_margin * self.tbt_s / objective_s

    def others_tbt_load(self, limit: float) -> float:
        """By what others were promised, who do not wait for this one's KV. A class with a limit
        above 1 may be late itself, and does not make others late; one below 1 leaves as much of
        what others were promised."""
        step_s = self.tbt_s - self.forecast.waiting_s
        return self.tbt_margin * step_s / self.forecast.promised_s * max(1.0, limit)

    def step_limit_s(self, limit: float) -> float:
        """The predicted step up to which it is admitted; infinite for any."""
        objective_s, margin = self.objectives.tbt_s, self.tbt_margin
        own_s = math.inf if objective_s is None else limit * objective_s / margin
        others_s = min(1.0, limit) * self.forecast.promised_s / margin
        return min(own_s - self.forecast.waiting_s, others_s)


def _attempt(
    forecast: AdmissionForecast,
    objectives: Objectives,
    limit: float,
    mode: Mode,
    steps: tuple[Step, ...],
) -> _Attempt:
    loads: dict[str, float] = {}
    attempt = _Attempt(forecast, objectives, mode, steps, loads)
    if not attempt.room and mode in ("early", "predictive"):
        loads["kv_room"] = math.inf
    if objectives.ttft_s is not None:
        loads["ttft"] = attempt.ttft_margin * forecast.ttft_s / objectives.ttft_s
    if attempt.step_limit_s(limit) < math.inf and mode not in ("off", "baseline"):
        loads["tbt"] = max(attempt.own_tbt_load, attempt.others_tbt_load(limit))
    return attempt


def _degraded(
    outlook: Outlook, settings: AdmissionSettings, again: Again | None
) -> Iterator[_Attempt]:
    """Attempts with one degradation step, then with two, then with all, in the order of the
    settings."""
    forecasts: dict[tuple[Step, ...], AdmissionForecast | None] = {(): outlook.forecast}
    able = settings.steps(outlook.request)
    for count in range(1, len(able) + 1):
        for steps in combinations(able, count):
            asked = tuple(step for step in steps if step != "relax")
            if asked not in forecasts:
                forecasts[asked] = again(asked) if again is not None else None
            forecast = forecasts[asked]
            if forecast is None:
                continue
            objectives = relaxed(outlook.request.objectives, steps, settings.relax_factor)
            limit = settings.scale(outlook.request.priority)
            yield _attempt(forecast, objectives, limit, settings.mode, steps)


def _check(objectives: Objectives) -> None:
    for name, value in (("ttft_s", objectives.ttft_s), ("tbt_s", objectives.tbt_s)):
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise InvalidRequest(f"objective {name} is {value}: give seconds above 0, or none")


# -- verdicts --------------------------------------------------------------------------------------


def _admit(
    attempt: _Attempt, limit: float, request: Request, settings: AdmissionSettings
) -> Verdict:
    capped = "cap_output" in attempt.steps
    return Verdict(
        admitted=True,
        load=attempt.load,
        limit=limit,
        forecast=attempt.forecast,
        objectives=attempt.objectives,
        steps=attempt.steps,
        degraded=tuple(_words(step, request, settings) for step in attempt.steps),
        output_tokens_max=settings.output_tokens_cap if capped else request.output_tokens_max,
        terms=_terms(attempt, limit),
    )


def _refuse(
    attempt: _Attempt,
    limit: float,
    request: Request,
    settings: AdmissionSettings,
    dice: random.Random,
    relief: Relief | None,
) -> Verdict:
    reason = max(attempt.loads, key=lambda name: attempt.loads[name])
    wait_s = _wait_s(attempt, limit, settings, relief)
    return Verdict(
        admitted=False,
        load=attempt.load,
        limit=limit,
        forecast=attempt.forecast,
        objectives=attempt.objectives,
        steps=attempt.steps,
        degraded=tuple(_words(step, request, settings) for step in attempt.steps),
        reason=reason,
        message=_message(attempt, limit, reason, wait_s),
        retry_after_s=None if wait_s is None else retry_after_s(wait_s, settings, dice),
        terms=_terms(attempt, limit),
    )


def _wait_s(
    attempt: _Attempt, limit: float, settings: AdmissionSettings, relief: Relief | None
) -> float | None:
    """In how many seconds the same request would be admitted, if no other request arrived; None:
    never.

    A queue drains by a second per second. The rest of TTFT is the request's own work, which waiting
    does not reduce.
    """
    forecast, objectives = attempt.forecast, attempt.objectives
    waits = [0.0]
    if not forecast.room_ever and "kv_room" in attempt.loads:
        return None
    if attempt.loads.get("ttft", 0.0) > limit and objectives.ttft_s is not None:
        late_s = forecast.ttft_s - limit * objectives.ttft_s / attempt.ttft_margin
        if late_s > forecast.queue_s:
            return None
        waits.append(late_s)
    if attempt.loads.get("tbt", 0.0) > limit:
        seen_s = relief(attempt.step_limit_s(limit)) if relief is not None else None
        waits.append(settings.retry_after_s_max if seen_s is None else seen_s)
    return max(waits)


def _message(attempt: _Attempt, limit: float, reason: str, wait_s: float | None) -> str:
    forecast, objectives = attempt.forecast, attempt.objectives
    if reason == "kv_room":
        text = "no decode instance has KV room for its context and answer, and a place in its batch"
    elif reason == "ttft":
        text = _predicted("TTFT", forecast.ttft_s, attempt.ttft_margin)
        text += _exceeds(f"the objective of {objectives.ttft_s} s", limit)
    else:
        text = _predicted("TBT", attempt.tbt_s, attempt.tbt_margin)
        if attempt.own_tbt_load >= attempt.others_tbt_load(limit):
            text += _exceeds(f"the objective of {objectives.tbt_s} s", limit)
        else:
            promised = f"that promised to others of {forecast.promised_s} s"
            text += _exceeds(promised, min(limit, 1.0))
    if attempt.steps:
        text += f", even with {', '.join(attempt.steps)}"
    if wait_s is None:
        text += "; an idle instance would not meet it either: send less, or give it longer"
    return text


def _predicted(what: str, predicted_s: float, margin: float) -> str:
    text = f"predicted {what} of {predicted_s:.3g} s"
    return text if margin == 1.0 else f"{text} with a margin of {margin - 1.0:.1%}"


def _exceeds(what: str, limit: float) -> str:
    text = f" exceeds {what}"
    return text if limit == 1.0 else f"{text} times {limit:g}, which is its class's part of it"


def _words(step: Step, request: Request, settings: AdmissionSettings) -> str:
    if step == "cap_output":
        return f"cap_output:{settings.output_tokens_cap}"
    if step == "smaller_model":
        return f"smaller_model:{settings.smaller_models[request.model]}"
    return f"relax:{settings.relax_factor:g}" if step == "relax" else step


def _terms(attempt: _Attempt, limit: float) -> dict[str, float]:
    """Every number behind the verdict: in seconds, except for `room`, the loads and their limit."""
    forecast, objectives = attempt.forecast, attempt.objectives
    terms = {
        "limit": limit,
        "ttft_s": forecast.ttft_s,
        "queue_s": forecast.queue_s,
        "tbt_s": attempt.tbt_s,
        "tbt_now_s": forecast.tbt_now_s,
        "tbt_then_s": forecast.tbt_then_s,
        "room": float(attempt.room),
        "ttft_margin": attempt.ttft_margin,
        "tbt_margin": attempt.tbt_margin,
    }
    if objectives.ttft_s is not None:
        terms["ttft_objective_s"] = objectives.ttft_s
    if objectives.tbt_s is not None:
        terms["tbt_objective_s"] = objectives.tbt_s
    if forecast.promised_s < math.inf:
        terms["tbt_promised_s"] = forecast.promised_s
    # Infinite loads are left out, as JSON has no infinity; `room` has the same information.
    loads = {f"{name}_load": value for name, value in attempt.loads.items() if value < math.inf}
    return {**terms, **loads}
