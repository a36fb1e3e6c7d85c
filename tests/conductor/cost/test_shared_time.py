"""Two factors from intervals with both kinds of work."""

from __future__ import annotations

import random

import pytest

from tiffin.conductor.cost.shared_time import SharedTime


def found(
    a: float, b: float, mixtures: list[float], noise: float = 0.0, seed: int = 1
) -> tuple[float, float]:
    """What an instance is found to be that takes `a` and `b` times as long: `mixtures` are shares
    of an interval's prefill seconds in all of its seconds by the profile."""
    dice, one, believed = random.Random(seed), SharedTime(), (1.0, 1.0)
    for share in mixtures:
        seconds = a * share * dice.lognormvariate(0, noise) + b * (1 - share)
        believed = one.observe(share / seconds, (1 - share) / seconds, believed)
    return believed


@pytest.mark.parametrize(("a", "b"), [(1.0, 1.0), (1.4, 1.4), (1.4, 1.0), (1.0, 1.4), (0.5, 2.0)])
def test_different_mixtures_tell_both(a: float, b: float) -> None:
    dice = random.Random(2)
    mixtures = [dice.uniform(0.1, 0.7) for _ in range(60)]
    assert found(a, b, mixtures) == (pytest.approx(a, rel=0.01), pytest.approx(b, rel=0.01))
    prefill, decode = found(a, b, mixtures, noise=0.1)
    assert prefill == pytest.approx(a, rel=0.1)
    assert decode == pytest.approx(b, rel=0.1)


def test_one_mixture_tells_their_sum_and_no_more() -> None:
    """It explains the seconds, and changes no more than it has to."""
    a, b = found(1.4, 1.0, [0.5] * 200)
    assert a + b == pytest.approx(2.4, rel=1e-3)
    assert a == pytest.approx(b)


def test_a_change_is_followed() -> None:
    dice, one, believed = random.Random(3), SharedTime(), (1.0, 1.0)
    for number in range(200):
        share, a = dice.uniform(0.1, 0.7), 1.0 if number < 100 else 1.4
        seconds = a * share + 1.0 - share
        believed = one.observe(share / seconds, (1 - share) / seconds, believed)
        if number == 99:
            assert believed == (pytest.approx(1.0), pytest.approx(1.0))
    assert believed == (pytest.approx(1.4, rel=0.01), pytest.approx(1.0, rel=0.01))
