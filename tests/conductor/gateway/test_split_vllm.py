"""A real vLLM prefills and another one decodes, with the KV through the pool: behind a real gateway
and a real conductor, each in a process of its own.

TIFFIN_VLLM=/path/to/venv/bin/python pytest -m slow tests/conductor/gateway/test_split_vllm.py
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from connectors.vllmserver import VllmServer
from directory.ports import free_port
from kvsupport import Daemon, wait_until
from serversupport import GatewayProcess, Process
from vllmsupport import MODEL, PATIENCE_S, VARIABLE, make_model

from tiffin.conductor.client import ConductorClient
from tiffin.conductor.records import InstanceSpec, Load, Role

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not os.environ.get(VARIABLE), reason=f"{VARIABLE} names no Python that has vLLM"
    ),
    pytest.mark.skipif(find_spec("transformers") is None, reason="the engines extra is missing"),
]

BLOCK_TOKENS = 512
NODE_BYTES = 256 << 20
PROFILE = "llama-3.1-8b.h100.tp1.vllm"
ANSWER_TOKENS = 12
TURNS = 3


@dataclass
class Split:
    """All running processes."""

    prefill: VllmServer
    decode: VllmServer
    gateway: httpx.Client

    def ask(self, ids: Sequence[int], *, stream: bool = False) -> list[int]:
        """The tokens of an answer through the gateway."""
        if stream:
            return self._streamed(ids)
        response = self.gateway.post("/v1/completions", json=body_of(ids))
        assert response.status_code == 200, response.text
        self._check_instances(response)
        return list(response.json()["choices"][0]["token_ids"])

    def _streamed(self, ids: Sequence[int]) -> list[int]:
        body, tokens = {**body_of(ids), "stream": True}, []
        with self.gateway.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200, response.read()
            self._check_instances(response)
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                    tokens += choice["token_ids"] or []
        return tokens

    @staticmethod
    def _check_instances(response: httpx.Response) -> None:
        assert response.headers["x-tiffin-prefill"] == "prefill"
        assert response.headers["x-tiffin-decode"] == "decode"

    def alone(self, ids: Sequence[int]) -> list[int]:
        """The tokens of one instance that computes all of it."""
        response = self.prefill.http.post("/v1/completions", json=body_of(ids))
        assert response.status_code == 200, response.text
        return list(response.json()["choices"][0]["token_ids"])

    def loaded_tokens(self) -> float:
        """Tokens of prompts that the decode instance has loaded from the pool."""
        return self.decode.counter("tiffin_loaded_tokens")


def server(name: str, model: Path, url: str, role: str) -> VllmServer:
    pool = {
        "kv_connector": "TiffinConnector",
        "kv_connector_module_path": "tiffin.kvstore.connectors.vllm",
        "kv_role": role,
        # Lookups time out on a busy machine: then the prompt would be computed, and nothing shown.
        "kv_connector_extra_config": {"url": url, "lookup_timeout_s": 20, "handoff_timeout_s": 20},
    }
    options = ("--no-enable-prefix-caching", "--kv-transfer-config", json.dumps(pool))
    return VllmServer(os.environ[VARIABLE], model, model.parent / f"{name}.log", *options)


def body_of(ids: Sequence[int]) -> dict[str, Any]:
    body = {"model": MODEL, "max_tokens": ANSWER_TOKENS, "temperature": 0, "ignore_eos": True}
    return {**body, "return_token_ids": True, "prompt": list(ids)}


@contextlib.contextmanager
def beating(conductor: str, servers: dict[Role, VllmServer]) -> Iterator[None]:
    """Register the instances and send their heartbeats."""
    ended = threading.Event()

    def beat() -> None:
        with ConductorClient(conductor) as client:
            while not ended.wait(0.5):
                for role, one in servers.items():
                    client.register(
                        InstanceSpec(str(role), MODEL, role, PROFILE, url=one.url), Load()
                    )

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Split]:
    folder = tmp_path_factory.mktemp("split")
    make_model(folder / "model")
    config = folder / "gateway.toml"
    config.write_text(f'[models."{MODEL}"]\nkeys = "none"\nhandoff = "pool"\n')
    with contextlib.ExitStack() as stack:
        node = stack.enter_context(contextlib.closing(Daemon(dram=NODE_BYTES)))
        prefill = server("prefill", folder / "model", node.url, "kv_producer")
        decode = server("decode", folder / "model", node.url, "kv_consumer")
        for one in (prefill, decode):
            stack.callback(one.close)
            one.start()
        urls = [f"http://127.0.0.1:{free_port()}" for _ in range(2)]
        listens = [url.removeprefix("http://") for url in urls]
        conductor = stack.enter_context(Process("--listen", listens[0]))
        conductor.wait_until_it_answers(urls[0])
        options = ("--listen", listens[1], "--conductor", urls[0], "--config", str(config))
        gateway = stack.enter_context(GatewayProcess(*options))
        gateway.wait_until_it_answers(urls[1])
        for one in (prefill, decode):
            one.wait()
        stack.enter_context(beating(urls[0], {Role.PREFILL: prefill, Role.DECODE: decode}))
        http = httpx.Client(base_url=urls[1], trust_env=False, timeout=PATIENCE_S)
        it = Split(prefill, decode, stack.enter_context(http))
        wait_until(
            lambda: http.get("/readyz").status_code == 200, "the gateway knows them", PATIENCE_S
        )
        yield it


def prompt(seed: int, tokens: int) -> list[int]:
    dice = random.Random(seed)
    return [dice.randrange(4, 1024) for _ in range(tokens)]


@pytest.mark.parametrize("stream", [False, True])
def test_a_split_answers_as_one_instance_does(split: Split, stream: bool) -> None:
    """Conversations whose turns grow: tokens are those of one instance, and the decode instance
    computes what is behind the last whole block only."""
    for conversation in range(4):
        ids = prompt(10 * stream + conversation, 700 + 300 * conversation)
        for _ in range(TURNS):
            before = split.loaded_tokens()
            said = split.ask(ids, stream=stream)
            assert said == split.alone(ids)
            assert len(said) == ANSWER_TOKENS
            loaded = split.loaded_tokens() - before
            assert loaded == len(ids) // BLOCK_TOKENS * BLOCK_TOKENS, "all of what was promised"
            ids = [*ids, *said, *prompt(len(ids), 200)]


def test_many_at_a_time(split: Split) -> None:
    prompts = [prompt(100 + number, 600 + 100 * number) for number in range(8)]
    with ThreadPoolExecutor(4) as clients:
        said = list(clients.map(split.ask, prompts))
    assert said == [split.alone(ids) for ids in prompts]


def test_a_short_prompt_has_no_block_to_wait_for(split: Split) -> None:
    ids = prompt(200, 100)
    before = split.loaded_tokens()
    assert split.ask(ids) == split.alone(ids)
    assert split.loaded_tokens() == before
