"""Forecasts of the next number of a series are plausible for any series."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import math
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiffin.conductor.errors import InvalidRequest
from tiffin.conductor.pool.demand_forecast import (
    CEILING,
    PREDICTORS,
    DemandForecast,
    DemandQuestion,
    check_predictor,
    forecast,
)
from tiffin.conductor.service.forecast_process import forecast_apart


class TestPredictors:
    def test_constant_is_the_last(self) -> None:
        assert forecast("constant", [5.0, 1.0, 3.0]) == 3.0

    def test_linear_goes_on_with_a_line(self) -> None:
        assert forecast("linear", [1.0, 2.0, 3.0, 4.0]) == pytest.approx(5.0)
        assert forecast("linear", [4.0, 3.0, 2.0, 1.0, 0.0]) == 0.0  # not negative
        assert forecast("linear", [1.0, 9.0]) == 9.0  # two points are no trend

    @pytest.mark.slow
    def test_holt_winters_knows_the_season(self) -> None:
        """Three days of 12 intervals: the constant predictor is half a day late."""
        pytest.importorskip("statsmodels")
        day = [10 + 8 * math.sin(2 * math.pi * i / 12) for i in range(12)]
        series = day * 3
        assert forecast("holt-winters", series, 12) == pytest.approx(day[0], abs=0.5)
        assert forecast("holt-winters", [*series, day[0]], 12) == pytest.approx(day[1], abs=0.5)
        assert forecast("holt-winters", [float(i) for i in range(20)]) == pytest.approx(20, abs=1)

    def test_of_nothing_nothing_comes(self) -> None:
        assert [forecast(name, []) for name in PREDICTORS] == [0.0] * 3

    @given(
        series=st.lists(st.floats(0, 1e6), min_size=1, max_size=60),
        name=st.sampled_from(["constant", "linear"]),
    )
    def test_never_below_zero_nor_far_above_what_was_seen(
        self, series: list[float], name: str
    ) -> None:
        assert 0 <= forecast(name, series) <= CEILING * max(series)

    @given(series=st.lists(st.floats(0, 1e4), min_size=1, max_size=30), season=st.integers(0, 8))
    @settings(max_examples=15)
    def test_nor_does_smoothing(self, series: list[float], season: int) -> None:
        pytest.importorskip("statsmodels")
        assert 0 <= forecast("holt-winters", series, season) <= CEILING * max(series)


class TestApart:
    """Forecasts in a process of their own."""

    QUESTION = DemandQuestion("linear", ((1.0, 2.0, 3.0, 4.0), (5.0,)))

    def test_it_answers_as_here(self) -> None:
        found = asyncio.run(forecast_apart([self.QUESTION, DemandQuestion("none", ((2.0,),))]))
        assert found[0] == self.QUESTION.answer()
        assert found[0].values == (pytest.approx(5.0), 5.0)
        assert found[1].values == (2.0,)
        assert "no predictor 'none'" in found[1].error

    def test_it_is_not_waited_for_for_ever(self) -> None:
        found = asyncio.run(forecast_apart([self.QUESTION], timeout_s=0.0))
        assert found == [DemandForecast((4.0, 5.0), "no forecast within 0 s")]

    def test_a_process_that_ends_is_an_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys, "executable", "/bin/false")
        (found,) = asyncio.run(forecast_apart([self.QUESTION]))
        assert (found.values, found.error[:12]) == ((4.0, 5.0), "the process ")


class TestRefusals:
    def test_unknown(self) -> None:
        with pytest.raises(InvalidRequest, match="constant, linear, holt-winters"):
            forecast("prophet", [1.0])

    @pytest.mark.parametrize("number", [math.nan, math.inf])
    def test_numbers_that_are_none(self, number: float) -> None:
        with pytest.raises(InvalidRequest, match="finite"):
            forecast("constant", [1.0, number])

    def test_without_its_library_it_says_what_to_install(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def missing(name: str) -> None:
            raise ImportError(name)

        monkeypatch.setattr(importlib, "import_module", missing)
        with pytest.raises(InvalidRequest, match=r"pip install 'tiffin\[conductor\]'"):
            forecast("holt-winters", [1.0] * 20)
        assert forecast("linear", [1.0] * 20) == pytest.approx(1.0)

    def test_a_setting_is_refused_before_it_is_needed(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        check_predictor("constant")
        check_predictor("linear")
        with pytest.raises(InvalidRequest, match=r"pip install 'tiffin\[conductor\]'"):
            check_predictor("holt-winters")
        with pytest.raises(InvalidRequest, match="constant, linear, holt-winters"):
            check_predictor("prophet")
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
        check_predictor("holt-winters")
