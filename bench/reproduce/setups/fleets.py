"""Three fleets for one workload: short of prefill, short of decode, and balanced.

All have two instances that decode. By the profile, these answer about 6.4 requests of the
conversation trace in a second (`decode_rate`, limited by their room for KV), and an instance that
prefills computes 0.7 to 0.8 of them, after what a pooled cache saves (`prefill_rate`). So 9 of them
are as many as two of the others can use, 4 half as many, and 18 twice as many. The names are true
by these rates; that the busy shares of a simulation agree is tested.

The workload is the same requests at any rate, half an hour of a trace like the conversation trace:
with other requests, goodput would differ for their lengths. What counts are those between a fifth
and nine tenths of them: before, queues fill, and after it nobody comes who would be in the way.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from tiffin.conductor.cost import latency_profiles
from tiffin.conductor.pool.capacity_model import Goals, Workload, capacity
from tiffin.conductor.pool.role_flip import FleetMember
from tiffin.conductor.records import Role

from ...sim.cluster.simulation import SimulationOptions
from ...sim.instances.prefill_work import prefill_work
from ...sim.results.outcomes import attained
from ...traces.ideal_cache import IdealCache
from ...traces.look_alike import look_alike
from ...traces.scaling import at_rate, window
from .inputs import conversation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...sim.instances.sim_request import SimRequest
    from ...traces.trace import Trace

# Mooncake's objectives for its real workload (table 2 and section 5 of the FAST '25 paper).
TTFT_S, TBT_S = 30.0, 0.1
# Of the trace, in its own time.
LASTS_S = 1800.0
# The requests that count, as shares of all.
FROM_SHARE, TO_SHARE = 0.2, 0.9


@dataclass(frozen=True, slots=True)
class Fleet:
    """How many instances prefill and decode; `name` is what there is too little of."""

    name: str
    prefill: int
    decode: int = 2

    def options(self, admission: str = "predictive", seed: int = 0) -> SimulationOptions:
        """Of a simulation with the objectives above, held as the conductor does by default."""
        return SimulationOptions(
            order="held",
            prefill=self.prefill,
            decode=self.decode,
            admission=admission,
            ttft_s=TTFT_S,
            tbt_s=TBT_S,
            seed=seed,
        )

    def rate(self, trace: Trace) -> float:
        """Requests of the trace per second that the fleet could serve: what it has less of."""
        return min(prefill_rate(trace, self.options()), decode_rate(trace, self.options()))


FLEETS = (Fleet("prefill-bound", 4), Fleet("balanced", 9), Fleet("decode-bound", 18))


@cache
def workload(seed: int) -> Trace:
    """The requests of a seed, at the rate of the conversation trace."""
    return window(look_alike(conversation(), seed), 0.0, LASTS_S)


def offered(trace: Trace, rate: float) -> Trace:
    """The same requests, `rate` of them in a second."""
    return at_rate(trace, rate / trace.rate)


def prefill_rate(trace: Trace, options: SimulationOptions) -> float:
    """Requests per second that all instances compute, if each finds what one cache of the size of
    all memory would have."""
    profile = latency_profiles.load(options.profile)
    cache = IdealCache(options.prefill * (options.cache_tokens // trace.block_tokens))
    seconds = 0.0
    for request in trace.requests:
        found = cache.serve(trace.full_blocks(request)) * trace.block_tokens
        cached = min(found, request.prompt_tokens - 1)
        seconds += prefill_work(profile, request.prompt_tokens, cached, 0, 1).gpu_s
    return options.prefill * len(trace.requests) / seconds


def decode_rate(trace: Trace, options: SimulationOptions) -> float:
    """Requests per second that all instances answer in steps of the objective, or as many as there
    is room for: the planner's formula, for the mean request."""
    profile = latency_profiles.load(options.decode_profile or options.profile)
    member = FleetMember(
        *("", Role.DECODE, True),
        latency=profile.latency,
        kv_capacity_tokens=options.kv_capacity_tokens,
        batch_max=options.batch_max,
    )
    prompt = float(np.mean([request.prompt_tokens for request in trace.requests]))
    output = float(np.mean([request.output_tokens for request in trace.requests]))
    assert options.tbt_s is not None
    goals = Goals(options.ttft_s or TTFT_S, options.tbt_s)
    return options.decode * capacity(member, Workload(prompt, prompt, output), goals).decode_rate


def goodput(jobs: Sequence[SimRequest], options: SimulationOptions) -> float:
    """Requests per second that met both objectives, of those that count."""
    met, lasts_s = _met(jobs, options)
    return len(met) / lasts_s


def token_goodput(jobs: Sequence[SimRequest], options: SimulationOptions) -> float:
    """Tokens per second of the prompts and answers of these requests: who refuses the long ones
    serves more requests, and not more of these."""
    met, lasts_s = _met(jobs, options)
    return sum(job.trace.prompt_tokens + job.trace.output_tokens for job in met) / lasts_s


def _met(jobs: Sequence[SimRequest], options: SimulationOptions) -> tuple[list[SimRequest], float]:
    """Those that met both objectives, of those that count, and the seconds in which these came."""
    first, last = (round(share * (len(jobs) - 1)) for share in (FROM_SHARE, TO_SHARE))
    met = [
        job
        for job in jobs[first:last]
        if job.ended_s is not None and attained(job, options.ttft_s, options.tbt_s)
    ]
    return met, jobs[last].trace.arrival_s - jobs[first].trace.arrival_s
