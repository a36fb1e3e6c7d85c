"""Records simulations: what really happened is then known."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from tiffin.bench.sim.cluster.simulation import SimulationOptions, simulate
from tiffin.conductor.core import Conductor
from tiffin.conductor.recording.recorder import Recorder
from tiffin.conductor.recording.recording_file import RecordingFile

if TYPE_CHECKING:
    from pathlib import Path

    from tiffin.bench.sim.cluster.simulation import Profiles, SimulationOutcome
    from tiffin.bench.traces.trace import Trace
    from tiffin.conductor.records import Decision, Rejection, Request, RequestEvent

# Everything is told at once, so that the conductor observes what happens.
TRUTH = SimulationOptions(prefill=3, decode=2, late_s=0.0, seed=5)


class RecordedCore(Conductor):
    """A core whose recorder is told what a service tells it."""

    def __init__(self, options: SimulationOptions, profiles: Profiles, recorder: Recorder) -> None:
        dice = random.Random(options.seed)
        super().__init__(options.settings(), dice=dice, profile=profiles)
        self._recorder = recorder
        recorder.begin(self.settings, 0.0, 1e9)

    def schedule(self, request: Request, now: float) -> Decision | Rejection:
        outcome = super().schedule(request, now)
        self._recorder.scheduled(request, outcome, now)
        return outcome

    def observe(self, event: RequestEvent, now: float) -> None:
        super().observe(event, now)
        self._recorder.observed(event, now)

    def tick(self, now: float) -> list[str]:
        self._recorder.look(self, now)
        return super().tick(now)


def record(trace: Trace, options: SimulationOptions, path: Path) -> SimulationOutcome:
    """Simulate a trace and write the recording that its conductor would have made."""
    with RecordingFile(path) as file:
        recorder = Recorder(file.put)
        outcome = simulate(
            trace, options, core=lambda one, profiles: RecordedCore(one, profiles, recorder)
        )
    return outcome
