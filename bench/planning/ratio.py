"""How many instances of which role, and how parallel each, on so many GPUs: the fast search. Pure.

A fleet is tried without a conductor: its prefill instances share one queue, and of its decode
instances one is simulated, with its share of the requests (DistServe's search simulates one
instance of each role, too). For each pair of parallelisms the search starts where both roles would
be equally busy, and goes on to the neighbour that serves more, as long as there is one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from .attainment import goodput, tbt_s, ttft_s

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .attainment import Goals, Unit
    from .workload import Workload

    # What is asked of so many prefill instances: the more there are, the more is cached.
    WorkloadOf = Callable[[int], Workload]

# A pair of parallelisms is searched only if, with both roles equally busy, it has at least so much
# of the best one's throughput.
_PROMISING = 0.8


@dataclass(frozen=True, slots=True)
class Fleet:
    """Instances of both roles."""

    prefill: Unit
    decode: Unit
    prefills: int
    decodes: int

    @property
    def gpus(self) -> int:
        """Of all instances."""
        return self.prefill.gpus * self.prefills + self.decode.gpus * self.decodes

    @property
    def label(self) -> str:
        """For people."""
        return f"{self.prefills}P {self.prefill.label} + {self.decodes}D {self.decode.label}"


@dataclass(frozen=True, slots=True)
class Estimate:
    """A fleet, and the requests per second it serves within the objectives."""

    fleet: Fleet
    goodput: float


class Search:
    """For one workload and its objectives; what has been tried is kept."""

    def __init__(
        self,
        workload_of: WorkloadOf,
        goals: Goals,
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._workload_of, self._goals, self._tell = workload_of, goals, tell
        self._tried: dict[Fleet, Estimate] = {}

    def best(self, units: Sequence[Unit], gpus: int) -> list[Estimate]:
        """All fleets that were tried on at most so many GPUs, the best first. Empty if no two
        instances fit."""
        starts = [
            start
            for prefill in units
            for decode in units
            if (start := self._balanced(prefill, decode, gpus)) is not None
        ]
        starts.sort(key=lambda start: -start.goodput)
        for start in starts:
            if start.goodput >= _PROMISING * starts[0].goodput:
                self.climb(start.fleet, gpus)
        return self.ranked()

    def ranked(self) -> list[Estimate]:
        """What was tried, the best first; of equals the one with fewer GPUs."""
        return sorted(self._tried.values(), key=lambda one: (-one.goodput, one.fleet.gpus))

    def climb(self, fleet: Fleet, gpus: int) -> Estimate:
        """From neighbour to neighbour, as long as one serves more."""
        found = self.estimate(fleet)
        while True:
            around = [self.estimate(one) for one in neighbours(found.fleet, gpus)]
            better = max(around, key=lambda one: one.goodput, default=found)
            if better.goodput <= found.goodput:
                return found
            found = better

    def estimate(self, fleet: Fleet) -> Estimate:
        """What a fleet serves."""
        if fleet not in self._tried:
            self._tell(fleet.label)
            workload = self._workload_of(fleet.prefills)
            start = self._throughput(fleet)

            def share(faster: Workload) -> float:
                return fleet_share(faster, fleet, self._goals)

            served = goodput(share, workload, self._goals, start=start) if start else 0.0
            self._tried[fleet] = Estimate(fleet, served)
        return self._tried[fleet]

    def _balanced(self, prefill: Unit, decode: Unit, gpus: int) -> Estimate | None:
        """The fleet in which both roles would be equally busy, and its throughput."""
        fleets = [
            Fleet(prefill, decode, count, (gpus - count * prefill.gpus) // decode.gpus)
            for count in range(1, gpus // prefill.gpus + 1)
        ]
        possible = [fleet for fleet in fleets if fleet.decodes > 0]
        if not possible:
            return None
        rates = [Estimate(fleet, self._throughput(fleet)) for fleet in possible]
        return max(rates, key=lambda one: one.goodput)

    def _throughput(self, fleet: Fleet) -> float:
        """Requests per second with all instances always busy and decode steps as long as the
        objective, or as the room for KV allows."""
        workload, goals = self._workload_of(1), self._goals
        prompt, cached = workload.prompt_tokens, workload.cached_tokens
        c0, c1, c2 = fleet.prefill.profile.prefill
        prefill_s = c0 + c1 * (prompt - cached) + c2 * (prompt * prompt - cached * cached)
        steps = np.maximum(workload.output_tokens - 1, 0)
        context = prompt + steps / 2
        mean_context = float(np.average(context, weights=steps)) if steps.any() else 1.0
        d0, d1, d2 = fleet.decode.profile.decode
        room = min(fleet.decode.kv_tokens / mean_context, fleet.decode.batch_max)
        batch = min(room, (goals.tbt_s - d0) / (d1 + d2 * mean_context))
        if batch <= 0:
            return 0.0
        step_s = d0 + (d1 + d2 * mean_context) * batch
        decoded = fleet.decodes * batch / (step_s * max(float(steps.mean()), 1e-9))
        return min(fleet.prefills / float(prefill_s.mean()), decoded)


def fleet_share(workload: Workload, fleet: Fleet, goals: Goals) -> float:
    """Share of requests that meet both objectives, over those of one decode instance."""
    waited_s = ttft_s(workload, fleet.prefill, goals, fleet.prefills)
    which = slice(0, None, fleet.decodes)
    part, waited_s = workload.pick(which), waited_s[which]
    gaps_s = tbt_s(part, part.arrivals_s + waited_s, fleet.decode, goals)
    return float(np.mean((waited_s <= goals.ttft_s) & (gaps_s <= goals.tbt_s)))


def neighbours(fleet: Fleet, gpus: int) -> list[Fleet]:
    """One prefill instance more and one less, with as many decode instances as then fit."""
    found = []
    for prefills in (fleet.prefills - 1, fleet.prefills + 1):
        decodes = (gpus - prefills * fleet.prefill.gpus) // fleet.decode.gpus
        if prefills > 0 and decodes > 0:
            found.append(replace(fleet, prefills=prefills, decodes=decodes))
    return found
