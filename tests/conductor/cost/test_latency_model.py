"""The latency formulas: effects of caches, lengths and batches, and values measured in papers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiffin.conductor.cost.latency_model import (
    decode_step_s,
    prefill_s,
)
from tiffin.conductor.cost.latency_profiles import DEFAULT, load, names

if TYPE_CHECKING:
    from tiffin.conductor.cost.latency_profiles import Profile

PROFILES = st.sampled_from(names()).map(load)
TOKENS = st.integers(1, 1_000_000)


@given(PROFILES, TOKENS, st.integers(0, 1_000_000), st.integers(0, 1_000_000))
def test_a_better_cache_never_takes_longer(profile: Profile, n: int, p: int, more: int) -> None:
    less_s = prefill_s(*profile.prefill, n, min(p + more, n))
    assert 0 < less_s <= prefill_s(*profile.prefill, n, p)


@given(PROFILES, TOKENS, st.integers(1, 100_000), st.integers(0, 1_000_000))
def test_a_longer_prompt_takes_longer(profile: Profile, n: int, more: int, p: int) -> None:
    assert prefill_s(*profile.prefill, n + more, p) >= prefill_s(*profile.prefill, n, p)
    assert prefill_s(*profile.prefill, n + more, 0) > prefill_s(*profile.prefill, n, 0)


@given(PROFILES, st.integers(1, 512), st.integers(0, 512), TOKENS, st.integers(0, 100_000))
def test_more_to_decode_never_takes_less(
    profile: Profile, batch: int, others: int, context: int, more: int
) -> None:
    alone_s = decode_step_s(*profile.decode, batch, context)
    assert 0 < alone_s <= decode_step_s(*profile.decode, batch + others, context + more)


def test_the_last_token_is_always_computed() -> None:
    c0, c1, c2 = 1.0, 0.5, 0.25
    everything_cached = prefill_s(c0, c1, c2, 100, 100)
    assert everything_cached == prefill_s(c0, c1, c2, 100, 99)
    assert everything_cached == pytest.approx(c0 + c1 + c2 * (100**2 - 99**2))


def test_arrays_give_what_numbers_give() -> None:
    profile = load(DEFAULT)
    n, p = np.array([1, 512, 8192, 131072]), np.array([0, 512, 4096, 9])
    many = prefill_s(*profile.prefill, n, p)
    assert many.dtype == np.float64
    assert many.tolist() == [
        pytest.approx(float(prefill_s(*profile.prefill, int(a), int(b))))
        for a, b in zip(n, p, strict=True)
    ]
    steps = decode_step_s(*profile.decode, np.array([1, 64]), np.array([8192, 64 * 8192]))
    assert steps[1] > steps[0]


def test_squares_of_long_prompts_do_not_overflow() -> None:
    n = np.array([16 << 20], np.int32)
    assert prefill_s(0.0, 1e-5, 1e-10, n, 0)[0] == pytest.approx(
        (16 << 20) * 1e-5 + 2.0**48 * 1e-10
    )
