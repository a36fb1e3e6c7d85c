"""Several conductors that hear each other: one state, whoever is asked, and whoever dies."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from sharingsupport import (
    DEAD_S,
    INTERVAL_S,
    Town,
    column,
    conductor,
    keys,
    loads,
    own_is_zero,
    request,
    spec,
)

from tiffin.conductor.core.inflight_requests import RequestPhase
from tiffin.conductor.errors import Conflict, InvalidRequest, UnknownModel, UnknownRequest
from tiffin.conductor.records import (
    EVENT_KINDS,
    Decision,
    Load,
    Rejection,
    RequestEvent,
    Role,
    Status,
)
from tiffin.conductor.replicas.bulletins import EndedRequest, HeardBulletin, Instance, Word, pack
from tiffin.conductor.replicas.replica import TELL_ALL_S

if TYPE_CHECKING:
    from tiffin.conductor.records import Request
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
    return not any(loads(core).values())


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
    assert column(b, "batch") == {decision.decode: 1}  # it will run there
    assert b.cluster.others_s.max() > 0.1
    assert own_is_zero([b])


def test_all_promises_are_given_back_when_requests_end() -> None:
    both = town("a", "b")
    for number, core in zip(range(20), cycle(both.conductors), strict=False):
        decided(core, request(f"r{number}"), both.now)
    both.pass_s(0.2)
    tell(both["a"], both.now, "r0", "prefill_done", "first_token", "tokens")
    both.pass_s(0.2)
    assert loads(both["a"]).keys() == loads(both["b"]).keys()
    assert sum(column(both["b"], "kv_used_tokens").values()) == 20 * 4100
    for number, core in zip(range(20), cycle(both.conductors), strict=False):
        tell(core, both.now, f"r{number}", "finished")
    both.pass_s(0.2)
    for core in both.conductors:
        assert idle(core)
        assert not core.cluster.others_s.any()
        assert not len(core.ledger)
        assert core.statistics()["sharing"]["requests_elsewhere"] == 0


def test_requests_that_engines_report_are_not_counted_twice() -> None:
    both = town("a", "b")
    a, b = both["a"], both["b"]
    placed = [decided(a, request(f"r{n}"), both.now) for n in range(6)]
    for one in placed:
        tell(a, both.now, one.request_id, "prefill_done")
    both.pass_s(1.0)
    running = column(a, "batch")
    assert sum(running.values()) == 6
    for name, count in running.items():
        b.heartbeat(name, Load(running=count), both.now)  # to either conductor
    both.pass_s(1.0)
    assert column(a, "batch") == column(b, "batch") == running


def test_an_instance_is_empty_when_nobody_has_requests_there() -> None:
    both = town("a", "b")
    a, b = both["a"], both["b"]
    decision = decided(a, request("r"), both.now)
    both.exchange()
    for name in (decision.prefill, decision.decode):
        assert a.requests_at(name) == b.requests_at(name) == 1
    tell(b, both.now, "r", "prefill_done")
    both.pass_s(0.1)
    assert [b.requests_at(name) for name in (decision.prefill, decision.decode)] == [0, 1]
    tell(b, both.now, "r", "finished")
    both.pass_s(0.1)
    assert a.requests_at(decision.decode) == b.requests_at(decision.decode) == 0


def test_a_dead_conductors_promises_vanish() -> None:
    three = town("a", "b", "c")
    for number in range(9):
        decided(three["a"], request(f"r{number}"), three.now)
    three.pass_s(0.2)
    assert column(three["b"], "queued")
    three.kill("a")
    three.pass_s(DEAD_S + 0.2)
    for core in three.conductors:
        assert core.peers == [other.name for other in three.conductors if other is not core]
        assert idle(core)
        assert not core.cluster.others_s.any()


def test_a_pool_that_nobody_hears_from_goes_on_alone_and_finds_together_again() -> None:
    both = town("a", "b")
    a, b = both["a"], both["b"]
    decided(a, request("before"), both.now)
    both.pass_s(0.2)
    both.deaf = {"a", "b"}
    decided(a, request("during-a"), both.now)
    decided(b, request("during-b"), both.now)
    both.pass_s(DEAD_S + 0.2)
    assert not a.peers
    assert not b.peers
    assert sum(column(b, "queued").values()) == 1
    both.deaf = set()
    both.pass_s(2 * TELL_ALL_S)
    assert a.peers == ["b"]
    assert column(a, "queued") == column(b, "queued")
    assert sum(column(b, "queued").values()) == 3


def test_a_newcomer_is_told_all() -> None:
    both = town("a", "b")
    decided(both["a"], request("r"), both.now)
    both["a"].drain("p2", both.now)
    both.pass_s(2.0)
    both.conductors.append(conductor("c"))
    both.read["c"] = len(both.log)  # what was said before is gone
    both.pass_s(2 * TELL_ALL_S)
    c = both["c"]
    assert sorted(c.cluster.names) == sorted(one.id for one in POOL)
    assert c.cluster.status[c.cluster.row("p2")] is Status.DRAINING
    assert column(c, "queued") == column(both["a"], "queued")
    assert c.schedule(request("r"), both.now) == replace(
        decided(both["a"], request("r"), both.now), candidates=(), decode_candidates=()
    )


def test_bulletins_that_are_lost_are_made_up_for() -> None:
    both = town("a", "b")
    decided(both["a"], request("lost"), both.now)
    both.exchange()
    tell(both["a"], both.now, "lost", "prefill_done")
    both["a"].bulletins(both.now)  # nobody gets this one
    both.now += INTERVAL_S
    assert sum(column(both["b"], "queued").values()) == 1
    both.pass_s(2 * TELL_ALL_S)
    assert both["b"].statistics()["sharing"]["gaps"] == 1
    assert loads(both["a"])["batch"] == loads(both["b"])["batch"] != {}
    assert column(both["b"], "queued") == {}


# -- requests --------------------------------------------------------------------------------------


def test_the_same_request_gets_the_same_decision_from_everybody() -> None:
    both = town("a", "b")
    a, b = both["a"], both["b"]
    first = decided(a, request("r"), both.now)
    both.exchange()
    again = decided(b, request("r"), both.now)
    assert again.decided_at < both.now  # callers tell by that that it is no new one
    assert again == replace(
        first,
        candidates=(),
        decode_candidates=(),
        decided_at=again.decided_at,
        expires_at=again.expires_at,
    )
    assert again.expires_at == pytest.approx(first.expires_at)
    assert len(b.ledger) == 0
    assert b.statistics()["decided"] == 0
    assert b.decision("r") is not None
    with pytest.raises(Conflict):
        b.schedule(request("r", 5000), both.now)
    with pytest.raises(Conflict):
        b.schedule(request("r", keys=keys("other", 7)), both.now)


def test_events_find_their_request_wherever_they_are_reported() -> None:
    both = town("a", "b")
    a, b = both["a"], both["b"]
    decided(a, request("r"), both.now)
    tell(b, both.now, "r", "prefill_done", "first_token", "tokens")  # b has not heard of it yet
    both.pass_s(0.1)
    flight = a.ledger.get("r")
    assert flight is not None
    assert flight.answered_tokens == 6
    assert [event.kind for event in a.news().events] == ["prefill_done", "first_token", "tokens"]
    tell(b, both.now, "r", "finished")
    both.pass_s(0.1)
    assert not len(a.ledger)
    assert own_is_zero(both.conductors)


def test_that_one_lives_is_passed_on_and_keeps_its_place() -> None:
    both = town("a", "b", core={"decision_ttl_s": 20.0})
    a, b = both["a"], both["b"]
    decided(a, request("r"), both.now)
    for _ in range(3):
        both.pass_s(12.0)
        tell(b, both.now, "r", "alive")
    both.pass_s(2 * DEAD_S + 0.1)  # what was passed on has been heard
    assert sum(column(b, "queued").values()) == len(a.ledger) == 1
    both.kill("a")
    both.pass_s(DEAD_S + 0.1)
    assert not len(b.ledger)
    tell(b, both.now, "r", "alive")
    flight = b.ledger.get("r")
    assert flight is not None
    assert (flight.phase, flight.expires_at) == (RequestPhase.PREFILL, both.now + 20.0)


def test_which_route_has_won_a_race_is_passed_on() -> None:
    both = town("a", "b")
    won = RequestEvent("r", "first_token", route=("p1", "d0"))
    decided(both["a"], request("r"), both.now)
    both["b"].observe(won, both.now)
    both.pass_s(0.1)
    assert both["a"].news().events == [won]


def test_an_event_that_makes_no_sense_is_refused_at_once() -> None:
    both = town("a", "b")
    with pytest.raises(InvalidRequest):
        both["b"].observe(RequestEvent("r", "exploded"), both.now)
    alone = conductor("alone")
    with pytest.raises(UnknownRequest):
        alone.observe(RequestEvent("r", "finished"), 0.0)


def test_another_one_takes_over_what_a_dead_one_had_in_flight() -> None:
    both = town("a", "b")
    a, b = both["a"], both["b"]
    first = decided(a, request("asked"), both.now)
    decided(a, request("told"), both.now)
    tell(a, both.now, "told", "prefill_done")
    both.pass_s(60.1)  # it says so again after half of the time that it may be silent for
    both.kill("a")
    both.pass_s(DEAD_S + 0.1)
    assert not column(b, "kv_used_tokens")
    for one in POOL:
        b.heartbeat(one.id, Load(), both.now)  # what is silent is given nothing

    tell(b, both.now, "told", "tokens")
    again = decided(b, request("asked"), both.now)
    assert (again.prefill, again.decode) == (first.prefill, first.decode)
    assert b.statistics()["sharing"]["adopted"] == 2
    assert sum(column(b, "kv_used_tokens").values()) == 2 * 4100
    assert sum(column(b, "batch").values()) == 1

    with pytest.raises(Conflict):
        b.schedule(request("told", keys=keys("other", 7)), both.now)
    assert decided(b, request("told"), both.now).decode == next(iter(column(b, "batch")))
    lengths = b.lengths.predict(replace(request("x"), output_tokens=None))
    tell(b, both.now, "told", "finished")
    tell(b, both.now, "asked", "finished")
    assert b.lengths.predict(replace(request("x"), output_tokens=None)) == lengths
    assert own_is_zero([b])
    b.horizon.check()
    assert not len(b.horizon)


def test_events_that_a_dying_conductor_did_not_get_are_made_up_for() -> None:
    both = town("a", "b")
    a, b = both["a"], both["b"]
    for name in ("ends", "runs"):
        decided(a, request(name), both.now)
    both.pass_s(0.1)
    both.kill("a")
    tell(b, both.now, "ends", "prefill_done", "finished")
    tell(b, both.now, "runs", "prefill_done", "tokens")
    both.pass_s(DEAD_S + 0.1)
    assert b.ledger.get("ends") is None
    flight = b.ledger.get("runs")
    assert flight is not None
    assert flight.answered_tokens == 5
    assert sum(column(b, "kv_used_tokens").values()) == 4100


def test_of_two_that_took_the_same_request_over_one_gives_it_up() -> None:
    three = town("a", "b", "c")
    decided(three["a"], request("r"), three.now)
    three.pass_s(0.1)
    three.kill("a")
    three.pass_s(DEAD_S + 0.1)
    for name in ("b", "c"):
        tell(three[name], three.now, "r", "prefill_done")
    assert len(three["b"].ledger) == len(three["c"].ledger) == 1
    three.pass_s(0.2)
    assert [len(core.ledger) for core in three.conductors] == [0, 1]
    for core in three.conductors:
        assert sum(column(core, "batch").values()) == 1
    tell(three["b"], three.now, "r", "finished")
    three.pass_s(0.2)
    assert own_is_zero(three.conductors)


def test_a_conductor_that_was_only_slow_gives_up_what_was_taken_over() -> None:
    both = town("a", "b")
    a, b = both["a"], both["b"]
    decided(a, request("taken"), both.now)
    decided(a, request("kept"), both.now)
    both.pass_s(0.1)
    both.deaf = {"a"}
    both.pass_s(DEAD_S + 0.1)
    tell(b, both.now, "taken", "prefill_done")
    both.deaf = set()
    both.pass_s(2 * TELL_ALL_S)
    assert [flight.request.id for flight in a.ledger] == ["kept"]
    assert [flight.request.id for flight in b.ledger] == ["taken"]
    assert a.statistics()["sharing"]["yielded"] == 1
    for core in both.conductors:
        assert sum(column(core, "kv_used_tokens").values()) == 2 * 4100


def test_two_that_are_asked_at_the_same_time_agree_afterwards() -> None:
    both = town("a", "b")
    a, b = both["a"], both["b"]
    decided(a, request("r"), both.now)
    decided(b, request("r"), both.now + 0.01)
    both.pass_s(0.2)
    assert not len(a.ledger)
    assert len(b.ledger) == 1  # it was asked last: its answer is used
    assert column(a, "kv_used_tokens") == column(b, "kv_used_tokens")
    assert sum(column(a, "kv_used_tokens").values()) == 4100


def test_a_decision_whose_instance_has_left_is_made_anew_by_whoever_is_asked() -> None:
    both = town("a", "b")
    a, b = both["a"], both["b"]
    first = decided(a, request("r"), both.now)
    both.exchange()
    b.remove(first.prefill, both.now)
    both.pass_s(0.1)
    again = decided(b, request("r"), both.now)
    assert again.prefill != first.prefill
    both.pass_s(0.2)
    assert not len(a.ledger)
    assert column(a, "queued") == column(b, "queued") == {again.prefill: 1}


def test_a_lost_conductors_requests_expire_everywhere() -> None:
    both = town("a", "b")
    decided(both["a"], request("r"), both.now)
    both.exchange()
    both.kill("a")
    both.pass_s(DEAD_S)
    both.now += both["b"].settings.core.decision_ttl_s
    both.exchange()
    assert both["b"].statistics()["sharing"]["requests_elsewhere"] == 0
    with pytest.raises(UnknownRequest):
        both["b"].observe(RequestEvent("r", "finished"), both.now)


def test_a_decision_does_not_wait_to_be_told_in_a_burst() -> None:
    woken = []
    a = conductor("a")
    a.wake = lambda: woken.append(True)
    a.register(spec("m0"), 0.0)
    for number in range(2 * a.sharing.burst):
        decided(a, request(f"r{number}", 600), 0.0)
    assert len(woken) == 1
    assert a.bulletins(0.0)


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
    both.exchange()
    assert a.cluster.spec("p9") == spec("p9", Role.PREFILL)
    assert a.cluster.spec("p0").batch_max == 7
    assert "p1" not in a.cluster
    assert a.news().left == ["p1"]
    assert a.cluster.status[a.cluster.row("p2")] is Status.DRAINING
    a.register(spec("p1", Role.PREFILL), both.now)
    both.exchange()
    assert "p1" in b.cluster


def test_a_new_role_is_known_to_all() -> None:
    both = town("a", "b")
    a, b = both["a"], both["b"]
    a.cluster.set_role(a.cluster.row("p0"), Role.DECODE)
    both.exchange()
    assert b.cluster.role(b.cluster.row("p0")) is Role.DECODE


def test_what_was_removed_is_not_brought_back_by_who_missed_it() -> None:
    both = town("a", "b")
    a, b = both["a"], both["b"]
    both.deaf = {"b"}
    a.remove("p1", both.now)
    both.pass_s(DEAD_S + 0.2)
    both.deaf = set()
    both.pass_s(2 * TELL_ALL_S)
    assert "p1" not in a.cluster
    assert "p1" not in b.cluster


def test_the_last_change_counts_even_by_a_clock_that_is_late() -> None:
    both = town("a", "b")
    late = both["b"]
    stamped = Instance("x", both.now + 3600.0, spec("x"), "mixed")  # by a clock that is early
    (raw,), _ = pack("z", 0, [stamped], whole=True)
    both.log.append(raw)
    both.exchange()
    late.remove("x", both.now)
    both.exchange()
    assert "x" not in both["a"].cluster


def test_an_instance_that_one_hears_from_is_silent_for_nobody() -> None:
    both = town("a", "b")
    a, b = both["a"], both["b"]
    for _ in range(30):
        for one in POOL:
            a.heartbeat(one.id, Load(running=2), both.now)
        both.pass_s(1.0)
    assert bool(b.cluster.ready[: len(POOL)].all())
    assert column(b, "batch") == {one.id: 2 for one in POOL}
    both.pass_s(b.settings.core.heartbeat_timeout_s + 1)
    assert not b.cluster.ready.any()


@pytest.mark.parametrize("owner_lives", [True, False])
def test_what_is_placed_at_a_silent_one_stays_if_nobody_else_can_take_it(owner_lives: bool) -> None:
    both = town("a", "b")
    a, b = both["a"], both["b"]
    first = decided(a, request("r"), both.now)
    both.pass_s(0.1)
    if not owner_lives:
        both.kill("a")
    both.pass_s(b.settings.core.heartbeat_timeout_s + 1)
    assert not b.cluster.ready.any()
    again = decided(b, request("r"), both.now)
    assert (again.prefill, again.decode) == (first.prefill, first.decode)
    assert b.statistics()["rejected"] == 0
    assert b.statistics()["sharing"]["adopted"] == (0 if owner_lives else 1)
    for name in {one.id for one in POOL} - {first.prefill}:
        b.heartbeat(name, Load(), both.now)
    elsewhere = decided(b, request("r"), both.now)
    assert elsewhere.prefill != first.prefill
    both.pass_s(0.2)
    assert [len(core.ledger) for core in both.conductors] == ([0, 1] if owner_lives else [1])


@pytest.mark.parametrize("mine", [True, False])
def test_what_a_request_avoids_is_the_same_to_all(mine: bool) -> None:
    """Also an instance that has done its part."""
    both = town("a", "b")
    first = decided(both["a"], request("r"), both.now)
    tell(both["a"], both.now, "r", "prefill_done")
    both.pass_s(60.1)  # it says so again after half of the time that it may be silent for
    for one in POOL:
        both["a"].heartbeat(one.id, Load(), both.now)
    both.pass_s(0.1)
    asked = both["a" if mine else "b"]
    again = decided(asked, request("r", exclude=(first.prefill,)), both.now)
    assert again.prefill != first.prefill
    none = request("r", exclude=tuple(one.id for one in POOL))
    assert isinstance(asked.schedule(none, both.now), Rejection)


def test_who_decides_anew_twice_keeps_it_whatever_the_clocks_say() -> None:
    """Two engines refused within one interval, and the clock of the first conductor is ahead."""
    both = town("a", "b")
    a, b = both["a"], both["b"]
    a._unix_offset_s = 0.5
    first = decided(a, request("r"), both.now)
    both.exchange()
    second = decided(b, request("r", exclude=(first.prefill,)), both.now)
    third = decided(b, request("r", exclude=(first.prefill, second.prefill)), both.now)
    both.pass_s(0.2)
    assert [len(core.ledger) for core in (a, b)] == [0, 1]
    assert decided(a, request("r"), both.now).prefill == third.prefill


def test_what_is_refused_anew_keeps_no_place_anywhere() -> None:
    """Another conductor than its own finds nobody who may take it: nobody will tell its own."""
    both = town("a", "b")
    decided(both["a"], request("r"), both.now)
    both.pass_s(0.1)
    none = request("r", exclude=tuple(one.id for one in POOL))
    assert isinstance(both["b"].schedule(none, both.now), Rejection)
    both.pass_s(0.2)
    assert own_is_zero(both.conductors)
    assert not any(column(core, "kv_used_tokens") for core in both.conductors)
    assert not any(core.statistics()["sharing"]["requests_elsewhere"] for core in both.conductors)


def test_two_changes_of_the_same_time_are_one_to_all() -> None:
    """a's clock is ahead, so what b and c then say of an instance both follow just after it."""
    three = Town.of("a", "b", "c")
    a, b, c = three["a"], three["b"], three["c"]
    a._registry._unix_offset_s = 1.0
    three.register(*POOL)
    three.pass_s(0.1)
    b.drain("p0", three.now)
    c.register(replace(c.cluster.spec("p0"), url="http://localhost:9"), three.now)
    three.pass_s(0.2)
    assert b._registry.changed_at("p0") == c._registry.changed_at("p0")
    assert {core.cluster.spec("p0").url for core in (a, b, c)} == {""}
    assert all(core.cluster.draining[core.cluster.row("p0")] for core in (a, b, c))


def test_a_heartbeat_without_numbers_does_not_hide_one_with_them() -> None:
    both = town("a", "b")
    both["a"].heartbeat("d0", Load(running=3), both.now)
    both["a"].heartbeat("d0", Load(), both.now)
    both.exchange()
    assert column(both["b"], "batch") == {"d0": 3}


def test_schemas_are_known_to_all() -> None:
    both = town("a", "b")
    both["a"].schema("m", "{canonical}")
    both["a"].schema("huge", "x" * 100_000)
    both.exchange()
    assert both["b"].news().schemas == [("m", "{canonical}")]
    assert both["b"].news().schemas == []


def test_words_that_make_no_sense_are_passed_over() -> None:
    b = conductor("b")
    words: list[Word] = [
        HeardBulletin("nobody", Load(running=1)),
        EndedRequest(["nothing"]),
        Instance("bad", 1.0, spec("bad", batch_max=0), "mixed"),
        Instance("odd", 1.0, spec("other"), "mixed"),
        Instance("strange", 1.0, replace(spec("strange"), profile="no-such-profile"), "mixed"),
        Instance("good", 1.0, spec("good"), "no-such-role"),
    ]
    (raw,), _ = pack("a", 0, words, whole=True)
    for one in (raw, raw, b"", b"\xc1" * 30):
        b.hear(one, 0.0)
    assert b.cluster.names == ["good"]
    assert b.cluster.role(b.cluster.row("good")) is Role.MIXED
    assert b.statistics()["sharing"]["ignored"] == 3 + 2


def test_a_model_is_unknown_only_until_the_others_were_heard() -> None:
    a = conductor("a")
    with pytest.raises(UnknownModel):
        a.schedule(request("r"), 0.0)


# -- herds -----------------------------------------------------------------------------------------


def herd(sharing: bool, conductors: int = 4, idle_s: float = 8.0) -> np.ndarray:
    """Everybody is busy but one instance; many requests come to all conductors at once. Seconds of
    prefill that each instance has then been given: the idle one is "p0"."""
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
        made.exchange()  # an interval, in which nothing is computed
    return np.array(list(given.values()))


def test_conductors_that_hear_each_other_do_not_all_fill_the_same_instance() -> None:
    alone, together = herd(sharing=False), herd(sharing=True)
    assert alone.sum() == pytest.approx(together.sum())
    one_s = together.sum() / 120
    busy_s = np.array([0.0, 8.0, 8.0])
    fair_s = (together.sum() + busy_s.sum()) / 3 - busy_s
    # Too much for the idle one, at most what the others decide before they hear of it.
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


# -- whatever happens ------------------------------------------------------------------------------

IDS = [f"r{number}" for number in range(8)]
NAMES = ("a", "b", "c")
ids = st.sampled_from(IDS)
who = st.integers(0, len(NAMES) - 1)


class Towns(RuleBasedStateMachine):
    """Requests, events, deaths, restarts and silence, at whichever conductor."""

    @initialize()
    def begin(self) -> None:
        self.town = town(*NAMES, core={"decision_ttl_s": 20.0})
        self.born = 0

    def core(self, number: int) -> SharedConductor:
        return self.town.conductors[number % len(self.town.conductors)]

    @rule(number=who, name=ids)
    def schedule(self, number: int, name: str) -> None:
        outcome = self.core(number).schedule(request(name), self.town.now)
        assert outcome.request_id == name

    @rule(number=who, name=ids, kind=st.sampled_from(EVENT_KINDS))
    def event(self, number: int, name: str, kind: str) -> None:
        core = self.core(number)
        try:
            tell(core, self.town.now, name, kind)
        except UnknownRequest:
            assert not core.peers or core.ledger.get(name) is None

    @rule(number=who, running=st.integers(0, 9))
    def heartbeat(self, number: int, running: int) -> None:
        self.core(number).heartbeat("d0", Load(running=running), self.town.now)

    @rule(number=who)
    def silence(self, number: int) -> None:
        self.town.deaf ^= {self.core(number).name}

    @rule(number=who)
    def replace_one(self, number: int) -> None:
        """kill -9, and another one is started."""
        self.born += 1
        name = self.core(number).name
        self.town.deaf.discard(name)
        self.town.kill(name)
        newcomer = conductor(f"n{self.born}", core={"decision_ttl_s": 20.0})
        self.town.read[newcomer.name] = len(self.town.log)
        self.town.conductors.append(newcomer)
        for one in POOL:  # which instances do with their heartbeats
            newcomer.register(one, self.town.now)

    @rule(seconds=st.sampled_from((0.05, 0.5, 2.5)))
    def wait(self, seconds: float) -> None:
        self.town.pass_s(seconds)

    @invariant()
    def own_load_is_of_flights(self) -> None:
        if not hasattr(self, "town"):
            return
        for core in self.town.conductors:
            reserved = sum(sum(flight.shares.values()) for flight in core.ledger)
            assert int(core.cluster.own_kv_used_tokens.sum()) == reserved
            core.horizon.check()

    def teardown(self) -> None:
        """When all hear each other for a while, they know the same; in the end nothing is left."""
        if not hasattr(self, "town"):
            return
        self.town.deaf = set()
        self.town.pass_s(DEAD_S + 2 * TELL_ALL_S)
        cores = self.town.conductors
        flights = [flight.request.id for core in cores for flight in core.ledger]
        assert len(flights) == len(set(flights))
        for core in cores:
            assert column(core, "kv_used_tokens") == column(cores[0], "kv_used_tokens")
            assert column(core, "queued") == column(cores[0], "queued")
        for name in IDS:
            tell(cores[0], self.town.now, name, "finished")
        self.town.pass_s(0.2)
        assert own_is_zero(cores)
        for core in cores:
            core.heartbeat("d0", Load(running=0), self.town.now)
            self.town.pass_s(0.5)
            assert idle(core)
            assert not len(core.ledger)
            assert not len(core.queues)


Towns.TestCase.settings = hypothesis_settings(max_examples=10, stateful_step_count=20)
TestTowns = Towns.TestCase
