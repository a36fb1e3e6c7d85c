"""A cluster of engines that prefill and decode on the same GPUs: what disaggregation is compared
with. Each request goes to the engine with the fewest tokens of prompts left to compute and, of
these, with the fewest requests. Nothing moves between nodes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tiffin.conductor.cost import latency_profiles

from ...traces.ideal_cache import hit_share
from ..clock import VirtualClock
from ..instances.colocated_instance import ColocatedInstance
from ..instances.engine_options import EngineMode, EngineOptions
from ..instances.sim_request import SimRequest
from ..results.outcomes import Summary, attained_share, cached_share, summary_of
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
    blocks = options.instances * (options.engine.kv_capacity_tokens // trace.block_tokens)
    cached = options.engine.mode is EngineMode.PREFIX
    found = cached_share([job for job in jobs if job.ended_s is not None])
    return summary_of(
        f"colocated, {options.engine.mode}",
        jobs,
        attained=attained_share(jobs, options.ttft_s, options.tbt_s),
        ideal_hit_share=hit_share(trace, blocks) if cached else 0.0,
        moved_bytes=0,
        usage=Usage(0, 0, 0, {"hbm": found} if found else {}, 1.0),
    )
