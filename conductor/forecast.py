"""What the next interval will bring, from those before it. Pure.

Three predictors, from the careful to the daring. Each is a function of a series of numbers, one per
interval, oldest first, and answers with the next one; never below zero, and never above twice the
largest one seen, because a plan for a load that was never met is a guess whatever its formula.

- `constant`: the last one. Right within noise for steady load, and what Dynamo falls back to.
- `linear`: least squares over the window, one step ahead. For load that grows through a morning.
- `holt-winters`: exponential smoothing with a damped trend, and with a season (of a day, say) once
  two of them were seen. From statsmodels, which is imported when it is first asked for.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# Fewer points fit anything: with them a trend is drawn as a line.
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
        # That a fit of flat or short data has not converged: it is the best there is, and bounded.
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


def check_predictor(predictor: str) -> None:
    """Whether there is such a predictor and what it needs is installed, without importing it.
    Raises InvalidRequest."""
    if predictor not in PREDICTORS:
        raise InvalidRequest(f"no predictor {predictor!r}; there are {', '.join(PREDICTORS)}")
    if predictor == "holt-winters" and importlib.util.find_spec("statsmodels") is None:
        raise InvalidRequest(_NO_STATSMODELS)


def forecast(predictor: str, series: Sequence[float], season: int = 0) -> float:
    """The number that follows `series`; 0 for an empty one. `season`: intervals per season, 0 for
    none. Raises InvalidRequest for a predictor that does not exist, or whose library is missing,
    and for numbers that are not finite."""
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
