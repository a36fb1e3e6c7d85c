"""Two real vLLMs, one of which is killed under 200 greedy streams: none is lost, no token differs.

TIFFIN_VLLM=/path/to/venv/bin/python pytest -m slow \\
    tests/conductor/gateway/test_continuation_vllm.py
"""

from __future__ import annotations

import contextlib
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import httpx
from kvsupport import wait_until
from vllmsupport import MARKS, MODEL, PATIENCE_S, Vllm, make_model, prompt, two_vllms, words

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

pytestmark = MARKS

STREAMS = 200
TOKENS = 48
# One engine has room for all of them.
ROOM = ("--num-gpu-blocks-override", str(2 * STREAMS))
PROFILE = "llama-3.1-8b.h100.tp1.vllm"


def body_of(number: int) -> tuple[str, dict[str, Any]]:
    """A request: every other one a chat."""
    common = {"model": MODEL, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    ids = prompt(number, 10 + number % 7)
    if number % 2:
        return "/v1/chat/completions", {
            **common,
            "messages": [{"role": "user", "content": words(ids)}],
        }
    return "/v1/completions", {**common, "prompt": ids}


def text_of(choice: dict[str, Any]) -> str:
    said = choice.get("delta") or choice.get("message") or choice
    return str(said.get("content") or said.get("text") or "")


class Client:
    """Streams all requests through the gateway."""

    def __init__(self, url: str) -> None:
        self.events = 0
        self._lock = threading.Lock()
        limits = httpx.Limits(max_connections=None)
        self.http = httpx.Client(base_url=url, trust_env=False, timeout=120, limits=limits)

    def stream(self, number: int) -> str:
        """The text of a whole answer."""
        path, body = body_of(number)
        text, ended = "", False
        with self.http.stream("POST", path, json={**body, "stream": True}) as response:
            assert response.status_code == 200, response.read()
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    assert "error" not in event, event
                    text += "".join(map(text_of, event["choices"]))
                    ended |= any(one.get("finish_reason") for one in event["choices"])
                    with self._lock:
                        self.events += 1
        assert ended, "a stream without an end"
        return text


def expected(engine: Vllm, numbers: Sequence[int]) -> list[str]:
    """What one engine says to all requests."""

    def answer(number: int) -> str:
        path, body = body_of(number)
        response = engine.http.post(path, json=body)
        assert response.status_code == 200, response.text
        return text_of(response.json()["choices"][0])

    with ThreadPoolExecutor(16) as pool:
        return list(pool.map(answer, numbers))


def test_an_engine_killed_under_200_streams_loses_none(tmp_path: Path) -> None:
    make_model(tmp_path / "model")
    with contextlib.ExitStack() as stack:
        started = two_vllms(tmp_path, 'tokenizer = "engine"', PROFILE, *ROOM)
        engines, door = stack.enter_context(started)
        client = Client(door.gateway_url)
        stack.callback(client.http.close)
        wait_until(
            lambda: client.http.get("/readyz").status_code == 200, "the gateway knows", PATIENCE_S
        )
        right = expected(engines[1], range(STREAMS))
        with ThreadPoolExecutor(STREAMS) as pool:
            streams = [pool.submit(client.stream, number) for number in range(STREAMS)]
            wait_until(lambda: client.events > STREAMS * TOKENS // 8, "streams run", PATIENCE_S)
            engines[0].kill_all()
            lost = [one.exception() for one in streams if one.exception()]
        assert not lost, (lost[:3], door.gateway.log())
        said = [one.result() for one in streams]
        different = [n for n in range(STREAMS) if said[n] != right[n]]
        assert not different
        text = client.http.get("/metrics").text
        (continued,) = [
            float(line.split()[-1])
            for line in text.splitlines()
            if line.startswith("tiffin_gateway_continued_streams_total ")
        ]
        assert continued > 0, "the engine that was killed had no streams"
        assert "tiffin_gateway_broken_streams_total 0.0" in text
