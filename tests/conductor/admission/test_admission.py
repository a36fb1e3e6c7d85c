"""Admission: which requests are accepted, which are rejected, and when rejected ones may retry."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import combinations
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiffin.conductor.admission.admission import (
    AdmissionForecast,
    AdmissionSettings,
    Outlook,
    Step,
    Verdict,
    decide,
    decide_decode,
    expected_decode_s,
    retry_after_s,
)
from tiffin.conductor.errors import InvalidRequest
from tiffin.conductor.records import Objectives, Request

if TYPE_CHECKING:
    from collections.abc import Callable

    from tiffin.conductor.admission.admission import Mode

MODES: tuple[Mode, ...] = ("off", "baseline", "early", "predictive")
STEPS: tuple[Step, ...] = ("cap_output", "local_prefill", "relax")
GOOD = AdmissionForecast(ttft_s=1.0, tbt_now_s=0.05, tbt_then_s=0.05, queue_s=0.5)
SLOW = Objectives(ttft_s=2.0, tbt_s=0.1)


def outlook(
    forecast: AdmissionForecast = GOOD,
    objectives: Objectives = SLOW,
    priority: str = "normal",
    output_tokens_max: int | None = None,
) -> Outlook:
    request = Request("r", "m", 1000, (), objectives, priority, output_tokens_max=output_tokens_max)
    return Outlook(request, forecast)


def judge(it: Outlook, mode: Mode = "predictive", **settings: Any) -> Verdict:
    return decide(it, AdmissionSettings(mode=mode, **settings), random.Random(1))


# -- modes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("forecast", "taken_by"),
    [
        (GOOD, {"off", "baseline", "early", "predictive"}),
        (replace(GOOD, ttft_s=2.1), {"off"}),
        (replace(GOOD, tbt_now_s=0.11), {"off", "baseline", "predictive"}),
        (replace(GOOD, tbt_then_s=0.11), {"off", "baseline", "early"}),
        (replace(GOOD, room_now=False), {"off", "baseline", "predictive"}),
        (replace(GOOD, room_then=False), {"off", "baseline", "early"}),
    ],
)
def test_each_mode_has_its_own_idea_of_load(
    forecast: AdmissionForecast, taken_by: set[Mode]
) -> None:
    assert {mode for mode in MODES if judge(outlook(forecast), mode).admitted} == taken_by


def test_only_the_baseline_refuses_after_the_prefill() -> None:
    full = outlook(replace(GOOD, ttft_s=99.0, tbt_now_s=0.11))
    verdicts = {
        mode: decide_decode(full, AdmissionSettings(mode=mode), random.Random(1)) for mode in MODES
    }
    assert [mode for mode, verdict in verdicts.items() if not verdict.admitted] == ["baseline"]
    assert verdicts["baseline"].reason == "tbt"  # not the TTFT, which is over by then


def test_waiting_of_its_own_makes_nobody_else_late() -> None:
    """A step of 60 ms, and 30 ms more for each token until its KV has come."""
    forecast = replace(GOOD, tbt_then_s=0.09, waiting_s=0.03, promised_s=0.061)
    assert judge(outlook(forecast, Objectives())).admitted
    assert judge(outlook(forecast, Objectives(tbt_s=0.091))).admitted
    assert not judge(outlook(forecast, Objectives(tbt_s=0.089))).admitted
    assert not judge(outlook(replace(forecast, promised_s=0.059), Objectives())).admitted


def test_an_objective_that_is_just_met_is_met() -> None:
    assert judge(outlook(replace(GOOD, ttft_s=2.0, tbt_then_s=0.1))).load == 1.0
    assert judge(outlook(replace(GOOD, ttft_s=2.0, tbt_then_s=0.1))).admitted


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
@pytest.mark.parametrize("name", ["ttft_s", "tbt_s"])
def test_an_objective_that_is_none_is_said_so(name: str, value: float) -> None:
    with pytest.raises(InvalidRequest, match=f"objective {name} is .*: give seconds above 0"):
        judge(outlook(objectives=Objectives(**{name: value})), "off")


# -- classes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ttft_s", "taken"),
    [
        (1.5, {"high", "normal", "low", "unheard of"}),
        (1.7, {"high", "normal", "unheard of"}),
        (2.3, {"high"}),
        (2.5, set()),
    ],
)
def test_low_classes_go_first(ttft_s: float, taken: set[str]) -> None:
    forecast = replace(GOOD, ttft_s=ttft_s)
    classes = ("high", "normal", "low", "unheard of")
    assert {name for name in classes if judge(outlook(forecast, priority=name)).admitted} == taken


# -- degradation -----------------------------------------------------------------------------------


def by_steps(
    known: dict[tuple[Step, ...], AdmissionForecast],
) -> Callable[..., AdmissionForecast | None]:
    def again(steps: tuple[Step, ...]) -> AdmissionForecast | None:
        assert "relax" not in steps, "it changes no prediction"
        return known.get(steps)

    return again


def test_nothing_is_taken_from_a_request_that_is_in_time() -> None:
    def never(steps: tuple[Step, ...]) -> AdmissionForecast | None:
        raise AssertionError(steps)

    settings = AdmissionSettings(degrade=STEPS)
    verdict = decide(outlook(), settings, random.Random(1), again=never)
    assert (verdict.steps, verdict.degraded, verdict.output_tokens_max) == ((), (), None)


def test_the_one_step_that_suffices_is_taken_alone() -> None:
    late = outlook(replace(GOOD, ttft_s=2.5))
    helped = {
        ("cap_output",): late.forecast,
        ("local_prefill",): replace(GOOD, ttft_s=1.9),
        ("cap_output", "local_prefill"): replace(GOOD, ttft_s=1.8),
    }
    settings = AdmissionSettings(degrade=("cap_output", "local_prefill"))
    verdict = decide(late, settings, random.Random(1), again=by_steps(helped))
    assert verdict.admitted
    assert verdict.degraded == ("local_prefill",)
    assert verdict.forecast.ttft_s == 1.9
    assert verdict.output_tokens_max is None


def test_steps_are_taken_together_if_each_alone_is_too_little() -> None:
    late = outlook(replace(GOOD, ttft_s=5.0, tbt_then_s=0.3), output_tokens_max=1000)
    helped = {
        ("cap_output",): replace(GOOD, ttft_s=5.0, tbt_then_s=0.2),
        ("local_prefill",): replace(GOOD, ttft_s=3.0, tbt_then_s=0.3),
        ("cap_output", "local_prefill"): replace(GOOD, ttft_s=3.0, tbt_then_s=0.2),
    }
    settings = AdmissionSettings(degrade=STEPS, output_tokens_cap=64, relax_factor=2.0)
    verdict = decide(late, settings, random.Random(1), again=by_steps(helped))
    assert verdict.admitted
    assert verdict.degraded == ("cap_output:64", "local_prefill", "relax:2")
    assert verdict.output_tokens_max == 64
    assert verdict.objectives == Objectives(ttft_s=4.0, tbt_s=0.2)


def test_a_refusal_says_what_was_tried() -> None:
    verdict = judge(outlook(replace(GOOD, ttft_s=9.0, queue_s=8.5)), degrade=("relax",))
    assert verdict.message == (
        "predicted TTFT of 9 s exceeds the objective of 4.0 s, even with relax"
    )
    assert verdict.retry_after_s is not None


def test_an_answer_that_is_short_already_is_not_cut() -> None:
    late = outlook(replace(GOOD, ttft_s=2.5), output_tokens_max=10)
    settings = AdmissionSettings(degrade=("cap_output",))
    verdict = decide(late, settings, random.Random(1), again=lambda _: GOOD)
    assert not verdict.admitted


def test_room_can_be_made_by_a_shorter_answer_or_not_at_all() -> None:
    full = outlook(replace(GOOD, room_then=False))
    settings = AdmissionSettings(degrade=("cap_output",))
    cut = decide(full, settings, random.Random(1), again=by_steps({("cap_output",): GOOD}))
    assert cut.degraded == ("cap_output:256",)
    refused = decide(full, settings, random.Random(1))
    assert refused.reason == "kv_room"
    assert 1.0 <= (refused.retry_after_s or 0.0) <= 1.25, "it may be there in a moment"
    never = outlook(replace(GOOD, room_then=False, room_ever=False))
    assert decide(never, settings, random.Random(1)).retry_after_s is None
    assert all(map(math.isfinite, refused.terms.values())), "JSON has no infinity"


# -- when to come back -----------------------------------------------------------------------------


def test_a_queue_loses_a_second_per_second() -> None:
    verdict = judge(outlook(replace(GOOD, ttft_s=12.0, queue_s=11.0)), retry_jitter_share=0.0)
    assert verdict.reason == "ttft"
    assert verdict.retry_after_s == 10.0


def test_what_an_idle_instance_could_not_do_is_not_waited_for() -> None:
    verdict = judge(outlook(replace(GOOD, ttft_s=12.0, queue_s=1.0)))
    assert verdict.retry_after_s is None
    assert "an idle instance would not meet it either" in verdict.message


def test_tbt_is_waited_for_until_enough_will_have_left() -> None:
    asked = []

    def relief(tbt_s: float) -> float | None:
        asked.append(tbt_s)
        return 7.0

    settings = AdmissionSettings(retry_jitter_share=0.0)
    full = outlook(replace(GOOD, tbt_then_s=0.2), priority="low")
    assert decide(full, settings, random.Random(1), relief=relief).retry_after_s == 7.0
    assert asked == [pytest.approx(0.08)]
    assert decide(full, settings, random.Random(1), relief=lambda _: None).retry_after_s == 60.0


def test_they_do_not_all_come_back_at_once() -> None:
    dice, settings = random.Random(1), AdmissionSettings()
    times = [retry_after_s(8.0, settings, dice) for _ in range(100)]
    assert 8.0 <= min(times) < 8.5 < 9.5 < max(times) <= 10.0
    assert all(1.0 <= retry_after_s(0.0, settings, dice) <= 1.25 for _ in range(10))
    assert retry_after_s(1e9, settings, dice) <= 75.0


def test_a_rejection_says_everything() -> None:
    verdict = judge(outlook(replace(GOOD, ttft_s=2.5, tbt_now_s=0.06), priority="low"))
    rejection = verdict.rejection("r", 12.5)
    assert rejection.message == (
        "predicted TTFT of 2.5 s exceeds the objective of 2.0 s times 0.8, which is its class's "
        "part of it; an idle instance would not meet it either: send less, or give it longer"
    )
    assert (rejection.reason, rejection.overloaded, rejection.decided_at) == ("ttft", True, 12.5)
    assert (rejection.predicted_ttft_s, rejection.predicted_tbt_s) == (2.5, 0.05)
    assert rejection.terms == {
        "limit": 0.8,
        "ttft_s": 2.5,
        "queue_s": 0.5,
        "tbt_s": 0.05,
        "tbt_now_s": 0.06,
        "tbt_then_s": 0.05,
        "room": 1.0,
        "ttft_margin": 1.0,
        "tbt_margin": 1.0,
        "ttft_objective_s": 2.0,
        "tbt_objective_s": 0.1,
        "ttft_load": 1.25,
        "tbt_load": 0.5,
    }


# -- settings --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        {"mode": "sometimes"},
        {"degrade": ["relax", "relax"]},
        {"degrade": ["pray"]},
        {"class_scales": {"high": 0.0}},
        {"relax_factor": 0.5},
        {"retry_after_s_max": 0.5},
        {"unheard_of": 1},
    ],
)
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(wrong, AdmissionSettings)


def test_settings_survive_json() -> None:
    settings = AdmissionSettings(mode="early", degrade=("relax",), class_scales={"vip": 3.0})
    assert msgspec.json.decode(msgspec.json.encode(settings), type=AdmissionSettings) == settings


def test_how_long_a_request_decodes() -> None:
    known, uniform = AdmissionSettings(), AdmissionSettings(use_lengths=False, decode_s=9.0)
    assert expected_decode_s(known, 101, 0.05) == pytest.approx(5.0)
    assert expected_decode_s(known, 1, 0.05) == 0.0
    assert expected_decode_s(known, None, 0.05) == 13.0
    assert expected_decode_s(uniform, 101, 0.05) == 9.0


# -- properties ------------------------------------------------------------------------------------

TTFT = st.floats(0.01, 20.0)
TBT = st.floats(0.001, 1.0)
OBJECTIVES = st.builds(
    Objectives, st.none() | st.floats(0.1, 10.0), st.none() | st.floats(0.01, 0.5)
)
FORECASTS = st.builds(
    AdmissionForecast, TTFT, TBT, TBT, st.just(0.0), st.sampled_from([True] * 4 + [False])
)
PAIRS = [steps for count in (1, 2) for steps in combinations(STEPS[:2], count)]
HELP = st.fixed_dictionaries({steps: st.none() | FORECASTS for steps in PAIRS})
DEGRADE = st.lists(st.sampled_from(STEPS), unique=True).map(tuple)
SETTINGS = st.builds(
    AdmissionSettings,
    mode=st.sampled_from(MODES),
    class_scales=st.fixed_dictionaries({"low": st.floats(0.1, 1.0), "high": st.floats(1.0, 10.0)}),
    degrade=DEGRADE,
    relax_factor=st.floats(1.0, 5.0),
)


def help_of(
    known: dict[tuple[Step, ...], AdmissionForecast | None],
) -> Callable[..., AdmissionForecast | None]:
    return lambda steps: known[tuple(step for step in STEPS if step in steps)]


def exceeds(forecast: AdmissionForecast, objectives: Objectives, mode: Mode, scale: float) -> bool:
    """The rule as a plain expression."""
    early, predictive = mode == "early", mode == "predictive"
    if mode != "baseline" and not (forecast.room_now if early else forecast.room_then):
        return True
    ttft_s = forecast.ttft_s * (forecast.ttft_margin if predictive else 1.0)
    if objectives.ttft_s is not None and ttft_s / objectives.ttft_s > scale:
        return True
    tbt_s = forecast.tbt_now_s if early else forecast.tbt_then_s
    tbt_s *= forecast.tbt_margin if predictive else 1.0
    if mode == "baseline":
        return False
    return objectives.tbt_s is not None and tbt_s / objectives.tbt_s > scale


@given(FORECASTS, SETTINGS, HELP, st.sampled_from(["low", "normal", "high"]))
def test_without_an_objective_nothing_but_room_refuses(
    forecast: AdmissionForecast, settings: AdmissionSettings, known: dict[Any, Any], priority: str
) -> None:
    it = outlook(replace(forecast, room_now=True, room_then=True), Objectives(), priority)
    for verdict in (
        decide(it, settings, random.Random(1), again=help_of(known)),
        decide_decode(it, settings, random.Random(1)),
    ):
        assert verdict.admitted
        assert verdict.degraded == ()


@given(FORECASTS, OBJECTIVES, SETTINGS, HELP, st.sampled_from(["low", "normal", "high"]))
def test_it_refuses_just_what_no_allowed_step_brings_within_the_objectives(
    forecast: AdmissionForecast,
    objectives: Objectives,
    settings: AdmissionSettings,
    known: dict[Any, Any],
    priority: str,
) -> None:
    it = outlook(forecast, objectives, priority)
    verdict = decide(it, settings, random.Random(1), again=help_of(known))
    factor, scale = settings.relax_factor, settings.scale(priority)
    relaxed = Objectives(
        ttft_s=objectives.ttft_s and objectives.ttft_s * factor,
        tbt_s=objectives.tbt_s and objectives.tbt_s * factor,
    )
    helped = False
    for count in range(len(settings.degrade) + 1):
        for steps in combinations(settings.degrade, count):
            asked = tuple(step for step in STEPS[:2] if step in steps)
            predicted = known[asked] if asked else forecast
            goal = relaxed if "relax" in steps else objectives
            if predicted is not None and not exceeds(predicted, goal, settings.mode, scale):
                helped = True
    assert verdict.admitted == (settings.mode == "off" or helped)
    if not verdict.admitted:
        assert verdict.load > verdict.limit
        assert exceeds(forecast, objectives, settings.mode, scale)
    elif settings.mode != "off":
        assert not exceeds(verdict.forecast, verdict.objectives, settings.mode, scale)


@given(FORECASTS, OBJECTIVES, SETTINGS, HELP)
def test_a_lower_class_is_never_taken_where_a_higher_one_is_not(
    forecast: AdmissionForecast,
    objectives: Objectives,
    settings: AdmissionSettings,
    known: dict[Any, Any],
) -> None:
    verdicts = [
        decide(
            outlook(forecast, objectives, priority),
            settings,
            random.Random(1),
            again=help_of(known),
        )
        for priority in ("low", "normal", "high")
    ]
    admitted = [verdict.admitted for verdict in verdicts]
    assert admitted == sorted(admitted)
    taken = [len(verdict.steps) for verdict in verdicts if verdict.admitted]
    assert taken == sorted(taken, reverse=True), "nor is more taken from the higher one"
