"""Calibration of latency profiles by observed times: one bounded factor per instance. Pure.

A profile was measured elsewhere, on an idle machine. The real time on an instance is nearly a
constant multiple of it: scheduling overhead, another driver, a neighbour on the same node. The
factor is that multiple,

    observed seconds / seconds by the profile, both of the same work

estimated by the median of the last observations: up to half of them may be outliers (a restart, a
clock that jumped, work unknown to the conductor) without any effect. The factor moves towards it by
a few percent per observation at most, so that a change does not shift all decisions to one side at
once, and it stays within [0.25, 4]: beyond that the profile is the wrong one, and an operator has
to replace it. Observations are of the hardware alone: `core/calibrated_profiles.py` makes them.

**What nobody observes is forgotten.** An instance that is taken for slow gets few requests, so a
factor that is too high would correct itself never. Without observations, a factor returns to what
is expected of the profile, by half of the way (of its logarithm) per `half_life_s`; then requests
come again, and tell: one that confirms the factor restores it, others move it from where it is.

**What is expected of a profile** is 1, or, if its instances agree, what they have in common: the
median of their factors, if at least `AGREEING_MIN` are known and the middle half of them is within
`AGREEMENT`. A profile that was measured without an engine's overhead is too fast for all alike, and
a new instance that was priced by it would draw everybody's requests. But what one or two instances
have learnt may be their own trouble, and says nothing of another one.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median, quantiles
from typing import Annotated

import msgspec
from msgspec import Meta

FACTOR_MIN, FACTOR_MAX = 0.25, 4.0

# With fewer observations, a median can not outvote a wrong one.
OBSERVATIONS_MIN = 3

# The standard error of a median is 1.25 standard deviations over the root of the number; one of
# these is 1.48 times the median distance from the median.
_ERROR_OF_SPREAD = 1.25 * 1.48

# With fewer instances, a quartile is one of them.
AGREEING_MIN = 4
# Ratio of the quartiles of factors that agree: some errors of a median of noisy observations.
AGREEMENT = 1.1
# What a profile's instances have in common is computed once in so many seconds.
_EXPECTED_FOR_S = 1.0


class CalibrationSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How fast profiles are corrected."""

    enabled: bool = True
    """Whether observations count. Factors that were found stay in force either way."""

    step: Annotated[float, Meta(gt=0, le=0.1)] = 0.03
    """How far one observation moves a factor at most, as a share of it. 3%: from 1 to 2 in 24."""

    window: Annotated[int, Meta(ge=OBSERVATIONS_MIN, le=101)] = 51
    """Observations of which the median is taken. Its standard error is 1.25 of theirs over the root
    of their number: 1.8% where times vary by 10%."""

    half_life_s: Annotated[float, Meta(ge=1.0, le=86_400.0)] = 300.0
    """Without observations, a factor goes half of the way to what is expected of its profile."""


class _Factor:
    """One factor, the last ratios of observed to profile seconds, as logarithms, and the time of
    the last one."""

    __slots__ = ("error", "log", "middle", "observed_at", "profile", "ratios")

    def __init__(self, profile: str, log: float, window: int) -> None:
        self.profile, self.log, self.observed_at = profile, log, -math.inf
        self.middle = self.error = 0.0
        self.ratios: deque[float] = deque(maxlen=window)

    @property
    def known(self) -> bool:
        return len(self.ratios) >= OBSERVATIONS_MIN


class Factors:
    """The factors of all instances for one kind of work. Not thread-safe."""

    def __init__(self, settings: CalibrationSettings) -> None:
        self._settings = settings
        self._factors: dict[str, _Factor] = {}
        self._expected: dict[str, tuple[float, float]] = {}  # by profile: (until, logarithm)
        self.ignored = 0  # observations with a number that is not positive and finite

    def configure(self, settings: CalibrationSettings) -> None:
        """Change the settings; factors stay."""
        self._settings = settings
        for one in self._factors.values():
            one.ratios = deque(one.ratios, maxlen=settings.window)

    def observe(
        self, instance: str, profile: str, profile_s: float, observed_s: float, now: float
    ) -> float:
        """Record that work took `observed_s` which by the instance's profile takes `profile_s`.
        Returns the new factor. Numbers that are not positive and finite are ignored."""
        if not all(math.isfinite(number) and number > 0 for number in (profile_s, observed_s)):
            self.ignored += 1
            return self.factor(instance, profile, now)
        if not self._settings.enabled:
            return self.factor(instance, profile, now)
        ratio = math.log(observed_s) - math.log(profile_s)
        log, one = self._log(instance, profile, now), self._factors.get(instance)
        if one is None or one.profile != profile:
            one = self._factors[instance] = _Factor(profile, log, self._settings.window)
        # What it has lost for want of observations returns with one that confirms it.
        log += _confirmed(one.log - log, ratio - log)
        if self._trust(one, now) < 0.5:
            one.ratios.clear()  # they are of the past
        one.observed_at = max(now, one.observed_at)
        one.ratios.append(ratio)
        one.log = log
        if one.known:
            one.middle = median(one.ratios)
            one.log = self._moved(log, one.middle)
            spread = median(abs(each - one.middle) for each in one.ratios)
            one.error = _ERROR_OF_SPREAD * spread / math.sqrt(len(one.ratios))
        return math.exp(one.log)

    def factor(self, instance: str, profile: str, now: float) -> float:
        """The factor for the seconds of an instance's profile."""
        return math.exp(self._log(instance, profile, now))

    def observations(self, instance: str) -> int:
        """How many observations of an instance count now; `window` at most."""
        one = self._factors.get(instance)
        return 0 if one is None else len(one.ratios)

    def median(self, instance: str) -> float | None:
        """The median of an instance's last observations, which its factor moves towards; None while
        it is not known."""
        one = self._factors.get(instance)
        return math.exp(one.middle) if one is not None and one.known else None

    def error(self, instance: str) -> float:
        """The standard error of an instance's factor, as a share of it; 0 while it is not known."""
        one = self._factors.get(instance)
        return 0.0 if one is None else one.error

    def expected(self, profile: str, now: float) -> float:
        """The factor of an instance of this profile that was not observed: that of the others if
        they agree, else 1."""
        return math.exp(self._expected_log(profile, now))

    def forget(self, instance: str) -> None:
        """Drop the factor of a removed instance; a new one with its name starts anew."""
        self._factors.pop(instance, None)

    def _log(self, instance: str, profile: str, now: float) -> float:
        expected, one = self._expected_log(profile, now), self._factors.get(instance)
        if one is None or one.profile != profile:
            return expected
        return expected + (one.log - expected) * self._trust(one, now)

    def _trust(self, one: _Factor, now: float) -> float:
        """1 just after an observation, ½ after a half-life without another one."""
        age_s = max(0.0, now - one.observed_at)
        return float(0.5 ** (age_s / self._settings.half_life_s))

    def _expected_log(self, profile: str, now: float) -> float:
        until, log = self._expected.get(profile, (-math.inf, 0.0))
        if now < until:
            return log
        recent = now - self._settings.half_life_s
        logs = [
            one.log
            for one in self._factors.values()
            if one.profile == profile and one.known and one.observed_at >= recent
        ]
        log = 0.0
        if len(logs) >= AGREEING_MIN:
            low, middle, high = quantiles(logs)
            log = middle if high - low <= math.log(AGREEMENT) else 0.0
        self._expected[profile] = now + _EXPECTED_FOR_S, log
        return log

    def _moved(self, log: float, goal: float) -> float:
        step = math.log1p(self._settings.step)
        moved = log + min(step, max(-step, goal - log))
        return min(math.log(FACTOR_MAX), max(math.log(FACTOR_MIN), moved))


def _confirmed(lost: float, missing: float) -> float:
    """Of what a factor has lost, the part that an observation misses, too."""
    if lost * missing <= 0.0:
        return 0.0
    return math.copysign(min(abs(lost), abs(missing)), lost)


class Calibration:
    """The factors for prefill and for decode steps of all instances. Not thread-safe."""

    def __init__(self, settings: CalibrationSettings | None = None) -> None:
        settings = settings or CalibrationSettings()
        self.enabled = settings.enabled
        self.prefill, self.decode = Factors(settings), Factors(settings)

    def configure(self, settings: CalibrationSettings) -> None:
        """Change the settings; factors stay."""
        self.enabled = settings.enabled
        self.prefill.configure(settings)
        self.decode.configure(settings)

    def forget(self, instance: str) -> None:
        """Drop the factors of a removed instance."""
        self.prefill.forget(instance)
        self.decode.forget(instance)
