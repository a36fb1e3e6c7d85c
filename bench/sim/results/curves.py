"""Curves of simulations side by side: distributions, and loads over time."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ...plots import Line, Plot
from .outcomes import longest_gaps_s

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..cluster.load_series import LoadSeries
    from ..instances.sim_request import SimRequest
    from .outcomes import Summary

_POINTS = 400  # of a curve


class SimulationRun(NamedTuple):
    """What is shown of one simulation; `loads` only where a conductor knows them."""

    summary: Summary
    jobs: Sequence[SimRequest]
    loads: LoadSeries | None = None


def curves(runs: Sequence[SimulationRun]) -> list[Plot]:
    """TTFT and TBT as shares of requests up to a time, and the loads of both pools over time."""
    ttft = tuple(_distribution(run.summary.policy, _ttft_s(run.jobs)) for run in runs)
    tbt = tuple(_distribution(run.summary.policy, _tbt_s(run.jobs)) for run in runs)
    share = "share of requests"
    return [
        Plot("ttft", "Time to the first token", "seconds", share, ttft, log_x=True),
        Plot("tbt", "Time between tokens, longest tenth", "seconds", share, tbt, log_x=True),
        *(
            _loads(run)
            for run in runs
            if run.loads is not None and max(run.loads.prefill, default=0)
        ),
    ]


def _ttft_s(jobs: Sequence[SimRequest]) -> list[float]:
    return [job.ttft_s for job in jobs if job.ended_s is not None and job.ttft_s is not None]


def _tbt_s(jobs: Sequence[SimRequest]) -> list[float]:
    return [longest_gaps_s(job) for job in jobs if job.ended_s is not None and job.gaps_s]


def _distribution(name: str, seconds: Sequence[float]) -> Line:
    shares = np.linspace(0, 1, min(_POINTS, max(len(seconds), 1)))
    values = np.quantile(seconds, shares) if seconds else np.zeros(len(shares))
    return Line(name, tuple(values.tolist()), tuple(shares.tolist()))


def _loads(run: SimulationRun) -> Plot:
    assert run.loads is not None
    step = max(1, len(run.loads.times_s) // _POINTS)
    times_s = tuple(run.loads.times_s[::step])
    lines = tuple(
        Line(name, times_s, tuple(series[::step]))
        for name, series in (("prefill", run.loads.prefill), ("decode", run.loads.decode))
    )
    name = run.summary.policy
    return Plot(f"load-{name}", f"Load, {name}", "seconds", "of the objective", lines)
