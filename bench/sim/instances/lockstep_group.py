"""Decode instances that step together: those of a model whose experts are spread over all of them.

Every layer ends with an exchange between all, so each step takes as long as that of the slowest.
A request's context may be in shards on several of them: each attends to its own shard, and one, the
request's binding, does the rest.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from tiffin.conductor.cost.latency_profiles import Profile

    from ..clock import ScheduledEvent, VirtualClock
    from .sim_request import SimRequest


@dataclass(frozen=True, slots=True)
class Shards:
    """Where a request's context and answer will be: `tokens` on each of the `members`."""

    members: tuple[int, ...]
    tokens: tuple[int, ...]
    binding: int


class LockstepGroup:
    """`size` instances with `capacity_tokens` each. A request joins between steps, in order of
    arrival, when all of its shards fit. `exchange_s`: by how much a step takes longer if a context
    of it is in more than one shard. `done` is called with each job.

    While nobody joins and nobody ends, a step is as long as the one before, but for the tokens that
    are added; so a run of steps is one event.
    """

    def __init__(
        self,
        clock: VirtualClock,
        profile: Profile,
        size: int,
        capacity_tokens: int,
        exchange_s: float,
        done: Callable[[SimRequest], None],
    ) -> None:
        self._clock, self._done = clock, done
        self._d0, self._d1, self._d2 = profile.decode
        self._capacity_tokens, self._exchange_s = capacity_tokens, exchange_s
        self._waiting: deque[tuple[SimRequest, Shards]] = deque()
        self._running: dict[str, tuple[SimRequest, Shards]] = {}
        self._left: dict[str, int] = {}  # by job: tokens that it still gets
        self._run: ScheduledEvent | None = None
        self._run_from_s, self._run_step_s, self._run_steps = 0.0, 0.0, 0
        self.batch: NDArray[np.int64] = np.zeros(size, np.int64)
        self.held_tokens: NDArray[np.int64] = np.zeros(size, np.int64)
        self._spread = 0  # running requests with several shards
        self._moving: dict[str, int] = {}  # by job: its next binding
        self._moving_s = 0.0

    def join(self, job: SimRequest, shards: Shards) -> None:
        """A request's KV has come."""
        self._waiting.append((job, shards))
        if self._run is None:
            self._begin()
        elif len(self._waiting) == 1:
            self._cut()

    def rebind(self, name: str, binding: int, seconds: float) -> None:
        """From the next step on, another member runs everything but attention for a request. That
        step takes `seconds` longer. No effect on one that has ended."""
        if name in self._running:
            self._moving[name] = binding
            self._moving_s += seconds
            self._cut()

    def _move(self) -> float:
        """Change the bindings that are to be changed; returns by how much the step is longer."""
        for name, binding in self._moving.items():
            if name in self._running:
                job, shards = self._running[name]
                self._hold(shards, -1)
                self._running[name] = job, replace(shards, binding=binding)
                self._hold(self._running[name][1], 1)
        self._moving.clear()
        seconds, self._moving_s = self._moving_s, 0.0
        return seconds

    def _begin(self) -> None:
        moving_s = self._move()
        while self._waiting and self._fits(self._waiting[0][1]):
            job, shards = self._waiting.popleft()
            self._running[job.name] = job, shards
            self._left[job.name] = job.trace.output_tokens - 1
            self._hold(shards, 1)
        if not self._running:
            return
        step_s = self._d0 + self._d1 * self.batch + self._d2 * self.held_tokens
        self._run_step_s = float(step_s.max()) + (self._exchange_s if self._spread else 0.0)
        self._run_from_s, self._run_steps = self._clock.now_s, min(self._left.values())
        if moving_s:
            self._run_step_s += moving_s
            self._run_steps = 1
        self._run = self._clock.after(self._run_steps * self._run_step_s, self._ran)

    def _fits(self, shards: Shards) -> bool:
        held = self.held_tokens[list(shards.members)] + np.array(shards.tokens)
        return not self._running or bool((held <= self._capacity_tokens).all())

    def _cut(self) -> None:
        """End the run after the step of now."""
        assert self._run is not None
        steps = int((self._clock.now_s - self._run_from_s) / self._run_step_s) + 1
        if steps < self._run_steps:
            self._run.cancel()
            self._run_steps = steps
            end_s = self._run_from_s + steps * self._run_step_s
            self._run = self._clock.at(end_s, self._ran)

    def _ran(self) -> None:
        self._run = None
        for name, (job, shards) in list(self._running.items()):
            job.gaps_s += [self._run_step_s] * self._run_steps
            self._left[name] -= self._run_steps
            if not self._left[name]:
                del self._running[name], self._left[name]
                self._hold(shards, -1)
                self._done(job)
        self._begin()

    def _hold(self, shards: Shards, sign: int) -> None:
        self.held_tokens[list(shards.members)] += sign * np.array(shards.tokens)
        self.batch[shards.binding] += sign
        self._spread += sign * (len(shards.members) > 1)
