"""The tightest TBT that was promised to a request on each decode instance. Pure.

All requests of a batch get their tokens in the same steps. So who joins a batch makes it slower for
all of it, and a step must be as short as the tightest objective of those who were admitted there,
whatever the objective of the one who comes, even if it has none.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from math import inf
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_ROWS_MIN = 64


class PromisedTbt:
    """Of each row, the objectives of the requests there. Each must be removed as it was added."""

    def __init__(self) -> None:
        self._of: dict[int, list[float]] = {}  # by row, in order
        self._tightest_s = np.full(_ROWS_MIN, inf)

    def add(self, row: int, tbt_s: float) -> None:
        """A request with this objective is admitted there; infinite: with none."""
        if tbt_s == inf:
            return
        insort(self._of.setdefault(row, []), tbt_s)
        if row >= len(self._tightest_s):
            more = max(row + 1, 2 * len(self._tightest_s)) - len(self._tightest_s)
            self._tightest_s = np.pad(self._tightest_s, (0, more), constant_values=inf)
        self._tightest_s[row] = self._of[row][0]

    def remove(self, row: int, tbt_s: float) -> None:
        """It has ended."""
        if tbt_s == inf:
            return
        there = self._of[row]
        del there[bisect_left(there, tbt_s)]
        self._tightest_s[row] = there[0] if there else inf
        if not there:
            del self._of[row]

    def tightest_s(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """Of each of `rows` [n]; infinite where nobody has one."""
        if len(rows) and rows.max() >= len(self._tightest_s):
            known = np.minimum(rows, len(self._tightest_s) - 1)
            return np.where(rows == known, self._tightest_s.take(known), inf)
        return self._tightest_s.take(rows)

    def tightest_of(self, row: int) -> float:
        """Of one row."""
        return self._of[row][0] if row in self._of else inf
