"""A real vLLM that prefills and one that decodes, with the KV through the pool, behind a real
gateway and a real conductor: each a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx
from connectors.vllmserver import VllmServer
from kvsupport import Daemon, wait_until
from vllmsupport import MODEL, PATIENCE_S, VARIABLE, FrontDoor, front_door, make_model

from tiffin.conductor.client import ConductorClient
from tiffin.conductor.errors import ConductorError
from tiffin.conductor.records import InstanceSpec, Load, Role

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from tiffin.kvstore import KVSchema

BLOCK_TOKENS = 512
NODE_BYTES = 256 << 20
PROFILE = "llama-3.1-8b.h100.tp1.vllm"
ANSWER_TOKENS = 12


@dataclass
class Split:
    """All running processes."""

    node: Daemon
    prefill: VllmServer
    decode: VllmServer
    door: FrontDoor
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

    def alone(self, ids: Sequence[int], tokens: int = ANSWER_TOKENS) -> list[int]:
        """The tokens of one instance that computes all of it. What it stores, by a salt, nobody
        else finds."""
        body = {**body_of(ids), "max_tokens": tokens, "cache_salt": "alone"}
        response = self.prefill.http.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        return list(response.json()["choices"][0]["token_ids"])

    def loaded_tokens(self) -> float:
        """Tokens of prompts that the decode instance has loaded from the pool."""
        return self.decode.counter("tiffin_loaded_tokens")


def pool_options(url: str, role: str, **settings: Any) -> tuple[str, str]:
    """Options of a vLLM for the pool at `url`; `settings` of the connector."""
    pool = {
        "kv_connector": "TiffinConnector",
        "kv_connector_module_path": "tiffin.kvstore.connectors.vllm",
        "kv_role": role,
        "kv_load_failure_policy": "recompute",
        # Lookups time out on a busy machine: then the prompt would be computed, and nothing shown.
        "kv_connector_extra_config": {
            "url": url,
            "lookup_timeout_s": 20,
            "handoff_timeout_s": 20,
            **settings,
        },
    }
    return "--kv-transfer-config", json.dumps(pool)


def server(
    name: str, model: Path, url: str, role: str, niceness: int = 0, **settings: Any
) -> VllmServer:
    options = ("--no-enable-prefix-caching", *pool_options(url, role, **settings))
    log = model.parent / f"{name}.log"
    return VllmServer(os.environ[VARIABLE], model, log, *options, niceness=niceness)


def body_of(ids: Sequence[int]) -> dict[str, Any]:
    body = {"model": MODEL, "max_tokens": ANSWER_TOKENS, "temperature": 0, "ignore_eos": True}
    return {**body, "return_token_ids": True, "prompt": list(ids)}


@contextlib.contextmanager
def beating(
    conductor: str, specs: Sequence[InstanceSpec], schema: KVSchema | None = None
) -> Iterator[None]:
    """Register the instances and send their heartbeats while they are healthy, also to a conductor
    that was started again."""
    ended = threading.Event()

    def beat() -> None:
        with ConductorClient(conductor) as client, httpx.Client(trust_env=False) as http:
            while not ended.wait(0.5):
                for spec in specs:
                    with contextlib.suppress(httpx.HTTPError, ConductorError):
                        http.get(f"{spec.url}/health", timeout=2).raise_for_status()
                        client.register(spec, Load(), schema)

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextlib.contextmanager
def split_vllm(
    folder: Path,
    handoff: str = "pool",
    *,
    niceness: int = 0,
    size: Mapping[str, int] | None = None,
    **settings: Any,
) -> Iterator[Split]:
    """Start everything; returns when the gateway knows both instances. `handoff`: of the gateway.
    `niceness`: of vLLM, `size`: of the model. `settings`: of the connectors."""
    make_model(folder / "model", **(size or {}))
    with contextlib.ExitStack() as stack:
        node = stack.enter_context(contextlib.closing(Daemon(dram=NODE_BYTES)))
        prefill, decode = (
            server(name, folder / "model", node.url, role, niceness, **settings)
            for name, role in (("prefill", "kv_producer"), ("decode", "kv_consumer"))
        )
        for one in (prefill, decode):
            stack.callback(one.close)
            one.start()
        door = stack.enter_context(front_door(folder, f'keys = "none"\nhandoff = "{handoff}"'))
        for one in (prefill, decode):
            one.wait()
        specs = [
            InstanceSpec(str(role), MODEL, role, PROFILE, url=one.url)
            for role, one in ((Role.PREFILL, prefill), (Role.DECODE, decode))
        ]
        stack.enter_context(beating(door.conductor_url, specs))
        http = httpx.Client(base_url=door.gateway_url, trust_env=False, timeout=PATIENCE_S)
        it = Split(node, prefill, decode, door, stack.enter_context(http))
        wait_until(
            lambda: http.get("/readyz").status_code == 200, "the gateway knows them", PATIENCE_S
        )
        yield it
