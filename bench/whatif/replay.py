"""Recorded requests come again, at a simulated cluster that the conductor's own core schedules."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from tiffin.conductor.core import Conductor
from tiffin.conductor.records import Objectives

from ..sim.cluster.simulation import SimulationOptions, simulate
from ..traces.recordings import trace_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from tiffin.conductor.records import Decision, Rejection, Request

    from ..sim.cluster.simulation import Profiles, SimulationOutcome
    from ..traces.recordings import Recording
    from .setup import Setup


class ReplayCore(Conductor):
    """The core, which is told of each request what it was told when it was recorded: objectives,
    class, tenant, expected lengths. Its settings change when they did."""

    def __init__(self, recording: Recording, setup: Setup, profiles: Profiles) -> None:
        (_, first), *later = setup.settings
        dice = random.Random(setup.options.seed)
        super().__init__(first, dice=dice, profile=profiles)
        self._requests, self._later = recording.requests, later

    def schedule(self, request: Request, now: float) -> Decision | Rejection:
        """See `Conductor`. The simulator's request `r7` is the recording's number 7."""
        while self._later and self._later[0][0] <= now:
            self.patch(msgspec.to_builtins(self._later.pop(0)[1]), now)
        told = self._requests[int(request.id.removeprefix("r"))]
        return super().schedule(
            replace(
                request,
                objectives=Objectives(told.ttft_objective_s, told.tbt_objective_s),
                priority=told.priority,
                tenant=told.tenant,
                output_tokens=told.output_tokens_expected,
                output_tokens_max=told.output_tokens_max,
            ),
            now,
        )


def replay(
    recording: Recording, setup: Setup, tell: Callable[[float], None] = lambda share: None
) -> SimulationOutcome:
    """Simulate the recording's requests at the setup. Equal arguments give equal outcomes. `tell`
    is told the share that has ended. Raises InvalidRequest."""

    def core(options: SimulationOptions, profiles: Profiles) -> Conductor:
        return ReplayCore(recording, setup, profiles)

    return simulate(
        trace_of(recording), setup.options, tell, core=core, profiles=lambda name: setup.profile
    )
