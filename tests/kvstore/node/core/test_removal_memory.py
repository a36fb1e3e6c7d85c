"""No copy brings a removed block back: the cores of three nodes, without bytes, threads or a clock.

A copy takes three steps, between which anything may happen: it reserves at its target, sees the
block at its source, and commits. A removal reaches one node after the other. What has to hold: once
it has reached all, no node has the block, nor gets it by a copy that began before or after.
"""

from __future__ import annotations

import random

import pytest

from tiffin.kvstore.memory.arena import Arena
from tiffin.kvstore.memory.eviction import make_policy
from tiffin.kvstore.node.core import messages
from tiffin.kvstore.node.core.node_core import CoreOptions, NodeCore, ReserveStatus
from tiffin.kvstore.node.core.records import Kept, Reason
from tiffin.kvstore.node.core.removal_memory import BarredKeys, RemovalLog
from tiffin.kvstore.node.core.tier_ledger import TierSpace
from tiffin.kvstore.tiers.base import TierName

BLOCK = 4096
ROOT = bytes(16)
KEYS = [bytes([index + 1]) * 16 for index in range(3)]
TIMEOUT_S = 5.0


class OneNode:
    """A core, and what a copy and a writer ask of it."""

    def __init__(self) -> None:
        space = TierSpace(TierName.DRAM, Arena(16 * BLOCK), make_policy("lru"))
        self.core = NodeCore(space, None, CoreOptions(write_lease_s=1e9))
        self.session = self.core.connect("test", 1)

    def has(self, key: bytes) -> bool:
        return self.core.exists(key) == b"\1"

    def reserve(self, keys, now=0.0, *, copy=True):
        return self.core.reserve(self.session, keys, ROOT, 0, BLOCK, now, copy=copy)

    def commit(self, made) -> bytes:
        kept = self.core.commit(made.lease, [True] * len(made.lease.replicas))
        self.core.check()
        return kept

    def put(self, keys) -> None:
        made = self.reserve(keys, copy=False)
        if made.lease is not None:
            assert set(self.commit(made)) == {Kept.STORED}

    def remove(self, keys, now=0.0) -> int:
        return self.core.remove(keys, now, now + TIMEOUT_S).blocks


def test_a_removal_ends_the_copies_that_are_under_way_and_no_others():
    node = OneNode()
    made = node.reserve(KEYS)
    assert node.remove(KEYS[1:2]) == 0
    node.core.check()
    assert node.commit(made) == bytes([Kept.STORED, Kept.REFUSED, Kept.STORED])
    assert [node.has(key) for key in KEYS] == [True, False, True]


def test_a_writer_goes_on_and_may_begin_at_once():
    node = OneNode()
    made = node.reserve(KEYS[:1], copy=False)
    node.remove(KEYS)
    assert node.commit(made) == bytes([Kept.STORED])
    node.put(KEYS)
    assert all(map(node.has, KEYS))


def test_no_copy_begins_before_the_removal_is_over():
    node = OneNode()
    node.remove(KEYS[1:2], now=100.0)
    before = node.reserve(KEYS, now=100.0 + TIMEOUT_S - 0.001)
    assert (before.statuses, before.reason) == (bytes([ReserveStatus.GRANTED]), Reason.MISS)
    node.commit(before)
    after = node.reserve(KEYS, now=100.0 + TIMEOUT_S)
    assert after.statuses == bytes([ReserveStatus.RESIDENT] + [ReserveStatus.GRANTED] * 2)


def test_the_slot_of_a_copy_that_ended_goes_to_the_next_writer():
    node = OneNode()
    late = node.reserve(KEYS[:1])
    node.remove(KEYS[:1])
    made = node.reserve(KEYS[:1], copy=False)
    assert made.statuses == bytes([ReserveStatus.GRANTED])
    assert node.commit(late) == bytes([Kept.REFUSED])
    assert node.commit(made) == bytes([Kept.STORED])


def test_what_does_not_fit_the_memory_bars_everything_for_as_long():
    barred = BarredKeys(keys_max=2)
    barred.bar(KEYS, 0.0, 10.0)
    assert len(barred) == 2
    assert barred.bars(b"another key.....", 9.9)
    assert not barred.bars(b"another key.....", 10.0)


def test_what_is_over_is_forgotten():
    barred = BarredKeys(keys_max=2)
    for moment in range(100):
        barred.bar([bytes([moment]) * 16], float(moment), moment + 2.0)
        assert len(barred) <= 2
    assert not barred.bars(b"another key.....", 99.5)


def test_a_second_removal_ends_no_earlier_than_the_first():
    barred = BarredKeys()
    barred.bar(KEYS, 0.0, 60.0)
    barred.bar(KEYS, 1.0, 2.0)
    assert all(barred.bars(key, 59.9) for key in KEYS)


def brought_back(seed: int) -> list[bytes]:
    """Copies and removals of three nodes in a random order; what is there in the end."""
    dice = random.Random(seed)
    nodes = [OneNode() for _ in range(3)]
    for node in dice.sample(nodes, dice.randint(1, 3)):
        node.put(KEYS)
    copies: list[list] = []  # [source, target, reservation, blocks that were seen at the source]
    left = [(node, key) for node in nodes for key in KEYS]
    dice.shuffle(left)
    now = 0.0
    while left or copies:
        step = dice.randrange(4)
        now += dice.uniform(0, TIMEOUT_S / 1000)
        if step == 0 and len(copies) < 4 and (left or dice.random() < 0.5):
            source, target = dice.sample(nodes, 2)
            made = target.reserve(KEYS, now)
            if made.lease is not None:
                copies.append([source, target, made, None])
        elif step == 1 and left:
            node, key = left.pop()
            node.remove([key], now)
        elif copies:
            copy = dice.choice(copies)
            source, target, made, seen = copy
            if seen is None:
                copy[3] = [source.has(replica.key) for replica in made.lease.replicas]
                continue
            copies.remove(copy)
            target.core.commit(made.lease, seen)
            target.core.check()
        for node in nodes:
            for key in KEYS:
                over = all((other, key) not in left for other in nodes)
                assert not (over and node.has(key)), (seed, key)
    assert now < TIMEOUT_S  # of each removal
    return [key for node in nodes for key in KEYS if node.has(key)]


def test_nothing_comes_back_whatever_the_order():
    assert [brought_back(seed) for seed in range(150)] == [[]] * 150


@pytest.mark.parametrize("rule", ["a removal ends copies", "copies are barred"])
def test_each_rule_is_needed(monkeypatch, rule):
    if rule == "copies are barred":
        monkeypatch.setattr(BarredKeys, "bars", lambda self, key, now: False)
    else:
        remove = NodeCore.remove

        def without(core, keys, now, until):
            core.residency.copies.clear()
            return remove(core, keys, now, until)

        monkeypatch.setattr(NodeCore, "remove", without)
    with pytest.raises(AssertionError):
        assert not any(brought_back(seed) for seed in range(150))


SLAB, OTHER = b"a" * 16, b"b" * 16


def asked(log: RemovalLog, slab: bytes, after: int = 0) -> messages.EventPage:
    return log.page(messages.Events(7, after, removals=True, slab=slab))


class TestLog:
    def test_what_came_after_a_slab_was_seen_last_may_have_been_missed(self):
        log = RemovalLog()
        log.note(KEYS[:1])
        log.saw([SLAB], log.seq)
        log.note(KEYS[1:])
        page = asked(log, SLAB)
        assert (page.keys, page.added) == (b"".join(KEYS), bytes([0, 1, 1]))
        assert (page.id, page.removals, page.whole, page.gap) == (7, True, True, False)
        assert asked(log, OTHER).added == bytes([1, 1, 1])
        assert asked(log, OTHER).whole
        assert asked(log, SLAB, after=3).keys == b""

    def test_a_slab_that_missed_what_is_forgotten_is_told_so(self):
        log = RemovalLog(remembered_max=2)
        log.saw([SLAB], 0)
        log.note(KEYS[:1])
        log.saw([OTHER], 1)
        log.note(KEYS[1:])
        for slab, whole in ((SLAB, False), (OTHER, True), (b"", False)):
            page = asked(log, slab)
            assert (page.keys, page.whole, page.gap) == (b"".join(KEYS[1:]), whole, True)

    def test_what_others_told_is_remembered_once_and_what_they_forgot_is_not_known(self):
        log = RemovalLog()
        log.note(KEYS[:1])
        log.learn([*KEYS, *KEYS], whole=True)
        assert log.keys() == KEYS
        assert asked(log, SLAB).whole
        log.learn([], whole=False)
        log.saw([OTHER], log.seq)
        log.note(KEYS[:1])
        assert not asked(log, SLAB).whole
        page = asked(log, OTHER)
        assert (page.whole, page.added) == (True, bytes([0, 0, 0, 0, 1]))

    def test_a_number_of_another_life_begins_at_the_oldest(self):
        log = RemovalLog()
        log.note(KEYS)
        assert asked(log, SLAB, after=1 << 40).first == 1
