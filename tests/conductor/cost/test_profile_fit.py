"""A fit finds the coefficients of generated points, or its error says what is missing."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiffin.conductor.cost import latency_profiles
from tiffin.conductor.cost.latency_model import decode_step_s, prefill_s
from tiffin.conductor.cost.profile_fit import fit_decode, fit_prefill
from tiffin.conductor.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Callable

LENGTHS = (512, 2048, 8192, 32768, 131072)
PREFILLS = [(n, int(n * share)) for n in LENGTHS for share in (0.0, 0.5, 0.95)]
BATCHES = [(batch, batch * each) for batch in (1, 8, 64) for each in (512, 4096, 16384)]


@given(st.floats(1e-4, 1.0), st.floats(1e-6, 1e-3), st.floats(1e-11, 1e-7))
def test_prefill_finds_what_made_the_points(c0: float, c1: float, c2: float) -> None:
    points = [(n, p, float(prefill_s(c0, c1, c2, n, p))) for n, p in PREFILLS]
    found = fit_prefill(points)
    for n, p, seconds in points:
        assert prefill_s(*found, n, p) == pytest.approx(seconds, rel=1e-6)


@given(st.floats(1e-3, 0.1), st.floats(1e-6, 1e-3), st.floats(1e-9, 1e-6))
def test_decode_finds_what_made_the_points(d0: float, d1: float, d2: float) -> None:
    points = [(b, c, float(decode_step_s(d0, d1, d2, b, c))) for b, c in BATCHES]
    found = fit_decode(points)
    for batch, context, seconds in points:
        assert decode_step_s(*found, batch, context) == pytest.approx(seconds, rel=1e-6)


@given(st.lists(st.floats(1e-3, 100.0), min_size=len(PREFILLS), max_size=len(PREFILLS)))
def test_no_coefficient_is_negative_whatever_was_measured(seconds: list[float]) -> None:
    points = [(n, p, s) for (n, p), s in zip(PREFILLS, seconds, strict=True)]
    found = fit_prefill(points)
    assert all(value >= 0 and math.isfinite(value) for value in found)


@given(
    st.lists(st.floats(1.0, 1.9), min_size=len(BATCHES), max_size=len(BATCHES)),  # no outliers
    st.tuples(st.floats(0.02, 5), st.floats(0, 0.1), st.floats(0, 1e-4)),
)
def test_no_other_coefficients_are_closer(
    seconds: list[float], other: tuple[float, float, float]
) -> None:
    points = [(b, c, s) for (b, c), s in zip(BATCHES, seconds, strict=True)]

    def error(d: tuple[float, float, float]) -> float:
        return sum((float(decode_step_s(*d, b, c)) / s - 1) ** 2 for b, c, s in points)

    assert error(fit_decode(points)) <= error(other) * (1 + 1e-9) + 1e-12


@given(
    st.lists(st.floats(1e-3, 30.0), min_size=len(PREFILLS), max_size=len(PREFILLS)),
    st.lists(st.floats(1e-3, 10.0), min_size=len(BATCHES), max_size=len(BATCHES)),
)
def test_a_fit_is_a_profile_whatever_was_measured(
    prefill_s: list[float], decode_s: list[float]
) -> None:
    """Noise may make the best coefficients zero, also those that a profile needs."""
    prefill = [(n, p, s) for (n, p), s in zip(PREFILLS, prefill_s, strict=True)]
    decode = [(b, c, s) for (b, c), s in zip(BATCHES, decode_s, strict=True)]
    made = latency_profiles.fit("mine", prefill, decode)
    assert made.prefill[1] > 0
    assert made.decode[0] > 0
    assert latency_profiles.from_json(made.to_json()) == made
    for fitted, points in ((made.prefill_fit, prefill), (made.decode_fit, decode)):
        assert fitted is not None
        assert fitted.points + fitted.left_out == len(points)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("factor", [1 / 8, 5.0, 40.0])
def test_a_few_pauses_change_nothing(seed: int, factor: float) -> None:
    """Of 75 points with 5% of noise every tenth is far off: the fit is that of the others."""
    dice = np.random.default_rng(seed)
    truth = (0.02, 1e-4, 1e-9)
    points = [
        (n, p, float(prefill_s(*truth, n, p)) * dice.lognormal(0, 0.05))
        for n, p in PREFILLS
        for _ in range(5)
    ]
    wild = set(dice.choice(len(points), len(points) // 10, replace=False).tolist())
    with_wild = [(n, p, s * factor if at in wild else s) for at, (n, p, s) in enumerate(points)]
    without = [point for at, point in enumerate(points) if at not in wild]
    assert fit_prefill(with_wild) == pytest.approx(fit_prefill(without), rel=1e-9)
    made = latency_profiles.fit("mine", with_wild, [(b, c, 0.01 + 1e-7 * c) for b, c in BATCHES])
    assert made.prefill_fit is not None
    assert made.prefill_fit.left_out == len(wild)
    assert made.prefill_fit.error_max < 0.25


def test_errors_count_relative() -> None:
    """With a few percent of noise everywhere, short prompts are fitted as well as long ones."""
    dice = np.random.default_rng(7)
    points = [
        (n, p, float(prefill_s(0.05, 1e-4, 1e-9, n, p)) * dice.uniform(0.97, 1.03))
        for n, p in PREFILLS
    ]
    found = fit_prefill(points)
    assert max(abs(float(prefill_s(*found, n, p)) / s - 1) for n, p, s in points) < 0.06


@pytest.mark.parametrize(
    ("fit", "points", "message"),
    [
        (fit_prefill, [(512, 0, 1.0)] * 2, "2 prefill points: give 3"),
        (fit_prefill, [(512, 0, 1.0), (512, 512, 1.0), (9, 0, 1.0)], "point 1.*0 <= p < n"),
        (fit_prefill, [(512, 0, 1.0), (0, 0, 1.0), (9, 0, 1.0)], "point 1"),
        (fit_prefill, [(512, 0, 1.0), (600, -1, 1.0), (9, 0, 1.0)], "point 1"),
        (fit_prefill, [(512, 0, 1.0), (600, 0, 0.0), (9, 0, 1.0)], "point 1.*seconds > 0"),
        (fit_prefill, [(512, 0, 1.0), (600, 0, 1.0), (9, 0, math.nan)], "point 2.*finite"),
        (fit_prefill, [(512, 0, 1.0), (math.inf, 0, 1.0), (9, 0, 1.0)], "point 1.*finite"),
        (fit_prefill, [(512, 0, 1.0)] * 30, "too much alike.*three different lengths"),
        (fit_prefill, [(512, 1.0)] * 30, "rows of .n, p, seconds."),
        (fit_prefill, [(512, 1.0), (1,), (2, 3)], "not rows of numbers"),
        (fit_prefill, [("a", "b", "c")] * 3, "not rows of numbers"),
        (fit_decode, [(0, 5, 1.0)] * 3, "point 0.*batch >= 1"),
        (fit_decode, [(1, -5, 1.0)] * 3, "point 0.*context >= 0"),
        (
            fit_decode,
            [(b, b * 512, 0.01 * b) for b in range(1, 9)],
            "too much alike.*several batch",
        ),
        (fit_decode, [(b, 0, 0.01) for b in range(1, 9)], "nothing about one.*several lengths"),
    ],
)
def test_points_that_cannot_be_fitted(
    fit: Callable[[list[tuple[float, ...]]], object], points: list[tuple[float, ...]], message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        fit(points)
