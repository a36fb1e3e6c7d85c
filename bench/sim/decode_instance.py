"""An instance that decodes by continuous batching: each step gives each of its requests a token."""

from __future__ import annotations

from array import array
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from tiffin.conductor.cost.latency_profiles import Profile

    from .clock import VirtualClock
    from .sim_request import SimRequest


class DecodeInstance:
    """Requests join between steps, in order of arrival, as far as there is room for their context
    and their whole answer: none is preempted. `name` is that of its node, too.

    A step's cost does not depend on the number of requests: those that end in it are in a bucket.
    """

    def __init__(
        self,
        name: str,
        clock: VirtualClock,
        profile: Profile,
        capacity_tokens: int,
        batch_max: int,
        done: Callable[[SimRequest], None],
    ) -> None:
        self.name = name
        self._clock, self._done = clock, done
        self._d0, self._d1, self._d2 = profile.decode
        self._capacity_tokens, self._batch_max = capacity_tokens, batch_max
        self._waiting: deque[SimRequest] = deque()
        self._ends: dict[int, list[SimRequest]] = {}  # by step
        self._began: dict[str, int] = {}  # by job: its first step
        self._step_ends_s = array("d")
        self._stepping = False
        self.batch = self.context_tokens = self._reserved_tokens = 0

    @property
    def step_s(self) -> float:
        """Seconds of a step of the present batch."""
        return self._d0 + self._d1 * self.batch + self._d2 * self.context_tokens

    def join(self, job: SimRequest) -> None:
        """A request's KV has come. Its first token was given by the prefill."""
        if job.trace.output_tokens <= 1:
            self._done(job)
            return
        self._waiting.append(job)
        if not self._stepping:
            self._step()

    def fits(self, job: SimRequest) -> bool:
        """Whether there is room for a request in the next step, or nothing to wait for."""
        tokens = job.trace.prompt_tokens + job.trace.output_tokens
        room = self._reserved_tokens + tokens <= self._capacity_tokens
        return not self.batch or (room and self.batch < self._batch_max)

    def _step(self) -> None:
        step = len(self._step_ends_s)
        while self._waiting and self.fits(self._waiting[0]):
            job = self._waiting.popleft()
            self._began[job.name] = step
            self._ends.setdefault(step + job.trace.output_tokens - 2, []).append(job)
            self.batch += 1
            self.context_tokens += job.trace.prompt_tokens + 1
            self._reserved_tokens += job.trace.prompt_tokens + job.trace.output_tokens
        self._stepping = self.batch > 0
        if self._stepping:
            self._clock.after(self.step_s, self._stepped)

    def _stepped(self) -> None:
        step = len(self._step_ends_s)
        self._step_ends_s.append(self._clock.now_s)
        self.context_tokens += self.batch
        for job in self._ends.pop(step, ()):
            self._end(job, step)
        self._step()

    def _end(self, job: SimRequest, step: int) -> None:
        tokens = job.trace.prompt_tokens + job.trace.output_tokens
        self.batch -= 1
        self.context_tokens -= tokens
        self._reserved_tokens -= tokens
        times = self._step_ends_s[self._began.pop(job.name) : step + 1]
        assert job.first_token_s is not None
        before = [job.first_token_s, *times[:-1]]
        job.gaps_s = [after - earlier for after, earlier in zip(times, before, strict=True)]
        self._done(job)
