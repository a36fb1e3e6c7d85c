"""How the seconds of a prefill are made up, by what a profile's instances show. Pure.

A factor (`calibration.py`) tells that all prefills take half as long again. It can't tell that each
takes some milliseconds more, as a profile of kernels alone is without an engine's own work, nor
that a neighbour slowed down some prompts while a profile was measured: then one factor is too high
for some prompts and too low for others, whatever it is. So a profile's (c0, c1, c2) are fitted anew
to the last prefills of all its instances, and to its own seconds at some lengths: where nobody was
observed, such as at lengths that nobody asks for, they stay as they are. Each prefill counts in
multiples of what its instance's last ones have in common, so that this is left to the factors.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from .profile_fit import least_squares, outliers, prefill_columns

if TYPE_CHECKING:
    from .profile_fit import Coefficients

# Prefills that count: three coefficients are within some 2% where times vary by 10%.
_SEEN = 200
# With fewer, what they have in common and what they differ in are not told apart.
_SEEN_MIN = 8
# The profile's own points: whole prompts of so many lengths, which together weigh as much as one
# prefill. Of one that is nearly all cached, a small c0 would be most of the seconds, and be kept.
_LENGTHS, _BELIEVED = 5, 0.2
# From the shortest that is measured for a profile to the longest; if it does not tell, this.
_TOKENS_MIN, _TOKENS_MAX = 512, 131_072


class PrefillShape:
    """`coefficients` (c0, c1, c2) of a profile that was measured up to `tokens_max`, corrected."""

    def __init__(self, profile: Coefficients, tokens_max: int) -> None:
        self.coefficients = self.profile = profile
        most = min(max(tokens_max, 1), _TOKENS_MAX)
        lengths = np.geomspace(min(_TOKENS_MIN, max(most // 8, 1)), most, _LENGTHS)
        self._own = prefill_columns(lengths, np.zeros_like(lengths))
        self._seen: deque[tuple[int, int, float]] = deque(maxlen=_SEEN)
        self._news = False

    def observe(self, tokens: int, cached: int, seconds: float) -> None:
        """An instance whose prefills take as long as the profile's took so long for a prompt."""
        self._seen.append((tokens, cached, seconds))
        self._news = True

    def fit(self) -> None:
        """Correct the coefficients by what was observed since."""
        if not self._news or len(self._seen) < _SEEN_MIN:
            return
        self._news = False
        n, p, seconds = np.array(self._seen, np.float64).T
        columns = prefill_columns(n, p)
        seconds = seconds / np.median(seconds / (columns @ self.profile))
        kept = ~outliers(columns @ self.coefficients, seconds)
        columns = np.concatenate((columns[kept], self._own))
        seconds = np.concatenate((seconds[kept], self._own @ self.profile))
        weights = np.ones(len(seconds))
        weights[-len(self._own) :] = _BELIEVED**0.5
        c0, c1, c2 = least_squares(columns, seconds, weights=weights).tolist()
        self.coefficients = c0, c1, c2
