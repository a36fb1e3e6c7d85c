"""Demand forecast for the next interval, from the intervals before it. Pure.

There are three predictors, in the order of how far they extrapolate. Each takes a series of
numbers, one per interval, oldest first, and returns the next number; never below zero, and never
above twice the largest value seen, because a plan for a load that was never observed is a guess
whatever its formula.

- `constant`: the last value. Right within noise for steady load, and Dynamo's fallback.
- `linear`: least squares over the window, one step ahead. For load that grows through a morning.
- `holt-winters`: exponential smoothing with a damped trend, and with a season (of a day, say) once
  two seasons were seen. From statsmodels, which is imported at the first use: the import and a fit
  take seconds, so a service runs this predictor in another process (`forecast_process.py`).
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..errors import ConductorError, InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# Minimum points for smoothing and for a line, because a trend fits any fewer points: below the
# first the linear predictor is used, below the second the constant one.
_SMOOTHED_FROM = 10
_LINE_FROM = 3
CEILING = 2.0

_NO_STATSMODELS = (
    "the predictor 'holt-winters' needs statsmodels: pip install 'tiffin[conductor]', or choose "
    "'constant' or 'linear'"
)


def _constant(series: Sequence[float], season: int) -> float:
    return series[-1]


def _linear(series: Sequence[float], season: int) -> float:
    if len(series) < _LINE_FROM:
        return series[-1]
    steps = np.arange(len(series), dtype=np.float64)
    slope, level = np.polyfit(steps, np.asarray(series, np.float64), 1)
    return float(level + slope * len(series))


def _holt_winters(series: Sequence[float], season: int) -> float:
    smoothing = _statsmodels()
    if len(series) < _SMOOTHED_FROM:
        return _linear(series, season)
    seasonal = season >= 2 and len(series) >= 2 * season
    with warnings.catch_warnings():
        # Warnings that a fit of flat or short data did not converge: it is still used, and bounded.
        warnings.simplefilter("ignore")
        fit = smoothing(
            np.asarray(series, np.float64),
            trend="add",
            damped_trend=True,
            seasonal="add" if seasonal else None,
            seasonal_periods=season if seasonal else None,
            initialization_method="estimated",
        ).fit()
        return float(fit.forecast(1)[0])


def _statsmodels() -> Callable[..., Any]:
    try:
        module = importlib.import_module("statsmodels.tsa.holtwinters")
    except ImportError as error:
        raise InvalidRequest(_NO_STATSMODELS) from error
    found: Callable[..., Any] = module.ExponentialSmoothing
    return found


PREDICTORS: dict[str, Callable[[Sequence[float], int], float]] = {
    "constant": _constant,
    "linear": _linear,
    "holt-winters": _holt_winters,
}


# Predictors that are too slow for the event loop that places requests.
SLOW = ("holt-winters",)


class DemandQuestion(NamedTuple):
    """A request for a forecast of several series; each gets the result of `forecast`."""

    predictor: str
    columns: tuple[tuple[float, ...], ...]
    season: int = 0

    @property
    def slow(self) -> bool:
        """Whether the predictor is too slow for a thread that serves requests."""
        return self.predictor in SLOW

    def answer(self) -> DemandForecast:
        """One number for each series. If the predictor fails, the constant predictor's."""
        try:
            return DemandForecast(self._by(self.predictor))
        except (ConductorError, ValueError, ArithmeticError, LookupError) as error:
            # The predictor's library is missing, or found no fit: LinAlgError is a ValueError.
            return self.stand_in(str(error) or type(error).__name__)

    def stand_in(self, error: str) -> DemandForecast:
        """The constant predictor's forecast, as the fallback after an error."""
        return DemandForecast(self._by("constant"), error)

    def _by(self, predictor: str) -> tuple[float, ...]:
        return tuple(forecast(predictor, column, self.season) for column in self.columns)


class DemandForecast(NamedTuple):
    """A number for each series of a question. `error` is why the constant predictor was used in
    place of the requested one, or ""."""

    values: tuple[float, ...]
    error: str = ""


def check_predictor(predictor: str) -> None:
    """Check that the predictor exists and that its library is installed, without importing it.
    Raises InvalidRequest."""
    if predictor not in PREDICTORS:
        raise InvalidRequest(f"no predictor {predictor!r}; there are {', '.join(PREDICTORS)}")
    if predictor == "holt-winters" and importlib.util.find_spec("statsmodels") is None:
        raise InvalidRequest(_NO_STATSMODELS)


def forecast(predictor: str, series: Sequence[float], season: int = 0) -> float:
    """The predicted next value of `series`; 0 for an empty one. `season`: intervals per season, 0
    for none. Raises InvalidRequest for a predictor that does not exist, or whose library is
    missing, and for numbers that are not finite."""
    predict = PREDICTORS.get(predictor)
    if predict is None:
        raise InvalidRequest(f"no predictor {predictor!r}; there are {', '.join(PREDICTORS)}")
    if not all(math.isfinite(value) for value in series):
        raise InvalidRequest("a forecast needs finite numbers")
    if not series:
        return 0.0
    found = predict(series, season)
    if not math.isfinite(found):
        found = series[-1]
    return min(max(0.0, found), CEILING * max(0.0, *series, 0.0))
