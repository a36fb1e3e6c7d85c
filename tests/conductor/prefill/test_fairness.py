"""Orders within a tenant, and turns between tenants, against lists and plain rounds."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiffin.conductor.prefill.fairness import Line, Order, Ring, Waiter

# Binary fractions, so that sums are exact.
SECONDS = st.sampled_from([0.25, 0.5, 1.0, 2.0, 4.0, 8.0])
ORDERS: tuple[Order, ...] = ("fcfs", "shortest-first", "longest-first")


def waiter(name: str, seconds: float = 1.0, at: float = 0.0, tenant: str = "") -> Waiter:
    return Waiter(name, seconds, at, tenant=tenant)


def served(line: Line, now: float) -> str:
    """All names, in the order in which they are served at `now`."""
    names = []
    while len(line):
        names.append(line.remove(line.first(now).request_id).request_id)
    return "".join(names)


def line_of(order: Order, sizes: dict[str, float], aging_s: float = 100.0) -> Line:
    line = Line(order, aging_s)
    for at, (name, seconds) in enumerate(sizes.items()):
        line.push(waiter(name, seconds, float(at)))
    return line


# -- within a tenant -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("order", "names"), [("fcfs", "abcd"), ("shortest-first", "bdac"), ("longest-first", "cabd")]
)
def test_orders(order: Order, names: str) -> None:
    assert served(line_of(order, {"a": 2, "b": 1, "c": 5, "d": 1}), 4.0) == names


def test_who_has_waited_too_long_goes_before_the_shortest() -> None:
    """At 101 s, a and b have waited 100 s: they go in order of arrival, the rest by size."""
    line = line_of("shortest-first", {"a": 9, "b": 8, "c": 5, "d": 1})
    assert served(line, 101.0) == "abdc"


def test_equal_sizes_keep_their_order() -> None:
    assert served(line_of("longest-first", dict.fromkeys("abcde", 1.0)), 0.0) == "abcde"


def test_those_who_left_do_not_fill_the_memory() -> None:
    """One waiter waits for ever, a thousand come and go after it."""
    line = line_of("shortest-first", {"a": 1})
    for number in range(1000):
        line.push(waiter(str(number), 5.0))
        line.remove(str(number))
    assert len(line._heap) < 20
    assert served(line, 0.0) == "a"


def test_who_came_back_is_where_it_came_back() -> None:
    line = line_of("shortest-first", {"a": 1, "b": 2})
    line.remove("a")
    line.push(waiter("a", 3, 5.0))
    assert served(line, 5.0) == "ba"


@given(
    st.sampled_from(ORDERS),
    st.lists(st.tuples(SECONDS, st.sampled_from([0.0, 0.5, 1.0, 3.0])), min_size=1, max_size=40),
    st.sampled_from([0.0, 2.0, 8.0]),
)
def test_nobody_is_overtaken_by_who_came_much_later(
    order: Order, arrivals: list[tuple[float, float]], aging_s: float
) -> None:
    """One server, always busy: a waiter that is served before another one came at most `aging_s`
    after it."""
    line, left, now, at = Line(order, aging_s), [], 0.0, 0.0
    coming = []
    for number, (seconds, gap_s) in enumerate(arrivals):
        at += gap_s
        coming.append(waiter(str(number), seconds, at))
    while coming or len(line):
        while coming and (coming[0].arrived_at <= now or not len(line)):
            now = max(now, coming[0].arrived_at)
            line.push(coming.pop(0))
        left.append(line.remove(line.first(now).request_id))
        now += left[-1].seconds
    assert len(left) == len(arrivals)
    for before, after in itertools.combinations(left, 2):
        assert before.arrived_at <= after.arrived_at + aging_s


# -- between tenants -------------------------------------------------------------------------------


def ring_of(waiters: list[Waiter], quantum_s: float = 1.0, **weights: float) -> Ring:
    ring = Ring("fcfs", 100.0, quantum_s, weights)
    for one in waiters:
        ring.push(one)
    return ring


def drain(ring: Ring) -> list[Waiter]:
    return [ring.take(0.0) for _ in range(len(ring))]


def test_turns_are_of_seconds_and_not_of_requests() -> None:
    """a sends requests of 4 s, b of 1 s: b gets four for each of a's."""
    waiters = [waiter(f"a{n}", 4.0, tenant="a") for n in range(4)]
    waiters += [waiter(f"b{n}", 1.0, tenant="b") for n in range(16)]
    names = "".join(one.tenant for one in drain(ring_of(waiters)))
    assert names[:10].count("a") == 2
    assert names[:15].count("a") == 3


def test_a_flood_does_not_delay_the_others() -> None:
    waiters = [waiter(f"a{n}", tenant="a") for n in range(500)]
    waiters += [waiter("b", tenant="b")]
    names = [one.request_id for one in drain(ring_of(waiters))]
    assert names.index("b") <= 2


def test_weights_stretch_turns() -> None:
    waiters = [waiter(f"{t}{n}", tenant=t) for n in range(30) for t in "ab"]
    names = "".join(one.tenant for one in drain(ring_of(waiters, a=2.0)))
    assert names[:30].count("a") == 20


def test_without_a_quantum_tenants_do_not_matter() -> None:
    waiters = [waiter(f"{t}{n}", tenant=t) for t in "aab" for n in [len(t)]]
    waiters = [waiter(name, tenant=name[0]) for name in ("a0", "a1", "b0", "a2")]
    assert [one.request_id for one in drain(ring_of(waiters, 0.0))] == ["a0", "a1", "b0", "a2"]


def test_a_giant_takes_no_thousand_rounds() -> None:
    """100,000 seconds in turns of a thousandth: a hundred million rounds, given at once."""
    waiters = [waiter(t, 1e5, tenant=t) for t in "abc"]
    assert len(drain(ring_of(waiters, 0.001))) == 3


def test_asking_twice_changes_nothing() -> None:
    waiters = [waiter(f"{t}{n}", 3.0, tenant=t) for n in range(3) for t in "abc"]
    asked, blind = ring_of(waiters), ring_of(waiters)
    for _ in range(9):
        assert asked.first(0.0) == asked.first(0.0)
        assert asked.take(0.0) == blind.take(0.0)


def test_who_leaves_while_it_is_his_turn_gives_it_on() -> None:
    ring = ring_of([waiter(t, tenant=t) for t in "ab"])
    ring.remove(ring.first(0.0))
    assert ring.take(0.0).tenant == "b"
    assert not ring


@given(
    st.lists(st.tuples(st.sampled_from("abcd"), SECONDS), min_size=1, max_size=60),
    st.sampled_from([0.25, 1.0, 16.0]),
)
def test_turns_are_those_of_plain_rounds(
    arrivals: list[tuple[str, float]], quantum_s: float
) -> None:
    waiters = [waiter(str(n), s, tenant=t) for n, (t, s) in enumerate(arrivals)]
    plain: list[str] = []
    lines: dict[str, list[Waiter]] = {}
    for one in waiters:
        lines.setdefault(one.tenant, []).append(one)
    deficit_s = dict.fromkeys(lines, 0.0)
    while any(lines.values()):
        for tenant, line in lines.items():
            deficit_s[tenant] += quantum_s
            while line and line[0].seconds <= deficit_s[tenant]:
                deficit_s[tenant] -= line[0].seconds
                plain.append(line.pop(0).request_id)
    assert [one.request_id for one in drain(ring_of(waiters, quantum_s))] == plain


@given(
    st.lists(st.lists(SECONDS, min_size=30, max_size=30), min_size=2, max_size=5),
    st.sampled_from([0.25, 0.5, 4.0]),
    st.sampled_from(ORDERS),
)
def test_two_tenants_who_always_wait_are_served_the_same(
    sizes: list[list[float]], quantum_s: float, order: Order
) -> None:
    """Within a quantum and two waiters, at any time while all of them wait."""
    ring = Ring(order, 1e9, quantum_s)
    for tenant, seconds in enumerate(sizes):
        for number, one in enumerate(seconds):
            ring.push(waiter(f"{tenant}/{number}", one, tenant=str(tenant)))
    served_s, left = dict.fromkeys(map(str, range(len(sizes))), 0.0), [30] * len(sizes)
    while min(left) > 1:
        taken = ring.take(0.0)
        served_s[taken.tenant] += taken.seconds
        left[int(taken.tenant)] -= 1
        assert max(served_s.values()) - min(served_s.values()) <= quantum_s + 2 * 8.0
