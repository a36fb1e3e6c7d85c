"""The margin for errors of predictions, against something that answers it."""

from __future__ import annotations

import random

import pytest

from tiffin.conductor.admission.gaps import Gaps
from tiffin.conductor.admission.margin import MARGIN_MAX, Margins

LATE_SHARE = 0.05


def answer(tbt_s: float, count: int = 1000) -> Gaps:
    gaps = Gaps()
    gaps.add(1.5 * tbt_s, 1)
    gaps.add(tbt_s * (count - 1) / (1.0 + 0.5 / (0.1 * count)), count - 1)
    return gaps


def admit(it: Margins, error: float, at: float, *, refused: bool = True) -> bool:
    """A request at the limit of admission, whose time is its prediction times an error. Returns
    whether it is late: its objective is 0.1 s."""
    tbt_s = 0.1 / it.tbt.factor * error
    it.admitted(f"r{at}", 30.0, 0.1, at)
    if refused:
        it.refused("tbt", at + 0.5)
    it.ended(f"r{at}", answer(tbt_s))
    return tbt_s > 0.1


@pytest.mark.parametrize("sigma", [0.01, 0.1, 0.2])
@pytest.mark.parametrize("bias", [0.9, 1.0, 1.3])
def test_as_many_are_late_as_shall_be(sigma: float, bias: float) -> None:
    """Whatever the errors are like: with a prediction that is too low, the margin is wider."""
    it, dice = Margins(LATE_SHARE), random.Random(3)
    late = [admit(it, bias * dice.lognormvariate(0, sigma), float(at)) for at in range(4000)]
    expected = LATE_SHARE if bias >= 1.0 else 0.03  # never below 1: who could be in time is refused
    assert sum(late[1000:]) / 3000 == pytest.approx(expected, abs=0.03)


def test_an_idle_cluster_teaches_nothing_of_a_full_one() -> None:
    it = Margins(LATE_SHARE)
    before = it.tbt.factor
    for at in range(100):
        assert not admit(it, 0.2, float(at), refused=False)
    assert it.tbt.factor == before
    assert not admit(it, 0.2, 100.0)
    assert it.tbt.factor < before


def test_each_prediction_has_a_margin_of_its_own() -> None:
    it = Margins(LATE_SHARE)
    it.admitted("r", 1.0, 0.1, 0.0)
    it.first_token("r", 2.0)
    it.first_token("r", 3.0)  # said twice
    widened = it.ttft.factor
    assert widened > it.tbt.factor
    it.ended("r", None)  # it was given up: nothing is known of its pace
    it.ended("r", answer(9.9))
    assert it.ttft.factor == widened
    assert it.tbt.factor == Margins(LATE_SHARE).tbt.factor


def test_a_short_answer_teaches_nothing_of_steps() -> None:
    """Its longest tenth is the one gap before it joins a batch, of one and a half steps."""
    it = Margins(LATE_SHARE)
    it.admitted("short", 30.0, 0.1, 0.0)
    it.ended("short", answer(9.9, 12))
    assert it.tbt.factor == Margins(LATE_SHARE).tbt.factor


def test_it_stays_within_bounds() -> None:
    it = Margins(LATE_SHARE)
    for at in range(200):
        admit(it, 10.0, float(at))
    assert it.tbt.factor == MARGIN_MAX
    for at in range(10_000):
        admit(it, 0.01, 1000.0 + at)
    assert it.tbt.factor == 1.0
