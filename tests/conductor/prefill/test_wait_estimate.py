"""Waits estimated from sums, against simulated queues."""

from __future__ import annotations

import copy
import math
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tiffin.conductor.errors import Conflict, InvalidRequest
from tiffin.conductor.prefill.fairness import Order, Waiter
from tiffin.conductor.prefill.queue import PriorityClass, QueueSettings
from tiffin.conductor.prefill.wait_estimate import Queues

NAMES = ("high", "normal", "low")
SECONDS = st.sampled_from([0.25, 0.5, 1.0, 2.0, 4.0])
ORDERS: tuple[Order, ...] = ("fcfs", "shortest-first", "longest-first")


def settings_of(*shares: float, **changes: Any) -> QueueSettings:
    shares = shares or (0.0, 0.0, 0.0)
    classes = tuple(
        PriorityClass(name=name, reserved_share=share)
        for name, share in zip(NAMES, shares, strict=True)
    )
    return QueueSettings(**{"classes": classes, "quantum_s": 0.0, "aging_s": 1e4, **changes})


def waiter(
    name: str, priority: str = "normal", seconds: float = 1.0, tenant: str = "", at: float = 0.0
) -> Waiter:
    return Waiter(name, seconds, at, priority, tenant)


def waits(queues: Queues, one: Waiter, rows: int = 4, now: float = 0.0) -> list[float]:
    found = queues.wait_s(np.arange(rows), one.priority, one.seconds, now, one.tenant)
    return [float(wait_s) for wait_s in found]


def played_out(queues: Queues, row: int, one: Waiter) -> float:
    """The true wait of this waiter in the queue of `row`, by simulation."""
    assert queues.push(row, one).accepted
    queue = copy.deepcopy(queues.at(row))
    queues.remove(one.request_id)
    assert queue is not None
    starts_s = 0.0
    while (first := queue.take(starts_s)) != one:
        assert first is not None
        starts_s += first.seconds
    return starts_s


# -- estimates -------------------------------------------------------------------------------------

work = st.lists(
    st.tuples(st.integers(0, 3), st.sampled_from(NAMES), SECONDS, st.sampled_from("abc")),
    max_size=40,
)


def queues_of(chosen: QueueSettings, items: list[tuple[int, str, float, str]]) -> Queues:
    queues = Queues(chosen)
    for number, (row, priority, seconds, tenant) in enumerate(items):
        assert queues.push(row, waiter(str(number), priority, seconds, tenant)).accepted
    return queues


def test_nobody_waits_at_an_idle_instance() -> None:
    assert waits(Queues(), waiter("new")) == [0.0] * 4


@given(work, st.sampled_from(ORDERS), st.sampled_from(NAMES), SECONDS)
def test_without_shares_and_tenants_estimates_are_exact(
    items: list[tuple[int, str, float, str]], order: Order, priority: str, seconds: float
) -> None:
    """Sizes here are powers of two, each in its own bucket."""
    queues = queues_of(settings_of(order=order), items)
    one = waiter("new", priority, seconds)
    assert waits(queues, one) == [played_out(queues, row, one) for row in range(4)]


@given(work, st.sampled_from(NAMES), SECONDS, st.sampled_from("abcd"))
def test_with_shares_and_tenants_they_are_near(
    items: list[tuple[int, str, float, str]], priority: str, seconds: float, tenant: str
) -> None:
    """Within the largest waiter of each tenant and class, and a quantum, which decide the order of
    tenants that are nearly even."""
    queues = queues_of(settings_of(0.0, 0.25, 0.125, quantum_s=0.5), items)
    one = waiter("new", priority, seconds, tenant)
    for row, wait_s in enumerate(waits(queues, one)):
        parties = {(each[1], each[3]) for each in items if each[0] == row}
        slack_s = (len(parties) + 1) * (0.5 + 4.0)
        assert played_out(queues, row, one) <= wait_s + slack_s
        before = sum(each[2] for each in items if each[0] == row)
        assert 0.0 <= wait_s <= before


def test_the_flood_of_one_tenant_is_not_the_wait_of_another() -> None:
    """With 100 s of a's work queued, one second of b's waits for about one second of a's."""
    items = [(0, "normal", 1.0, "a") for _ in range(100)]
    queues = queues_of(settings_of(quantum_s=0.5), items)
    assert waits(queues, waiter("new", tenant="b"), rows=1) == [1.0]
    assert waits(queues, waiter("new", tenant="a"), rows=1) == [100.0]


def test_a_tenant_waits_for_as_much_of_others_as_it_gets_itself() -> None:
    """a has 2 s queued, and its new one takes 1 s: at most three of b's 100 s are served
    meanwhile."""
    items = [(0, "normal", 1.0, "b") for _ in range(100)] + [(0, "normal", 2.0, "a")]
    queues = queues_of(settings_of(quantum_s=0.5), items)
    assert waits(queues, waiter("new", tenant="a"), rows=1) == [2.0 + 3.0]


def test_a_reserved_share_bounds_the_wait() -> None:
    items = [(0, "high", 1.0, "") for _ in range(100)]
    assert waits(queues_of(settings_of(), items), waiter("new", "low"), rows=1) == [100.0]
    shared = queues_of(settings_of(0.0, 0.0, 0.25), items)
    assert waits(shared, waiter("new", "low"), rows=1) == [4.0]
    assert played_out(shared, 0, waiter("new", "low")) == 4.0


def test_reserved_shares_of_lower_classes_delay_higher_ones() -> None:
    """Nine seconds of high work, a quarter of all time goes to the low class: three more."""
    items = [(0, "high", 1.0, "") for _ in range(9)] + [(0, "low", 1.0, "") for _ in range(50)]
    queues = queues_of(settings_of(0.0, 0.0, 0.25), items)
    assert waits(queues, waiter("new", "high"), rows=1) == [12.0]
    assert played_out(queues, 0, waiter("new", "high")) == pytest.approx(12.0, abs=1.0)


@pytest.mark.parametrize("order", ["shortest-first", "longest-first"])
@pytest.mark.parametrize("apart_s", [0.5, 1.25, 2.5])
@pytest.mark.parametrize("first_s", [0.0, 4.0, 16.0])
def test_whoever_will_have_aged_by_its_turn_goes_before(
    order: Order, apart_s: float, first_s: float
) -> None:
    """Ten that it would pass have come one after the other; `first_s` are those that go before it
    in any case. From none to all of them age before its turn."""
    queues = Queues(settings_of(order=order, aging_s=10.0))
    own_s, passed_s = (0.5, 2.0) if order == "shortest-first" else (2.0, 0.5)
    for number in range(10):
        at = -apart_s * (10 - number)
        assert queues.push(0, waiter(f"o{number}", seconds=passed_s, at=at)).accepted
    for number in range(round(first_s / own_s)):
        assert queues.push(0, waiter(f"f{number}", seconds=own_s, at=-0.01)).accepted
    one = waiter("new", seconds=own_s)
    (wait_s,) = waits(queues, one, rows=1)
    assert wait_s == pytest.approx(played_out(queues, 0, one), abs=1.5 * passed_s)


def test_what_is_being_computed_is_waited_for() -> None:
    queues = Queues(settings_of())
    queues.push(0, waiter("a", seconds=4.0))
    assert queues.take(0, 10.0) == waiter("a", seconds=4.0)
    assert waits(queues, waiter("new"), rows=1, now=11.0) == [3.0]
    assert waits(queues, waiter("new"), rows=1, now=20.0) == [0.0]
    queues.done(0, 12.0, left_s=0.5)
    assert waits(queues, waiter("new"), rows=1, now=12.0) == [0.5]


def test_who_waits_for_blocks_occupies_nothing() -> None:
    """Whoever can start meanwhile does; whoever starts later is behind it."""
    queues, rows = Queues(settings_of()), np.arange(2)
    assert queues.expect(0, waiter("a", seconds=5.0), 10.0).accepted
    assert waits(queues, waiter("new"), rows=2) == [0.0, 0.0]
    assert "a" in queues
    coming = queues.coming(rows, 4.0)
    assert coming is not None
    assert (coming.seconds.tolist(), coming.ready_s[0]) == ([5.0, 0.0], 6.0)
    assert queues.arrived(9.9) == []
    assert [one[:2] for one in queues.arrived(10.0)] == [(0, 10.0)]
    assert waits(queues, waiter("new"), rows=2) == [5.0, 0.0]
    assert queues.coming(rows, 10.0) is None


def test_it_takes_the_place_of_its_arrival() -> None:
    queues = Queues(settings_of())
    queues.push(0, waiter("first", at=0.0))
    queues.expect(0, waiter("fetching", at=1.0), 5.0)
    queues.push(0, waiter("third", at=2.0))
    assert queues.ready("fetching") == 0
    assert queues.ready("fetching") is None
    taken = [queues.take(0, 6.0) for _ in range(3)]
    assert [one.request_id for one in taken if one] == ["first", "fetching", "third"]
    assert queues.arrived(6.0) == []


def test_rows_are_those_that_were_asked_for() -> None:
    queues = Queues(settings_of())
    queues.push(700, waiter("a", seconds=3.0))
    found = queues.wait_s(np.array([5, 700, 5000]), "low", 1.0, 0.0)
    assert found.tolist() == [0.0, 3.0, 0.0]
    assert queues.waiting(np.array([5, 700, 9000])).tolist() == [0, 1, 0]
    assert queues.wait_s(np.empty(0, np.int64), "low", 1.0, 0.0).tolist() == []


def test_unknown_classes_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="high, normal, low"):
        Queues(settings_of()).wait_s(np.arange(2), "urgent", 1.0, 0.0)


# -- no waiter is lost -----------------------------------------------------------------------------


def test_a_lost_instance_gives_back_who_waited_there() -> None:
    queues = queues_of(settings_of(), [(1, name, 1.0, "") for name in ("low", "high", "low")])
    queues.done(1, 0.0, left_s=50.0)
    assert [one.request_id for one in queues.forget(1)] == ["0", "1", "2"]
    assert len(queues) == 0
    assert waits(queues, waiter("new", "low")) == [0.0] * 4
    assert queues.forget(1) == []
    assert queues.forget(99_999) == []


def test_a_request_waits_at_one_instance() -> None:
    queues = queues_of(settings_of(), [(0, "low", 1.0, "")])
    with pytest.raises(Conflict, match="waits already"):
        queues.push(3, waiter("0"))
    assert queues.remove("0") == (0, waiter("0", "low"))
    assert queues.remove("0") is None
    assert queues.push(3, waiter("0")).accepted


def test_preempted_waiters_are_off_the_books() -> None:
    queues = queues_of(settings_of(waiting_max=2), [(0, "low", 4.0, ""), (0, "low", 2.0, "")])
    assert [one.request_id for one in queues.push(0, waiter("h", "high")).preempted] == ["1"]
    assert waits(queues, waiter("new", "low"), rows=1) == [5.0]
    assert "1" not in queues
    assert "h" in queues


def test_classes_may_change_while_requests_wait() -> None:
    queues = queues_of(settings_of(), [(0, "high", 1.0, "a"), (1, "low", 2.0, "b")])
    queues.push(1, waiter("n", "normal", 4.0))
    queues.done(1, 0.0, left_s=0.5)
    two = (PriorityClass(name="low"), PriorityClass(name="high"))
    queues.configure(QueueSettings(classes=two, quantum_s=0.0))
    assert len(queues) == 3
    assert waits(queues, waiter("new", "low"), rows=2) == [0.0, 2.5]
    assert waits(queues, waiter("new", "high"), rows=2) == [1.0, 6.5]
    assert [queues.take(1, 0.0), queues.take(1, 0.0)] == [
        waiter("1", "low", 2.0, "b"),
        waiter("n", "normal", 4.0),
    ]


class BooksMachine(RuleBasedStateMachine):
    """The sums are those of the present waiters, after any arrivals and departures."""

    def __init__(self) -> None:
        super().__init__()
        self.chosen = settings_of(0.0, 0.25, 0.125, quantum_s=0.5, waiting_max=4)
        self.queues, self.pushed = Queues(self.chosen), 0
        self.waiting: dict[str, tuple[int, Waiter]] = {}
        self.coming: dict[str, tuple[int, Waiter]] = {}

    @rule(
        row=st.sampled_from([0, 1, 200]),
        priority=st.sampled_from(NAMES),
        seconds=st.sampled_from([0.1, 0.7, 3.3, 0.0001, 500.0]),
        tenant=st.sampled_from("ab"),
    )
    def push(self, row: int, priority: str, seconds: float, tenant: str) -> None:
        self.pushed += 1
        one = waiter(str(self.pushed), priority, seconds, tenant)
        pushed = self.queues.push(row, one)
        for victim in pushed.preempted:
            del self.waiting[victim.request_id]
        if pushed.accepted:
            self.waiting[one.request_id] = row, one

    @rule(row=st.sampled_from([0, 1, 200]), seconds=st.sampled_from([0.1, 3.3]))
    def expect(self, row: int, seconds: float) -> None:
        self.pushed += 1
        one = waiter(str(self.pushed), "normal", seconds, "a")
        pushed = self.queues.expect(row, one, 1.0 + self.pushed)
        for victim in pushed.preempted:
            del self.waiting[victim.request_id]
        if pushed.accepted:
            self.coming[one.request_id] = row, one

    @rule(number=st.integers(1, 30))
    def arrive(self, number: int) -> None:
        self.queues.arrived(1.0 + number)
        for name in [name for name in self.coming if int(name) <= number]:
            self.waiting[name] = self.coming.pop(name)

    @rule(row=st.sampled_from([0, 1, 200, 7]))
    def take(self, row: int) -> None:
        one = self.queues.take(row, 0.0)
        if one is None:
            assert all(at != row for at, _ in self.waiting.values())
        else:
            assert self.waiting.pop(one.request_id) == (row, one)

    @rule(number=st.integers(1, 30))
    def remove(self, number: int) -> None:
        expected = self.waiting.pop(str(number), None) or self.coming.pop(str(number), None)
        assert self.queues.remove(str(number)) == expected

    @rule(row=st.sampled_from([0, 1, 200, 7]))
    def forget(self, row: int) -> None:
        for one in self.queues.forget(row):
            known = self.waiting if one.request_id in self.waiting else self.coming
            assert known.pop(one.request_id) == (row, one)

    @rule()
    def configure(self) -> None:
        self.queues.configure(self.chosen)

    @invariant()
    def the_books_are_right(self) -> None:
        queues, rows = self.queues, (0, 1, 7, 200)
        present = {**self.waiting, **self.coming}
        assert len(queues) == len(present)
        assert set(queues) == {one for _, one in present.values()}
        coming = queues.coming(np.array(rows), 0.0)
        assert (np.zeros(4) if coming is None else coming.seconds) == pytest.approx(
            [sum(one.seconds for at, one in self.coming.values() if at == row) for row in rows]
        )
        assert queues.waiting(np.array(rows)).tolist() == [
            sum(at == row for at, _ in self.waiting.values()) for row in rows
        ]
        expected = np.zeros((3, 201))
        tenants = set()
        for row, one in self.waiting.values():
            expected[NAMES.index(one.priority), row] += one.seconds
            tenants.add((NAMES.index(one.priority), row, one.tenant))
        np.testing.assert_allclose(queues._class_s[:, :201], expected, atol=1e-9)
        np.testing.assert_allclose(queues._size_s.sum(axis=1)[:, :201], expected, atol=1e-9)
        assert (queues._class_s[:, :201][expected == 0.0] == 0.0).all()
        assert int(queues._tenants.sum()) == len(tenants)
        kept = {(n, row, t) for (n, t), at in queues._tenant_s.items() for row in at}
        assert kept == tenants
        assert len(queues._tenant_s) == len({(n, t) for n, _, t in tenants})
        assert queues._tenant_counts.keys() == queues._tenant_s.keys()


TestBooksMachine = BooksMachine.TestCase
TestBooksMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_thousand_instances_with_ten_thousand_waiting() -> None:
    """Sums remain right after many arrivals and departures."""
    dice = random.Random(4)
    queues = Queues(settings_of())
    for number in range(20_000):
        row, priority = dice.randrange(1000), dice.choice(NAMES)
        queues.push(row, waiter(str(number), priority, dice.uniform(0.01, 5.0), at=float(number)))
        if number % 2:
            queues.take(dice.randrange(1000), float(number))
    exact = np.zeros(1000)
    for row in range(1000):
        queue = queues.at(row)
        exact[row] = math.fsum(one.seconds for one in queue) if queue else 0.0
    # A low one waits for all of them; by then all begun work has been computed.
    np.testing.assert_allclose(queues.wait_s(np.arange(1000), "low", 1.0, 1e9), exact, atol=1e-6)


def test_beginning_at_once_is_waiting_and_being_taken() -> None:
    """A request that begins at once on an idle instance leaves the same state as one that was
    queued and taken."""
    one, other = Queues(QueueSettings()), Queues(QueueSettings())
    rows = np.arange(3)
    for at, (row, seconds, now) in enumerate([(0, 2.0, 1.0), (2, 5.0, 2.0), (0, 1.0, 6.0)]):
        waiter = Waiter(f"r{at}", seconds, now, "normal", "t")
        assert one.begin(row, waiter, now)
        assert other.push(row, waiter).accepted
        assert other.take(row, now) == waiter
        for asked in (waiter, Waiter("next", 3.0, now, "low")):
            args = (rows, asked.priority, asked.seconds, now, asked.tenant)
            assert one.wait_s(*args).tolist() == other.wait_s(*args).tolist()
    assert len(one) == len(other) == 0


def test_nobody_begins_where_others_wait_or_with_what_no_queue_takes() -> None:
    queues = Queues(QueueSettings())
    queues.push(0, Waiter("first", 1.0, 0.0))
    assert not queues.begin(0, Waiter("second", 1.0, 0.0), 0.0)
    with pytest.raises(Conflict, match="waits already"):
        queues.begin(1, Waiter("first", 1.0, 0.0), 0.0)
    with pytest.raises(InvalidRequest, match="no class"):
        queues.begin(1, Waiter("second", 1.0, 0.0, "absurd"), 0.0)
    with pytest.raises(InvalidRequest, match="more than 0 s"):
        queues.begin(1, Waiter("second", 0.0, 0.0), 0.0)
    assert queues.wait_s(np.arange(2), "normal", 1.0, 0.0).tolist() == [1.0, 0.0]
