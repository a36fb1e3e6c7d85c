"""Bursts: the arrivals of a trace as a Markov-modulated Poisson process with two states.

A state, calm or burst, lasts an exponentially distributed time and says how fast the trace's own
clock runs. What arrives as a Poisson process on that clock then arrives as the modulated one; in
any trace the order stays, and so does what its requests share.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING

from tiffin.kvstore.errors import InvalidInput

if TYPE_CHECKING:
    from .trace import Trace


@dataclass(frozen=True, slots=True)
class Bursts:
    """How many times the calm rate a burst has, and how long the states last on average."""

    factor: float
    calm_s: float = 120.0
    burst_s: float = 20.0

    @property
    def calm_speed(self) -> float:
        """Of the trace's clock while calm, so that its rate stays in the long run."""
        return (self.calm_s + self.burst_s) / (self.calm_s + self.burst_s * self.factor)


def with_bursts(trace: Trace, bursts: Bursts, seed: int) -> Trace:
    """The trace with its arrivals in bursts; the same for the same seed."""
    if min(bursts.factor, bursts.calm_s, bursts.burst_s) <= 0:
        raise InvalidInput(f"bursts have a factor and durations above 0, not {bursts}")
    clock = _BurstClock(bursts, Random(seed))
    moved = [replace(r, arrival_s=round(clock.wall_s(r.arrival_s), 6)) for r in trace.requests]
    return replace(trace, name=f"{trace.name} in bursts", requests=tuple(moved))


class _BurstClock:
    """From times on the trace's own clock, asked in ascending order, to those on the wall."""

    def __init__(self, bursts: Bursts, chance: Random) -> None:
        self._bursts = bursts
        self._chance = chance
        self._bursting = True  # so that the first state is calm
        self._own_s = self._wall_s = 0.0  # when the state began, on both clocks
        self._lasts_s = 0.0  # on the wall
        self._speed = 1.0

    def wall_s(self, own_s: float) -> float:
        """When the wall's clock shows what the trace's shows at `own_s`."""
        while own_s > self._own_s + self._lasts_s * self._speed:
            self._change()
        return self._wall_s + (own_s - self._own_s) / self._speed

    def _change(self) -> None:
        self._own_s += self._lasts_s * self._speed
        self._wall_s += self._lasts_s
        self._bursting = not self._bursting
        mean_s = self._bursts.burst_s if self._bursting else self._bursts.calm_s
        self._lasts_s = self._chance.expovariate(1 / mean_s)
        self._speed = self._bursts.calm_speed * (self._bursts.factor if self._bursting else 1.0)
