"""The ring of a node's events, and that a core's events match its index."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiffin.kvstore.errors import InvalidInput
from tiffin.kvstore.memory.arena import Arena
from tiffin.kvstore.memory.eviction import make_policy
from tiffin.kvstore.node.core import messages
from tiffin.kvstore.node.core.event_log import EventLog, NodeEvents
from tiffin.kvstore.node.core.node_core import CoreOptions, NodeCore
from tiffin.kvstore.node.core.records import IN_DRAM, IN_NVME
from tiffin.kvstore.node.core.tier_ledger import TierSpace
from tiffin.kvstore.tiers.base import TierName

KEYS = [bytes([i]) * 16 for i in range(200)]


def test_events_are_numbered_from_one() -> None:
    log = EventLog()
    assert log.seq == 0
    assert log.since(0, 10) == NodeEvents(1, b"", b"", b"", 0)
    log.added(KEYS[0])
    log.removed(KEYS[0])
    log.added(KEYS[1], IN_NVME)
    log.moved(KEYS[1], IN_DRAM)
    assert log.seq == 4
    keys = KEYS[0] * 2 + KEYS[1] * 2
    assert log.since(0, 10) == NodeEvents(1, b"\1\0\2\1", b"\1\1\1\0", keys, 4)
    assert log.since(2, 1) == NodeEvents(3, b"\2", b"\1", KEYS[1], 4)
    assert log.since(4, 10) == NodeEvents(5, b"", b"", b"", 4)


def test_followers_of_before_take_a_move_for_another_addition() -> None:
    log = EventLog()
    log.added(KEYS[0])
    log.moved(KEYS[0], IN_NVME)
    log.removed(KEYS[0])
    assert log.page(messages.Events(7, after=0)) == messages.EventPage(
        7, 1, b"\1\1\0", KEYS[0] * 3, tiers=b"\1\2\0"
    )


def test_a_follower_goes_on_where_it_stopped() -> None:
    log = EventLog()
    for key in KEYS[:10]:
        log.added(key)
    first = log.since(0, 4)
    assert first is not None
    assert (first.first_seq, first.last_seq, first.newest_seq) == (1, 4, 10)
    second = log.since(first.last_seq, 100)
    assert second is not None
    assert first.keys + second.keys == b"".join(KEYS[:10])


def test_what_is_forgotten_is_a_gap() -> None:
    log = EventLog(events_kept=8)
    for key in KEYS[:20]:
        log.added(key)
    assert log.since(11, 100) is None
    kept = log.since(12, 100)
    assert kept is not None
    assert kept.keys == b"".join(KEYS[12:20])


@pytest.mark.parametrize("seq", [-1, 3, 1 << 40])
def test_a_number_of_another_node_is_a_gap(seq: int) -> None:
    log = EventLog()
    log.added(KEYS[0])
    log.added(KEYS[1])
    assert log.since(seq, 10) is None


def test_no_events_fit_no_limit() -> None:
    log = EventLog()
    log.added(KEYS[0])
    assert log.since(0, 0) == NodeEvents(1, b"", b"", b"", 1)
    assert log.since(0, -5) == NodeEvents(1, b"", b"", b"", 1)


def test_a_log_keeps_something() -> None:
    with pytest.raises(InvalidInput, match="at least one"):
        EventLog(events_kept=0)


@given(
    st.lists(st.tuples(st.booleans(), st.sampled_from(KEYS)), max_size=100),
    st.integers(1, 40),
    st.integers(0, 110),
    st.integers(0, 50),
)
def test_the_ring_is_the_tail_of_an_endless_list(
    happened: list[tuple[bool, bytes]], kept: int, seq: int, limit: int
) -> None:
    log = EventLog(events_kept=kept)
    for added, key in happened:
        (log.added if added else log.removed)(key)
    found = log.since(seq, limit)
    if seq > len(happened) or seq < len(happened) - kept:
        assert found is None
        return
    expected = happened[seq : seq + limit]
    assert found is not None
    assert found.first_seq == seq + 1
    assert list(found.tiers) == [added for added, _ in expected]
    assert found.keys == b"".join(key for _, key in expected)
    assert found.newest_seq == len(happened)


def test_the_events_of_a_core_are_its_index() -> None:
    """Whatever clients do and whatever is evicted: replaying the events gives the index."""
    space = TierSpace(TierName.DRAM, Arena(32 * 4096), make_policy("lru"))
    core = NodeCore(space, None, CoreOptions())
    session = core.connect("test", 1)
    rng, followed, seq = random.Random(5), set(), 0
    for turn in range(400):
        key = rng.choice(KEYS[:60])
        if rng.random() < 0.7:
            made = core.reserve(session, [key], bytes(16), 0, 8192, float(turn))
            if made.lease is not None:
                core.commit(made.lease, [rng.random() < 0.9])
        else:
            core.remove([key])
        events = core.residency.events.since(seq, 1000)
        assert events is not None
        assert all(events.news)
        for i, added in enumerate(events.tiers):
            name = events.keys[16 * i : 16 * i + 16]
            assert (name in followed) != bool(added), "every event changes something"
            (followed.add if added else followed.discard)(name)
        seq = events.last_seq
        assert followed == core.index.keys()
    assert core.residency.counters.evictions > 50
