"""The capacity of instances and fleets: formulas against simulation, brute force and papers."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiffin.conductor.pool.capacity_model import (
    Capacity,
    Goals,
    Workload,
    best_split,
    capacity,
    decode_batch,
    fleet_rate,
    prefill_rate,
    service_s,
)
from tiffin.conductor.pool.role_flip import FleetMember
from tiffin.conductor.records import Role

# Mooncake, FAST '25, figure 14: Llama 3 70B on eight A800.
A800 = (0.0982, 1.0428e-4, 9.229e-10, 0.0262, 1.4e-4, 3.6e-8)


def instance(**numbers: object) -> FleetMember:
    return FleetMember("i", Role.PREFILL, True, latency=A800, **numbers)  # type: ignore[arg-type]


def mean_ttft_s(rate: float, service_s: float, variation: float) -> float:
    """The mean TTFT at `rate` prompts per second; infinite from full use on."""
    load = rate * service_s
    if load >= 1:
        return math.inf
    return service_s + load * service_s * (1 + variation * variation) / (2 * (1 - load))


class TestPrefill:
    def test_service_is_the_profile(self) -> None:
        """8,192 tokens: 1.003 s uncached, within 10 %; 0.135 s with 95 % cached, within 20 %."""
        assert service_s(A800, Workload(8192, 8192, 1)) == pytest.approx(1.003, rel=0.1)
        assert service_s(A800, Workload(8192, 410, 1)) == pytest.approx(0.135, rel=0.2)
        assert service_s(A800, Workload(8192, 8192, 1, prefill_factor=2)) == pytest.approx(
            2 * service_s(A800, Workload(8192, 8192, 1))
        )

    def test_the_formula_is_distserves_md1(self) -> None:
        """R D² / (2 (1 - R D)) + D with R = 0.5 and D = 1: 1.5 s."""
        assert mean_ttft_s(0.5, 1.0, 0.0) == pytest.approx(1.5)
        assert mean_ttft_s(1.0, 1.0, 0.0) == math.inf

    @given(one_s=st.floats(0.01, 5), variation=st.floats(0, 3), ttft_s=st.floats(0.02, 60))
    def test_at_that_rate_the_mean_ttft_is_the_objective(
        self, one_s: float, variation: float, ttft_s: float
    ) -> None:
        rate = prefill_rate(one_s, variation, Goals(ttft_s, 0.1, utilisation_max=1.0))
        if one_s >= ttft_s:
            assert rate == 0.0
        elif rate * one_s < 0.999:
            assert mean_ttft_s(rate, one_s, variation) == pytest.approx(ttft_s, rel=1e-3)

    def test_a_simulated_queue_agrees(self) -> None:
        """200,000 random arrivals at one server."""
        dice = random.Random(1)
        rate, one_s = 0.7, 1.0
        now = free_at = total_s = 0.0
        for _ in range(200_000):
            now += dice.expovariate(rate)
            free_at = max(free_at, now) + one_s
            total_s += free_at - now
        assert total_s / 200_000 == pytest.approx(mean_ttft_s(rate, one_s, 0.0), rel=0.03)


class TestDecode:
    @given(
        batch_max=st.integers(1, 512),
        room=st.integers(1_000, 4_000_000),
        prompt=st.integers(1, 100_000),
        tbt_s=st.floats(0.01, 0.5),
    )
    def test_the_batch_is_the_largest_that_fits(
        self, batch_max: int, room: int, prompt: int, tbt_s: float
    ) -> None:
        work = Workload(prompt, prompt, 200)
        member = instance(batch_max=batch_max, kv_capacity_tokens=room)

        def fits(batch: int) -> bool:
            step_s = A800[3] + batch * (A800[4] + A800[5] * work.context_tokens)
            in_time = step_s <= tbt_s * (1 + 1e-9)
            return in_time and batch <= batch_max and batch * (prompt + 200) <= room

        batch = decode_batch(member, work, Goals(1.0, tbt_s))
        assert batch == 0 or fits(batch)
        assert not fits(batch + 1)

    def test_what_is_unattainable_is_named_and_still_counted(self) -> None:
        one = capacity(instance(), Workload(128_000, 128_000, 100), Goals(1.0, 0.01))
        assert one.unattainable == ("ttft", "tbt")
        assert one.batch == 1
        assert one.prefill_rate > 0
        assert one.decode_rate > 0


class TestFleets:
    @given(
        counts=st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(0, 5)),
        rates=st.tuples(st.floats(0.1, 10), st.floats(0.1, 10)),
    )
    def test_mixed_ones_split_their_time_best(
        self, counts: tuple[int, int, int], rates: tuple[float, float]
    ) -> None:
        """The same result as trying all splits."""
        one = Capacity(*rates, prefill_s=1, batch=1, step_s=1)
        prefills, decodes, mixed = counts
        roles = [Role.PREFILL] * prefills + [Role.DECODE] * decodes + [Role.MIXED] * mixed
        best = max(
            min((prefills + mixed * x) * rates[0], (decodes + mixed * (1 - x)) * rates[1])
            for x in (i / 2000 for i in range(2001))
        )
        assert fleet_rate((role, one) for role in roles) == pytest.approx(best, rel=0.01, abs=0.02)

    @given(
        total=st.integers(1, 20),
        needed=st.tuples(st.floats(0, 20), st.floats(0, 20)),
        least=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    )
    def test_the_best_split_against_all(
        self, total: int, needed: tuple[float, float], least: tuple[int, int]
    ) -> None:
        found = best_split(total, *needed, least)
        assert 0 <= found <= total
        if sum(least) > total:
            return
        assert least[0] <= found <= total - least[1]

        def fullest(count: int) -> float:
            sides = zip(needed, (count, total - count), strict=True)
            return max(n / c if c else math.inf if n else 0.0 for n, c in sides)

        assert fullest(found) == min(fullest(c) for c in range(least[0], total - least[1] + 1))

    def test_what_moves_the_ratio(self) -> None:
        """Mooncake's synthetic workload on 16 nodes: 15,325 tokens in, 149 out, 66 % cached."""

        def prefills(work: Workload, tbt_s: float = 0.05) -> int:
            one = capacity(instance(), work, Goals(10.0, tbt_s))
            best = best_split(16, 1 / one.prefill_rate, 1 / one.decode_rate, (1, 1))
            rates = [
                fleet_rate([(Role.PREFILL, one)] * p + [(Role.DECODE, one)] * (16 - p))
                for p in range(1, 16)
            ]
            assert rates[best - 1] == max(rates)
            return best

        base = Workload(15_325, 0.34 * 15_325, 149)
        assert prefills(base, tbt_s=0.033) < prefills(base)  # a tighter TBT wants smaller batches
        assert prefills(Workload(15_325, 0.1 * 15_325, 149)) < prefills(base)  # more is cached
        assert prefills(Workload(15_325, 0.34 * 15_325, 600)) < prefills(base)  # longer answers
        assert prefills(Workload(15_325, 15_325, 149)) > prefills(base)  # nothing is cached

    def test_all_assignments_of_unequal_instances(self) -> None:
        dice = random.Random(2)
        ones = [Capacity(dice.uniform(1, 5), dice.uniform(1, 5), 1, 1, 1) for _ in range(5)]
        for roles in itertools.product([Role.PREFILL, Role.DECODE], repeat=5):
            both = list(zip(roles, ones, strict=True))
            prefill = sum(one.prefill_rate for role, one in both if role is Role.PREFILL)
            decode = sum(one.decode_rate for role, one in both if role is Role.DECODE)
            assert fleet_rate(both) == pytest.approx(min(prefill, decode))
