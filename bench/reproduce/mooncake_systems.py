"""The four systems of Mooncake's evaluation (FAST '25, section 5) on 16 nodes, and what each of a
workload's requests got of them. Runs are kept: several figures show the same ones."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from ..sim.colocated import ColocatedOptions, simulate_colocated
from ..sim.colocated_instance import EngineMode, EngineOptions
from ..sim.outcomes import longest_gaps_s
from ..sim.simulation import SimulationOptions, simulate
from ..traces.scaling import at_rate
from .inputs import conversation
from .synthetic_look_alike import synthetic_look_alike

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ..sim.network import CompletedTransfer
    from ..sim.sim_request import SimRequest
    from ..traces.trace import Trace

NODES = 16
MOONCAKE = "Mooncake"
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
class Transfers:
    """How many, their mean bytes and seconds, and those of one that has its cards alone."""

    number: int
    nbytes: float
    seconds: float
    alone_s: float


@dataclass(frozen=True, slots=True, eq=False)
class Served:
    """Of each request, in order of arrival: TTFT, the mean of the longest tenth of its gaps, and
    GPU seconds of its prefill; infinite for one that was not served. `fetches` go to instances that
    prefill, `hand_overs` to those that decode."""

    ttft_s: NDArray[np.float64]
    tbt_s: NDArray[np.float64]
    compute_s: NDArray[np.float64]
    fetches: Transfers | None = None
    hand_overs: Transfers | None = None

    def effective(self, ttft_s: float, tbt_s: float) -> float:
        """Per cent of the requests that met both."""
        return 100 * float(np.mean((self.ttft_s <= ttft_s) & (self.tbt_s <= tbt_s)))


@cache
def disaggregated(workload: Workload, options: SimulationOptions) -> Served:
    """By a cluster that the conductor schedules."""
    outcome = simulate(workload.trace(), options)
    to_decode = [one for one in outcome.transfers if one.target.startswith("decode")]
    to_prefill = [one for one in outcome.transfers if not one.target.startswith("decode")]
    rate = options.bandwidth_bytes_s
    return _served(outcome.jobs, _transfers(to_prefill, rate), _transfers(to_decode, rate))


@cache
def colocated(workload: Workload, engine: EngineOptions) -> Served:
    """By engines that prefill and decode on the same GPUs."""
    options = ColocatedOptions(NODES, engine)
    return _served(simulate_colocated(workload.trace(), options).jobs)


def served(system: str, workload: Workload) -> Served:
    """By one of `SYSTEMS`; Mooncake prefills on half of the nodes, and decodes on the others."""
    if system == MOONCAKE:
        half = NODES // 2
        return disaggregated(workload, SimulationOptions(prefill=half, decode=half))
    return colocated(workload, ENGINES[system])


def _served(
    jobs: Sequence[SimRequest],
    fetches: Transfers | None = None,
    hand_overs: Transfers | None = None,
) -> Served:
    rows = [
        (job.ttft_s, longest_gaps_s(job) if job.gaps_s else 0.0, job.compute_s)
        if job.ended_s is not None
        else (np.inf, np.inf, np.inf)
        for job in jobs
    ]
    ttft_s, tbt_s, compute_s = np.asarray(rows, np.float64).T
    return Served(ttft_s, tbt_s, compute_s, fetches, hand_overs)


def _transfers(some: Sequence[CompletedTransfer], bandwidth_bytes_s: float) -> Transfers:
    if not some:
        return Transfers(0, 0.0, 0.0, 0.0)
    nbytes = float(np.mean([one.nbytes for one in some]))
    seconds = float(np.mean([one.seconds for one in some]))
    return Transfers(len(some), nbytes, seconds, nbytes / bandwidth_bytes_s)
