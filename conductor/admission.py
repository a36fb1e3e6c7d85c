"""Whether a request is taken, from what was predicted for it: early rejection. Pure.

A request that will miss its objectives helps nobody, and each second that is computed for it is
taken from others. So it is judged when it arrives, before anything was spent on it, by the load

    load = max(predicted TTFT / TTFT objective, predicted TBT / TBT objective)

It is taken if that is at most what its class may have, 1 for an ordinary class. Which prediction of
TBT, the `mode` says ("Mooncake", arXiv 2407.00079, section 7):

- "off": everything is taken.
- "baseline": TTFT only; TBT is checked when the prefill is done (`decide_decode`), as systems do
  whose decode instances guard themselves. What fails there has been prefilled for nothing.
- "early": TBT if it began to decode now. Nothing is wasted, but what is now is not what will be
  after the prefill, and the two pools swing against each other: decode is idle, all are let in;
  they arrive together, decode is full, nobody is let in; prefill is idle, and so on.
- "predictive": TBT at the time when it will begin to decode (`horizon.py`).

A request without an objective is never refused for it. Low classes go first as they may fill less
of an objective. Before anything is refused, what the settings allow to be taken away from the
request is tried, as few such steps as suffice.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import combinations
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from msgspec import Meta

from .errors import InvalidRequest
from .records import TOKENS_MAX, Objectives, Rejection

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator

    from .records import Request

    # What would be predicted with these steps taken; None if they can not be.
    Again = Callable[[tuple["Step", ...]], "Forecast | None"]
    # In how many seconds the TBT will be at most this; None if that is not to be seen.
    Relief = Callable[[float], float | None]

Mode = Literal["off", "baseline", "early", "predictive"]
Step = Literal["cap_output", "local_prefill", "relax"]
Name = Annotated[str, Meta(min_length=1, max_length=64)]
Scale = Annotated[float, Meta(ge=0.1, le=10.0)]
Seconds = Annotated[float, Meta(ge=0.0, le=86_400.0)]

# As many as there may be classes of priority, and some that are no more.
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

    degrade: Annotated[tuple[Step, ...], Meta(max_length=3)] = ()
    """What is tried before a request is refused, the least harmful first: "cap_output" (its answer
    is cut at `output_tokens_cap`), "local_prefill" (no transfer: its decode instance computes it),
    "relax" (its objectives are `relax_factor` times as long). None unless chosen: a caller who was
    not told gets another answer than it asked for. The fewest steps that suffice are taken."""

    output_tokens_cap: Annotated[int, Meta(ge=1, le=TOKENS_MAX)] = 256
    """Of "cap_output". The mean answer of published traces has 182 to 343 tokens."""

    relax_factor: Annotated[float, Meta(ge=1.0, le=100.0)] = 2.0
    """Of "relax"."""

    use_lengths: bool = True
    """Whether "predictive" takes each request's own predicted length, or `decode_s` for all."""

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
        if len(set(self.degrade)) < len(self.degrade):
            raise ValueError("degrade: give each step once")
        if self.retry_after_s_max < self.retry_after_s_min:
            raise ValueError("retry_after_s_max: at least retry_after_s_min")

    def scale(self, priority: str) -> float:
        """The load up to which a class is taken."""
        return self.class_scales.get(priority, 1.0)


@dataclass(frozen=True, slots=True)
class Forecast:
    """What is predicted for a request on the instances that were chosen for it.

    `queue_s` is the part of `ttft_s` that it waits for others, which is what waiting helps against.
    `tbt_now_s` would be its time between tokens if it began to decode now, `tbt_then_s` is that
    when its prefill will be done, both with this request in the batch. `room`: whether its context
    and answer will fit; `room_ever`: whether they would on an instance without any other request.
    """

    ttft_s: float
    tbt_now_s: float
    tbt_then_s: float
    queue_s: float = 0.0
    room: bool = True
    room_ever: bool = True


@dataclass(frozen=True, slots=True)
class Outlook:
    """A request, and what is predicted for it as it is."""

    request: Request
    forecast: Forecast


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a request is taken, why, and what was taken from it.

    `load` of at most `limit` is taken; it is that of `forecast` against `objectives`, which are
    those in force after the `steps`. If it is refused, they are those of the attempt that came
    nearest, and `reason` ("ttft", "tbt" or "kv_room") is what stood against even that.
    `degraded` puts the steps into words for the caller. `retry_after_s`: None if no waiting helps.
    """

    admitted: bool
    load: float
    limit: float
    forecast: Forecast
    objectives: Objectives
    steps: tuple[Step, ...] = ()
    degraded: tuple[str, ...] = ()
    output_tokens_max: int | None = None
    reason: str = ""
    message: str = ""
    retry_after_s: float | None = None
    terms: dict[str, float] = field(default_factory=dict)

    def rejection(self, request_id: str, now: float) -> Rejection:
        """The answer to the caller, of one that is not admitted."""
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
    """Judge a request when it arrives.

    `again` is asked, only if the request would be refused, what would be predicted with some steps
    taken ("relax" is never among them: it changes no prediction). `relief` is asked for Retry-After
    (`horizon.relief_s`). Raises InvalidRequest for an objective that is not above 0.
    """
    objectives = outlook.request.objectives
    _check(objectives)
    limit = settings.scale(outlook.request.priority)
    first = _attempt(outlook.forecast, objectives, settings.mode, ())
    if settings.mode == "off" or first.load <= limit:
        return _admit(first, limit, outlook.request, settings)
    nearest = first
    for attempt in _degraded(outlook, settings, again):
        if attempt.load <= limit:
            return _admit(attempt, limit, outlook.request, settings)
        nearest = min(nearest, attempt, key=lambda one: one.load)
    return _refuse(nearest, limit, settings, dice, relief)


def decide_decode(
    outlook: Outlook,
    settings: AdmissionSettings,
    dice: random.Random,
    *,
    relief: Relief | None = None,
) -> Verdict:
    """Judge a request again when its prefill is done. Only "baseline" refuses here: every other
    mode has decided. Raises InvalidRequest for an objective that is not above 0."""
    objectives = Objectives(tbt_s=outlook.request.objectives.tbt_s)
    _check(objectives)
    limit = settings.scale(outlook.request.priority)
    attempt = _attempt(outlook.forecast, objectives, "early", ())
    if settings.mode != "baseline" or attempt.load <= limit:
        return _admit(attempt, limit, outlook.request, settings)
    return _refuse(attempt, limit, settings, dice, relief)


def expected_decode_s(
    settings: AdmissionSettings, output_tokens: int | None, tbt_s: float
) -> float:
    """How long a request is going to decode: its answer's length, if that is known and the settings
    want it, at the predicted time between tokens."""
    if output_tokens is None or not settings.use_lengths:
        return settings.decode_s
    return max(output_tokens - 1, 0) * tbt_s  # the first token is prefill's


def retry_after_s(wait_s: float, settings: AdmissionSettings, dice: random.Random) -> float:
    """When to come back, if what is lacking should be there in `wait_s`."""
    bounded = min(max(wait_s, settings.retry_after_s_min), settings.retry_after_s_max)
    return bounded * (1.0 + settings.retry_jitter_share * dice.random())


# -- one attempt -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Attempt:
    """A forecast against objectives, with some steps taken. `loads` by reason."""

    forecast: Forecast
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


def _attempt(
    forecast: Forecast, objectives: Objectives, mode: Mode, steps: tuple[Step, ...]
) -> _Attempt:
    loads: dict[str, float] = {}
    attempt = _Attempt(forecast, objectives, mode, steps, loads)
    if not forecast.room and mode in ("early", "predictive"):
        loads["kv_room"] = math.inf
    if objectives.ttft_s is not None:
        loads["ttft"] = forecast.ttft_s / objectives.ttft_s
    if objectives.tbt_s is not None and mode != "baseline":
        loads["tbt"] = attempt.tbt_s / objectives.tbt_s
    return attempt


def _degraded(
    outlook: Outlook, settings: AdmissionSettings, again: Again | None
) -> Iterator[_Attempt]:
    """Attempts with one step, then with two, then with all, in the order of the settings."""
    forecasts: dict[tuple[Step, ...], Forecast | None] = {(): outlook.forecast}
    able = [step for step in settings.degrade if _able(step, outlook.request, settings)]
    for count in range(1, len(able) + 1):
        for steps in combinations(able, count):
            asked = tuple(step for step in steps if step != "relax")
            if asked not in forecasts:
                forecasts[asked] = again(asked) if again is not None else None
            forecast = forecasts[asked]
            if forecast is None:
                continue
            objectives = outlook.request.objectives
            if "relax" in steps:
                objectives = _relaxed(objectives, settings.relax_factor)
            yield _attempt(forecast, objectives, settings.mode, steps)


def _able(step: Step, request: Request, settings: AdmissionSettings) -> bool:
    if step == "cap_output":
        already = request.output_tokens_max
        return already is None or already > settings.output_tokens_cap
    return step != "relax" or request.objectives != Objectives()


def _relaxed(objectives: Objectives, factor: float) -> Objectives:
    ttft_s, tbt_s = objectives.ttft_s, objectives.tbt_s
    return Objectives(
        ttft_s=None if ttft_s is None else ttft_s * factor,
        tbt_s=None if tbt_s is None else tbt_s * factor,
    )


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
        degraded=tuple(_words(step, settings) for step in attempt.steps),
        output_tokens_max=settings.output_tokens_cap if capped else request.output_tokens_max,
        terms=_terms(attempt, limit),
    )


def _refuse(
    attempt: _Attempt,
    limit: float,
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
        degraded=tuple(_words(step, settings) for step in attempt.steps),
        reason=reason,
        message=_message(attempt, limit, reason, wait_s),
        retry_after_s=None if wait_s is None else retry_after_s(wait_s, settings, dice),
        terms=_terms(attempt, limit),
    )


def _wait_s(
    attempt: _Attempt, limit: float, settings: AdmissionSettings, relief: Relief | None
) -> float | None:
    """In how many seconds the same request would be taken, if nobody else came; None: never.

    A queue loses a second per second. What TTFT has beyond the queue is the request's own work,
    which does not become less by waiting.
    """
    forecast, objectives = attempt.forecast, attempt.objectives
    waits = [0.0]
    if not forecast.room_ever and "kv_room" in attempt.loads:
        return None
    if attempt.loads.get("ttft", 0.0) > limit and objectives.ttft_s is not None:
        late_s = forecast.ttft_s - limit * objectives.ttft_s
        if late_s > forecast.queue_s:
            return None
        waits.append(late_s)
    if attempt.loads.get("tbt", 0.0) > limit and objectives.tbt_s is not None:
        seen_s = relief(limit * objectives.tbt_s) if relief is not None else None
        waits.append(settings.retry_after_s_max if seen_s is None else seen_s)
    return max(waits)


def _message(attempt: _Attempt, limit: float, reason: str, wait_s: float | None) -> str:
    forecast, objectives = attempt.forecast, attempt.objectives
    if reason == "kv_room":
        text = "no decode instance has KV room for its context and answer"
    elif reason == "ttft":
        text = _exceeds("TTFT", forecast.ttft_s, objectives.ttft_s, limit)
    else:
        text = _exceeds("TBT", attempt.tbt_s, objectives.tbt_s, limit)
    if attempt.steps:
        text += f", even with {', '.join(attempt.steps)}"
    if wait_s is None:
        text += "; an idle instance would not meet it either: send less, or give it longer"
    return text


def _exceeds(what: str, predicted_s: float, objective_s: float | None, limit: float) -> str:
    text = f"predicted {what} of {predicted_s:.3g} s exceeds the objective of {objective_s} s"
    return text if limit == 1.0 else f"{text} times {limit:g}, which is its class's part of it"


def _words(step: Step, settings: AdmissionSettings) -> str:
    if step == "cap_output":
        return f"cap_output:{settings.output_tokens_cap}"
    return step if step == "local_prefill" else f"relax:{settings.relax_factor:g}"


def _terms(attempt: _Attempt, limit: float) -> dict[str, float]:
    """Every number that the verdict was made from, in seconds, but for loads and their limit."""
    forecast, objectives = attempt.forecast, attempt.objectives
    terms = {
        "limit": limit,
        "ttft_s": forecast.ttft_s,
        "queue_s": forecast.queue_s,
        "tbt_s": attempt.tbt_s,
        "tbt_now_s": forecast.tbt_now_s,
        "tbt_then_s": forecast.tbt_then_s,
        "room": float(forecast.room),
    }
    if objectives.ttft_s is not None:
        terms["ttft_objective_s"] = objectives.ttft_s
    if objectives.tbt_s is not None:
        terms["tbt_objective_s"] = objectives.tbt_s
    # No infinity: JSON has none. The room says it.
    loads = {f"{name}_load": value for name, value in attempt.loads.items() if value < math.inf}
    return {**terms, **loads}
