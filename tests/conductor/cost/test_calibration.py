"""Factors converge to a constant error, keep their bounds, ignore outliers, and forget."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiffin.conductor.cost.calibration import (
    AGREEING_MIN,
    FACTOR_MAX,
    FACTOR_MIN,
    OBSERVATIONS_MIN,
    Calibration,
    CalibrationSettings,
    Factors,
)

SECONDS = st.floats(1e-6, 1e6)


def factors(**settings: float) -> Factors:
    return Factors(CalibrationSettings(**settings))  # type: ignore[arg-type]


def settle(
    one: Factors, ratio: float, count: int = 100, name: str = "a", now: float = 0.0
) -> float:
    """The instance repeatedly takes `ratio` times as long as its profile says; the last factor."""
    for _ in range(count):
        one.observe(name, "profile", 0.5, ratio * 0.5, now)
    return one.factor(name, "profile", now)


@pytest.mark.parametrize("ratio", [0.25, 0.5, 0.9, 1.0, 1.1, 2.0, 4.0])
def test_a_constant_error_is_found(ratio: float) -> None:
    assert settle(factors(), ratio) == pytest.approx(ratio)


@pytest.mark.parametrize(("ratio", "bound"), [(1e-3, FACTOR_MIN), (1e3, FACTOR_MAX)])
def test_a_factor_has_bounds(ratio: float, bound: float) -> None:
    assert settle(factors(), ratio, 500) == pytest.approx(bound)


@given(st.lists(st.tuples(SECONDS, SECONDS), max_size=60), st.floats(0.001, 0.1))
def test_one_observation_moves_it_by_a_step_at_most(
    observations: list[tuple[float, float]], step: float
) -> None:
    one = factors(step=step)
    was = 1.0
    for profile_s, observed_s in observations:
        now = one.observe("a", "profile", profile_s, observed_s, 0.0)
        assert now == pytest.approx(one.factor("a", "profile", 0.0))
        assert was / (1 + step) * (1 - 1e-9) <= now <= was * (1 + step) * (1 + 1e-9)
        assert FACTOR_MIN * (1 - 1e-9) <= now <= FACTOR_MAX * (1 + 1e-9)
        was = now


@given(st.lists(SECONDS, min_size=1, max_size=25), st.floats(0.3, 3.5))
def test_outliers_do_not_move_it(outliers: list[float], ratio: float) -> None:
    """Outliers of any size, if they are fewer than half of the window."""
    one = factors()
    settled = settle(one, ratio)
    for observed_s in outliers:
        one.observe("a", "profile", 1.0, observed_s, 0.0)
        assert one.factor("a", "profile", 0.0) == pytest.approx(settled)


def test_it_knows_how_far_it_may_be_off() -> None:
    """Of many factors of noisy times, two thirds are within a standard error of the truth."""
    dice, within, errors = random.Random(1), 0, []
    for _ in range(100):
        one = factors()
        assert one.error("a") == 0.0
        for _ in range(100):
            one.observe("a", "profile", 1.0, 1.2 * dice.lognormvariate(0.0, 0.1), 0.0)
        errors.append(one.error("a"))
        within += abs(math.log(one.factor("a", "profile", 0.0) / 1.2)) < one.error("a")
    assert sum(errors) / 100 == pytest.approx(0.0175, rel=0.1)
    assert 50 < within < 85


def test_a_lasting_change_is_followed() -> None:
    one = factors()
    settle(one, 1.0)
    assert settle(one, 2.0, 26 + 24) == pytest.approx(2.0)


def test_noise_settles_at_the_median() -> None:
    """A tenth of the observations is delayed, and all vary by 10%."""
    dice = random.Random(3)
    one = factors()
    found = []
    for _ in range(2000):
        slow = 20.0 if dice.random() < 0.1 else 1.0
        observed_s = 1.6 * slow * dice.lognormvariate(0, 0.1)
        found.append(one.observe("a", "profile", 1.0, observed_s, 0.0))
    late = sorted(found[200:])
    assert late[len(late) // 2] == pytest.approx(1.6, rel=0.03)
    near = [factor for factor in late if abs(factor / 1.6 - 1) < 0.05]
    assert len(near) > 0.9 * len(late)


@pytest.mark.parametrize("wrong", [0.0, -1.0, math.nan, math.inf, -math.inf])
def test_observations_that_make_no_sense_are_ignored(wrong: float) -> None:
    one = factors()
    settled = settle(one, 1.5)
    for _ in range(20):
        assert one.observe("a", "profile", wrong, 1.0, 0.0) == pytest.approx(settled)
        assert one.observe("a", "profile", 1.0, wrong, 0.0) == pytest.approx(settled)
    assert one.ignored == 40
    one.observe("unseen", "profile", wrong, 1.0, 0.0)
    assert not one.observations("unseen")


class TestForgetting:
    def test_who_is_not_observed_is_tried_again(self) -> None:
        """Its factor returns to 1, half of the way in each half-life."""
        one = factors(half_life_s=100.0)
        assert settle(one, 4.0) == pytest.approx(4.0)
        assert one.factor("a", "profile", 100.0) == pytest.approx(2.0)
        assert one.factor("a", "profile", 200.0) == pytest.approx(math.sqrt(2.0))
        assert one.factor("a", "profile", 2000.0) == pytest.approx(1.0, abs=1e-4)

    def test_it_goes_on_from_there(self) -> None:
        """What was observed long ago does not outvote what is observed now."""
        one = factors(half_life_s=100.0)
        settle(one, 4.0)
        now = 1000.0
        for _ in range(OBSERVATIONS_MIN):
            one.observe("a", "profile", 1.0, 1.0, now)
        assert one.factor("a", "profile", now) == pytest.approx(1.0, abs=0.01)

    @pytest.mark.parametrize("apart_s", [1.0, 50.0, 99.0])
    def test_rare_observations_are_enough(self, apart_s: float) -> None:
        """Each restores what the factor has lost since the one before."""
        one = factors(half_life_s=100.0)
        for number in range(30):
            one.observe("a", "profile", 1.0, 1.4, apart_s * number)
        assert one.factor("a", "profile", 29 * apart_s) == pytest.approx(1.4, rel=0.01)

    def test_an_instance_that_was_repaired_is_not_taken_for_slow_again(self) -> None:
        """An observation that does not confirm the factor restores nothing."""
        one = factors(half_life_s=100.0)
        settle(one, 4.0)
        before = one.factor("a", "profile", 150.0)
        for number in range(20):
            factor = one.observe("a", "profile", 1.0, 1.0, 150.0 + number)
            assert factor <= before
            before = factor
        assert factor == pytest.approx(1.0)


class TestNewInstances:
    def learnt(self, *ratios: float) -> Factors:
        one = factors()
        for number, ratio in enumerate(ratios):
            settle(one, ratio, name=f"i{number}")
        return one

    def test_what_one_has_learnt_is_its_own(self) -> None:
        assert self.learnt(2.0).factor("new", "profile", 2.0) == 1.0

    def test_what_all_have_in_common_is_the_profiles(self) -> None:
        one = self.learnt(*[1.4] * AGREEING_MIN)
        assert one.factor("new", "profile", 2.0) == pytest.approx(1.4)
        assert one.factor("new", "another", 2.0) == 1.0

    def test_one_that_differs_does_not_count(self) -> None:
        assert self.learnt(*[1.4] * 8, 3.0).factor("new", "profile", 2.0) == pytest.approx(1.4)

    def test_nothing_if_they_disagree(self) -> None:
        assert self.learnt(1.0, 1.2, 1.4, 1.6).factor("new", "profile", 2.0) == 1.0

    def test_nothing_of_the_past(self) -> None:
        assert self.learnt(*[1.4] * AGREEING_MIN).factor("new", "profile", 1000.0) == 1.0

    def test_another_profile_starts_anew(self) -> None:
        one = self.learnt(2.0)
        assert one.factor("i0", "another", 0.0) == 1.0
        assert one.observe("i0", "another", 1.0, 2.0, 0.0) == 1.0, "one observation is not enough"


def test_prefill_and_decode_are_apart() -> None:
    one = Calibration()
    assert settle(one.prefill, 2.0) == pytest.approx(2.0)
    assert settle(one.decode, 0.5) == pytest.approx(0.5)
    assert one.prefill.factor("a", "profile", 0.0) == pytest.approx(2.0)
    one.forget("a")
    assert one.prefill.factor("a", "profile", 0.0) == one.decode.factor("a", "profile", 0.0) == 1.0


def test_it_can_be_switched_off_and_tuned() -> None:
    one = Calibration(CalibrationSettings(enabled=False))
    assert settle(one.prefill, 2.0) == 1.0
    one.configure(CalibrationSettings(step=0.1, window=3))
    assert settle(one.prefill, 2.0, 20) == pytest.approx(2.0)
    one.configure(CalibrationSettings(enabled=False))
    assert settle(one.prefill, 0.5) == pytest.approx(2.0), "what was found stays"
