"""Time between tokens, from events of several tokens each."""

from __future__ import annotations

import pytest

from tiffin.conductor.admission.gaps import Gaps


def test_the_longest_tenth_counts() -> None:
    it = Gaps()
    it.add(4.0, 80)
    it.add(4.0, 40)  # 0.1 s each, more than a tenth of all
    it.add(4.0, 80)
    assert it.tbt_s() == pytest.approx(0.1)


def test_a_short_stall_is_diluted_by_the_rest_of_the_tenth() -> None:
    it = Gaps()
    it.add(0.05 * 1.5, 1)
    it.add(1.0, 1)
    it.add(0.05 * 98, 98)
    assert it.tbt_s() == pytest.approx((1.0 + 0.05 * 1.5 + 8 * 0.05) / 10)


def test_the_first_gap_holds_half_a_step_of_waiting() -> None:
    it = Gaps()
    it.add(0.05 * 9.5, 9)
    assert it.tbt_s() == pytest.approx(0.075)


def test_without_gaps_there_is_no_time_between_tokens() -> None:
    it = Gaps()
    it.add(1.0, 0)
    assert it.tbt_s() is None
