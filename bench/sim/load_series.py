"""The load of both pools over time, as a conductor sees it.

    load of an instance that prefills = predicted time to the first token / its objective
    load of an instance that decodes  = predicted time between tokens / its objective

The load of a pool is the mean over its instances (Mooncake, arXiv 2407.00079, section 7.1).
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from tiffin.conductor.cost.latency_model import decode_step_s

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tiffin.conductor.core import Conductor
    from tiffin.conductor.records import Objectives

    Loads = NDArray[np.float64]

_PRIORITY = "normal"


@dataclass(slots=True)
class LoadSeries:
    """A sample for each heartbeat: seconds, and the load of each pool, 1 at its objective; of
    prefill, the queue only. A pool without an objective has a load of 0."""

    times_s: array[float] = field(default_factory=lambda: array("d"))
    prefill: array[float] = field(default_factory=lambda: array("d"))
    decode: array[float] = field(default_factory=lambda: array("d"))

    def sample(self, core: Conductor, model: str, objectives: Objectives, now: float) -> None:
        """Add the present load."""
        self.times_s.append(now)
        cluster = core.cluster
        rows = cluster.rows_for(model, prefill=True)
        waits_s = core.queues.wait_s(rows, _PRIORITY, 0.0, now)
        self.prefill.append(_mean_load(waits_s, objectives.ttft_s))
        rows = cluster.rows_for(model, prefill=False)
        d0, d1, d2, batch, context = (
            getattr(cluster, name).take(rows)
            for name in ("d0", "d1", "d2", "batch", "context_tokens")
        )
        self.decode.append(_mean_load(decode_step_s(d0, d1, d2, batch, context), objectives.tbt_s))

    def between(self, start_s: float, stop_s: float) -> tuple[Loads, Loads, Loads]:
        """Times and loads of prefill and decode in [start_s, stop_s)."""
        times_s = np.array(self.times_s)
        within = (times_s >= start_s) & (times_s < stop_s)
        prefill, decode = np.array(self.prefill), np.array(self.decode)
        return times_s[within], prefill[within], decode[within]


def lowest_correlation(prefill: Loads, decode: Loads, lags: int) -> tuple[float, int]:
    """The lowest correlation of two series over lags of up to so many samples of the second one
    behind the first, and that lag. -1 at a lag: they swing against each other. (0, 0) if a series
    never changes."""
    found = [
        (_correlation(prefill[: len(prefill) - lag], decode[lag:]), lag) for lag in range(lags)
    ]
    return min(found, default=(0.0, 0))


def _correlation(one: Loads, other: Loads) -> float:
    if len(one) < 2 or not one.std() or not other.std():
        return 0.0
    return float(np.corrcoef(one, other)[0, 1])


def _mean_load(seconds: Loads, objective_s: float | None) -> float:
    return float(seconds.mean()) / objective_s if objective_s and len(seconds) else 0.0
