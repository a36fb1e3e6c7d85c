"""An autoscaler that follows the conductor's advice: it starts instances, and drains them.

The plan says how many instances there should be; which roles they get follows from the same
numbers, by the planner's own rule for a split.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tiffin.conductor.pool.capacity_model import best_split
from tiffin.conductor.records import Role, Status

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tiffin.conductor.core import Conductor
    from tiffin.conductor.pool.planner import FleetPlan


class Autoscaler:
    """For the instances of a conductor that serves one model, each of which prefills or decodes."""

    def __init__(self, core: Conductor) -> None:
        self._core = core
        self._leaving: list[str] = []

    def follow(self, plan: FleetPlan, starting: Sequence[Role], now: float) -> list[Role]:
        """Roles of the instances to start now. `starting`: of those that do not serve yet. What is
        too much is drained, but not while others start or flip: the plan knows only what serves."""
        ready = self._ready()
        coming = [*starting, *(role for role, _ in self._core.steering.flipping().values())]
        missing = self._wanted(plan)
        for role in (*coming, *ready.values()):
            missing[role] -= 1
        started = []
        for _ in range(plan.instances_wanted - len(ready) - len(coming)):
            role = max(missing, key=lambda role: missing[role])
            missing[role] -= 1
            started.append(role)
        if not coming:
            for _ in range(len(ready) - plan.instances_wanted):
                role = min(missing, key=lambda role: missing[role])
                missing[role] += 1
                self._drain([name for name, other in self._ready().items() if other is role], now)
        return started

    def empty(self) -> list[str]:
        """Instances that were drained and have ended their requests: they can go."""
        gone = [name for name in self._leaving if not self._core.requests_at(name)]
        self._leaving = [name for name in self._leaving if name not in gone]
        return gone

    def _wanted(self, plan: FleetPlan) -> dict[Role, int]:
        needed = {reason.name: reason.value for reason in plan.reasons}
        flips, wanted = self._core.settings.planner.flips, plan.instances_wanted
        least = (flips.prefill_min, flips.decode_min)
        prefill = best_split(wanted, needed["prefill_needed"], needed["decode_needed"], least)
        return {Role.PREFILL: prefill, Role.DECODE: wanted - prefill}

    def _ready(self) -> dict[str, Role]:
        """Instances that get requests."""
        cluster = self._core.cluster
        rows = {name: cluster.row(name) for name in cluster.names}
        return {
            name: cluster.role(row)
            for name, row in rows.items()
            if cluster.status[row] is Status.READY
        }

    def _drain(self, names: Sequence[str], now: float) -> None:
        name = min(names, key=self._core.requests_at)
        self._core.drain(name, now)
        self._leaving.append(name)
