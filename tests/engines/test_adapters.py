"""Requests with LoRA adapters find what requests with the same adapter have stored, and nothing of
others."""

from __future__ import annotations

import random
import shutil
from typing import TYPE_CHECKING, TypeAlias

import pytest
from connectors.lorasupport import make_adapter
from generationsupport import Engine, Tokens, Turn, converse, loadable, random_tokens, transfer
from vllm.lora.request import LoRARequest

if TYPE_CHECKING:
    from pathlib import Path

    from kvsupport import Daemon

pytestmark = pytest.mark.timeout(600)

OPTIONS = {
    "enable_lora": True,
    "max_loras": 2,
    "max_lora_rank": 8,
    "enable_prefix_caching": False,
}
Adapters: TypeAlias = "dict[str, LoRARequest | None]"


@pytest.fixture
def adapters(tmp_path: Path) -> Adapters:
    """None, and two with other weights."""
    found: Adapters = {"none": None}
    for number, name in enumerate(("one", "two"), 1):
        make_adapter(tmp_path / name, seed=number)
        found[name] = LoRARequest(name, number, str(tmp_path / name))
    return found


def renamed(adapters: Adapters) -> Adapters:
    """The same files as another engine may name them."""
    return {
        name: one and LoRARequest(f"other-{name}", 10 - one.lora_int_id, one.lora_path)
        for name, one in adapters.items()
    }


def say(engine: Engine, prompts: list[Tokens], adapters: Adapters) -> dict[str, list[Tokens]]:
    return {
        name: [answer.tokens for answer in engine.generate(prompts, adapter=adapter)]
        for name, adapter in adapters.items()
    }


def cached(
    engine: Engine, turn: Turn, adapters: Adapters, said: dict[str, list[Tokens]]
) -> dict[str, list[int]]:
    """Check every answer; returns how many tokens were not computed."""
    found = {}
    for name, adapter in adapters.items():
        answers = engine.generate(turn.prompts, adapter=adapter)
        assert [answer.tokens for answer in answers] == said[name]
        found[name] = [answer.cached for answer in answers]
    return found


def test_each_adapter_finds_its_own_blocks(
    adapters: Adapters, model_folders: Path, shared_node: Daemon, namespace: str
) -> None:
    model, pool = model_folders / "llama", transfer(shared_node.url, namespace)
    with Engine(model, **OPTIONS) as engine:
        (turn,) = converse(engine, seed=7, turns=1)
        said = say(engine, turn.prompts, adapters)
    for index in range(len(turn.prompts)):  # by another adapter's blocks they would be others
        assert len({tuple(said[name][index]) for name in adapters}) == 3
    with Engine(model, pool, **OPTIONS) as engine:
        found = cached(engine, turn, adapters, said)
    assert found == dict.fromkeys(adapters, [0] * len(turn.prompts))
    with Engine(model, pool, **OPTIONS) as engine:
        found = cached(engine, turn, renamed(adapters), said)
    expected = [loadable(prompt) for prompt in turn.prompts]
    assert found == dict.fromkeys(adapters, expected)


def test_an_adapter_that_is_reloaded_in_place_shares_nothing(
    adapters: Adapters, tmp_path: Path, model_folders: Path, shared_node: Daemon, namespace: str
) -> None:
    """A long prompt is half computed when its adapter gets other weights: no block of its second
    half is stored, and nothing that comes after is taken for what was before."""
    model, pool = model_folders / "llama", transfer(shared_node.url, namespace)
    prompts = [random_tokens(random.Random(8), 1600)]
    with Engine(model, **OPTIONS) as engine:
        said = say(engine, prompts, adapters)
    shutil.copytree(tmp_path / "one", tmp_path / "changing")
    path = str(tmp_path / "changing")
    first, reloaded = (LoRARequest("changing", 3, path, load_inplace=now) for now in (False, True))
    with Engine(model, pool, **OPTIONS, max_num_batched_tokens=640) as engine:
        engine.start(prompts, adapter=first)
        engine.step()
        shutil.copytree(tmp_path / "two", tmp_path / "changing", dirs_exist_ok=True)
        engine.load(reloaded)
        assert engine.finish()["0"].tokens not in (said["one"][0], said["two"][0])
        (answer,) = engine.generate(prompts, adapter=reloaded)
        assert (answer.tokens, answer.cached) == (said["two"][0], 0)
    with Engine(model, pool, **OPTIONS) as engine:
        for name in ("two", "one"):
            (answer,) = engine.generate(prompts, adapter=adapters[name])
            assert (answer.tokens, answer.cached) == (said[name][0], 0), name
