"""Several conductors that hear each other have one load and one set of instances, even if some
die."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from itertools import cycle
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from msgspec.structs import replace as replace_fields
from sharingsupport import (
    DEAD_S,
    INTERVAL_S,
    Town,
    column,
    conductor,
    loads,
    own_is_zero,
    request,
    spec,
)

from tiffin.conductor.errors import UnknownModel, UnknownRequest
from tiffin.conductor.records import (
    EVENT_KINDS,
    Decision,
    Load,
    RequestEvent,
    Role,
    Status,
)
from tiffin.conductor.replicas.replica import News
from tiffin.conductor.replicas.shared_records import REMOVED_S
from tiffin.conductor.replicas.states import HeardRow, InstanceRecord, pack

if TYPE_CHECKING:
    from tiffin.conductor.records import InstanceSpec, Request
    from tiffin.conductor.replicas.replica import SharedConductor

POOL = [spec(f"p{n}", Role.PREFILL) for n in range(3)] + [
    spec(f"d{n}", Role.DECODE) for n in range(3)
]


def town(*names: str, **changes: object) -> Town:
    made = Town.of(*names, **changes)
    made.register(*POOL)
    return made


def decided(core: SharedConductor, asked: Request, now: float) -> Decision:
    outcome = core.schedule(asked, now)
    assert isinstance(outcome, Decision)
    return outcome


def idle(core: SharedConductor) -> bool:
    return not any(loads(core).values()) and not core.cluster.others_s.any()


def tell(core: SharedConductor, now: float, request_id: str, *kinds: str) -> None:
    for kind in kinds:
        core.observe(RequestEvent(request_id, kind, 5 if kind == "tokens" else 0), now)


# -- load ------------------------------------------------------------------------------------------


def test_what_one_promises_the_other_counts() -> None:
    both = town("a", "b")
    a, b = both["a"], both["b"]
    decision = decided(a, request("r"), both.now)
    assert idle(b)
    both.exchange()
    for name in ("queued", "queued_tokens", "kv_used_tokens"):
        assert column(a, name) == column(b, name) != {}
    assert column(b, "batch") == {decision.decode: 1}  # the request will run there
    assert b.cluster.others_s.max() > 0.1
    assert own_is_zero([b])
    for name in (decision.prefill, decision.decode):
        assert a.requests_at(name) == b.requests_at(name) == 1
    tell(a, both.now, "r", "prefill_done")
    both.exchange()
    assert [b.requests_at(name) for name in (decision.prefill, decision.decode)] == [0, 1]


def test_all_promises_are_given_back_when_requests_end() -> None:
    both = town("a", "b")
    for number, core in zip(range(20), cycle(both.conductors), strict=False):
        decided(core, request(f"r{number}"), both.now)
    both.pass_s(0.2)
    assert sum(column(both["b"], "kv_used_tokens").values()) == 20 * 4100
    tell(both["a"], both.now, "r0", "prefill_done", "first_token", "tokens")
    for number, core in zip(range(20), cycle(both.conductors), strict=False):
        tell(core, both.now, f"r{number}", "finished")
    both.pass_s(0.2)
    for core in both.conductors:
        assert idle(core)
        assert not len(core.ledger)


def test_requests_that_engines_report_are_not_counted_twice() -> None:
    both = town("a", "b")
    a, b = both["a"], both["b"]
    for number in range(6):
        decided(a, request(f"r{number}"), both.now)
        tell(a, both.now, f"r{number}", "prefill_done")
    both.pass_s(1.0)
    running = column(a, "batch")
    assert sum(running.values()) == 6
    for name, count in running.items():
        b.heartbeat(name, Load(running=count), both.now)  # to either conductor
    both.pass_s(1.0)
    assert column(a, "batch") == column(b, "batch") == running


def test_a_dead_conductors_promises_vanish() -> None:
    three = town("a", "b", "c")
    for number in range(9):
        decided(three["a"], request(f"r{number}"), three.now)
    three.pass_s(0.2)
    assert column(three["b"], "queued")
    three.kill("a")
    three.pass_s(DEAD_S + INTERVAL_S)
    for core in three.conductors:
        assert core.peers == [other.name for other in three.conductors if other is not core]
        assert idle(core)
        assert core.statistics()["sharing"]["deaths"] == 1


def test_without_redis_each_goes_on_alone_and_they_find_together_again() -> None:
    both = town("a", "b")
    a, b = both["a"], both["b"]
    decided(a, request("before"), both.now)
    both.pass_s(0.2)
    both.deaf = {"a", "b"}
    decided(a, request("during-a"), both.now)
    decided(b, request("during-b"), both.now)
    a.drain("p0", both.now)
    b.register(spec("p9", Role.PREFILL), both.now)
    both.pass_s(DEAD_S - INTERVAL_S)
    assert sum(column(b, "queued").values()) == 2
    both.pass_s(2 * INTERVAL_S)
    assert a.peers == b.peers == []
    assert sum(column(b, "queued").values()) == 1
    both.deaf = set()
    both.board.records.clear()  # Redis has lost its data, too
    both.pass_s(0.2)
    assert a.peers == ["b"]
    assert column(a, "queued") == column(b, "queued")
    assert sum(column(b, "queued").values()) == 3
    assert b.cluster.status[b.cluster.row("p0")] is Status.DRAINING
    assert "p9" in a.cluster


def test_a_newcomer_is_told_all() -> None:
    both = town("a", "b")
    decided(both["a"], request("r"), both.now)
    both["a"].drain("p2", both.now)
    both["a"].schema("m", "{canonical}")
    both.pass_s(2.0)
    both.conductors.append(conductor("c"))
    both.pass_s(0.1)
    c = both["c"]
    assert sorted(c.cluster.names) == sorted(one.id for one in POOL)
    assert c.cluster.status[c.cluster.row("p2")] is Status.DRAINING
    assert column(c, "queued") == column(both["a"], "queued")
    assert c.statistics()["sharing"]["peers"] == {"a": "http://a", "b": "http://b"}
    assert set(c.news().schemas) == {("m", "{canonical}")}


def test_a_request_belongs_to_the_conductor_that_decided_it() -> None:
    both = town("a", "b")
    a, b = both["a"], both["b"]
    decided(a, request("r"), both.now)
    both.exchange()
    with pytest.raises(UnknownRequest):
        tell(b, both.now, "r", "prefill_done")
    assert b.decision("r") is None
    decided(b, request("r"), both.now)  # another request of the same name
    tell(a, both.now, "r", "finished")
    both.exchange()
    assert (len(a.ledger), len(b.ledger)) == (0, 1)
    assert column(a, "kv_used_tokens") == column(b, "kv_used_tokens") != {}


def test_a_load_that_can_not_be_ends_nothing() -> None:
    both = town("a", "b")
    odd = replace_fields(
        both["a"].state(both.now), number=9, heard=[HeardRow("d0", 1, 1, Load(running=-1))]
    )
    both["b"].hear(odd, both.now)
    assert idle(both["b"])


def test_a_state_that_is_older_is_passed_over() -> None:
    both = town("a", "b")
    old = both["a"].state(both.now)
    decided(both["a"], request("r"), both.now)
    both.exchange()
    both["b"].hear(old, both.now)
    assert column(both["b"], "queued") == column(both["a"], "queued") != {}


# -- instances -------------------------------------------------------------------------------------


def test_instances_register_with_anybody() -> None:
    both = town("a", "b")
    a, b = both["a"], both["b"]
    assert sorted(b.cluster.names) == sorted(one.id for one in POOL)
    assert {one.id for one in b.news().joined} == {one.id for one in POOL}
    b.register(spec("p9", Role.PREFILL), both.now)
    b.register(spec("p0", Role.PREFILL, batch_max=7), both.now)
    b.remove("p1", both.now)
    b.drain("p2", both.now)
    b.cluster.set_role(b.cluster.row("d0"), Role.MIXED)
    both.exchange()
    assert a.cluster.spec("p9") == spec("p9", Role.PREFILL)
    assert a.cluster.spec("p0").batch_max == 7
    assert "p1" not in a.cluster
    assert a.news().left == ["p1"]
    assert a.cluster.status[a.cluster.row("p2")] is Status.DRAINING
    assert a.cluster.role(a.cluster.row("d0")) is Role.MIXED
    a.register(spec("p1", Role.PREFILL), both.now)
    both.exchange()
    assert "p1" in b.cluster
    assert a.news() == News()
    assert not both["a"].changes(both.now)


def test_what_was_removed_is_not_brought_back_by_one_that_was_cut_off() -> None:
    both = town("a", "b")
    a, b = both["a"], both["b"]
    both.deaf = {"b"}
    a.remove("p1", both.now)
    both.pass_s(DEAD_S + 0.2)
    both.deaf = set()
    both.pass_s(0.1)
    assert "p1" not in a.cluster
    assert "p1" not in b.cluster
    both.now += REMOVED_S
    a.remove("p0", both.now)
    both.pass_s(0.2)
    assert "p1" not in both.board.records, "it is forgotten some time"
    assert "p0" in both.board.records


def test_two_changes_at_the_same_time_both_stand() -> None:
    three = town("a", "b", "c")
    a, b, c = three["a"], three["b"], three["c"]
    b.drain("p0", three.now)
    c.register(replace(c.cluster.spec("p0"), url="http://localhost:9"), three.now)
    b.remove("p1", three.now)
    c.drain("p1", three.now)
    three.pass_s(0.2)
    for core in (a, b, c):
        assert core.cluster.spec("p0").url == "http://localhost:9"
        assert core.cluster.draining[core.cluster.row("p0")]
        assert "p1" not in core.cluster


def test_what_changes_while_it_is_written_is_not_undone() -> None:
    """An exchange takes time, during which the conductor changes its records."""
    both = town("a", "b")
    a = both["a"]
    a.cluster.assign("p0", on=False)
    both.board.write(a, both.now)
    a.cluster.assign("p0", on=True)
    both.board.read(a, both.now)
    both.pass_s(0.2)
    for core in both.conductors:
        assert not core.cluster.draining[core.cluster.row("p0")]


def test_an_instance_that_one_hears_from_is_silent_for_nobody() -> None:
    both = town("a", "b")
    a, b = both["a"], both["b"]
    for _ in range(30):
        for one in POOL:
            a.heartbeat(one.id, Load(running=2), both.now)
            a.heartbeat(one.id, Load(), both.now)  # does not hide the other
        both.pass_s(1.0)
    assert bool(b.cluster.ready[: len(POOL)].all())
    assert column(b, "batch") == {one.id: 2 for one in POOL}
    both.pass_s(b.settings.core.heartbeat_timeout_s + 1)
    assert not b.cluster.ready.any()


@pytest.mark.parametrize("stopped", [True, False], ids=["stopped", "cut off"])
@pytest.mark.parametrize("for_s", [12, 1200], ids=["briefly", "for long"])
def test_one_that_was_away_takes_no_instance_for_gone(stopped: bool, for_s: int) -> None:
    """All instances but p0 have sent their heartbeats to the other conductor."""
    both = town("a", "b")
    a, b = both["a"], both["b"]
    both.pass_s(0.1)
    both.deaf = {"a"}
    for _ in range(for_s):
        both.now += 1.0
        for one in POOL[1:]:
            b.heartbeat(one.id, Load(), both.now)
        both.board.write(b, both.now)
        both.board.read(b, both.now)
        for core in (b,) if stopped else (a, b):
            if core is a:
                core.settle(None, both.now)
            core.tick(both.now)
    both.deaf = set()
    a.tick(both.now)
    assert bool(a.cluster.ready.any()) is stopped
    both.pass_s(0.2)
    for one in POOL[1:]:
        b.heartbeat(one.id, Load(), both.now)
    both.pass_s(0.1)
    kept = POOL[1:] if for_s > b.settings.core.forget_s else POOL
    for core in both.conductors:
        assert sorted(core.cluster.names) == sorted(one.id for one in kept)
        assert all(core.cluster.ready[core.cluster.row(one.id)] for one in POOL[1:])


def test_what_can_not_be_registered_here_is_told_and_harms_nothing() -> None:
    both = town("a", "b")
    records = [
        InstanceRecord("bad", spec("bad", batch_max=0), "mixed"),
        InstanceRecord("odd", spec("other"), "mixed"),
        InstanceRecord("strange", replace(spec("strange"), profile="no-such-profile"), "mixed"),
        InstanceRecord("good", spec("good"), "no-such-role"),
    ]
    both.board.records |= {one.instance: pack(one) for one in records}
    both.board.records["noise"] = b"\xc1" * 30
    both.pass_s(0.2)
    b = both["b"]
    assert sorted({*b.cluster.names} - {one.id for one in POOL}) == ["good"]
    assert b.cluster.role(b.cluster.row("good")) is Role.MIXED
    assert [name for name, _ in b.news().refused] == ["bad", "strange"]
    assert "bad" in both.board.records, "others may be able to"


def test_a_model_is_unknown_only_until_the_others_were_heard() -> None:
    a = conductor("a")
    with pytest.raises(UnknownModel):
        a.schedule(request("r"), 0.0)


# -- herds -----------------------------------------------------------------------------------------


def herd(sharing: bool, conductors: int = 4, idle_s: float = 8.0) -> np.ndarray:
    """All instances but one are busy; many requests come to all conductors at once. Returns the
    seconds of prefill that each instance then got; the idle one is "p0"."""
    names = [f"c{number}" for number in range(conductors)]
    made = town(*names, policy={"name": "least_loaded"})
    for core in made.conductors:
        for one in ("p1", "p2"):
            tokens = int(idle_s / core.cluster.c1[core.cluster.row(one)])
            core.heartbeat(one, Load(queued_prefill_tokens=tokens), made.now)
        core.heartbeat("p0", Load(queued_prefill_tokens=0), made.now)
    made.pass_s(0.5)
    if not sharing:
        made.deaf = set(names)
    given = dict.fromkeys(("p0", "p1", "p2"), 0.0)
    for turn in range(30):
        for core in made.conductors:
            decision = decided(core, request(f"{core.name}-{turn}", 4000), made.now)
            flight = core.ledger.get(decision.request_id)
            assert flight is not None
            given[decision.prefill] += flight.prefill_s
        made.exchange()  # an interval without any computing
    return np.array(list(given.values()))


def test_conductors_that_hear_each_other_do_not_all_fill_the_same_instance() -> None:
    alone, together = herd(sharing=False), herd(sharing=True)
    assert alone.sum() == pytest.approx(together.sum())
    one_s = together.sum() / 120
    busy_s = np.array([0.0, 8.0, 8.0])
    fair_s = (together.sum() + busy_s.sum()) / 3 - busy_s
    # The idle one gets too much, at most what the other conductors decide before they hear of it.
    assert np.abs(together - fair_s).max() <= 4 * one_s
    assert (alone - fair_s)[0] > 3 * np.abs(together - fair_s).max()


def test_decodes_that_others_have_promised_are_kept_clear_of() -> None:
    both = town("a", "b")
    a, b = both["a"], both["b"]
    for number in range(30):
        decided(a, request(f"a{number}", 4000), both.now)
    both.exchange()
    placed = [decided(b, request(f"b{number}", 4000), both.now).decode for number in range(30)]
    both.exchange()
    assert max(map(placed.count, placed)) - min(map(placed.count, set(placed))) <= 2
    used = column(b, "kv_used_tokens")
    assert max(used.values()) - min(used.values()) <= 2 * 4100


# -- random events ---------------------------------------------------------------------------------

IDS = [f"r{number}" for number in range(8)]
ids = st.sampled_from(IDS)
who = st.integers(0, 2)
instances = st.sampled_from(POOL)


class Towns(RuleBasedStateMachine):
    """Requests, events, changes of instances, deaths, restarts and outages at any conductor."""

    @initialize()
    def begin(self) -> None:
        self.town = town("a", "b", "c", core={"decision_ttl_s": 20.0})
        self.born = 0

    def core(self, number: int) -> SharedConductor:
        return self.town.conductors[number]

    @rule(number=who, name=ids)
    def schedule(self, number: int, name: str) -> None:
        with contextlib.suppress(UnknownModel):  # a new conductor has not heard of it yet
            outcome = self.core(number).schedule(request(name), self.town.now)
            assert outcome.request_id == name

    @rule(number=who, name=ids, kind=st.sampled_from(EVENT_KINDS))
    def event(self, number: int, name: str, kind: str) -> None:
        core = self.core(number)
        known = core.ledger.get(name) is not None
        try:
            tell(core, self.town.now, name, kind)
        except UnknownRequest:
            assert not known

    @rule(number=who, one=instances, what=st.sampled_from(("drain", "remove", "change", "add")))
    def change(self, number: int, one: InstanceSpec, what: str) -> None:
        core, here = self.core(number), one.id in self.core(number).cluster
        if what == "add" and not here:
            core.register(one, self.town.now)
        elif what == "change":
            core.register(replace(one, batch_max=self.born + 7), self.town.now)
        elif what == "drain" and here:
            core.drain(one.id, self.town.now)
        elif what == "remove" and here:
            core.remove(one.id, self.town.now)

    @rule(number=who, running=st.integers(0, 9))
    def heartbeat(self, number: int, running: int) -> None:
        if "d0" in self.core(number).cluster:
            self.core(number).heartbeat("d0", Load(running=running), self.town.now)

    @rule(number=who)
    def silence(self, number: int) -> None:
        self.town.deaf ^= {self.core(number).name}

    @rule()
    def redis_is_emptied(self) -> None:
        self.town.board.records.clear()
        self.town.board.states.clear()

    @rule(number=who)
    def replace_one(self, number: int) -> None:
        """kill -9 a conductor, and start another one."""
        self.born += 1
        name = self.core(number).name
        self.town.deaf.discard(name)
        self.town.kill(name)
        self.town.conductors.append(conductor(f"n{self.born}", core={"decision_ttl_s": 20.0}))

    @rule(seconds=st.sampled_from((0.05, 0.5, 2.5)))
    def wait(self, seconds: float) -> None:
        self.town.pass_s(seconds)

    @invariant()
    def own_load_is_of_flights(self) -> None:
        for core in self.town.conductors if hasattr(self, "town") else ():
            reserved = sum(sum(flight.shares.values()) for flight in core.ledger)
            here = sum(core.cluster.own_kv_used_tokens)
            assert here <= reserved  # nothing is left of a removed instance
            core.horizon.check()

    def teardown(self) -> None:
        """After exchanges among all, they agree; after the end of all requests no load is left."""
        if not hasattr(self, "town"):
            return
        self.town.deaf = set()
        self.town.pass_s(DEAD_S + 1.0)
        first, *others = self.town.conductors
        for core in others:
            assert column(core, "kv_used_tokens") == column(first, "kv_used_tokens")
            assert column(core, "queued") == column(first, "queued")
            for name in first.cluster.names:
                assert core._records.mine(name) == first._records.mine(name)
            assert len(core.cluster) == len(first.cluster)
        for core in self.town.conductors:
            for flight in core.ledger:
                tell(core, self.town.now, flight.request.id, "finished")
        if "d0" in first.cluster:
            first.heartbeat("d0", Load(running=0), self.town.now)
        self.town.pass_s(0.2)
        for core in self.town.conductors:
            assert idle(core)
            assert not len(core.queues)


Towns.TestCase.settings = hypothesis_settings(max_examples=10, stateful_step_count=25)
TestTowns = Towns.TestCase
