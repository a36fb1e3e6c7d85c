"""One instance's prefill queue: classes, reserved shares, preemption; and a naive reference."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tiffin.conductor.errors import Conflict, InvalidRequest
from tiffin.conductor.prefill.fairness import Order, Waiter
from tiffin.conductor.prefill.queue import PrefillQueue, PriorityClass, QueueSettings

NAMES = ("high", "normal", "low")
SECONDS = st.sampled_from([0.25, 0.5, 1.0, 2.0, 4.0])


def classes(*shares: float) -> tuple[PriorityClass, ...]:
    return tuple(
        PriorityClass(name=name, reserved_share=share)
        for name, share in zip(NAMES, shares, strict=True)
    )


def queue_of(**changes: Any) -> PrefillQueue:
    changes = {"classes": classes(0, 0, 0), **changes}
    return PrefillQueue(QueueSettings(**changes))


def waiter(
    name: str, priority: str = "normal", seconds: float = 1.0, tenant: str = "", at: float = 0.0
) -> Waiter:
    return Waiter(name, seconds, at, priority, tenant)


def fill(queue: PrefillQueue, *waiters: Waiter) -> PrefillQueue:
    for one in waiters:
        assert queue.push(one) == (True, ())
    return queue


def drain(queue: PrefillQueue) -> list[str]:
    names = []
    while (one := queue.take(0.0)) is not None:
        names.append(one.request_id)
    return names


# -- classes ---------------------------------------------------------------------------------------


def test_higher_classes_first() -> None:
    queue = fill(queue_of(), waiter("l", "low"), waiter("n"), waiter("h", "high"))
    assert drain(queue) == ["h", "n", "l"]


def test_a_reserved_share_is_served_ahead() -> None:
    """It gets a quarter of all seconds, once its first second has been saved."""
    queue = queue_of(classes=classes(0, 0, 0.25))
    for number in range(30):
        fill(queue, waiter(f"h{number}", "high"), waiter(f"l{number}", "low"))
    names = "".join(name[0] for name in drain(queue))
    assert names[:32].count("l") == 7
    assert "ll" not in names[:32]


def test_without_a_share_a_class_may_wait_for_ever() -> None:
    queue = fill(queue_of(), waiter("l", "low"))
    for number in range(100):
        fill(queue, waiter(str(number), "high"))
        assert queue.take(0.0) != waiter("l", "low")


def test_shares_are_not_saved_while_nobody_waits() -> None:
    queue = queue_of(classes=classes(0, 0, 0.5))
    fill(queue, *(waiter(f"a{n}", "high") for n in range(50)))
    for _ in range(40):
        queue.take(0.0)
    fill(queue, *(waiter(f"l{n}", "low") for n in range(5)))
    assert [name[0] for name in drain(queue)][:4] == ["a", "a", "l", "a"]


def test_shares_are_lost_with_the_last_who_waited() -> None:
    """The low class has saved 3 s for a long one, which is cancelled."""
    queue = queue_of(classes=classes(0, 0, 0.5))
    fill(queue, *(waiter(f"h{n}", "high", 2.0) for n in range(4)), waiter("l", "low", 4.0))
    for _ in range(3):
        queue.take(0.0)
    queue.remove("l")
    fill(queue, waiter("l1", "low", 1.0))
    assert drain(queue) == ["h3", "l1"]


def test_who_is_served_in_his_own_right_saves_nothing() -> None:
    queue = fill(queue_of(classes=classes(0, 0, 0.5)), *(waiter(f"l{n}", "low") for n in range(9)))
    for _ in range(6):
        queue.take(0.0)
    fill(queue, waiter("h0", "high"), waiter("h1", "high"))
    assert drain(queue) == ["h0", "h1", "l6", "l7", "l8"]


def test_what_was_earned_is_lost_once_no_higher_class_waits() -> None:
    """Else a class that was served in its own right for long would go before all higher ones that
    come then, by all that lower classes were served meanwhile."""
    queue = queue_of(classes=classes(0, 0.25, 0.25), quantum_s=0.0)
    for number in range(64):
        fill(queue, waiter(f"n{number}"), waiter(f"l{number}", "low"))
    for _ in range(64):
        queue.take(0.0)
    fill(queue, *(waiter(f"h{number}", "high") for number in range(8)))
    assert [name[0] for name in drain(queue)[:8]].count("n") <= 2, "two quarters of eight"


waiters = st.lists(st.tuples(st.sampled_from(NAMES), SECONDS, st.booleans()), max_size=80)
shares = st.sampled_from([(0.0, 0.0, 0.0), (0.0, 0.25, 0.125), (0.0, 0.0, 0.5), (0.5, 0.25, 0.0)])


@given(waiters, shares)
def test_priorities_are_not_inverted_beyond_the_shares(
    work: list[tuple[str, float, bool]], reserved: tuple[float, float, float]
) -> None:
    """At any time, the seconds that a class was served before waiting higher classes are at most
    its share of all served seconds."""
    queue = queue_of(classes=classes(*reserved))
    ahead_s, all_s = dict.fromkeys(NAMES, 0.0), 0.0
    for number, (priority, seconds, take) in enumerate(work):
        fill(queue, waiter(str(number), priority, seconds))
        if not take:
            continue
        waiting = {one.priority for one in queue}
        one = queue.take(0.0)
        assert one is not None
        all_s += one.seconds
        higher = NAMES[: NAMES.index(one.priority)]
        if waiting.intersection(higher):
            ahead_s[one.priority] += one.seconds
        for name, share in zip(NAMES, reserved, strict=True):
            assert ahead_s[name] <= share * all_s


@given(st.lists(SECONDS, min_size=40, max_size=40), st.lists(SECONDS, min_size=40, max_size=40))
def test_who_always_waits_gets_its_share(high: list[float], low: list[float]) -> None:
    """Less the waiter that the class is saving for."""
    queue = queue_of(classes=classes(0, 0, 0.25), quantum_s=0.0)
    for number, (one, other) in enumerate(zip(high, low, strict=True)):
        fill(queue, waiter(f"h{number}", "high", one), waiter(f"l{number}", "low", other))
    all_s = low_s = 0.0
    while sum(one.priority == "high" for one in queue) > 1:
        taken = queue.take(0.0)
        assert taken is not None
        all_s += taken.seconds
        low_s += taken.seconds * (taken.priority == "low")
        assert low_s >= 0.25 * all_s - 4.0 - 0.25 * 4.0


@given(waiters, shares, st.sampled_from([0.0, 0.5]))
def test_nobody_is_lost(
    work: list[tuple[str, float, bool]], reserved: tuple[float, float, float], quantum_s: float
) -> None:
    """However small the queue is, each waiter is refused, preempted or served exactly once."""
    queue = queue_of(classes=classes(*reserved), quantum_s=quantum_s, waiting_max=5)
    left: list[str] = []
    for number, (priority, seconds, take) in enumerate(work):
        pushed = queue.push(waiter(str(number), priority, seconds))
        left += [one.request_id for one in pushed.preempted]
        if not pushed.accepted:
            left.append(str(number))
        assert len(queue) <= 5
        if take and (one := queue.take(0.0)) is not None:
            left.append(one.request_id)
    left += drain(queue)
    assert sorted(left, key=int) == [str(number) for number in range(len(work))]


# -- a full queue ----------------------------------------------------------------------------------


def test_a_full_queue_refuses_its_own_class() -> None:
    queue = fill(queue_of(waiting_max=2), waiter("a"), waiter("b"))
    assert queue.push(waiter("c")) == (False, ())
    assert queue.push(waiter("l", "low")) == (False, ())
    assert drain(queue) == ["a", "b"]


def test_a_higher_class_pushes_out_the_newest_of_the_lowest() -> None:
    queue = queue_of(waiting_max=4)
    fill(queue, waiter("l0", "low"), waiter("n"), waiter("l1", "low"), waiter("h", "high"))
    pushed = queue.push(waiter("h1", "high"))
    assert pushed.accepted
    assert [one.request_id for one in pushed.preempted] == ["l1"]
    assert [one.request_id for one in queue.push(waiter("h2", "high")).preempted] == ["l0"]
    assert [one.request_id for one in queue.push(waiter("h3", "high")).preempted] == ["n"]
    assert queue.push(waiter("h4", "high")) == (False, ())


def test_preemption_can_be_switched_off() -> None:
    queue = fill(queue_of(waiting_max=1, preempting=False), waiter("l", "low"))
    assert queue.push(waiter("h", "high")) == (False, ())


def test_a_class_keeps_its_share_of_the_places() -> None:
    queue = queue_of(waiting_max=4, classes=classes(0, 0, 0.25))
    fill(queue, *(waiter(f"l{n}", "low") for n in range(4)))
    for number in range(3):
        assert queue.push(waiter(f"h{number}", "high")).accepted
    assert queue.push(waiter("h3", "high")) == (False, ())
    assert "l0" in queue


# -- what comes in ---------------------------------------------------------------------------------


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf"), 1e9])
def test_impossible_estimates_are_refused(seconds: float) -> None:
    queue = queue_of()
    with pytest.raises(InvalidRequest, match="give more than 0 s"):
        queue.push(waiter("a", seconds=seconds))
    assert len(queue) == 0


def test_unknown_classes_are_refused_with_the_known_ones() -> None:
    with pytest.raises(InvalidRequest, match="high, normal, low"):
        queue_of().push(waiter("a", "urgent"))


def test_nobody_waits_twice() -> None:
    queue = fill(queue_of(), waiter("a"))
    with pytest.raises(Conflict, match="waits here already"):
        queue.push(waiter("a", "high"))
    with pytest.raises(Conflict, match="waits here already"):
        queue.adopt(waiter("a"))
    assert drain(queue) == ["a"]


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"classes": [{"name": "a"}, {"name": "a"}]}, "each name once"),
        ({"classes": [{"name": "a", "reserved_share": 0.95}]}, "at most 0.9"),
        ({"classes": []}, "length"),
        ({"quantum_s": 0.0001}, "0 for no fairness"),
        ({"order": "random"}, "order"),
        ({"aging": 3}, "unknown field"),
    ],
)
def test_settings_that_make_no_sense(changed: dict[str, Any], match: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=match):
        msgspec.json.decode(msgspec.json.encode(changed), type=QueueSettings)


# -- the model -------------------------------------------------------------------------------------


class Model:
    """The reference: the same rules with lists, sorting and one round at a time."""

    def __init__(self, settings: QueueSettings) -> None:
        self.settings = settings
        self.lines: list[dict[str, list[Waiter]]] = [{} for _ in settings.classes]
        self.deficit_s: list[dict[str, float]] = [{} for _ in settings.classes]
        self.given = [False] * len(settings.classes)
        self.earned_s = [0.0] * len(settings.classes)

    def everybody(self) -> list[Waiter]:
        return [one for lines in self.lines for line in lines.values() for one in line]

    def push(self, one: Waiter) -> None:
        number = NAMES.index(one.priority)
        tenant = one.tenant if self.settings.quantum_s else ""
        self.lines[number].setdefault(tenant, []).append(one)
        self.deficit_s[number].setdefault(tenant, 0.0)

    def head(self, line: list[Waiter], now: float) -> Waiter:
        order = self.settings.order
        if order == "fcfs" or now - line[0].arrived_at >= self.settings.aging_s:
            return line[0]
        pick = min if order == "shortest-first" else max
        return pick(line, key=lambda one: one.seconds)

    def first(self, number: int, now: float) -> Waiter:
        lines, deficit_s = self.lines[number], self.deficit_s[number]
        while True:
            tenant = next(iter(lines))
            head = self.head(lines[tenant], now)
            if not self.settings.quantum_s:
                return head
            if not self.given[number]:
                deficit_s[tenant] += self.settings.quantum_s
                self.given[number] = True
            if deficit_s[tenant] >= head.seconds:
                return head
            lines[tenant] = lines.pop(tenant)
            self.given[number] = False

    def next(self, now: float) -> tuple[int, Waiter, bool] | None:
        waiting = [number for number, lines in enumerate(self.lines) if lines]
        if not waiting:
            return None
        top = waiting[0], self.first(waiting[0], now), False
        for number in waiting[1:]:
            if self.earned_s[number] > 0:
                head = self.first(number, now)
                if self.earned_s[number] >= head.seconds:
                    return number, head, True
        return top

    def take(self, now: float) -> Waiter | None:
        found = self.next(now)
        if found is None:
            return None
        number, one, ahead = found
        top, *lower = (at for at, lines in enumerate(self.lines) if lines)
        self.earned_s[top] = 0.0
        for at in lower:
            self.earned_s[at] += self.settings.classes[at].reserved_share * one.seconds
        if ahead:
            self.earned_s[number] -= one.seconds
        self.deficit_s[number][one.tenant if self.settings.quantum_s else ""] -= one.seconds
        self.remove(one)
        return one

    def remove(self, one: Waiter) -> None:
        number = NAMES.index(one.priority)
        tenant = one.tenant if self.settings.quantum_s else ""
        lines = self.lines[number]
        lines[tenant].remove(one)
        if not lines[tenant]:
            if next(iter(lines)) == tenant:
                self.given[number] = False
            del lines[tenant], self.deficit_s[number][tenant]
        if not lines:
            self.earned_s[number] = 0.0


class QueueMachine(RuleBasedStateMachine):
    """After any operations, queue and model agree on the next waiter."""

    @initialize(
        order=st.sampled_from(["fcfs", "shortest-first", "longest-first"]),
        reserved=shares,
        quantum_s=st.sampled_from([0.0, 0.25, 2.0]),
        aging_s=st.sampled_from([0.0, 3.0, 50.0]),
    )
    def start(
        self, order: Order, reserved: tuple[float, float, float], quantum_s: float, aging_s: float
    ) -> None:
        self.settings = QueueSettings(
            classes=classes(*reserved),
            order=order,
            quantum_s=quantum_s,
            aging_s=aging_s,
            waiting_max=12,
        )
        self.queue, self.model = PrefillQueue(self.settings), Model(self.settings)
        self.now, self.pushed = 0.0, 0

    @rule(
        priority=st.sampled_from(NAMES),
        seconds=SECONDS,
        tenant=st.sampled_from("abc"),
        later_s=st.sampled_from([0.0, 0.5, 2.0]),
    )
    def push(self, priority: str, seconds: float, tenant: str, later_s: float) -> None:
        self.now += later_s
        self.pushed += 1
        one = waiter(str(self.pushed), priority, seconds, tenant, self.now)
        full = len(self.queue) >= 12
        pushed = self.queue.push(one)
        assert full == (not pushed.accepted or bool(pushed.preempted))
        for victim in pushed.preempted:
            assert NAMES.index(victim.priority) > NAMES.index(priority)
            self.model.remove(victim)
        if pushed.accepted:
            self.model.push(one)

    @rule()
    def take(self) -> None:
        one = self.queue.take(self.now)
        assert one == self.model.take(self.now)
        if one is not None:
            self.now += one.seconds

    @precondition(lambda self: len(self.queue) > 0)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(list(self.queue)))
        assert self.queue.remove(one.request_id) == one
        assert self.queue.remove(one.request_id) is None
        self.model.remove(one)

    @invariant()
    def same_waiters(self) -> None:
        assert set(self.queue) == set(self.model.everybody())
        assert len(self.queue) == len(self.model.everybody())


TestQueueMachine = QueueMachine.TestCase
TestQueueMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
