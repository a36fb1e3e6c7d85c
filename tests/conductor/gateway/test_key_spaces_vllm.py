"""Two real vLLMs with few pages, each at a node of its own of one pool: nobody tells the conductor
their schema, nodes or connector, and it knows what each of them will find.

TIFFIN_VLLM=/path/to/venv/bin/python pytest -m slow -s \\
    tests/conductor/gateway/test_key_spaces_vllm.py
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from fleetsupport import BLOCK, PAGE, Fleet, conducted, started_fleet
from kvsupport import wait_until
from vllmsupport import MARKS, PATIENCE_S, prompt

from tiffin.conductor.records import RequestEvent

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = MARKS

# Twelve of an engine's blocks are four of these prompts, with an answer each.
PROMPTS, PROMPT_TOKENS = 10, 3 * BLOCK + 100


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with started_fleet(tmp_path_factory.mktemp("fleet")) as started:
        yield started


def test_nodes_and_fetches_are_found_out(fleet: Fleet) -> None:
    found = {
        one.id: (one.node, one.fetches, one.block_bytes) for one in fleet.conductor.instances()
    }
    assert {name: one[:2] for name, one in found.items()} == {
        name: (home["name"], True) for name, home in fleet.homes.items()
    }
    assert all(one[2] > 0 for one in found.values())


def test_what_is_found_is_what_was_predicted(fleet: Fleet) -> None:
    prompts = [prompt(seed, PROMPT_TOKENS) for seed in range(PROMPTS)]
    for ids in prompts:
        fleet.ask(ids)
    fleet.wait_until_known(prompts)
    rows = [fleet.ask(ids) for ids in prompts]
    print(rows)
    assert all(abs(predicted - found) <= PAGE for _, predicted, found in rows), rows
    assert sum(found for *_, found in rows) >= PROMPTS * 3 * BLOCK


def test_tenants_with_salts_share_nothing_and_each_finds_its_own(fleet: Fleet) -> None:
    ids = prompt(100, PROMPT_TOKENS)
    for salt in ("", "acme", "emca"):
        assert fleet.ask(ids, salt=salt)[1:] == (0, 0)
        fleet.wait_until_known([ids], salt=salt)
    for salt in ("", "acme", "emca"):
        _, predicted, found = fleet.ask(ids, salt=salt)
        assert found >= 3 * BLOCK
        assert abs(predicted - found) <= PAGE
    assert fleet.known(ids, salt="of nobody") == 0


def test_what_lies_at_another_node_is_fetched_when_it_is_decided(fleet: Fleet) -> None:
    ids = prompt(200, PROMPT_TOKENS)
    engine, _, _ = fleet.ask(ids)
    (other,) = fleet.engines.keys() - {engine}
    saved, fetched = (f"{fleet.homes[name]['name']}/dram" for name in (engine, other))
    wait_until(lambda: saved in fleet.holders(ids), "all is saved, and known", PATIENCE_S)
    decision = fleet.decided("fetch", ids, at=other)
    assert [one.stop - one.start for one in decision.fetches] == [3]
    assert decision.fetch_within_s is not None
    told = {"tiffin": {"fetched": 3, "within_s": decision.fetch_within_s}}
    wait_until(lambda: fetched in fleet.holders(ids), "it is fetched", 30.0)
    assert fleet.found_at(other, ids, kv_transfer_params=told) == 3 * BLOCK
    fleet.conductor.observe_many([RequestEvent("fetch", "finished")])


def test_an_engine_that_starts_again_finds_what_was_predicted(fleet: Fleet) -> None:
    prompts = [prompt(300 + number, PROMPT_TOKENS) for number in range(4)]
    for ids in prompts:
        fleet.ask(ids)
    fleet.wait_until_known(prompts)
    fleet.start_again(*fleet.engines)
    rows = [fleet.ask(ids) for ids in prompts]
    assert all(found >= 3 * BLOCK and predicted == found for _, predicted, found in rows), rows


def test_a_conductor_that_starts_late_knows_all_of_it(fleet: Fleet) -> None:
    prompts = [prompt(600 + number, PROMPT_TOKENS) for number in range(4)]
    for ids in prompts:
        fleet.ask(ids)
    fleet.wait_until_known(prompts)
    with conducted(fleet.engines, fleet.homes, fleet.pool_url) as late:
        ready = late.conductor.ready
        wait_until(lambda: ready().status == "ok", "it has the inventories", PATIENCE_S)
        rows = [late.ask(ids) for ids in prompts]
    assert all(found == predicted >= 3 * BLOCK for _, predicted, found in rows), rows


def test_what_a_drained_node_had_alone_is_found_from_another_node(fleet: Fleet) -> None:
    prompts = [prompt(500 + number, PROMPT_TOKENS) for number in range(3)]
    for ids in prompts:
        fleet.ask(ids, at="a")
    fleet.wait_until_known(prompts, at="a")
    leaves, stays = fleet.homes["a"]["name"], fleet.homes["b"]["name"]
    # They may have been copied before, as hot ones.
    alone = [ids for ids in prompts if f"{stays}/dram" not in fleet.holders(ids)]
    fleet.conductor.drain_node(leaves)
    try:
        wait_until(
            lambda: all(one.phase == "done" for one in fleet.conductor.drains()),
            "its blocks are elsewhere",
            PATIENCE_S,
        )
        assert alone
        assert all(f"{stays}/dram" in fleet.holders(ids) for ids in prompts)
        rows = [fleet.ask(ids, at="b") for ids in prompts]
        assert all(found == predicted == 3 * BLOCK for _, predicted, found in rows), rows
    finally:
        fleet.conductor.undrain_node(leaves)
