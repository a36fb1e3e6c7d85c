"""Calibration factors converge to a constant error, keep their bounds, and ignore outliers."""

from __future__ import annotations

import math
import random
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiffin.conductor.cost import calibration
from tiffin.conductor.cost.calibration import (
    FACTOR_MAX,
    FACTOR_MIN,
    OBSERVATIONS_MIN,
    Calibration,
    CalibrationSettings,
)

SECONDS = st.floats(1e-6, 1e6)


def settle(one: Calibration, ratio: float, count: int = 100) -> float:
    """The instance repeatedly takes `ratio` times as long as its profile says; the last factor."""
    for _ in range(count):
        one.observe_ttft("a", one.factor("a") * 0.5, ratio * 0.5)
    return one.factor("a")


@pytest.mark.parametrize("ratio", [0.25, 0.5, 0.9, 1.0, 1.1, 2.0, 4.0])
def test_a_constant_error_is_found(ratio: float) -> None:
    assert settle(Calibration(), ratio) == pytest.approx(ratio)


@pytest.mark.parametrize(("ratio", "bound"), [(1e-3, FACTOR_MIN), (1e3, FACTOR_MAX)])
def test_a_factor_has_bounds(ratio: float, bound: float) -> None:
    assert settle(Calibration(), ratio, 500) == pytest.approx(bound)


@given(st.lists(st.tuples(SECONDS, SECONDS), max_size=60), st.floats(0.001, 0.1))
def test_one_observation_moves_it_by_a_step_at_most(
    observations: list[tuple[float, float]], step: float
) -> None:
    one = Calibration(CalibrationSettings(step=step))
    was = 1.0
    for predicted_s, observed_s in observations:
        now = one.observe_ttft("a", predicted_s, observed_s)
        assert now == pytest.approx(one.factor("a"))
        assert was / (1 + step) * (1 - 1e-9) <= now <= was * (1 + step) * (1 + 1e-9)
        assert FACTOR_MIN <= one.factor("a") <= FACTOR_MAX
        was = now


@given(st.lists(SECONDS, min_size=1, max_size=7), st.floats(0.3, 3.5))
def test_outliers_do_not_move_it(outliers: list[float], ratio: float) -> None:
    """Outliers of any size, if they are fewer than half of the window."""
    one = Calibration()
    settled = settle(one, ratio)
    for observed_s in outliers:
        one.observe_ttft("a", one.factor("a"), observed_s)
        assert one.factor("a") == pytest.approx(settled)


def test_a_lasting_change_is_followed() -> None:
    one = Calibration()
    settle(one, 1.0)
    assert settle(one, 2.0, 8 + 24) == pytest.approx(2.0)


def test_noise_settles_at_the_median() -> None:
    dice = random.Random(3)
    one = Calibration()
    found = []
    for _ in range(600):
        slow = 20.0 if dice.random() < 0.1 else 1.0  # a tenth is delayed
        observed_s = 0.5 * 1.6 * slow * dice.lognormvariate(0, 0.2)
        found.append(one.observe_ttft("a", 0.5 * one.factor("a"), observed_s))
    late = found[100:]
    assert sum(late) / len(late) == pytest.approx(1.6, rel=0.1)
    assert min(late) > 1.2
    assert max(late) < 2.3


@given(st.integers(0, 300), st.floats(0.3, 3.5))
def test_requests_in_flight_do_not_make_it_swing(in_flight: int, ratio: float) -> None:
    """If observations come long after their predictions, the factor converges to the true ratio and
    never overshoots. It would, if the factor that each prediction used were ignored."""
    one = Calibration()
    flying: deque[float] = deque()
    low, high = sorted((1.0, ratio))
    for _ in range(in_flight + 120):
        flying.append(one.factor("a"))
        if len(flying) > in_flight:
            used = flying.popleft()
            one.observe_ttft("a", 0.1 * used, 0.1 * ratio, used)
        assert low * (1 - 1e-9) <= one.factor("a") <= high * (1 + 1e-9)
    assert one.factor("a") == pytest.approx(ratio)


@pytest.mark.parametrize("wrong", [0.0, -1.0, math.nan, math.inf, -math.inf])
def test_observations_that_make_no_sense_are_ignored(wrong: float) -> None:
    one = Calibration()
    settled = settle(one, 1.5)
    for _ in range(20):
        assert one.observe_ttft("a", wrong, 1.0) == pytest.approx(settled)
        assert one.observe_ttft("a", 1.0, wrong) == pytest.approx(settled)
        assert one.observe_ttft("a", 1.0, 1.0, wrong) == pytest.approx(settled)
    assert one.ignored == 60
    one.observe_ttft("unseen", wrong, 1.0)
    assert "unseen" not in one.factors()


def test_an_instance_without_observations_takes_its_profiles_factor() -> None:
    one = Calibration()
    assert one.factor("instance", "profile") == 1.0
    for _ in range(100):
        one.observe_ttft("profile", one.factor("profile"), 2.0)
    assert one.factor("instance", "profile") == pytest.approx(2.0)
    for _ in range(OBSERVATIONS_MIN - 1):
        one.observe_ttft("instance", one.factor("instance"), 0.5)
    assert one.factor("instance", "profile") == pytest.approx(2.0)
    one.observe_ttft("instance", one.factor("instance"), 0.5)
    assert one.factor("instance", "profile") < 1.0


def test_prefill_and_decode_are_apart() -> None:
    one = Calibration()
    for _ in range(100):
        one.observe_ttft("a", one.factor("a"), 2.0)
        one.observe_tbt("a", 0.03 * one.tbt_factor("a"), 0.03 * 0.5)
    assert one.factors() == {"a": (pytest.approx(2.0), pytest.approx(0.5))}
    one.forget("a")
    assert one.factors() == {}
    assert one.factor("a") == one.tbt_factor("a") == 1.0


def test_it_can_be_switched_off_and_tuned() -> None:
    one = Calibration(CalibrationSettings(enabled=False))
    assert settle(one, 2.0) == 1.0
    one.configure(CalibrationSettings(step=0.1, window=3))
    assert settle(one, 2.0, 20) == pytest.approx(2.0)
    one.configure(CalibrationSettings(enabled=False))
    assert settle(one, 0.5) == pytest.approx(2.0), "what was found stays"


def test_keys_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "KEYS_MAX", 10)
    one = Calibration()
    for round_ in range(OBSERVATIONS_MIN):
        for at in range(30):
            one.observe_ttft(f"{round_}-{at}", 1.0, 1.0)
            one.observe_ttft("used", 1.0, 2.0)
    assert len(one.factors()) == 10
    assert one.factor("used") == pytest.approx(FACTOR_MAX), "the one that is used stays"
