"""`tiffin profile` measures what it says it does, of an engine on loopback and by arithmetic."""

from __future__ import annotations

import json
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import typer
from enginesupport import FakeEngine, server_info
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from tiffin.conductor.cli import commands
from tiffin.conductor.cost import latency_profiles
from tiffin.conductor.discovery.profile_ladder import (
    ANSWER_TOKENS,
    KV_SHARE,
    STEPS,
    DecodeStep,
    DecodeWindow,
    Limits,
    decode_steps,
    ladder,
    prefill_steps,
)
from tiffin.conductor.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from http.server import BaseHTTPRequestHandler
    from pathlib import Path

    from click.testing import Result

BLOCK = 128
VOCABULARY = 1024


# -- what is measured ------------------------------------------------------------------------------


@given(st.integers(1, 500), st.integers(500, 1 << 20), st.integers(1, 9))
def test_a_ladder_reaches_both_ends(least: int, most: int, count: int) -> None:
    found = ladder(least, most, count)
    assert (found[0], len(found) <= count) == (least, True)
    assert count == 1 or found[-1] == most
    assert found == sorted(set(found))


@given(
    st.integers(700, 1 << 18),
    st.integers(3000, 1 << 22),
    st.sampled_from([1, 16, 128]),
    st.integers(2, 512),
)
def test_what_is_measured_fits(tokens: int, capacity: int, block: int, batch: int) -> None:
    limits = Limits(tokens, capacity, block, batch)
    steps = prefill_steps(limits)
    assert len({step.tokens for step in steps}) >= 3
    assert len(steps) == len(set(steps))
    for step in steps:
        assert 0 <= step.cached < step.tokens <= min(tokens, KV_SHARE * capacity)
        assert step.cached % block == 0
    batches = decode_steps(limits)
    assert len({one.batch for one in batches}) >= 2
    for one in batches:
        assert one.batch <= batch
        assert one.batch * (one.context + ANSWER_TOKENS) <= KV_SHARE * capacity
        assert one.context + ANSWER_TOKENS <= tokens


def test_the_ladder_of_a_common_engine() -> None:
    limits = Limits(32_768, 400_000, 16, 64)
    assert sorted({step.tokens for step in prefill_steps(limits)}) == [
        512, 1448, 4096, 11585, 32768,
    ]  # fmt: skip
    assert {step.batch for step in decode_steps(limits)} == {1, 4, 16, 64}


def test_engines_that_are_too_small() -> None:
    with pytest.raises(InvalidRequest, match="too short"):
        prefill_steps(Limits(2, 1000, 1, 4))
    with pytest.raises(InvalidRequest, match="no room for two requests"):
        decode_steps(Limits(4096, 800, 16, 4))


@given(st.floats(0.05, 1.0), st.lists(st.floats(0, 5), min_size=1, max_size=8))
def test_a_step_is_timed_while_all_decode(step_s: float, starts: list[float]) -> None:
    """Streams that begin when they like, with steps of one length."""
    window, begun = DecodeWindow(DecodeStep(len(starts), 100)), max(starts)
    ends = begun + (STEPS + 3) * step_s
    events = sorted(
        (start + n * step_s, stream, 1 + n)
        for stream, start in enumerate(starts)
        for n in range(int((ends - start) / step_s))
    )
    told = [window.arrived(stream, at_s, tokens) for at_s, stream, tokens in events]
    assert True in told
    found = window.point()
    assert found is not None
    assert found[0] == len(starts)
    assert found[1] > 100 * len(starts) + STEPS / 2
    assert found[2] == pytest.approx(step_s, rel=2 / STEPS)


def test_steps_of_a_batch_by_hand() -> None:
    window = DecodeWindow(DecodeStep(2, 100))
    assert window.point() is None
    window.arrived(0, 1.0, 1)
    window.arrived(0, 4.0, 2)  # while the other prompt is computed
    window.arrived(1, 5.0, 1)
    assert window.point() is None
    for n in range(1, STEPS + 1):
        early = window.arrived(0, 5.0 + n / 10, 2 + n)
        done = window.arrived(1, 5.0 + n / 10, 1 + n)
        assert not early
        assert done == (n == STEPS)
    found = window.point()
    assert found is not None
    assert found == (2, pytest.approx(200 + 3 + STEPS, abs=1), pytest.approx(0.1))


# -- an engine -------------------------------------------------------------------------------------


class Computing(FakeEngine):
    """Computes nothing, in some time: a prompt takes as long as what no earlier one began with, and
    streams go on by steps. `slots`: how many requests it runs at a time."""

    def __init__(self, *, slots: int = 4, caches: bool = True) -> None:
        self.caches = caches
        self.prompts: list[list[int]] = []
        self.bodies: list[dict[str, Any]] = []
        self.slots = threading.Semaphore(slots)
        self.lock = threading.Lock()
        self.most_id = 0
        self.released = threading.Event()  # streams wait for it
        self.released.set()
        super().__init__()

    def post(self, http: BaseHTTPRequestHandler) -> None:
        body = json.loads(http.rfile.read(int(http.headers["content-length"])))
        ids = body["prompt"]
        if max(ids) >= VOCABULARY:
            http.send_error(400, "out of vocabulary")
            return
        with self.slots:
            with self.lock:
                hits = self._found(ids)
                self.prompts.append(ids)
                self.bodies.append(body)
                self.hits += hits
                self.most_id = max(self.most_id, *ids)
            time.sleep(1e-3 + 1e-6 * (len(ids) - hits))
            self._answer(http, body)

    def _found(self, ids: list[int]) -> int:
        if not self.caches:
            return 0
        blocks = (len(ids) - 1) // BLOCK
        return BLOCK * next(
            (n for n in range(blocks, 0, -1)
             if any(old[: n * BLOCK] == ids[: n * BLOCK] for old in self.prompts)),
            0,
        )  # fmt: skip

    def _answer(self, http: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        http.send_response(200)
        if not body.get("stream"):
            http.send_header("content-length", "2")
            http.end_headers()
            http.wfile.write(b"{}")
            return
        http.end_headers()
        self.released.wait()
        try:
            for count in range(1, body["max_tokens"] + 1):
                event = {"choices": [{"text": "w"}], "usage": {"completion_tokens": count}}
                http.wfile.write(b"data: %b\n\n" % json.dumps(event).encode())
                http.wfile.flush()
                time.sleep(1e-3)
            http.wfile.write(b"data: [DONE]\n\n")
        except OSError:
            pass  # the client has enough


@pytest.fixture
def engine() -> Iterator[Computing]:
    with Computing() as engine:
        engine.routes["/server_info"] = json.dumps(server_info()).encode()
        yield engine


def run(*arguments: str) -> Result:
    app = typer.Typer()
    app.callback()(lambda: None)
    commands(app)
    environment = {"COLUMNS": "300", "TERM": "dumb"}
    return CliRunner().invoke(app, ["profile", *arguments], env=environment)


def test_a_profile_is_written(engine: Computing, tmp_path: Path) -> None:
    out = tmp_path / "mine.json"
    options = ("--repeats", "1", "--out", str(out), "--name", "tiny.stub", "--hardware", "none")
    result = run(engine.url, *options)
    assert result.exit_code == 0, result.output
    made = latency_profiles.from_file(out)
    assert (made.name, made.model, made.engine) == ("tiny.stub", "tiny", "vLLM 0.32.0")
    assert made.prefill_fit is not None
    assert made.decode_fit is not None
    assert made.prefill_fit.points + made.prefill_fit.left_out == 15
    assert {row[0] for row in made.checks.decode} == {1, 4}, "as many as run at a time"
    assert f"written to {out}" in result.output
    assert "prefill of 4,095 tokens, 0 cached" in result.output
    assert 4 * VOCABULARY > 1000 >= engine.most_id > VOCABULARY // 2
    cached = [row[1] for row in made.checks.prefill]
    assert sorted(set(cached))[0] == 0
    assert len(set(cached)) > 4
    assert all(one % BLOCK == 0 for one in cached)
    whole = [tuple(ids) for ids in engine.prompts]
    assert len(whole) == len(set(whole)), "no prompt is sent twice"


def test_an_engine_without_a_prefix_cache(tmp_path: Path) -> None:
    with Computing(caches=False) as engine:
        result = run(engine.url, "--repeats", "1", "--batch-max", "2", "--out", str(tmp_path / "x"))
    assert "it caches no prefixes" in result.output
    assert result.exit_code == 0, result.output
    assert {row[1] for row in latency_profiles.from_file(tmp_path / "x").checks.prefill} == {0}


@pytest.mark.slow
def test_a_batch_that_does_not_run_at_a_time_is_left_out(tmp_path: Path) -> None:
    with Computing(slots=2) as engine:
        result = run(engine.url, "--repeats", "1", "--batch-max", "3", "--out", str(tmp_path / "x"))
    assert result.exit_code == 0, result.output
    assert "it does not run 3 requests at a time" in result.output
    assert {row[0] for row in latency_profiles.from_file(tmp_path / "x").checks.decode} == {1, 2}


def test_what_cannot_be_measured_is_told(engine: Computing, tmp_path: Path) -> None:
    engine.running = 3
    assert run(engine.url).exit_code == 2
    engine.running = 0
    engine.close()
    assert run(engine.url).exit_code == 2
    engine.start()
    assert run(engine.url, "--model", "other").exit_code == 2


@pytest.mark.slow
def test_a_batch_that_never_answers_is_told(engine: Computing) -> None:
    engine.released.clear()
    try:
        result = run(engine.url, "--repeats", "1", "--timeout-s", "1")
    finally:
        engine.released.set()
    assert result.exit_code == 2
    assert "1 requests took longer than 1 s" in result.output
