"""LoRA adapters at two real vLLMs of one pool: each has keys of its own, by its weights.

TIFFIN_VLLM=/path/to/venv/bin/python pytest -m slow -s \\
    tests/conductor/gateway/test_key_spaces_adapters_vllm.py
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest
from fleetsupport import BLOCK, PAGE, Fleet, started_fleet
from kvsupport import wait_until
from vllmsupport import MARKS, PATIENCE_S, prompt

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = MARKS

OPTIONS = ("--enable-lora", "--max-loras", "2", "--max-lora-rank", "8")
PROMPT_TOKENS = 3 * BLOCK + 100
_seeds = itertools.count(10_000)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from connectors.lorasupport import make_adapter

    folder = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("sql", "french", "new")):
        make_adapter(folder / name, seed)
    return folder


@pytest.fixture(scope="module")
def fleet(adapters: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    modules = [f"{name}={adapters / name}" for name in ("sql", "french")]
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "True")
        folder = tmp_path_factory.mktemp("fleet")
        with started_fleet(folder, *OPTIONS, "--lora-modules", *modules) as started:
            yield started


def forget(fleet: Fleet) -> None:
    """Let other prompts take all pages of the engines."""
    for name in fleet.engines:
        for _ in range(5):
            fleet.found_at(name, prompt(next(_seeds), PROMPT_TOKENS))


def said(fleet: Fleet, engine: str, adapter: str, ids: list[int], salt: str = "") -> list[int]:
    """The tokens of an answer."""
    body = {"model": adapter, "prompt": ids, "max_tokens": 8, "temperature": 0}
    body |= {"ignore_eos": True, "return_token_ids": True} | ({"cache_salt": salt} if salt else {})
    return fleet.engines[engine].answer("/v1/completions", body)


def test_an_adapter_shares_nothing_with_its_base(fleet: Fleet) -> None:
    ids = prompt(1, PROMPT_TOKENS)
    for adapter in ("", "sql", "french"):
        assert fleet.ask(ids, adapter=adapter)[1:] == (0, 0), adapter
        fleet.wait_until_known([ids], adapter=adapter)
    for adapter in ("", "sql", "french"):
        _, predicted, found = fleet.ask(ids, adapter=adapter)
        assert abs(predicted - found) <= PAGE
        assert found >= 3 * BLOCK
    assert fleet.known(ids, adapter="of nobody") == 0


def test_what_an_adapter_has_in_the_pool_is_found_by_all(fleet: Fleet) -> None:
    """Also by an engine that has not used it since it was started."""
    prompts = [prompt(10 + number, PROMPT_TOKENS) for number in range(4)]
    for ids in prompts:
        fleet.ask(ids, adapter="sql")
    fleet.wait_until_known(prompts, adapter="sql")
    forget(fleet)
    rows = [fleet.ask(ids, adapter="sql", at=at) for ids in prompts[:2] for at in fleet.engines]
    fleet.start_again("a")
    rows += [fleet.ask(ids, adapter="sql", at="a") for ids in prompts]
    print(rows)
    assert all(abs(predicted - found) <= PAGE for _, predicted, found in rows), rows
    assert all(found >= 3 * BLOCK for *_, found in rows), rows


def test_other_weights_under_the_same_name_find_nothing_of_the_old(
    fleet: Fleet, adapters: Path
) -> None:
    """What is predicted follows once the engines have used the new ones."""
    ids, other = prompt(20, PROMPT_TOKENS), prompt(21, PROMPT_TOKENS)
    for one in (ids, other):
        fleet.ask(one, adapter="sql")
    fleet.wait_until_known([ids, other], adapter="sql")
    before = said(fleet, "a", "sql", ids)
    new = {"lora_name": "sql", "lora_path": str(adapters / "new")}
    for engine in fleet.engines.values():
        for path, body in (("unload", {"lora_name": "sql"}), ("load", new)):
            reply = engine.http.post(f"/v1/{path}_lora_adapter", json=body)
            assert reply.status_code == 200, reply.text
    assert fleet.found_at("a", ids, adapter="sql") == 0
    computed = said(fleet, "a", "sql", ids, salt="not in any cache")
    assert computed != before
    fresh = prompt(22, PROMPT_TOKENS)
    for name in fleet.engines:
        assert said(fleet, name, "sql", ids) == computed
        fleet.found_at(name, fresh, adapter="sql")
    wait_until(lambda: fleet.known(other, adapter="sql") == 0, "it is announced", PATIENCE_S)
    fleet.wait_until_known([ids, fresh], adapter="sql")
    assert fleet.ask(other, adapter="sql")[1:] == (0, 0)
    forget(fleet)
    rows = [fleet.ask(one, adapter="sql", at=at) for one in (ids, fresh) for at in fleet.engines]
    print(rows)
    assert all(abs(predicted - found) <= PAGE for _, predicted, found in rows), rows
    assert all(found >= 3 * BLOCK for *_, found in rows), rows
    assert all(said(fleet, name, "sql", ids) == computed for name in fleet.engines)
