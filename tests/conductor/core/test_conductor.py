"""The conductor as a whole: its invariants hold after any events in any order."""

from __future__ import annotations

from collections import Counter

import msgspec
import numpy as np
import pytest
from coresupport import (
    BLOCK,
    OWN,
    PROFILE,
    conductor,
    keys,
    nothing_is_promised,
    nothing_moves,
    prompt,
    spec,
    tell,
)
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tiffin.conductor.core.inflight_requests import RequestPhase
from tiffin.conductor.core.settings import Settings, patched
from tiffin.conductor.cost import latency_profiles
from tiffin.conductor.errors import (
    Conflict,
    InvalidRequest,
    UnknownInstance,
    UnknownModel,
    UnknownRequest,
)
from tiffin.conductor.events.index_updates import Added
from tiffin.conductor.prefill import policy_registry
from tiffin.conductor.records import (
    EVENT_KINDS,
    Decision,
    InstanceSpec,
    Load,
    Objectives,
    Rejection,
    Request,
    RequestEvent,
    Role,
    Status,
)


class TestOneRequest:
    def test_from_decision_to_its_end(self) -> None:
        made = conductor(spec("p", Role.PREFILL), spec("d", Role.DECODE))
        decision = made.schedule(prompt("a"), 1.0)
        assert isinstance(decision, Decision)
        assert (decision.prefill, decision.decode) == ("p", "d")
        p, d = made.cluster.row("p"), made.cluster.row("d")
        assert made.cluster.queued[p] == 1
        assert made.cluster.kv_used_tokens[d] > 8 * BLOCK
        assert made.cluster.batch[d] == 0
        tell(made, "a", "prefill_done", "first_token", now=2.0)
        assert made.cluster.queued[p] == 0
        assert made.cluster.batch[d] == 1
        assert made.cluster.context_tokens[d] == 8 * BLOCK + 10
        tell(made, "a", "tokens", now=2.5, tokens=20)
        assert made.cluster.context_tokens[d] == 8 * BLOCK + 30
        tell(made, "a", "finished", now=3.0)
        assert nothing_is_promised(made)
        assert len(made.ledger) == 0
        with pytest.raises(UnknownRequest):
            tell(made, "a", "finished", now=3.0)
        assert made.decision("a") is decision

    def test_what_else_engines_say_prolongs_it(self) -> None:
        made = conductor(spec("p", Role.PREFILL), spec("d", Role.DECODE))
        decision = made.schedule(prompt("a"), 1.0)
        assert isinstance(decision, Decision)
        ttl_s = made.settings.core.decision_ttl_s
        for number, kind in enumerate(("prefill_began", "prefill_done", "handed_over"), 1):
            now = 1.0 + number * 0.9 * ttl_s
            assert made.tick(now) == []
            tell(made, "a", kind, now=now)
        row = made.cluster.row("d")
        assert made.cluster.batch[row] == 1
        tell(made, "a", "handed_over", "first_token", "finished", now=now)
        assert nothing_is_promised(made)

    def test_its_kv_is_on_the_way_until_it_is_handed_over(self) -> None:
        """Others that need the same network card wait for it."""
        made = conductor(spec("p", Role.PREFILL), spec("d", Role.DECODE))
        node = int(made.cluster.node[made.cluster.row("p")])
        nbytes = (160 << 20) * (8 * BLOCK + 10) // BLOCK

        def seconds(now: float) -> float:
            return float(made.transfers.seconds(node, 1, -1, 1 << 30, now))

        idle_s = seconds(1.0)
        decision = made.schedule(prompt("a"), 1.0)
        assert isinstance(decision, Decision)
        assert (decision.prefill, decision.decode) == ("p", "d")
        assert made.transfers.in_flight_bytes(node) == 0, "nothing is there to be moved yet"
        tell(made, "a", "prefill_done", now=2.0)
        assert made.transfers.in_flight_bytes(node) == nbytes
        sending_s = nbytes / made.settings.transfers.link_bandwidth_bytes_s
        assert seconds(2.0) == pytest.approx(idle_s + sending_s)
        assert seconds(2.0 + sending_s) == pytest.approx(idle_s), "it can have been sent"
        tell(made, "a", "first_token", now=2.001)  # the prefill itself gives it
        assert seconds(2.001) == pytest.approx(idle_s + sending_s - 0.001)
        tell(made, "a", "handed_over", now=2.1)
        assert seconds(2.1) == idle_s
        tell(made, "a", "handed_over", "tokens", "finished", now=3.0, tokens=3)
        assert made.transfers.in_flight_bytes(node) == 0

    def test_tokens_that_were_decoded_had_its_kv(self) -> None:
        """An older gateway does not say that it was handed over."""
        made = conductor(spec("p", Role.PREFILL), spec("d", Role.DECODE))
        made.schedule(prompt("a"), 1.0)
        tell(made, "a", "prefill_done", "first_token", now=2.0)
        node = made.cluster.find_node("node-p")
        tell(made, "a", "tokens", now=2.1)  # none yet
        assert made.transfers.in_flight_bytes(node) > 0
        tell(made, "a", "tokens", now=2.2, tokens=1)
        assert made.transfers.in_flight_bytes(node) == 0

    def test_what_it_fetches_is_on_the_way_until_it_has_come(self) -> None:
        made = conductor(spec("p", Role.PREFILL), spec("q", Role.PREFILL), spec("d", Role.DECODE))
        made.apply(Added("node-p", "dram", keys("a", 8)), 0.5)
        made.drain("p", 0.5)  # who has the blocks gets nothing new, and lends them
        decision = made.schedule(prompt("a"), 1.0)
        assert isinstance(decision, Decision)
        (fetch,) = decision.fetches
        assert (decision.prefill, fetch.source, fetch.tier) == ("q", "node-p", "dram")
        node = made.cluster.node_number("node-p")
        assert made.transfers.in_flight_bytes(node) == fetch.nbytes == 8 * (160 << 20)
        tell(made, "a", "fetched", "fetched", now=1.1)
        assert made.transfers.in_flight_bytes(node) == 0
        tell(made, "a", "prefill_done", now=2.0)
        handed_over = made.transfers.in_flight_bytes(made.cluster.node_number("node-q"))
        tell(made, "a", "fetched", now=2.1)  # late: it is not the end of the hand-over
        assert made.transfers.in_flight_bytes(made.cluster.node_number("node-q")) == handed_over > 0

    @pytest.mark.parametrize("end", ["cancelled", "finished"])
    def test_it_may_end_while_its_kv_is_on_the_way(self, end: str) -> None:
        made = conductor(spec("p", Role.PREFILL), spec("d", Role.DECODE))
        made.schedule(prompt("a"), 1.0)
        tell(made, "a", "prefill_done", end, now=2.0)
        assert made.transfers.in_flight_bytes(int(made.cluster.node[made.cluster.row("p")])) == 0

    def test_nothing_is_moved_on_one_node(self) -> None:
        made = conductor(spec("p", Role.PREFILL, node="n"), spec("d", Role.DECODE, node="n"))
        made.schedule(prompt("a"), 1.0)
        tell(made, "a", "prefill_done", now=2.0)
        assert made.transfers.in_flight_bytes(int(made.cluster.node[made.cluster.row("p")])) == 0

    def test_what_was_computed_is_found_by_the_next(self) -> None:
        made = conductor(spec("a"), spec("b"), spec("c"))
        first = made.schedule(prompt("long", 64), 1.0)
        assert isinstance(first, Decision)
        tell(made, "long", "prefill_done", "first_token", "finished", now=9.0)
        again = Request("again", "m", 64 * BLOCK + 50, keys("long", 64))
        second = made.schedule(again, 10.0)
        assert isinstance(second, Decision)
        assert second.prefill == first.prefill
        assert second.cached_tokens == second.available_tokens == 64 * BLOCK
        assert second.predicted_ttft_s < first.predicted_ttft_s / 5
        assert {one.instance for one in second.candidates} == {"a", "b", "c"}
        assert second.candidates[0].instance == second.prefill

    def test_what_is_only_decided_is_nowhere_yet(self) -> None:
        made = conductor(spec("a"), spec("b"))
        made.schedule(prompt("x", 16), 1.0)
        assert made.match(keys("x", 16), 1.0).blocks == 0
        tell(made, "x", "first_token", now=3.0)
        assert made.match(keys("x", 16), 3.0).blocks == 16
        made.schedule(prompt("y", 16), 4.0)
        tell(made, "y", "finished", now=6.0)
        assert made.match(keys("y", 16), 6.0).blocks == 16
        made.schedule(prompt("z", 16), 7.0)
        tell(made, "z", "cancelled", now=8.0)
        assert made.match(keys("z", 16), 8.0).blocks == 0

    def test_the_same_id_gets_the_same_answer(self) -> None:
        made = conductor(spec("a"), spec("b"))
        decision = made.schedule(prompt("x"), 1.0)
        assert made.schedule(prompt("x"), 5.0) is decision
        made.register(InstanceSpec("c", "other", Role.MIXED, PROFILE), 5.0)
        for another in (Request("x", "m", 77), Request("x", "other", 8 * BLOCK + 10, keys("x", 8))):
            with pytest.raises(Conflict):
                made.schedule(another, 5.0)
        assert made.statistics()["decided"] == 1

    def test_an_instance_that_left_since_is_not_named_again(self) -> None:
        made = conductor(spec("a"), spec("b"))
        first = made.schedule(prompt("x"), 1.0)
        assert isinstance(first, Decision)
        made.remove(first.prefill, 2.0)
        second = made.schedule(prompt("x"), 3.0)
        assert isinstance(second, Decision)
        assert second.prefill != first.prefill
        assert made.statistics()["rescheduled"] == 1
        tell(made, "x", "finished", now=4.0)
        assert nothing_is_promised(made)

    def test_who_is_not_heard_of_expires(self) -> None:
        made = conductor(spec("a"), core={"decision_ttl_s": 5.0})
        made.schedule(prompt("x"), 1.0)
        tell(made, "x", "prefill_done", now=4.0)
        assert made.tick(6.5) == []
        assert made.tick(9.5) == ["x"]
        assert nothing_is_promised(made)

    def test_one_that_lives_keeps_its_place_and_nothing_else_changes(self) -> None:
        made = conductor(
            spec("p", Role.PREFILL), spec("d", Role.DECODE), core={"decision_ttl_s": 5.0}
        )
        made.schedule(prompt("x"), 1.0)
        columns = {column: getattr(made.cluster, column).copy() for column in OWN}
        flight = made.ledger.get("x")
        assert flight is not None
        for now in (4.0, 8.0):
            tell(made, "x", "alive", now=now)
            assert made.tick(now) == []
        assert (flight.phase, flight.first_token_at) == (RequestPhase.PREFILL, None)
        assert made.match(keys("x", 8), 8.0).blocks == 0
        for column, before in columns.items():
            assert (getattr(made.cluster, column) == before).all()
        tell(made, "x", "first_token", "alive", now=9.0)
        assert (flight.phase, flight.answered_tokens) == (RequestPhase.DECODE, 1)
        assert made.tick(14.0) == ["x"]
        with pytest.raises(UnknownRequest):
            tell(made, "x", "alive", now=14.0)

    def test_one_that_decodes_does_not_need_who_prefilled_it(self) -> None:
        made = conductor(spec("p", Role.PREFILL), spec("d", Role.DECODE))
        decision = made.schedule(prompt("x"), 1.0)
        tell(made, "x", "prefill_done", "first_token", now=2.0)
        made.remove("p", 3.0)
        made.register(spec("p2", Role.PREFILL), 3.0)
        assert made.schedule(prompt("x"), 4.0) is decision
        tell(made, "x", "finished", now=5.0)
        assert nothing_is_promised(made)

    def test_events_that_skip_others(self) -> None:
        made = conductor(spec("a"))
        made.schedule(prompt("x"), 1.0)
        tell(made, "x", "tokens", now=2.0, tokens=3)
        assert made.cluster.batch[0] == 1
        tell(made, "x", "prefill_done", "first_token", "first_token", "cancelled", now=2.0)
        assert nothing_is_promised(made)


class TestPlaces:
    def test_one_that_does_both_goes_on_with_what_it_computed(self) -> None:
        made = conductor(*(spec(name) for name in "abcdef"))
        for number in range(12):
            decision = made.schedule(prompt(f"r{number}"), 1.0)
            assert isinstance(decision, Decision)
            assert decision.prefill == decision.decode

    def test_short_prompts_stay_where_they_will_be_decoded(self) -> None:
        made = conductor(spec("p", Role.PREFILL), spec("both"), disaggregation={"form": "rule"})
        routes = set()
        for number in range(16):
            short = made.schedule(Request(f"s{number}", "m", 100), float(number))
            assert isinstance(short, Decision)
            assert (short.prefill, short.decode, short.layerwise) == ("both", "both", False)
            tell(made, short.request_id, "finished", now=number + 0.5)
            far = made.schedule(prompt(f"l{number}", 4), number + 0.6)
            assert isinstance(far, Decision)
            assert far.layerwise
            routes.add((far.prefill, far.decode))
            tell(made, far.request_id, "finished", now=number + 0.9)
        assert routes == {("p", "both")}

    def test_a_context_is_spread_over_several(self) -> None:
        made = conductor(
            spec("p", Role.PREFILL),
            *(spec(f"d{n}", Role.DECODE, kv_capacity_tokens=60_000) for n in range(4)),
            spread={"enabled": True},
        )
        decision = made.schedule(prompt("huge", 160), 1.0)
        assert isinstance(decision, Decision)
        assert len(decision.shards) > 1
        assert decision.decode in dict(decision.shards)
        assert sum(tokens for _, tokens in decision.shards) >= 160 * BLOCK
        tell(made, "huge", "prefill_done", "tokens", now=9.0, tokens=7)
        tell(made, "huge", "finished", now=10.0)
        assert nothing_is_promised(made)


class TestRefusals:
    def test_nobody_there(self) -> None:
        made = conductor()
        with pytest.raises(UnknownModel, match="no instance has registered model 'm'"):
            made.schedule(prompt("x"), 1.0)
        made.register(spec("d", Role.DECODE), 1.0)
        rejection = made.schedule(prompt("x"), 1.0)
        assert isinstance(rejection, Rejection)
        assert (rejection.reason, rejection.overloaded) == ("no_prefill", False)

    def test_who_decodes_computes_when_all_who_prefill_are_lost(self) -> None:
        made = conductor(spec("p", Role.PREFILL), spec("d0", Role.DECODE), spec("d1", Role.DECODE))
        made.heartbeat("d0", Load(), 100.0)
        made.heartbeat("d1", Load(), 100.0)
        made.tick(100.0)
        decision = made.schedule(prompt("x"), 100.0)
        assert isinstance(decision, Decision)
        assert decision.prefill == decision.decode
        assert (decision.decode in ("d0", "d1"), decision.placement) == (True, "no_prefill")
        assert decision.left_out["lost"] == 1
        tell(made, "x", "first_token", "finished", now=101.0)
        assert nothing_is_promised(made)
        made.heartbeat("p", Load(), 102.0)
        decision = made.schedule(prompt("y"), 102.0)
        assert isinstance(decision, Decision)
        assert decision.prefill == "p"

    def test_an_objective_that_cannot_be_met(self) -> None:
        made = conductor(spec("a"))
        strict = prompt("x", 64, objectives=Objectives(ttft_s=0.05))
        rejection = made.schedule(strict, 1.0)
        assert isinstance(rejection, Rejection)
        assert (rejection.reason, rejection.overloaded) == ("ttft", True)
        assert rejection.predicted_ttft_s is not None
        assert rejection.predicted_ttft_s > 0.05
        assert rejection.candidates[0].instance == "a"
        assert nothing_is_promised(made)
        assert made.decision("x") is rejection

    def test_a_queue_that_drains_says_when_to_come_back(self) -> None:
        made = conductor(spec("a"))
        for number in range(20):
            made.schedule(prompt(f"r{number}", 64), 1.0)
        late = prompt("late", 8, objectives=Objectives(ttft_s=2.0))
        rejection = made.schedule(late, 1.0)
        assert isinstance(rejection, Rejection)
        assert rejection.retry_after_s is not None
        assert 1.0 <= rejection.retry_after_s <= 75.0
        for number in range(20):
            tell(made, f"r{number}", "finished", now=2.0)
        assert isinstance(made.schedule(late, 2.0), Decision)

    def test_what_never_fits_is_not_told_to_come_back(self) -> None:
        made = conductor(spec("a", kv_capacity_tokens=10_000))
        rejection = made.schedule(prompt("huge", 100), 1.0)
        assert isinstance(rejection, Rejection)
        assert (rejection.reason, rejection.retry_after_s) == ("kv_room", None)

    def test_the_second_check_counts_the_request_once(self) -> None:
        made = conductor(spec("a"), admission={"mode": "baseline"})
        first = made.schedule(prompt("x", 8), 1.0)
        assert isinstance(first, Decision)
        tbt_s = first.predicted_tbt_s
        tell(made, "x", "cancelled", now=1.0)
        close = Objectives(tbt_s=1.05 * tbt_s)
        made.schedule(prompt("y", 8, objectives=close), 2.0)
        tell(made, "y", "prefill_done", now=3.0)
        assert made.recheck("y", 3.0) is None
        strict = Objectives(tbt_s=0.5 * tbt_s)
        made.schedule(prompt("z", 8, objectives=strict), 4.0)
        tell(made, "z", "prefill_done", now=5.0)
        rejection = made.recheck("z", 5.0)
        assert isinstance(rejection, Rejection)
        assert rejection.reason == "tbt"
        made.schedule(prompt("w", 8), 6.0)
        made.remove("a", 7.0)
        assert made.recheck("w", 7.0) is None

    def test_a_full_queue_lets_the_higher_class_in(self) -> None:
        made = conductor(spec("a"), queue={"waiting_max": 2, "ahead_max": 1, "ahead_s": 0.0})
        for number in range(3):  # one of them is being computed
            made.schedule(prompt(f"low{number}", priority="low"), 1.0)
        decision = made.schedule(prompt("high", priority="high"), 2.0)
        assert isinstance(decision, Decision)
        preempted = made.decision("low2")
        assert isinstance(preempted, Rejection)
        assert preempted.reason == "preempted"
        rejection = made.schedule(prompt("low9", priority="low"), 3.0)
        assert isinstance(rejection, Rejection)
        assert rejection.reason == "queue_full"

    @pytest.mark.parametrize(
        "request_",
        [
            Request("x", "m", 0),
            Request("x", "m", 1 << 40),
            Request("x", "m", 100, (b"short",)),
            Request("x", "m", 1, keys("a", 2)),
            Request("x", "m", 100, output_tokens=-1),
            Request("x", "m", 100, priority="emperor"),
            Request("x", "m", 100, objectives=Objectives(ttft_s=-1.0)),
            Request("x", "m", 100, objectives=Objectives(tbt_s=float("nan"))),
        ],
    )
    def test_bad_requests(self, request_: Request) -> None:
        made = conductor(spec("a"))
        with pytest.raises(InvalidRequest):
            made.schedule(request_, 1.0)
        assert nothing_is_promised(made)

    def test_bad_instances_and_loads(self) -> None:
        made = conductor(spec("a"))
        for bad in ({"batch_max": 0}, {"block_bytes": -1}, {"kv_capacity_tokens": 1 << 60}):
            with pytest.raises(InvalidRequest):
                made.register(spec("b", **bad), 1.0)
        with pytest.raises(InvalidRequest):
            made.register(InstanceSpec("b", "m", Role.MIXED, "no such profile"), 1.0)
        with pytest.raises(Conflict, match="block_tokens"):
            made.register(spec("b", block_tokens=16), 1.0)
        with pytest.raises(InvalidRequest):
            made.heartbeat("a", Load(running=-1), 1.0)
        with pytest.raises(UnknownInstance):
            made.heartbeat("b", Load(), 1.0)
        assert made.cluster.names == ["a"]


class TestInstances:
    def test_a_silent_one_gets_nothing_until_it_is_heard_of(self) -> None:
        made = conductor(spec("a"), spec("b"))
        made.heartbeat("b", Load(), 15.0)
        made.tick(16.0)
        assert [view.status for view in made.instances(16.0)] == [Status.LOST, Status.READY]
        for number in range(4):
            decision = made.schedule(prompt(f"r{number}"), 16.0)
            assert isinstance(decision, Decision)
            assert decision.prefill == "b"
        made.heartbeat("a", Load(), 17.0)
        assert made.instances(17.0)[0].status is Status.READY

    def test_one_that_is_drained_and_falls_silent_is_lost_and_comes_back_drained(self) -> None:
        made = conductor(spec("a"), spec("b"))
        decision = made.schedule(prompt("x"), 1.0)
        assert isinstance(decision, Decision)
        name = decision.prefill
        (other,) = {"a", "b"} - {name}
        made.drain(name, 2.0)
        made.heartbeat(other, Load(), 15.0)
        made.tick(16.0)
        made.steering.tick({}, 16.0)
        row = made.cluster.row(name)
        assert made.cluster.status[row] is Status.LOST
        (drain,) = made.steering.drains(16.0)
        assert (drain.name, drain.phase) == (name, "lost")
        made.heartbeat(name, Load(), 17.0)
        assert made.cluster.status[row] is Status.DRAINING
        made.register(spec(name), 18.0)
        assert made.cluster.status[row] is Status.READY

    def test_one_that_is_drained_while_it_is_silent_comes_back_drained(self) -> None:
        made = conductor(spec("a"), spec("b"))
        made.tick(16.0)
        made.drain("a", 17.0)
        assert made.cluster.status[made.cluster.row("a")] is Status.LOST
        made.heartbeat("a", Load(), 18.0)
        assert made.cluster.status[made.cluster.row("a")] is Status.DRAINING

    @pytest.mark.parametrize("drained", [False, True])
    def test_requests_at_a_silent_one_go_elsewhere_when_they_are_asked_about(
        self, drained: bool
    ) -> None:
        made = conductor(spec("a"), spec("b"))
        decision = made.schedule(prompt("x"), 1.0)
        assert isinstance(decision, Decision)
        name = decision.prefill
        (other,) = {"a", "b"} - {name}
        if drained:
            made.drain(name, 2.0)
        made.tick(16.0)
        assert made.schedule(prompt("x"), 16.0) is decision, "nobody else is there"
        made.heartbeat(other, Load(), 17.0)
        again = made.schedule(prompt("x"), 17.0)
        assert isinstance(again, Decision)
        assert (again.prefill, again.decode) == (other, other)
        assert made.schedule(prompt("x"), 17.0) is again
        assert made.statistics()["rescheduled"] == 1
        tell(made, "x", "finished", now=18.0)
        assert nothing_is_promised(made)

    def test_who_has_prefilled_may_fall_silent(self) -> None:
        made = conductor(spec("p", Role.PREFILL), spec("q", Role.PREFILL), spec("d", Role.DECODE))
        decision = made.schedule(prompt("x"), 1.0)
        assert isinstance(decision, Decision)
        tell(made, "x", "prefill_done", now=2.0)
        for name in {"q", "p", "d"} - {decision.prefill}:
            made.heartbeat(name, Load(), 15.0)
        made.tick(16.0)
        assert made.schedule(prompt("x"), 16.0) is decision

    def test_a_node_of_the_same_name_keeps_its_blocks(self) -> None:
        made = conductor(spec("host-1", node="host-1"), spec("b"))
        made.apply(Added("host-1", "dram", keys("x", 4)), 1.0)
        made.remove("host-1", 2.0)
        assert made.match(keys("x", 4), 2.0).blocks == 4

    def test_one_that_stays_silent_is_forgotten(self) -> None:
        made = conductor(spec("a"), spec("b"), core={"forget_s": 60.0})
        made.heartbeat("b", Load(), 50.0)
        made.tick(61.0)
        assert made.cluster.names == ["b"]
        with pytest.raises(UnknownInstance):
            made.heartbeat("a", Load(), 62.0)

    def test_a_clock_that_jumps_back_makes_nobody_younger(self) -> None:
        made = conductor(spec("a"))
        made.heartbeat("a", Load(), 100.0)
        made.heartbeat("a", Load(), 50.0)
        assert made.instances(100.0)[0].heard_s == 0.0

    def test_others_work_counts(self) -> None:
        made = conductor(spec("a"), spec("b"))
        made.heartbeat("a", Load(queued_prefill_tokens=500_000, queued=40), 1.0)
        for number in range(5):
            decision = made.schedule(prompt(f"r{number}"), 1.0)
            assert isinstance(decision, Decision)
            assert decision.prefill == "b"

    def test_what_is_observed_corrects_what_is_predicted(self) -> None:
        made = conductor(spec("a"))
        before = made.schedule(prompt("first", 32), 0.0)
        assert isinstance(before, Decision)
        tell(made, "first", "cancelled", now=0.0)
        for number in range(60):
            now = 100.0 * (number + 1)
            decision = made.schedule(prompt(f"r{number}", 32), now)
            assert isinstance(decision, Decision)
            slow_s = 2.0 * before.predicted_ttft_s
            tell(made, f"r{number}", "prefill_done", "first_token", "finished", now=now + slow_s)
        after = made.schedule(prompt("last", 32), now + 100.0)
        assert isinstance(after, Decision)
        assert after.predicted_ttft_s == pytest.approx(2.0 * before.predicted_ttft_s, rel=0.01)


class TestSettings:
    def test_a_patch_is_taken_whole_or_not_at_all(self) -> None:
        made = conductor(spec("a"))
        old = made.settings
        for bad in (
            {"policy": {"name": "telepathy"}},
            {"policy": {"name": "preble"}, "admission": {"mode": "sometimes"}},
            {"core": {"decision_ttl_s": -1}},
            {"nothing": 1},
            {"core": {"no_such": 1}},
            {"core": 7},
        ):
            with pytest.raises(InvalidRequest, match=r"settings|policy"):
                made.patch(bad, 1.0)  # type: ignore[arg-type]
            assert made.settings is old
        made.patch({"policy": {"name": "preble"}, "admission": {"class_scales": {"low": 0.5}}}, 1.0)
        assert made.settings.policy.name == "preble"
        assert made.settings.admission.class_scales == {"low": 0.5}
        decision = made.schedule(prompt("x"), 2.0)
        assert isinstance(decision, Decision)
        assert decision.policy == "preble"

    def test_settings_go_round_by_json(self) -> None:
        whole = msgspec.json.decode(msgspec.json.encode(Settings()))
        assert patched(Settings(), whole) == Settings()

    @pytest.mark.parametrize("name", policy_registry.names())
    def test_every_policy_serves(self, name: str) -> None:
        made = conductor(
            *(spec(f"p{n}", Role.PREFILL) for n in range(3)),
            *(spec(f"d{n}", Role.DECODE) for n in range(2)),
            policy={"name": name},
        )
        for number in range(30):
            request = Request(f"r{number}", "m", 20 * BLOCK + 5, keys(f"s{number % 4}", 20))
            decision = made.schedule(request, float(number))
            assert isinstance(decision, Decision)
            assert decision.policy == name
            done = "prefill_done", "first_token", "finished"
            tell(made, request.id, *done, now=number + 0.5)
        assert nothing_is_promised(made)


ASKS = {"pulls": "true"}


class TestAnInstanceThatAsksWhatIsNext:
    """`next_prefill` gives each request once, in the order of the queue."""

    def test_the_higher_class_is_first_and_each_is_given_once(self) -> None:
        made = conductor(spec("p", Role.PREFILL, labels=ASKS), spec("d", Role.DECODE))
        for name, priority in (("a", "low"), ("b", "low"), ("c", "high"), ("d", "normal")):
            made.schedule(prompt(name, priority=priority), 1.0)
        assert [made.next_prefill("p", 1.0) for _ in range(5)] == ["a", "c", "d", "b", None]

    def test_the_shortest_is_first_if_the_queue_says_so(self) -> None:
        queue = {"order": "shortest-first"}
        made = conductor(spec("p", Role.PREFILL, labels=ASKS), spec("d", Role.DECODE), queue=queue)
        for name, blocks in (("a", 8), ("long", 60), ("short", 2)):
            made.schedule(prompt(name, blocks), 1.0)
        assert [made.next_prefill("p", 1.0) for _ in range(3)] == ["a", "short", "long"]

    @pytest.mark.parametrize("heard_first", [True, False])
    def test_the_end_of_the_one_before_may_be_heard_of_before_or_after(
        self, heard_first: bool
    ) -> None:
        made = conductor(spec("p", Role.PREFILL, labels=ASKS), spec("d", Role.DECODE))
        for name in ("a", "b"):
            made.schedule(prompt(name), 1.0)
        assert made.next_prefill("p", 1.0) == "a"
        if heard_first:
            tell(made, "a", "prefill_done", now=2.0)
        assert made.next_prefill("p", 2.0) == "b"
        if not heard_first:
            tell(made, "a", "prefill_done", now=2.1)
        assert made.next_prefill("p", 3.0) is None
        tell(made, "b", "prefill_done", now=3.1)
        assert made.cluster.queued[made.cluster.row("p")] == 0
        assert len(made.queues) == 0

    def test_one_that_is_scheduled_there_again_is_given_again(self) -> None:
        made = conductor(spec("p", Role.PREFILL, labels=ASKS), spec("d", Role.DECODE))
        made.schedule(prompt("a"), 1.0)
        assert made.next_prefill("p", 1.0) == "a"
        tell(made, "a", "cancelled", now=1.5)
        made.schedule(prompt("a"), 2.0)
        assert made.next_prefill("p", 2.0) == "a"

    def test_a_row_that_is_used_again_has_given_nothing(self) -> None:
        made = conductor(spec("p", Role.PREFILL, labels=ASKS), spec("d", Role.DECODE))
        made.schedule(prompt("a"), 1.0)
        assert made.next_prefill("p", 1.0) == "a"
        made.remove("p", 2.0)
        made.register(spec("p", Role.PREFILL, labels=ASKS), 3.0)
        assert made.next_prefill("p", 3.0) is None
        with pytest.raises(UnknownInstance):
            made.next_prefill("q", 3.0)


class Life(RuleBasedStateMachine):
    """Requests, events, instances and time, in any order, repeated, too late, or of unknown
    requests."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.made = conductor(
            queue={"waiting_max": 3}, core={"decision_ttl_s": 20.0}, spread={"enabled": True},
            racing={"enabled": True}, disaggregation={"overlapped": True},
        )  # fmt: skip
        self.made.register(spec("i0"), 0.0)

    @rule(
        number=st.integers(0, 9),
        blocks=st.integers(0, 80),
        priority=st.sampled_from(["high", "normal", "low"]),
        ttft_s=st.sampled_from([None, 0.5, 30.0]),
    )
    def schedule(self, number: int, blocks: int, priority: str, ttft_s: float | None) -> None:
        request = Request(
            f"r{number}", "m", blocks * BLOCK + 1, keys(f"p{number % 3}", blocks),
            objectives=Objectives(ttft_s=ttft_s), priority=priority, urgent=number % 2 == 0,
        )  # fmt: skip
        try:
            outcome = self.made.schedule(request, self.now)
        except (Conflict, UnknownModel):
            return
        assert self.made.decision(request.id) is outcome

    @rule(number=st.integers(0, 9), kind=st.sampled_from(EVENT_KINDS), tokens=st.integers(0, 9))
    def event(self, number: int, kind: str, tokens: int) -> None:
        known = self.made.ledger.get(f"r{number}") is not None
        try:
            self.made.observe(RequestEvent(f"r{number}", kind, tokens), self.now)
        except UnknownRequest:
            assert not known

    @rule(number=st.integers(0, 4))
    def ask(self, number: int) -> None:
        try:
            given = self.made.next_prefill(f"i{number}", self.now)
        except UnknownInstance:
            return
        if given is not None:
            flight = self.made.ledger.get(given)
            assert flight is not None
            assert flight.phase is RequestPhase.PREFILL
            rows = {flight.prefill_row, flight.second.row if flight.second else -1}
            assert self.made.cluster.row(f"i{number}") in rows

    @rule(number=st.integers(0, 4), role=st.sampled_from(list(Role)))
    def come(self, number: int, role: Role) -> None:
        self.made.register(spec(f"i{number}", role, kv_capacity_tokens=50_000), self.now)

    @rule(number=st.integers(0, 4), how=st.sampled_from(["remove", "drain", "heartbeat"]))
    def change(self, number: int, how: str) -> None:
        name = f"i{number}"
        try:
            if how == "remove":
                self.made.remove(name, self.now)
            elif how == "drain":
                self.made.drain(name, self.now)
            else:
                self.made.heartbeat(name, Load(running=number, queued=number), self.now)
        except UnknownInstance:
            assert name not in self.made.cluster

    @rule(seconds=st.sampled_from([0.1, 1.0, 6.0, 30.0]))
    def time(self, seconds: float) -> None:
        self.now += seconds
        self.made.tick(self.now)

    @invariant()
    def promises_are_those_of_the_flights(self) -> None:
        cluster, ledger = self.made.cluster, self.made.ledger
        kv = np.zeros(len(cluster.used), np.int64)
        queued = np.zeros(len(cluster.used), np.int64)
        present = np.zeros(len(cluster.used), np.int64)
        for flight in ledger:
            waits = {flight.prefill_row} if not flight.phase else set()
            for row in (waits | set(flight.shares)) - {-1}:
                present[row] += 1
            for row, tokens in flight.shares.items():
                kv[row] += tokens
            if not flight.phase and flight.prefill_row >= 0:
                queued[flight.prefill_row] += 1
            if flight.second is not None:  # the second route of a race
                queued[flight.second.row] += 1
                present[flight.second.row] += 1
        assert (cluster.own_kv_used_tokens == kv).all()
        assert (cluster.own_queued == queued).all()
        for name in cluster.names:
            assert self.made.requests_at(name) == present[cluster.row(name)]
        assert (cluster.own_batch >= 0).all()
        assert (cluster.batch >= cluster.own_batch).all()
        if not len(ledger):
            assert nothing_is_promised(self.made)
            assert len(self.made.computing) == len(self.made.horizon) == len(self.made.queues) == 0
            assert nothing_moves(self.made)

    def teardown(self) -> None:
        for flight in self.made.ledger:
            self.made.observe(RequestEvent(flight.request.id, "cancelled"), self.now)
        self.promises_are_those_of_the_flights()
        assert not len(self.made.ledger)


TestLife = Life.TestCase
TestLife.settings = hypothesis_settings(max_examples=60, stateful_step_count=40, deadline=None)


# -- instances that a caller does not want ---------------------------------------------------------


def test_an_excluded_instance_is_not_chosen_and_unknown_ones_are_ignored() -> None:
    made = conductor(spec("a"), spec("b"), spec("c"))
    for number in range(12):
        asked = prompt(f"r{number}", exclude=("a", "c", "nobody"))
        decision = made.schedule(asked, 0.0)
        assert isinstance(decision, Decision)
        assert (decision.prefill, decision.decode) == ("b", "b")


def test_what_was_decided_stands_unless_it_names_an_excluded_instance() -> None:
    made = conductor(spec("a"), spec("b"))
    first = made.schedule(prompt("r"), 0.0)
    assert isinstance(first, Decision)
    other = {"a": "b", "b": "a"}[first.prefill]
    assert made.schedule(prompt("r", exclude=(other,)), 1.0) is first
    second = made.schedule(prompt("r", exclude=(first.prefill,)), 2.0)
    assert isinstance(second, Decision)
    assert second.prefill == other
    assert made.statistics()["in_flight"] == 1
    rejection = made.schedule(prompt("r", exclude=("a", "b")), 3.0)
    assert isinstance(rejection, Rejection)
    assert rejection.reason == "no_prefill"
    assert "but those that it excludes" in rejection.message
    assert nothing_is_promised(made)


def test_a_hot_prompt_does_not_fill_whoever_was_measured_to_be_the_fastest() -> None:
    """Of equal instances, one is measured to be a little faster than its profile. Requests come one
    at a time, so that none ever waits, and decode for long."""
    made = conductor(*(spec(f"i{number}") for number in range(8)))
    for _ in range(200):
        made.calibration.prefill.observe("i3", PROFILE, 1.0, 0.999, 0.0)
    made.register(spec("i3"), 0.0)
    for name in made.cluster.names:
        made.apply(Added(name, "hbm", prompt("").keys), 0.0)
    placed: Counter[str] = Counter()
    for number in range(80):
        now = 10.0 * number
        decision = made.schedule(prompt(f"r{number}"), now)
        assert isinstance(decision, Decision)
        now += decision.predicted_ttft_s
        tell(made, f"r{number}", "prefill_done", "first_token", now=now)
        placed[decision.decode] += 1
        for name in made.cluster.names:
            made.heartbeat(name, Load(), now)
    assert max(placed.values()) - min(placed.values()) <= 1


def test_a_load_that_nobody_foresaw_is_not_taken_for_slow_hardware() -> None:
    """Requests are admitted on an idle instance, then others come: each step takes as long as the
    profile says for the batch that there is."""
    made = conductor(spec("a"), calibration={"step": 0.1})
    others, tokens = Load(running=64, context_tokens=500_000), 100
    for number in range(8):
        name, now = f"r{number}", 100.0 * number
        made.heartbeat("a", Load(running=0, context_tokens=0), now)
        assert isinstance(made.schedule(prompt(name), now), Decision)
        made.heartbeat("a", others, now)
        tell(made, name, "prefill_done", "first_token", now=now + 1.0)
        row = made.cluster.row("a")
        batch, context = made.cluster.batch[row], made.cluster.context_tokens[row]
        d0, d1, d2 = latency_profiles.load(PROFILE).decode
        took_s = tokens * (d0 + d1 * batch + d2 * (context + tokens / 2))
        tell(made, name, "tokens", now=now + 1.0 + took_s, tokens=tokens)
        tell(made, name, "finished", now=now + 1.0 + took_s)
    assert made.calibration.decode.factor("a", PROFILE, 701.0) == pytest.approx(1.0, abs=0.01)
