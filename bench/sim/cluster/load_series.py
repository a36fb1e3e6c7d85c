"""The load of both pools over time.

    load of an instance that prefills = predicted time to the first token / its objective
    load of an instance that decodes  = time between tokens / its objective

The load of a pool is the mean over its instances (Mooncake, arXiv 2407.00079, section 7.1).
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from tiffin.conductor.records import Objectives

    Loads = NDArray[np.float64]


@dataclass(slots=True)
class LoadSeries:
    """A sample for each heartbeat: seconds, and the load of each pool, 1 at its objective. A pool
    without an objective has a load of 0."""

    times_s: array[float] = field(default_factory=lambda: array("d"))
    prefill: array[float] = field(default_factory=lambda: array("d"))
    decode: array[float] = field(default_factory=lambda: array("d"))

    def sample(
        self, now: float, waits_s: Loads, steps_s: Sequence[float], objectives: Objectives
    ) -> None:
        """Add a sample: how long a prompt would wait at each instance that prefills, and a step of
        each that decodes."""
        self.times_s.append(now)
        self.prefill.append(_mean(waits_s) / (objectives.ttft_s or np.inf))
        self.decode.append(_mean(steps_s) / (objectives.tbt_s or np.inf))

    def between(self, start_s: float, stop_s: float) -> tuple[Loads, Loads, Loads]:
        """Times and loads of prefill and decode in [start_s, stop_s)."""
        times_s = np.array(self.times_s)
        within = (times_s >= start_s) & (times_s < stop_s)
        return times_s[within], np.array(self.prefill)[within], np.array(self.decode)[within]


def correlation(prefill: Loads, decode: Loads, lag: int = 0) -> float:
    """Of the first series with the second one `lag` samples later: -1 if they swing against each
    other; 0 if one of them never changes."""
    one, other = prefill[: len(prefill) - lag], decode[lag:]
    if len(one) < 2 or not one.std() or not other.std():
        return 0.0
    return float(np.corrcoef(one, other)[0, 1])


def _mean(values: Sequence[float] | Loads) -> float:
    return float(np.mean(values)) if len(values) else 0.0
