"""Refusals replayed: would those who were refused have met their objectives?

First the conductor decides a whole trace, and every decision is kept; for a request that it refuses
on arrival, the one that it would have made without admission. Then the same cluster replays these
decisions. At a refusal the process forks: in the child the request is taken where it would have
gone, and everything else is as it was, so the two worlds differ in one request. The child goes on
until that request has ended and who was there with it has, and tells whether they met their
objectives.

Later decisions are kept and not made anew: a conductor that sees the request would refuse another
one in its stead, and then nobody who is refused at a full cluster was refused rightly, as any one
of them would have been in time.
"""

from __future__ import annotations

import contextlib
import os
import random
import warnings
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NoReturn

import msgspec

from tiffin.conductor.core import Conductor
from tiffin.conductor.core.pipeline import Accepted, decide
from tiffin.conductor.records import Decision, Rejection

from ..results.outcomes import attained
from .simulation import simulate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tiffin.conductor.cost.latency_profiles import Profile
    from tiffin.conductor.events.index_updates import Update
    from tiffin.conductor.records import Load, Request, RequestEvent

    from ...traces.trace import Trace
    from ..instances.sim_request import SimRequest
    from .options import SimulationOptions
    from .simulation import SimulationOutcome, TrueState

    Profiles = Callable[[str], Profile]

# As many refusals as the sample of a published comparison of admission rules would need for a share
# of 5% to be known to within 4 points: 1.96 · √(0.05 · 0.95 / 100).
SAMPLE = 100
# Seconds that a child goes on after the request has ended: its queue has felt the request by then.
AFTER_S = 30.0


@dataclass(frozen=True, slots=True)
class ReplayedRefusal:
    """What would have become of one who was refused for `reason`. `met`: it would have met its
    objectives. `broken`: others who met theirs without it, and would not have with it."""

    reason: str
    prompt_tokens: int
    met: bool
    broken: int


@dataclass(frozen=True, slots=True)
class Refusals:
    """A sample of the refusals of a simulation, replayed one by one."""

    outcome: SimulationOutcome
    refused: int
    replayed: tuple[ReplayedRefusal, ...]

    @property
    def met_share(self) -> float:
        """Of the sample, those who would have met their own objectives."""
        return self._share(sum(one.met for one in self.replayed))

    @property
    def wrong_share(self) -> float:
        """Of the sample, those who would have, and broken nobody else's."""
        return self._share(sum(one.met and not one.broken for one in self.replayed))

    def _share(self, count: int) -> float:
        return count / len(self.replayed) if self.replayed else 0.0


def replay_refusals(
    trace: Trace, options: SimulationOptions, profiles: Profiles, sample: int = SAMPLE
) -> Refusals:
    """Simulate the trace, and replay a sample of what was refused; the same for the same arguments.
    Whoever was refused after the prefill is not in it. Needs an operating system that forks, and
    decisions in order of arrival (`SimulationOptions.order`)."""
    recorder = _Recorder(options, profiles)
    outcome = simulate(trace, options, core=lambda *_: recorder, profiles=profiles)
    names = sorted(recorder.refused)
    chosen = set(random.Random(options.seed).sample(names, min(sample, len(names))))
    before = {job.name: _met(job, options) for job in outcome.jobs}
    follower = _Follower(options, profiles, recorder, chosen, before)

    def scheduler(state: TrueState) -> _Follower:
        follower.state = state
        return follower

    with follower.contained():
        simulate(trace, options, core=lambda *_: follower, scheduler=scheduler, profiles=profiles)
    return Refusals(outcome, len(names), tuple(follower.found))


def _met(job: SimRequest, options: SimulationOptions) -> bool:
    return job.ended_s is not None and attained(job, options.ttft_s, options.tbt_s)


class _Recorder(Conductor):
    """Decides, and keeps what it decided. `refused` has, by request, the rejection on arrival and
    the decision without admission."""

    def __init__(self, options: SimulationOptions, profiles: Profiles) -> None:
        super().__init__(options.settings(), dice=random.Random(options.seed), profile=profiles)
        self.outcomes: dict[str, Decision | Rejection] = {}
        self.refused: dict[str, Decision] = {}
        self.late: dict[str, Rejection] = {}

    def schedule(self, request: Request, now: float) -> Decision | Rejection:
        dice = self._parts.dice.getstate()
        outcome = self.outcomes[request.id] = super().schedule(request, now)
        if isinstance(outcome, Rejection):
            self._decide_anyway(request, dice, now)
        return outcome

    def _decide_anyway(self, request: Request, dice: tuple[object, ...], now: float) -> None:
        after = self._parts.dice.getstate()
        admission = msgspec.structs.replace(self.settings.admission, mode="off")
        settings = msgspec.structs.replace(self.settings, admission=admission)
        self._parts.dice.setstate(dice)
        forced = decide(replace(self._parts, settings=settings), request, now)
        self._parts.dice.setstate(after)
        if isinstance(forced, Accepted):
            self.refused[request.id] = forced.flight.decision

    def recheck(self, request_id: str, now: float) -> Rejection | None:
        rejection = super().recheck(request_id, now)
        if rejection is not None:
            self.late[request_id] = rejection
        return rejection


@dataclass(slots=True)
class _Child:
    """In a child: the request that was taken, and all who were seen with it."""

    name: str
    tell: int  # the end of the pipe
    jobs: dict[str, SimRequest] = field(default_factory=dict)


class _Follower(Conductor):
    """Repeats what was decided, and hears of nothing."""

    def __init__(
        self,
        options: SimulationOptions,
        profiles: Profiles,
        recorder: _Recorder,
        chosen: set[str],
        before: dict[str, bool],
    ) -> None:
        super().__init__(options.settings(), profile=profiles)
        self.state: TrueState | None = None
        self.found: list[ReplayedRefusal] = []
        self._options, self._recorder = options, recorder
        self._chosen, self._before = chosen, before
        self._child: _Child | None = None

    def schedule(self, request: Request, now: float) -> Decision | Rejection:
        self._watch(now)
        outcome = self._recorder.outcomes[request.id]
        if not isinstance(outcome, Rejection) or request.id not in self._chosen or self._child:
            return outcome
        if not self._forked(request, outcome):
            return outcome
        return self._recorder.refused[request.id]

    def recheck(self, request_id: str, now: float) -> Rejection | None:
        return self._recorder.late.get(request_id)

    def tick(self, now: float) -> list[str]:
        self._watch(now)
        return []

    def heartbeat(self, instance: str, load: Load, now: float) -> None:
        pass

    def observe(self, event: RequestEvent, now: float) -> None:
        pass

    def apply(self, update: Update, now: float) -> None:
        pass

    @contextlib.contextmanager
    def contained(self) -> Iterator[None]:
        """Whatever happens in here, no child goes on after it."""
        try:
            yield
            if self._child is not None:  # the trace has ended first
                self._tell(self._child)
        finally:
            if self._child is not None:
                os._exit(1)

    def _forked(self, request: Request, rejection: Rejection) -> bool:
        """Whether this is the child; the parent goes on once it has heard of it."""
        listen, tell = os.pipe()
        with warnings.catch_warnings():  # the child computes alone and needs no other thread
            warnings.simplefilter("ignore", DeprecationWarning)
            process = os.fork()
        if not process:
            os.close(listen)
            self._child = _Child(request.id, tell)
            return True
        os.close(tell)
        with os.fdopen(listen, "rb") as told:
            met, broken = map(int, told.read().split())
        os.waitpid(process, 0)
        self.found.append(
            ReplayedRefusal(rejection.reason, request.prompt_tokens, bool(met), broken)
        )
        return False

    def _watch(self, now: float) -> None:
        """In a child: tell what became of the request once it is known, and end."""
        child, state = self._child, self.state
        if child is None or state is None:
            return
        child.jobs.update(state.running)
        job = child.jobs.get(child.name)
        ended_s = job.ended_s if job is not None else None
        if ended_s is not None and now >= ended_s + AFTER_S:
            self._tell(child)

    def _tell(self, child: _Child) -> NoReturn:
        job = child.jobs[child.name]
        broken = sum(
            self._before[name] and other.ended_s is not None and not _met(other, self._options)
            for name, other in child.jobs.items()
        )
        os.write(child.tell, f"{int(_met(job, self._options))} {broken}".encode())
        os._exit(0)
