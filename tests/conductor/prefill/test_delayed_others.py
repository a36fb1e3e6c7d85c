"""A prefill delays who comes after it, and who waits for blocks: both count beside its own TTFT."""

from __future__ import annotations

import numpy as np
import pytest
from policysupport import Inst, Node, World

from tiffin.conductor.prefill import policy_registry
from tiffin.conductor.prefill.delayed_others import DelayedOthers
from tiffin.conductor.prefill.wait_estimate import Coming

# Eight blocks of 10 ms each over the link, and some 11 ms each to compute.
EVERYTHING = frozenset(range(8))


def test_as_many_are_expected_behind_it_as_wait_now_on_average() -> None:
    question = World(1, [Inst(), Inst(), Inst()]).question()
    question.cluster.queued[:3] = (0, 1, 8)
    others = DelayedOthers(question)
    assert others.behind == pytest.approx(7 / 3), "one is computed, and waits for nobody"
    delayed_s = others.seconds(np.array([9.0, 1.0, 0.0]), np.array([3.0, 6.0, 0.0]))
    assert delayed_s == pytest.approx([7.0, 14.0, 0.0])


def test_who_waits_for_blocks_is_held_up_by_those_that_begin_before() -> None:
    question = World(1, [Inst(), Inst(), Inst()]).question()
    ready_s = np.array([0.5, 0.5, 2.0])
    question.coming = Coming(np.ones(3), ready_s, np.array([2, 1, 3]))
    delayed_s = DelayedOthers(question).seconds(
        np.array([0.0, 1.0, 0.0]), np.array([3.0, 3.0, 1.0])
    )
    # Two of them for 2.5 s; one that is served first; three whose blocks come after it.
    assert delayed_s == pytest.approx([5.0, 0.0, 0.0])


def test_where_many_wait_blocks_are_fetched_to_save_gpu_time() -> None:
    """The holder has a long queue; elsewhere, computing all is quicker than to fetch it over a link
    of half the speed."""
    world = World(
        8,
        [Inst("n", queue_s=1.0, hbm=EVERYTHING), Inst("m")],
        {"n": Node(), "m": Node()},
        {("n", "m"): (5e7, 0.0)},
    )
    policy = policy_registry.policy("kvcache_centric")

    def choice(queued: int) -> policy_registry.Choice:
        question = world.question()
        question.cluster.queued[:2] = queued
        return policy.choose(question)

    alone, among_many = choice(1), choice(9)
    assert (alone.at, alone.fetches) == (1, ())
    assert among_many.at == 1
    assert [(one.start, one.stop) for one in among_many.fetches] == [(0, 8)]
    assert among_many.ttft_s[1] > alone.ttft_s[1]
    assert among_many.cost[1] < alone.ttft_s[1] + 8 * alone.own_s


def test_nobody_is_placed_before_one_who_waits_for_blocks_if_another_one_is_idle() -> None:
    world, policy = World(8, [Inst(), Inst()]), policy_registry.policy("kvcache_centric")
    chosen = set()
    for seed in range(10):
        question = world.question(seed=seed)
        question.coming = Coming(np.array([1.0, 0.0]), np.array([0.01, 0.0]), np.array([1, 0]))
        chosen.add(policy.choose(question).at)
    assert chosen == {1}
