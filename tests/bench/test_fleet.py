"""The users of the fleet of vLLMs, and what its rows are made of, without engines."""

from __future__ import annotations

import pytest

from tiffin.bench.serving.servers import SCHEMA
from tiffin.bench.vllm.fleet import rows
from tiffin.bench.vllm.fleet.users import (
    Prompt,
    Served,
    conversations,
    ideal_tokens,
    last_of_each,
)

BLOCK = SCHEMA.block_tokens


def served(prompt: Prompt, found: int, ttft_s: float = 1.0, expected: int | None = None) -> Served:
    expected = found if expected is None else expected
    return Served(prompt, "r", "vllm-0", ttft_s, expected, found, (1, 2))


def test_every_user_says_more_with_each_turn_and_all_talk_to_the_end() -> None:
    prompts = conversations(users=20, turns=3, seed=1)
    assert prompts == conversations(users=20, turns=3, seed=1)
    said: dict[int, list[int]] = {}
    for one in prompts:
        before = said.get(one.user, [])
        assert one.tokens[: len(before)] == before
        assert len(one.tokens) > len(before)
        said[one.user] = one.tokens
    assert len(prompts) == 60
    assert [one.tokens for one in last_of_each(prompts)] == [said[user] for user in range(20)]


def test_an_ideal_cache_has_all_whole_blocks_that_were_said_before() -> None:
    prompts = conversations(users=5, turns=3, seed=2)
    before: dict[int, int] = {}
    possible = 0
    for one in prompts:
        possible += before.get(one.user, 0)
        before[one.user] = len(one.tokens) // BLOCK * BLOCK
    assert ideal_tokens(prompts, 1000) == possible > 0
    assert ideal_tokens(prompts, 1) < possible


def test_the_best_fit_finds_a_line_and_its_error() -> None:
    prompts = [Prompt(0, 0, [1] * (600 * n)) for n in range(1, 8)]
    exact = [
        served(one, found, 0.01 + 2e-4 * (len(one.tokens) - found) + 1e-5 * found)
        for one, found in zip(prompts, (0, 500, 100, 1500, 700, 2000, 0), strict=True)
    ]
    line, error = rows._best_fit(exact)
    assert line(1000, 500) == pytest.approx(0.01 + 0.2 + 0.005)
    assert error == pytest.approx(0, abs=1e-6)


def test_whole_blocks_count_and_refusals_are_seen() -> None:
    prompt = Prompt(0, 0, [1] * 2000)
    before = [served(prompt, 3 * BLOCK + 100), served(prompt, BLOCK)]
    after = [served(prompt, 3 * BLOCK), Served(prompt, "", "", 0.0, 0, 0, (), refused=True)]
    restart, refused = rows._restart_row(before, after), rows._refused_row(200, 9, 1)
    assert (restart.value.p50, restart.limit.p50, restart.met) == (3 * BLOCK, 4 * BLOCK, False)
    assert (refused.value.p50, refused.met) == (0.005, False)
