"""What lies in Redis, byte for byte, and that anything else is nothing."""

from __future__ import annotations

import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiffin.kvstore.directory.base import NODES_MAX, RECORD_BYTES_MAX, DirectoryEvent
from tiffin.kvstore.directory.breaker import FIRST_S, MAX_S, Breaker
from tiffin.kvstore.directory.layout import (
    CLUSTER_BUCKETS,
    MEMBERS,
    Holders,
    Layout,
    decode_event,
    decode_nodes,
    encode_event,
    encode_number,
    encode_record,
)
from tiffin.kvstore.directory.testing import BAD_RECORDS, keys_of, record
from tiffin.kvstore.errors import InvalidInput

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
    holders = Holders([7, 9, 1 << 31])
    value = struct.pack("<5I", 9, 8, 7, 9, 1 << 31)
    assert holders[value] == (9, 7, 1 << 31), "in order, once each, without the dead"
    assert holders[None] == ()
    assert holders[encode_number(8)] == ()


@given(st.binary(max_size=300))
def test_any_value_gives_living_nodes(value: bytes) -> None:
    alive = {0, 1, 0xFFFFFFFF}
    assert set(Holders(alive)[value]) <= alive
    if len(value) % 4 or len(value) > 256:
        assert Holders(alive)[value] == ()


def test_the_memo_is_bounded() -> None:
    holders = Holders([1])
    for i in range(20_000):
        assert holders[encode_number(i)] == ((1,) if i == 1 else ())
    assert len(holders) <= 16_384


# -- membership ------------------------------------------------------------------------------------


def entry(expires_ms: int, **fields: object) -> bytes:
    return struct.pack(">Q", expires_ms) + encode_record(record(**fields))  # type: ignore[arg-type]


def test_living_nodes_are_read() -> None:
    pairs = [b"5", entry(1001), b"6", entry(1000), b"7", entry(5000, name="other", number=99)]
    nodes, ignored = decode_nodes(pairs, now_ms=1000)
    assert not ignored, "one whose time is over is no damage"
    assert nodes == {5: record(number=5), 7: record("other", number=7)}


@pytest.mark.parametrize("field", [b"", b"0", b"-1", b"x", b"4294967296", b"1" * 11, b"5 ", None])
def test_fields_that_are_no_numbers(field: object) -> None:
    assert decode_nodes([field, entry(2000)], now_ms=1000) == ({}, 1)


@given(anything)
def test_any_other_record_is_left_out(value: object) -> None:
    encoded = struct.pack(">Q", 2000) + bytes(16) + msgspec.msgpack.encode(value)
    assert decode_nodes([b"5", encoded], now_ms=1000) == ({}, 1)


@given(st.binary(max_size=100), st.integers(0, 200), st.integers(0, 255))
def test_no_bytes_raise(value: bytes, place: int, byte: int) -> None:
    decode_nodes([b"5", value], now_ms=0)
    damaged = bytearray(entry(2000))
    damaged[place % len(damaged)] ^= byte
    for node in decode_nodes([b"5", bytes(damaged)], now_ms=1000).nodes.values():
        assert node.number == 5


def test_what_is_nested_too_deeply_is_left_out() -> None:
    nested = b"\x81\xa1x" + b"\x91" * 100_000
    assert decode_event(nested) is None
    assert decode_event(nested[:60_000]) is None
    value = struct.pack(">Q", 2000) + bytes(16) + nested[:RECORD_BYTES_MAX]
    assert decode_nodes([b"5", value], now_ms=1000) == ({}, 1)


def test_an_odd_reply_and_too_many_nodes() -> None:
    assert decode_nodes([b"5"], now_ms=0).nodes == {}
    pairs: list[object] = []
    for number in range(1, NODES_MAX + 10):
        pairs += [str(number).encode(), entry(2000)]
    assert len(decode_nodes(pairs, now_ms=0).nodes) == NODES_MAX


@pytest.mark.parametrize("fields", BAD_RECORDS, ids=str)
def test_what_others_may_not_be_shown_is_left_out(fields: dict[str, object]) -> None:
    """Whoever can write to the directory can't command the terminals of those who read it."""
    forged = struct.pack(">Q", 2000) + bytes(16) + msgspec.msgpack.encode(record(**fields))
    pairs = [b"5", entry(2000), b"6", forged]
    assert decode_nodes(pairs, now_ms=1000) == ({5: record(number=5)}, 1)
    with pytest.raises(InvalidInput, match="shorten"):
        encode_record(record(**fields))


def test_a_restarted_node_has_another_identity() -> None:
    assert encode_record(record())[:16] == encode_record(record(free_bytes=1, number=3))[:16]
    assert encode_record(record())[:16] != encode_record(record(started_at=2.0))[:16]
    assert encode_record(record())[:16] != encode_record(record("other"))[:16]


def test_links_that_take_too_much_room_are_left_out() -> None:
    links = {f"node-{i}": [1e9, 1e-4] for i in range(2000)}
    encoded = encode_record(record(links=links))
    assert len(encoded) <= RECORD_BYTES_MAX
    pairs = [b"5", struct.pack(">Q", 2000) + encoded]
    assert decode_nodes(pairs, now_ms=0).nodes[5] == record(number=5, links={})


def test_a_record_that_is_too_large_is_refused() -> None:
    with pytest.raises(InvalidInput, match="shorten"):
        encode_record(record(socket="x" * RECORD_BYTES_MAX))


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
    assert decode_event(b"\x94\x01\x01\xdd" + b"\xff" * 100_000) is None


# -- the breaker -----------------------------------------------------------------------------------


def test_a_breaker_lets_one_probe_through_at_a_time() -> None:
    breaker = Breaker()
    assert breaker.admits(0.0)
    assert breaker.closed
    breaker.failed(0.0)
    assert not breaker.closed
    assert not breaker.admits(FIRST_S / 2)
    assert breaker.admits(FIRST_S)
    assert not breaker.admits(FIRST_S), "the others do not wait with the probe"
    breaker.succeeded()
    assert breaker.closed
    assert breaker.admits(FIRST_S)


def test_a_breaker_asks_less_and_less_often() -> None:
    breaker, now, waits = Breaker(), 0.0, []
    for _ in range(10):
        breaker.failed(now)
        asked = now
        while not breaker.admits(now):
            now += 0.01
        waits.append(round(now - asked, 1))
    assert waits[0] == FIRST_S
    assert waits == sorted(waits)
    assert waits[-1] == MAX_S
