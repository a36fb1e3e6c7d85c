"""Whom a node that returns asks, and when it has heard enough."""

from __future__ import annotations

from typing import Any

import pytest

from tiffin.kvstore.client.pool.replication.returning import PATIENCE_S, Returning
from tiffin.kvstore.directory.base import NodeRecord
from tiffin.kvstore.errors import NodeUnavailable
from tiffin.kvstore.node.core import messages
from tiffin.kvstore.node.core.removal_memory import RemovalLog

KEYS = [bytes([index + 1]) * 16 for index in range(4)]
MINE, SLAB, OTHER = 7, b"s" * 16, b"o" * 16


def record(number: int, slab: bytes = b"") -> NodeRecord:
    return NodeRecord(f"n{number}", f"h:{number}", "", "", 1, 1, number=number, slab=slab.hex())


class World:
    """The node, the directory and the driver of one `Returning`: what they answer and are told."""

    slab = SLAB

    def __init__(self) -> None:
        self.number = MINE
        self.records = {MINE: record(MINE)}
        self.logs: dict[int, Any] = {}  # None: it does not answer
        self.told: list[tuple[list[bytes], list[bytes], bool]] = []
        self.seen: list[tuple[list[bytes], int]] = []
        self.returning = Returning(self, self, self, lambda: self.number)  # type: ignore[arg-type]

    def join(self, number: int, log: Any, slab: bytes = b"") -> None:
        self.records[number], self.logs[number] = record(number, slab), log

    def nodes(self, *, fresh: bool) -> dict[int, NodeRecord]:
        assert fresh
        return self.records

    def together(self, steps: list[Any]) -> list[Any]:
        (step,) = steps
        log = self.logs[step.node]
        if log is None:
            return [NodeUnavailable("it is gone")]
        return [log.page(step.request)]

    def catch_up(self, told: Any, missed: Any, *, whole: bool) -> None:
        self.told.append((told, missed, whole))

    def removals(self, seen: Any = (), seq: int = 0) -> int:
        if seen:
            self.seen.append((seen, seq))
        return 5


def log_of(keys: list[bytes], saw_after: int = 0) -> RemovalLog:
    log = RemovalLog()
    log.note(keys[:saw_after])
    log.saw([SLAB], log.seq)
    log.note(keys[saw_after:])
    return log


@pytest.fixture
def world() -> World:
    return World()


def test_all_are_asked_once_and_then_it_watches(world):
    world.join(1, log_of(KEYS[:2], saw_after=1), OTHER)
    world.join(2, log_of(KEYS[2:]))
    assert not world.returning.current
    world.returning.step(0.0)
    assert world.told == [(KEYS, KEYS[1:], True)]
    assert world.returning.current
    world.returning.step(2.0)
    assert len(world.told) == 1
    assert world.seen == [([OTHER], 5)]  # who has heard of all itself


def test_nothing_is_asked_before_it_is_registered(world):
    world.number = 0
    world.returning.step(0.0)
    world.number, world.records = MINE, {}
    world.returning.step(0.0)
    assert world.told == []


def test_a_new_number_asks_anew(world):
    world.returning.step(0.0)
    world.number, world.records = 9, {9: record(9)}
    assert not world.returning.current
    world.returning.step(1.0)
    assert world.told == [([], [], True)] * 2


def test_a_node_that_does_not_answer_is_waited_for(world):
    world.join(1, None)
    world.join(2, log_of(KEYS))
    world.returning.step(0.0)
    world.returning.step(PATIENCE_S - 0.1)
    assert world.told == []
    world.returning.step(PATIENCE_S)
    assert world.told == [(KEYS, KEYS, True)]


def test_without_another_that_told_everything_it_is_waited_for_longer(world):
    world.join(1, None)
    forgot = RemovalLog(remembered_max=1)
    forgot.note(KEYS)
    world.join(2, forgot)
    world.returning.step(0.0)
    world.returning.step(10 * PATIENCE_S)
    assert world.told == []
    del world.records[1]
    world.returning.step(11 * PATIENCE_S)
    assert world.told == [(KEYS[3:], KEYS[3:], False)]


def test_an_old_registration_of_its_own_is_not_asked(world):
    world.records[3] = NodeRecord("n3", f"h:{MINE}", "", "", 1, 1, number=3)
    world.returning.step(0.0)
    assert world.told == [([], [], True)]


def test_a_node_of_an_older_version_remembers_nothing(world):
    class Older:
        def page(self, request: messages.Events) -> messages.EventPage:
            return messages.EventPage(0, 1, b"\1", KEYS[0])

    world.join(1, Older())
    world.returning.step(0.0)
    assert world.told == [([], [], True)]


def test_many_keys_come_in_pages(world, monkeypatch):
    monkeypatch.setattr(messages, "EVENTS_MAX", 3)
    world.join(1, log_of(KEYS, saw_after=2))
    world.returning.step(0.0)
    assert world.told == [(KEYS, KEYS[2:], True)]
