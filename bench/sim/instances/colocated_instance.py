"""An instance that prefills and decodes on the same GPUs, as vLLM 0.5.1 does, in its three modes.

*plain*: prompts first. A step computes the waiting prompts that fit in its budget of tokens, whole,
and all that decodes stands still meanwhile. *prefix*: the same, and blocks of earlier prompts stay
in the memory for KV until it is needed. *chunked*: a step gives each request that decodes a token,
and spends the rest of its budget on the next chunk of a prompt.

A step takes `c0 + Σ (c1 (q - p) + c2 (q² - p²))` seconds for the tokens p to q of its prompts, and
`d1 batch + d2 context` more if it decodes, too: linear layers process all of its tokens in one
pass, and attention reads the context of both. The fixed part is there once, as the weights are read
once: c0, the measured one of whole prompts, in a step that begins a prompt; d0, that of any step,
in one that goes on with a prompt or only decodes. (`chunk_fixed_s` puts another in place of d0 for
the former.)

A run of steps that only decode is one event: with the same batch each takes `d2 batch` longer than
the one before. What arrives meanwhile cuts the run at the end of the step that it meets.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..nodes.block_cache import BlockCache
from .engine_options import EngineMode

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tiffin.conductor.cost.latency_profiles import Profile

    from ..clock import ScheduledEvent, VirtualClock
    from .engine_options import EngineOptions
    from .sim_request import SimRequest


@dataclass(slots=True, eq=False)
class _Sequence:
    """A request in the engine. `times_s`: of its tokens, up to when it last began to decode;
    `computed`: tokens whose KV is there, while it is prefilled; `began`: the first decode step that
    gives it a token."""

    job: SimRequest
    number: int
    times_s: list[float] = field(default_factory=list)
    computed: int = 0
    began: int = 0

    @property
    def tokens(self) -> int:
        """What has to be computed before its next token, if nothing is there."""
        return self.job.trace.prompt_tokens + len(self.times_s)

    @property
    def last_step(self) -> int:
        """The decode step of its last token."""
        return self.began + self.job.trace.output_tokens - len(self.times_s) - 1


class _Part(NamedTuple):
    """The tokens `start` to `stop` of a prompt, which a step computes."""

    sequence: _Sequence
    start: int
    stop: int
    first: bool


class ColocatedInstance:
    """`done` is called with each request that has ended or, as too long, is refused."""

    def __init__(
        self,
        clock: VirtualClock,
        profile: Profile,
        options: EngineOptions,
        block_tokens: int,
        done: Callable[[SimRequest], None],
    ) -> None:
        self._clock, self._options, self._done = clock, options, done
        self._c0, self._c1, self._c2 = profile.prefill
        self._d0, self._d1, self._d2 = profile.decode
        self._block_tokens = block_tokens
        self._cache = BlockCache(0)
        self._waiting: deque[_Sequence] = deque()
        self._partial: _Sequence | None = None  # chunked: computed up to somewhere
        self._swapped: deque[_Sequence] = deque()
        self._decoding: dict[_Sequence, None] = {}
        self._ends: dict[int, list[_Sequence]] = {}  # those that decode, by their last step
        self._step_ends_s = array("d")  # of steps that decode
        self._run: ScheduledEvent | None = None  # of steps that only decode
        self._run_begin = 0
        self._stepping = False
        self._context_tokens = 0  # of those that decode
        self._held_tokens = 0  # of those that decode or are prefilled
        self._keyed_tokens = 0  # of these, in blocks that the cache may hold
        self._arrived = 0
        self.uncomputed_tokens = 0  # of prompts, waiting or in the current step
        self.unfinished = 0
        self.preempted = 0

    @property
    def held_tokens(self) -> int:
        """Tokens whose KV has a place: 0 when nothing runs."""
        return self._held_tokens

    def enqueue(self, job: SimRequest) -> None:
        """A prompt arrives."""
        if job.trace.prompt_tokens + job.trace.output_tokens > self._options.longest:
            job.rejected = "too_long"
            self._done(job)
            return
        self._arrived += 1
        self.unfinished += 1
        self._wait(_Sequence(job, self._arrived), first=False)
        if not self._stepping:
            self._next()
        else:
            self._cut_run()

    # -- steps -------------------------------------------------------------------------------------

    def _next(self) -> None:
        """Begin a step, or a run of steps that only decode."""
        parts = [] if self._swapped else self._parts()
        self._stepping = True
        if parts and self._options.mode is not EngineMode.CHUNKED:
            self._compute(parts, 0, 0.0)
            return
        swap_s = self._make_room() or self._swap_in()
        if parts:
            self._compute(parts, len(self._decoding), swap_s)
        elif self._decoding:
            self._decode(swap_s)
        else:
            self._stepping = False

    def _parts(self) -> list[_Part]:
        """The prompts, or chunks, of the next step."""
        chunked = self._options.mode is EngineMode.CHUNKED
        budget = self._options.step_tokens - (len(self._decoding) if chunked else 0)
        parts: list[_Part] = []
        while budget > 0:
            sequence, first = self._partial, False
            if sequence is None:
                if not self._admissible(len(parts), None if chunked else budget):
                    break
                sequence, first = self._admit(), True
            start, whole = sequence.computed, sequence.tokens - sequence.computed
            sequence.computed += min(whole, budget) if chunked else whole
            parts.append(_Part(sequence, start, sequence.computed, first))
            # vLLM 0.5.1 counts a prompt's cached tokens, too.
            budget -= sequence.computed - start if chunked else sequence.tokens
            self._partial = sequence if sequence.computed < sequence.tokens else None
        return parts

    def _admissible(self, admitted: int, budget: int | None) -> bool:
        """Whether the first that waits can begin."""
        if not self._waiting:
            return False
        tokens = self._waiting[0].tokens
        return (
            len(self._decoding) + admitted < self._options.sequences_max
            and (budget is None or tokens <= budget)
            and self._held_tokens + tokens + 1 <= self._options.admissible_tokens
        )

    def _admit(self) -> _Sequence:
        sequence = self._waiting.popleft()
        job = sequence.job
        self._held_tokens += sequence.tokens + 1
        self._keyed_tokens += len(job.keys) * self._block_tokens
        sequence.computed = 0
        if self._options.mode is EngineMode.PREFIX:
            blocks = self._cache.match(job.keys)
            self._cache.use(job.keys[:blocks])
            sequence.computed = min(blocks * self._block_tokens, sequence.tokens - 1)
            if not sequence.times_s:
                job.cached_tokens = sequence.computed
        return sequence

    def _compute(self, parts: Sequence[_Part], batch: int, swap_s: float) -> None:
        """A step with prompts; `batch` requests get a token in it, too."""
        again_s = self._options.chunk_fixed_s
        fixed_s = self._d0 if again_s is None else again_s
        if any(part.first for part in parts):
            fixed_s = self._c0
        seconds = fixed_s + swap_s
        for sequence, p, q, _ in parts:
            work_s = self._c1 * (q - p) + self._c2 * (q * q - p * p)
            sequence.job.compute_s += fixed_s / len(parts) + work_s
            seconds += work_s
        if batch:
            seconds += self._d1 * batch + self._d2 * self._context_tokens
        self._clock.after(seconds, lambda: self._computed(parts, batch))

    def _computed(self, parts: Sequence[_Part], batch: int) -> None:
        if batch:
            self._step_ends_s.append(self._clock.now_s)
            self._give_tokens(1)
        for sequence, _, stop, _ in parts:
            if stop == sequence.tokens:
                self._prefilled(sequence)
        self._next()

    def _decode(self, swap_s: float) -> None:
        """Until one ends, the memory is full, or something arrives (`_cut_run`)."""
        batch, begin = len(self._decoding), len(self._step_ends_s)
        room = (self._options.kv_capacity_tokens - self._held_tokens) // batch + 1
        steps = min(min(self._ends) - begin + 1, room)
        first_s = self._d0 + self._d1 * batch + self._d2 * self._context_tokens
        seconds = first_s + self._d2 * batch * np.arange(steps)
        seconds[0] += swap_s
        self._step_ends_s.extend((self._clock.now_s + np.cumsum(seconds)).tolist())
        self._run_begin = begin
        self._run = self._clock.at(self._step_ends_s[-1], self._decoded)

    def _cut_run(self) -> None:
        if self._run is None:
            return
        current = bisect_left(self._step_ends_s, self._clock.now_s, self._run_begin)
        del self._step_ends_s[current + 1 :]
        self._run.cancel()
        self._run = self._clock.at(self._step_ends_s[-1], self._decoded)

    def _decoded(self) -> None:
        self._run = None
        self._give_tokens(len(self._step_ends_s) - self._run_begin)
        self._next()

    def _give_tokens(self, steps: int) -> None:
        tokens = steps * len(self._decoding)
        self._context_tokens += tokens
        self._held_tokens += tokens
        for sequence in list(self._ends.get(len(self._step_ends_s) - 1, ())):
            self._leave(sequence)
            self._end(sequence)

    # -- the life of a request ---------------------------------------------------------------------

    def _wait(self, sequence: _Sequence, *, first: bool) -> None:
        self.uncomputed_tokens += sequence.tokens
        (self._waiting.appendleft if first else self._waiting.append)(sequence)

    def _prefilled(self, sequence: _Sequence) -> None:
        """Its next token is there; the first one, unless it was preempted."""
        job = sequence.job
        self.uncomputed_tokens -= sequence.tokens
        sequence.times_s.append(self._clock.now_s)
        if job.first_token_s is None:
            job.first_token_s = self._clock.now_s
        if self._options.mode is EngineMode.PREFIX:
            others = self._held_tokens - self._keyed_tokens
            room = max(0, self._options.kv_capacity_tokens - others)
            self._cache.capacity_blocks = room // self._block_tokens
            self._cache.put(job.keys)
        if len(sequence.times_s) == job.trace.output_tokens or not job.trace.output_tokens:
            self._release(sequence)
            self._end(sequence)
        else:
            self._join(sequence)

    def _join(self, sequence: _Sequence) -> None:
        """It decodes from the next step on; its tokens are among those that are held."""
        sequence.began = len(self._step_ends_s)
        self._decoding[sequence] = None
        self._ends.setdefault(sequence.last_step, []).append(sequence)
        self._context_tokens += sequence.tokens

    def _leave(self, sequence: _Sequence) -> None:
        """It does not decode any more, and holds nothing."""
        del self._decoding[sequence]
        at = self._ends[sequence.last_step]
        at.remove(sequence)
        if not at:
            del self._ends[sequence.last_step]
        sequence.times_s.extend(self._step_ends_s[sequence.began :])
        self._context_tokens -= sequence.tokens
        self._release(sequence)

    def _release(self, sequence: _Sequence) -> None:
        self._held_tokens -= sequence.tokens
        self._keyed_tokens -= len(sequence.job.keys) * self._block_tokens

    def _end(self, sequence: _Sequence) -> None:
        sequence.job.gaps_s = [after - before for before, after in pairwise(sequence.times_s)]
        self.unfinished -= 1
        self._done(sequence.job)

    # -- preemption --------------------------------------------------------------------------------

    def _make_room(self) -> float:
        """Preempt the latest that decode until each of the others has room for a token. Returns the
        seconds of swapping."""
        swap_s = 0.0
        while self._held_tokens > self._options.kv_capacity_tokens and self._decoding:
            victim = max(self._decoding, key=lambda sequence: sequence.number)
            self._leave(victim)
            self.preempted += 1
            if self._options.preemption == "swap":
                self._swapped.appendleft(victim)
                swap_s += self._swap_s(victim)
            else:
                self._wait(victim, first=True)
        return swap_s

    def _swap_in(self) -> float:
        swap_s = 0.0
        while self._swapped and (
            self._held_tokens + self._swapped[0].tokens <= self._options.admissible_tokens
            and len(self._decoding) < self._options.sequences_max
        ):
            sequence = self._swapped.popleft()
            self._held_tokens += sequence.tokens
            self._keyed_tokens += len(sequence.job.keys) * self._block_tokens
            self._join(sequence)
            swap_s += self._swap_s(sequence)
        return swap_s

    def _swap_s(self, sequence: _Sequence) -> float:
        return sequence.tokens * self._options.token_bytes / self._options.swap_bytes_s
