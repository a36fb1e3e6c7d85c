"""Blocks guessed from routing, blocks reported by the engine, and how a guess is confirmed."""

from __future__ import annotations

from hashlib import blake2b

import pytest

from tiffin.conductor.errors import InvalidRequest
from tiffin.conductor.events import routed_blocks
from tiffin.conductor.events.index_updates import (
    KEYS_PER_UPDATE,
    NODE_TIERS,
    Added,
    Cleared,
    Doubted,
    Gone,
    Heard,
    HolderInventory,
    Removed,
    slices,
)
from tiffin.conductor.events.routed_blocks import PREDICTED_S, ROUTED_S, Holdings
from tiffin.conductor.state.prefix_index import PrefixIndex


def keys(count: int, prompt: str = "") -> list[bytes]:
    return [blake2b(f"{prompt}/{n}".encode(), digest_size=16).digest() for n in range(count)]


def held(holdings: Holdings, prompt: list[bytes], name: str = "e", tier: str = "hbm") -> int:
    number = holdings.index.find(name, tier)
    if number is None:
        return 0
    return int(holdings.index.match(prompt).lengths(holdings.index.width)[number])


@pytest.fixture
def holdings() -> Holdings:
    return Holdings(PrefixIndex())


def test_what_was_routed_is_there_until_it_was_long_ago(holdings: Holdings) -> None:
    prompt = keys(6)
    holdings.routed("e", prompt[:4], 0.0)
    holdings.routed("e", prompt[:2], 60.0)
    holdings.routed("e", prompt[4:], 60.0)
    assert (held(holdings, prompt), holdings.guessed_blocks) == (6, 6)
    assert holdings.expire(ROUTED_S - 1) == 0
    assert holdings.expire(ROUTED_S) == 2
    assert held(holdings, prompt) == 2
    assert holdings.expire(60.0 + ROUTED_S) == 4
    assert (len(holdings.index), holdings.guessed_blocks) == (0, 0)
    # A guess does not count as a report of this engine.
    number = holdings.index.find("e", "hbm")
    assert number is not None
    assert holdings.index.age_s(number, 60.0) == float("inf")


def test_an_engine_that_speaks_is_guessed_about_for_seconds_only(holdings: Holdings) -> None:
    prompt, other = keys(4), keys(3, "other")
    holdings.routed("e", prompt, 0.0)
    holdings.apply(Added("e", "hbm", prompt[:1], seq=7), 1.0)
    assert holdings.speaks("e")
    holdings.routed("e", other, 2.0)
    assert (held(holdings, prompt), held(holdings, other)) == (4, 3)
    holdings.expire(1.0 + PREDICTED_S)
    assert held(holdings, prompt) == 1
    holdings.apply(Added("e", "hbm", other[:2]), 6.5)
    holdings.expire(2.0 + PREDICTED_S)
    assert held(holdings, other) == 2
    # A reported block does not become a guess, however often the engine is routed to.
    holdings.routed("e", [*prompt[:1], *other[:2]], 8.0)
    holdings.expire(1e6)
    assert (held(holdings, prompt), held(holdings, other)) == (1, 2)


def test_what_is_removed_was_no_guess_any_more(holdings: Holdings) -> None:
    prompt = keys(3)
    holdings.routed("e", prompt, 0.0)
    holdings.apply(Removed("e", "hbm", prompt[1:]), 1.0)
    holdings.apply(Added("e", "hbm", prompt[2:]), 2.0)
    holdings.expire(1e6)
    assert holdings.index.holders_of(prompt[2]) == [holdings.index.holder("e", "hbm")]
    assert (len(holdings.index), held(holdings, prompt)) == (1, 0)


def test_what_is_doubted_ends_unless_it_is_used(holdings: Holdings) -> None:
    prompt = keys(4)
    holdings.apply(Added("e", "hbm", prompt), 0.0)
    holdings.apply(Doubted("e", "hbm", [*prompt, *keys(2, "never held")]), 1.0)
    assert (len(holdings.index), holdings.guessed_blocks) == (4, 4)
    holdings.routed("e", prompt[:2], 50.0)
    holdings.apply(Added("e", "hbm", prompt[2:3]), 60.0)  # reported again
    holdings.expire(1.0 + ROUTED_S)
    assert held(holdings, prompt) == 3
    holdings.expire(50.0 + ROUTED_S)
    assert holdings.index.missing(holdings.index.holder("e", "hbm"), prompt) == [
        prompt[0],
        prompt[1],
        prompt[3],
    ]


def test_an_inventory_in_parts_replaces_guesses_and_the_rest(holdings: Holdings) -> None:
    prompt = keys(6)
    holdings.apply(Added("n", "dram", prompt[:3]), 0.0)
    holdings.apply(HolderInventory("n", "dram", prompt[2:4], True, False), 1.0)
    assert held(holdings, prompt, "n", "dram") == 3
    holdings.apply(HolderInventory("n", "dram", [prompt[0]], False, True, seq=9), 2.0)
    assert held(holdings, prompt, "n", "dram") == 1
    assert len(holdings.index) == 3
    number = holdings.index.holder("n", "dram")
    assert holdings.index.age_s(number, 3.0) == 1.0


def test_clearing_and_leaving_take_guesses_along(holdings: Holdings) -> None:
    prompt = keys(3)
    holdings.routed("e", prompt, 0.0)
    holdings.apply(Added("e", "dram", prompt), 0.0)
    holdings.apply(HolderInventory("e", "nvme", prompt, True, False), 0.0)
    holdings.apply(Cleared("e"), 1.0)
    assert (len(holdings.index), holdings.guessed_blocks) == (0, 0)
    holdings.apply(Heard("e", "hbm", 3), 2.0)
    holdings.routed("e", prompt, 2.0)
    holdings.apply(Gone("e"), 3.0)
    assert (len(holdings.index), holdings.guessed_blocks, holdings.index.numbers()) == (0, 0, [])
    assert not holdings.speaks("e")
    # Its successor with the same number loses nothing when the guesses would have expired.
    holdings.apply(Added("f", "hbm", prompt), 4.0)
    assert holdings.expire(1e6) == 0
    assert held(holdings, prompt, "f") == 3


def test_an_instance_and_a_node_of_one_name_come_and_go_by_themselves(holdings: Holdings) -> None:
    prompt = keys(3)

    def lengths() -> list[int]:
        return [held(holdings, prompt, "n", tier) for tier in ("hbm", "dram", "nvme")]

    for tier in NODE_TIERS:
        holdings.apply(Added("n", tier, prompt), 0.0)
    assert not holdings.speaks("n"), "the node does not speak for the instance"
    holdings.routed("n", prompt, 0.0)
    holdings.apply(Heard("n", "dram"), 1.0)
    assert holdings.expire(PREDICTED_S + 1) == 0, "it guesses as of an instance that says nothing"
    holdings.drop_instance("n")
    assert (lengths(), holdings.guessed_blocks) == ([0, 3, 3], 0)
    holdings.apply(Added("n", "hbm", prompt), 2.0)
    assert holdings.speaks("n")
    holdings.apply(Cleared("n", NODE_TIERS), 3.0)
    assert lengths() == [3, 0, 0]
    holdings.apply(Added("n", "dram", prompt), 4.0)
    holdings.apply(Cleared("n", ["hbm"]), 5.0)
    assert lengths() == [0, 3, 0]
    holdings.apply(Added("n", "hbm", prompt), 6.0)
    holdings.apply(Gone("n", NODE_TIERS), 7.0)
    assert (lengths(), holdings.speaks("n")) == ([3, 0, 0], True)
    holdings.apply(Added("n", "dram", prompt), 8.0)
    holdings.apply(Gone("n", ["hbm"]), 9.0)
    assert (lengths(), holdings.speaks("n")) == ([0, 3, 0], False)
    holdings.apply(Gone("n", ["hbm", *NODE_TIERS]), 10.0)
    assert holdings.index.numbers() == []


def test_guesses_are_bounded(holdings: Holdings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routed_blocks, "GUESSES_MAX", 10)
    holdings.routed("e", keys(6, "a"), 0.0)
    holdings.routed("e", keys(6, "b"), 1.0)
    assert holdings.guessed_blocks == len(holdings.index) == 10
    assert held(holdings, keys(6, "b")) == 6


def test_a_tier_that_there_is_not_is_refused(holdings: Holdings) -> None:
    with pytest.raises(InvalidRequest, match="no tier"):
        holdings.apply(Added("e", "tape", keys(1)), 0.0)


def test_keys_are_cut_to_what_an_update_may_have() -> None:
    assert list(slices([])) == [[]]
    many = [b"k"] * (2 * KEYS_PER_UPDATE + 1)
    assert [len(part) for part in slices(many)] == [KEYS_PER_UPDATE, KEYS_PER_UPDATE, 1]
