"""A cluster of engines that prefill and decode on the same GPUs: what disaggregation is compared
with. Each request goes to the engine with the fewest tokens of prompts left to compute and, of
these, with the fewest requests. Nothing moves between nodes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from tiffin.conductor.cost import latency_profiles

from ...traces.ideal_cache import hit_share
from ..clock import VirtualClock
from ..instances.colocated_instance import ColocatedInstance
from ..instances.engine_options import EngineMode, EngineOptions
from ..instances.sim_request import SimRequest
from ..results.outcomes import Summary, attained, longest_gaps_s, quantiles
from ..results.usage import Usage

if TYPE_CHECKING:
    from collections.abc import Callable

    from ...traces.trace import Trace, TraceRequest


@dataclass(frozen=True, slots=True)
class ColocatedOptions:
    """A cluster; the hardware is that of `SimulationOptions`."""

    instances: int = 16
    engine: EngineOptions = EngineOptions()  # noqa: RUF009 # it is frozen
    profile: str = latency_profiles.DEFAULT
    ttft_s: float | None = None
    tbt_s: float | None = None


@dataclass(slots=True)
class ColocatedOutcome:
    """All jobs in order of arrival, and how often one was preempted."""

    options: ColocatedOptions
    jobs: list[SimRequest] = field(default_factory=list)
    preempted: int = 0


def simulate_colocated(
    trace: Trace, options: ColocatedOptions, tell: Callable[[float], None] = lambda share: None
) -> ColocatedOutcome:
    """Replay the trace. The same arguments give the same outcome. `tell` is told the share of
    requests that has ended. Raises InvalidRequest for a profile that does not exist."""
    outcome, clock = ColocatedOutcome(options), VirtualClock()
    left = len(trace.requests)

    def over(job: SimRequest) -> None:
        nonlocal left
        if not job.rejected:
            job.ended_s = clock.now_s
        left -= 1
        tell(1 - left / len(trace.requests))

    profile = latency_profiles.load(options.profile)
    instances = [
        ColocatedInstance(clock, profile, options.engine, trace.block_tokens, over)
        for _ in range(options.instances)
    ]

    def arrival(number: int, request: TraceRequest) -> Callable[[], None]:
        def arrive() -> None:
            keys = tuple(block.to_bytes(16) for block in trace.full_blocks(request))
            job = SimRequest(f"r{number}", request, keys)
            outcome.jobs.append(job)
            least = min(instances, key=lambda one: (one.uncomputed_tokens, one.unfinished))
            least.enqueue(job)

        return arrive

    for number, request in enumerate(trace.requests):
        clock.at(request.arrival_s, arrival(number, request))
    clock.run(lambda: left > 0)
    outcome.preempted = sum(one.preempted for one in instances)
    return outcome


def summarise_colocated(trace: Trace, outcome: ColocatedOutcome) -> Summary:
    """The same figures as of a cluster with a conductor. The ideal hit share is that of a cache of
    the memory for KV of all instances."""
    options, jobs = outcome.options, outcome.jobs
    served = [job for job in jobs if job.ended_s is not None]
    prompts = sum(job.trace.prompt_tokens for job in served)
    blocks = options.instances * (options.engine.kv_capacity_tokens // trace.block_tokens)
    cached = options.engine.mode is EngineMode.PREFIX
    cached_share = sum(job.cached_tokens for job in served) / prompts if prompts else 0.0
    return Summary(
        policy=f"colocated, {options.engine.mode}",
        requests=len(jobs),
        rejected=dict(Counter(job.rejected for job in jobs if job.rejected)),
        ttft_s=quantiles([job.ttft_s for job in served if job.ttft_s is not None]),
        tbt_s=quantiles([longest_gaps_s(job) for job in served if job.gaps_s]),
        compute_s=float(np.mean([job.compute_s for job in served])) if served else 0.0,
        hit_share=cached_share,
        ideal_hit_share=hit_share(trace, blocks) if cached else 0.0,
        ttft_bias=0.0,
        ttft_error_p90=0.0,
        moved_bytes=0,
        usage=Usage(0, 0, 0, {"hbm": cached_share} if cached_share else {}, 1.0),
        attained=attained_share(jobs, options.ttft_s, options.tbt_s),
        span_s=max((job.ended_s or 0.0 for job in jobs), default=0.0),
    )


def attained_share(
    jobs: list[SimRequest], ttft_s: float | None, tbt_s: float | None
) -> float | None:
    """Requests that met both objectives, of all that came; None without an objective."""
    if (ttft_s is None and tbt_s is None) or not jobs:
        return None
    met = sum(job.ended_s is not None and attained(job, ttft_s, tbt_s) for job in jobs)
    return met / len(jobs)
