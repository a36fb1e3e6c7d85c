"""Of several conductors one leads: it alone sends orders, and ends flips of dead conductors."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from plannersupport import INTERVAL_S as PLAN_S
from plannersupport import fleet, interval, planner
from sharingsupport import DEAD_S, Town, conductor, keys, request, spec

from tiffin.conductor.errors import Conflict
from tiffin.conductor.events.index_updates import Added
from tiffin.conductor.pool.instance_orders import HandOverRequest
from tiffin.conductor.pool.leader import FlipsElsewhere, LeaderLease
from tiffin.conductor.pool.orders import Copy, Ended, NodeSpace
from tiffin.conductor.pool.role_flip import SetRole, Verify
from tiffin.conductor.records import Decision, Load, RequestEvent, Role, Status

if TYPE_CHECKING:
    from tiffin.conductor.pool.role_flip import Action
    from tiffin.conductor.replicas.replica import SharedConductor

GIB = 1 << 30
NODES = {f"node-{name}": NodeSpace(f"node-{name}", 64 * GIB, 32 * GIB) for name in "abc"}
TOLD = {"role_url": "http://localhost/role"}
P, D = Role.PREFILL, Role.DECODE


def flipped(core: SharedConductor, instance: str) -> tuple[Status, Role]:
    row = core.cluster.row(instance)
    return core.cluster.status[row], core.cluster.role(row)


# -- the lease -------------------------------------------------------------------------------------


class TestLease:
    def test_it_ends_by_the_time_of_the_question(self) -> None:
        lease = LeaderLease("a", 4.0)
        assert not lease.holds(0.0)
        lease.answered("a", 1.0)
        assert lease.holds(4.9)
        assert not lease.holds(5.0)
        assert lease.leader(5.0) == ""

    def test_another_has_it_or_it_is_given_back(self) -> None:
        lease = LeaderLease("a", 4.0)
        lease.answered("b", 1.0)
        assert (lease.holds(1.0), lease.leader(1.0)) == (False, "b")
        lease.answered("a", 2.0)
        lease.resign()
        assert not lease.holds(2.0)

    def test_flips_of_others_are_orphans_when_these_were_silent_for_long_enough(self) -> None:
        alive = {"b"}
        flips = FlipsElsewhere(alive, 2.0)
        flips.put("i1", D, "b", 1.0)
        flips.put("i2", P, "c", 1.0)
        assert flips.orphans(2.9) == []  # c's state may not have been received yet
        assert flips.orphans(3.0) == [("i2", P)]
        alive.clear()
        assert flips.orphans(3.0) == [("i1", D), ("i2", P)]
        assert flips.pop("i1")
        assert not flips.pop("i1")
        assert (flips.get("i1"), flips.get("i2")) == (None, (P, "c"))


def test_one_leads_and_another_when_it_dies() -> None:
    town = Town([conductor(name) for name in "abc"])
    assert town.leaders == []
    town.pass_s(1.0)
    [leader] = town.leaders
    town.kill(leader)
    town.pass_s(3.1)  # a lease
    [heir] = town.leaders
    assert heir != leader


def test_who_can_not_renew_leads_no_more_and_nobody_does() -> None:
    town = Town.of("a", "b")
    town.pass_s(1.0)
    town.deaf = {"a", "b"}
    town.pass_s(3.1)
    assert town.leaders == []
    town.deaf = set()
    town.pass_s(1.0)
    assert len(town.leaders) == 1


# -- orders ----------------------------------------------------------------------------------------


def test_only_the_leader_copies_and_its_heir_does_at_once() -> None:
    town = Town.of("a", "b")
    town.register(*(spec(name, node=f"node-{name}", block_bytes=1 << 20) for name in "abc"))
    town.pass_s(1.0)
    shared = keys("system prompt", 7)
    for core in town.conductors:
        core.apply(Added("node-a", "dram", shared), town.now)
        for number in range(30):
            asked = request(f"{core.name}{number}", keys=shared)
            assert isinstance(core.schedule(asked, town.now), Decision)

    def ordered() -> dict[str, int]:
        return {
            core.name: sum(
                isinstance(order, Copy) for order in core.steering.tick(NODES, town.now).orders
            )
            for core in town.conductors
        }

    [leader] = town.leaders
    [other] = {"a", "b"} - {leader}
    assert ordered() == {leader: 2, other: 0}
    town.kill(leader)
    town.pass_s(3.1)
    assert ordered() == {other: 2}


def test_the_planner_of_one_that_does_not_lead_is_ready_to_flip() -> None:
    one, members = planner(), fleet(2, 4)
    for minute in range(5):
        one.observe(interval(3.0))
        plan = one.plan(members, minute * PLAN_S, leads=minute == 4)
        assert plan is not None
        if minute == 3:
            assert (plan.flip, plan.flip_now) == (("i02", P), False)
            assert plan.held_back == "this conductor does not lead"
            assert one.flips.under_way == []
    assert plan is not None
    assert plan.flip_now


def test_after_a_flip_by_another_conductor_the_next_one_waits() -> None:
    one, members = planner(), fleet(2, 4)
    told = []
    for minute in range(9):
        if minute == 2:
            one.flipped_elsewhere(minute * PLAN_S)
        one.observe(interval(3.0))
        plan = one.plan(members, minute * PLAN_S)
        assert plan is not None
        told.append(plan.held_back)
        if plan.flip_now:
            break
    assert told[2:] == [*["the last flip was too short ago"] * 5, ""]


def test_what_others_are_asked_counts_in_the_plan() -> None:
    town = Town.of("a", "b", planner={"interval_s": 10.0})
    town.register(spec("m0"))
    for number in range(20):
        town.conductors[number % 2].schedule(request(f"r{number}"), town.now)
    town.pass_s(0.2)
    for core in town.conductors:
        core.steering.tick({}, town.now + 10.0)
        reasons = {one.name: one.value for one in core.steering.plans()["m"].reasons}
        assert reasons["prompt"] == 4000.0
        assert reasons["rate"] == pytest.approx(20 / 10.0, rel=0.05), core.name


# -- flips of several ------------------------------------------------------------------------------


class Flipping:
    """A leads, B does not; p1 has to get a new role."""

    def __init__(self) -> None:
        self.town = town = Town.of("a", "b")
        self.a, self.b = town["a"], town["b"]
        town.register(spec("p1", P, labels=TOLD), spec("p2", P), spec("d", D))
        assert town.leaders == ["a"]

    def tick(self, core: SharedConductor) -> list[Action]:
        actions = core.steering.tick({}, self.town.now).actions
        self.town.exchange()
        return actions


def test_the_heir_ends_the_flip_of_a_dead_leader() -> None:
    it = Flipping()
    asked = it.a.schedule(request("r"), it.town.now)
    assert isinstance(asked, Decision)
    it.a.flip("p1", D, it.town.now)
    it.town.exchange()
    assert flipped(it.b, "p1") == (Status.DRAINING, P)
    assert it.tick(it.b) == []
    it.town.kill("a")
    it.town.pass_s(3.1)
    assert it.town.leaders == ["b"]
    assert it.tick(it.b) == [SetRole("p1", D)]
    [flip] = it.b.steering.flips()
    assert (flip.instance, flip.old, flip.new, flip.step) == ("p1", P, D, "committing")
    it.b.steering.committed("p1", it.town.now)
    it.b.steering.verified("p1", it.town.now)
    assert flipped(it.b, "p1") == (Status.READY, D)


def test_one_that_may_have_been_told_is_told_again() -> None:
    it = Flipping()
    it.a.flip("p1", D, it.town.now)
    assert it.tick(it.a) == [SetRole("p1", D)]
    assert flipped(it.b, "p1") == (Status.DRAINING, D)
    it.town.kill("a")
    it.town.pass_s(3.1)
    assert it.tick(it.b) == [SetRole("p1", D)]
    assert it.b.steering.committed("p1", it.town.now) == [Verify("p1", D)]
    it.b.steering.verified("p1", it.town.now)
    assert flipped(it.b, "p1") == (Status.READY, D)


def test_who_does_not_lead_leaves_it() -> None:
    it = Flipping()
    it.b.flip("p1", D, it.town.now)  # the conductor that was asked carries it out
    it.town.exchange()
    assert it.tick(it.a) == []  # b lives
    it.town.kill("b")
    it.town.board.leader, it.town.board.leads_until = "c", it.town.now + 3.0
    it.town.pass_s(DEAD_S + 0.1)
    assert it.tick(it.a) == []
    it.town.pass_s(3.1)
    assert it.tick(it.a) == [SetRole("p1", D)]


def test_two_do_not_flip_the_same_and_not_more_than_one_at_once() -> None:
    it = Flipping()
    it.a.flip("p1", D, it.town.now)
    it.town.exchange()
    for name in ("p1", "d"):
        with pytest.raises(Conflict):
            it.b.flip(name, D if name == "p1" else P, it.town.now)
    assert it.b.steering.fleet("m")[0].ready is False


def test_of_two_that_begin_together_one_goes_on() -> None:
    it = Flipping()
    it.a.flip("p1", D, it.town.now)
    it.b.flip("p1", D, it.town.now)  # has not heard yet
    it.town.pass_s(0.2)
    [lost] = it.b.steering.flips()
    assert (lost.step, lost.why) == ("lost", "a flips it")
    actions = it.tick(it.b) + it.tick(it.a)
    assert actions == [SetRole("p1", D)]
    it.a.steering.committed("p1", it.town.now)
    it.a.steering.verified("p1", it.town.now)
    it.town.exchange()
    assert flipped(it.a, "p1") == flipped(it.b, "p1") == (Status.READY, D)


def test_a_drain_elsewhere_ends_a_flip_and_it_gets_no_work_by_it() -> None:
    it = Flipping()
    it.a.schedule(request("r"), it.town.now)
    it.a.flip("p1", D, it.town.now)
    it.town.exchange()
    it.b.drain("p1", it.town.now)
    it.town.pass_s(0.2)
    for _ in range(3):
        it.town.pass_s(1.0)
        assert it.tick(it.a) == it.tick(it.b) == []
    assert flipped(it.a, "p1") == flipped(it.b, "p1") == (Status.DRAINING, P)
    assert [flip.step for flip in it.a.steering.flips()] == ["returned"]


def test_a_flip_whose_instance_was_told_goes_on_but_gives_no_work() -> None:
    it = Flipping()
    it.a.flip("p1", D, it.town.now)
    assert it.tick(it.a) == [SetRole("p1", D)]
    it.b.drain("p1", it.town.now)
    it.town.pass_s(0.2)
    assert it.a.steering.committed("p1", it.town.now) == [Verify("p1", D)]
    it.a.steering.verified("p1", it.town.now)
    it.town.pass_s(0.2)
    assert flipped(it.a, "p1") == flipped(it.b, "p1") == (Status.DRAINING, D)


def test_a_failed_flip_stays_for_people_also_when_its_conductor_dies() -> None:
    it = Flipping()
    it.a.flip("p1", D, it.town.now)
    it.tick(it.a)
    it.a.steering.committed("p1", it.town.now, "it refuses")
    it.town.pass_s(0.2)
    it.town.kill("a")
    it.town.pass_s(3.1)
    assert it.tick(it.b) == []
    assert flipped(it.b, "p1") == (Status.DRAINING, D)


def test_what_is_registered_anew_meanwhile_is_still_flipped() -> None:
    it = Flipping()
    it.a.flip("p1", D, it.town.now)
    it.town.exchange()
    it.b.heartbeat("p1", Load(running=1), it.town.now)
    it.b.register(replace(it.b.cluster.spec("p1"), url="http://localhost:9"), it.town.now)
    it.town.pass_s(0.2)
    assert [flip.step for flip in it.a.steering.flips()] == ["draining"]
    assert flipped(it.a, "p1") == flipped(it.b, "p1") == (Status.DRAINING, P)
    assert it.tick(it.a) == [SetRole("p1", D)]
    it.a.steering.committed("p1", it.town.now)
    it.a.steering.verified("p1", it.town.now)
    it.town.exchange()
    assert flipped(it.a, "p1") == flipped(it.b, "p1") == (Status.READY, D)


def test_a_flip_has_ended_although_another_one_spoke_of_its_instance_meanwhile() -> None:
    """The instance's own report comes to b, which has not heard yet that a is done."""
    it = Flipping()
    it.a.flip("p1", D, it.town.now)
    it.town.exchange()
    it.a.steering.tick({}, it.town.now)
    it.a.steering.committed("p1", it.town.now)
    it.a.steering.verified("p1", it.town.now)
    it.b.register(replace(it.b.cluster.spec("p1"), url="http://localhost:9"), it.town.now)
    it.town.pass_s(0.3)
    assert it.a.steering.flipping() == it.b.steering.flipping() == {}
    assert flipped(it.a, "p1") == flipped(it.b, "p1") == (Status.READY, D)
    assert it.a.cluster.spec("p1").url == "http://localhost:9"
    it.town.kill("a")
    it.town.pass_s(3.1)
    assert it.tick(it.b) == []
    assert it.b.steering.flips() == []


def test_an_instance_that_leaves_is_flipped_by_nobody() -> None:
    it = Flipping()
    it.a.flip("p1", D, it.town.now)
    it.town.exchange()
    assert it.b.steering.flipping() == {"p1": (D, "a")}
    it.a.remove("p1", it.town.now)
    it.town.pass_s(0.2)
    assert it.b.steering.flipping() == {}


# -- further tests ---------------------------------------------------------------------------------


def test_orders_end_for_one_that_leads_no_more() -> None:
    town = Town.of("a")
    [core] = town.conductors
    town.register(*(spec(name, node=f"node-{name}", block_bytes=1 << 20) for name in "ab"))
    town.pass_s(1.0)
    shared = keys("hot", 7)
    core.apply(Added("node-a", "dram", shared), town.now)
    for number in range(30):
        core.schedule(request(f"r{number}", keys=shared), town.now)
    [order] = core.steering.tick(NODES, town.now).orders
    assert isinstance(order, Copy)
    core.lease.answered("another", town.now)
    core.steering.ended(Ended(order.number, blocks=7), town.now)
    assert core.steering.replication.under_way == 0
    assert core.steering.replication.copies(order.target) == list(shared)


def test_what_a_silent_instance_may_be_given_is_told_as_well() -> None:
    town = Town.of("a", "b")
    town.register(spec("m0"))
    a, b = town["a"], town["b"]
    for core in (a, b):
        core.cluster.set_status("m0", Status.LOST)
    town.pass_s(0.2)
    a.cluster.assign("m0", on=False)
    town.pass_s(0.2)
    b.heartbeat("m0", Load(), town.now)
    assert b.cluster.status[0] is Status.DRAINING


def test_each_hands_over_the_requests_that_it_has_placed_whoever_flips() -> None:
    labels = {"orders_url": "http://localhost/orders", "orders": "hand_over"}
    town = Town.of("a", "b", planner={"flips": {"requests": "hand_over"}})
    town.register(spec("p", P), spec("d1", D, labels=labels))
    for core in town.conductors:
        name = f"of {core.name}"
        assert isinstance(core.schedule(request(name), town.now), Decision)
        for kind in ("prefill_done", "first_token", "tokens"):
            event = RequestEvent(name, kind, 5 if kind == "tokens" else 0)
            core.observe(event, town.now)
    town.register(spec("d2", D, labels=labels))
    town["a"].flip("d1", P, town.now)
    town.exchange()
    assert town["a"].requests_at("d1") == 2
    for core in town.conductors:
        [order] = core.steering.tick({}, town.now).hand_overs
        assert order == HandOverRequest("d1", f"of {core.name}", "d2")
        core.moves.ended(order.request_id, town.now)
    town.pass_s(1.0)
    for core in town.conductors:
        assert (core.requests_at("d1"), core.requests_at("d2")) == (0, 2)
    town["a"].steering.tick({}, town.now)
    town.exchange()
    assert flipped(town["b"], "d1") == (Status.READY, P)
