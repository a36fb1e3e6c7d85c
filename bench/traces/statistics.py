"""What describes a trace: rate, lengths, what its prompts share, bursts and conversations."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from math import ceil
from statistics import fmean, pstdev
from typing import TYPE_CHECKING

from .ideal_cache import hit_share
from .turns import depths, previous_turns

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .trace import Trace

CAPACITIES = (1_000, 8_000, 32_000)  # blocks of the ideal caches that are compared


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean and percentiles of a quantity, by nearest rank."""

    mean: float
    p50: int
    p90: int
    p99: int
    max: int

    @classmethod
    def of(cls, values: Sequence[int]) -> Spread:
        """The spread of at least one value."""
        ordered = sorted(values)
        p50, p90, p99 = (ordered[ceil(len(ordered) * share) - 1] for share in (0.5, 0.9, 0.99))
        return cls(fmean(ordered), p50, p90, p99, ordered[-1])


@dataclass(frozen=True, slots=True)
class Sharing:
    """What the prompts have in common. Hit shares are of all prompt tokens, hits of full blocks."""

    distinct_blocks: int  # partial ones included
    used_once: float  # share of the distinct blocks
    infinite_hit: float
    lru_hit: dict[int, float]  # by the capacity in blocks
    later_turns: float  # share of the requests that go on with an earlier one
    turn: Spread  # of each request, from 1


@dataclass(frozen=True, slots=True)
class TraceStatistics:
    """A trace in numbers. `gap_variation` is the standard deviation of the gaps between arrivals
    over their mean: 1 for a Poisson process, more for bursts. `sharing` is None without ids."""

    name: str
    requests: int
    span_s: float
    rate: float  # requests per second
    gap_variation: float
    prompt_tokens: Spread
    output_tokens: Spread
    sharing: Sharing | None


def describe(trace: Trace) -> TraceStatistics:
    """The statistics of a trace that has at least one request."""
    requests = trace.requests
    return TraceStatistics(
        trace.name,
        len(requests),
        trace.span_s,
        trace.rate,
        gap_variation([request.arrival_s for request in requests]),
        Spread.of([request.prompt_tokens for request in requests]),
        Spread.of([request.output_tokens for request in requests]),
        _sharing(trace) if trace.has_blocks else None,
    )


def gap_variation(arrivals_s: Sequence[float]) -> float:
    """Coefficient of variation of the gaps; 0 if there are none."""
    gaps = [later - earlier for earlier, later in pairwise(arrivals_s)]
    mean = fmean(gaps) if gaps else 0.0
    return pstdev(gaps) / mean if mean else 0.0


def _sharing(trace: Trace) -> Sharing:
    uses = Counter(block for request in trace.requests for block in request.blocks)
    turns = depths(previous_turns(trace))
    return Sharing(
        len(uses),
        sum(count == 1 for count in uses.values()) / len(uses),
        hit_share(trace, None),
        {capacity: hit_share(trace, capacity) for capacity in CAPACITIES},
        sum(turn > 1 for turn in turns) / len(turns),
        Spread.of(turns),
    )
