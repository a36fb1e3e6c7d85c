"""Instances that only prefill, fast: when each request has its first token. Pure."""

from __future__ import annotations

from heapq import heapreplace
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from .workload import Workload


def first_tokens_s(
    workload: Workload,
    prefill: tuple[float, float, float],
    *,
    instances: int = 1,
    stages: int = 1,
    batch_tokens: int = 0,
) -> NDArray[np.float64]:
    """Times of first tokens, [requests]. `prefill` are a latency profile's c0, c1, c2.

    Prompts wait in one queue, in order of arrival; an instance that is free takes the next, and
    those behind it as long as the batch has at most `batch_tokens` tokens. An instance is a
    pipeline of `stages` equal stages: a batch takes as long as without, but the next one may follow
    as soon as the first stage is done (DistServe, OSDI '24, sections 3.1 and 4.3).
    """
    arrivals_s = workload.arrivals_s.tolist()
    prompts = workload.prompt_tokens.tolist()
    linear, square = _work(workload)
    fixed_s, token_s, pair_s = prefill
    found_s = np.empty(len(arrivals_s))
    free = [(0.0, number) for number in range(instances)]  # a heap by when the first stage is free
    stage_free_s = [[0.0] * stages for _ in range(instances)]
    at = 0
    while at < len(arrivals_s):
        free_s, number = free[0]
        start_s = max(free_s, arrivals_s[at])
        end = _batch_end(arrivals_s, prompts, at, start_s, batch_tokens)
        work_s = fixed_s + token_s * sum(linear[at:end]) + pair_s * sum(square[at:end])
        ready_s = start_s
        stages_s = stage_free_s[number]
        for stage in range(stages):
            ready_s = stages_s[stage] = max(ready_s, stages_s[stage]) + work_s / stages
        found_s[at:end] = ready_s
        heapreplace(free, (stages_s[0], number))
        at = end
    return found_s


def _work(workload: Workload) -> tuple[list[int], list[int]]:
    """Tokens that are computed, and pairs of them with those they attend to."""
    prompt, cached = workload.prompt_tokens, workload.cached_tokens
    return (prompt - cached).tolist(), (prompt * prompt - cached * cached).tolist()


def _batch_end(
    arrivals_s: Sequence[float], prompts: Sequence[int], at: int, start_s: float, tokens_max: int
) -> int:
    """The first request after `at` that is not in its batch."""
    tokens, end = prompts[at], at + 1
    while end < len(prompts) and arrivals_s[end] <= start_s:
        tokens += prompts[end]
        if tokens > tokens_max:
            break
        end += 1
    return end
