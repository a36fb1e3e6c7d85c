"""An instance that prefills: one prompt after the other, each when its blocks are there.

A prompt whose blocks still come keeps its place, and those behind it are computed meanwhile, as
vLLM's scheduler skips requests that wait for remote KV (`WAITING_FOR_REMOTE_KVS`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ..nodes.node_cache import TIERS
from .prefill_work import PrefillWork, prefill_work

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tiffin.conductor.cost.latency_profiles import Profile

    from ..clock import VirtualClock
    from ..cluster.options import SimulationOptions
    from ..nodes.node_cache import NodeCache
    from .sim_request import SimRequest


@dataclass(frozen=True, slots=True)
class PrefillParts:
    """What all prefill instances have in common. `load_byte_s`: seconds to load a byte of a block
    from each of `TIERS`. `noisy` returns a time with noise."""

    clock: VirtualClock
    profile: Profile
    options: SimulationOptions
    block_tokens: int
    load_byte_s: dict[str, float]
    noisy: Callable[[float], float]

    def ahead_s(self, load_s: float, compute_s: float) -> float:
        """Seconds of loading that computing has to wait for: with overlap of layers those of the
        first layer, or what takes longer than computing."""
        if not self.options.layerwise:
            return load_s
        return max(load_s / self.options.layers, load_s - compute_s)

    def done_s(self, plan: LoadPlan) -> float:
        """Seconds from the begin of loading to the first token."""
        return self.ahead_s(plan.load_s, plan.work.occupied_s) + plan.work.done_s


class LoadPlan(NamedTuple):
    """What a prompt loads, by tier, how long that takes, and the computing of the rest."""

    cached_tokens: int
    by_tier: dict[str, int]
    load_s: float
    work: PrefillWork


class PrefillInstance:
    """`name` is that of its node, too, whose tiers are `cache`.

    `began` is called with each job when it is computed, and the seconds that this takes; `done`
    when its first token is there. `choose`: which of the waiting jobs is next, by name, which is
    waited for if blocks of it still come; without it they are computed in order of arrival.
    """

    def __init__(
        self,
        name: str,
        parts: PrefillParts,
        cache: NodeCache,
        began: Callable[[PrefillInstance, SimRequest, float], None],
        done: Callable[[PrefillInstance, SimRequest], None],
        choose: Callable[[PrefillInstance], str | None] | None = None,
    ) -> None:
        self.name, self.cache = name, cache
        self._parts, self._clock = parts, parts.clock
        self._began, self._done, self._choose = began, done, choose
        self._queue: dict[str, SimRequest] = {}
        self._next: SimRequest | None = None  # chosen, waits for its blocks
        self._fetching: dict[str, int] = {}  # by job: blocks from its start that will have come
        self._computing: SimRequest | None = None
        self.busy_s = 0.0
        self.free_at_s = 0.0  # of what is computed now, or was last

    @property
    def computing(self) -> SimRequest | None:
        """The prompt that is computed now."""
        return self._computing

    @property
    def waiting(self) -> list[tuple[SimRequest, bool]]:
        """Prompts that wait, in order of arrival, and whether blocks of theirs still come."""
        jobs = [*([self._next] if self._next else []), *self._queue.values()]
        return [(job, job.name in self._fetching) for job in jobs]

    @property
    def jobs(self) -> list[SimRequest]:
        """Those that wait or are computed."""
        return [*self._queue.values(), *(j for j in (self._next, self._computing) if j)]

    @property
    def queued(self) -> int:
        """How many these are."""
        return len(self._queue) + (self._next is not None) + (self._computing is not None)

    @property
    def queued_tokens(self) -> int:
        """Their tokens, less those that the conductor took for cached."""
        return sum(job.trace.prompt_tokens - job.expected_cached_tokens for job in self.jobs)

    def will_have(self, keys: Sequence[bytes]) -> int:
        """How many leading blocks of a prompt are here, or will be when the prompts that wait or
        are computed have been."""
        return max([self.cache.match(keys), *(common_blocks(keys, job.keys) for job in self.jobs)])

    def enqueue(self, job: SimRequest, fetching: bool) -> None:
        """A prompt arrives. `fetching`: `fetched` will be called."""
        self._queue[job.name] = job
        if fetching:
            self._fetching[job.name] = 0
        self._go_on()

    def fetched(self, job: SimRequest) -> None:
        """All that is fetched for a prompt has come, and is in the cache."""
        del self._fetching[job.name]
        self._go_on()

    def _go_on(self) -> None:
        if self._computing is not None:
            return
        if self._next is None:
            self._next = self._take()
        if self._next is None or self._next.name in self._fetching:
            return
        job, self._next = self._next, None
        self._computing = job
        self._compute(job)

    def _take(self) -> SimRequest | None:
        if not self._queue:
            return None
        name = self._choose(self) if self._choose is not None else None
        if name is None or name not in self._queue:
            name = next((one for one in self._queue if one not in self._fetching), None)
        return None if name is None else self._queue.pop(name)

    def _compute(self, job: SimRequest) -> None:
        parts = self._parts
        plan = self._plan(job)
        self.cache.put(job.keys[: -(-plan.cached_tokens // parts.block_tokens)])
        job.cached_tokens, job.by_tier = plan.cached_tokens, dict(plan.by_tier)
        if job.fetched_blocks:  # they came to its memory
            fetched = min(job.fetched_blocks * parts.block_tokens, plan.by_tier.get("dram", 0))
            job.by_tier |= {"dram": plan.by_tier.get("dram", 0) - fetched, "fetched": fetched}
        scale = parts.noisy(1.0)
        occupied_s, done_s, job.compute_s = (scale * seconds for seconds in plan.work)
        ahead_s = parts.ahead_s(plan.load_s, occupied_s)
        self.busy_s += ahead_s + occupied_s
        self.free_at_s = self._clock.now_s + ahead_s + occupied_s
        self._began(self, job, ahead_s + done_s)
        # Without a pipeline both are at one time: the next prompt finds the blocks of this one.
        self._clock.after(ahead_s + done_s, lambda: self._done(self, job))
        self._clock.after(ahead_s + occupied_s, self._free)

    def _plan(self, job: SimRequest) -> LoadPlan:
        """The quickest: nothing loaded, all of the fastest tier, of the two fastest, of all."""
        parts, options = self._parts, self._parts.options
        tokens, shape = job.trace.prompt_tokens, (options.chunk_tokens, options.stages)
        plan = LoadPlan(0, {}, 0.0, prefill_work(parts.profile, tokens, 0, *shape))
        plans = [plan]
        for tier, blocks in zip(TIERS, self.cache.by_tier(job.keys), strict=True):
            used = min(blocks * parts.block_tokens, tokens - 1 - plan.cached_tokens)
            if used <= 0:
                continue
            loaded = plan.cached_tokens + used
            plan = LoadPlan(
                loaded,
                {**plan.by_tier, tier: used},
                plan.load_s + used * options.token_bytes * parts.load_byte_s[tier],
                prefill_work(parts.profile, tokens, loaded, *shape),
            )
            plans.append(plan)
        return min(plans, key=parts.done_s)

    def _free(self) -> None:
        self._computing = None
        self._go_on()


def common_blocks(one: Sequence[bytes], other: Sequence[bytes]) -> int:
    """How many leading blocks two prompts share. A block's key stands for all before it."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[middle - 1] == other[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
