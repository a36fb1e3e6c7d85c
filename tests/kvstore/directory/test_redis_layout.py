"""The locations and events in Redis, byte for byte; any other bytes are ignored."""

from __future__ import annotations

import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiffin.kvstore.directory.base import DirectoryEvent
from tiffin.kvstore.directory.redis_layout import (
    CLUSTER_BUCKETS,
    MEMBERS,
    HolderSet,
    Layout,
    decode_event,
    encode_event,
    encode_number,
)
from tiffin.kvstore.directory.testing import keys_of

KEY = bytes(range(16))
anything = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.binary()
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)  # fmt: skip


def test_names() -> None:
    one = Layout("acme", 1)
    assert one.names(0, [KEY]) == [b"tiffin:{acme:0}:b:" + KEY]
    assert one.nodes == b"tiffin:{acme:m}:nodes"
    assert one.number == b"tiffin:{acme:m}:number"
    assert one.events == b"tiffin:{acme:m}:events"
    assert one.bucket(b"\xff" * 16) == 0
    cluster = Layout("acme", CLUSTER_BUCKETS)
    assert cluster.bucket(b"\xff" * 16) == 63
    assert cluster.names(63, [KEY]) == [b"tiffin:{acme:63}:b:" + KEY]
    assert cluster.tags[MEMBERS] == b"acme:m"
    assert cluster.tags[63] == b"acme:63"


def test_buckets_share_the_keys_evenly() -> None:
    cluster = Layout("acme", CLUSTER_BUCKETS)
    counts = [0] * CLUSTER_BUCKETS
    for key in keys_of("even", 6400):
        counts[cluster.bucket(key)] += 1
    assert min(counts) > 50


# -- locations -------------------------------------------------------------------------------------


def test_numbers_of_living_nodes_are_read() -> None:
    holders = HolderSet([7, 9, 1 << 31])
    value = struct.pack("<5I", 9, 8, 7, 9, 1 << 31)
    assert holders[value] == (9, 7, 1 << 31), "in order, once each, without the dead"
    assert holders[None] == ()
    assert holders[encode_number(8)] == ()


@given(st.binary(max_size=300))
def test_any_value_gives_living_nodes(value: bytes) -> None:
    alive = {0, 1, 0xFFFFFFFF}
    assert set(HolderSet(alive)[value]) <= alive
    if len(value) % 4 or len(value) > 256:
        assert HolderSet(alive)[value] == ()


def test_the_memo_is_bounded() -> None:
    holders = HolderSet([1])
    for i in range(20_000):
        assert holders[encode_number(i)] == ((1,) if i == 1 else ())
    assert len(holders) <= 16_384


# -- events ----------------------------------------------------------------------------------------


def test_events_are_read_as_written() -> None:
    event = DirectoryEvent(7, 3, [KEY, bytes(16)], [b"r" * 16])
    assert decode_event(encode_event(event)) == event
    assert event.next_seq == 6


@pytest.mark.parametrize(
    "event",
    [
        DirectoryEvent(0, 1, [KEY], []),
        DirectoryEvent(1 << 32, 1, [KEY], []),
        DirectoryEvent(1, 0, [KEY], []),
        DirectoryEvent(1, 1, [b"short"], []),
        DirectoryEvent(1, 1, [], [KEY + b"x"]),
        DirectoryEvent(1, 1, [KEY] * 2001, []),
    ],
)
def test_events_that_nobody_would_write(event: DirectoryEvent) -> None:
    assert decode_event(encode_event(event)) is None


@given(anything)
def test_any_other_value_is_no_event(value: object) -> None:
    assert decode_event(msgspec.msgpack.encode(value)) is None
    assert decode_event(value) is None


def test_an_event_that_is_too_large() -> None:
    nested = b"\x81\xa1x" + b"\x91" * 100_000
    assert decode_event(nested) is None
    assert decode_event(nested[:60_000]) is None
    assert decode_event(b"\x94\x01\x01\xdd" + b"\xff" * 100_000) is None
