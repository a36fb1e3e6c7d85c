"""An instance that decodes by continuous batching: each step gives each of its requests a token."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import deque
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from tiffin.conductor.cost.latency_profiles import Profile

    from ..clock import ScheduledEvent, VirtualClock
    from .sim_request import SimRequest

    # Who has left, and the times of its tokens after the first one.
    Left = Callable[[SimRequest, array[float]], None]


class DecodeInstance:
    """Requests join between steps, in order of arrival. `name` is that of its node, too.

    They join as far as there is room for their context and their whole answer: none is preempted.
    With `comes_back_s`, the length of an answer is not known ahead: they join as far as there is
    room for their context, and when it has grown too large, the last one that joined leaves, to
    come back first. The step in which it comes back is longer by `comes_back_s` of its context's
    tokens.

    While nobody joins and nobody ends, the ends of all steps are known ahead. So a run of steps is
    one event; who joins in the midst of it cuts it off after the step of then.
    """

    def __init__(
        self,
        name: str,
        clock: VirtualClock,
        profile: Profile,
        capacity_tokens: int,
        batch_max: int,
        done: Callable[[SimRequest], None],
        comes_back_s: Callable[[int], float] | None = None,
    ) -> None:
        self.name = name
        self._clock, self._done, self._comes_back_s = clock, done, comes_back_s
        self._d0, self._d1, self._d2 = profile.decode
        self._capacity_tokens, self._batch_max = capacity_tokens, batch_max
        self._waiting: deque[SimRequest] = deque()
        self._ends: dict[int, list[SimRequest]] = {}  # by step
        self._began: dict[str, int] = {}  # by job, in order of joining: its first step
        # By job that was decoded before, and preempted or handed over: the times of its tokens.
        self._given_s: dict[str, array[float]] = {}
        self._handed_over: set[str] = set()  # those whose KV came with them
        self._leaving: dict[str, Left] = {}  # by job
        self._step_ends_s = array("d")  # of all steps so far, and of those of the run
        self._run_from = 0  # the run's first step
        self._run_ends: ScheduledEvent | None = None
        self._context_tokens = self._reserved_tokens = 0  # at the begin of the run
        self.batch = self.preempted = 0

    @property
    def context_tokens(self) -> int:
        """Of all requests of the batch, now."""
        ended = bisect_right(self._step_ends_s, self._clock.now_s, lo=self._run_from)
        return self._context_tokens + self.batch * (ended - self._run_from)

    @property
    def step_s(self) -> float:
        """Seconds of a step of the present batch."""
        return self._d0 + self._d1 * self.batch + self._d2 * self.context_tokens

    def answered(self) -> dict[str, int]:
        """By request of the batch, its tokens after the first one, so far."""
        ended = bisect_right(self._step_ends_s, self._clock.now_s, lo=self._run_from)
        return {
            name: len(self._given_s.get(name, ())) + ended - began
            for name, began in self._began.items()
        }

    def join(self, job: SimRequest, given_s: array[float] | None = None) -> None:
        """A request's KV has come. Its first token was given by the prefill, those at the times
        `given_s` by another instance that decoded it."""
        if given_s is not None:
            self._given_s[job.name] = given_s
            self._handed_over.add(job.name)
        if job.trace.output_tokens <= 1:
            self._done(job)
            return
        self._waiting.append(job)
        if self._run_ends is None:
            self._run()
        elif len(self._waiting) == 1 and self.fits(job):
            self._cut()

    def fits(self, job: SimRequest) -> bool:
        """Whether there is room for a request in the next step, or nothing to wait for."""
        if self._comes_back_s is None:
            needed = self._reserved_tokens + job.trace.prompt_tokens + job.trace.output_tokens
        else:  # a token more for each, or it would leave at once
            needed = self.context_tokens + self._context_of(job) + self.batch + 1
        room = needed <= self._capacity_tokens
        return not self.batch or (room and self.batch < self._batch_max)

    def leave(self, name: str, left: Left) -> None:
        """A request of the batch leaves after the present step, if it does not end with it."""
        if name not in self._began:
            return
        self._leaving[name] = left
        if self._run_ends is not None:
            self._cut()
        else:
            self._let_leave()

    def end_now(self, name: str) -> None:
        """The answer of a request of the batch ends with the token of the present step."""
        began = self._began.get(name)
        if began is None or self._run_ends is None:
            return
        step = bisect_left(self._step_ends_s, self._clock.now_s, lo=self._run_from)
        job = next(job for jobs in self._ends.values() for job in jobs if job.name == name)
        tokens = len(self._given_s.get(name, ())) + step - began + 2
        if tokens >= job.trace.output_tokens:
            return
        for ends in [ends for ends, jobs in self._ends.items() if job in jobs]:
            self._ends[ends].remove(job)
            if not self._ends[ends]:
                del self._ends[ends]
        self._ends.setdefault(step, []).append(job)
        self._reserved_tokens -= job.trace.output_tokens - tokens
        job.cut_at(tokens)
        self._cut()

    def _run(self) -> None:
        """Let those leave for whom there is no room, and join who fit, and step until somebody
        ends or has to leave."""
        step = self._run_from = len(self._step_ends_s)
        if self._comes_back_s is not None:
            while self.batch > 1 and self._context_tokens + self.batch > self._capacity_tokens:
                self._preempt(step)
        seconds_more = 0.0
        while self._waiting and self.fits(self._waiting[0]):
            seconds_more += self._joins(self._waiting.popleft(), step)
        if not self.batch:
            return
        count = min(self._ends) - step + 1
        if self._comes_back_s is not None and self.batch > 1:
            room = (self._capacity_tokens - self._context_tokens) // self.batch
            count = min(count, max(room, 1))
        context = self._context_tokens + self.batch * np.arange(count)
        seconds = self._d0 + self._d1 * self.batch + self._d2 * context
        seconds[0] += self._clock.now_s + seconds_more
        self._step_ends_s.frombytes(np.cumsum(seconds).tobytes())
        self._run_ends = self._clock.at(self._step_ends_s[-1], self._ran)

    def _context_of(self, job: SimRequest) -> int:
        """Tokens of a request that waits: its prompt, and what was answered before."""
        return job.trace.prompt_tokens + 1 + len(self._given_s.get(job.name, ()))

    def _joins(self, job: SimRequest, step: int) -> float:
        """A request joins; returns by how many seconds the step is longer."""
        given, context = len(self._given_s.get(job.name, ())), self._context_of(job)
        self._began[job.name] = step
        self._ends.setdefault(step + job.trace.output_tokens - 2 - given, []).append(job)
        self.batch += 1
        self._context_tokens += context
        self._reserved_tokens += job.trace.prompt_tokens + job.trace.output_tokens
        came_whole = job.name in self._handed_over
        self._handed_over.discard(job.name)
        if self._comes_back_s is None or job.name not in self._given_s or came_whole:
            return 0.0
        return self._comes_back_s(context)

    def _preempt(self, step: int) -> None:
        """The last one that joined leaves before this step."""
        self._waiting.appendleft(self._take(next(reversed(self._began)), step))
        self.preempted += 1

    def _let_leave(self) -> None:
        """Let those go who are to leave, before the next step."""
        for name, left in self._leaving.items():
            if name in self._began:
                left(self._take(name, len(self._step_ends_s)), self._given_s.pop(name))
        self._leaving.clear()

    def _take(self, name: str, step: int) -> SimRequest:
        """Take a request out of the batch before this step."""
        began = self._began.pop(name)
        given_s = self._given_s.setdefault(name, array("d"))
        given = len(given_s)
        given_s.extend(self._step_ends_s[began:step])
        ends, job = next(
            (ends, job) for ends, jobs in self._ends.items() for job in jobs if job.name == name
        )
        self._ends[ends].remove(job)
        if not self._ends[ends]:
            del self._ends[ends]
        self.batch -= 1
        self._context_tokens -= job.trace.prompt_tokens + 1 + given + step - began
        self._reserved_tokens -= job.trace.prompt_tokens + job.trace.output_tokens
        return job

    def _cut(self) -> None:
        """End the run after the step of now."""
        assert self._run_ends is not None
        step = bisect_left(self._step_ends_s, self._clock.now_s, lo=self._run_from)
        if step < len(self._step_ends_s) - 1:
            del self._step_ends_s[step + 1 :]
            self._run_ends.cancel()
            self._run_ends = self._clock.at(self._step_ends_s[-1], self._ran)

    def _ran(self) -> None:
        self._run_ends = None
        step = len(self._step_ends_s) - 1
        self._context_tokens += self.batch * (step + 1 - self._run_from)
        self._run_from = step + 1
        for job in self._ends.pop(step, ()):
            self._end(job, step)
        self._let_leave()
        self._run()

    def _end(self, job: SimRequest, step: int) -> None:
        tokens = job.trace.prompt_tokens + job.trace.output_tokens
        self.batch -= 1
        self._context_tokens -= tokens
        self._reserved_tokens -= tokens
        times = self._given_s.pop(job.name, array("d"))
        times.extend(self._step_ends_s[self._began.pop(job.name) : step + 1])
        assert job.first_token_s is not None
        job.gaps_s = np.diff(times, prepend=job.first_token_s).tolist()
        self._done(job)
