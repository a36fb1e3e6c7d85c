"""Draining nodes: hot unique blocks are moved first, and every drain ends, by success or error."""

from __future__ import annotations

import random
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replicationsupport import MIB, World, hot_prefixes, lines, prompt, say

from tiffin.conductor.pool.draining import (
    ENDED,
    GONE_S,
    DrainPhase,
    DrainSettings,
    InstanceDrain,
    NodeDrain,
    _OnlyHere,
    unique_in_hbm,
)
from tiffin.conductor.pool.orders import LOST_S, Admit, Copy, Ended, Evacuate, NodeSpace
from tiffin.conductor.pool.replication import ReplicationSettings
from tiffin.conductor.state.sliced_work import finished

HOT, WARM, SHARED = prompt("hot", 3), prompt("warm", 2), prompt("shared", 2)


def world(nodes: str = "abc") -> World:
    return World(nodes, ReplicationSettings())


def leaving(pool: World, *, deadline_s: float = 100.0, **numbers: int) -> NodeDrain:
    """The drain of node a, which has three prefixes, one of them also on node b."""
    for keys in (HOT, WARM, SHARED):
        pool.has("a", keys)
    pool.has("b", SHARED)
    pool.come(HOT, 20), pool.come(WARM, 5), pool.come(SHARED, 50)
    counter = count(1)
    options = DrainSettings(**numbers)
    return NodeDrain("a", pool.now, lambda: next(counter), options, deadline_s=deadline_s)


def run(pool: World, drain: NodeDrain, *, seconds: int = 100, evacuated: int = 9) -> None:
    """Run a drain to its end; every order is carried out within a second."""
    for _ in range(seconds):
        orders = drain.step(pool.pool, pool.now)
        for order in orders:
            pool.say(order)
            pool.carry_out(order)
            blocks, error = evacuated, ""
            if isinstance(order, Copy):
                blocks = min(len(order.keys), pool.refusing.get(order.target, len(order.keys)))
                error = "" if blocks == len(order.keys) else "NoRoom"
            drain.ended(Ended(order.number, blocks, error), pool.now)
        if drain.phase in ENDED:
            return
        pool.now += 1.0


class TestNodes:
    def test_hot_and_unique_first(self) -> None:
        pool = world()
        drain = leaving(pool)
        run(pool, drain)
        assert [line.strip() for line in pool.transcript] == lines("""
            0 s  a takes nothing new
            1 s  copy hot:0..2 a -> b, 3 MiB (a is drained; wanted 19.9 times)
            1 s  copy warm:0..1 a -> c, 2 MiB (a is drained; wanted 5.0 times)
            2 s  a hands over the rest, for 98 s
        """)
        done = drain.progress(pool.now)
        assert (done.phase, done.moved_blocks, done.moved_bytes) == (DrainPhase.DONE, 5, 5 * MIB)
        assert (done.unique_blocks, done.handed_over, done.failures) == (0, 9, 0)
        assert drain.step(pool.pool, pool.now) == []

    def test_the_rest_of_a_prefix_goes_where_its_beginning_is(self) -> None:
        pool = world()
        pool.has("b", HOT[:1])
        run(pool, drain := leaving(pool))
        assert "copy hot:1..2 a -> b" in pool.transcript[1]
        assert drain.phase is DrainPhase.DONE

    def test_what_was_copied_is_not_copied_again_before_the_index_hears_of_it(self) -> None:
        pool = world()
        drain = leaving(pool)
        (admit,) = drain.step(pool.pool, 0.0)
        drain.ended(Ended(admit.number), 0.0)
        for order in drain.step(pool.pool, 1.0):
            assert isinstance(order, Copy)
            drain.ended(Ended(order.number, len(order.keys)), 1.0)
        (rest,) = drain.step(pool.pool, 2.0)
        assert isinstance(rest, Evacuate)

    def test_another_node_that_leaves_is_nobody(self) -> None:
        pool = world()
        drain = leaving(pool)
        pool.spaces["b"] = NodeSpace("b", 1024 * MIB, 512 * MIB, draining=True)
        run(pool, drain)
        assert "copy shared:0..1 a -> c" in pool.transcript[1]
        assert {line.rpartition("-> ")[2][0] for line in pool.transcript[1:4]} == {"c"}

    def test_the_deadline_ends_it(self) -> None:
        pool = world()
        drain = leaving(pool, deadline_s=10.0)
        (admit,) = drain.step(pool.pool, 0.0)
        drain.ended(Ended(admit.number), 0.5)
        assert len(drain.step(pool.pool, 1.0)) == 2
        assert drain.step(pool.pool, 5.0) == []  # the orders are in progress
        assert drain.step(pool.pool, 10.0) == []
        progress = drain.progress(10.0)
        assert (progress.phase, progress.unique_blocks) == (DrainPhase.LATE, 5)

    def test_an_evacuation_that_ran_out_of_time_is_late(self) -> None:
        pool = world()
        drain = leaving(pool, hot_max=0, deadline_s=10.0)
        (admit,) = drain.step(pool.pool, 0.0)
        drain.ended(Ended(admit.number), 0.0)
        (rest,) = drain.step(pool.pool, 1.0)
        assert isinstance(rest, Evacuate)
        assert drain.step(pool.pool, 10.0) == []
        assert drain.phase is DrainPhase.REST, "it says in a moment how far it has come"
        drain.ended(Ended(rest.number, 3, left=4), 10.1)
        progress = drain.progress(10.1)
        assert (drain.phase, progress.handed_over, progress.left_blocks) == (DrainPhase.LATE, 3, 4)

    def test_one_that_says_nothing_after_the_deadline_is_late(self) -> None:
        pool = world()
        drain = leaving(pool, hot_max=0, deadline_s=10.0)
        (admit,) = drain.step(pool.pool, 0.0)
        drain.ended(Ended(admit.number), 0.0)
        assert len(drain.step(pool.pool, 1.0)) == 1
        drain.step(pool.pool, 19.9)
        assert drain.phase is DrainPhase.REST
        drain.step(pool.pool, 20.0)
        assert drain.phase is DrainPhase.LATE

    def test_what_nobody_has_room_for_is_not_done(self) -> None:
        pool = world()
        drain = leaving(pool, hot_max=0)
        evacuations = 0
        for second in range(20):
            for order in drain.step(pool.pool, float(second)):
                evacuations += isinstance(order, Evacuate)
                drain.ended(Ended(order.number, 5, left=2), float(second))
        assert (evacuations, drain.phase) == (3, DrainPhase.FAILED)
        progress = drain.progress(20.0)
        assert (progress.handed_over, progress.left_blocks, progress.failures) == (5, 2, 0)

    def test_room_that_comes_late_is_used(self) -> None:
        pool = world()
        drain = leaving(pool, hot_max=0)
        lefts = iter((0, 2, 0))  # of the order to close, and of two that hand over
        for second in range(20):
            for order in drain.step(pool.pool, float(second)):
                drain.ended(Ended(order.number, 5, left=next(lefts)), float(second))
        assert (drain.phase, drain.progress(20.0).left_blocks) == (DrainPhase.DONE, 0)

    def test_who_has_no_room_is_not_asked_again_for_the_same(self) -> None:
        pool = world()
        pool.refusing = {"b": 0, "c": 1}
        drain = leaving(pool)
        run(pool, drain)
        copies = [line for line in pool.transcript if "copy hot" in line]
        assert [line.split("copy ")[1].split(",")[0] for line in copies] == [
            "hot:0..2 a -> b",
            "hot:0..2 a -> c",  # c took one block; no node is left for the others
        ]
        assert drain.phase is DrainPhase.DONE  # the node itself hands over the rest
        assert drain.progress(pool.now).unique_blocks > 0

    def test_a_node_that_does_not_hand_over_is_told_three_times(self) -> None:
        pool = world()
        drain = leaving(pool, hot_max=0)
        orders = []
        for second in range(20):
            for order in drain.step(pool.pool, float(second)):
                orders.append(order)
                drain.ended(Ended(order.number, error="NodeUnavailable"), float(second))
        assert [type(order) for order in orders] == [Admit] + [Evacuate] * 3
        assert drain.phase is DrainPhase.FAILED

    def test_orders_that_nobody_reports_on_are_given_up(self) -> None:
        pool = world()
        drain = leaving(pool, deadline_s=10_000.0, hot_max=0)
        assert len(drain.step(pool.pool, 0.0)) == 1
        assert drain.step(pool.pool, LOST_S - 1) == []
        assert len(drain.step(pool.pool, LOST_S)) == 1  # the order is sent again
        assert drain.progress(LOST_S).failures == 1

    def test_a_node_that_goes_away_is_lost(self) -> None:
        pool = world()
        drain = leaving(pool)
        drain.step(pool.pool, 0.0)
        space = pool.spaces.pop("a")
        assert drain.step(pool.pool, GONE_S - 1) == []
        assert drain.phase is DrainPhase.CLOSING
        pool.spaces["a"] = space  # the directory had lost its data
        drain.step(pool.pool, GONE_S)
        del pool.spaces["a"]
        drain.step(pool.pool, 2 * GONE_S - 1)
        assert drain.phase is DrainPhase.CLOSING
        assert drain.step(pool.pool, 2 * GONE_S) == []
        assert drain.phase is DrainPhase.LOST

    def test_while_the_directory_is_away_only_time_passes(self) -> None:
        pool = world()
        drain = leaving(pool, deadline_s=100.0)
        (admit,) = drain.step(pool.pool, 0.0)
        drain.ended(Ended(admit.number), 0.0)
        for second in range(1, 99):
            assert drain.step(None, float(second)) == []
        assert drain.phase is DrainPhase.HOT
        assert drain.step(pool.pool, 99.0) != []
        drain.step(None, 100.0)
        assert drain.phase is DrainPhase.LATE

    def test_cancelled_it_takes_new_blocks_again(self) -> None:
        pool = world()
        drain = leaving(pool)
        (admit,) = drain.step(pool.pool, 0.0)
        drain.cancel()
        assert drain.opening
        assert drain.step(pool.pool, 0.5) == [], "it may still hear that it is closed"
        drain.ended(Ended(admit.number), 1.0)
        (again,) = drain.step(pool.pool, 1.0)
        assert say(again) == "a takes new blocks"
        assert drain.step(pool.pool, 2.0) == []
        drain.ended(Ended(again.number), 2.0)
        assert not drain.opening
        assert drain.step(pool.pool, 3.0) == []
        assert drain.phase is DrainPhase.CANCELLED

    @pytest.mark.parametrize("failures", [1, 3])
    def test_it_is_told_so_until_it_has_heard_it_or_never_hears(self, failures: int) -> None:
        pool = world()
        run(pool, drain := leaving(pool))
        assert drain.phase is DrainPhase.DONE
        drain.cancel()  # also when it has ended
        assert drain.step(None, pool.now) == []
        told = 0
        for second in range(10):
            for order in drain.step(pool.pool, pool.now + second):
                told += 1
                error = "NodeUnavailable" if told <= failures else ""
                drain.ended(Ended(order.number, error=error), pool.now)
        assert told == min(failures + 1, 3)
        assert drain.progress(pool.now).failures == failures
        assert not drain.opening

    def test_one_that_somebody_else_opens_is_not_emptied(self) -> None:
        pool = world()
        drain = leaving(pool)
        (admit,) = drain.step(pool.pool, 0.0)
        drain.ended(Ended(admit.number), 0.0)
        assert drain.step(pool.pool, 1.0) != []  # in the directory the node is not closed yet
        pool.spaces["a"] = NodeSpace("a", 1024 * MIB, 512 * MIB, draining=True)
        drain.step(pool.pool, 2.0)
        assert drain.phase is DrainPhase.HOT
        pool.spaces["a"] = NodeSpace("a", 1024 * MIB, 512 * MIB)
        assert drain.step(pool.pool, 3.0) == []
        assert drain.phase is DrainPhase.CANCELLED
        assert drain.step(pool.pool, 4.0) == []

    @given(seed=st.integers(0, 1 << 32))
    @settings(max_examples=30)
    def test_every_drain_ends_by_its_deadline_and_copies_what_only_it_has(self, seed: int) -> None:
        dice = random.Random(seed)
        pool = world("abcd")
        for i in range(5):
            keys = prompt(f"p{i}", dice.randint(1, 5))
            pool.has("a", keys)
            if dice.random() < 0.3:
                pool.has(dice.choice("bcd"), keys[: dice.randint(1, 5)])
            pool.come(keys, dice.randint(0, 9))
        counter = count(1)
        drain = NodeDrain("a", 0.0, lambda: next(counter), deadline_s=dice.choice([3.0, 300.0]))
        pending: list[Copy | Evacuate | Admit] = []
        while drain.phase not in ENDED:
            pool.now += dice.choice([0.5, 1.0, 5.0])
            assert pool.now < 320.0
            for order in drain.step(pool.pool, pool.now):
                if isinstance(order, Copy):
                    assert order.source == "a" != order.target
                    assert all(pool.holders(key) == {"a"} for key in order.keys)
                pending.append(order)  # type: ignore[arg-type]
            assert sum(isinstance(order, Copy) for order in pending) <= 4
            dice.shuffle(pending)
            while pending and dice.random() < 0.8:
                order = pending.pop()
                done = len(order.keys) if isinstance(order, Copy) else 1
                if dice.random() < 0.3:
                    drain.ended(Ended(order.number, 0, "NoRoom"), pool.now)
                else:
                    pool.carry_out(order)
                    drain.ended(Ended(order.number, done), pool.now)

    @given(seed=st.integers(0, 1 << 32))
    @settings(max_examples=50)
    def test_what_only_it_has_is_what_a_look_at_every_block_finds(self, seed: int) -> None:
        dice = random.Random(seed)
        pool = world("abcd")
        pool.spaces["d"] = NodeSpace("d", 1024 * MIB, 512 * MIB, draining=True)
        chains: list[tuple[bytes, ...]] = [()]
        for i in range(12):
            chains.append(dice.choice(chains) + prompt(f"p{i}", dice.randint(1, 4)))
            for node, tier in (("a", "dram"), ("a", "nvme"), ("b", "dram"), ("d", "nvme")):
                part = [key for key in chains[-1] if dice.random() < 0.6]
                pool.has(node, part, tier)
            pool.has("p1", chains[-1], "hbm")
            pool.come(chains[-1], dice.randint(2, 9))
        looks, found = _OnlyHere("a", pool.pool), set[bytes]()
        expected = set[bytes]()
        for prefix in hot_prefixes(pool.popularity, 100, 0.0):
            here = pool.pool.leading(prefix.keys).get("a", 0)
            for at, key in enumerate(prefix.keys):
                if at < here and not pool.holders(key) & {"b", "c"}:
                    expected.add(key)
            more = [prefix.keys[at] for at in looks.of(prefix.keys)]
            assert not found & set(more)
            found.update(more)
        assert found == expected

    def test_a_step_looks_once_at_each_hot_block(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """However many prefixes begin with the block; the prefixes are read once for all drains."""
        pool = world()
        for node in "ab":
            pool.spaces[node] = NodeSpace(node, 1024 * MIB, 512 * MIB, draining=True)
        head, tails = prompt("system", 50), [prompt(f"user {n}", 2) for n in range(20)]
        for tail in tails:
            pool.come(head + tail, 3)
            for node in "ab":
                pool.has(node, head + tail)
        counter = count(1)
        drains = [NodeDrain(node, 0.0, lambda: next(counter)) for node in "ab"]
        for drain in drains:
            (admit,) = drain.step(pool.pool, 0.0)
            drain.ended(Ended(admit.number), 0.0)
        matched, listed, single = list[bytes](), list[int](), list[bytes]()
        match, hot, holders_of = (
            pool.index.match,
            pool.popularity.finding_hot,
            pool.index.holders_of,
        )
        monkeypatch.setattr(pool.index, "match", lambda keys: matched.extend(keys) or match(keys))
        monkeypatch.setattr(pool.index, "holders_of", lambda k: single.append(k) or holders_of(k))
        monkeypatch.setattr(
            pool.popularity, "finding_hot", lambda n, at: listed.append(n) or hot(n, at)
        )
        one_moment = pool.pool
        # Four copies each; to place each copy its prefix is looked up once more.
        assert [len(drain.step(one_moment, 1.0)) for drain in drains] == [4, 4]
        assert len(listed) == 1
        assert len(matched) <= 2 * (len(head) + sum(map(len, tails)) + 4 * len(head))
        assert single == []


class TestInstances:
    def test_it_is_done_with_its_last_request(self) -> None:
        drain = InstanceDrain("p1", 0.0, deadline_s=10.0)
        assert drain.step(2, 1.0, unique_blocks=7) is DrainPhase.WAITING
        progress = drain.progress(1.0)
        assert (progress.requests, progress.unique_blocks, progress.left_s) == (2, 7, 9.0)
        assert drain.step(0, 2.0) is DrainPhase.DONE
        assert drain.step(1, 3.0) is DrainPhase.DONE

    @pytest.mark.parametrize(
        ("requests", "at", "phase"),
        [(1, 10.0, DrainPhase.LATE), (0, 10.0, DrainPhase.DONE), (None, 1.0, DrainPhase.LOST)],
        ids=str,
    )
    def test_other_ends(self, requests: int | None, at: float, phase: DrainPhase) -> None:
        assert InstanceDrain("p1", 0.0, deadline_s=10.0).step(requests, at) is phase

    def test_cancelled(self) -> None:
        drain = InstanceDrain("p1", 0.0)
        drain.cancel()
        assert drain.step(0, 1.0) is DrainPhase.CANCELLED

    def test_what_its_cache_alone_has_is_counted(self) -> None:
        pool = world()
        pool.come(HOT, 5), pool.come(WARM, 5)
        pool.has("p1", HOT, "hbm"), pool.has("p1", WARM, "hbm"), pool.has("b", HOT[:2])
        hot = hot_prefixes(pool.popularity, 10, 0.0)
        assert finished(unique_in_hbm(hot, pool.pool)) == {"p1": 1 + 2}
        pool.has("p2", WARM, "hbm")
        assert finished(unique_in_hbm(hot, pool.pool)) == {"p1": 1}  # the rest of it is at p2 too

    def test_a_shared_head_is_looked_at_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A thousand prompts with the same system prompt of a hundred blocks are not 100,000
        look-ups."""
        pool = world()
        head, tails = prompt("system", 20), [prompt(f"user {n}", 1) for n in range(10)]
        for tail in tails:
            pool.come(head + tail, 3)
        pool.has("p1", head, "hbm")
        hot = hot_prefixes(pool.popularity, 100, 0.0)
        assert sum(len(prefix.keys) for prefix in hot) >= 10 * 21
        looks: list[bytes] = []
        match = pool.pool.index.match
        monkeypatch.setattr(
            pool.pool.index, "match", lambda keys: looks.extend(keys) or match(keys)
        )
        assert finished(unique_in_hbm(hot, pool.pool)) == {"p1": 20}
        assert len(looks) == 20 + 10
