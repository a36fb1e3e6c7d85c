"""Oscillation: the loads of both pools swing against each other if admission uses the present load
of decode, and less if it uses the predicted load: figures 9 and 10 of "Mooncake" (arXiv
2407.00079), on a small scale.

Four prefill and four decode instances, as queues and batches, in steps of a tenth of a second; more
requests than decode can take. A prefill queue may be 8 s long, so an admitted request arrives at
decode that much later.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tiffin.conductor.admission.admission import (
    AdmissionForecast,
    AdmissionSettings,
    Outlook,
    decide,
    decide_decode,
    expected_decode_s,
)
from tiffin.conductor.decode.load_forecast import Horizon, Span, expected_load
from tiffin.conductor.records import InstanceSpec, Objectives, Request, Role
from tiffin.conductor.state.instance_table import Cluster

if TYPE_CHECKING:
    from tiffin.conductor.admission.admission import Mode

STEP_S = 0.1
LAST_S = 300.0
WARM_S = 80.0  # until the first swing is over
INSTANCES = 4
PREFILL_S = 0.5  # 8 requests/s in all
D0, D1 = 0.020, 0.005  # 16 requests at a time are within the objective
OBJECTIVES = Objectives(ttft_s=8.0, tbt_s=0.1)
TOKENS_MEAN = 150  # at 0.1 s: 64 places of 15 s each take 4.3 requests/s
ARRIVALS_S = 12.0
DECODES = np.arange(INSTANCES)


@dataclass
class Running:
    """A request, first in a prefill queue and then in a decode batch."""

    name: str
    row: int
    tokens: int
    prefill_ends_at: float
    tokens_left: float
    tbt_s: list[float] = field(default_factory=list)


@dataclass
class Outcome:
    """Mean load of all decode instances at each step, and the outcomes of requests."""

    decode_loads: list[float] = field(default_factory=list)
    prefill_loads: list[float] = field(default_factory=list)
    rejected: int = 0
    wasted: int = 0  # prefills of requests that were rejected after them
    in_time: int = 0
    late: int = 0


class Simulated:
    """One run of one mode."""

    def __init__(self, settings: AdmissionSettings, seed: int) -> None:
        self.settings, self.dice = settings, random.Random(seed)
        self.now, self.count = 0.0, 0
        self.free_at = [0.0] * INSTANCES
        self.prefilling: list[Running] = []
        self.decoding: list[Running] = []
        self.horizon, self.outcome = Horizon(), Outcome()
        self.cluster = Cluster()
        for number in range(INSTANCES):
            spec = InstanceSpec(f"d{number}", "m", Role.DECODE, "p")
            self.cluster.register(spec, (0.0, 0.0, 0.0, D0, D1, 0.0), 0.0)

    def run(self) -> Outcome:
        for step in range(int(LAST_S / STEP_S)):
            self.now = step * STEP_S
            for _ in range(self.arrivals()):
                self.arrive()
            self.finish_prefills()
            self.decode()
            if self.now >= WARM_S:
                tbt_s = D0 + D1 * self.cluster.batch[:INSTANCES]
                self.outcome.decode_loads.append(float(tbt_s.mean()) / 0.1)
                queue_s = [max(at - self.now, 0.0) for at in self.free_at]
                self.outcome.prefill_loads.append(sum(queue_s) / INSTANCES / 8.0)
        return self.outcome

    def arrivals(self) -> int:
        """A Poisson number, as a sum of coin tosses."""
        return sum(self.dice.random() < ARRIVALS_S * STEP_S / 20 for _ in range(20))

    def arrive(self) -> None:
        self.count += 1
        request = Request(f"r{self.count}", "m", 1, objectives=OBJECTIVES)
        tokens = 1 + int(self.dice.expovariate(1 / TOKENS_MEAN))
        instance = self.free_at.index(min(self.free_at))
        queue_s = max(self.free_at[instance] - self.now, 0.0)
        ends_at = self.now + queue_s + PREFILL_S
        now_s = D0 + D1 * (self.cluster.batch[:INSTANCES] + 1)
        span = Span(ends_at, ends_at + self.settings.decode_s)
        batch, *_ = expected_load(self.horizon, self.cluster, DECODES, span, self.now)
        then_s = D0 + D1 * (batch + 1)
        row = int((then_s if self.settings.mode == "predictive" else now_s).argmin())
        forecast = AdmissionForecast(
            ends_at - self.now, float(now_s[row]), float(then_s[row]), queue_s
        )
        if not decide(Outlook(request, forecast), self.settings, self.dice).admitted:
            self.outcome.rejected += 1
            return
        self.free_at[instance] = ends_at
        # Predictions of lengths are off by a random factor of up to two.
        guess = int(tokens * 2 ** self.dice.uniform(-1, 1))
        decode_s = expected_decode_s(self.settings, guess, float(then_s[row]))
        self.horizon.promise(request.id, row, 0, ends_at, decode_s, self.now)
        self.prefilling.append(Running(request.id, row, tokens, ends_at, tokens))

    def finish_prefills(self) -> None:
        done = [one for one in self.prefilling if one.prefill_ends_at <= self.now]
        self.prefilling = [one for one in self.prefilling if one.prefill_ends_at > self.now]
        for one in done:
            row, batch = one.row, self.cluster.batch
            if self.settings.mode == "baseline":
                row = one.row = int(batch[:INSTANCES].argmin())
            tbt_s = D0 + D1 * float(batch[row] + 1)
            request = Request(one.name, "m", 1, objectives=OBJECTIVES)
            there = Outlook(request, AdmissionForecast(0.0, tbt_s, tbt_s))
            if not decide_decode(there, self.settings, self.dice).admitted:
                self.outcome.rejected += 1
                self.outcome.wasted += 1
                self.horizon.end(one.name, self.now)
                continue
            self.horizon.start(one.name, self.now)
            batch[row] += 1
            self.decoding.append(one)

    def decode(self) -> None:
        for one in list(self.decoding):
            tbt_s = D0 + D1 * float(self.cluster.batch[one.row])
            one.tokens_left -= STEP_S / tbt_s
            one.tbt_s.append(tbt_s)
            if one.tokens_left <= 0:
                self.decoding.remove(one)
                self.cluster.batch[one.row] -= 1
                self.horizon.end(one.name, self.now)
                # With a tolerance of a tenth: so far off is the worst of the loads aimed at.
                in_time = sum(one.tbt_s) / len(one.tbt_s) <= 0.1 * 1.1
                self.outcome.in_time += in_time
                self.outcome.late += not in_time


@cache
def simulate(mode: Mode, seed: int, use_lengths: bool = False) -> Outcome:
    # t_d: the time of a mean answer at a decode instance with the largest allowed batch.
    settings = AdmissionSettings(
        mode=mode, use_lengths=use_lengths, decode_s=TOKENS_MEAN * 0.1, class_scales={}
    )
    return Simulated(settings, seed).run()


SEEDS = (2, 3)


def deviation(loads: list[float]) -> float:
    return float(np.std(loads))


@pytest.mark.slow
def test_early_rejection_by_the_load_of_now_swings_and_by_that_of_then_less() -> None:
    for seed in SEEDS:
        early, uniform = simulate("early", seed), simulate("predictive", seed)
        lengths = simulate("predictive", seed, use_lengths=True)
        assert deviation(uniform.decode_loads) < 0.5 * deviation(early.decode_loads)
        assert deviation(lengths.decode_loads) < 0.5 * deviation(early.decode_loads)
        assert deviation(uniform.prefill_loads) < 0.5 * deviation(early.prefill_loads)
        # Decode is far above its objective at the top of each swing.
        assert np.quantile(early.decode_loads, 0.9) > 1.5
        assert np.quantile(uniform.decode_loads, 0.9) < 1.2


def test_a_swing_of_decode_follows_one_of_prefill() -> None:
    for seed in SEEDS:
        early = simulate("early", seed)
        prefill, decode = np.array(early.prefill_loads), np.array(early.decode_loads)
        lags = np.arange(0, 300, 10)  # steps
        alike = [np.corrcoef(prefill[: len(prefill) - lag], decode[lag:])[0, 1] for lag in lags]
        assert max(alike) > 0.5
        assert 4.0 < float(lags[int(np.argmax(alike))]) * STEP_S < 20.0


def test_more_requests_are_served_in_time() -> None:
    for seed in SEEDS:
        early, uniform = simulate("early", seed), simulate("predictive", seed)
        assert uniform.in_time > 3 * early.in_time


@pytest.mark.slow
def test_only_the_baseline_prefills_for_nothing() -> None:
    baseline, early = simulate("baseline", 1), simulate("early", 1)
    assert baseline.wasted > 0.3 * baseline.rejected
    assert early.wasted == 0
