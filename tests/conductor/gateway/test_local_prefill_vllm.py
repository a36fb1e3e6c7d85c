"""Two real vLLMs: one prefills, one does both. What the latter prefills itself is decided by
predicted seconds, and said by the decision.

TIFFIN_VLLM=/path/to/venv/bin/python pytest -m slow \\
    tests/conductor/gateway/test_local_prefill_vllm.py
"""

from __future__ import annotations

import contextlib
import json
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from kvsupport import Daemon, wait_until
from splitsupport import NODE_BYTES, PROFILE, beating, body_of, pool_options, server
from vllmsupport import MARKS, MODEL, PATIENCE_S, SCHEMA, Vllm, front_door, make_model, prompt

from tiffin.conductor.client import ConductorClient
from tiffin.conductor.records import InstanceSpec, Role

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from connectors.vllmserver import VllmServer

    from tiffin.conductor.wire.models import EntryReply

pytestmark = MARKS

BLOCK = SCHEMA.block_tokens


@dataclass
class Pair:
    """All running processes. `prefill` only prefills, `both` does both."""

    prefill: VllmServer
    both: Vllm
    conductor: ConductorClient
    gateway: httpx.Client

    def ask(self, ids: Sequence[int]) -> tuple[list[int], EntryReply]:
        """The tokens of an answer through the gateway, and the decision."""
        response = self.gateway.post("/v1/completions", json=body_of(ids))
        assert response.status_code == 200, response.text
        entry = self.conductor.why(response.headers["x-tiffin-request-id"])
        assert response.headers["x-tiffin-prefill"] == entry.prefill
        assert response.headers["x-tiffin-decode"] == entry.decode == "both"
        return list(response.json()["choices"][0]["token_ids"]), entry

    def alone(self, ids: Sequence[int]) -> list[int]:
        """The tokens of one instance that computes all of it."""
        response = self.prefill.http.post("/v1/completions", json=body_of(ids))
        assert response.status_code == 200, response.text
        return list(response.json()["choices"][0]["token_ids"])

    @contextlib.contextmanager
    def decoding(self) -> Iterator[None]:
        """While `both` streams a long answer to somebody else."""
        begun, ended = threading.Event(), threading.Event()
        body: dict[str, Any] = {**body_of(prompt(900, 100)), "max_tokens": 3500, "stream": True}

        def read() -> None:
            with self.gateway.stream("POST", "/v1/completions", json=body) as response:
                for line in response.iter_lines():
                    if line.startswith("data: {") and json.loads(line[6:])["choices"]:
                        begun.set()
                    if ended.is_set():
                        return

        thread = threading.Thread(target=read)
        thread.start()
        try:
            assert begun.wait(PATIENCE_S)
            wait_until(self._seen_decoding, "the conductor knows", PATIENCE_S)
            yield
        finally:
            ended.set()
            thread.join()

    def _seen_decoding(self) -> bool:
        return self.conductor.instance("both").load["batch"] == 1


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("pair")
    make_model(folder / "model")
    with contextlib.ExitStack() as stack:
        node = stack.enter_context(contextlib.closing(Daemon(dram=NODE_BYTES)))
        prefill = server("prefill", folder / "model", node.url, "kv_producer")
        both = Vllm("both", folder / "model", *pool_options(node.url, "kv_both"))
        for one in (prefill, both):
            stack.callback(one.close)
            one.start()
        door = stack.enter_context(front_door(folder, 'keys = "conductor"\nhandoff = "pool"'))
        for one in (prefill, both):
            one.wait()
        events, replay = both.endpoints
        labels = {"kv_events": events, "kv_events_replay": replay}
        common: dict[str, Any] = {"block_bytes": SCHEMA.block_bytes, "fetches": False}
        specs = [
            InstanceSpec("prefill", MODEL, Role.PREFILL, PROFILE, url=prefill.url, **common),
            InstanceSpec("both", MODEL, Role.MIXED, PROFILE, url=both.url, labels=labels, **common),
        ]
        stack.enter_context(beating(door.conductor_url, specs, SCHEMA))
        client = stack.enter_context(ConductorClient(door.conductor_url))
        http = httpx.Client(base_url=door.gateway_url, trust_env=False, timeout=PATIENCE_S)
        it = Pair(prefill, both, client, stack.enter_context(http))
        wait_until(
            lambda: http.get("/readyz").status_code == 200, "the gateway knows them", PATIENCE_S
        )
        wait_until(lambda: len(client.instances()) == 2, "both are registered", PATIENCE_S)
        yield it


def test_a_short_prompt_is_prefilled_where_it_decodes(pair: Pair) -> None:
    ids = prompt(1, 100)
    tokens, entry = pair.ask(ids)
    assert tokens == pair.alone(ids)
    assert entry.prefill == "both"


def test_a_long_prompt_is_prefilled_apart_while_others_decode(pair: Pair) -> None:
    ids = prompt(2, 5 * BLOCK + 20)
    with pair.decoding():
        tokens, entry = pair.ask(ids)
    assert tokens == pair.alone(ids)
    assert (entry.prefill, entry.placement) == ("prefill", "predicted")
    assert entry.local_s is not None
    assert entry.remote_s is not None
    assert entry.remote_s < entry.local_s


def test_a_cached_prompt_is_prefilled_where_its_blocks_are(pair: Pair) -> None:
    start = prompt(3, 5 * BLOCK)
    response = pair.both.http.post("/v1/completions", json=body_of([*start, 4]))
    assert response.status_code == 200

    def held() -> int:
        holders = pair.conductor.match(SCHEMA.prefix(start).keys).holders
        return {one.holder: one.blocks for one in holders}.get("both/hbm", 0)

    wait_until(lambda: held() == 5, "the conductor knows the blocks", PATIENCE_S)
    ids = [*start, *prompt(4, 20)]
    with pair.decoding():
        tokens, entry = pair.ask(ids)
    assert tokens == pair.alone(ids)
    assert (entry.prefill, entry.cached_tokens) == ("both", 5 * BLOCK)
    assert entry.local_s is not None
    assert entry.remote_s is not None
    assert entry.local_s < entry.remote_s
