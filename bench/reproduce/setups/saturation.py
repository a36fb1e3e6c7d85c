"""The rate at which a scheduler's prefill saturates."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...sim.cluster.simulation import SimulationOptions, simulate
from ...traces.scaling import at_rate
from .fleets import prefill_rate

if TYPE_CHECKING:
    from ...traces.trace import Trace


def saturating_factor(trace: Trace, options: SimulationOptions) -> float:
    """How many times faster the trace has to come for all GPUs that prefill to be busy all the
    time: the seconds that they compute are those from the first arrival to the last. Faster, and
    the queues grow for as long as the trace lasts, whatever is done about bursts.

    What a request takes to compute is measured at the rate at which an ideal cache would saturate:
    near saturation it hardly depends on the rate.
    """
    guess = prefill_rate(trace, options) / trace.rate
    jobs = simulate(at_rate(trace, guess), options).jobs
    busy_s = sum(job.compute_s for job in jobs) / options.prefill
    return trace.span_s / busy_s
