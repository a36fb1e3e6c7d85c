"""The whole simulation: closed forms, conservation, determinism, and policies in their order."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from statistics import fmean
from typing import TYPE_CHECKING

import pytest
import typer
from typer.testing import CliRunner

from tiffin.bench.sim.cli import commands
from tiffin.bench.sim.cluster.simulation import SimulationOptions, simulate
from tiffin.bench.sim.results.outcomes import summarise
from tiffin.bench.traces.generator import generate
from tiffin.bench.traces.scaling import at_rate
from tiffin.bench.traces.trace import Trace, TraceRequest
from tiffin.bench.traces.writer import write
from tiffin.conductor.cost import latency_profiles

if TYPE_CHECKING:
    from pathlib import Path

    from tiffin.bench.sim.cluster.simulation import SimulationOutcome

PROFILE = latency_profiles.load(latency_profiles.DEFAULT)
ONE = SimulationOptions(prefill=1, decode=1)


def prefill_s(tokens: int, cached: int = 0) -> float:
    c0, c1, c2 = PROFILE.prefill
    return c0 + c1 * (tokens - cached) + c2 * (tokens**2 - cached**2)


def load_s(tokens: int) -> float:
    return tokens * ONE.token_bytes / ONE.settings().transfers.dram_bandwidth_bytes_s


@pytest.fixture(scope="module")
def trace() -> Trace:
    """Conversations, twice as many as four instances can prefill at leisure."""
    return at_rate(generate("multi-turn", 600, seed=3), 2.0)


def run(trace: Trace, policy: str = "kvcache_centric", seed: int = 0) -> SimulationOutcome:
    return simulate(trace, SimulationOptions(prefill=4, decode=4, policy=policy, seed=seed))


def mean_s(outcome: SimulationOutcome) -> float:
    """From a request's arrival to its last token."""
    return fmean((job.ended_s or math.inf) - job.trace.arrival_s for job in outcome.jobs)


def ends(outcome: SimulationOutcome) -> list[tuple[float | None, float | None, int]]:
    return [(job.first_token_s, job.ended_s, job.cached_tokens) for job in outcome.jobs]


def test_one_request_on_an_idle_cluster() -> None:
    request = TraceRequest(1.0, 8192, 3, tuple(range(16)))
    (job,) = simulate(Trace("one", (request,)), ONE).jobs
    d0, d1, d2 = PROFILE.decode
    assert job.ttft_s == pytest.approx(prefill_s(8192), abs=1e-6)
    moved_s = ONE.latency_s + 8192 * ONE.token_bytes / ONE.bandwidth_bytes_s
    steps = [d0 + d1 + d2 * 8193, d0 + d1 + d2 * 8194]
    assert job.gaps_s == pytest.approx([moved_s + steps[0], steps[1]], abs=1e-6)
    assert job.ended_s == pytest.approx(1.0 + prefill_s(8192) + moved_s + sum(steps), abs=1e-6)


def test_a_prompt_that_was_there_before_costs_its_last_token() -> None:
    first, again = (TraceRequest(at_s, 8192, 1, tuple(range(16))) for at_s in (0.0, 60.0))
    jobs = simulate(Trace("two", (first, again)), ONE).jobs
    assert jobs[1].cached_tokens == 8191
    assert jobs[1].ttft_s == pytest.approx(load_s(8191) + prefill_s(8192, 8191), abs=1e-6)
    assert jobs[1].decision is not None
    predicted_s = jobs[1].decision.predicted_ttft_s
    assert predicted_s == pytest.approx(jobs[1].ttft_s, rel=1e-3), "from memory: nothing is in HBM"


def test_blocks_are_fetched_from_another_node_while_their_prompt_waits() -> None:
    """The first prompt's instance is busy: the second of its conversation goes to the other."""
    shared = tuple(range(64))
    turns = (
        TraceRequest(0.0, 32_768, 1, shared),
        TraceRequest(100.0, 65_536, 1, (*shared, *range(1000, 1064))),
        TraceRequest(100.5, 33_280, 1, (*shared, 2000)),
    )
    outcome = simulate(Trace("three", turns), SimulationOptions(prefill=2, decode=1))
    _, busy, other = outcome.jobs
    assert busy.decision is not None
    assert other.decision is not None
    assert other.decision.prefill != busy.decision.prefill
    assert other.cached_tokens == 32_768
    fetched = outcome.moved_bytes[busy.decision.prefill, other.decision.prefill]
    assert fetched == 32_768 * outcome.options.token_bytes
    moving_s = fetched / outcome.options.bandwidth_bytes_s + outcome.options.latency_s
    moving_s += load_s(32_768)
    assert other.ttft_s == pytest.approx(moving_s + prefill_s(33_280, 32_768), abs=1e-6)
    assert other.by_tier == {"dram": 0, "fetched": 32_768}


@pytest.mark.slow
def test_a_queue_is_that_of_the_theory() -> None:
    """M/D/1: Poisson arrivals, one server, service of D seconds: TTFT = D + R D² / (2 (1 - R D))
    (DistServe, OSDI '24, section 3.1)."""
    dice, service_s = random.Random(7), prefill_s(4000)
    rate, at_s, requests = 0.7 / service_s, 0.0, []
    for _ in range(6_000):
        at_s += dice.expovariate(rate)
        requests.append(TraceRequest(at_s, 4000, 1))
    found = summarise(trace := Trace("poisson", tuple(requests)), simulate(trace, ONE))
    waits_s = rate * service_s**2 / (2 * (1 - rate * service_s))
    assert found.ttft_s.mean == pytest.approx(service_s + waits_s, rel=0.05)


@pytest.mark.slow
def test_a_queue_of_prompts_of_chance_length_is_that_of_the_theory() -> None:
    """M/M/1: prefills that take exponential times of mean S: TTFT = S / (1 - R S)."""
    dice, mean_s, busy = random.Random(5), 3.0, 0.5
    c0, c1, c2 = PROFILE.prefill
    at_s, requests = 0.0, []
    for _ in range(6_000):
        at_s += dice.expovariate(busy / mean_s)
        # The length whose prefill takes that long; those below c0 take c0, a few in a hundred.
        over_s = max(dice.expovariate(1 / mean_s) - c0, 0.0)
        tokens = (math.sqrt(c1 * c1 + 4 * c2 * over_s) - c1) / (2 * c2)
        requests.append(TraceRequest(at_s, max(1, round(tokens)), 1))
    found = summarise(trace := Trace("chance", tuple(requests)), simulate(trace, ONE))
    assert found.compute_s == pytest.approx(mean_s, rel=0.05)
    assert found.ttft_s.mean == pytest.approx(mean_s / (1 - busy), rel=0.1)


def test_what_comes_in_is_served_or_refused_and_bytes_are_those_of_the_blocks(trace: Trace) -> None:
    options = SimulationOptions(prefill=2, decode=4, admission="early", ttft_s=5.0, tbt_s=0.1)
    outcome = simulate(trace, options)
    assert len(outcome.jobs) == len(trace.requests)
    served = [job for job in outcome.jobs if job.ended_s is not None]
    refused = [job for job in outcome.jobs if job.rejected]
    summary = summarise(trace, outcome)
    assert sum(summary.rejected.values()) == len(refused)
    assert summary.attained is not None
    assert summary.attained <= len(served) / len(outcome.jobs)
    assert refused, "two instances can't do the work of four"
    assert len(served) + len(refused) == len(outcome.jobs)
    for job in served:
        assert len(job.gaps_s) == job.trace.output_tokens - 1
        assert job.first_token_s is not None
        assert job.first_token_s + sum(job.gaps_s) == pytest.approx(job.ended_s)
    to_decode = sum(n for (_, at), n in outcome.moved_bytes.items() if at.startswith("decode"))
    handed = [job for job in served if job.trace.output_tokens > 1]
    assert to_decode == sum(job.trace.prompt_tokens for job in handed) * options.token_bytes
    between = sum(outcome.moved_bytes.values()) - to_decode
    assert between % (trace.block_tokens * options.token_bytes) == 0, "whole blocks are fetched"


@pytest.mark.slow
def test_the_same_seed_gives_the_same_outcome(trace: Trace) -> None:
    first, second, third = (run(trace, "random", seed) for seed in (1, 1, 2))
    assert ends(first) == ends(second)
    assert first.moved_bytes == second.moved_bytes
    assert ends(first) != ends(third)


@pytest.mark.slow
def test_policies_that_know_more_do_better(trace: Trace) -> None:
    found = {
        name: summarise(trace, run(trace, name))
        for name in ("random", "least_loaded", "kvcache_centric")
    }
    blind, load, blocks = found.values()
    assert blind.ttft_s.mean > load.ttft_s.mean > blocks.ttft_s.mean
    assert blocks.hit_share > 1.2 * blind.hit_share
    assert all(one.hit_share <= one.ideal_hit_share + 0.01 for one in found.values())


@pytest.mark.slow
@pytest.mark.parametrize("more", ["prefill", "decode", "cache_tokens"])
def test_more_instances_and_more_memory_do_no_harm(trace: Trace, more: str) -> None:
    few = SimulationOptions(prefill=4, decode=2, cache_tokens=200_000)
    many = replace(few, **{more: 2 * getattr(few, more)})
    noise = 1.02
    first, second = (simulate(trace, options) for options in (few, many))
    # Of the whole, as who prefills faster gives those more to do that decode.
    assert mean_s(second) <= mean_s(first) * noise
    first_found, second_found = summarise(trace, first), summarise(trace, second)
    assert second_found.ttft_s.mean <= first_found.ttft_s.mean * noise
    assert second_found.hit_share >= first_found.hit_share / noise


def test_alone_the_second_token_waits_for_the_hand_over_and_a_step() -> None:
    one = Trace("one", (TraceRequest(0.0, 20_000, 3),))
    found = summarise(one, simulate(one, ONE))
    assert found.second_s.mean == pytest.approx(found.second_alone_s, rel=0.01)
    assert found.second_alone_s > 20_000 * ONE.token_bytes / ONE.bandwidth_bytes_s


@pytest.mark.slow
def test_a_faster_network_does_no_harm(trace: Trace) -> None:
    slow, fast = (
        summarise(
            trace, simulate(trace, SimulationOptions(prefill=6, decode=4, bandwidth_bytes_s=rate))
        )
        for rate in (1.25e9, 100e9)
    )
    assert fast.ttft_s.mean <= slow.ttft_s.mean


def test_the_command_shows_policies_side_by_side(tmp_path: Path) -> None:
    app = typer.Typer()
    app.callback()(lambda: None)
    commands(app)
    file = tmp_path / "trace.jsonl"
    write(Trace("slice", generate("multi-turn", 40, seed=1).requests), file)
    options = ["--policy", "random", "--policy", "algorithm_1", "--prefill", "2", "--decode", "2"]
    plots = tmp_path / "plots"
    done = CliRunner().invoke(app, ["simulate", str(file), *options, "--plots", str(plots)])
    assert done.exit_code == 0, done.output
    assert "algorithm_1" in done.output
    assert "TTFT mean" in done.output
    assert (plots / "ttft.png").read_bytes().startswith(b"\x89PNG")
    full = ["simulate", str(file), "--json", "--rate", "30", "--prefill", "1"]
    done, held, at_once = (
        CliRunner().invoke(app, [*full, *order])
        for order in ((), ("--order", "held"), ("--order", "arrival"))
    )
    (one,) = json.loads(done.output)
    assert one["requests"] == 40
    assert done.output == held.output != at_once.output, "as the service does by default"
    done = CliRunner().invoke(app, ["simulate", str(file), "--policy", "best"])
    assert done.exit_code == 2
    assert "kvcache_centric" in done.output, "it names those that there are"


@pytest.mark.parametrize("order", ["arrival", "held"])
def test_the_wait_is_predicted_though_the_ends_before_it_are_heard_of_late(order: str) -> None:
    dice = random.Random(4)
    requests = [TraceRequest(1.2 * at, dice.randint(5_000, 20_000), 1) for at in range(100)]
    options = replace(ONE, late_s=0.1, order=order)
    waited = simulate(Trace("queue", tuple(requests)), options).jobs[20:]
    errors_s = [
        job.decision.predicted_ttft_s - (job.ttft_s or 0.0) for job in waited if job.decision
    ]
    assert fmean(job.ttft_s or 0.0 for job in waited) > 10.0
    assert fmean(errors_s) == pytest.approx(0.0, abs=0.01)


def test_a_prompt_finds_what_the_one_before_it_has_just_computed() -> None:
    """It waits for it on the same instance, and begins at the moment when that ends."""
    first = TraceRequest(0.0, 8192, 1, tuple(range(16)))
    second = TraceRequest(0.01, 8192, 1, (*range(15), 99))
    one, other = simulate(Trace("two", (first, second)), ONE).jobs
    assert (one.cached_tokens, other.cached_tokens) == (0, 15 * 512)
