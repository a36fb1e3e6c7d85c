"""Engines that prefill and decode on the same GPUs, each beside what can be computed by hand."""

from __future__ import annotations

import json
from itertools import accumulate
from typing import TYPE_CHECKING

import pytest
import typer
from typer.testing import CliRunner

from tiffin.bench.sim.cli import commands
from tiffin.bench.sim.clock import VirtualClock
from tiffin.bench.sim.cluster.colocated import (
    ColocatedOptions,
    simulate_colocated,
    summarise_colocated,
)
from tiffin.bench.sim.instances.colocated_instance import ColocatedInstance
from tiffin.bench.sim.instances.decode_instance import DecodeInstance
from tiffin.bench.sim.instances.engine_options import EngineMode, EngineOptions
from tiffin.bench.sim.instances.sim_request import SimRequest
from tiffin.bench.traces.generator import generate
from tiffin.bench.traces.scaling import at_rate
from tiffin.bench.traces.trace import Trace, TraceRequest
from tiffin.bench.traces.writer import write
from tiffin.conductor.cost import latency_profiles

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Literal

    from tiffin.bench.sim.cluster.colocated import ColocatedOutcome

PROFILE = latency_profiles.load(latency_profiles.DEFAULT)
C0, C1, C2 = PROFILE.prefill
D0, D1, D2 = PROFILE.decode
ALL = list(EngineMode)


def prefill_s(tokens: int, cached: int = 0) -> float:
    return C0 + work_s(cached, tokens)


def work_s(start: int, stop: int) -> float:
    """Of the tokens from `start` to `stop` of a prompt, beside the fixed part of their step."""
    return C1 * (stop - start) + C2 * (stop**2 - start**2)


def chunked(tokens: int) -> EngineOptions:
    return EngineOptions(EngineMode.CHUNKED, batched_tokens=tokens)


def serve(options: EngineOptions, *requests: TraceRequest) -> list[SimRequest]:
    """One instance that serves the requests; all memory is free again at the end."""
    clock, ended = VirtualClock(), list[SimRequest]()
    one = ColocatedInstance(clock, PROFILE, options, 512, ended.append)
    jobs = [
        SimRequest(str(number), request, tuple(b.to_bytes(16) for b in request.blocks))
        for number, request in enumerate(requests)
    ]
    for job in jobs:
        clock.at(job.trace.arrival_s, lambda job=job: one.enqueue(job))  # type: ignore[misc]
    clock.run(lambda: True)
    assert len(ended) == len(jobs)
    assert (one.held_tokens, one.unfinished, one.uncomputed_tokens) == (0, 0, 0)
    return jobs


class TestOneRequest:
    """To the microsecond."""

    @pytest.mark.parametrize("mode", [EngineMode.PLAIN, EngineMode.PREFIX])
    def test_whole_prompts(self, mode: EngineMode) -> None:
        (job,) = serve(EngineOptions(mode), TraceRequest(1.0, 8192, 4, tuple(range(16))))
        assert job.ttft_s == pytest.approx(prefill_s(8192), abs=1e-6)
        assert job.gaps_s == pytest.approx(
            [D0 + D1 + D2 * (8193 + step) for step in range(3)], abs=1e-6
        )
        assert job.compute_s == pytest.approx(prefill_s(8192), abs=1e-6)

    @pytest.mark.parametrize("chunk", [512, 1000, 8192])
    def test_chunks_add_up(self, chunk: int) -> None:
        """All but the first of them cost the fixed part of a step more."""
        (job,) = serve(chunked(chunk), TraceRequest(0.0, 8192, 2))
        more = -(-8192 // chunk) - 1
        assert job.ttft_s == pytest.approx(prefill_s(8192) + more * D0, abs=1e-6)
        assert job.compute_s == pytest.approx(job.ttft_s, abs=1e-6)

    @pytest.mark.parametrize("mode", ALL)
    def test_an_answer_of_one_token_is_the_prefills(self, mode: EngineMode) -> None:
        (job,) = serve(EngineOptions(mode), TraceRequest(0.0, 400, 1))
        assert job.ttft_s == pytest.approx(prefill_s(400))
        assert job.gaps_s == []

    @pytest.mark.parametrize("mode", ALL)
    def test_what_can_never_fit_is_refused(self, mode: EngineMode) -> None:
        (job,) = serve(EngineOptions(mode, kv_capacity_tokens=1000), TraceRequest(0.0, 990, 20))
        assert job.rejected == "too_long"


class TestSteps:
    def test_a_prompt_stalls_what_decodes(self) -> None:
        """The second comes in the first one's third step, and is computed after it."""
        early, late = TraceRequest(0.0, 1000, 6), TraceRequest(prefill_s(1000) + 0.07, 5000, 2)
        first, second = serve(EngineOptions(), early, late)
        alone = [D0 + D1 + D2 * (1001 + step) for step in range(3)]
        both = D0 + 2 * D1 + D2 * (1004 + 5001)
        stalled = prefill_s(5000) + both
        assert first.gaps_s == pytest.approx([*alone, stalled, D0 + D1 + D2 * 1005], abs=1e-6)
        assert second.gaps_s == pytest.approx([both], abs=1e-6)

    def test_prompts_that_wait_share_a_step(self) -> None:
        at_once = [TraceRequest(0.0, 100, 1), *(TraceRequest(0.01, 2000, 1) for _ in range(3))]
        jobs = serve(EngineOptions(batched_tokens=4500), *at_once)
        pair_s = C0 + 2 * work_s(0, 2000)
        starts = list(accumulate([prefill_s(100), pair_s, prefill_s(2000)]))
        assert [job.first_token_s for job in jobs] == pytest.approx(
            [starts[0], starts[1], starts[1], starts[2]], abs=1e-6
        )

    def test_a_mixed_step_takes_the_time_of_both(self) -> None:
        """One that decodes leaves a chunk of 511 tokens, and of the second prompt 89 are left."""
        early, late = TraceRequest(0.0, 500, 4), TraceRequest(prefill_s(500) + 0.01, 600, 2)
        first, second = serve(chunked(512), early, late)
        alone = D0 + D1 + D2 * 501
        begins = C0 + work_s(0, 511) + D1 + D2 * 502
        goes_on = D0 + work_s(511, 600) + D1 + D2 * 503
        assert first.gaps_s == pytest.approx([alone, begins, goes_on], abs=1e-6)
        assert second.gaps_s == pytest.approx([D0 + D1 + D2 * 601], abs=1e-6)

    def test_runs_of_steps_are_those_of_an_instance_that_only_decodes(self) -> None:
        """Which takes an event for each step."""
        requests = [TraceRequest(0.0, 300 + 7 * n, 5 + 11 * n) for n in range(20)]
        jobs = serve(EngineOptions(), *requests)
        clock = VirtualClock()
        other = DecodeInstance("d", clock, PROFILE, 1_000_000, 256, lambda job: None)
        alone = [SimRequest(f"r{n}", request, ()) for n, request in enumerate(requests)]
        for job, twin in zip(jobs, alone, strict=True):
            twin.first_token_s = job.first_token_s
            assert job.first_token_s is not None
            clock.at(job.first_token_s, lambda twin=twin: other.join(twin))  # type: ignore[misc]
        clock.run(lambda: True)
        for job, twin in zip(jobs[1:], alone[1:], strict=True):
            # The very first prompt came alone; its first step ended where the others' began.
            assert job.gaps_s[-5:] == pytest.approx(twin.gaps_s[-5:], abs=1e-6)


class TestCache:
    def test_a_prompt_that_was_there_before_costs_its_last_token(self) -> None:
        twice = [TraceRequest(at_s, 8192, 2, tuple(range(16))) for at_s in (0.0, 60.0)]
        jobs = serve(EngineOptions(EngineMode.PREFIX), *twice)
        assert jobs[1].ttft_s == pytest.approx(prefill_s(8192, 8191), abs=1e-6)
        assert jobs[1].cached_tokens == 8191
        assert serve(EngineOptions(), *twice)[1].cached_tokens == 0

    def test_what_decodes_takes_the_memory_of_the_cache(self) -> None:
        """It holds 4,000 tokens: the second prompt leaves less than the first one's blocks."""
        mine, other = tuple(range(4)), tuple(range(10, 14))
        requests = [
            TraceRequest(0.0, 2048, 1, mine),
            TraceRequest(10.0, 2048, 1, other),
            TraceRequest(20.0, 2048, 1, mine),
        ]
        options = EngineOptions(EngineMode.PREFIX, kv_capacity_tokens=4000)
        assert 0 < serve(options, *requests)[2].cached_tokens < 2047


class TestPreemption:
    @pytest.mark.parametrize("preemption", ["recompute", "swap"])
    @pytest.mark.parametrize("mode", ALL)
    def test_no_token_is_lost(
        self, mode: EngineMode, preemption: Literal["recompute", "swap"]
    ) -> None:
        """Ten answers that double their prompts, in a memory for eight of the prompts."""
        options = EngineOptions(mode, kv_capacity_tokens=4100, preemption=preemption)
        requests = [TraceRequest(0.1 * n, 512, 512, (n,)) for n in range(10)]
        outcome = simulate_colocated(
            Trace("ten", tuple(requests)), ColocatedOptions(instances=1, engine=options)
        )
        assert outcome.preempted > 0
        for job in outcome.jobs:
            assert len(job.gaps_s) == 511
            assert job.first_token_s is not None
            assert job.ended_s == pytest.approx(job.first_token_s + sum(job.gaps_s))
        for job in serve(options, *requests):
            assert not job.rejected

    def test_the_latest_gives_way_and_comes_back_first(self) -> None:
        """A, with 10 tokens more to come than fit beside B, runs on as if alone."""
        requests = [TraceRequest(0.0, 400, 200), TraceRequest(0.0, 500, 100)]
        options = EngineOptions(kv_capacity_tokens=1010)
        first, second = serve(options, *requests)
        assert max(first.gaps_s[1:]) < 2 * D0
        assert max(second.gaps_s) > 90 * D0, "it waited for the other's end"

    def test_swapping_costs_the_bytes_that_move(self) -> None:
        requests = [TraceRequest(0.0, 400, 200), TraceRequest(0.0, 500, 100)]
        options = EngineOptions(kv_capacity_tokens=1010, preemption="swap")
        slow = EngineOptions(kv_capacity_tokens=1010, preemption="swap", swap_bytes_s=1e9)
        fast_s = sum(sum(job.gaps_s) for job in serve(options, *requests))
        slow_s = sum(sum(job.gaps_s) for job in serve(slow, *requests))
        assert slow_s > fast_s + 0.1


@pytest.fixture(scope="module")
def trace() -> Trace:
    return at_rate(generate("multi-turn", 400, seed=3), 2.0)


def run(trace: Trace, mode: EngineMode) -> ColocatedOutcome:
    return simulate_colocated(trace, ColocatedOptions(4, EngineOptions(mode), ttft_s=30, tbt_s=0.1))


@pytest.mark.parametrize("mode", ALL)
def test_all_requests_are_served_with_all_their_tokens(trace: Trace, mode: EngineMode) -> None:
    outcome = run(trace, mode)
    assert [job.trace for job in outcome.jobs] == list(trace.requests)
    assert all(len(job.gaps_s) == job.trace.output_tokens - 1 for job in outcome.jobs)
    assert min(min(job.gaps_s, default=D0) for job in outcome.jobs) >= D0
    again = run(trace, mode)
    assert [job.gaps_s for job in again.jobs] == [job.gaps_s for job in outcome.jobs]


def test_each_mode_does_what_it_is_for(trace: Trace) -> None:
    plain, prefix, chunks = (summarise_colocated(trace, run(trace, mode)) for mode in ALL)
    assert prefix.compute_s < plain.compute_s < chunks.compute_s
    assert 0 < prefix.hit_share <= prefix.ideal_hit_share + 0.01
    assert chunks.tbt_s.p99 < plain.tbt_s.p99 / 2, "a prompt stalls nobody for long"
    assert chunks.attained is not None


def test_the_command_shows_engines_beside_the_cluster(tmp_path: Path) -> None:
    app = typer.Typer()
    app.callback()(lambda: None)
    commands(app)
    file = tmp_path / "trace.jsonl"
    write(Trace("slice", generate("multi-turn", 40, seed=1).requests), file)
    options = ["--prefill", "2", "--decode", "2", "--colocated", "plain", "--colocated", "chunked"]
    done = CliRunner().invoke(app, ["simulate", str(file), *options, "--json"])
    assert done.exit_code == 0, done.output
    names = [one["policy"] for one in json.loads(done.output)]
    assert names == ["colocated, plain", "colocated, chunked"]
    both = ["--policy", "least_loaded", "--colocated", "prefix"]
    done = CliRunner().invoke(app, ["simulate", str(file), *both])
    assert "colocated, prefix" in done.output
    assert "least_loaded" in done.output
