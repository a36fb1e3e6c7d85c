"""How much slower the hardware was under load than its profile says, from a recording. Pure.

An instance's real time is nearly a constant multiple of its profile's, one for prefills and one for
steps of decoding (docs/conductor/cost.md); here they are ratios of sums, so that the profile's work
takes as long in all as it did.

A recording has no time of a prefill alone, but on one instance prompts are computed one after the
other: a prefill began when its request came, or when the one before it ended, and ended with its
first token. Of caches it used what its decision meant to, or more: blocks of prompts that were
computed on its instance while it waited.

A request's gaps are steps of the batches that it was in: their size and context are means over the
time between its first token and its last.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from tiffin.conductor.cost import latency_profiles
from tiffin.conductor.cost.latency_model import decode_step_s, prefill_s
from tiffin.kvstore.errors import InvalidInput

from ..sim.nodes.block_cache import BlockCache

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from tiffin.conductor.cost.latency_profiles import Profile
    from tiffin.conductor.cost.profile_fit import Point
    from tiffin.conductor.recording.lines import RequestLine

    Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Memory:
    """For blocks, of each instance's node."""

    tokens: int
    block_tokens: int

    def cache(self) -> BlockCache:
        """An empty one."""
        return BlockCache(self.tokens // self.block_tokens)


def calibrated(
    profile: Profile,
    requests: Sequence[RequestLine],
    memory: Memory,
    used: Callable[[int], bool] = lambda number: True,
) -> Profile:
    """The profile, as much slower or faster as the requests, by arrival, of those numbers that are
    `used`. Raises InvalidInput if none of them was served."""
    prefill = np.array([row for number, row in prefill_points(requests, memory) if used(number)])
    decode = np.array([row for number, row in decode_points(requests) if used(number)])
    if not len(prefill) or not len(decode):
        raise InvalidInput("no request of the recording was served: there is nothing to learn from")
    slower = _ratio(prefill, prefill_s(*profile.prefill, prefill[:, 0], prefill[:, 1]))
    steps = _ratio(decode, decode_step_s(*profile.decode, decode[:, 0], decode[:, 1]))
    c0, c1, c2 = (coefficient * slower for coefficient in profile.prefill)
    d0, d1, d2 = (coefficient * steps for coefficient in profile.decode)
    source = f"{profile.source}; prefills x {slower:.3f}, steps x {steps:.3f} as recorded"
    return latency_profiles.validate(
        msgspec.structs.replace(
            profile, prefill=(c0, c1, c2), decode=(d0, d1, d2), source=source[-1000:]
        )
    )


def _ratio(points: Floats, predicted_s: Floats) -> float:
    return float(points[:, 2].sum() / predicted_s.sum())


def prefill_points(requests: Sequence[RequestLine], memory: Memory) -> list[tuple[int, Point]]:
    """(number, (prompt tokens, cached tokens, seconds)) of each prefill that is known."""
    ends = [
        (one.prefill, one.arrival_s + ttft_s, number)
        for number, one in enumerate(requests)
        if (ttft_s := one.ttft_s) is not None and one.decisions == 1
    ]
    found: list[tuple[int, Point]] = []
    for _, of_instance in groupby(sorted(ends), key=lambda end: end[0]):
        free_s, cache = -np.inf, memory.cache()
        for _, end_s, number in of_instance:
            one = requests[number]
            keys = [block.to_bytes(8) for block in one.blocks]
            there = max(one.cached_tokens, cache.match(keys) * memory.block_tokens)
            cached = min(there, one.prompt_tokens - 1)
            cache.put(keys)
            seconds = end_s - max(one.arrival_s, free_s)
            free_s = end_s
            if seconds > 0:
                found.append((number, (one.prompt_tokens, cached, seconds)))
    return found


def decode_points(requests: Sequence[RequestLine]) -> list[tuple[int, Point]]:
    """(number, (requests in the batch, their context in tokens, seconds of a step)), means of each
    answer of several tokens."""
    answers = [
        (one.decode, number)
        for number, one in enumerate(requests)
        if one.ttft_s is not None and one.tbt_s and one.decisions == 1
    ]
    found: list[tuple[int, Point]] = []
    for _, of_instance in groupby(sorted(answers), key=lambda answer: answer[0]):
        numbers = [number for _, number in of_instance]
        found += _of_instance(requests, numbers)
    return found


def _of_instance(requests: Sequence[RequestLine], numbers: list[int]) -> list[tuple[int, Point]]:
    ones = [requests[number] for number in numbers]
    begin = np.array([one.arrival_s + (one.ttft_s or 0.0) for one in ones])
    tbt_s = np.array([one.tbt_s or 0.0 for one in ones])
    end = begin + tbt_s * np.array([max(1, one.output_tokens - 1) for one in ones])
    context = np.array([one.prompt_tokens + one.output_tokens / 2 for one in ones])
    batch = _means(begin, end, np.ones(len(ones)))
    together = _means(begin, end, context)
    rows = zip(numbers, batch.tolist(), together.tolist(), tbt_s.tolist(), strict=True)
    return [(number, (max(1.0, size), tokens, step_s)) for number, size, tokens, step_s in rows]


def _means(begin: Floats, end: Floats, weight: Floats) -> Floats:
    """For each interval the mean, over it, of the weights of all intervals that are on."""
    times = np.concatenate((begin, end))
    order = np.argsort(times, kind="stable")
    times = times[order]
    level = np.cumsum(np.concatenate((weight, -weight))[order])
    integral = np.concatenate(([0.0], np.cumsum(level[:-1] * np.diff(times))))
    area = np.interp(end, times, integral) - np.interp(begin, times, integral)
    return np.asarray(area / (end - begin))
