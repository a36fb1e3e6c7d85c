"""The demo: its prompts share what the trace shares, and the whole of it runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from tiffin.bench.demo import report, trace
from tiffin.bench.demo.run import Options, Outcome
from tiffin.bench.demo.worker import Row

DEMO = [sys.executable, "-m", "tiffin.bench.demo", "--quick"]


# -- the trace -------------------------------------------------------------------------------------


def request(ids: list[int], length: int, at: int = 0) -> trace.Request:
    return trace.Request(at, length, 1, tuple(ids))


def test_the_slice_is_what_its_readme_says() -> None:
    requests = trace.load_slice()
    assert len(requests) == 106
    assert max(r.input_length for r in requests) <= trace.MAX_PROMPT_TOKENS
    assert [r.timestamp for r in requests] == sorted(r.timestamp for r in requests)
    assert all(r.hash_ids[0] == 0 for r in requests)


def test_equal_ids_give_equal_tokens_and_others_do_not() -> None:
    one, two = request([0, 7, 8], 1400), request([0, 7, 9], 1200)
    a, b = (trace.tokens_of(r, seed=3, vocab=2048) for r in (one, two))
    assert (a.shape, b.shape) == ((1400,), (1200,))
    assert (a[:1024] == b[:1024]).all()
    assert (a[1024:1200] != b[1024:]).mean() > 0.9
    assert a.min() >= 0
    assert a.max() < 2048


def test_tokens_are_the_same_in_every_process_and_differ_by_seed() -> None:
    one = trace.tokens_of(request([0, 42], 600), seed=0, vocab=2048)
    assert one[[0, 1, 511, 512, 599]].tolist() == [1742, 1304, 865, 243, 1817]
    assert (one != trace.tokens_of(request([0, 42], 600), seed=1, vocab=2048)).mean() > 0.9


def test_lines_that_contradict_themselves_are_refused() -> None:
    line = json.dumps(asdict(request([0, 1], 1025)))
    with pytest.raises(ValueError, match="line 1"):
        trace.parse([line])


def test_selection_keeps_whole_short_conversations() -> None:
    conversations = [
        [request([0, c, 1000 + c], 1100, c), request([0, c], 900, c)]
        for c in range(1, 2 * trace.CONVERSATIONS_PER_KEPT)
    ]
    long = request([0, 1] + [5] * 20, 22 * 512)
    kept = trace.select([long, *(r for pair in conversations for r in pair)])
    assert {r.hash_ids[1] for r in kept} == {1, 1 + trace.CONVERSATIONS_PER_KEPT}
    assert len(kept) == 4


def test_reusable_tokens_stop_at_the_first_new_block_and_before_the_last_token() -> None:
    first = request([0, 1, 2], 1536)
    assert trace.reusable_tokens([first]) == 0
    assert trace.reusable_tokens([first, first]) == 1024
    assert trace.reusable_tokens([first, request([0, 9, 2, 3], 2000)]) == 512
    partial = request([0, 1], 700)  # its second block is not full, so it is not kept
    assert trace.reusable_tokens([partial, first]) == 512


# -- the report ------------------------------------------------------------------------------------


def row(number: int, *, pool: bool, tokens: list[int]) -> Row:
    ttft_s = 0.1 if pool else 0.4
    hit = 512 if pool else 0
    return Row(number, number % 2, pool, 1024, hit, ttft_s, 0.001, 0.002, 0, tokens)


@pytest.fixture
def outcome() -> Outcome:
    rows = [row(n, pool=pool, tokens=[n]) for pool in (False, True) for n in range(3)]
    counters = {"nvme_hits": 1, "nvme_hit_bytes": 2048}
    passes = {"without the pool": 2.0, "with the pool": 1.0}
    network = {"blocks": 1, "bytes": 2048}
    return Outcome(Options(requests=3), rows, counters, network, passes, 4.0)


def test_summary_adds_up(outcome: Outcome, tmp_path: Path) -> None:
    summary = report.summarise(outcome)
    assert summary["hit_rate"] == 0.5
    assert summary["ttft_ratio"]["p50"] == pytest.approx(4.0)
    assert summary["identical"]
    assert summary["found_blocks"] == {"home": 2, "network": 1}
    json.dumps(summary)
    report.table(summary)
    report.plot(outcome.rows, summary, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes()[:4] == b"\x89PNG"


def test_a_differing_token_is_found(outcome: Outcome) -> None:
    outcome.rows[4] = replace(outcome.rows[4], tokens=[99])
    assert report.differing(outcome.rows) == [outcome.rows[4].request]
    assert not report.summarise(outcome)["identical"]


# -- the whole -------------------------------------------------------------------------------------


def environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "TMPDIR": str(folder)}


def descendants(folder: Path) -> list[int]:
    """Processes that were started with this TMPDIR, or work in it: Redis overwrites its
    environment when it names itself."""
    mark, found = f"TMPDIR={folder}".encode(), []
    for process in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{process}/environ", "rb") as variables:
                marked = mark in variables.read().split(b"\0")
            if marked or Path(os.readlink(f"/proc/{process}/cwd")).is_relative_to(folder):
                found.append(int(process))
        except OSError:
            continue
    return found


@pytest.fixture
def engines() -> None:
    for name in ("torch", "transformers"):
        pytest.importorskip(name)


@pytest.mark.usefixtures("engines")
@pytest.mark.parametrize("nodes", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_the_quick_demo_runs_and_agrees(tmp_path: Path, nodes: int) -> None:
    temporary, out = tmp_path / "tmp", tmp_path / "out"
    temporary.mkdir()
    done = subprocess.run(
        [*DEMO, "--json", "--requests", "16", "--nodes", str(nodes), "--out", str(out)],
        capture_output=True,
        text=True,
        timeout=150,
        env=environment(temporary),
    )
    assert done.returncode == 0, done.stderr
    summary: dict[str, Any] = json.loads(done.stdout)
    assert summary["identical"]
    assert summary["pool_failures"] == 0
    assert 0 < summary["hit_rate"] <= summary["reusable_rate"]
    rows = json.loads((out / "demo-ttft.json").read_text())["rows"]
    assert [r["request"] for r in rows] == [*range(16), *range(16)]
    assert {r["worker"] for r in rows if r["hit_tokens"]} == {0, 1}
    found = summary["found_blocks"]
    assert sum(r["hit_tokens"] for r in rows) == 512 * sum(found.values())
    assert found["home"] >= 0
    # The system prompt, at the least, is computed by one of two workers and read by the other.
    assert (found["network"] > 0) == (summary["network_bytes"] > 0) == (nodes == 2)
    assert (out / "demo-ttft.png").stat().st_size > 10_000
    assert list(temporary.iterdir()) == []
    assert descendants(temporary) == []


@pytest.mark.slow
@pytest.mark.usefixtures("engines")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_outlives_an_interrupted_demo(tmp_path: Path, number: signal.Signals) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    with subprocess.Popen(
        [*DEMO, "--out", str(tmp_path)], stdout=subprocess.DEVNULL, env=environment(temporary)
    ) as demo:
        deadline = time.monotonic() + 60
        while len(descendants(temporary)) < 6 and time.monotonic() < deadline:
            time.sleep(0.1)
        assert len(descendants(temporary)) == 6  # itself, Redis, two nodes, two workers
        time.sleep(3.0)
        demo.send_signal(number)
        status = demo.wait(30)
    deadline = time.monotonic() + 20
    while descendants(temporary) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert descendants(temporary) == []
    if number != signal.SIGKILL:  # of which nobody can clean up the folder
        assert status == 130
        assert list(temporary.iterdir()) == []


@pytest.mark.slow
@pytest.mark.usefixtures("engines")
@pytest.mark.parametrize(
    ("victim", "words"),
    [
        ("bench.demo.worker", "died and ended with status -9"),
        ("tiffin.kvstore\0node", "was killed by SIGKILL"),
        ("redis", "redis was killed by SIGKILL"),
    ],
    ids=["worker", "node", "redis"],
)
def test_a_child_that_dies_is_reported(tmp_path: Path, victim: str, words: str) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    with subprocess.Popen(
        [*DEMO, "--json", "--out", str(tmp_path)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(temporary),
    ) as demo:
        deadline = time.monotonic() + 60
        while len(descendants(temporary)) < 6 and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(3.0)
        for process in descendants(temporary):
            with open(f"/proc/{process}/cmdline", "rb") as command:
                if victim in command.read().decode():
                    os.kill(process, signal.SIGKILL)
                    break
        _, stderr = demo.communicate(timeout=60)
    assert demo.returncode == 2, stderr
    assert words in stderr
    assert descendants(temporary) == []
    assert list(temporary.iterdir()) == []
