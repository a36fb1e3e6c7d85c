"""`joint` finds what trying every plan finds, and never predicts worse than Algorithm 1."""

from __future__ import annotations

import math
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from policysupport import BLOCK_BYTES, NOW, Inst, Node, World, more_blocks, worlds

from tiffin.conductor.cost.transfer_model import TransferSettings
from tiffin.conductor.prefill import policy_registry
from tiffin.conductor.prefill.policies.policy_settings import (
    JointSettings,
    KvcacheCentricSettings,
    PolicySettings,
)
from tiffin.conductor.state.inflight_prefills import Computing


def joint(**others: object) -> PolicySettings:
    options = msgspec.convert(others, JointSettings)
    return PolicySettings(joint=options, near_share=0.0)


def sources(world: World, number: int) -> dict[str, tuple[float, dict[int, float]]]:
    """Per source of an instance: seconds to begin with it, and seconds for each block it has."""
    inst = world.instances[number]
    hbm, dram, local = world.own_lengths(number)
    own = dict.fromkeys(range(hbm), 0.0)
    own |= dict.fromkeys(range(hbm, dram), world.tier_block_s("dram"))
    own |= dict.fromkeys(range(dram, local), world.tier_block_s("nvme"))
    found = {"own": (0.0, own)}
    for name, node in world.nodes.items():
        bandwidth, latency_s, wait_s = world.way(name, inst.node)
        link_s = BLOCK_BYTES / bandwidth
        blocks = {b: max(link_s, world.tier_block_s("nvme")) for b in node.nvme}
        blocks |= {b: max(link_s, world.tier_block_s("dram")) for b in node.dram}
        found[name] = (latency_s + wait_s, blocks)
    for other, peer in enumerate(world.instances):
        if other != number:
            bandwidth, latency_s, wait_s = world.way(peer.node, inst.node)
            block_s = max(BLOCK_BYTES / bandwidth, world.tier_block_s("hbm"))
            found[f"i{other}"] = (latency_s + wait_s, dict.fromkeys(peer.hbm, block_s))
    return found


def best_ttft_s(world: World, number: int) -> float:
    """Every number of leading blocks, brought in every way: block after block, from any source."""
    inst = world.instances[number]
    best_s = inst.queue_s + world.compute_s(inst, 0)
    arrived = {"": 0.0}  # by the source of the last block: seconds until it is there
    ways = sources(world, number)
    for block in range(world.blocks):
        after: dict[str, float] = {}
        for source, (fixed_s, blocks) in ways.items():
            if block in blocks:
                begun_s = [s + (0.0 if last == source else fixed_s) for last, s in arrived.items()]
                after[source] = min(begun_s) + blocks[block]
        if not after:
            break
        arrived = after
        bring_s = min(arrived.values())
        best_s = min(best_s, max(inst.queue_s, bring_s) + world.compute_s(inst, block + 1))
    return best_s


def a_token_s(world: World) -> float:
    """What stopping before the last block can save: of a prompt that ends with it, one token is
    computed all the same."""
    if world.tail_tokens:
        return 0.0
    after = 2 * world.prompt_tokens - 1
    return max(inst.latency[1] + inst.latency[2] * after for inst in world.instances)


# Each block takes 10 ms to bring; of the three, the second saves most.
THE_SECOND_OF_THREE = World(
    blocks=3,
    instances=[Inst(node="", queue_s=0.004), Inst(node="", queue_s=0.05, hbm=frozenset(range(3)))],
    nodes={},
    tail_tokens=0,
)


@settings(max_examples=200)
@given(worlds())
@example(THE_SECOND_OF_THREE)
def test_it_finds_what_trying_everything_finds(world: World) -> None:
    choice = policy_registry.policy("joint").choose(world.question(joint()))
    expected = [best_ttft_s(world, number) for number in range(len(world.instances))]
    assert choice.ttft_s[choice.at] <= min(expected) * (1 + 1e-5) + a_token_s(world)
    assert choice.ttft_s.min() == choice.ttft_s[choice.at]
    # What is reported of the others can be carried out: never less than their best.
    assert (choice.ttft_s >= np.array(expected) * (1 - 1e-5)).all()
    terms = choice.terms
    assert terms["start_s"] + terms["prefill_s"] == pytest.approx(choice.ttft_s)
    assert (terms["start_s"] >= terms["queue_s"] * (1 - 1e-9)).all()


# Its last block came back from the disk, the one before it did not.
CAME_BACK = World(
    blocks=4,
    instances=[
        Inst(node="", queue_s=0.4, hbm=frozenset(), latency=(0.05, 1e-4, 1e-9, 0.02, 1e-4, 1e-7))
    ],
    nodes={"b": Node(dram=frozenset({0, 1, 3}), nvme=frozenset({0, 1, 2}), sending=0)},
    links={},
    tail_tokens=0,
    ways=TransferSettings(
        link_bandwidth_bytes_s=1e8,
        link_latency_s=0.002,
        hbm_bandwidth_bytes_s=1e9,
        dram_bandwidth_bytes_s=1e9,
        nvme_bandwidth_bytes_s=5e7,
    ),
)


@settings(max_examples=90)
@given(worlds())
@example(CAME_BACK)
def test_its_orders_are_a_plan_that_takes_what_it_says(world: World) -> None:
    choice = policy_registry.policy("joint").choose(world.question(joint()))
    inst = world.instances[choice.at]
    ways = sources(world, choice.at)
    own_node = world.nodes.get(inst.node, Node())
    local = inst.hbm | own_node.dram | own_node.nvme
    seconds, last = 0.0, 0
    fetched: set[int] = set()
    for fetch in choice.fetches:
        assert last <= fetch.start < fetch.stop <= choice.cached_blocks
        assert fetch.nbytes == (fetch.stop - fetch.start) * BLOCK_BYTES
        name, tier = fetch.source, fetch.tier
        held = (
            world.instances[int(name[1:])].hbm
            if tier == "hbm"
            else getattr(world.nodes[name], tier)
        )
        blocks = range(fetch.start, fetch.stop)
        assert held.issuperset(blocks)
        fetched |= set(blocks)
        seconds += fetch.seconds
        last = fetch.stop
    left = set(range(choice.cached_blocks)) - fetched
    assert left <= local
    # Reading what it has itself takes the rest of the time, and no longer than its slower tier.
    own_s = sum(min(ways[n][1].get(b, 9.9) for n in ("own", inst.node) if n in ways) for b in left)
    prefill_s = world.compute_s(inst, choice.cached_blocks)
    total_s = max(inst.queue_s, seconds + own_s) + prefill_s
    assert total_s == pytest.approx(choice.ttft_s[choice.at], rel=1e-5)


@settings(max_examples=90)
@given(worlds(), st.data())
def test_a_better_cache_never_predicts_a_worse_ttft(world: World, data: st.DataObject) -> None:
    only = data.draw(st.integers(0, len(world.instances) - 1))
    before = policy_registry.policy("joint").choose(world.question(joint(), only=only))
    better = data.draw(more_blocks(world))
    after = policy_registry.policy("joint").choose(better.question(joint(), only=only))
    assert after.ttft_s[0] <= before.ttft_s[0] * (1 + 1e-6) + a_token_s(world)


@settings(max_examples=90)
@given(worlds(), st.floats(1, 4))
def test_it_is_never_worse_than_algorithm_1(world: World, threshold: float) -> None:
    theirs = {"balancing_threshold": threshold}
    settings = msgspec.structs.replace(
        joint(), kvcache_centric=msgspec.convert(theirs, KvcacheCentricSettings)
    )
    ours = policy_registry.policy("joint").choose(world.question(settings))
    other = policy_registry.policy("kvcache_centric").choose(world.question(settings))
    assert ours.ttft_s[ours.at] <= other.ttft_s[other.at] * (1 + 1e-6)


# Two nodes with one instance each, and blocks that take 10 ms to compute each.
PAIR = World(
    blocks=6,
    instances=[Inst("a"), Inst("b")],
    nodes={"a": Node(), "b": Node(), "far": Node()},
)


def test_ranges_come_from_different_places() -> None:
    head, tail = frozenset(range(3)), frozenset(range(3, 6))
    nodes = {"a": Node(nvme=head), "b": Node(), "far": Node(dram=tail)}
    world = replace(
        PAIR,
        nodes=nodes,
        links={("far", "a"): (1e9, 0.001), ("far", "b"): (1e9, 0.001), ("a", "b"): (1e6, 0.5)},
        ways=msgspec.structs.replace(PAIR.ways, nvme_bandwidth_bytes_s=1e9),
    )
    choice = policy_registry.policy("joint").choose(world.question())
    assert choice.at == 0
    assert choice.cached_blocks == 6
    # The head is its own node's and needs no order; the best single holder has nothing of the tail.
    assert [(f.start, f.stop, f.source, f.tier) for f in choice.fetches] == [(3, 6, "far", "dram")]


def test_a_slow_disk_is_not_read() -> None:
    slow = msgspec.structs.replace(PAIR.ways, nvme_bandwidth_bytes_s=1e7)  # 100 ms a block
    world = replace(PAIR, nodes={"a": Node(nvme=frozenset(range(6))), "b": Node()}, ways=slow)
    choice = policy_registry.policy("joint").choose(world.question())
    assert (choice.cached_blocks, choice.fetches) == (0, ())


def test_a_slow_disk_is_read_while_one_waits_anyway() -> None:
    slow = msgspec.structs.replace(PAIR.ways, nvme_bandwidth_bytes_s=1e7)
    nodes = {"a": Node(nvme=frozenset(range(6))), "b": Node()}
    world = replace(PAIR, instances=[Inst("a", queue_s=0.35)], nodes=nodes, ways=slow)
    choice = policy_registry.policy("joint").choose(world.question())
    assert choice.cached_blocks == 3  # as many as the queue has time for
    assert choice.ttft_s[0] == pytest.approx(0.35 + world.compute_s(world.instances[0], 3))


def test_a_block_more_may_pay_though_it_comes_late() -> None:
    """20 ms to read one, 11 to compute it. After 35 ms in the queue, the second is 5 ms late."""
    nodes = {"a": Node(nvme=frozenset(range(6))), "b": Node()}
    world = replace(PAIR, instances=[Inst("a", queue_s=0.035)], nodes=nodes)
    choice = policy_registry.policy("joint").choose(world.question())
    assert choice.cached_blocks == 2
    assert choice.ttft_s[0] == pytest.approx(0.040 + world.compute_s(world.instances[0], 2))


def test_a_sender_that_is_busy_is_not_asked() -> None:
    everything = frozenset(range(6))
    nodes = {
        "a": Node(),
        "b": Node(),
        "busy": Node(dram=everything, sending=5_000_000),
        "idle": Node(dram=everything),
    }
    for nodes_in_order in (nodes, dict(reversed(nodes.items()))):
        world = replace(PAIR, instances=[Inst("a")], nodes=nodes_in_order)
        world = replace(world, ways=msgspec.structs.replace(PAIR.ways, link_bandwidth_bytes_s=1e9))
        choice = policy_registry.policy("joint").choose(world.question())
        assert [(fetch.source, fetch.tier) for fetch in choice.fetches] == [("idle", "dram")]


class TestWaiting:
    """i0 is computing the first five blocks."""

    def computing(self, ready_s: float, row: int = 0) -> Computing:
        computing = Computing()
        computing.begin("other", row, row, PAIR.keys[:5], 0, NOW + ready_s, NOW)
        return computing

    def choose(self, world: World, ready_s: float, **options: object) -> policy_registry.Choice:
        question = world.question(joint(**options), computing=self.computing(ready_s))  # type: ignore[arg-type]
        return policy_registry.policy("joint").choose(question)

    def test_on_the_same_instance(self) -> None:
        """If it still waits for blocks itself, so that nothing else keeps this one behind it."""
        choice = self.choose(PAIR, 0.02)
        assert (choice.at, choice.wait_for, choice.cached_blocks) == (0, "other", 5)
        assert choice.fetches == ()
        expected_s = 0.02 + PAIR.compute_s(PAIR.instances[0], 5)
        assert choice.ttft_s[0] == pytest.approx(expected_s)

    def test_on_another_one_when_that_is_busy(self) -> None:
        links = {("a", "b"): (1e9, 0.001)}
        world = replace(PAIR, instances=[Inst("a", queue_s=1.0), Inst("b")], links=links)
        choice = self.choose(world, 0.02)
        assert (choice.at, choice.wait_for, choice.cached_blocks) == (1, "other", 5)
        (fetch,) = choice.fetches
        assert (fetch.start, fetch.stop, fetch.source, fetch.tier) == (0, 5, "i0", "hbm")
        assert fetch.seconds == pytest.approx(0.001 + 5 * BLOCK_BYTES / 1e9)
        expected_s = 0.02 + fetch.seconds + world.compute_s(world.instances[1], 5)
        assert choice.ttft_s[1] == pytest.approx(expected_s)

    def test_only_for_what_is_not_there(self) -> None:
        """What the instance has of them needs no transfer."""
        links = {("a", "b"): (1e9, 0.001)}
        mine = Inst("b", hbm=frozenset(range(4)))
        world = replace(PAIR, instances=[Inst("a", queue_s=1.0), mine], links=links)
        choice = self.choose(world, 0.002)
        (fetch,) = choice.fetches
        assert (choice.at, fetch.start, fetch.stop) == (1, 4, 5)

    def test_not_when_computing_is_faster(self) -> None:
        choice = self.choose(PAIR, 0.5)
        assert (choice.at, choice.wait_for, choice.cached_blocks) == (1, "", 0) or (
            choice.at == 0 and choice.wait_for == ""
        )

    @pytest.mark.parametrize("options", [{"wait": False}, {"wait_max_s": 0.01}])
    def test_not_when_it_must_not(self, options: dict[str, object]) -> None:
        assert self.choose(PAIR, 0.02, **options).wait_for == ""

    def test_not_for_an_instance_that_left(self) -> None:
        question = PAIR.question(computing=self.computing(0.02, row=9))
        assert policy_registry.policy("joint").choose(question).wait_for == ""

    @settings(max_examples=60)
    @given(worlds(), st.floats(0, 0.5), st.data())
    def test_is_one_more_way(self, world: World, ready_s: float, data: st.DataObject) -> None:
        """What loops say of it: without it, or the best of waiting on each instance."""
        row = data.draw(st.integers(0, len(world.instances) - 1))
        blocks = data.draw(st.integers(1, world.blocks))
        computing = Computing()
        computing.begin("other", row, -1, world.keys[:blocks], 0, NOW + ready_s, NOW)
        choice = policy_registry.policy("joint").choose(
            world.question(joint(), computing=computing)
        )
        expected = math.inf
        for number, inst in enumerate(world.instances):
            best_s = best_ttft_s(world, number)
            mine, load_s = world.own(number)
            if mine < blocks:
                bandwidth, latency_s, wait_s = world.way(world.instances[row].node, inst.node)
                block_s = max(BLOCK_BYTES / bandwidth, world.tier_block_s("hbm"))
                send_s = latency_s + wait_s + block_s * (blocks - mine)
                there_s = ready_s if number == row else ready_s + send_s
                start_s = max(inst.queue_s, there_s) + load_s
                best_s = min(best_s, start_s + world.compute_s(inst, blocks))
            expected = min(expected, best_s)
        found_s = choice.ttft_s[choice.at]
        assert expected * (1 - 1e-5) <= found_s <= expected * (1 + 1e-5) + a_token_s(world)


def test_equal_instances_share() -> None:
    world = World(blocks=4, instances=[Inst() for _ in range(4)])
    chosen = {
        policy_registry.policy("joint").choose(world.question(seed=seed)).at for seed in range(60)
    }
    assert chosen == {0, 1, 2, 3}


def test_equal_senders_share() -> None:
    """More of them than are compared, and each is asked now and then."""
    everything = frozenset(range(6))
    names = [f"n{number}" for number in range(12)]
    nodes = {"a": Node()} | {name: Node(dram=everything) for name in names}
    fast = msgspec.structs.replace(PAIR.ways, link_bandwidth_bytes_s=1e9)
    world = replace(PAIR, instances=[Inst("a")], nodes=nodes, ways=fast)
    asked = set()
    for seed in range(150):
        choice = policy_registry.policy("joint").choose(
            world.question(joint(sources_max=3), seed=seed)
        )
        asked |= {fetch.source for fetch in choice.fetches}
    assert asked == set(names)


def test_a_large_cluster_is_searched_as_well_as_a_small_one_where_it_counts() -> None:
    """Only `refine_max` instances are looked at closely: those that have most, or wait least."""
    everything = frozenset(range(6))
    idle = [Inst(f"n{number}", queue_s=0.01 * number) for number in range(1, 40)]
    nodes = {f"n{number}": Node() for number in range(40)}
    nodes["n0"] = Node(nvme=everything)
    world = World(6, [Inst("n0", queue_s=0.2), *idle], nodes)
    close, loose = joint(refine_max=64), joint(refine_max=4)
    best = policy_registry.policy("joint").choose(world.question(close))
    near = policy_registry.policy("joint").choose(world.question(loose))
    assert near.ttft_s[near.at] == pytest.approx(best.ttft_s[best.at])


def test_a_prompt_in_many_parts_is_searched_more_coarsely() -> None:
    """More stretches than are looked at: never better than what can be done, and not bad either."""
    blocks = 60
    nodes = {"a": Node(), "b": Node(dram=frozenset(range(blocks)))}
    parts = [Inst("b", hbm=frozenset(range(2 * number))) for number in range(1, 25)]
    fast = msgspec.structs.replace(PAIR.ways, link_bandwidth_bytes_s=1e9)
    world = World(blocks, [Inst("a"), *parts], nodes, ways=fast)
    choice = policy_registry.policy("joint").choose(world.question(only=0))
    exact_s = best_ttft_s(world, 0)
    assert exact_s * (1 - 1e-6) <= choice.ttft_s[0] <= exact_s * 1.01
