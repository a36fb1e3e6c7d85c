"""The plan of a read, without nodes: which node it asks for what, and how answers change it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from kvsupport import fresh_prefix

from tiffin.kvstore.client.pool.pool_verbs import (
    HOME,
    Context,
    CopyHome,
    Locate,
    Outcome,
    Read,
    ReadOutcome,
    Together,
    get,
)

PREFIX = fresh_prefix(6)
NUMBER = 1  # of the home node, in the directory
DEADLINE = 10.0


class Pool:
    """Answers steps: node n has blocks `has[n]`; a node in `silent` does not answer."""

    def __init__(self, has: dict[int, set[int]], home_has: set[int] | None = None) -> None:
        self.has = has
        self.home_has = set() if home_has is None else home_has
        self.silent: set[int] = set()
        self.directory_away = False
        self.steps: list[Any] = []
        # The attributes of `HomeState`.
        self.number: int | None = NUMBER
        self.away = False
        self.lost = False
        self.admits = False
        self.seen: list[tuple[int, int]] = []

    def wants(self, prefix: Any, start: int) -> bool:
        return self.admits

    def saw(self, prefix: Any, start: int, stop: int) -> None:
        self.seen.append((start, stop))

    def seconds(self, node: int, nbytes: int) -> float:
        return 0.001 * node

    def get(self, *, at_home: bool = True) -> Outcome:
        context = Context(lambda: 0.0, self)
        verb = get(PREFIX, DEADLINE, context, self if at_home else None)
        answer: Any = None
        while True:
            try:
                step = verb.send(answer)
            except StopIteration as stop:
                outcome: Outcome = stop.value
                return outcome
            answer = self.answer(step)

    def answer(self, step: Any) -> Any:
        self.steps.append(step)
        if isinstance(step, Together):
            return [self.answer(part) for part in step.steps]
        if isinstance(step, Locate):
            return None if self.directory_away else self.holders(step.start)
        if isinstance(step, CopyHome):
            return self.copy(step)
        assert isinstance(step, Read)
        return self.read(step.run.node, step.run.start, step.run.stop)

    def copy(self, step: CopyHome) -> bool:
        at = step.start
        for nodes in step.located:
            if self.silent.issuperset(nodes):
                break
            self.home_has.add(at)
            at += 1
        return at > step.start

    def holders(self, start: int) -> list[tuple[int, ...]]:
        nodes = {**self.has, NUMBER: self.home_has}
        return [
            tuple(sorted(n for n, blocks in nodes.items() if i in blocks))
            for i in range(start, len(PREFIX))
        ]

    def read(self, node: int, start: int, stop: int) -> ReadOutcome:
        if node in self.silent or (node in (HOME, NUMBER) and HOME in self.silent):
            self.away = self.away or node == HOME
            self.lost = self.lost or node == HOME
            return ReadOutcome(0, "lost")
        blocks = self.home_has if node in (HOME, NUMBER) else self.has[node]
        got = start
        while got < stop and got in blocks:
            got += 1
        reason = None if got == stop else "miss"
        return ReadOutcome(got - start, reason, [node] * (got - start), answered=True)

    def asked(self, kind: type) -> list[Any]:
        return [step for step in self.steps if isinstance(step, kind)]

    def nodes_read(self) -> list[int]:
        return [step.run.node for step in self.asked(Read)]


def test_what_home_has_costs_no_question_to_the_directory() -> None:
    pool = Pool({2: set(range(6))}, home_has=set(range(6)))
    outcome = pool.get()
    assert (outcome.blocks, outcome.at_home, outcome.reason) == (6, 6, None)
    assert pool.nodes_read() == [HOME]
    assert not pool.asked(Locate)


def test_the_directory_is_asked_once_for_what_home_lacks() -> None:
    pool = Pool({2: set(range(4)), 3: {4, 5}}, home_has={0, 1})
    outcome = pool.get()
    assert (outcome.blocks, outcome.at_home, outcome.reason) == (6, 2, None)
    assert [step.start for step in pool.asked(Locate)] == [2]
    assert pool.nodes_read() == [HOME, 2, 3]
    assert [outcome.generations[i] for i in range(6)] == [HOME, HOME, 2, 2, 3, 3]
    assert pool.seen == [(2, 6)]


def test_blocks_that_are_copied_home_are_read_there_with_the_same_answer() -> None:
    pool = Pool({2: set(range(5))}, home_has={0})
    pool.admits = True
    outcome = pool.get()
    assert [step.start for step in pool.asked(Locate)] == [0 + 1], "one question for copy and rest"
    (copy,) = pool.asked(CopyHome)
    assert (copy.start, len(copy.located)) == (1, 4)
    assert (outcome.blocks, outcome.at_home, outcome.reason) == (5, 5, "miss")
    assert pool.nodes_read() == [HOME, HOME]


def test_home_is_not_a_source_of_its_own_copies() -> None:
    pool = Pool({2: {1}}, home_has={0})
    pool.holders = lambda start: [(NUMBER, 2), (NUMBER,), (), (), ()]  # type: ignore[method-assign]
    pool.admits = True
    pool.get()
    (copy,) = pool.asked(CopyHome)
    assert copy.located == [(2,)]


def test_a_home_that_did_not_answer_gets_no_copies() -> None:
    pool = Pool({2: set(range(6))})
    pool.silent, pool.admits = {HOME}, True
    outcome = pool.get()
    assert (outcome.blocks, outcome.at_home) == (6, 0)
    assert not pool.asked(CopyHome)


def test_the_call_that_finds_home_silent_waits_for_it_over_tcp_at_last() -> None:
    pool = Pool({2: {0, 1}}, home_has=set(range(6)))
    pool.silent = {HOME}
    outcome = pool.get()
    assert pool.nodes_read() == [HOME, 2, NUMBER], "another node first, then the only holder"
    assert (outcome.blocks, outcome.reason) == (2, "lost")


def test_a_call_that_begins_while_home_is_silent_does_not_wait_for_it() -> None:
    pool = Pool({2: {0, 1}}, home_has=set(range(6)))
    pool.silent, pool.away = {HOME}, True
    outcome = pool.get()
    assert NUMBER not in pool.nodes_read()
    assert (outcome.blocks, outcome.reason) == (2, "lost")


def test_a_home_that_answered_is_not_asked_again_over_tcp() -> None:
    """It could wait for room that its own first answer holds."""
    pool = Pool({}, home_has={0, 1, 3, 4, 5})
    outcome = pool.get()
    assert pool.nodes_read() == [HOME]
    assert (outcome.blocks, outcome.reason) == (2, "miss")


@pytest.mark.parametrize("at_home", [True, False])
def test_without_a_directory_there_is_what_home_has(at_home: bool) -> None:
    pool = Pool({2: set(range(6))}, home_has={0, 1})
    pool.directory_away = True
    outcome = pool.get(at_home=at_home)
    assert (outcome.blocks, outcome.reason) == (2 if at_home else 0, "directory")


def test_homes_own_reason_tells_more_than_a_miss_elsewhere() -> None:
    pool = Pool({})
    pool.read = lambda *_: ReadOutcome(1, "no_room", [7], answered=True)  # type: ignore[method-assign]
    assert pool.get().reason == "no_room"
    pool.directory_away = True
    assert pool.get().reason == "no_room"


def _leading(blocks: set[int]) -> int:
    """How many blocks there are before the first that is missing."""
    return next((i for i in range(len(PREFIX)) if i not in blocks), len(PREFIX))


BLOCKS = st.sets(st.integers(0, len(PREFIX) - 1))


@example({2: {0, 1}}, {0, 2}, set(), False, False, False, True)
@given(
    has=st.dictionaries(st.integers(2, 5), BLOCKS, max_size=4),
    home_has=BLOCKS,
    silent=st.sets(st.sampled_from([HOME, 2, 3, 4, 5])),
    away=st.booleans(),
    admits=st.booleans(),
    directory_away=st.booleans(),
    at_home=st.booleans(),
)
def test_a_get_brings_all_that_answers_and_says_why_there_is_no_more(
    has: dict[int, set[int]],
    home_has: set[int],
    silent: set[int],
    away: bool,
    admits: bool,
    directory_away: bool,
    at_home: bool,
) -> None:
    """For any distribution of blocks, and whichever nodes are silent."""
    pool = Pool(has, set(home_has))
    pool.silent, pool.admits, pool.directory_away = silent, admits, directory_away
    pool.away = away and HOME in silent
    outcome = pool.get(at_home=at_home)

    answering = [blocks for node, blocks in has.items() if node not in silent]
    if directory_away:
        answering = []
    at_best, for_sure = [*answering], [*answering]
    if HOME not in silent and (at_home or not directory_away):
        at_best.append(home_has)
        # Home is not asked again for what it has behind a gap, unless that is filled there.
        for_sure.append(set(range(_leading(home_has))) if at_home else home_has)
    assert _leading(set().union(*for_sure)) <= outcome.blocks <= _leading(set().union(*at_best))
    assert (outcome.reason is None) == (outcome.blocks == len(PREFIX))
    assert set(outcome.generations) >= set(range(outcome.blocks))
    assert len(pool.asked(Locate)) <= 1
    asked = [(s.run.node, s.run.start) for s in pool.asked(Read) if s.run.node != HOME]
    assert len(asked) == len(set(asked)), "no node is asked twice for the same block"
