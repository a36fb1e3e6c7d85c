"""A recorded simulation comes again as it was, and under another policy as that would have been."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import typer
from typer.testing import CliRunner

from tiffin.bench.sim.cluster.simulation import SimulationOptions, simulate
from tiffin.bench.traces.readers import read
from tiffin.bench.traces.recordings import Recording, read_recording, trace_of
from tiffin.bench.whatif.cli import commands
from tiffin.bench.whatif.comparison import fidelity, measured, observed, simulated
from tiffin.bench.whatif.replay import replay
from tiffin.bench.whatif.setup import Changes, Setup, changed, in_force
from tiffin.conductor.cost import latency_profiles
from tiffin.conductor.errors import InvalidRequest
from tiffin.kvstore.errors import InvalidInput

if TYPE_CHECKING:
    from pathlib import Path

    from tiffin.bench.sim.cluster.simulation import SimulationOutcome
    from tiffin.bench.traces.trace import Trace

    Truth = tuple[Path, SimulationOutcome]

# What was simulated when the fixture was recorded: nothing is told late.
LATE_S = 0.0


def as_it_was(recording: Recording) -> Setup:
    setup = in_force(recording, seed=5)
    return replace(setup, options=replace(setup.options, late_s=LATE_S))


def test_a_recording_is_the_trace_that_came(truth: Truth, conversations: Trace) -> None:
    made = read(truth[0])
    assert made.block_tokens == conversations.block_tokens
    for ours, theirs in zip(made.requests, conversations.requests, strict=True):
        first_s = conversations.requests[0].arrival_s
        assert ours.arrival_s == pytest.approx(theirs.arrival_s - first_s, abs=2e-6)
        assert (ours.prompt_tokens, ours.output_tokens) == (
            theirs.prompt_tokens,
            theirs.output_tokens,
        )
        assert len(ours.blocks) == len(conversations.full_blocks(theirs))
    ids = {id_: ours for t, o in zip(conversations.requests, made.requests, strict=True)
           for id_, ours in zip(t.blocks, o.blocks, strict=False)}  # fmt: skip
    assert len(set(ids.values())) == len(ids), "equal where they were equal, and nowhere else"


def test_the_replay_of_what_was_is_what_was(truth: Truth) -> None:
    recording = read_recording(truth[0])
    again = replay(recording, as_it_was(recording))
    pairs = list(zip(again.jobs, truth[1].jobs, strict=True))
    assert [job.decision.prefill for job, _ in pairs if job.decision] == [
        job.decision.prefill for _, job in pairs if job.decision
    ]
    near = fidelity(observed(recording), simulated(recording, again.jobs))
    assert near.ttft is not None
    assert near.tbt is not None
    assert near.ttft.requests == len(pairs)
    assert near.ttft.p90 < 1e-3
    assert near.tbt.p90 < 1e-3
    assert near.hit_share == pytest.approx(0.0, abs=1e-9)
    assert near.faults() == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        Changes(policy="random"),
        Changes(prefill=5, decode=1),
        Changes(profile=latency_profiles.load("llama-3.1-70b.h100.tp8.vllm")),
        Changes(bandwidth_bytes_s=3e7),
    ],
    ids=["policy", "pool size", "hardware", "network"],
)
def test_what_would_have_been_is_what_would_have_been(
    truth: Truth, conversations: Trace, changes: Changes
) -> None:
    """The recording's replay with a change is the simulation of the trace with that change."""
    recording = read_recording(truth[0])
    ours = replay(recording, changed(as_it_was(recording), changes))
    options = ours.options
    theirs = simulate(
        conversations,
        SimulationOptions(
            prefill=options.prefill,
            decode=options.decode,
            policy=options.policy,
            profile=options.profile,
            bandwidth_bytes_s=options.bandwidth_bytes_s,
            late_s=LATE_S,
            seed=5,
        ),
    )
    found = measured(simulated(recording, ours.jobs))
    wanted = measured(simulated(recording, theirs.jobs))
    was = measured(observed(recording))
    assert found.ttft_s.mean == pytest.approx(wanted.ttft_s.mean, rel=1e-3)
    assert found.tbt_s.mean == pytest.approx(wanted.tbt_s.mean, rel=1e-3)
    moved = [abs(now / then - 1) for now, then in (
        (found.ttft_s.mean, was.ttft_s.mean), (found.tbt_s.mean, was.tbt_s.mean)
    )]  # fmt: skip
    assert max(moved) > 0.02, "the change changes something"


def test_objectives_come_from_the_recording(truth: Truth) -> None:
    """Each request is replayed with its own, under the settings of its time."""
    recording = read_recording(truth[0])
    strict = [
        one if number % 2 else type(one)(**{**fields(one), "ttft_objective_s": 0.2})
        for number, one in enumerate(recording.requests)
    ]
    half_s = recording.requests[len(strict) // 2].arrival_s
    first = recording.settings[0]
    later = {**first[1], "admission": {**first[1]["admission"], "mode": "predictive"}}
    changing = replace(recording, requests=tuple(strict), settings=(first, (half_s, later)))
    jobs = replay(changing, in_force(changing)).jobs
    rejected = [number for number, job in enumerate(jobs) if job.rejected]
    assert rejected
    assert all(number % 2 == 0 and number >= len(strict) // 2 for number in rejected)


def fields(line: Any) -> dict[str, Any]:
    return {name: getattr(line, name) for name in line.__struct_fields__}


# -- files that are none ---------------------------------------------------------------------------


def broken(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_a_line_that_was_cut_off_is_left_out(truth: Truth, tmp_path: Path) -> None:
    text = truth[0].read_text(encoding="utf-8")
    whole = read_recording(truth[0])
    cut = read_recording(broken(tmp_path / "cut.jsonl", text[:-20]))
    assert len(cut.requests) == len(whole.requests) - 1
    lines = text.splitlines(keepends=True)
    bad = broken(tmp_path / "bad.jsonl", "".join([*lines[:8], "{}\n", *lines[8:]]))
    with pytest.raises(InvalidInput, match="line 9"):
        read_recording(bad)


def test_what_is_no_recording_is_said(truth: Truth, tmp_path: Path) -> None:
    header, *rest = truth[0].read_text(encoding="utf-8").splitlines(keepends=True)
    newer = header.replace('"tiffin_recording":1', '"tiffin_recording":2')
    for text, why in (
        (rest[0], "no header"),
        (header, "no requests"),
        (newer + rest[0], "version 2"),
        (header + rest[-1], "no instances"),
    ):
        with pytest.raises(InvalidInput, match=why):
            read_recording(broken(tmp_path / "x.jsonl", text))
    with pytest.raises(InvalidInput, match="no requests of 'other'"):
        read_recording(truth[0], "other")


def test_instances_that_do_both_are_refused(truth: Truth, tmp_path: Path) -> None:
    text = truth[0].read_text(encoding="utf-8").replace('"role":"decode"', '"role":"mixed"')
    recording = read_recording(broken(tmp_path / "mixed.jsonl", text))
    with pytest.raises(InvalidInput, match="2 do both"):
        in_force(recording)


def test_settings_of_a_stranger_are_refused(truth: Truth) -> None:
    recording = read_recording(truth[0])
    with pytest.raises(InvalidRequest, match="there is no magic"):
        in_force(replace(recording, settings=((0.0, {"magic": 1}),)))


def test_who_was_rejected_would_have_asked_for_as_much_as_others(truth: Truth) -> None:
    recording = read_recording(truth[0])
    line = recording.requests[0]
    out = type(line)(**{**fields(line), "outcome": "rejected", "output_tokens": 0})
    lengths = sorted(one.output_tokens for one in recording.requests[1:])
    made = trace_of(replace(recording, requests=(out, *recording.requests[1:])))
    assert lengths[0] < made.requests[0].output_tokens < lengths[-1]


# -- the command -----------------------------------------------------------------------------------


def run(*arguments: str) -> Any:
    app = typer.Typer()
    app.callback()(lambda: None)
    commands(app)
    return CliRunner().invoke(app, ["whatif", *arguments], env={"COLUMNS": "200"})


@pytest.mark.slow
def test_the_command_compares_and_says_how_far_it_can_be_believed(truth: Truth) -> None:
    path = str(truth[0])
    done = run(path, "--policy", "random", "--prefill", "4", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["change"] == "random, 4 + as many"
    assert found["warnings"] == []
    assert abs(found["fidelity"]["ttft"]["mean"]) < 0.25
    assert found["whatif"]["requests"] == found["observed"]["requests"]
    shown = run(path)
    assert shown.exit_code == 0, shown.output
    assert "off by" in shown.output
    assert "nine of ten within" in shown.output
    assert "warning" not in shown.output


def test_a_replay_that_is_far_off_is_warned_of(truth: Truth) -> None:
    done = run(str(truth[0]), "--measured-profile", "llama-3.1-70b.h100.tp8.vllm")
    assert done.exit_code == 0, done.output
    assert "warning: the replay of what was is far from it (TTFT, mean: -" in done.output


def test_mistakes_are_one_line(truth: Truth, tmp_path: Path) -> None:
    for arguments, why in (
        ([str(tmp_path / "none.jsonl")], "No such file"),
        ([str(truth[0]), "--policy", "wishful"], "policy.name"),
        ([str(truth[0]), "--profile", "abacus"], "no latency profile"),
    ):
        done = run(*arguments)
        assert done.exit_code == 2
        assert why in " ".join(done.output.split())
        assert "Traceback" not in done.output
