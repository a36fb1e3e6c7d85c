"""The users of the fleet of vLLMs, and what its rows are made of, without engines."""

from __future__ import annotations

import numpy as np
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


def test_whole_blocks_count() -> None:
    prompt = Prompt(0, 0, [1] * 2000)
    before = [served(prompt, 3 * BLOCK + 100), served(prompt, BLOCK)]
    after = [served(prompt, 3 * BLOCK), served(prompt, 0)]
    restart = rows._restart_row(before, after)
    assert (restart.value.p50, restart.limit.p50, restart.met) == (3 * BLOCK, 4 * BLOCK, False)


def test_a_refusal_is_wrong_if_the_prompt_is_in_time_when_it_is_asked_again() -> None:
    none = np.array([])
    right = rows._refused_row(
        rows._Asked(np.array([0.5, 1.2]), none), rows._Asked(none, np.array([1.4, 1.1]))
    )
    assert (right.value.p50, right.limit.p50, right.met) == (0, 4, True)
    assert "refused: 0 of 2 of which the pool has three quarters, 2 of 2" in right.note
    assert "1 of 2 that were taken were late" in right.note
    wrong = rows._refused_row(rows._Asked(none, np.array([0.7])), rows._Asked(none, none))
    assert (wrong.value.p50, wrong.met) == (1, False)


def test_ways_are_compared_run_by_run_with_users_of_the_same_seeds() -> None:
    one, two = [0.1] * 10, [0.2] * 10
    row = rows._way_row("no pool", 0.5, 1.5, [two], [one, two])
    assert (row.ratio, row.met) == (2.0, True)
    assert "p50 by run 2.00; p99 by run 2.00" in row.note
    row = rows._way_row("events alone", 0.5, 1.5, [one, one], [one, two])
    assert row.met is False
    assert "p50 by run 1.00, 0.50" in row.note
