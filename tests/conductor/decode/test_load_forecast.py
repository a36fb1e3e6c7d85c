"""The forecast of decode load against a list of all stays, and over whole lives of requests."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiffin.conductor.decode.load_forecast import (
    Horizon,
    Span,
    expected_load,
    expected_load_of,
    relief_s,
)
from tiffin.conductor.errors import InvalidRequest
from tiffin.conductor.records import InstanceSpec, Role
from tiffin.conductor.state.instance_table import Cluster

BUCKET_S = 1.0
BUCKETS = 8
ROWS = np.arange(3)
D0, D1, D2 = 0.010, 0.001, 0.00001


def horizon() -> Horizon:
    return Horizon(BUCKET_S, BUCKETS)


def batch_at(it: Horizon, time_s: float, now: float) -> list[int]:
    return [int(count) for count in it.at(ROWS, time_s, now)[0]]


# -- one request's life ----------------------------------------------------------------------------


def test_a_promise_counts_from_the_end_of_its_prefill_to_the_end_of_its_decode() -> None:
    it = horizon()
    it.promise("a", row=1, context_tokens=100, starts_at=2.0, decode_s=3.0, now=0.0)
    course = {time_s: batch_at(it, time_s, 0.0)[1] for time_s in (0, 1, 2, 3, 4.9, 5, 7)}
    assert course == {0: 0, 1: 0, 2: 1, 3: 1, 4.9: 1, 5: 0, 7: 0}
    assert it.at(ROWS, 3.0, 0.0)[1].tolist() == [0, 100, 0]


def test_a_change_is_counted_from_what_runs() -> None:
    it = horizon()
    it.promise("runs", 0, 100, starts_at=0.0, decode_s=2.0, now=0.0)
    it.start("runs", 0.0)
    it.promise("comes", 1, 70, starts_at=1.0, decode_s=9.0, now=0.0)
    batch, context, _ = it.change(ROWS, Span(3.0, 3.0), 0.0)
    assert batch.tolist() == [-1, 1, 0]
    assert context.tolist() == [-100, 70, 0]


def test_a_prefill_that_ends_early_or_late_moves_the_decode() -> None:
    it = horizon()
    it.promise("a", 0, 1, starts_at=4.0, decode_s=2.0, now=0.0)
    it.start("a", 1.0)
    assert [batch_at(it, t, 1.0)[0] for t in (1, 2, 3, 4, 5)] == [1, 1, 0, 0, 0]
    it.promise("b", 1, 1, starts_at=2.0, decode_s=2.0, now=1.0)
    # It is late: it may come at any moment, and then stays as long as planned.
    assert batch_at(it, 4.5, 3.0)[1] == 0
    assert batch_at(it, 5.5, 4.0)[1] == 1
    it.start("b", 5.0)
    assert [batch_at(it, t, 5.0)[1] for t in (5, 6, 7)] == [1, 1, 0]
    it.check()


def test_who_outlives_its_estimate_is_given_half_of_its_age_more() -> None:
    it = horizon()
    it.promise("a", 0, 1, starts_at=0.0, decode_s=4.0, now=0.0)
    it.start("a", 0.0)
    assert batch_at(it, 4.0, 3.0) == [0, 0, 0]
    assert [batch_at(it, t, 4.0)[0] for t in (4, 5, 6, 7)] == [1, 1, 0, 0]
    assert [batch_at(it, t, 6.0)[0] for t in (6, 7, 8, 9)] == [1, 1, 1, 0]
    it.end("a", 6.5)
    assert [batch_at(it, t, 6.5)[0] for t in (6, 7, 8, 9)] == [0, 0, 0, 0]


def test_what_is_beyond_the_ring_comes_into_it() -> None:
    it = horizon()
    it.promise("far", 2, 5, starts_at=20.0, decode_s=15.0, now=0.0)
    assert batch_at(it, 21.0, 0.0)[2] == 0  # answered with the last bucket, of 7 s
    assert batch_at(it, 21.0, 12.0)[2] == 0
    assert batch_at(it, 21.0, 13.0)[2] == 1
    it.start("far", 20.0)
    assert batch_at(it, 34.0, 27.0)[2] == 1
    assert batch_at(it, 35.0, 28.0)[2] == 0
    it.end("far", 28.0)
    it.check()


@pytest.mark.parametrize("idle_s", [5.0, 8.0, 9.0, 1e6])
def test_a_long_silence_does_not_lose_who_is_still_there(idle_s: float) -> None:
    it = horizon()
    it.promise("a", 0, 1, starts_at=0.0, decode_s=2.0, now=0.0)
    it.start("a", 0.0)
    it.promise("b", 1, 1, starts_at=idle_s + 3, decode_s=2.0, now=0.0)
    assert batch_at(it, idle_s, idle_s) == [1, 0, 0]
    assert batch_at(it, idle_s + 3.5, idle_s) == [int(idle_s >= BUCKETS), 1, 0]
    it.check()


def test_what_is_past_is_answered_with_now() -> None:
    it = horizon()
    it.promise("a", 0, 1, starts_at=5.0, decode_s=1.0, now=5.0)
    assert batch_at(it, 1.0, 5.0) == [1, 0, 0]
    assert batch_at(it, 5.0, 6.0) == [1, 0, 0]  # it is late


def test_a_row_that_leaves_takes_all_with_it() -> None:
    it = horizon()
    for row in (0, 1):
        it.promise(f"runs-{row}", row, 10, starts_at=0.0, decode_s=4.0, now=0.0)
        it.start(f"runs-{row}", 0.0)
        it.promise(f"comes-{row}", row, 10, starts_at=2.0, decode_s=4.0, now=0.0)
    it.forget_row(0, 1.0)
    assert batch_at(it, 2.0, 1.0) == [0, 2, 0]
    assert it.change(ROWS, Span(2.0, 2.0), 1.0).batch.tolist() == [0, 1, 0]
    it.check()


def test_rows_beyond_the_first_ones_are_known_when_they_are_asked_for() -> None:
    it = horizon()
    assert it.at(np.array([5000]), 1.0, 0.0)[0].tolist() == [0]
    it.promise("a", 9000, 1, starts_at=0.0, decode_s=2.0, now=0.0)
    assert it.at(np.array([9000, 5000]), 1.0, 0.0)[0].tolist() == [1, 0]


@pytest.mark.parametrize(
    ("row", "starts_at", "decode_s"), [(-1, 0.0, 1.0), (0, math.nan, 1.0), (0, 0.0, -1.0)]
)
def test_nonsense_is_refused(row: int, starts_at: float, decode_s: float) -> None:
    it = horizon()
    with pytest.raises(InvalidRequest, match="give a row"):
        it.promise("a", row, 1, starts_at, decode_s, 0.0)
    assert len(it) == 0


def test_the_highest_load_of_a_span_counts() -> None:
    """A place that is promised to somebody later is not free for one who would still be there."""
    it = horizon()
    it.promise("later", 0, 100, starts_at=4.0, decode_s=2.0, now=0.0, kv_tokens=120)
    short, long, after = (it.change(ROWS[:1], Span(1.0, end), 0.0) for end in (3.0, 5.0, 7.0))
    assert [one.batch.item() for one in (short, long, after)] == [0, 1, 1]
    assert [one.context_tokens.item() for one in (short, long, after)] == [0, 100, 100]
    # Its KV is reserved in the cluster's column from its admission on.
    assert [one.kv_used_tokens.item() for one in (short, long, after)] == [-120, 0, 0]


def test_kv_room_is_that_of_the_time_when_it_is_needed() -> None:
    it = horizon()
    it.promise("ends", 0, 100, starts_at=0.0, decode_s=2, now=0.0, kv_tokens=1000)
    it.start("ends", 0.0)
    used = [it.change(ROWS[:1], Span(at, 6), 0.0).kv_used_tokens for at in (1, 3)]
    assert [one.item() for one in used] == [0, -1000]


def test_who_goes_by_chance_is_not_counted_on() -> None:
    """Of 64 who run half are to be gone: 32 ± 4, and three times 4 may still be there."""
    it = horizon()
    for number in range(64):
        it.promise(f"r{number}", 0, 10, 0.0, 2.0 if number % 2 else 7.0, 0.0)
        it.start(f"r{number}", 0.0)
    change = it.change(ROWS[:1], Span(3, 4), 0.0)
    assert (change.batch.item(), change.context_tokens.item()) == (-20, -200)
    # One request with as much context as all others: half of all is a guess.
    it.promise("big", 0, 640, 0.0, 7, 0.0)
    it.start("big", 0.0)
    it.end("r0", 0.0)
    assert it.change(ROWS[:1], Span(3, 4), 0.0).context_tokens.item() == 0


def test_a_ring_needs_buckets() -> None:
    with pytest.raises(InvalidRequest, match="2 or more"):
        Horizon(bucket_s=0.0)


# -- against a list --------------------------------------------------------------------------------


@dataclass
class Stay:
    """A request of the reference, in whole seconds."""

    row: int
    context: int
    first: int
    decode_s: int
    stop: int
    running: bool = False


class Listed:
    """The reference: a list of all stays, scanned for each question; time in whole seconds."""

    def __init__(self) -> None:
        self.now = 0
        self.stays: dict[str, Stay] = {}

    def advance(self, now: int) -> None:
        for second in range(self.now + 1, now + 1):
            for stay in self.stays.values():
                if stay.stop == second:
                    more = (second - stay.first) // 2 if stay.running else stay.decode_s
                    stay.stop = second + max(more, 1)
        self.now = now

    def promise(self, name: str, row: int, context: int, starts: int, decode_s: int) -> None:
        stop = starts + max(decode_s, 1)
        self.stays[name] = Stay(row, context, starts, decode_s, stop)

    def start(self, name: str) -> None:
        stay = self.stays.get(name)
        if stay is not None and not stay.running:
            stay.running, stay.first = True, self.now
            stay.stop = self.now + max(stay.decode_s, 1)

    def at(self, second: int) -> tuple[list[int], list[int]]:
        there = [s for s in self.stays.values() if s.first <= second < s.stop]
        batch = [sum(s.row == row for s in there) for row in ROWS]
        context = [sum(s.context for s in there if s.row == row) for row in ROWS]
        return batch, context


NAMES = st.sampled_from([f"r{number}" for number in range(6)])
EVENTS = st.one_of(
    st.tuples(
        st.just("promise"),
        NAMES,
        st.integers(0, 2),
        st.integers(0, 20),
        st.integers(0, 20),
    ),
    st.tuples(st.just("start"), NAMES),
    st.tuples(st.just("end"), NAMES),
    # Less than the ring: skipping all of it would prolong late stays once, not at each step.
    st.tuples(st.just("pass"), st.integers(0, BUCKETS - 1)),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(EVENTS, max_size=40))
def test_it_counts_as_a_list_of_all_stays_does(events: list[tuple[object, ...]]) -> None:
    it, listed = horizon(), Listed()
    for event in events:
        match event:
            case ("pass", int(seconds)):
                listed.advance(listed.now + seconds)
            case ("promise", str(name), int(row), int(wait), int(decode_s)):
                context = 10 + row + wait
                it.promise(name, row, context, listed.now + wait, decode_s, listed.now)
                listed.promise(name, row, context, listed.now + wait, decode_s)
            case ("start", str(name)):
                it.start(name, listed.now)
                listed.start(name)
            case ("end", str(name)):
                it.end(name, listed.now)
                listed.stays.pop(name, None)
        for second in range(listed.now, listed.now + BUCKETS):
            batch, context = it.at(ROWS, second, listed.now)
            assert (batch.tolist(), context.tolist()) == listed.at(second)
            span = Span(second, second + 2)
            changes = it.change(ROWS, span, listed.now)
            for row in ROWS.tolist():
                alone = it.change_of(row, span, listed.now)
                assert list(alone) == [many[row] for many in changes]
        it.check()
    for name in list(listed.stays):
        it.end(name, listed.now)
    assert not it.course(0, listed.now)[1].any()
    it.check()


# -- in seconds per token --------------------------------------------------------------------------


def cluster() -> Cluster:
    one = Cluster()
    for number in range(3):
        spec = InstanceSpec(f"d{number}", "m", Role.DECODE, "p")
        one.register(spec, (0.0, 0.0, 0.0, D0, D1, D2), 0.0)
    one.batch[:3] = (4, 0, 1)
    one.context_tokens[:3] = (4000, 0, 1000)
    return one


def test_load_is_what_is_reported_and_what_will_change() -> None:
    it, one = horizon(), cluster()
    it.promise("leaves", 0, 1000, starts_at=0.0, decode_s=2.0, now=0.0)
    it.start("leaves", 0.0)
    it.promise("comes", 1, 500, starts_at=1.0, decode_s=9.0, now=0.0)
    span = Span(3.0, 4.0)
    batch, context, _ = expected_load(it, one, ROWS, span, 0.0)
    assert batch.tolist() == [3, 1, 1]
    assert context.tolist() == [3000, 500, 1000]
    each = [expected_load_of(it, one, row, span, 0.0) for row in ROWS.tolist()]
    assert each == [(3, 3000, 0), (1, 500, 0), (1, 1000, 0)]


def test_a_horizon_that_knows_more_than_is_reported_gives_no_negative_load() -> None:
    it, one = horizon(), cluster()
    it.promise("unreported", 1, 800, starts_at=0.0, decode_s=1.0, now=0.0)
    it.start("unreported", 0.0)
    batch, context, _ = expected_load(it, one, ROWS, Span(5.0, 6.0), 0.0)
    assert (batch[1], context[1]) == (0, 0)


def test_relief_comes_when_enough_have_left() -> None:
    it, one = horizon(), cluster()
    for number, decode_s in enumerate((2.0, 4.0, 6.0)):
        it.promise(f"r{number}", 0, 1000, starts_at=0.0, decode_s=decode_s, now=0.0)
        it.start(f"r{number}", 0.0)
    limits = [D0 + (D1 + D2 * 1000) * running + D1 for running in (4, 3, 2, 1)]
    waits = [relief_s(it, one, 0, limit, 0.0, 0) for limit in limits]
    assert waits == [0.0, 2.0, 4.0, 6.0]
    assert relief_s(it, one, 0, D0, 0.0, 0) is None
