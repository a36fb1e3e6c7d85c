"""Mooncake under overload (arXiv 2407.00079v1, sections 7 and 8.2): early rejection lets the loads
of both pools swing against each other (figures 9 and 10), a prediction damps that; table 3 has how
many requests each refuses.

Published are: the model, 8 and 8 instances, a trace of 23,000 requests at twice its speed for table
3; 20 machines and 20 minutes for figure 9. What is not, is chosen once, for all modes:

- TTFT of 30 s, as for the same trace in section 8.1.3;
- TBT of 75 ms: the lowest load of decode in figure 9 is 35%, and a step of one request on this
  hardware takes 26 ms;
- four instances that prefill for each that decodes: by the profile, these do the same number of
  this trace's requests. Ten machines, since 20 minutes of 20 are twice as many requests;
- room for KV that never runs out: the paper's load of a decode instance is its TBT alone;
- every answer is expected to take the same time, as in the paper.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from ...sim.load_series import correlation
from ...sim.simulation import SimulationOptions, simulate
from ...traces.scaling import at_rate
from ..evidence import Comparison, Evidence, Line, Plot, Statement
from ..registry import reproduction
from ..toolagent_look_alike import toolagent

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ...sim.sim_request import SimRequest
    from ...sim.simulation import SimulationOutcome
    from ..registry import Effort, Tell

MODES = ("baseline", "early", "predictive")
PUBLISHED_REJECTED = {"baseline": 4183, "early": 3771, "predictive": 3589}
PUBLISHED_REQUESTS = 23_000
AS_PUBLISHED = SimulationOptions(ttft_s=30.0, tbt_s=0.1)
BOTH_SHORT = SimulationOptions(
    prefill=8,
    decode=2,
    ttft_s=30.0,
    tbt_s=0.075,
    kv_capacity_tokens=4_000_000,
    use_lengths=False,
)
# The look-alike in 20 minutes: 19 requests/s, of which either pool can do some 16.
SPEED = 3.0
WARM_S, STOP_S = 100.0, 1200.0
# A load is called swinging if it is in both of these parts for a tenth of the time.
LOW, HIGH, PART = 1 / 3, 2 / 3, 0.1


@dataclass(frozen=True, slots=True)
class Overloaded:
    """One mode: requests by what became of them, GPU seconds, and the loads of both pools.

    `in_time`: they met both objectives, TBT as the mean of their gaps. `would_have_met`: refused on
    arrival, and served in time by the conductor's own estimate, each as if it alone had been taken.
    """

    requests: int
    rejected: int
    rejected_late: int
    in_time: int
    would_have_met: int
    prefill_s: float
    wasted_s: float
    times_s: NDArray[np.float64]
    prefill: NDArray[np.float64]
    decode: NDArray[np.float64]

    @classmethod
    def of(cls, outcome: SimulationOutcome) -> Overloaded:
        """What came of a simulation."""
        jobs = outcome.jobs
        late = [job for job in jobs if job.rejected and job.compute_s]
        times_s, prefill, decode = outcome.loads.between(WARM_S, STOP_S)
        return cls(
            requests=len(jobs),
            rejected=sum(bool(job.rejected) for job in jobs),
            rejected_late=len(late),
            in_time=sum(in_time(job, outcome.options) for job in jobs),
            would_have_met=outcome.shadow.rejected_would_have_met,
            prefill_s=sum(job.compute_s for job in jobs),
            wasted_s=sum(job.compute_s for job in late),
            times_s=times_s,
            prefill=prefill,
            decode=decode,
        )

    @property
    def swings(self) -> bool:
        """Whether the load of prefill goes up and down."""
        low, high = (self.prefill < LOW).mean(), (self.prefill > HIGH).mean()
        return bool(min(low, high) >= PART)


def in_time(job: SimRequest, options: SimulationOptions) -> bool:
    """Whether a request was served, and met both objectives; its TBT is the mean of its gaps."""
    if job.ended_s is None or job.ttft_s is None:
        return False
    assert options.ttft_s is not None
    assert options.tbt_s is not None
    tbt_s = sum(job.gaps_s) / len(job.gaps_s) if job.gaps_s else 0.0
    return job.ttft_s <= options.ttft_s and tbt_s <= options.tbt_s


@cache
def overloaded(mode: str, seed: int) -> Overloaded:
    """Both pools are short of what comes."""
    options = replace(BOTH_SHORT, admission=mode, seed=seed)
    return Overloaded.of(simulate(at_rate(toolagent(seed), SPEED), options))


@reproduction(
    "mooncake-rejection-oscillation",
    "Loads under early rejection",
    "Mooncake, arXiv 2407.00079v1, figures 9 and 10",
)
def oscillation(effort: Effort, tell: Tell) -> Evidence:
    """The loads of both pools over 20 minutes, under each mode."""
    found = {}
    for mode in MODES:
        tell(mode)
        found[mode] = overloaded(mode, effort.seeds[0])
    early, predictive = found["early"], found["predictive"]
    comparisons = []
    for name, loads, low, high in (
        ("prefill", early.prefill, 0, 93),
        ("decode", early.decode, 35, 90),
    ):
        least, most = 100 * np.quantile(loads, [0.01, 0.99])
        comparisons.append(Comparison(f"early, load of {name}, highest", high, float(most), "%"))
        comparisons.append(Comparison(f"early, load of {name}, lowest", low, float(least), "%"))
    statements = (
        Statement(
            "with early rejection, the load of prefill swings",
            early.swings,
            f"below {LOW:.0%} in {(early.prefill < LOW).mean():.0%} of the time, "
            f"above {HIGH:.0%} in {(early.prefill > HIGH).mean():.0%}",
        ),
        Statement(
            "against that of decode",
            correlation(early.prefill, early.decode) < -0.3,
            f"correlation {correlation(early.prefill, early.decode):.2f}",
        ),
        Statement(
            "a prediction damps it",
            not predictive.swings and predictive.prefill.std() < early.prefill.std() / 2,
            f"standard deviation of prefill's load {early.prefill.std():.2f} early, "
            f"{predictive.prefill.std():.2f} predictive; "
            f"of decode's {early.decode.std():.2f}, {predictive.decode.std():.2f}",
        ),
    )
    return Evidence(
        tuple(comparisons), statements, tuple(_plot(mode, found[mode]) for mode in MODES)
    )


@reproduction("mooncake-rejections", "Requests refused", "Mooncake, arXiv 2407.00079v1, table 3")
def rejections(effort: Effort, tell: Tell) -> Evidence:
    """Requests that each mode refuses: on the published cluster, and with both pools short."""
    seed = effort.seeds[0]
    tell("as published, all admitted")
    calm = Overloaded.of(simulate(at_rate(toolagent(seed), 2.0), AS_PUBLISHED))
    found = {}
    for mode in MODES:
        tell(mode)
        found[mode] = overloaded(mode, seed)
    base = found["baseline"]
    published_base = PUBLISHED_REJECTED["baseline"]
    comparisons = [
        Comparison(
            "not in time on 8 and 8, of all",
            100 * published_base / PUBLISHED_REQUESTS,
            100 * (1 - calm.in_time / calm.requests),
            "%",
        ),
        *(
            Comparison(
                f"rejected, {mode}, of the baseline's",
                PUBLISHED_REJECTED[mode] / published_base,
                found[mode].rejected / base.rejected,
            )
            for mode in MODES[1:]
        ),
    ]
    return Evidence(tuple(comparisons), _rejection_statements(found))


def _rejection_statements(found: dict[str, Overloaded]) -> tuple[Statement, ...]:
    base, early, predictive = (found[mode] for mode in MODES)
    rejected = ", ".join(f"{mode} {one.rejected:,}" for mode, one in found.items())
    served = ", ".join(f"{mode} {one.in_time:,}" for mode, one in found.items())
    missed = ", ".join(
        f"{mode} {one.would_have_met:,} of {one.rejected - one.rejected_late:,}"
        for mode, one in found.items()
    )
    return (
        Statement(
            "the baseline rejects most, prediction least",
            base.rejected > early.rejected > predictive.rejected,
            f"{rejected}, of {base.requests:,}",
        ),
        Statement(
            "prediction serves most in time, the baseline least",
            predictive.in_time > early.in_time > base.in_time,
            served,
        ),
        Statement(
            "only the baseline computes prefills for nothing",
            base.wasted_s > 0 and not early.wasted_s and not predictive.wasted_s,
            f"{base.wasted_s:,.0f} of {base.prefill_s:,.0f} GPU seconds, "
            f"{base.rejected_late:,} requests",
        ),
        Statement(
            "most of those rejected on arrival would have been late",
            all(
                2 * one.would_have_met < one.rejected - one.rejected_late for one in found.values()
            ),
            f"in time, each as if it alone had been taken: {missed}",
        ),
    )


def _plot(mode: str, found: Overloaded) -> Plot:
    minutes = tuple((found.times_s / 60).tolist())
    lines = (
        Line("prefill", minutes, tuple((100 * found.prefill).tolist())),
        Line("decode", minutes, tuple((100 * found.decode).tolist())),
    )
    title = f"Loads of both pools, {mode}"
    return Plot(f"mooncake-load-{mode}", title, "minutes", "load, % of the objective", lines)
