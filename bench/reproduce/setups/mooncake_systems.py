"""The four systems of Mooncake's evaluation (FAST '25, section 5) on 16 nodes, and what each of a
workload's requests got of them. Runs are kept: several figures show the same ones."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from ...sim.cluster.colocated import ColocatedOptions, simulate_colocated
from ...sim.cluster.simulation import SimulationOptions, simulate
from ...sim.instances.engine_options import EngineMode, EngineOptions
from ...sim.results.outcomes import longest_gaps_s
from ...traces.scaling import at_rate
from .inputs import conversation
from .synthetic_look_alike import synthetic_look_alike

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ...sim.instances.sim_request import SimRequest
    from ...traces.trace import Trace

NODES = 16
MOONCAKE = "Mooncake"
# Half of the nodes prefill, and KV is handed over layer by layer while it is computed (section 4.1
# of the paper; figure 7 of its report).
MOONCAKE_CLUSTER = SimulationOptions(prefill=NODES // 2, decode=NODES // 2, layerwise=True)
ENGINES = {
    "vLLM": EngineOptions(EngineMode.PLAIN),
    "vLLM, prefix caching": EngineOptions(EngineMode.PREFIX),
    "vLLM, chunked prefill": EngineOptions(EngineMode.CHUNKED),
}
SYSTEMS = (MOONCAKE, *ENGINES)


@dataclass(frozen=True, slots=True)
class Workload:
    """ "conversation", or "synthetic", its look-alike, of a seed; at so many times its rate."""

    name: str
    rate: float = 1.0
    seed: int = 0

    def trace(self) -> Trace:
        """Its requests."""
        whole = conversation() if self.name == "conversation" else synthetic_look_alike(self.seed)
        return at_rate(whole, self.rate)


@dataclass(frozen=True, slots=True, eq=False)
class Served:
    """Of each request, in order of arrival: TTFT, the mean of the longest tenth of its gaps, and
    GPU seconds of its prefill; infinite for one that was not served."""

    ttft_s: NDArray[np.float64]
    tbt_s: NDArray[np.float64]
    compute_s: NDArray[np.float64]

    def effective(self, ttft_s: float, tbt_s: float) -> float:
        """Per cent of the requests that met both."""
        return 100 * float(np.mean((self.ttft_s <= ttft_s) & (self.tbt_s <= tbt_s)))


@cache
def disaggregated(workload: Workload, options: SimulationOptions) -> Served:
    """By a cluster that the conductor schedules."""
    return _served(simulate(workload.trace(), options).jobs)


@cache
def colocated(workload: Workload, engine: EngineOptions) -> Served:
    """By engines that prefill and decode on the same GPUs."""
    options = ColocatedOptions(NODES, engine)
    return _served(simulate_colocated(workload.trace(), options).jobs)


def served(system: str, workload: Workload) -> Served:
    """By one of `SYSTEMS`."""
    if system == MOONCAKE:
        return disaggregated(workload, MOONCAKE_CLUSTER)
    return colocated(workload, ENGINES[system])


def _served(jobs: Sequence[SimRequest]) -> Served:
    rows = [
        (job.ttft_s, longest_gaps_s(job) if job.gaps_s else 0.0, job.compute_s)
        if job.ended_s is not None
        else (np.inf, np.inf, np.inf)
        for job in jobs
    ]
    ttft_s, tbt_s, compute_s = np.asarray(rows, np.float64).T
    return Served(ttft_s, tbt_s, compute_s)
