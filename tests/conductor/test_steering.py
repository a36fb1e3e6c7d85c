"""Copies, drains, plans and flips, brought together: what is ordered when, and what comes of it."""

from __future__ import annotations

import random

import pytest
from test_core import BLOCK, conductor, keys, prompt, spec, tell

from tiffin.conductor.errors import Conflict, UnknownInstance
from tiffin.conductor.feeds.updates import Added
from tiffin.conductor.flips import SetRole, Verify
from tiffin.conductor.orders import Admit, Copy, Ended, Evacuate, NodeSpace
from tiffin.conductor.records import Decision, Request, Role, Status

GIB = 1 << 30
NODES = {f"node-{name}": NodeSpace(f"node-{name}", 64 * GIB, 32 * GIB) for name in "abc"}


class TestReplication:
    def test_a_hot_prefix_is_copied_before_anybody_queues_for_it(self) -> None:
        made = conductor(*(spec(name, block_bytes=1 << 20) for name in "abc"))
        shared = keys("system prompt", 4)
        made.apply(Added("node-a", "dram", shared), 0.0)
        for number in range(40):
            request = Request(f"r{number}", "m", 4 * BLOCK + 7, shared)
            assert isinstance(made.schedule(request, 1.0 + number / 100), Decision)
            tell(made, request.id, "finished", now=1.5)
        steered = made.steering.tick(NODES, 2.0)
        copies = [order for order in steered.orders if isinstance(order, Copy)]
        assert {copy.target for copy in copies} == {"node-b", "node-c"}
        assert {copy.source for copy in copies} == {"node-a"}
        assert all(copy.keys == shared for copy in copies)
        assert len({copy.number for copy in copies}) == 2
        for copy in copies:
            made.steering.ended(Ended(copy.number, blocks=4), 3.0)
            made.steering.ended(Ended(copy.number, blocks=4), 3.0)  # said twice
            made.apply(Added(copy.target, "dram", copy.keys), 3.0)
        assert made.steering.replication.numbers.copied_blocks == 8
        assert made.steering.tick(NODES, 4.0).orders == []

    def test_without_nodes_nothing_is_ordered(self) -> None:
        made = conductor(spec("a"))
        assert made.steering.tick({}, 1.0).orders == []


class TestDrains:
    def test_a_node_hands_over_what_is_hot_and_unique_first(self) -> None:
        made = conductor(*(spec(name, block_bytes=1 << 20) for name in "abc"))
        made.patch({"replication": {"enabled": False}}, 0.0)
        shared = keys("hot", 3)
        made.apply(Added("node-a", "dram", shared), 0.0)
        for number in range(10):
            made.schedule(Request(f"r{number}", "m", 3 * BLOCK + 7, shared), 1.0)
        made.steering.drain_node("node-a", 2.0)
        now, seen = 2.0, []
        draining = NODES | {"node-a": NodeSpace("node-a", 64 * GIB, 0, draining=True)}
        while made.steering.drains(now)[0].phase not in ("done", "failed", "late"):
            now += 1.0
            for order in made.steering.tick(draining, now).orders:
                seen.append(type(order))
                count = len(order.keys) if isinstance(order, Copy) else 1
                made.steering.ended(Ended(order.number, blocks=count), now)
            assert now < 60.0
        assert seen == [Admit, Copy, Evacuate]
        [progress] = made.steering.drains(now)
        assert (progress.phase, progress.moved_blocks) == ("done", 3)

    def test_an_instance_is_done_when_its_requests_are(self) -> None:
        made = conductor(spec("a"), spec("b"))
        made.drain("b", 0.0)
        made.schedule(prompt("x"), 1.0)
        made.drain("a", 2.0)
        made.steering.tick({}, 3.0)
        assert [(p.name, p.phase) for p in made.steering.drains(3.0)] == [
            ("b", "done"),
            ("a", "waiting"),
        ]
        tell(made, "x", "finished", now=4.0)
        made.steering.tick({}, 5.0)
        assert made.steering.drains(5.0)[1].phase == "done"


class TestFlips:
    def test_one_that_works_is_emptied_first(self) -> None:
        made = conductor(spec("p1", Role.PREFILL), spec("p2", Role.PREFILL), spec("d", Role.DECODE))
        decision = made.schedule(prompt("x"), 1.0)
        assert isinstance(decision, Decision)
        name = decision.prefill
        assert made.flip(name, Role.DECODE, 2.0) == []
        row = made.cluster.row(name)
        made.steering.tick({}, 3.0)
        assert (made.cluster.status[row], made.cluster.role(row)) == (
            Status.DRAINING,
            Role.PREFILL,
        )
        tell(made, "x", "prefill_done", now=4.0)
        made.steering.tick({}, 5.0)
        assert (made.cluster.status[row], made.cluster.role(row)) == (Status.READY, Role.DECODE)

    def test_the_last_of_a_role_stays(self) -> None:
        made = conductor(spec("p", Role.PREFILL), spec("d", Role.DECODE))
        with pytest.raises(Conflict):
            made.flip("p", Role.DECODE, 1.0)
        with pytest.raises(UnknownInstance):
            made.flip("nobody", Role.DECODE, 1.0)

    def test_an_instance_that_has_to_be_told_is_told_and_tried(self) -> None:
        labels = {"role_url": "http://p1/role"}
        made = conductor(
            spec("p1", Role.PREFILL, labels=labels),
            spec("p2", Role.PREFILL),
            spec("d", Role.DECODE),
        )
        made.flip("p1", Role.DECODE, 1.0)
        assert made.steering.tick({}, 2.0).actions == [SetRole("p1", Role.DECODE)]
        assert made.steering.committed("p1", 3.0) == [Verify("p1", Role.DECODE)]
        assert made.cluster.status[0] is Status.DRAINING
        assert made.steering.verified("p1", 4.0) == []
        assert (made.cluster.status[0], made.cluster.role(0)) == (Status.READY, Role.DECODE)


def test_plans_say_why() -> None:
    made = conductor(
        *(spec(f"p{n}", Role.PREFILL) for n in range(2)),
        *(spec(f"d{n}", Role.DECODE) for n in range(6)),
        planner={"interval_s": 10.0},
    )
    dice = random.Random(1)
    now = 0.0
    for number in range(200):
        now += 0.1
        request = Request(f"r{number}", "m", 20_000, keys(f"{dice.random()}", 39))
        if isinstance(made.schedule(request, now), Decision):
            tell(made, request.id, "prefill_done", "first_token", now=now)
            tell(made, request.id, "tokens", now=now + 0.01, tokens=50)
            tell(made, request.id, "finished", now=now + 0.02)
        made.steering.tick({}, now)
    plan = made.steering.plans()["m"]
    assert (plan.prefill, plan.decode, plan.mode) == (2, 6, "advise")
    assert plan.load > 1.0  # ten prompts of 20,000 tokens a second are too much for two
    assert plan.flip is not None
    assert plan.flip[1] is Role.PREFILL
    assert not plan.flip_now
    assert plan.instances_wanted > 8
    assert "load" in str(plan)
