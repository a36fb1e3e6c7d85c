"""Two real vLLMs with few pages, each at a node of its own of one pool: nobody tells the conductor
their schema, nodes or connector, and it knows what each of them will find.

TIFFIN_VLLM=/path/to/venv/bin/python pytest -m slow -s \\
    tests/conductor/gateway/test_key_spaces_vllm.py
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from directory.ports import free_port
from kvsupport import TIFFIN, wait_until
from serversupport import Process
from vllmsupport import MARKS, MODEL, PATIENCE_S, Vllm, make_model, prompt

from tiffin.conductor.client import ConductorClient
from tiffin.conductor.records import Request, RequestEvent
from tiffin.conductor.wire.models import DecisionReply

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = MARKS

PROFILE = "llama-3.1-8b.h100.tp1.vllm"
BLOCK, PAGE = 512, 128
# Twelve of an engine's blocks are four of these prompts, with an answer each.
PROMPTS, PROMPT_TOKENS = 10, 3 * BLOCK + 100


@dataclass
class Fleet:
    """The engines by the name of their instance, and of their node; and the conductor at `url`."""

    engines: dict[str, Vllm]
    conductor: ConductorClient
    url: str

    def decided(
        self, request_id: str, ids: list[int], *, salt: str = "", but: str = ""
    ) -> DecisionReply:
        """The decision of a prompt that may not be computed at the engine `but`."""
        asked = Request(request_id, MODEL, len(ids), exclude=(but,) if but else ())
        decision = self.conductor.schedule(asked, token_ids=ids, cache_salt=salt)
        assert isinstance(decision, DecisionReply), decision
        return decision

    def predicted(self, request_id: str, ids: list[int], salt: str = "") -> tuple[str, int]:
        """Where a prompt is to be computed, and how many tokens will be found there."""
        decision = self.decided(request_id, ids, salt=salt)
        return decision.prefill, decision.cached_tokens

    def known(self, request_id: str, ids: list[int], salt: str = "") -> int:
        """The tokens that would be found, by a decision that is taken back."""
        _, tokens = self.predicted(request_id, ids, salt)
        self.conductor.observe_many([RequestEvent(request_id, "cancelled")])
        return tokens

    def ask(self, request_id: str, ids: list[int], **more: Any) -> tuple[str, int, int]:
        """Ask where the conductor says. Returns where, and the tokens predicted and found."""
        engine, predicted = self.predicted(request_id, ids, more.get("cache_salt", ""))
        found = self.found_at(engine, ids, **more)
        self.conductor.observe_many([RequestEvent(request_id, "finished")])
        return engine, predicted, found

    def found_at(self, engine: str, ids: list[int], **more: Any) -> int:
        body = {"model": MODEL, "prompt": ids, "max_tokens": 1, "temperature": 0, **more}
        reply = self.engines[engine].http.post("/v1/completions", json=body)
        assert reply.status_code == 200, reply.text
        details = reply.json()["usage"]["prompt_tokens_details"]
        return int(details["cached_tokens"]) if details else 0


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    command = [*TIFFIN, "up", "--json", "--nodes", "2", "--redis", "--dram", "256MiB"]
    path = os.pathsep.join([str(Path("build/links").resolve()), os.environ.get("PYTHONPATH", "")])
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}
    ) as up:
        assert up.stdout is not None
        yield json.loads(up.stdout.readline())
        up.terminate()


@pytest.fixture(scope="module")
def fleet(pool: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("fleet")
    make_model(folder / "model")
    url = f"http://127.0.0.1:{free_port()}"
    parameters = dict(part.split("=", 1) for part in pool["url"].partition("?")[2].split("&"))
    directory = pool["url"].partition("?")[0] + "?password_file=" + parameters["password_file"]
    with contextlib.ExitStack() as stack:
        engines = {}
        for name, node in zip(("a", "b"), pool["nodes"], strict=True):
            transfer = {
                "kv_connector": "TiffinConnector",
                "kv_connector_module_path": "tiffin.kvstore.connectors.vllm.connector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {
                    "url": f"{pool['url']}&home={node['socket']}",
                    "engine": name,
                },
            }
            engines[name] = Vllm(
                *(name, folder / "model", "--enable-prompt-tokens-details"),
                *("--kv-transfer-config", json.dumps(transfer)),
            )
            stack.callback(engines[name].close)
            engines[name].start()
        options = ("--directory", directory, "--pool-token-file", parameters["token_file"])
        conductor = stack.enter_context(Process("--listen", url.removeprefix("http://"), *options))
        conductor.wait_until_it_answers(url)
        client = stack.enter_context(contextlib.closing(ConductorClient(url)))
        for one in engines.values():
            one.wait()
        for one in engines.values():
            one.add_to(client, PROFILE)
        wait_until(lambda: all(one.node for one in client.instances()), "nodes", PATIENCE_S)
        yield Fleet(engines, client, url)


def test_nodes_and_fetches_are_found_out(fleet: Fleet, pool: dict[str, Any]) -> None:
    found = {
        one.id: (one.node, one.fetches, one.block_bytes) for one in fleet.conductor.instances()
    }
    nodes = [node["name"] for node in pool["nodes"]]
    assert {name: one[:2] for name, one in found.items()} == {
        "a": (nodes[0], True),
        "b": (nodes[1], True),
    }
    assert all(one[2] > 0 for one in found.values())


def test_what_is_found_is_what_was_predicted(fleet: Fleet) -> None:
    prompts = [prompt(seed, PROMPT_TOKENS) for seed in range(PROMPTS)]
    for number, ids in enumerate(prompts):
        fleet.ask(f"first-{number}", ids)
    wait_until(
        lambda: all(fleet.known(f"known-{n}", ids) >= 3 * BLOCK for n, ids in enumerate(prompts)),
        "all is saved, and known",
        PATIENCE_S,
    )
    rows = [fleet.ask(f"again-{number}", ids) for number, ids in enumerate(prompts)]
    print(rows)
    assert all(abs(predicted - found) <= PAGE for _, predicted, found in rows), rows
    assert sum(found for *_, found in rows) >= PROMPTS * 3 * BLOCK


def test_tenants_with_salts_share_nothing_and_each_finds_its_own(fleet: Fleet) -> None:
    ids = prompt(100, PROMPT_TOKENS)
    for salt in ("", "acme", "emca"):
        salted = {"cache_salt": salt} if salt else {}
        assert fleet.ask(f"first-{salt}", ids, **salted)[1:] == (0, 0)
        wait_until(
            lambda salt=salt: fleet.known(f"known-{salt}", ids, salt) >= 3 * BLOCK,  # type: ignore[misc]
            "all is saved, and known",
            PATIENCE_S,
        )
    for salt in ("", "acme", "emca"):
        salted = {"cache_salt": salt} if salt else {}
        _, predicted, found = fleet.ask(f"again-{salt}", ids, **salted)
        assert found >= 3 * BLOCK
        assert abs(predicted - found) <= PAGE
    assert fleet.known("other", ids, "of nobody") == 0


def test_what_lies_at_another_node_is_fetched_when_it_is_decided(
    fleet: Fleet, pool: dict[str, Any]
) -> None:
    ids = prompt(200, PROMPT_TOKENS)
    engine, _, _ = fleet.ask("first-fetch", ids)
    homes = dict(zip(("a", "b"), pool["nodes"], strict=True))
    saved = f"{homes[engine]['name']}/dram"
    wait_until(lambda: saved in holders(fleet.url, ids), "all is saved, and known", PATIENCE_S)
    decision = fleet.decided("fetch", ids, but=engine)
    assert decision.prefill != engine
    assert [one.stop - one.start for one in decision.fetches] == [3]
    assert decision.fetch_within_s is not None
    told = {"tiffin": {"fetched": 3, "within_s": decision.fetch_within_s}}
    fetched = f"{homes[decision.prefill]['name']}/dram"
    wait_until(lambda: fetched in holders(fleet.url, ids), "it is fetched", 30.0)
    assert fleet.found_at(decision.prefill, ids, kv_transfer_params=told) == 3 * BLOCK
    fleet.conductor.observe_many([RequestEvent("fetch", "finished")])


def test_an_engine_that_starts_again_finds_what_was_predicted(fleet: Fleet) -> None:
    prompts = [prompt(300 + number, PROMPT_TOKENS) for number in range(4)]
    for number, ids in enumerate(prompts):
        fleet.ask(f"before-{number}", ids)
    wait_until(
        lambda: all(fleet.known(f"b-{n}", ids) >= 3 * BLOCK for n, ids in enumerate(prompts)),
        "all is saved, and known",
        PATIENCE_S,
    )
    for one in fleet.engines.values():
        one.kill_all()
        one.start()
    for one in fleet.engines.values():
        one.wait()
    wait_until(
        lambda: all(
            one.status == "ready" and one.node and one.keyed for one in fleet.conductor.instances()
        ),
        "they are back",
        PATIENCE_S,
    )
    rows = [fleet.ask(f"after-{number}", ids) for number, ids in enumerate(prompts)]
    assert all(found >= 3 * BLOCK and predicted == found for _, predicted, found in rows), rows


def holders(url: str, ids: list[int]) -> set[str]:
    """Who has all whole blocks of a prompt."""
    body = {"model": MODEL, "token_ids": ids}
    reply = httpx.post(f"{url}/v1/blocks/match", json=body, trust_env=False).json()
    return {one["holder"] for one in reply["holders"] if one["blocks"] == len(ids) // BLOCK}
