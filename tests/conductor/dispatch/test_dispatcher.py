"""Who is released when: limits, ends, engines that ask, shares of several conductors, and how long
anybody waits at most."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tiffin.conductor.dispatch.dispatcher import LATE_S_MIN, Dispatcher
from tiffin.conductor.prefill.fairness import Waiter
from tiffin.conductor.prefill.queue import PriorityClass, QueueSettings
from tiffin.conductor.prefill.wait_estimate import FETCH_AHEAD_S_MAX, Queues

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROW = 3


def settings_of(**changes: Any) -> QueueSettings:
    return QueueSettings(**{"ahead_max": 1, "ahead_s": 0.0, "quantum_s": 0.0, **changes})


def dispatcher(**changes: Any) -> Dispatcher:
    chosen = settings_of(**changes)
    return Dispatcher(Queues(chosen), chosen)


def waiter(name: str, priority: str = "normal", seconds: float = 1.0, at: float = 0.0) -> Waiter:
    return Waiter(name, seconds, at, priority)


def fetching(
    name: str, fetch_s: float, priority: str = "normal", seconds: float = 1.0, at: float = 0.0
) -> Waiter:
    return Waiter(name, seconds, at, priority, fetch_s=fetch_s)


def fill(made: Dispatcher, *waiters: Waiter, now: float = 0.0) -> list[str]:
    """Enter all; returns who is held."""
    for one in waiters:
        assert made.enter(ROW, one, now).accepted
    return [one.request_id for one in waiters if made.holds(one.request_id)]


# -- releases --------------------------------------------------------------------------------------


def test_as_many_are_ahead_as_may_be_and_the_others_follow_in_the_queues_order() -> None:
    made = dispatcher(ahead_max=2)
    held = fill(
        made, waiter("a"), waiter("b"), waiter("c"), waiter("d", "low"), waiter("e", "high")
    )
    assert held == ["c", "d", "e"]
    released = []
    for done in ("a", "b", "e", "c"):
        made.leave(ROW, done, 1.0)
        released += made.ended()
    assert released == ["e", "c", "d"], "each takes the place of one whose prefill is done"


def test_the_next_one_is_sent_shortly_before_the_end_of_what_is_ahead() -> None:
    made = dispatcher(ahead_s=0.25)
    assert fill(made, waiter("a"), waiter("b"), waiter("c")) == ["b", "c"]
    made.tick(0.5)
    assert made.ended() == []
    made.tick(0.8)  # "a" should end at 1.0, "b" then at 2.0
    assert made.ended() == ["b"]
    assert made.ahead(ROW) == 2


def test_short_ones_are_sent_together() -> None:
    """An engine computes several of them in one step."""
    made = dispatcher(ahead_s=0.25)
    short = [waiter(str(number), seconds=0.0625) for number in range(6)]
    assert fill(made, *short) == ["4", "5"]


def test_one_that_has_begun_late_delays_the_next() -> None:
    made = dispatcher(ahead_s=0.25)
    fill(made, waiter("a"), waiter("b"))
    made.began(ROW, "a", 0.5)
    made.tick(1.0)
    assert made.ended() == []
    made.tick(1.3)
    assert made.ended() == ["b"]


def test_a_released_one_that_ends_otherwise_frees_its_place_and_a_held_one_leaves_the_queue() -> (
    None
):
    made = dispatcher()
    fill(made, waiter("a"), waiter("b"), waiter("c"))
    made.leave(ROW, "b", 0.1)  # cancelled while it was held
    assert made.ended() == ["b"]
    made.leave(ROW, "a", 0.1)  # cancelled, or expired
    assert made.ended() == ["c"]


def test_an_engine_that_stands_still_holds_nobody_for_ever() -> None:
    made = dispatcher()
    fill(made, waiter("a", seconds=4.0), waiter("b", seconds=0.25))
    made.tick(7.9)
    assert made.holds("b")
    made.tick(8.0)  # 4 s, and as much again
    assert made.ended() == ["b"]
    made.tick(8.0 + 0.25 + LATE_S_MIN - 0.1)
    assert made.ahead(ROW) == 1, "what is short has a second more, not a quarter"
    made.tick(8.0 + 0.25 + LATE_S_MIN)
    assert made.ahead(ROW) == 0
    made.leave(ROW, "a", 20.0)
    made.leave(ROW, "b", 20.0)
    assert made.ahead(ROW) == 0


def test_an_engine_goes_on_before_its_end_is_heard_of() -> None:
    for ahead_max in (0, 2):  # it has all, or the next one
        queues = Queues(settings_of(ahead_max=ahead_max))
        made = Dispatcher(queues, settings_of(ahead_max=ahead_max))
        fill(made, waiter("a"), waiter("b", seconds=2.0))
        made.leave(ROW, "a", 1.5, 1.2)
        assert queues.running_s(ROW, 1.5) == pytest.approx(1.7), "b began at 1.2"


def test_who_is_sent_only_then_begins_then() -> None:
    queues = Queues(settings_of())
    made = Dispatcher(queues, settings_of())
    fill(made, waiter("a"), waiter("b", seconds=2.0))
    made.leave(ROW, "a", 1.5, 1.2)
    assert made.ended() == ["b"]
    assert queues.running_s(ROW, 1.5) == pytest.approx(2.0)


def test_who_came_to_an_engine_that_was_idle_already_began_then() -> None:
    queues = Queues(settings_of(ahead_max=0))
    made = Dispatcher(queues, settings_of(ahead_max=0))
    fill(made, waiter("a"))
    fill(made, waiter("b", seconds=2.0, at=1.4), now=1.4)
    made.leave(ROW, "a", 1.5, 1.2)
    assert queues.running_s(ROW, 1.5) == pytest.approx(1.9)


def test_an_engine_with_an_order_of_its_own_says_what_it_computes() -> None:
    queues = Queues(settings_of(ahead_max=0))
    made = Dispatcher(queues, settings_of(ahead_max=0))
    fill(made, waiter("a"), waiter("b", seconds=2.0), waiter("c", seconds=4.0))
    assert made.ahead(ROW) == 1
    made.began(ROW, "a", 0.1)
    assert queues.wait_s(np.array([ROW]), "normal", 1.0, 0.1) == pytest.approx(1.0 + 2.0 + 4.0)
    made.leave(ROW, "a", 1.2, 1.1)
    made.began(ROW, "c", 1.1)  # not b, which waits on
    assert queues.row_of("b") == ROW
    assert queues.wait_s(np.array([ROW]), "normal", 1.0, 1.2) == pytest.approx(3.9 + 2.0)
    made.leave(ROW, "c", 5.2, 5.1)
    assert queues.wait_s(np.array([ROW]), "normal", 1.0, 5.2) == pytest.approx(1.9)
    made.leave(ROW, "b", 7.2, 7.1)
    assert (len(queues), made.ahead(ROW)) == (0, 0)


def test_who_is_preempted_is_told() -> None:
    made = dispatcher(waiting_max=1)
    fill(made, waiter("a"), waiter("l", "low"))
    pushed = made.enter(ROW, waiter("h", "high"), 0.0)
    assert [one.request_id for one in pushed.preempted] == ["l"]
    assert made.ended() == ["l"]


def test_an_instance_that_leaves_or_gets_nothing_new_ends_the_holds_there() -> None:
    made = dispatcher()
    fill(made, waiter("a"), waiter("b"))
    made.wake(ROW)
    assert made.ended() == ["b"]
    assert made.holds("b"), "it drains: the request may still be released there"
    made.forget(ROW)
    assert made.ended() == ["b"]
    assert not made.holds("b")
    assert made.ahead(ROW) == 0


def test_nothing_is_held_without_a_limit() -> None:
    made = dispatcher(ahead_max=0)
    assert fill(made, waiter("a"), waiter("b"), waiter("c")) == []
    made.leave(ROW, "a", 1.0)
    assert made.ended() == []


def test_the_limit_may_change_while_requests_wait() -> None:
    made = dispatcher()
    fill(made, waiter("a"), waiter("b"), waiter("c"), waiter("d"))
    for ahead_max, released in ((2, ["b"]), (1, []), (0, ["c", "d"])):
        made.configure(settings_of(ahead_max=ahead_max), 0.0)
        assert made.ended() == released
    assert not made.holds("d")


# -- blocks that are fetched -----------------------------------------------------------------------


def test_who_fetches_waits_for_its_turn() -> None:
    made = dispatcher(ahead_max=2)
    assert fill(made, waiter("a"), waiter("b"), fetching("f", 0.5), waiter("c")) == ["f", "c"]
    made.advance(0.9)
    assert made.holds("f"), "nothing comes before it was sent"
    made.leave(ROW, "a", 1.0)
    assert made.ended() == ["f"]
    made.leave(ROW, "b", 2.0)
    assert made.ended() == ["c"], "no sooner: it had its place in the engine, b was computed"


def test_it_is_sent_earlier_by_as_long_as_its_blocks_take_to_come() -> None:
    made = dispatcher(ahead_s=0.25)
    assert fill(made, waiter("a", seconds=4.0), fetching("f", 2.0), waiter("c")) == ["f", "c"]
    made.tick(1.7)
    assert made.ended() == []
    made.tick(1.8)
    assert made.ended() == ["f"], "a should end at 4, and its blocks come at 3.8"
    made.tick(3.9)
    assert made.ended() == []
    made.tick(4.8)  # f should end at 5
    assert made.ended() == ["c"]


def test_what_goes_before_one_that_fetches_is_sent_earlier_too() -> None:
    """In the queue's order, and for so long at most that a higher class does not wait for ever."""
    made = dispatcher(ahead_s=0.25)
    waiting = (waiter("b"), fetching("f", 2.0), waiter("c"))
    assert fill(made, waiter("a", seconds=4.0), *waiting) == ["b", "f", "c"]
    made.tick(1.7)
    assert made.ended() == []
    made.tick(1.8)
    assert made.ended() == ["b"], "b should end at 5, and f be there"
    made.tick(2.8)
    assert made.ended() == ["f"]
    slow = dispatcher()
    assert fill(slow, waiter("a", seconds=9.0), waiter("b"), fetching("f", 60.0)) == ["b", "f"]
    slow.tick(9.0 - FETCH_AHEAD_S_MAX - 0.1)
    assert slow.ended() == []
    slow.tick(9.0 - FETCH_AHEAD_S_MAX + 0.1)
    assert slow.ended() == ["b"]


def test_an_engine_does_not_stand_still_for_blocks_that_come() -> None:
    made = dispatcher(ahead_s=0.25)
    assert fill(made, fetching("f", 9.0), waiter("a"), waiter("c")) == ["c"]
    made.leave(ROW, "a", 1.0)
    assert made.ended() == ["c"]
    made.advance(9.0)
    assert made.ahead(ROW) == 2


def test_what_has_come_is_computed_before_what_was_sent_after_it() -> None:
    queues = Queues(settings_of(ahead_max=3))
    made = Dispatcher(queues, settings_of(ahead_max=3))
    assert fill(made, waiter("a"), fetching("f", 0.5, seconds=2.0), waiter("c", seconds=4.0)) == []
    assert queues.running_s(ROW, 0.0) == 1.0 + 4.0
    made.fetched("f", 0.25)
    assert queues.running_s(ROW, 0.25) == 0.75 + 2.0 + 4.0
    made.leave(ROW, "a", 1.0)
    made.began(ROW, "f", 1.0)
    assert queues.running_s(ROW, 1.0) == 2.0 + 4.0, "and then c"
    made.leave(ROW, "f", 3.5)
    assert queues.running_s(ROW, 3.5) == 4.0


@pytest.mark.parametrize("ahead_max", [0, 1])
def test_blocks_of_several_that_are_due_at_once(ahead_max: int) -> None:
    """The one that comes first may be the next one's turn."""
    queues = Queues(settings_of(ahead_max=ahead_max))
    made = Dispatcher(queues, settings_of(ahead_max=ahead_max))
    fill(made, fetching("n", 0.25), fetching("h", 0.25, "high"), fetching("l", 0.25, "low"))
    made.tick(1.0)
    for name in ("h", "n", "l"):
        made.leave(ROW, name, 2.0)
    assert (len(queues), made.ahead(ROW)) == (0, 0)


def test_an_engine_that_has_begun_has_the_blocks() -> None:
    queues = Queues(settings_of())
    made = Dispatcher(queues, settings_of())
    fill(made, fetching("f", 5.0))
    made.began(ROW, "f", 1.0)
    assert queues.running_s(ROW, 1.0) == 1.0
    made.leave(ROW, "f", 2.0)
    assert (len(queues), made.ahead(ROW)) == (0, 0)


def test_who_fetched_while_it_was_held_has_its_blocks_when_it_is_sent() -> None:
    queues = Queues(settings_of())
    made = Dispatcher(queues, settings_of())
    fill(made, waiter("a", seconds=8.0), fetching("f", 5.0))
    made.fetched("f", 0.5)
    made.tick(4.0)
    assert made.holds("f"), "there is nothing to be fetched"
    made.leave(ROW, "a", 7.0)
    assert made.ended() == ["f"]
    assert queues.running_s(ROW, 7.0) == 1.0


def test_one_whose_blocks_come_is_given_up() -> None:
    queues = Queues(settings_of())
    made = Dispatcher(queues, settings_of())
    fill(made, fetching("f", 5.0))
    made.leave(ROW, "f", 1.0)
    assert (len(queues), made.ahead(ROW)) == (0, 0)
    made.advance(6.0)
    assert queues.running_s(ROW, 6.0) == 0.0


def test_whoever_books_transfers_is_told_when_one_that_was_held_is_sent() -> None:
    made, sent = dispatcher(), list[tuple[str, float]]()
    made.sent = lambda name, now: sent.append((name, now))
    fill(made, waiter("a"), fetching("f", 0.5), waiter("c"), fetching("g", 0.5))
    made.leave(ROW, "a", 1.0)
    assert sent == [("f", 1.0)]
    made.configure(settings_of(ahead_max=0), 1.25)
    assert sent == [("f", 1.0), ("g", 1.25)]


# -- engines that ask ------------------------------------------------------------------------------


def test_for_an_engine_that_asks_nothing_is_held() -> None:
    made = dispatcher()
    made.asks(ROW, yes=True, now=0.0)
    assert fill(made, waiter("a"), waiter("b", "low"), waiter("c", "high"), waiter("d")) == []
    assert made.next(ROW, 2, 0.0, idle=True) == ["a", "c"]
    assert made.next(ROW, 1, 0.5, idle=False) == ["d"]
    assert made.ahead(ROW) == 3
    assert made.next(ROW, 9, 2.5, idle=True) == ["b"], "the three before are done, whoever says so"
    assert made.ahead(ROW) == 1
    assert made.next(ROW, 9, 3.5, idle=True) == []


def test_an_engine_that_begins_to_ask_gets_what_was_held() -> None:
    made = dispatcher()
    fill(made, waiter("a"), waiter("b"))
    made.asks(ROW, yes=True, now=0.0)
    assert made.ended() == ["b"]
    made.asks(ROW, yes=False, now=0.0)
    assert made.holds("b")


# -- several conductors ----------------------------------------------------------------------------


def test_each_has_its_share_and_the_whole_where_the_others_have_nothing() -> None:
    made = dispatcher(ahead_max=8)
    waiting = [waiter(str(number)) for number in range(16)]
    made.elsewhere = lambda row: 48
    assert 16 - len(fill(made, *waiting)) == 2, "a quarter of eight"
    made.elsewhere = lambda row: 1600
    made.leave(ROW, "0", 0.0)
    made.leave(ROW, "1", 0.0)
    assert made.ahead(ROW) == 1, "at least one"
    made.elsewhere = lambda row: 0
    made.tick(0.1)
    assert made.ahead(ROW) == 8


@given(ahead_max=st.integers(1, 16), loads=st.lists(st.integers(1, 40), min_size=1, max_size=5))
def test_together_they_exceed_the_limit_by_one_each_at_most(
    ahead_max: int, loads: list[int]
) -> None:
    """Each knows what the others have: some tens of milliseconds ago, which here is nothing."""
    made = [dispatcher(ahead_max=ahead_max) for _ in loads]
    for one, load in zip(made, loads, strict=True):
        others = itertools.repeat(sum(loads) - load)
        one.elsewhere = lambda row, others=others: next(others)  # type: ignore[misc]
        one.enter(ROW, waiter("first"), 0.0)
        for number in range(load - 1):
            one.enter(ROW, waiter(str(number)), 0.0)
        one.leave(ROW, "first", 0.0)  # now all have come
        one.enter(ROW, waiter("last"), 0.0)
    assert sum(one.ahead(ROW) for one in made) <= ahead_max + len(made)
    assert all(one.ahead(ROW) >= 1 for one in made)


# -- how long anybody waits ------------------------------------------------------------------------

SHARES = st.sampled_from([0.05, 0.1, 0.2, 0.25])
SECONDS = st.sampled_from([0.125, 0.5, 1.0, 2.0, 4.0])
LONGEST_S = 4.0
HIGHER = ("high", "normal", "middle")


def served_before_s(before: list[float], own_s: float, share: float, between: list[float]) -> float:
    """The bound of docs/conductor/queues.md: seconds of prompts that are released before a waiting
    request of a class with a reserved share. Those of its own class in `before` go before it;
    `between` are the reserved shares of the other classes."""
    reserved = [one for one in between if one]
    rest = 1.0 - sum(reserved)
    last_s = max(own_s / share, max(before, default=0.0) / rest)
    return sum(before) / share + last_s + LONGEST_S * (1 + (len(reserved) + 1 - rest) / rest)


def released_before_s(
    classes: tuple[PriorityClass, ...],
    ahead_max: int,
    before: list[float],
    own_s: float,
    coming: Callable[[], list[tuple[str, float]]],
) -> Iterator[float]:
    """Seconds of prompts that are released before one of the lowest class, after each release. What
    comes before each of them are (priority, seconds), and never less than the engine computes."""
    made = dispatcher(ahead_max=ahead_max, classes=classes)
    sizes: dict[str, float] = {}
    running: list[str] = []
    now, served_s = 0.0, 0.0

    def come(name: str, priority: str, seconds: float) -> None:
        sizes[name] = seconds
        made.enter(ROW, waiter(name, priority, seconds, now), now)
        if not made.holds(name):
            running.append(name)

    for number in range(ahead_max):
        come(f"first {number}", "high", 1.0)
    for name, seconds in [*((f"l{n}", s) for n, s in enumerate(before)), ("it", own_s)]:
        come(name, "low", seconds)
    made.ended()
    while made.holds("it"):
        for priority, seconds in coming():
            come(f"f{len(sizes)}", priority, seconds)
        done = running.pop(0)
        now += sizes[done]
        made.leave(ROW, done, now)
        for name in made.ended():
            running.append(name)
            served_s += sizes[name] if name != "it" else 0.0
        yield served_s


def classes_of(low: float, *between: float) -> tuple[PriorityClass, ...]:
    names = (*HIGHER[1 : 1 + len(between)], "low")
    shares = (*between, low)
    return (
        PriorityClass(name="high"),
        *(
            PriorityClass(name=name, reserved_share=share)
            for name, share in zip(names, shares, strict=True)
        ),
    )


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(), low=SHARES, between=st.lists(st.one_of(st.just(0.0), SHARES), max_size=2),
    ahead_max=st.integers(1, 3), before=st.lists(SECONDS, max_size=3), own_s=SECONDS,
)  # fmt: skip
def test_the_lowest_class_is_released_within_the_bound_while_the_load_persists(
    data: st.DataObject,
    low: float,
    between: list[float],
    ahead_max: int,
    before: list[float],
    own_s: float,
) -> None:
    """Whichever higher classes come."""
    above = st.sampled_from(HIGHER[: 1 + len(between)])

    def coming() -> list[tuple[str, float]]:
        return [(data.draw(above), data.draw(SECONDS)) for _ in range(2)]

    bound_s = served_before_s(before, own_s, low, between)
    classes = classes_of(low, *between)
    for served_s in released_before_s(classes, ahead_max, before, own_s, coming):
        assert served_s <= bound_s


def test_a_short_one_waits_for_a_long_one_of_its_own_class_that_is_paid_for_no_sooner() -> None:
    """The long one goes when its class has earned both, and what the class above has earned
    meanwhile goes before the short one."""
    sizes = iter((0.125, 2.0, 0.125, 2.0, 2.0, 4.0, 4.0, 0.125, 4.0, 4.0, 0.125, 0.125, 4.0, 4.0))

    def coming() -> list[tuple[str, float]]:
        return [(name, next(sizes, 0.125)) for name in ("high", "high", "normal", "normal")]

    before, own_s = [0.125, 0.5, 4.0], 0.125
    *_, served_s = released_before_s(classes_of(0.2, 0.2), 3, before, own_s, coming)
    assert served_s == 35.875
    without_the_long_one_s = (sum(before) + own_s) / 0.2 + LONGEST_S * (1 + 1.2 / 0.8)
    assert without_the_long_one_s < served_s <= served_before_s(before, own_s, 0.2, [0.2])


# -- whatever happens ------------------------------------------------------------------------------


class Life(RuleBasedStateMachine):
    """Requests come, begin, end and are given up in any order, at two instances of two kinds."""

    @initialize(
        ahead_max=st.integers(0, 3),
        ahead_s=st.sampled_from([0.0, 0.5]),
        asks=st.booleans(),
        order=st.sampled_from(["fcfs", "shortest-first"]),
    )
    def start(self, ahead_max: int, ahead_s: float, asks: bool, order: str) -> None:
        chosen = settings_of(ahead_max=ahead_max, ahead_s=ahead_s, order=order, waiting_max=4)
        self.queues = Queues(chosen)
        self.made, self.chosen, self.now, self.number = (
            Dispatcher(self.queues, chosen),
            chosen,
            0.0,
            0,
        )
        self.rows: dict[str, int] = {}
        self.held: set[str] = set()
        self.given: set[str] = set()
        self.made.asks(1, yes=asks, now=0.0)

    @rule(
        row=st.integers(0, 1),
        priority=st.sampled_from(["high", "normal", "low"]),
        seconds=SECONDS,
        fetch_s=st.sampled_from([0.0, 0.0, 0.25, 3.0]),
    )
    def come(self, row: int, priority: str, seconds: float, fetch_s: float) -> None:
        self.number += 1
        name = str(self.number)
        pushed = self.made.enter(
            row, fetching(name, fetch_s, priority, seconds, self.now), self.now
        )
        for victim in pushed.preempted:
            del self.rows[victim.request_id]
        if pushed.accepted:
            self.rows[name] = row
            if self.made.holds(name):
                self.held.add(name)

    @rule(data=st.data(), began=st.booleans())
    def end(self, data: st.DataObject, began: bool) -> None:
        if not self.rows:
            return
        name = data.draw(st.sampled_from(sorted(self.rows)))
        if began:
            self.made.began(self.rows[name], name, self.now)
        else:
            self.made.leave(self.rows.pop(name), name, self.now)

    @rule(data=st.data())
    def fetched(self, data: st.DataObject) -> None:
        if self.rows:
            self.made.fetched(data.draw(st.sampled_from(sorted(self.rows))), self.now)

    @rule(row=st.integers(0, 1), n=st.integers(1, 3), idle=st.booleans())
    def ask(self, row: int, n: int, idle: bool) -> None:
        names = self.made.next(row, n, self.now, idle=idle)
        assert not self.given & set(names), "each is given once"
        assert all(self.rows[name] == row for name in names)
        self.given |= set(names)

    @rule(seconds=st.sampled_from([0.1, 1.0, 9.0]))
    def time(self, seconds: float) -> None:
        self.now += seconds
        self.made.tick(self.now)

    @rule(row=st.integers(0, 1))
    def leave(self, row: int) -> None:
        self.made.forget(row)
        self.rows = {name: at for name, at in self.rows.items() if at != row}

    @invariant()
    def nobody_waits_for_a_place_that_is_free(self) -> None:
        for row in (0, 1) if self.number else ():
            waiting = self.queues.waiting_at(row)
            assert not waiting or self.made.ahead(row) >= 1

    @invariant()
    def whoever_is_held_no_more_was_told(self) -> None:
        if self.number:
            told = set(self.made.ended())
            gone = {name for name in self.held if not self.made.holds(name)}
            assert gone <= told
            self.held -= gone

    def teardown(self) -> None:
        for name, row in list(self.rows.items()) if self.number else ():
            self.made.leave(row, name, self.now)
        if self.number:
            assert len(self.queues) == 0


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
