"""Whom discovery asks, and what it registers, by hand and in any order of events."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiffin.conductor.discovery.discovery import (
    ADDED,
    ENGINES_MAX,
    Announce,
    Answer,
    Ask,
    Beat,
    Discovery,
    Leave,
    Place,
)
from tiffin.conductor.discovery.engine_facts import own_schema
from tiffin.conductor.records import InstanceSpec, Load, Role
from tiffin.conductor.wire.engine_models import EngineOptions

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tiffin.conductor.discovery.discovery import Action

A, B = "http://10.0.0.1:8000", "http://10.0.0.2:8000"
SCHEMA = own_schema("m", 512)
OPTIONS = EngineOptions(profile="p")
LOAD = Load(running=2)
SCRAPE_S, MODELS_S, TIMEOUT_S = 1.0, 6.0, 10.0


def place(url: str) -> Place:
    return Place(url, url.removeprefix("http://"))


@dataclass
class World:
    """Discovery, and the instances that follow from its actions. `up`: the engines that answer."""

    up: set[str] = field(default_factory=set)
    runs: dict[str, int] = field(default_factory=dict)
    registered: dict[str, str] = field(default_factory=dict)  # URL by instance
    draining: set[str] = field(default_factory=set)
    beats: list[str] = field(default_factory=list)
    asked: list[Ask] = field(default_factory=list)
    now: float = 0.0

    def __post_init__(self) -> None:
        self.discovery = Discovery(
            SCRAPE_S,
            MODELS_S,
            lambda: TIMEOUT_S,
            lambda name: self.runs.get(name, 0),
            lambda url: next((name for name, at in self.registered.items() if at == url), ""),
        )

    def find(self, *urls: str, source: str = "dns x:1") -> None:
        self.discovery.found(source, [place(url) for url in urls], OPTIONS)

    def turn(self, seconds: float = SCRAPE_S) -> None:
        """Time passes, and whoever is due is asked."""
        self.now += seconds
        self.asked = self.discovery.due(self.now)
        for ask in self.asked:
            self.take(self.discovery.answered(ask.place.url, self.answer(ask), self.now)
                      if ask.place.url in self.up
                      else self.discovery.failed(ask.place.url, "refused", self.now))  # fmt: skip

    def answer(self, ask: Ask) -> Answer:
        spec = InstanceSpec(ask.place.name, "m", Role.MIXED, "p", ask.place.url)
        return Answer(spec, SCHEMA, LOAD) if ask.whole else Answer(None, None, LOAD)

    def take(self, actions: Iterable[Action]) -> None:
        for action in actions:
            if isinstance(action, Announce):
                self.registered[action.spec.id] = action.spec.url
                if action.anew:
                    self.draining.discard(action.spec.id)
            elif isinstance(action, Beat):
                assert action.instance in self.registered
                self.beats.append(action.instance)
            else:
                assert isinstance(action, Leave)
                assert action.instance in self.registered
                if action.now:
                    del self.registered[action.instance]
                    self.draining.discard(action.instance)
                else:
                    self.draining.add(action.instance)

    def register_itself(self, name: str, url: str) -> None:
        self.registered[name] = url
        self.take(self.discovery.heard(name, url, self.now))


@pytest.fixture
def world() -> World:
    world = World(up={A, B})
    world.find(A, B)
    return world


def test_what_is_found_is_asked_what_it_is_and_then_how_busy_it_is(world: World) -> None:
    world.turn()
    assert [(ask.place.url, ask.whole) for ask in world.asked] == [(A, True), (B, True)]
    assert world.registered == {"10.0.0.1:8000": A, "10.0.0.2:8000": B}
    world.turn()
    assert [ask.whole for ask in world.asked] == [False, False]
    world.turn(SCRAPE_S / 4)
    assert world.asked == [], "not before it is time"
    world.turn(MODELS_S)
    assert [ask.whole for ask in world.asked] == [True, True], "it may serve others by now"
    world.turn()
    assert [ask.whole for ask in world.asked] == [False, False]


def test_who_has_not_answered_yet_is_not_asked_again(world: World) -> None:
    assert len(world.discovery.due(1.0)) == 2
    assert world.discovery.due(9.0) == []
    world.take(world.discovery.failed(A, "timeout", 9.0))
    assert [ask.place.url for ask in world.discovery.due(9.0)] == [A]


def test_one_that_came_back_may_be_another(world: World) -> None:
    world.turn()
    world.up.remove(A)
    world.turn()
    assert "10.0.0.1:8000" in world.registered, "the core knows what follows from silence"
    assert world.discovery.states(world.now + 4)[0].failing_s == 4
    world.up.add(A)
    world.turn()
    assert [ask.whole for ask in world.asked] == [True, False]


def test_one_that_cannot_be_registered_is_a_trouble(world: World) -> None:
    world.turn()
    world.discovery.refused(A, "no such profile", world.now)
    assert world.discovery.troubles(world.now + 3) == [f"{A}: no such profile, for 3 s"]
    world.discovery.source_failed("dns x:1", "no address of x")
    assert world.discovery.troubles(world.now)[0] == "dns x:1: no address of x"
    world.find(A, B)
    world.turn()
    assert world.discovery.troubles(world.now) == []


def test_heartbeats_of_its_own_win(world: World) -> None:
    world.turn()
    world.register_itself("vllm-0", A)
    assert world.registered == {"vllm-0": A, "10.0.0.2:8000": B}, "it is there once"
    world.turn()
    assert [ask.place.url for ask in world.asked] == [B]
    assert world.discovery.states(world.now)[0].told
    world.turn(TIMEOUT_S)  # it is silent
    assert world.beats == ["vllm-0"]
    assert world.registered == {"vllm-0": A, "10.0.0.2:8000": B}
    world.discovery.forgotten("vllm-0")
    del world.registered["vllm-0"]
    world.turn()
    assert sorted(world.registered) == ["10.0.0.1:8000", "10.0.0.2:8000"]


def test_heartbeats_under_the_same_id_change_nothing(world: World) -> None:
    world.turn()
    world.take(world.discovery.heard("10.0.0.1:8000", f"{A}/", world.now))
    assert "10.0.0.1:8000" in world.registered
    world.take(world.discovery.heard("stranger", "http://10.9.9.9:1", world.now))


def test_one_that_no_source_lists_is_drained_and_removed_when_it_is_empty(world: World) -> None:
    world.turn()
    world.runs["10.0.0.2:8000"] = 3
    world.find(A)
    world.turn()
    assert world.draining == {"10.0.0.2:8000"}
    world.turn()
    assert "10.0.0.2:8000" in world.registered
    world.runs["10.0.0.2:8000"] = 0
    world.turn()
    assert world.registered == {"10.0.0.1:8000": A}
    assert len(world.discovery.states(0.0)) == 1


def test_one_that_no_source_lists_and_that_is_down_is_removed(world: World) -> None:
    world.turn()
    world.runs["10.0.0.2:8000"] = 3
    world.find(A)
    world.up.remove(B)
    world.turn()
    assert world.registered == {"10.0.0.1:8000": A}


def test_one_that_is_listed_again_gets_work_again(world: World) -> None:
    world.turn()
    world.runs["10.0.0.2:8000"] = 3
    world.find(A)
    world.turn()
    world.find(A, B)
    world.turn()
    assert world.draining == set()


def test_what_two_sources_list_is_there_until_neither_does(world: World) -> None:
    world.find(B, source="srv y")
    world.turn()
    world.find(A)
    world.turn()
    assert world.draining == set()
    world.find(source="srv y")
    world.turn()
    assert world.draining == {"10.0.0.2:8000"}


def test_a_source_that_fails_loses_nobody(world: World) -> None:
    world.turn()
    world.discovery.source_failed("dns x:1", "no name server answers")
    world.turn()
    assert len(world.registered) == 2
    assert world.draining == set()


def test_who_was_removed_stays_away_until_it_is_added(world: World) -> None:
    world.turn()
    del world.registered["10.0.0.1:8000"]
    world.discovery.removed("10.0.0.1:8000")
    world.find(A, B)
    world.turn()
    assert list(world.registered) == ["10.0.0.2:8000"]
    ask = world.discovery.add(place(A), OPTIONS, world.now)
    assert ask is not None
    assert ask.whole
    world.take(world.discovery.answered(A, world.answer(ask), world.now))
    assert A in world.registered.values()


def test_who_was_removed_may_come_back_after_its_source_has_left_it_out(world: World) -> None:
    world.turn()
    del world.registered["10.0.0.1:8000"]
    world.discovery.removed("10.0.0.1:8000")
    world.find(B)
    world.find(A, B)
    world.turn()
    assert A in world.registered.values()


def test_what_was_added_stays(world: World) -> None:
    world.find()
    world.discovery.add(place(A), OPTIONS, 0.0)
    world.find()
    assert [state.sources for state in world.discovery.states(0.0)] == [(ADDED,)]
    world.discovery.discard(A)
    assert len(world.discovery.states(0.0)) == 0


def test_there_is_a_limit() -> None:
    discovery = Discovery(SCRAPE_S, MODELS_S, lambda: TIMEOUT_S, lambda _: 0, lambda _: "")
    many = [place(f"http://h{n}:1") for n in range(ENGINES_MAX + 5)]
    discovery.found("dns x:1", many, OPTIONS)
    assert len(discovery.states(0.0)) == ENGINES_MAX
    assert discovery.add(place(A), OPTIONS, 0.0) is None


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(("find", "lose", "up", "down", "itself", "remove", "busy", "turn")),
        st.sampled_from((A, B)),
        st.sampled_from(("dns x:1", "srv y")),
    ),
    max_size=30,
)


@given(EVENTS)
def test_in_any_order_each_engine_is_registered_once(
    events: list[tuple[str, str, str]],
) -> None:
    world = World(up={A})
    lists: dict[str, set[str]] = {"dns x:1": set(), "srv y": set()}
    own: set[str] = set()
    for kind, url, source in events:
        if kind == "find":
            lists[source].add(url)
        elif kind == "lose":
            lists[source].discard(url)
        if kind in ("find", "lose"):
            world.find(*sorted(lists[source]), source=source)
        elif kind == "up":
            world.up.add(url)
        elif kind == "down":
            world.up.discard(url)
        elif kind == "itself":
            own.add(url)
            world.register_itself(f"own {url}", url)
        elif kind == "remove":
            for name in [name for name, where in world.registered.items() if where == url]:
                del world.registered[name]
                world.discovery.removed(name)
            own.discard(url)
        elif kind == "busy":
            world.runs[place(url).name] = world.runs.get(place(url).name, 1) ^ 1
        else:
            world.turn()
        found = list(world.registered.values())
        assert len(found) == len(set(found)), world.registered
    world.runs.clear()
    world.up = {A, B}
    for _ in range(3):
        world.turn(TIMEOUT_S)
    listed = lists["dns x:1"] | lists["srv y"]
    removed = {state.url for state in world.discovery.states(world.now) if state.removed}
    expected = (listed - removed) | own
    assert set(world.registered.values()) == expected
    assert world.draining == set()
