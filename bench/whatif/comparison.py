"""What was observed and what was simulated, measured in one way, and how far they are apart. Pure.

TTFT runs from the question to the conductor until the first token, a request's TBT is the mean of
its gaps, and the share of tokens found is that of the decisions: these three a recording has.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..sim.results.outcomes import quantiles

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ..sim.instances.sim_request import SimRequest
    from ..sim.results.outcomes import Quantiles
    from ..traces.recordings import Recording

# A replay that is farther from what was observed says little of what would have been.
OFF_MAX = 0.25


@dataclass(frozen=True, slots=True)
class Served:
    """What came of one request. `rejected`: the reason. None: there is no such time."""

    prompt_tokens: int
    cached_tokens: int
    ttft_s: float | None
    tbt_s: float | None
    in_time: bool | None
    rejected: str = ""


@dataclass(frozen=True, slots=True)
class Measured:
    """Of all requests. `attained`: those that met their objectives, of those that had any."""

    requests: int
    rejected: dict[str, int]
    ttft_s: Quantiles
    tbt_s: Quantiles
    hit_share: float
    attained: float | None


@dataclass(frozen=True, slots=True)
class Error:
    """Simulated over observed, of the same requests. `mean` and `p50`: how far the mean and the
    median are off, as shares of the observed ones. `bias`: the mean of the requests' relative
    errors, `p90`: their size that nine of ten do not exceed. `requests`: how many had both."""

    requests: int
    mean: float
    p50: float
    bias: float
    p90: float


@dataclass(frozen=True, slots=True)
class Fidelity:
    """How far a replay is from what was observed. `hit_share`: the difference of both shares."""

    ttft: Error | None
    tbt: Error | None
    hit_share: float

    def faults(self) -> list[str]:
        """What is off by more than `OFF_MAX`, in words."""
        found = []
        for name, error in (("TTFT", self.ttft), ("TBT", self.tbt)):
            for which in ("mean", "p50"):
                off = 0.0 if error is None else getattr(error, which)
                if abs(off) > OFF_MAX:
                    found.append(f"{name}, {which}: {off:+.0%}")
        if abs(self.hit_share) > OFF_MAX:
            found.append(f"prompt tokens found: {self.hit_share:+.0%} of all")
        return found


def observed(recording: Recording) -> list[Served]:
    """What a recording says of each request."""
    return [
        Served(
            one.prompt_tokens,
            one.cached_tokens,
            one.ttft_s,
            one.tbt_s,
            _in_time(
                one.ttft_objective_s,
                one.tbt_objective_s,
                one.ttft_s,
                one.tbt_s,
                one.outcome == "rejected",
            ),
            one.reason,
        )
        for one in recording.requests
    ]


def simulated(recording: Recording, jobs: Sequence[SimRequest]) -> list[Served]:
    """The same of a replay's requests."""
    found = []
    by_number = sorted(jobs, key=lambda job: int(job.name.removeprefix("r")))
    for one, job in zip(recording.requests, by_number, strict=True):
        tbt_s = float(np.mean(job.gaps_s)) if job.gaps_s else None
        cached = job.decision.cached_tokens if job.decision is not None else 0
        in_time = _in_time(
            one.ttft_objective_s, one.tbt_objective_s, job.ttft_s, tbt_s, bool(job.rejected)
        )
        found.append(Served(one.prompt_tokens, cached, job.ttft_s, tbt_s, in_time, job.rejected))
    return found


def measured(all_served: Sequence[Served]) -> Measured:
    """Summaries over all requests; distributions and found tokens over those that were served."""
    served = [one for one in all_served if one.ttft_s is not None]
    judged = [one.in_time for one in all_served if one.in_time is not None]
    return Measured(
        requests=len(all_served),
        rejected=dict(Counter(one.rejected for one in all_served if one.rejected)),
        ttft_s=quantiles([one.ttft_s for one in served if one.ttft_s is not None]),
        tbt_s=quantiles([one.tbt_s for one in served if one.tbt_s is not None]),
        hit_share=_hit_share(served),
        attained=sum(judged) / len(judged) if judged else None,
    )


def fidelity(truth: Sequence[Served], replayed: Sequence[Served]) -> Fidelity:
    """How far a replay is from the truth, over the requests that both served."""
    both = [
        (a, b)
        for a, b in zip(truth, replayed, strict=True)
        if a.ttft_s is not None and b.ttft_s is not None
    ]
    return Fidelity(
        _error([(a.ttft_s, b.ttft_s) for a, b in both]),
        _error([(a.tbt_s, b.tbt_s) for a, b in both]),
        _hit_share([b for _, b in both]) - _hit_share([a for a, _ in both]),
    )


def _hit_share(served: Sequence[Served]) -> float:
    tokens = sum(one.prompt_tokens for one in served)
    return sum(one.cached_tokens for one in served) / tokens if tokens else 0.0


def _error(pairs: Sequence[tuple[float | None, float | None]]) -> Error | None:
    known = [(a, b) for a, b in pairs if a and b is not None]  # nothing is relative to 0 s
    if not known:
        return None
    table: NDArray[np.float64] = np.asarray(known, np.float64)
    truth, ours = table[:, 0], table[:, 1]
    relative = ours / truth - 1
    return Error(
        requests=len(known),
        mean=float(ours.mean() / truth.mean() - 1),
        p50=float(np.median(ours) / np.median(truth) - 1),
        bias=float(relative.mean()),
        p90=float(np.quantile(np.abs(relative), 0.9)),
    )


def _in_time(
    ttft_objective_s: float | None,
    tbt_objective_s: float | None,
    ttft_s: float | None,
    tbt_s: float | None,
    rejected: bool,
) -> bool | None:
    """Whether both objectives were met; None if there are none, or it is not known."""
    if ttft_objective_s is None and tbt_objective_s is None:
        return None
    if ttft_s is None:
        return False if rejected else None
    if ttft_objective_s is not None and ttft_s > ttft_objective_s:
        return False
    return tbt_objective_s is None or tbt_s is None or tbt_s <= tbt_objective_s
