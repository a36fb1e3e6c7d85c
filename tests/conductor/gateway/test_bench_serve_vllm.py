"""vLLM's own load generator, `vllm bench serve`, in front of a gateway with two real vLLMs: alone,
and as one of them is killed and comes back.

TIFFIN_VLLM=/path/to/venv/bin/python pytest -m slow tests/conductor/gateway/test_bench_serve_vllm.py
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import clisupport
import httpx
import pytest
from kvsupport import wait_until
from latencysupport import total
from vllmsupport import (
    MARKS,
    MODEL,
    PATIENCE_S,
    VARIABLE,
    FrontDoor,
    Vllm,
    make_model,
    prompt,
    two_vllms,
)

from tiffin.conductor.client import ConductorClient

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = MARKS

PROFILE = "llama-3.1-8b.h100.tp1.vllm"
# So slow that a test sees its beginning alone, a tenth of the requests, however busy the machine.
SETTINGS = 'keys = "conductor"\n[breakers]\nslow_start_s = 3600'
ROOM = ("--num-gpu-blocks-override", "200", "--max-num-seqs", "16")
PROMPTS, PREFIX_TOKENS, INPUT_TOKENS, OUTPUT_TOKENS = 60, 256, 64, 24
BENCH_S = 600.0


@dataclass
class World:
    """All running processes."""

    folder: Path
    engines: dict[str, Vllm]
    door: FrontDoor
    http: httpx.Client

    def metrics(self) -> bytes:
        return self.http.get("/metrics").content

    def bench(self, url: str, name: str, *options: str) -> subprocess.Popen[bytes]:
        """Begin a run; its prompts and its answers are the same for the same options."""
        command = [os.environ[VARIABLE], "-m", "vllm.entrypoints.cli.main", "bench", "serve"]
        command += ["--base-url", url, "--model", MODEL, "--tokenizer", str(self.folder / "model")]
        command += ["--dataset-name", "random", "--num-prompts", str(PROMPTS)]
        command += ["--random-prefix-len", str(PREFIX_TOKENS)]
        command += ["--random-input-len", str(INPUT_TOKENS)]
        command += ["--random-output-len", str(OUTPUT_TOKENS)]
        command += ["--temperature", "0", "--ignore-eos", "--disable-tqdm"]
        command += ["--ready-check-timeout-sec", "0"]  # one request more
        command += ["--save-result", "--save-detailed", "--result-dir", str(self.folder)]
        command += ["--result-filename", f"{name}.json", *options]
        with (self.folder / f"{name}.log").open("wb") as log:
            return subprocess.Popen(
                command,
                env={**os.environ, "HF_HUB_OFFLINE": "1", "no_proxy": "127.0.0.1"},
                stdout=log,
                stderr=log,
            )

    def result(self, run: subprocess.Popen[bytes], name: str) -> dict[str, Any]:
        """What a run has measured, once it has ended."""
        try:
            status = run.wait(BENCH_S)
        finally:
            run.kill()
        assert status == 0, (self.folder / f"{name}.log").read_text()[-4000:]
        found: dict[str, Any] = json.loads((self.folder / f"{name}.json").read_text())
        return found

    def generated(self) -> dict[str, float]:
        """The tokens that each engine has generated."""
        return {name: one.counter("generation_tokens") for name, one in self.engines.items()}

    def busy(self, since: dict[str, float]) -> str:
        """An engine that has generated some answers' tokens since then; "" if none has."""
        time.sleep(0.2)  # to ask costs it as much as some tokens
        now = self.generated()
        return next((name for name in now if now[name] > since[name] + OUTPUT_TOKENS), "")

    def counted(self, name: str) -> float:
        """One of vLLM's counters, over both."""
        return sum(one.counter(name) for one in self.engines.values())


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("bench")
    make_model(folder / "model")
    with contextlib.ExitStack() as stack:
        started = two_vllms(folder, SETTINGS, PROFILE, *ROOM)
        engines, door = stack.enter_context(started)
        http = httpx.Client(base_url=door.gateway_url, trust_env=False, timeout=PATIENCE_S)
        stack.callback(http.close)
        it = World(folder, {one.name: one for one in engines}, door, http)
        wait_until(lambda: http.get("/readyz").status_code == 200, "the gateway knows", PATIENCE_S)
        yield it


BACKENDS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}


@pytest.mark.parametrize("backend", BACKENDS)
def test_all_that_it_counts_is_what_the_gateway_has_counted(world: World, backend: str) -> None:
    options = ("--backend", backend, "--endpoint", BACKENDS[backend], "--seed", str(len(backend)))
    direct = world.bench(world.engines["b"].url, f"direct-{backend}", *options)
    expected = world.result(direct, f"direct-{backend}")
    before = world.metrics()
    engines = {name: world.counted(name) for name in ("prompt_tokens", "generation_tokens")}
    through = world.bench(world.door.gateway_url, backend, *options)
    found = world.result(through, backend)
    after = world.metrics()

    assert (found["completed"], found["failed"]) == (PROMPTS, 0)
    assert found["output_lens"] == [OUTPUT_TOKENS] * PROMPTS
    assert found["generated_texts"] == expected["generated_texts"]
    assert len(set(found["generated_texts"])) > 1
    assert not any(found["errors"])
    engines = {name: world.counted(name) - was for name, was in engines.items()}
    assert engines["generation_tokens"] == found["total_output_tokens"]

    def counted(name: str, **labels: str) -> float:
        metric = f"tiffin_gateway_{name}"
        return total(after, metric, **labels) - total(before, metric, **labels)

    assert counted("answered_tokens_total") == found["total_output_tokens"]
    assert counted("prompt_tokens_total") == engines["prompt_tokens"]
    route = BACKENDS[backend]
    assert counted("requests_total", route=route, status="200") == PROMPTS
    assert counted("requests_total", route=route) == PROMPTS
    assert counted("ttft_seconds_count", model=MODEL) == PROMPTS
    assert counted("request_duration_seconds_count") == PROMPTS
    assert 0 < counted("itl_seconds_count", model=MODEL) <= PROMPTS * (OUTPUT_TOKENS - 1)
    for name in ("cancelled", "broken_streams", "fallbacks", "not_placed", "rescheduled"):
        assert counted(f"{name}_total") == 0, name
    if backend == "openai":  # a chat's template adds to what the client counts
        assert found["total_input_tokens"] == engines["prompt_tokens"]


def test_one_that_is_killed_under_load_and_comes_back(world: World) -> None:
    """No request is lost and no token differs; then it gets nothing, then a tenth."""
    options = ("--backend", "openai", "--seed", "9")
    direct = world.bench(world.engines["b"].url, "direct-killed", *options)
    expected = world.result(direct, "direct-killed")
    before = world.metrics()
    said = world.generated()
    through = world.bench(world.door.gateway_url, "killed", *options, "--max-concurrency", "16")
    try:
        victim = wait_until(lambda: world.busy(said), "one has something to do", BENCH_S)
        world.engines[victim].kill_all()
        found = world.result(through, "killed")
    finally:
        through.kill()
    assert (found["completed"], found["failed"]) == (PROMPTS, 0), world.door.gateway.log()
    assert found["generated_texts"] == expected["generated_texts"]
    assert found["output_lens"] == [OUTPUT_TOKENS] * PROMPTS
    after = world.metrics()
    name = "tiffin_gateway_broken_streams_total"
    assert total(after, name) == total(before, name)

    def is_open() -> bool:
        return total(world.metrics(), "tiffin_gateway_circuits_open", instance=victim) == 1

    wait_until(is_open, "it gets no requests", PATIENCE_S)
    (other,) = world.engines.keys() - {victim}
    assert homes(world, 5) == {other: 5}
    world.engines[victim].end()
    world.engines[victim].start()
    world.engines[victim].wait()
    wait_until(lambda: not is_open(), "it gets requests", PATIENCE_S + 60)
    with ConductorClient(world.door.conductor_url) as conductor:
        wait_until(
            lambda: {one.status for one in conductor.instances()} == {"ready"},
            "the conductor has found it again",
            PATIENCE_S,
        )
    found_again = homes(world, 45)
    assert found_again[victim] in (4, 5), "a tenth, or hardly more"


def homes(world: World, requests: int) -> dict[str, int]:
    """Where requests with nothing in common ran, one after the other."""
    found = Counter[str]()
    for number in range(requests):
        body = {"model": MODEL, "prompt": prompt(number, 30), "max_tokens": 1}
        response = world.http.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        found[response.headers["x-tiffin-decode"]] += 1
    return dict(found)


def test_the_command_adds_a_living_engine(world: World) -> None:
    url = world.door.conductor_url
    with ConductorClient(url) as conductor:
        conductor.remove("a")
        wait_until(lambda: homes(world, 1) == {"b": 1}, "it is gone", PATIENCE_S)
        options = ("--profile", PROFILE, "--id", "a", "--url", url)
        said = clisupport.run("add", world.engines["a"].url, *options)
        assert said.exit_code == 0, said.output
        assert "a" in said.output
        (added,) = (one for one in conductor.instances() if one.id == "a")
        assert (added.model, added.block_tokens) == (MODEL, 512)
        refused = clisupport.run("add", world.engines["a"].url + "1", *options)
        assert refused.exit_code != 0
