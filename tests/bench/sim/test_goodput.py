"""Goodput by bisection, against attainments whose answer is known."""

from __future__ import annotations

import pytest

from tiffin.bench.sim.results.goodput import highest_rate


@pytest.mark.parametrize("limit", [0.013, 0.5, 1.0, 1.7, 300.0])
def test_the_rate_at_which_a_step_falls_is_found_to_its_precision(limit: float) -> None:
    found = highest_rate(lambda rate: float(rate <= limit), precision=0.01)
    assert limit / 1.01 <= found <= limit


def test_a_slope_is_cut_at_the_target() -> None:
    found = highest_rate(lambda rate: max(0.0, 1 - rate / 50), target_share=0.9, precision=0.001)
    assert found == pytest.approx(5.0, rel=0.002)


def test_what_never_attains_it_has_no_goodput() -> None:
    assert highest_rate(lambda rate: 0.5) == 0.0


def test_what_always_attains_it_is_stopped_at_the_limit() -> None:
    assert highest_rate(lambda rate: 1.0, rate_max=100.0) == 100.0
