"""The controller of copies, drains, plans and flips: when it sends orders, and their outcomes."""

from __future__ import annotations

import contextlib
import logging
import random
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from coresupport import BLOCK, conductor, keys, prompt, spec, tell

from tiffin.conductor.errors import Conflict, InvalidRequest, UnknownInstance, UnknownNode
from tiffin.conductor.events.index_updates import Added
from tiffin.conductor.pool import pool_controller
from tiffin.conductor.pool.demand_forecast import PREDICTORS
from tiffin.conductor.pool.draining import GONE_S
from tiffin.conductor.pool.orders import Admit, Copy, Ended, Evacuate, NodeSpace
from tiffin.conductor.pool.prompt_sums import PromptSums
from tiffin.conductor.pool.role_flip import SetRole, Verify
from tiffin.conductor.records import Decision, Load, Request, Role, Status

if TYPE_CHECKING:
    from tiffin.conductor.core import Conductor

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
            made.steering.ended(Ended(copy.number, blocks=4), 3.0)  # reported twice
            made.apply(Added(copy.target, "dram", copy.keys), 3.0)
        assert made.steering.replication.numbers.copied_blocks == 8
        assert made.steering.tick(NODES, 4.0).orders == []

    def test_it_is_copied_to_nodes_whose_engines_can_use_it(self) -> None:
        made = conductor(*(spec(name, block_bytes=1 << 20) for name in "abc"))
        for name, space in (("a", "old"), ("b", "new"), ("c", "old")):
            made.cluster.set_key_space(name, space)
        shared = keys("system prompt", 4)
        made.apply(Added("node-a", "dram", shared), 0.0)
        for number in range(40):
            request = Request(f"r{number}", "m", 4 * BLOCK + 7, shared, key_space="old")
            assert isinstance(made.schedule(request, 1.0 + number / 100), Decision)
            tell(made, request.id, "finished", now=1.5)
        orders = made.steering.tick(NODES, 2.0).orders
        assert [order.target for order in orders if isinstance(order, Copy)] == ["node-c"]

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
        made.steering.tick(NODES, 1.0)
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

    def test_what_only_an_hbm_has_is_counted_once_for_all_drains(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        made = conductor(*(spec(name) for name in "abcd"))
        shared = keys("hot", 3)
        made.apply(Added("a", "hbm", shared), 0.0)
        for number in range(8):
            made.schedule(Request(f"r{number}", "m", 3 * BLOCK + 7, shared), 1.0)
        made.arrivals.count(1.0)
        counted: list[int] = []
        hot = made.popularity.finding_hot
        monkeypatch.setattr(
            made.popularity, "finding_hot", lambda most, now: counted.append(most) or hot(most, now)
        )
        for name in "abc":
            made.steering.drain_instance(name, 1.0)
        for second in range(2, 22):
            made.steering.tick({}, float(second))
        assert len(counted) == 2
        progress = {one.name: one for one in made.steering.drains(22.0)}
        assert progress["a"].unique_blocks == 3

    def test_so_many_instances_as_there_may_be_are_drained(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        names = [f"i{number}" for number in range(300)]
        made = conductor(*(spec(name) for name in names))
        for name in names:
            made.drain(name, 0.0)
        assert len(made.steering.drains(0.0)) == 300
        made.steering.tick({}, 1.0)  # all have ended
        monkeypatch.setattr(pool_controller, "INSTANCES_MAX", 300)
        made.register(spec("one more"), 2.0)
        made.drain("i0", 2.0)
        made.drain("one more", 2.0)
        listed = [one.name for one in made.steering.drains(2.0)]
        assert len(listed) == 300
        assert "i1" not in listed
        assert {"i0", "one more"} < set(listed)

    def test_one_node_too_many_is_refused_and_nothing_changes(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(pool_controller, "_NODE_DRAINS_MAX", 2)
        made = conductor(spec("a"))
        made.steering.tick(NODES, 0.0)
        made.steering.drain_node("node-a", 0.0)
        made.steering.drain_node("node-b", 0.0)
        with pytest.raises(InvalidRequest, match="wait for one"):
            made.steering.drain_node("node-c", 0.0)
        made.steering.drain_node("node-b", 0.0)  # it is being drained already
        assert [one.name for one in made.steering.drains(0.0)] == ["node-a", "node-b"]
        made.steering.tick({"node-c": NODES["node-c"]}, GONE_S)  # the others are gone
        made.steering.drain_node("node-c", GONE_S)
        assert [one.name for one in made.steering.drains(GONE_S)] == ["node-b", "node-c"]

    def test_a_node_that_nobody_knows(self) -> None:
        made = conductor(spec("a"))
        for asked in (made.steering.drain_node, made.steering.undrain_node):
            with pytest.raises(UnknownNode, match="--directory"):
                asked("node-a", 0.0)
            made.steering.tick(NODES, 1.0)
            with pytest.raises(UnknownNode, match=r"'node-x' is in the pool now$"):
                asked("node-x", 1.0)
            made.steering.tick({}, 2.0)
        with pytest.raises(UnknownNode):
            made.steering.node_drain("node-a", 2.0)

    def test_known_nodes_stay_known_while_the_directory_is_away(self) -> None:
        made = conductor(spec("a"))
        made.steering.tick(NODES, 0.0)
        assert made.steering.tick(None, 1.0).orders == []
        made.steering.drain_node("node-a", 1.0)
        assert made.steering.tick(None, 2.0).orders == []
        assert made.steering.tick(NODES, 3.0).orders == [Admit(1, "node-a", on=False)]

    def test_who_takes_it_back_waits_until_the_node_knows(self) -> None:
        made = conductor(spec("a"))
        made.steering.tick(NODES, 0.0)
        made.steering.drain_node("node-a", 0.0)
        (closed,) = made.steering.tick(NODES, 1.0).orders
        made.steering.ended(Ended(closed.number), 1.0)
        made.steering.undrain_node("node-a", 1.0)
        (opened,) = made.steering.tick(NODES, 2.0).orders
        assert isinstance(opened, Admit)
        assert opened.on
        with pytest.raises(Conflict, match="ask in a second"):
            made.steering.drain_node("node-a", 2.0)
        made.steering.ended(Ended(opened.number), 3.0)
        made.steering.drain_node("node-a", 3.0)
        assert made.steering.node_drain("node-a", 3.0).phase == "closing"

    def test_what_another_conductor_drains_can_be_opened_here(self) -> None:
        made = conductor(spec("a"))
        made.steering.tick(NODES, 0.0)
        made.steering.undrain_node("node-b", 0.0)
        assert made.steering.tick(NODES, 1.0).orders == [Admit(1, "node-b", on=True)]
        assert made.steering.node_drain("node-b", 1.0).phase == "cancelled"


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

    def test_one_that_falls_silent_is_ready_again_when_it_is_heard_of(self) -> None:
        made = conductor(spec("p1", Role.PREFILL), spec("p2", Role.PREFILL), spec("d", Role.DECODE))
        decision = made.schedule(prompt("x"), 1.0)
        assert isinstance(decision, Decision)
        name = decision.prefill
        made.flip(name, Role.DECODE, 2.0)
        made.tick(16.0)
        made.steering.tick({}, 16.0)
        row = made.cluster.row(name)
        assert made.cluster.status[row] is Status.LOST, "it is not given work before"
        made.heartbeat(name, Load(), 17.0)
        assert (made.cluster.status[row], made.cluster.role(row)) == (Status.READY, Role.PREFILL)

    def test_a_drain_that_somebody_asks_for_ends_it(self) -> None:
        made = conductor(spec("p1", Role.PREFILL), spec("p2", Role.PREFILL), spec("d", Role.DECODE))
        made.flip("p1", Role.DECODE, 0.0)
        made.drain("p1", 0.5)
        for second in (1.0, 2.0, 3.0):
            made.steering.tick({}, second)
        assert (made.cluster.status[0], made.cluster.role(0)) == (Status.DRAINING, Role.PREFILL)
        assert made.steering.drains(3.0)[0].phase == "done"

    def test_of_one_that_was_told_it_goes_on_but_gives_no_work(self) -> None:
        labels = {"role_url": "http://p1/role"}
        told = spec("p1", Role.PREFILL, labels=labels)
        made = conductor(told, spec("p2", Role.PREFILL), spec("d", Role.DECODE))
        made.flip("p1", Role.DECODE, 1.0)
        made.steering.tick({}, 2.0)
        made.drain("p1", 3.0)
        made.steering.tick({}, 4.0)
        assert made.steering.committed("p1", 5.0) == [Verify("p1", Role.DECODE)]
        assert made.steering.verified("p1", 6.0) == []
        assert (made.cluster.status[0], made.cluster.role(0)) == (Status.DRAINING, Role.DECODE)
        # A new registration lets it work again, and so does the next flip.
        made.register(told, 7.0)
        made.flip("p1", Role.DECODE, 8.0)
        made.steering.tick({}, 9.0)
        made.steering.committed("p1", 10.0)
        made.steering.verified("p1", 11.0)
        assert (made.cluster.status[0], made.cluster.role(0)) == (Status.READY, Role.DECODE)


class TestPieces:
    """A tick runs in pieces, with other work of the event loop in between."""

    def test_what_is_asked_in_between_does_no_harm(self) -> None:
        def between(made: Conductor, piece: int) -> None:
            now = 10.0 + piece / 1e3
            match piece % 6:
                case 0:
                    made.schedule(Request(f"in {piece}", "m", 3 * BLOCK + 7, keys("hot", 3)), now)
                case 1:
                    with contextlib.suppress(Conflict):  # it is just being opened
                        made.steering.drain_node("node-a", now)
                case 2:
                    made.register(spec(f"new {piece}"), now)
                case 3:
                    made.steering.undrain_node("node-a", now)
                case 4:
                    made.remove(f"new {piece - 2}", now)
                case _:
                    made.drain("b", now)

        made = conductor(*(spec(name) for name in "abcd"), planner={"interval_s": 5.0})
        for number in range(40):
            begin = keys(f"hot {number % 7}", 3)
            made.schedule(Request(f"r{number}", "m", 3 * BLOCK + 7, begin), 1.0)
            made.apply(Added("node-a", "dram", begin), 1.0)
        made.steering.tick(NODES, 1.0)
        made.steering.drain_node("node-a", 2.0)
        pieces = 0
        for second in range(4, 10):
            work = made.steering.ticking(NODES, float(second))
            with contextlib.suppress(StopIteration):
                while True:
                    next(work)
                    pieces += 1
                    between(made, pieces)
        assert pieces > 6
        while made.steering.tick(NODES, 30.0).orders:
            pass


class TestPlanning:
    def test_a_predictor_that_fails_does_not_end_the_tick(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def fails(series: object, season: int) -> float:
            raise InvalidRequest("needs statsmodels")

        monkeypatch.setitem(PREDICTORS, "holt-winters", fails)
        made = conductor(spec("a"), planner={"interval_s": 10.0, "predictor": "holt-winters"})
        made.schedule(prompt("x"), 1.0)
        with caplog.at_level(logging.WARNING, "tiffin.conductor"):
            for second in range(1, 40):
                made.steering.tick({}, float(second))
        assert [one.getMessage() for one in caplog.records] == [
            "planning for m: the constant predictor stands in: needs statsmodels"
        ]
        assert made.steering.plans()["m"].at > 29.0

    def test_a_slow_forecast_can_be_made_elsewhere(self) -> None:
        """Only the plan of the interval waits for it."""
        made = conductor(spec("a"), planner={"interval_s": 10.0, "predictor": "holt-winters"})
        made.schedule(prompt("x"), 1.0)
        assert made.steering.tick({}, 5.0, ask=True).questions == {}
        asked = made.steering.tick({}, 12.0, ask=True).questions
        assert list(asked) == ["m"]
        assert (asked["m"].predictor, len(asked["m"].columns)) == ("holt-winters", 8)
        assert made.steering.plans() == {}
        assert made.steering.tick({}, 23.0, ask=True).questions == {}, "one at a time"
        made.steering.forecasted("m", asked["m"].stand_in("it is slow"), 24.0)
        assert made.steering.plans()["m"].at == 24.0
        assert "holt-winters failed" in str(made.steering.plans()["m"])
        made.steering.forecasted("m", asked["m"].stand_in(""), 25.0)  # not asked for
        made.steering.forecasted("gone", asked["m"].stand_in(""), 25.0)
        assert made.steering.plans()["m"].at == 24.0
        assert list(made.steering.tick({}, 34.0, ask=True).questions) == ["m"]

    def test_nor_does_a_plan_that_fails(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        made = conductor(spec("a"), planner={"interval_s": 10.0})
        made.schedule(prompt("x"), 1.0)

        def fails(fleet: object, now: float, **_: object) -> None:
            raise ZeroDivisionError

        monkeypatch.setattr(made.steering._planned["m"].planner, "planning", fails)
        with caplog.at_level(logging.WARNING, "tiffin.conductor"):
            for second in range(1, 40):
                made.steering.tick({}, float(second))
        assert [one.getMessage() for one in caplog.records] == [
            "planning for m: no plan: ZeroDivisionError"
        ]

    def test_instances_are_looked_at_once_for_all_models(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        made = conductor(
            *(replace(spec(f"{n}"), model=f"m{n % 5}") for n in range(20)),
            planner={"interval_s": 10.0},
        )
        for number in range(5):
            made.steering.came(f"m{number}", PromptSums.of(100, 100), 0.0)
        asked: list[str] = []
        monkeypatch.setattr(made, "requests_at", lambda name: asked.append(name) or 0)
        made.steering.tick({}, 5.0)
        assert asked == []  # nothing is due
        made.steering.tick({}, 10.0)
        assert sorted(asked, key=int) == [f"{n}" for n in range(20)]
        assert made.steering.plans().keys() == {f"m{n}" for n in range(5)}
        assert [member.id for member in made.steering.fleet("m1")] == ["1", "6", "11", "16"]

    def test_a_model_without_instances_is_forgotten_in_the_end(self) -> None:
        made = conductor(
            spec("a"), replace(spec("b"), model="other"), planner={"interval_s": 3600.0}
        )
        for model in ("m", "other"):
            made.steering.came(model, PromptSums.of(100, 100), 0.0)
        made.remove("b", 1.0)
        day_s = 86_400.0
        for hours in range(1, 47):
            made.steering.tick({}, hours * 3600.0)
        assert made.steering._planned.keys() == {"m", "other"}
        made.steering.came("other", PromptSums.of(100, 100), 1.95 * day_s)
        for hours in range(47, 5 * 24):
            made.steering.tick({}, hours * 3600.0)
        assert made.steering._planned.keys() == {"m"}


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
