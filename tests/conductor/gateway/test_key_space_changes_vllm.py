"""Two real vLLMs at one node of a pool, which the conductor tells apart by their names; one of them
is started again with other keys.

TIFFIN_VLLM=/path/to/venv/bin/python pytest -m slow -s \\
    tests/conductor/gateway/test_key_space_changes_vllm.py
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import httpx
import pytest
from fleetsupport import BLOCK, PAGE, Fleet, started_fleet
from kvsupport import wait_until
from vllmsupport import MARKS, MODEL, PATIENCE_S, prompt

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = MARKS

PROMPT_TOKENS = 3 * BLOCK + 100
_seeds = itertools.count()


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with started_fleet(tmp_path_factory.mktemp("fleet"), nodes=1) as started:
        yield started


def prompts(count: int) -> list[list[int]]:
    """Prompts that were never asked before."""
    return [prompt(next(_seeds), PROMPT_TOKENS) for _ in range(count)]


def check(rows: list[tuple[str, int, int]], least: int) -> None:
    """What was found is what was predicted, and at least so much."""
    print(rows)
    assert all(abs(predicted - found) <= PAGE for _, predicted, found in rows), rows
    assert all(found >= least for *_, found in rows), rows


def notes(fleet: Fleet) -> str:
    """What the conductor tells operators of the key spaces of our model."""
    said = httpx.get(f"{fleet.url}/readyz", trust_env=False).json().get("notes", [])
    return "\n".join(one for one in said if MODEL in one and "key space" in one)


def test_what_is_found_at_one_node_is_what_was_predicted(fleet: Fleet) -> None:
    asked = prompts(10)
    for ids in asked:
        fleet.ask(ids)
    fleet.wait_until_known(asked)
    check([fleet.ask(ids) for ids in asked], 3 * BLOCK)
    for at in fleet.engines:
        check([fleet.ask(ids, at=at) for ids in asked], 3 * BLOCK)
    assert notes(fleet) == ""


@pytest.mark.parametrize("changed", [{"namespace": "acme"}, {"weights_version": "step 7"}])
def test_an_engine_with_another_space_counts_by_that(fleet: Fleet, changed: dict[str, str]) -> None:
    old = prompts(4)
    for ids in old:
        fleet.ask(ids, at="b")
    fleet.wait_until_known(old, at="b")
    fleet.start_again("a", **changed)
    wait_until(lambda: next(iter(changed)).split("_")[-1] in notes(fleet), "told", PATIENCE_S)
    for ids in old:  # as the node still has them, in keys that are not its own
        assert fleet.ask(ids, at="a")[1:] == (0, 0)
    check([fleet.ask(ids, at="b") for ids in old], 3 * BLOCK)
    fleet.wait_until_known(old, at="a")
    for ids in prompts(5):  # its own pages are others' now
        assert fleet.ask(ids, at="a")[1:] == (0, 0)
    check([fleet.ask(ids, at="a") for ids in old], 3 * BLOCK)
    check([fleet.ask(ids, at="b") for ids in old], 3 * BLOCK)


def test_one_that_has_its_old_space_again_finds_what_is_left_of_it(fleet: Fleet) -> None:
    old = prompts(2)
    for ids in old:
        fleet.ask(ids, at="b")
    fleet.wait_until_known(old, at="b")
    fleet.start_again("a")
    wait_until(lambda: notes(fleet) == "", "nothing differs", PATIENCE_S)
    check([fleet.ask(ids, at="a") for ids in old], 3 * BLOCK)
