"""The baseline policies, each against plain loops, and promises of all policies."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policysupport import BLOCK_TOKENS, LATENCY, WAYS, Inst, Node, World, worlds

from tiffin.conductor.errors import InvalidRequest
from tiffin.conductor.prefill import policy_registry
from tiffin.conductor.prefill.block_sources import PlacedQuestion, Places
from tiffin.conductor.prefill.policies.policy_settings import (
    KvCostSettings,
    PolicySettings,
    PrebleSettings,
    PrefixAwareSettings,
)

NAMES = (
    "algorithm_1",
    "kv_cost",
    "kvcache_centric",
    "least_loaded",
    "power_of_two",
    "preble",
    "prefix_aware",
    "random",
    "round_robin",
    "weighted_factors",
)
LOADS = st.tuples(st.integers(0, 200), st.integers(0, 200), st.integers(0, 100_000))


def loaded(
    world: World, loads: list[tuple[int, int, int]], options: PolicySettings | None = None
) -> PlacedQuestion:
    """A question with (queued requests, running ones, tokens of context) of each instance."""
    question = world.question(options)
    for row, (queued, running, context) in enumerate(loads):
        question.cluster.queued[row] = queued
        question.cluster.queued_tokens[row] = 1_000 * queued
        question.cluster.batch[row] = running
        question.cluster.context_tokens[row] = context
    return question


@st.composite
def loaded_worlds(draw: st.DrawFn) -> tuple[World, list[tuple[int, int, int]]]:
    world = draw(worlds())
    count = len(world.instances)
    return world, draw(st.lists(LOADS, min_size=count, max_size=count))


# -- promises of all policies ----------------------------------------------------------------------


def test_all_are_there_by_name() -> None:
    assert tuple(policy_registry.names()) == NAMES
    assert [policy_registry.policy(name).name for name in NAMES] == list(NAMES)
    with pytest.raises(InvalidRequest, match="no policy 'best'; there are algorithm_1, kv_cost"):
        policy_registry.policy("best")


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=20)
@given(loaded_worlds())
def test_each_explains_its_choice_in_finite_numbers(
    name: str, case: tuple[World, list[tuple[int, int, int]]]
) -> None:
    world, loads = case
    choice = policy_registry.policy(name).choose(loaded(world, loads))
    count = len(world.instances)
    assert 0 <= choice.at < count
    assert choice.cost[choice.at] == choice.cost.min()
    for column in (choice.cost, choice.ttft_s, *choice.terms.values()):
        assert column.shape == (count,)
        assert np.isfinite(column).all()
    assert 0 <= choice.cached_blocks <= world.blocks
    # Whatever a policy's criterion, a TTFT includes the queue and the last token.
    least_s = [inst.queue_s + world.compute_s(inst, world.blocks) for inst in world.instances]
    assert (choice.ttft_s >= np.array(least_s) * (1 - 1e-9)).all()


@pytest.mark.parametrize("name", [n for n in NAMES if n not in ("algorithm_1", "round_robin")])
def test_each_spreads_what_is_equal(name: str) -> None:
    world = World(blocks=2, instances=[Inst() for _ in range(3)])
    chosen = Counter(
        policy_registry.policy(name).choose(world.question(seed=s)).at for s in range(120)
    )
    assert set(chosen) == {0, 1, 2}
    assert max(chosen.values()) < 70


@pytest.mark.parametrize("name", NAMES)
def test_each_can_do_with_one(name: str) -> None:
    assert policy_registry.policy(name).choose(World(1, [Inst()]).question()).at == 0


@settings(max_examples=50)
@given(worlds())
def test_local_policies_predict_what_the_instance_can_do_alone(world: World) -> None:
    choice = policy_registry.policy("least_loaded").choose(world.question())
    for number, inst in enumerate(world.instances):
        blocks, load_s = world.own(number)
        expected = inst.queue_s + load_s + world.compute_s(inst, blocks)
        assert choice.ttft_s[number] == pytest.approx(expected)


# -- simple ----------------------------------------------------------------------------------------


def test_round_robin_goes_on_after_the_last_one() -> None:
    policy, world = policy_registry.policy("round_robin"), World(1, [Inst() for _ in range(3)])
    assert [policy.choose(world.question()).at for _ in range(5)] == [0, 1, 2, 0, 1]
    gone = world.question(only=0)  # rows 1 and 2 left, and come back
    assert policy.choose(gone).at == 0
    assert policy.choose(world.question()).at == 1


def test_round_robin_counts_for_each_model() -> None:
    policy, world = policy_registry.policy("round_robin"), World(1, [Inst() for _ in range(4)])
    chosen = []
    for turn in range(8):
        question, model = world.question(), turn % 2
        question.request = replace(question.request, model=f"m{model}")
        question.rows = np.array([model, model + 2])
        question.queue_s = np.zeros(2)
        for name in ("hbm_blocks", "dram_blocks", "local_blocks"):
            setattr(question, name, np.zeros(2, np.int64))
        chosen.append(int(question.rows[policy.choose(question).at]))
    assert chosen == [0, 1, 2, 3, 0, 1, 2, 3]


def test_least_loaded_waits_least() -> None:
    world = World(1, [Inst(queue_s=queue_s) for queue_s in (0.4, 0.1, 0.3)])
    assert policy_registry.policy("least_loaded").choose(world.question()).at == 1


def test_power_of_two_never_takes_the_worst() -> None:
    world = World(1, [Inst(queue_s=queue_s) for queue_s in (0.1, 0.2, 0.3, 0.4)])
    policy = policy_registry.policy("power_of_two")
    chosen = Counter(policy.choose(world.question(seed=seed)).at for seed in range(300))
    assert set(chosen) == {0, 1, 2}
    # Of six pairs, the best one is in three.
    assert 110 < chosen[0] < 190


# -- prefix_aware ----------------------------------------------------------------------------------


@settings(max_examples=70)
@given(loaded_worlds(), st.floats(0, 1), st.integers(0, 200), st.floats(1, 4))
def test_prefix_aware_is_sglangs(
    case: tuple[World, list[tuple[int, int, int]]], match: float, absolute: int, relative: float
) -> None:
    world, loads = case
    options = PrefixAwareSettings(
        match_threshold=match, balance_abs_threshold=absolute, balance_rel_threshold=relative
    )
    choice = policy_registry.policy("prefix_aware").choose(
        loaded(world, loads, PolicySettings(prefix_aware=options))
    )
    load = [queued + running for queued, running, _ in loads]
    matched = [world.own_lengths(number)[2] for number in range(len(loads))]
    if max(load) - min(load) > absolute and max(load) > relative * min(load):
        allowed = [n for n, value in enumerate(load) if value == min(load)]
    elif max(matched) * BLOCK_TOKENS > match * world.prompt_tokens:
        best = [n for n, value in enumerate(matched) if value == max(matched)]
        allowed = [n for n in best if load[n] == min(load[b] for b in best)]
    else:
        allowed = [n for n, value in enumerate(load) if value == min(load)]
    assert choice.at in allowed


# -- kv_cost ---------------------------------------------------------------------------------------


@settings(max_examples=70)
@given(
    loaded_worlds(),
    st.sampled_from(["linear", "lmetric"]),
    st.tuples(*[st.floats(0, 1)] * 4),
    st.floats(0, 5),
)
def test_kv_cost_is_dynamos(
    case: tuple[World, list[tuple[int, int, int]]],
    form: str,
    credits: tuple[float, float, float, float],
    scale: float,
) -> None:
    world, loads = case
    names = ("device_credit", "host_credit", "disk_credit", "shared_credit")
    given = dict(zip(names, credits, strict=True)) | {"form": form, "prefill_load_scale": scale}
    options = PolicySettings(kv_cost=msgspec.convert(given, KvCostSettings))
    question = loaded(world, loads, options)
    choice = policy_registry.policy("kv_cost").choose(question)
    prompt = math.ceil(world.prompt_tokens / BLOCK_TOKENS)
    for number, (queued, _, context) in enumerate(loads):
        hbm, dram, local = world.own_lengths(number)
        device, host, disk, shared = credits
        credit = device * hbm + host * (dram - hbm) + disk * (local - dram)
        credit += shared * (question.pool_blocks - local)
        prefill = max(1_000 * queued / BLOCK_TOKENS + prompt - credit, 0)
        decode = context / BLOCK_TOKENS + prompt
        expected = scale * prefill + decode if form == "linear" else prefill * (decode + 1)
        assert choice.cost[number] == pytest.approx(expected)


def test_kv_cost_draws_by_temperature() -> None:
    """p ~ exp(-(cost / spread) / T): with costs 0, 1/2 and 1 of the spread."""
    world = World(1, [Inst() for _ in range(3)])
    options = PolicySettings(kv_cost=KvCostSettings(temperature=0.5))
    policy, chosen = policy_registry.policy("kv_cost"), Counter[int]()
    for seed in range(2_000):
        question = loaded(world, [(0, 0, 0), (0, 0, 500), (0, 0, 1_000)], options)
        question.dice.seed(seed)
        chosen[policy.choose(question).at] += 1
    weights = [math.exp(-value / 0.5) for value in (0, 0.5, 1)]
    for number, weight in enumerate(weights):
        assert chosen[number] / 2_000 == pytest.approx(weight / sum(weights), abs=0.04)


def test_kv_cost_fetches_what_it_gave_credit_for() -> None:
    links = {("far", "a"): (1e9, 0.001)}
    nodes = {"a": Node(), "far": Node(dram=frozenset(range(6)))}
    world = World(6, [Inst("a")], nodes, links)
    policy = policy_registry.policy("kv_cost")
    choice = policy.choose(world.question())
    assert [(f.start, f.stop, f.source, f.tier) for f in choice.fetches] == [(0, 6, "far", "dram")]
    assert choice.cached_blocks == 6
    alone = policy.choose(world.question(PolicySettings(kv_cost=KvCostSettings(shared_credit=0))))
    assert (alone.cached_blocks, alone.fetches) == (0, ())


# -- weighted_factors ------------------------------------------------------------------------------


@settings(max_examples=70)
@given(loaded_worlds())
def test_weighted_factors_are_those_of_the_book(
    case: tuple[World, list[tuple[int, int, int]]],
) -> None:
    world, loads = case
    question = loaded(world, loads)
    question.cluster.kv_capacity_tokens[:] = capacity = 50_000
    choice = policy_registry.policy("weighted_factors").choose(question)
    locals_ = [world.own_lengths(number)[2] for number in range(len(loads))]
    costs = []
    for number, (queued, running, context) in enumerate(loads):
        d0, d1, d2 = world.instances[number].latency[3:]
        occupancy = min((context + 1_000 * queued) / capacity, 1)
        bandwidth = d2 * context / max(d0 + d1 * running + d2 * context, 1e-9)
        has = locals_[number] > 0 and locals_[number] == question.best_blocks
        cost = 3 * 100 * occupancy + (queued + running) + 0.5 * 100 * bandwidth - 10 * has
        costs.append(cost)
        assert choice.cost[number] == pytest.approx(cost)
    assert costs[choice.at] == pytest.approx(min(costs))


def test_a_prefix_that_is_being_computed_is_worth_a_request() -> None:
    world = World(4, [Inst() for _ in range(3)])
    question = world.question()
    now = question.now
    question.computing.begin("first", 1, -1, world.keys, 0, now + 5.0, now)
    policy = policy_registry.policy("weighted_factors")
    assert policy.choose(question).at == 1
    question.cluster.queued[1] = 2
    assert policy.choose(question).at != 1


# -- preble ----------------------------------------------------------------------------------------


@settings(max_examples=70)
@given(loaded_worlds(), st.floats(0, 1), st.floats(1, 4), st.floats(0, 2))
def test_preble_is_e2(
    case: tuple[World, list[tuple[int, int, int]]], exploit: float, ratio: float, least_s: float
) -> None:
    world, loads = case
    options = PrebleSettings(
        exploit_share=exploit, rebalance_ratio=ratio, rebalance_min_s=least_s, output_tokens=10
    )
    question = loaded(world, loads, PolicySettings(preble=options))
    room = 2_000
    question.cluster.kv_capacity_tokens[:] = room
    question.cluster.kv_used_tokens[: len(loads)] = [context for _, _, context in loads]
    choice = policy_registry.policy("preble").choose(question)
    load, explore = [], []
    for number, (inst, (_, running, context)) in enumerate(
        zip(world.instances, loads, strict=True)
    ):
        d0, d1, d2 = inst.latency[3:]
        step_s = d0 + d1 * running + d2 * context
        load.append(inst.queue_s + (10 * step_s if running else 0.0))
        blocks, load_s = world.own(number)
        needed = world.prompt_tokens - world.own_lengths(number)[0] * BLOCK_TOKENS
        evicted = max(needed - max(room - context, 0), 0)
        evict_s = 0.5 * inst.latency[1] * evicted
        explore.append(load[-1] + evict_s + load_s + world.compute_s(inst, blocks))
    used = [world.own(number)[0] for number in range(len(loads))]
    holders = [number for number, blocks in enumerate(used) if blocks == max(used)]
    best_s = min(load[number] for number in holders)
    if max(used) * BLOCK_TOKENS > exploit * world.prompt_tokens and best_s <= max(
        least_s, ratio * min(load)
    ):
        assert choice.at in holders
        assert load[choice.at] == pytest.approx(best_s)
    else:
        assert explore[choice.at] == pytest.approx(min(explore))


# -- a hot prefix ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["algorithm_1", "kvcache_centric", "kv_cost", "preble", "prefix_aware"]
)
def test_a_hot_prefix_does_not_herd(name: str) -> None:
    """200 requests for one prefix that one of 8 instances has. Each request joins a queue, and an
    instance that has fetched or computed the prefix has it from then on. No instance may get more
    than twice its share (25); a policy that only uses the cache would send all 200 to the first."""
    count, blocks = 8, 40
    everything = frozenset(range(blocks))
    holders, queues = [everything, *[frozenset()] * (count - 1)], [0.0] * count
    ways = msgspec.structs.replace(WAYS, dram_bandwidth_bytes_s=128e9)
    world = World(blocks, [], {f"n{number}": Node() for number in range(count)}, ways=ways)
    options = PolicySettings(prefix_aware=PrefixAwareSettings(balance_abs_threshold=8))
    policy, chosen = policy_registry.policy(name), Counter[int]()
    for turn in range(200):
        queues = [max(queue_s - 0.0065, 0.0) for queue_s in queues]  # 154 a second
        world.instances = [
            Inst(f"n{number}", queues[number], holders[number], LATENCY) for number in range(count)
        ]
        requests = [round(queue_s / 0.05) for queue_s in queues]
        question = loaded(world, [(queued, 0, 0) for queued in requests], options)
        question.dice.seed(turn)
        choice = policy.choose(question)
        chosen[choice.at] += 1
        queues[choice.at] += world.compute_s(world.instances[choice.at], choice.cached_blocks)
        holders[choice.at] = everything
    assert max(chosen.values()) <= 50, chosen
    assert len(chosen) == count


# -- places and settings ---------------------------------------------------------------------------


def test_places_leave_out_who_is_not_registered() -> None:
    world = World(2, [Inst("a", hbm=frozenset({0})), Inst()], {"a": Node(nvme=frozenset({0, 1}))})
    question = world.question()
    assert question.places.names == ["i0", "a"]
    assert [question.places.tier(1, tier) for tier in (0, 1)] == ["dram", "nvme"]
    fast, whole = question.places.lengths(question.match)
    assert (fast.tolist(), whole.tolist()) == ([1, 0], [1, 2])
    empty = Places()
    assert len(empty) == 0
    assert empty.lengths(question.match)[1].tolist() == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": ""},
        {"kvcache_centric": {"balancing_threshold": 0.5}},
        {"algorithm_1": {"balancing_threshold": 0.5}},
        {"kv_cost": {"device_credit": 1.5}},
        {"kv_cost": {"temperature": float("nan")}},
        {"preble": {"window_s": 180}},
        {"prefix_aware": {"match_threshold": "much"}},
    ],
)
def test_settings_beyond_their_bounds_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(wrong, PolicySettings)
