"""Calibration of latency profiles by observed times: one bounded factor per instance or profile.
Pure.

A profile was measured elsewhere, on an idle machine. The real time on an instance is nearly a
constant multiple of it: scheduling overhead, another driver, a neighbour on the same node. The
factor is that multiple,

    observed / (predicted by the profile)

estimated by the median of the last observations: up to half of them may be outliers (a request
during a restart, a clock that jumped, a queue unknown to the conductor) without any effect. The
factor moves towards it by a few percent per observation at most, so that a change of the load does
not shift all decisions to one side at once, and it stays within [0.25, 4]: beyond that the profile
is the wrong one, and an operator has to replace it.

The target of the factor does not depend on the factor: each prediction is first divided by the
factor that it was made with. Otherwise every in-flight request would apply the same correction once
more, and the factor would oscillate.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from statistics import median
from typing import Annotated

import msgspec
from msgspec import Meta

FACTOR_MIN, FACTOR_MAX = 0.25, 4.0

# With fewer observations, a median can not outvote a wrong one.
OBSERVATIONS_MIN = 3

# Limit of instances and profiles (`instance_table.INSTANCES_MAX` and some). Beyond it the least
# recently observed ones are evicted.
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
    """One factor, and the last ratios of observed to profile seconds, as logarithms."""

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
        self.ignored = 0  # observations with a number that is not positive and finite
        self._ttft: OrderedDict[str, _Factor] = OrderedDict()
        self._tbt: OrderedDict[str, _Factor] = OrderedDict()

    def configure(self, settings: CalibrationSettings) -> None:
        """Change the settings; factors stay."""
        self.settings = settings
        for factors in (self._ttft, self._tbt):
            for one in factors.values():
                one.ratios = deque(one.ratios, maxlen=settings.window)

    def observe_ttft(
        self, key: str, predicted_s: float, observed_s: float, factor: float | None = None
    ) -> float:
        """Record that a first token came after `observed_s`; `predicted_s` was predicted with
        `factor` (None: the current one). Returns the new factor.

        Both should be prefill time only: the caller subtracts the time spent waiting for transfers
        from both, if it is known. Numbers that are not positive and finite are ignored.
        """
        return self._observe(self._ttft, key, predicted_s, observed_s, factor)

    def observe_tbt(
        self, key: str, predicted_s: float, observed_s: float, factor: float | None = None
    ) -> float:
        """The same for the time between two tokens."""
        return self._observe(self._tbt, key, predicted_s, observed_s, factor)

    def factor(self, *keys: str) -> float:
        """The factor for the prefill seconds of a profile: that of the first of these keys (an
        instance, then its profile) with enough observations; 1 if there is none."""
        return _factor(self._ttft, keys)

    def tbt_factor(self, *keys: str) -> float:
        """The factor for the seconds of a decode step; keys as in `factor`."""
        return _factor(self._tbt, keys)

    def forget(self, key: str) -> None:
        """Drop the factors of a removed instance; a new one with its name starts anew."""
        self._ttft.pop(key, None)
        self._tbt.pop(key, None)

    def factors(self) -> dict[str, tuple[float, float]]:
        """(prefill, decode) factors of all keys, for display."""
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
