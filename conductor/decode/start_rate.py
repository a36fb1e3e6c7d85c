"""How many requests that are not here yet will have begun to decode by a later time. Pure.

Requests come at some rate, and each begins to decode after its prefill. One that comes `s` seconds
from now and has a prefill of `lead` seconds will have begun by a time `t` seconds from now if
`s + lead <= t`. So of those who come from now on

    rate · E[max(t - lead, 0)]

will have begun: almost all of a time `t` if prefills are short, and none where all wait longer than
that in a queue. The rate is of what began on an instance lately, the leads are of all instances,
both as exponentially weighted means: what happened counts `exp(-age / mean_s)`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

# As long as an answer decodes in Mooncake's trace (`AdmissionSettings.decode_s`): the batch of now
# is made of what began in that time.
MEAN_S = 13.0
_ROWS_MIN = 64
# Leads are counted by bins that double, from the forecast's bucket to twice its end.
_LEAD_BINS_S = 0.25 * 2.0 ** np.arange(10)


class StartRate:
    """Rates of some amounts [amounts] of each row, and the leads of all."""

    def __init__(self, amounts: int, mean_s: float = MEAN_S) -> None:
        self._mean_s = mean_s
        self._sums = np.zeros((_ROWS_MIN, amounts))
        self._at = np.zeros(_ROWS_MIN)  # when each sum was last brought up to date
        self._leads = np.zeros(len(_LEAD_BINS_S))
        self._leads_at = 0.0

    def came(self, lead_s: float, now: float) -> None:
        """A request came whose prefill should end in `lead_s`."""
        self._leads *= np.exp((self._leads_at - now) / self._mean_s)
        self._leads_at = now
        at = int(np.searchsorted(_LEAD_BINS_S, lead_s))
        self._leads[min(at, len(_LEAD_BINS_S) - 1)] += 1.0

    def began(self, row: int, amounts: NDArray[np.int64], now: float) -> None:
        """A request with these amounts began on a row."""
        self._need(row)
        self._sums[row] *= np.exp((self._at[row] - now) / self._mean_s)
        self._sums[row] += amounts
        self._at[row] = now

    def forget(self, row: int) -> None:
        """An instance was removed: its row starts anew."""
        if row < len(self._at):
            self._sums[row] = 0.0

    def begin_until(self, rows: NDArray[np.int64], at_s: float, now: float) -> NDArray[np.float64]:
        """Amounts [amounts, rows] of those who come from now on and begin until `at_s`."""
        if len(rows):
            self._need(int(rows.max()))
        all_leads = self._leads.sum()
        if all_leads <= 0.0:
            return np.zeros((self._sums.shape[1], len(rows)))
        left_s = np.maximum(at_s - now - _LEAD_BINS_S, 0.0) @ self._leads / all_leads
        fade = np.exp((self._at.take(rows) - now) / self._mean_s) * (left_s / self._mean_s)
        begun: NDArray[np.float64] = (self._sums.take(rows, axis=0) * fade[:, None]).T
        return begun

    def _need(self, row: int) -> None:
        have = len(self._at)
        if row >= have:
            more = max(row + 1, 2 * have) - have
            self._sums = np.pad(self._sums, ((0, more), (0, 0)))
            self._at = np.pad(self._at, (0, more))
