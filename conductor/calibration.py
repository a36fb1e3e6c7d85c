"""Profiles corrected by what is observed: one bounded factor per instance or profile. Pure.

A profile was measured elsewhere, on an idle machine. What an instance really takes is a constant
multiple of it, nearly: scheduling overhead, another driver, a neighbour on the same node. The
factor is that multiple,

    observed / (what the profile says)

for which the median of the last observations stands: up to half of them may be absurd (a request
that met a restart, a clock that jumped, a queue that nobody knew of) without any effect. Towards it
the factor moves by a few percent per observation at most, so that a change of the load does not
throw all decisions to one side within a moment, and it stays within [0.25, 4]: beyond that the
profile is the wrong one, which is for people to mend.

What the factor chases does not depend on the factor: each prediction is first divided by the one
that it was made with. Otherwise every request in flight would correct once more what an earlier one
has corrected already, and the factor would swing.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from statistics import median
from typing import Annotated

import msgspec
from msgspec import Meta

FACTOR_MIN, FACTOR_MAX = 0.25, 4.0

# Before it, there is no majority against a wrong one.
OBSERVATIONS_MIN = 3

# Instances and profiles (`cluster.INSTANCES_MAX` and some). Those that were not observed for the
# longest time are forgotten beyond it.
KEYS_MAX = 20_000


class CalibrationSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How fast profiles are corrected."""

    enabled: bool = True
    """Whether observations count. Factors that were found stay in force either way."""

    step: Annotated[float, Meta(gt=0, le=0.1)] = 0.03
    """How far one observation moves a factor at most, as a share of it. 3%: from 1 to 2 in 24."""

    window: Annotated[int, Meta(ge=OBSERVATIONS_MIN, le=101)] = 15
    """Observations of which the median is taken."""


class _Factor:
    """One factor, and the last ratios of observed to what the profile said, as logarithms."""

    __slots__ = ("log", "ratios")

    def __init__(self, window: int) -> None:
        self.log = 0.0
        self.ratios: deque[float] = deque(maxlen=window)

    @property
    def known(self) -> bool:
        return len(self.ratios) >= OBSERVATIONS_MIN


class Calibration:
    """Factors for prefill (from times to first token) and for decode (from times between tokens).
    Not thread-safe."""

    def __init__(self, settings: CalibrationSettings | None = None) -> None:
        self.settings = settings or CalibrationSettings()
        self.ignored = 0  # observations that make no sense
        self._ttft: OrderedDict[str, _Factor] = OrderedDict()
        self._tbt: OrderedDict[str, _Factor] = OrderedDict()

    def configure(self, settings: CalibrationSettings) -> None:
        """From now on; factors stay."""
        self.settings = settings
        for factors in (self._ttft, self._tbt):
            for one in factors.values():
                one.ratios = deque(one.ratios, maxlen=settings.window)

    def observe_ttft(
        self, key: str, predicted_s: float, observed_s: float, factor: float | None = None
    ) -> float:
        """A first token came after `observed_s`; `predicted_s` was predicted with `factor`, the
        present one if None. Returns the factor from now on.

        The prediction should be of what the factor is about: subtract from both what was waited for
        transfers, if that is known. Numbers that are not positive and finite are ignored.
        """
        return self._observe(self._ttft, key, predicted_s, observed_s, factor)

    def observe_tbt(
        self, key: str, predicted_s: float, observed_s: float, factor: float | None = None
    ) -> float:
        """The same for the time between two tokens."""
        return self._observe(self._tbt, key, predicted_s, observed_s, factor)

    def factor(self, *keys: str) -> float:
        """What prefill seconds of a profile are multiplied with: the factor of the first of these
        keys that was observed (an instance, then its profile); 1 if none was."""
        return _factor(self._ttft, keys)

    def tbt_factor(self, *keys: str) -> float:
        """What seconds of a decode step are multiplied with."""
        return _factor(self._tbt, keys)

    def forget(self, key: str) -> None:
        """The instance is gone; another one of its name starts anew."""
        self._ttft.pop(key, None)
        self._tbt.pop(key, None)

    def factors(self) -> dict[str, tuple[float, float]]:
        """(prefill, decode) of all keys, for people."""
        return {
            key: (self.factor(key), self.tbt_factor(key))
            for key in sorted(self._ttft.keys() | self._tbt.keys())
        }

    def _observe(
        self,
        factors: OrderedDict[str, _Factor],
        key: str,
        predicted_s: float,
        observed_s: float,
        factor: float | None,
    ) -> float:
        one = factors.get(key)
        was = math.exp(one.log) if one is not None else 1.0
        used = was if factor is None else factor
        numbers = (predicted_s, observed_s, used)
        if not all(math.isfinite(number) and number > 0 for number in numbers):
            self.ignored += 1
            return was
        if not self.settings.enabled:
            return was
        if one is None:
            one = factors[key] = _Factor(self.settings.window)
            if len(factors) > KEYS_MAX:
                factors.popitem(last=False)
        factors.move_to_end(key)
        one.ratios.append(math.log(observed_s) - math.log(predicted_s) + math.log(used))
        if one.known:
            one.log = self._moved(one.log, median(one.ratios))
        return math.exp(one.log)

    def _moved(self, log: float, goal: float) -> float:
        step = math.log1p(self.settings.step)
        moved = log + min(step, max(-step, goal - log))
        return min(math.log(FACTOR_MAX), max(math.log(FACTOR_MIN), moved))


def _factor(factors: OrderedDict[str, _Factor], keys: tuple[str, ...]) -> float:
    for key in keys:
        one = factors.get(key)
        if one is not None and one.known:
            return min(FACTOR_MAX, max(FACTOR_MIN, math.exp(one.log)))
    return 1.0
