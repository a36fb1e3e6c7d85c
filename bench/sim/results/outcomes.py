"""What came of a simulated trace, as plain numbers."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tiffin.conductor.cost import latency_profiles

from ...traces.ideal_cache import hit_share
from .usage import Usage, usage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ...traces.trace import Trace
    from ..cluster.options import SimulationOptions
    from ..cluster.simulation import SimulationOutcome
    from ..instances.sim_request import SimRequest

# A request's TBT is the mean of the longest tenth of its gaps (Mooncake, FAST '25, section 5).
_LONGEST_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Of some seconds; all 0 if there are none."""

    mean: float
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, slots=True)
class Summary:
    """Of all requests. `rejected`: how many, by reason. Shares are of 1.

    `tbt_s`: over the requests, of each the mean of the longest tenth of its gaps. `second_s`: from
    the first token to the second one, in which its KV is handed over; `second_alone_s`: the mean of
    that on idle cards, with a step of an idle instance. `hit_share`: of
    the tokens of prompts that were computed or loaded, those that were loaded; `ideal_hit_share`:
    what one cache of the size of all nodes' memory would have had, if nothing took time.
    `compute_s`: GPU seconds of a prefill. `ttft_bias` and `ttft_error_p90`: how far the predicted
    TTFT is from the observed one, as shares of it, in the mean and as a size.
    `attained`: requests that met both objectives, of all that came; None without an objective.
    """

    policy: str
    requests: int
    rejected: dict[str, int]
    ttft_s: Quantiles
    tbt_s: Quantiles
    compute_s: float
    hit_share: float
    ideal_hit_share: float
    ttft_bias: float
    ttft_error_p90: float
    moved_bytes: int
    usage: Usage
    attained: float | None
    span_s: float
    second_s: Quantiles
    second_alone_s: float = 0.0


def summarise(trace: Trace, outcome: SimulationOutcome) -> Summary:
    """The summary of a simulation of the trace."""
    options = outcome.options
    capacity = options.prefill * (options.cache_tokens // trace.block_tokens)
    return summary_of(
        options.policy,
        outcome.jobs,
        attained=attained_share(outcome.jobs, options.ttft_s, options.tbt_s),
        ideal_hit_share=hit_share(trace, capacity),
        moved_bytes=sum(outcome.moved_bytes.values()),
        usage=usage(trace, outcome),
        second_alone_s=_second_alone_s(outcome),
    )


def _second_alone_s(outcome: SimulationOutcome) -> float:
    options = outcome.options
    tokens = [job.trace.prompt_tokens for job in outcome.jobs if job.gaps_s]
    if not tokens:
        return 0.0
    *_, d0, d1, d2 = latency_profiles.load(options.decode_profile or options.profile).latency
    sent_s = options.token_bytes / options.bandwidth_bytes_s
    return options.latency_s + d0 + d1 + (sent_s + d2) * float(np.mean(tokens))


def summary_of(
    policy: str,
    jobs: Sequence[SimRequest],
    *,
    attained: float | None,
    ideal_hit_share: float,
    moved_bytes: int,
    usage: Usage,
    second_alone_s: float = 0.0,
) -> Summary:
    """The summary of the requests of a simulated cluster of any kind."""
    served = [job for job in jobs if job.ended_s is not None]
    errors = _prediction_errors(served)
    return Summary(
        policy=policy,
        requests=len(jobs),
        rejected=dict(Counter(job.rejected for job in jobs if job.rejected)),
        ttft_s=quantiles([_ttft_s(job) for job in served]),
        tbt_s=quantiles([longest_gaps_s(job) for job in served if job.gaps_s]),
        compute_s=float(np.mean([job.compute_s for job in served])) if served else 0.0,
        hit_share=cached_share(served),
        ideal_hit_share=ideal_hit_share,
        ttft_bias=float(errors.mean()) if len(errors) else 0.0,
        ttft_error_p90=ttft_error_p90(served),
        moved_bytes=moved_bytes,
        attained=attained,
        usage=usage,
        span_s=max((job.ended_s or 0.0 for job in jobs), default=0.0),
        second_s=quantiles([job.gaps_s[0] for job in served if job.gaps_s]),
        second_alone_s=second_alone_s,
    )


def cached_share(served: Sequence[SimRequest]) -> float:
    """Of the tokens of all prompts, those that were not computed."""
    prompts = sum(job.trace.prompt_tokens for job in served)
    return sum(job.cached_tokens for job in served) / prompts if prompts else 0.0


def quantiles(seconds: Sequence[float]) -> Quantiles:
    """Of a list of seconds."""
    if not seconds:
        return Quantiles(0.0, 0.0, 0.0, 0.0)
    values = np.asarray(seconds)
    p50, p90, p99 = np.quantile(values, [0.5, 0.9, 0.99]).tolist()
    return Quantiles(float(values.mean()), p50, p90, p99)


def longest_gaps_s(job: SimRequest) -> float:
    """The mean of the longest tenth of a request's gaps between tokens, of one at least."""
    return longest_tenth_s(job.gaps_s)


def longest_tenth_s(gaps_s: Sequence[float]) -> float:
    """The mean of the longest tenth of some gaps, of one at least."""
    count = max(1, round(len(gaps_s) * _LONGEST_SHARE))
    return float(np.mean(sorted(gaps_s)[-count:]))


def attained_share(
    jobs: Sequence[SimRequest], ttft_s: float | None, tbt_s: float | None
) -> float | None:
    """Requests that met both objectives, of all that came; None without an objective."""
    if (ttft_s is None and tbt_s is None) or not jobs:
        return None
    met = sum(job.ended_s is not None and attained(job, ttft_s, tbt_s) for job in jobs)
    return met / len(jobs)


def attained(job: SimRequest, ttft_s: float | None, tbt_s: float | None) -> bool:
    """Whether a request that has ended met both objectives; None: there is no such objective."""
    if ttft_s is not None and _ttft_s(job) > ttft_s:
        return False
    return tbt_s is None or not job.gaps_s or longest_gaps_s(job) <= tbt_s


def attained_in_mean(job: SimRequest, ttft_s: float, tbt_s: float) -> bool:
    """The same, where the objective is for the mean of a request's gaps, of which it has one."""
    return _ttft_s(job) <= ttft_s and float(np.mean(job.gaps_s)) <= tbt_s


def late_share(jobs: Sequence[SimRequest], options: SimulationOptions) -> float:
    """Of those that were served, whose first token came after its objective."""
    assert options.ttft_s is not None, "there is an objective"
    served = [_ttft_s(job) for job in jobs if job.ended_s is not None]
    return sum(one > options.ttft_s for one in served) / max(1, len(served))


def ttft_error_p90(jobs: Sequence[SimRequest]) -> float:
    """Of those that were served: how far the predicted TTFT is from the observed one, as a share of
    it."""
    errors = _prediction_errors([job for job in jobs if job.ended_s is not None])
    return float(np.quantile(np.abs(errors), 0.9)) if len(errors) else 0.0


def _ttft_s(job: SimRequest) -> float:
    assert job.ttft_s is not None, "it has ended"
    return job.ttft_s


def _prediction_errors(jobs: Sequence[SimRequest]) -> NDArray[np.float64]:
    pairs = [(job.decision.predicted_ttft_s, _ttft_s(job)) for job in jobs if job.decision]
    predicted, observed = np.asarray(pairs, np.float64).reshape(-1, 2).T
    errors: NDArray[np.float64] = (predicted - observed) / np.maximum(observed, 1e-9)
    return errors
