"""How a profile's prefills are made up, from those of its instances."""

from __future__ import annotations

import random

import pytest

from tiffin.conductor.cost import latency_profiles
from tiffin.conductor.cost.latency_model import prefill_s
from tiffin.conductor.cost.prefill_shape import PrefillShape

KNOWN = latency_profiles.load("llama-3.1-70b.h100.tp8.vllm")
# An engine's own work is not in a profile of kernels.
C0, C1, C2 = KNOWN.prefill
REAL = (C0 + 0.03, C1, C2)

Instances = dict[str, float]


def seen(
    real: tuple[float, float, float],
    instances: Instances,
    *,
    tokens: tuple[int, int] = (500, 20_000),
    noise: float = 0.1,
    pauses: float = 0.0,
    count: int = 200,
    seed: int = 1,
) -> PrefillShape:
    """What is made of prompts at instances that take `real` times their factor, of which a share
    has a pause of some seconds."""
    dice, shape = random.Random(seed), PrefillShape(KNOWN.prefill, KNOWN.tokens_max)
    for _ in range(count):
        name, n = dice.choice(list(instances)), dice.randint(*tokens)
        p = int(n * dice.choice((0.0, 0.5, 0.9)))
        seconds = instances[name] * seconds_of(real, n, p) * dice.lognormvariate(0, noise)
        seconds += (dice.random() < pauses) * dice.uniform(2.0, 9.0)
        shape.observe(n, p, seconds / instances[name])
        shape.fit()
    return shape


def seconds_of(prefill: tuple[float, float, float], tokens: int, cached: int) -> float:
    return float(prefill_s(*prefill, tokens, cached))


def off(shape: PrefillShape, real: tuple[float, float, float], points: list[list[int]]) -> float:
    """The largest relative error, beside what all have in common."""
    ratios = [seconds_of(shape.coefficients, *at) / seconds_of(real, *at) for at in points]
    return max(ratios) / min(ratios) - 1


POINTS = [[600, 0], [2000, 1800], [2000, 0], [10_000, 9000], [10_000, 5000], [20_000, 0]]


@pytest.mark.parametrize("pauses", [0.0, 0.1])
def test_what_each_prefill_has_beside_its_tokens_is_learnt(pauses: float) -> None:
    """Otherwise one factor is too low for short ones and too high for long ones."""
    unknown = PrefillShape(KNOWN.prefill, KNOWN.tokens_max)
    assert off(unknown, REAL, POINTS) > 1.5
    assert off(seen(REAL, {"a": 1.0, "b": 1.3}, pauses=pauses), REAL, POINTS) < 0.1


def test_a_right_profile_stays_as_it_is() -> None:
    exact = seen(KNOWN.prefill, {"a": 1.4, "b": 0.7}, noise=0.0)
    assert exact.coefficients == pytest.approx(KNOWN.prefill)
    assert off(seen(KNOWN.prefill, {"a": 1.4, "b": 0.7}), KNOWN.prefill, POINTS) < 0.1


def test_what_is_slow_alike_is_the_factors_business() -> None:
    slow = (2.0 * C0, 2.0 * C1, 2.0 * C2)
    assert seen(slow, {"a": 1.0}, noise=0.0).coefficients == pytest.approx(KNOWN.prefill)


def test_lengths_that_nobody_asks_for_are_as_the_profile_says() -> None:
    """Noise of short prompts says nothing of pairs of tokens, which long ones consist of."""
    for seed in range(5):
        short = seen(KNOWN.prefill, {"a": 1.0}, tokens=(500, 1500), seed=seed)
        assert off(short, KNOWN.prefill, [[1000, 0], [30_000, 0], [120_000, 0]]) < 0.1


def test_one_length_tells_nothing() -> None:
    one = seen(KNOWN.prefill, {"a": 1.0}, tokens=(2000, 2000))
    assert off(one, KNOWN.prefill, POINTS) < 0.1


def test_few_prefills_tell_nothing() -> None:
    few = seen(REAL, {"a": 1.0}, count=7)
    assert few.coefficients == KNOWN.prefill
