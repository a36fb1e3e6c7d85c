"""An instance that prefills: whole prompts one after the other, in order of arrival.

Blocks are fetched while a prompt waits; the GPU waits for those of the prompt whose turn it is.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from tiffin.conductor.cost.latency_model import prefill_s

if TYPE_CHECKING:
    from collections.abc import Callable

    from tiffin.conductor.cost.latency_profiles import Profile

    from .block_cache import BlockCache
    from .clock import VirtualClock
    from .sim_request import SimRequest


class PrefillInstance:
    """`name` is that of its node, too, whose memory is `cache`. `done` is called with each job."""

    def __init__(
        self,
        name: str,
        clock: VirtualClock,
        profile: Profile,
        cache: BlockCache,
        block_tokens: int,
        done: Callable[[PrefillInstance, SimRequest], None],
    ) -> None:
        self.name, self.cache = name, cache
        self._clock, self._profile, self._done = clock, profile, done
        self._block_tokens = block_tokens
        self._queue: deque[SimRequest] = deque()
        self._fetching: dict[str, int] = {}  # by job: blocks from its start that will have come
        self._computing: SimRequest | None = None

    @property
    def queued(self) -> int:
        """Prompts that wait or are computed."""
        return len(self._queue) + (self._computing is not None)

    @property
    def queued_tokens(self) -> int:
        """Their tokens, less those that the conductor took for cached."""
        jobs = [*self._queue, *([self._computing] if self._computing else [])]
        return sum(job.trace.prompt_tokens - job.expected_cached_tokens for job in jobs)

    def enqueue(self, job: SimRequest, fetching: bool) -> None:
        """A prompt arrives. `fetching`: `fetched` will be called."""
        self._queue.append(job)
        if fetching:
            self._fetching[job.name] = 0
        self._next()

    def fetched(self, job: SimRequest, blocks: int) -> None:
        """All that is fetched for a prompt has come: its first `blocks` blocks are here."""
        del self._fetching[job.name]
        self.cache.put(job.keys[:blocks])
        self._next()

    def _next(self) -> None:
        if self._computing is not None or not self._queue or self._queue[0].name in self._fetching:
            return
        job = self._computing = self._queue.popleft()
        blocks = self.cache.match(job.keys)
        self.cache.use(job.keys[:blocks])
        tokens = job.trace.prompt_tokens
        job.cached_tokens = min(blocks * self._block_tokens, tokens - 1)
        job.compute_s = float(prefill_s(*self._profile.prefill, tokens, job.cached_tokens))
        self._clock.after(job.compute_s, self._computed)

    def _computed(self) -> None:
        job, self._computing = self._computing, None
        assert job is not None
        self._done(self, job)
        self._next()
