"""Fit of latency coefficients to measurements: non-negative least squares of relative errors. Pure.

Relative, because a profile has to be right for a prompt of 512 tokens as well as for one of
131,072, whose prefill takes a thousand times as long; the longest prompts would dominate absolute
squares. Non-negative, because a model in which more work takes less time routes requests to the
wrong instance. Each token of a prompt, and each step, takes some time: noise may not make it none.

A live engine pauses now and then, and a point measured meanwhile says nothing of its speed. So the
squares are those of the points without outliers, which are told by a first fit of least absolute
errors: of up to half of the points it hardly notices where they lie.
"""

from __future__ import annotations

import math
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Coefficients = tuple[float, float, float]
    Point = tuple[float, float, float]

# A sweep of lengths, cached parts and batches has some hundred rows; a request log of a day may
# have more, and its fit takes a second.
POINTS_MAX = 1_000_000

# Minimum ratio of the smallest to the largest singular value of the scaled matrix: below it the
# columns are linearly dependent, and the coefficients can not be told apart.
_CONDITION_MIN = 1e-6

# An outlier is off by more than a factor of two, the largest error of a model that fits being 1.3
# (docs/conductor/cost.md), and by more than three standard deviations, as the median tells them.
_OUTLIER_FACTOR = 2.0
_OUTLIER_DEVIATIONS = 3.0
_DEVIATION_OF_MEDIAN = 1.4826  # of normal errors
_ABSOLUTE_ROUNDS = 30  # of reweighted squares, which then change in the third digit
_TINY = 1e-6

# The least share of a measured time that c1 or d0 has, where noise would let it be zero: far below
# the errors of a profile.
_SHARE_MIN = 1e-4


def fit_prefill(points: Sequence[Point]) -> Coefficients:
    """(c0, c1, c2) in seconds from rows of (prompt tokens n, cached tokens p, seconds).

    Raises InvalidRequest for invalid rows, naming the first, and if the lengths are too few or too
    much alike to tell the three coefficients apart.
    """
    table = _table(points, "prefill", ("n", "p"))
    n, p = table[:, 0], table[:, 1]
    wrong = np.flatnonzero((n < 1) | (p < 0) | (p >= n))
    if len(wrong):
        raise InvalidRequest(
            f"prefill point {wrong[0]}: {n[wrong[0]]:g} tokens, {p[wrong[0]]:g} of them cached; "
            "at least the last token is computed, so give 0 <= p < n"
        )
    hint = "measure at least three different lengths"
    return _fit(prefill_columns(n, p), table[:, 2], "prefill", hint, positive=1)


def fit_decode(points: Sequence[Point]) -> Coefficients:
    """(d0, d1, d2) in seconds from rows of (requests in the batch, their tokens of context
    together, seconds of one step). Raises InvalidRequest, as `fit_prefill` does."""
    table = _table(points, "decode", ("batch", "context"))
    batch, context = table[:, 0], table[:, 1]
    wrong = np.flatnonzero((batch < 1) | (context < 0))
    if len(wrong):
        raise InvalidRequest(
            f"decode point {wrong[0]}: a batch of {batch[wrong[0]]:g} with {context[wrong[0]]:g} "
            "tokens; give batch >= 1 and context >= 0"
        )
    columns = np.stack((np.ones_like(batch), batch, context), axis=1)
    hint = "measure several batches, each with several lengths"
    return _fit(columns, table[:, 2], "decode", hint, positive=0)


def prefill_columns(n: Floats, p: Floats) -> Floats:
    """What (c0, c1, c2) are multiplied with, [points, 3]."""
    return np.stack((np.ones_like(n), n - p, n * n - p * p), axis=1)


def outliers(predicted_s: Floats, seconds: Floats) -> NDArray[np.bool_]:
    """Which points say nothing of an engine's speed, by what their fit predicts for them."""
    off: Floats = np.abs(np.log(predicted_s / seconds))
    usual = _OUTLIER_DEVIATIONS * _DEVIATION_OF_MEDIAN * float(np.median(off))
    far: NDArray[np.bool_] = off > max(math.log(_OUTLIER_FACTOR), usual)
    return far


def _table(points: Sequence[Point], kind: str, names: tuple[str, str]) -> Floats:
    if not 3 <= len(points) <= POINTS_MAX:
        raise InvalidRequest(f"{len(points)} {kind} points: give 3 to {POINTS_MAX}")
    try:
        table: Floats = np.asarray(points, np.float64)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"{kind} points are not rows of numbers: {error}") from None
    if table.ndim != 2 or table.shape[1] != 3:
        wanted = f"({names[0]}, {names[1]}, seconds)"
        raise InvalidRequest(f"{kind} points are rows of {wanted}, got shape {table.shape}")
    wrong = np.flatnonzero(~np.isfinite(table).all(axis=1) | (table[:, 2] <= 0))
    if len(wrong):
        row = table[wrong[0]].tolist()
        raise InvalidRequest(f"{kind} point {wrong[0]} is {row}: give finite numbers, seconds > 0")
    return table


def _fit(columns: Floats, seconds: Floats, kind: str, hint: str, positive: int) -> Coefficients:
    """`positive`: the column whose coefficient is above zero."""
    _check(columns, seconds, kind, hint)
    first = _least_absolute(columns, seconds)
    kept = ~outliers(columns @ first, seconds)
    try:
        _check(columns[kept], seconds[kept], kind, hint)
    except InvalidRequest:  # only with them are there enough different points
        kept = np.ones_like(kept)
    columns, seconds = columns[kept], seconds[kept]
    c = least_squares(columns, seconds)
    if not c[positive]:
        floor = np.zeros_like(c)
        floor[positive] = _SHARE_MIN * (seconds / columns[:, positive]).min()
        c = floor + least_squares(columns, seconds, floor=floor)
    return float(c[0]), float(c[1]), float(c[2])


def _check(columns: Floats, seconds: Floats, kind: str, hint: str) -> None:
    relative = columns / seconds[:, None]
    scale = np.linalg.norm(relative, axis=0)
    if not scale.all():
        raise InvalidRequest(f"the {kind} points say nothing about one of the coefficients: {hint}")
    values = np.linalg.svd(relative / scale, compute_uv=False)
    if len(values) < columns.shape[1] or values[-1] < _CONDITION_MIN * values[0]:
        raise InvalidRequest(f"the {kind} points are too much alike: {hint}")


def _least_absolute(columns: Floats, seconds: Floats) -> Floats:
    """Least absolute logarithms of predicted by measured, of which a point that is too fast by a
    factor counts as much as one that is too slow; by squares that are weighted anew in each
    round."""
    weights = np.ones_like(seconds)
    c = np.zeros(columns.shape[1])
    for _ in range(_ABSOLUTE_ROUNDS):
        c = least_squares(columns, seconds, weights=weights)
        ratio = np.maximum(columns @ c / seconds, _TINY)
        weights = 1.0 / np.sqrt(ratio * np.maximum(np.abs(ratio - 1.0), _TINY))
    return c


def least_squares(
    columns: Floats,
    seconds: Floats,
    *,
    weights: Floats | None = None,
    floor: Floats | None = None,
) -> Floats:
    """The coefficients with the least squares of (weighted) relative errors; beyond `floor`."""
    relative = columns / seconds[:, None]
    goal = np.ones_like(seconds) if floor is None else 1.0 - relative @ floor
    if weights is not None:
        relative, goal = relative * weights[:, None], goal * weights
    scale = np.linalg.norm(relative, axis=0)
    found: Floats = _nonnegative(relative / scale, goal) / scale
    return found


def _nonnegative(matrix: Floats, goal: Floats) -> Floats:
    """Non-negative least squares: the x >= 0 that minimises the error of matrix @ x against `goal`.
    Three columns have seven non-empty subsets; the answer is the best of their unconstrained
    solutions that is not negative."""
    width = matrix.shape[1]
    best, best_error = np.zeros(width), float(np.square(goal).sum())
    for count in range(1, width + 1):
        for chosen in combinations(range(width), count):
            part: NDArray[Any] = matrix[:, list(chosen)]
            x = np.linalg.lstsq(part, goal, rcond=None)[0]
            error = float(np.square(part @ x - goal).sum())
            if (x >= 0).all() and error < best_error:
                best_error, best = error, np.zeros(width)
                best[list(chosen)] = x
    return best
