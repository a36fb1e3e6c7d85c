"""Our simulation of one role at a time beside measured runs on A100.

DistServe's repository has what was measured for its simulator's validation (OSDI '24, section 6.4;
`simdistserve/benchmarks/alignment/data-ground-truth`, OPT-13B on ShareGPT, removed later): TTFT and
TPOT of each request, of vLLM on one GPU, and of DistServe with a prefill instance on two and a
decode instance on one. Attainments and medians below are computed from these files.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ....planning.attainment import tbt_s, ttft_s
from ....planning.batching_role import colocated_s
from ....plots import Line, Plot
from ...evidence import Comparison, Evidence, Statement
from ...registry import reproduction
from ...setups.distserve_inputs import APPLICATIONS, distserve, vllm

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from ....planning.workload import Workload
    from ...registry import Effort, Tell

    Seconds = NDArray[np.float64]
    Simulate = Callable[[Workload], tuple[Seconds, Seconds]]

_CHAT = APPLICATIONS[0]


@dataclass(frozen=True, slots=True)
class Run:
    """A measured run: so many requests at a rate; the share that met a TTFT of 0.25 s and a TPOT of
    0.1 s, and medians in seconds."""

    requests: int
    rate: float
    attained: float
    ttft_s: float
    tpot_s: float


VLLM = (
    Run(100, 1.0, 0.860, 0.147, 0.031),
    Run(150, 1.5, 0.847, 0.146, 0.042),
    Run(200, 2.0, 0.665, 0.183, 0.062),
    Run(250, 2.5, 0.780, 0.154, 0.063),
    Run(300, 3.0, 0.340, 0.230, 0.096),
    Run(350, 3.5, 0.254, 0.289, 0.101),
    Run(400, 4.0, 0.080, 4.174, 0.113),
)
DISTSERVE = (
    Run(300, 3.0, 0.983, 0.083, 0.039),
    Run(300, 4.5, 0.967, 0.085, 0.049),
    Run(300, 6.0, 0.953, 0.095, 0.059),
    Run(600, 6.0, 0.647, 0.099, 0.076),
    Run(300, 7.5, 0.797, 0.104, 0.066),
    Run(750, 7.5, 0.335, 0.109, 0.139),
    Run(300, 9.0, 0.627, 0.127, 0.073),
)


def together(workload: Workload) -> tuple[Seconds, Seconds]:
    """TTFT and TPOT on one GPU with vLLM's speed."""
    first_s, gaps_s = colocated_s(
        workload, vllm("opt-13b").units(1)[0].engine(), _CHAT.goals.tbt_of
    )
    return first_s - workload.arrivals_s, gaps_s


def apart(workload: Workload) -> tuple[Seconds, Seconds]:
    """TTFT and TPOT on a prefill instance of two GPUs and a decode instance of one."""
    hardware = distserve("opt-13b")
    one, two = (hardware.unit(profile, 1) for profile in hardware.profiles[:2])
    waited_s = ttft_s(workload, two, _CHAT.goals)
    return waited_s, tbt_s(workload, workload.arrivals_s + waited_s, one, _CHAT.goals)


_NOTE = """Each decode step of the measured runs took 4 to 6 ms more than the published profile.
Attainments differ most where they fall steeply with the rate."""


@reproduction("distserve-measured", "Simulated roles beside measured ones", "DistServe, repository")
def measured(effort: Effort, tell: Tell) -> Evidence:
    """Attainment and medians at each rate. The lengths are drawn anew, so that a run of some
    hundred requests is not the same one."""
    comparisons, statements, lines = [], [], []
    for system, runs, simulate in (("vLLM", VLLM, together), ("DistServe", DISTSERVE, apart)):
        ours, off = [], []
        for run in runs:
            tell(f"{system}, {run.rate} requests/s")
            found = [_figures(run, seed, simulate) for seed in (*effort.seeds, *range(10, 18))]
            attained, ttft, tpot = np.mean(found, axis=0).tolist()
            ours.append(attained)
            off.append(ttft / run.ttft_s - 1)
            at = f"{system}, {run.requests} requests at {run.rate:g}/s"
            comparisons.append(
                Comparison(f"attainment, {at}", 100 * run.attained, 100 * attained, "%")
            )
            comparisons.append(Comparison(f"median TPOT, {at}", run.tpot_s, tpot, "s"))
        errors = [abs(mine - run.attained) for mine, run in zip(ours, runs, strict=True)]
        figures = (
            f"attainment: mean {100 * np.mean(errors):.1f} points, worst {100 * max(errors):.1f}; "
            f"median TTFT: median of deviations {100 * np.median(off):+.0f}%"
        )
        text = f"{system}: attainment within 10 points on average"
        statements.append(Statement(text, bool(np.mean(errors) < 0.1), figures))
        lines += _lines(system, runs, ours)
    title = "OPT-13B on ShareGPT: requests within 0.25 s and 0.1 s"
    plot = Plot("distserve-measured", title, "requests/s", "%", tuple(lines))
    return Evidence(tuple(comparisons), tuple(statements), (plot,), (_NOTE,))


def _figures(run: Run, seed: int, simulate: Simulate) -> tuple[float, float, float]:
    workload = _CHAT.workload(run.requests, seed)
    waited_s, gaps_s = simulate(workload.faster(run.rate / workload.rate))
    goals = _CHAT.goals
    attained = np.mean((waited_s <= goals.ttft_s) & (gaps_s <= goals.tbt_s))
    return float(attained), float(np.median(waited_s)), float(np.median(gaps_s))


def _lines(system: str, runs: tuple[Run, ...], ours: list[float]) -> list[Line]:
    """Short and long runs at one rate differ: of each rate, the shorter one is drawn."""
    kept = {run.rate: (run, mine) for run, mine in reversed(list(zip(runs, ours, strict=True)))}
    points = sorted(kept.items())
    rates = tuple(rate for rate, _ in points)
    return [
        Line(system, rates, tuple(100 * mine for _, (_, mine) in points)),
        Line(
            f"{system}, measured",
            rates,
            tuple(100 * run.attained for _, (run, _) in points),
            "dots",
        ),
    ]
