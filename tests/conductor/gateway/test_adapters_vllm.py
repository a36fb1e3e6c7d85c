"""LoRA adapters at two real vLLMs, each of which has loaded another one: a request for an adapter
goes to the one that has it, with a cache of its own.

TIFFIN_VLLM=/path/to/venv/bin/python pytest -m slow tests/conductor/gateway/test_adapters_vllm.py
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from kvsupport import wait_until
from vllmsupport import MARKS, MODEL, PATIENCE_S, FrontDoor, Vllm, make_model, prompt, two_vllms

from tiffin.conductor.client import ConductorClient

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = MARKS

PROFILE = "llama-3.1-8b.h100.tp1.vllm"
OPTIONS = ("--enable-lora", "--max-loras", "2", "--max-lora-rank", "8")
BLOCK = 512
HOMES = {"sql": "a", "french": "b"}


@dataclass
class World:
    """All running processes."""

    folder: Path
    engines: dict[str, Vllm]
    door: FrontDoor
    http: httpx.Client

    def models(self) -> list[str]:
        return [one["id"] for one in self.http.get("/v1/models").json()["data"]]

    def ask(self, model: str, ids: list[int]) -> tuple[list[int], httpx.Headers]:
        response = self.http.post("/v1/completions", json=body_of(model, ids))
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]["token_ids"], response.headers

    def answered(self) -> dict[str, float]:
        """The requests that each engine has completed."""
        return {name: one.counter("request_success") for name, one in self.engines.items()}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    from connectors.lorasupport import make_adapter

    folder = tmp_path_factory.mktemp("adapters")
    make_model(folder / "model")
    for seed, name in enumerate((*HOMES, "late")):
        make_adapter(folder / name, seed)
    own = {home: ("--lora-modules", f"{name}={folder / name}") for name, home in HOMES.items()}
    with contextlib.ExitStack() as stack:
        environment = stack.enter_context(pytest.MonkeyPatch.context())
        environment.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "True")
        started = two_vllms(folder, 'keys = "conductor"', PROFILE, *OPTIONS, own=own)
        engines, door = stack.enter_context(started)
        http = httpx.Client(base_url=door.gateway_url, trust_env=False, timeout=PATIENCE_S)
        stack.callback(http.close)
        it = World(folder, {one.name: one for one in engines}, door, http)
        wait_until(
            lambda: set(it.models()) == {MODEL, *HOMES}, "the gateway knows them", PATIENCE_S
        )
        yield it


def body_of(model: str, ids: list[int]) -> dict[str, Any]:
    body = {"model": model, "prompt": ids, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    return body | {"return_token_ids": True}


@pytest.mark.parametrize("model", HOMES)
def test_a_request_goes_to_where_its_adapter_is(world: World, model: str) -> None:
    """The other engine sees none of ten, and could not answer them."""
    home = HOMES[model]
    (other,) = world.engines.keys() - {home}
    before = world.answered()
    for number in range(10):
        ids = prompt(number, 40)
        said, headers = world.ask(model, ids)
        assert headers["x-tiffin-decode"] == home
        assert said == world.engines[home].answer("/v1/completions", body_of(model, ids))
        base, _ = world.ask(MODEL, ids)
        assert base != said, "an adapter that changes nothing shows nothing"
    with_base = world.answered()
    direct = world.engines[other].http.post("/v1/completions", json=body_of(model, [5]))
    assert direct.status_code == 404
    assert with_base[home] - before[home] >= 20
    assert sum(with_base.values()) - sum(before.values()) == 30
    for number in range(10, 20):
        world.ask(model, prompt(number, 40))
    after = world.answered()
    assert after[other] == with_base[other]
    assert after[home] - with_base[home] == 10


def test_what_an_adapter_has_cached_is_its_own(world: World) -> None:
    """The keys that the gateway asks the conductor by are those of the engine's events."""
    start = prompt(50, 2 * BLOCK)
    home = world.engines[HOMES["sql"]]
    world.ask("sql", [*start, 7])

    def cached() -> int:
        return int(world.ask("sql", [*start, *prompt(51, 20)])[1]["x-tiffin-cached-tokens"])

    wait_until(lambda: cached() == 2 * BLOCK, "its blocks are known", PATIENCE_S)
    before = home.hit_tokens()
    assert cached() == 2 * BLOCK
    assert home.hit_tokens() - before >= 2 * BLOCK
    for model in (MODEL, "french"):
        _, headers = world.ask(model, [*start, *prompt(52, 20)])
        assert headers["x-tiffin-cached-tokens"] == "0", model


def test_one_that_is_loaded_later_is_found(world: World) -> None:
    """As vLLM's own route loads and unloads it, no one tells the conductor."""
    engine = world.engines["b"]
    one = {"lora_name": "late", "lora_path": str(world.folder / "late")}
    assert engine.http.post("/v1/load_lora_adapter", json=one).status_code == 200
    wait_until(lambda: "late" in world.models(), "the gateway knows it", PATIENCE_S)
    for number in range(4):
        assert world.ask("late", prompt(60 + number, 40))[1]["x-tiffin-decode"] == "b"
    gone = engine.http.post("/v1/unload_lora_adapter", json={"lora_name": "late"})
    assert gone.status_code == 200
    wait_until(lambda: "late" not in world.models(), "the gateway knows", PATIENCE_S)
    response = world.http.post("/v1/completions", json=body_of("late", [5]))
    assert response.status_code == 404
    with ConductorClient(world.door.conductor_url) as conductor:
        assert {one.status for one in conductor.instances()} == {"ready"}
