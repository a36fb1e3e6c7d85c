"""Hedged requests (races): one winner, each loser cancelled once, never more than the budget."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tiffin.conductor.admission.hedging import HedgedRoute, Races, RacingSettings, second_route
from tiffin.conductor.core import Conductor
from tiffin.conductor.core.settings import Settings, patched
from tiffin.conductor.errors import Conflict
from tiffin.conductor.records import Decision, InstanceSpec, Load, Request, RequestEvent, Role

ON = RacingSettings(enabled=True, share=0.25, saved_max=2.0, expires_s=60.0)
A, B = HedgedRoute("p0", "d0"), HedgedRoute("p1", "d1")
URGENT = Request(id="r", model="m", prompt_tokens=10, urgent=True)
CALM = Request(id="r", model="m", prompt_tokens=10)


# -- which route -----------------------------------------------------------------------------------


def test_the_second_best_is_raced() -> None:
    assert second_route(np.array([1.0, 1.5, 1.2]), 0, ON) == 2


def test_a_hopeless_second_is_not() -> None:
    assert second_route(np.array([1.0, 2.1]), 0, ON) is None
    assert second_route(np.array([1.0]), 0, ON) is None
    assert second_route(np.array([1.0, np.inf]), 0, ON) is None


def test_another_node_is_better_than_a_little_speed() -> None:
    ttft_s = np.array([1.0, 1.1, 1.6])
    assert second_route(ttft_s, 0, ON, np.array([7, 7, 8], np.int32)) == 2
    assert second_route(ttft_s, 0, ON, np.array([7, 7, 7], np.int32)) == 1
    assert second_route(ttft_s, 0, ON, np.array([-1, -1, -1], np.int32)) == 1


@given(st.lists(st.floats(0.01, 10.0), min_size=1, max_size=20), st.data())
def test_the_second_is_the_fastest_of_the_others(ttft_s: list[float], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(ttft_s) - 1))
    second = second_route(np.array(ttft_s), at, ON)
    others = [one for number, one in enumerate(ttft_s) if number != at]
    if second is None:
        assert not others or min(others) > 2 * ttft_s[at]
    else:
        assert second != at
        assert ttft_s[second] == min(others) <= 2 * ttft_s[at]


# -- one race --------------------------------------------------------------------------------------


def test_the_first_token_wins_and_the_other_is_cancelled_once() -> None:
    races = Races(ON)
    races.start("r", [A, B], 0.0)
    assert races.winner("r") is None
    assert races.first_token("r", B) == (A,)
    assert races.first_token("r", A) == (), "already under way when it was cancelled"
    assert races.first_token("r", B) == ()
    assert races.winner("r") == B
    assert races.end("r") == ()
    statistics = races.statistics()
    assert (statistics.started, statistics.finished, statistics.won_by_second) == (1, 1, 1)


def test_a_failure_leaves_the_other_to_go_on() -> None:
    races = Races(ON)
    races.start("r", [A, B], 0.0)
    assert races.failed("r", A) == (B,)
    assert races.failed("r", A) == (B,), "told twice"
    assert races.first_token("r", B) == ()
    assert races.winner("r") == B


def test_a_route_that_failed_does_not_win() -> None:
    races = Races(ON)
    races.start("r", [A, B], 0.0)
    races.failed("r", A)
    assert races.first_token("r", A) == ()
    assert races.winner("r") is None


def test_both_fail() -> None:
    races = Races(ON)
    races.start("r", [A, B], 0.0)
    races.failed("r", B)
    assert races.failed("r", A) == ()
    assert "r" not in races
    assert races.statistics().lost == 1


def test_a_lost_instance_fails_its_routes() -> None:
    races = Races(ON)
    races.start("r", [A, B], 0.0)
    races.start("s", [B, HedgedRoute("p2", "d0")], 0.0)
    assert races.lost("d0") == {"r": (B,), "s": (B,)}
    assert races.lost("p1") == {"r": (), "s": ()}
    assert len(races) == 0


def test_a_cancelled_request_cancels_both() -> None:
    races = Races(ON)
    races.start("r", [A, B], 0.0)
    assert races.end("r") == (A, B)
    assert races.end("r") == ()


def test_a_race_nobody_hears_of_ends() -> None:
    races = Races(ON)
    races.start("r", [A, B], 0.0)
    races.start("s", [A, B], 30.0)
    assert races.expired(59.9) == {}
    assert races.expired(60.0) == {"r": (A, B)}
    assert len(races) == 1


def test_requests_that_are_not_raced_are_nobodys_business() -> None:
    races = Races(ON)
    assert races.first_token("r", A) == ()
    assert races.failed("r", A) == ()
    assert races.end("r") == ()
    assert races.winner("r") is None


@pytest.mark.parametrize("routes", [[], [A], [A, A]])
def test_a_race_needs_two(routes: list[HedgedRoute]) -> None:
    with pytest.raises(Conflict, match="two different routes"):
        Races(ON).start("r", routes, 0.0)


def test_one_race_at_a_time() -> None:
    races = Races(ON)
    races.start("r", [A, B], 0.0)
    with pytest.raises(Conflict, match="already"):
        races.start("r", [A, B], 0.0)


# -- the budget ------------------------------------------------------------------------------------


def test_only_urgent_requests_and_only_when_it_is_switched_on() -> None:
    assert Races(ON).may_race(URGENT)
    assert not Races(ON).may_race(CALM)
    assert not Races().may_race(URGENT)


def test_the_share_holds_in_the_long_run() -> None:
    """Of 1,000 urgent requests a quarter is raced, plus the two that were saved up."""
    races, raced = Races(ON), 0
    for number in range(1000):
        races.scheduled()
        if races.may_race(URGENT):
            races.start(str(number), [A, B], 0.0)
            raced += 1
    assert 250 <= raced <= 252
    assert races.statistics().denied == 1000 - raced


def test_no_share_no_race() -> None:
    races = Races(RacingSettings(enabled=True, share=0.0))
    for _ in range(100):
        races.scheduled()
    assert not races.may_race(URGENT)


def test_races_under_way_are_limited() -> None:
    races = Races(RacingSettings(enabled=True, races_max=1))
    races.start("r", [A, B], 0.0)
    assert not races.may_race(URGENT)
    races.end("r")
    assert races.may_race(URGENT)


def test_settings_change_and_races_go_on() -> None:
    races = Races(ON)
    races.start("r", [A, B], 0.0)
    races.configure(RacingSettings())
    assert not races.may_race(URGENT)
    assert races.first_token("r", A) == (B,)


# -- anything in any order -------------------------------------------------------------------------


class RaceMachine(RuleBasedStateMachine):
    """Each started route comes to exactly one end: it wins, fails, or is cancelled."""

    def __init__(self) -> None:
        super().__init__()
        self.races, self.now, self.started = Races(ON), 0.0, 0
        self.open: dict[str, set[HedgedRoute]] = {}
        self.won: dict[str, HedgedRoute] = {}

    def cancel(self, request_id: str, routes: tuple[HedgedRoute, ...]) -> None:
        for route in routes:
            self.open[request_id].remove(route)  # an error here: cancelled after its end

    @rule()
    def start(self) -> None:
        self.started += 1
        self.races.start(str(self.started), [A, B], self.now)
        self.open[str(self.started)] = {A, B}

    @rule(number=st.integers(1, 3), route=st.sampled_from([A, B]))
    def token(self, number: int, route: HedgedRoute) -> None:
        key = str(number)
        running = route in self.open.get(key, ())
        before = self.races.winner(key)
        self.cancel(key, self.races.first_token(key, route))
        if running and before is None:
            self.won[key] = route
            assert self.open[key] == {route}

    @rule(number=st.integers(1, 3), route=st.sampled_from([A, B]))
    def fail(self, number: int, route: HedgedRoute) -> None:
        key = str(number)
        left = self.races.failed(key, route)
        if key in self.open:
            self.open[key].discard(route)
            assert set(left) == self.open[key]
            if not left:
                del self.open[key]
                self.won.pop(key, None)

    @rule(number=st.integers(1, 3))
    def end(self, number: int) -> None:
        self.finish(str(number), self.races.end(str(number)))

    @rule(later_s=st.sampled_from([1.0, 40.0]))
    def time_passes(self, later_s: float) -> None:
        self.now += later_s
        for key, routes in self.races.expired(self.now).items():
            self.finish(key, routes)

    def finish(self, key: str, routes: tuple[HedgedRoute, ...]) -> None:
        if key not in self.open:
            assert routes == ()
            return
        self.cancel(key, routes)
        winner = self.won.pop(key, None)
        assert self.open.pop(key) == (set() if winner is None else {winner})

    @invariant()
    def nothing_is_forgotten(self) -> None:
        assert len(self.races) == len(self.open)
        for key in self.open:
            assert key in self.races
            assert self.races.winner(key) == self.won.get(key)


TestRaceMachine = RaceMachine.TestCase
TestRaceMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


# -- reports to the conductor ----------------------------------------------------------------------

KEYS = tuple(bytes([number]) * 16 for number in range(8))


class TestWhichRouteWon:
    def race(self) -> tuple[Conductor, Decision]:
        """A request that runs over both prefill instances."""
        settings = {"racing": {"enabled": True, "slower_max": 100.0}}
        made = Conductor(patched(Settings(), settings), dice=random.Random(1))
        for name, role in (("p0", Role.PREFILL), ("p1", Role.PREFILL), ("d", Role.DECODE)):
            made.register(InstanceSpec(name, "m", role, "llama-3.1-8b.h100.tp1.vllm"), 0.0)
        decision = made.schedule(Request("r", "m", 8 * 512 + 1, KEYS, urgent=True), 0.0)
        assert isinstance(decision, Decision)
        assert len(decision.alternatives) == 1
        return made, decision

    @pytest.mark.parametrize("told", [True, False])
    def test_the_first(self, told: bool) -> None:
        made, decision = self.race()
        route = (decision.prefill, decision.decode) if told else None
        made.observe(RequestEvent("r", "prefill_done", route=route), 30.0)
        made.observe(RequestEvent("r", "first_token", route=route), 30.0)
        assert made.races.statistics().finished == 1
        assert made.races.statistics().won_by_second == 0
        assert made.match(KEYS, 30.0).holders[0].holder == f"{decision.prefill}/hbm"
        assert made.calibration.prefill.observations(decision.prefill) == 1

    def test_the_second(self) -> None:
        """Its instance has the blocks now, and its time does not calibrate the predicted route."""
        made, decision = self.race()
        (other,) = decision.alternatives
        made.observe(RequestEvent("r", "prefill_done", route=other), 29.0)
        made.observe(RequestEvent("r", "first_token", route=other), 30.0)
        assert made.races.winner("r") == other
        assert made.races.statistics().won_by_second == 1
        assert [one.holder for one in made.match(KEYS, 30.0).holders] == [f"{other[0]}/hbm"]
        assert not any(map(made.calibration.prefill.observations, ("p0", "p1")))
        made.observe(RequestEvent("r", "finished"), 31.0)
        assert made.statistics()["in_flight"] == 0

    def test_one_that_does_not_run(self) -> None:
        """A report of an unknown route, as after a new decision, is accepted but not used."""
        made, _ = self.race()
        made.observe(RequestEvent("r", "first_token", route=("elsewhere", "d")), 30.0)
        assert made.races.statistics().finished == 0
        assert made.match(KEYS, 30.0).holders == []
        assert not any(map(made.calibration.prefill.observations, ("p0", "p1")))

    def test_one_that_has_left(self) -> None:
        made, decision = self.race()
        (other,) = decision.alternatives
        made.remove(other[0], 1.0)
        made.observe(RequestEvent("r", "prefill_done", route=other), 2.0)
        assert made.match(KEYS, 2.0).holders == []


class TestTheSecondPlace:
    """The second route waits and computes, too: its place is reserved, and given back once."""

    def race(self) -> tuple[Conductor, str, str]:
        made, decision = TestWhichRouteWon().race()
        ((second, _),) = decision.alternatives
        return made, decision.prefill, second

    def queued(self, made: Conductor, name: str) -> tuple[int, int]:
        row = made.cluster.row(name)
        return int(made.cluster.own_queued[row]), int(made.cluster.own_queued_tokens[row])

    def test_it_is_counted_where_it_waits(self) -> None:
        made, first, second = self.race()
        assert self.queued(made, first) == self.queued(made, second) == (1, 8 * 512 + 1)
        assert made.requests_at(second) == 1, "it is not empty yet"
        after = made.schedule(Request("x", "m", 8 * 512 + 1), 0.0)
        assert isinstance(after, Decision)
        alone = TestWhichRouteWon().race()[1]
        assert after.predicted_ttft_s == pytest.approx(2 * alone.predicted_ttft_s, rel=0.1)

    @pytest.mark.parametrize("last", ["finished", "cancelled", "expires"])
    @pytest.mark.parametrize("told", [(), ("prefill_done",), ("prefill_done", "first_token")])
    def test_it_is_given_back_once(self, told: tuple[str, ...], last: str) -> None:
        made, first, second = self.race()
        for kind in (*told, *told):
            made.observe(RequestEvent("r", kind), 1.0)
        assert self.queued(made, second) == ((0, 0) if told else (1, 8 * 512 + 1))
        if last == "expires":
            for name in made.cluster.names:
                made.heartbeat(name, Load(), 200.0)
            assert made.tick(200.0) == ["r"]
        else:
            made.observe(RequestEvent("r", last), 2.0)
        for name in (first, second):
            assert self.queued(made, name) == (0, 0)
        assert made.requests_at(second) == len(made.queues) == 0

    def test_its_instance_is_removed(self) -> None:
        made, first, second = self.race()
        made.remove(second, 1.0)
        made.register(InstanceSpec(second, "m", Role.PREFILL, "llama-3.1-8b.h100.tp1.vllm"), 1.0)
        made.observe(RequestEvent("r", "finished"), 2.0)
        assert self.queued(made, first) == self.queued(made, second) == (0, 0)

    def test_the_engine_that_asks_is_given_the_request(self) -> None:
        made, first, second = self.race()
        assert made.next_prefill(first, 0.0) == made.next_prefill(second, 0.0) == "r"
        made.observe(RequestEvent("r", "first_token"), 1.0)
        assert made.next_prefill(second, 1.0) is None
