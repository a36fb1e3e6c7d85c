"""Profiles and workloads for tests."""

from __future__ import annotations

import numpy as np

from tiffin.bench.planning.workload import Fixed, Workload, poisson
from tiffin.conductor.cost.latency_profiles import Profile


def profile(degree: int = 1, *, prefill_s: float = 0.1, step_s: float = 0.02) -> Profile:
    """Of an engine that takes about so long for 1,000 tokens, and for a step."""
    return Profile(
        name=f"test.tp{degree}",
        model="Test",
        hardware=f"{degree} x Test",
        tensor_parallel=degree,
        source="made up",
        licence="none",
        prefill=(0.0, prefill_s / 1000, 0.0),
        decode=(step_s, 1e-4, 0.0),
    )


def requests(*arrivals_s: float, prompt: int = 1000, cached: int = 0, output: int = 11) -> Workload:
    """Equal requests at these times."""
    count = len(arrivals_s)
    return Workload(
        "test",
        np.asarray(arrivals_s, np.float64),
        np.full(count, prompt),
        np.full(count, cached),
        np.full(count, output),
    )


def stream(count: int = 1000, *, prompt: int = 1000, output: int = 20, seed: int = 1) -> Workload:
    """A Poisson process of one equal request per second."""
    return poisson("stream", Fixed(prompt), Fixed(output), count, seed)
