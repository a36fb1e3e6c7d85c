"""A node's entry in Redis, byte for byte; any other bytes are ignored."""

from __future__ import annotations

import hashlib
import hmac
import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiffin.kvstore.directory.base import NODES_MAX, RECORD_BYTES_MAX
from tiffin.kvstore.directory.node_records import (
    REPEATED_S,
    Found,
    decode_entries,
    encode_entry,
    identity_of,
)
from tiffin.kvstore.directory.testing import BAD_RECORDS, record
from tiffin.kvstore.errors import InvalidInput

TOKEN = b"a token of the pool, of 32 bytes"
NOW_MS = 1_700_000_000_000
anything = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.binary()
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)  # fmt: skip


def entry(
    *,
    ends_ms: int = NOW_MS + 1,
    said_at_ms: int = NOW_MS,
    pool: str = "acme",
    token: bytes = TOKEN,
    **fields: object,
) -> bytes:
    said = record(**{"number": 5, **fields})  # type: ignore[arg-type]
    return struct.pack(">Q", ends_ms) + encode_entry(said, said_at_ms, pool, token)


def decoded(*pairs: object, pool: str = "acme", token: bytes = TOKEN) -> Found:
    return decode_entries(pairs, NOW_MS, pool, token)


def test_the_bytes_of_an_entry() -> None:
    """The entry by docs/directory.md, without the code that writes it."""
    said = record(number=5)
    encoded = msgspec.msgpack.encode(said)
    body = identity_of(said) + NOW_MS.to_bytes(8, "big") + encoded
    parts = (b"tiffin 2", b"node record", b"acme", body)
    text = b"".join(len(part).to_bytes(4, "little") + part for part in parts)
    stamp = hmac.new(TOKEN, text, hashlib.sha256).digest()
    expected = (NOW_MS + 1).to_bytes(8, "big") + body[:24] + stamp + encoded
    assert entry() == expected
    assert decoded(b"5", expected) == ({5: said}, 0, 0, ())


def test_living_nodes_are_read() -> None:
    over = entry(ends_ms=NOW_MS, number=6)
    found = decoded(b"5", entry(), b"6", over, b"7", entry(name="other", number=7))
    assert found == ({5: record(number=5), 7: record("other", number=7)}, 0, 0, ())


def test_a_number_that_was_given_just_now_is_neither_a_node_nor_damage() -> None:
    assert decoded(b"5", entry()[:24]) == ({}, 0, 0, ())


@pytest.mark.parametrize("field", [b"", b"0", b"-1", b"x", b"4294967296", b"1" * 11, b"5 ", None])
def test_fields_that_are_no_numbers(field: object) -> None:
    assert decoded(field, entry()) == ({}, 1, 0, ())


@pytest.mark.parametrize(
    "foreign",
    [
        entry(token=b"another token of another pool..."),
        entry(token=b""),
        entry(pool="acme-2"),
        entry(number=6),
        entry(said_at_ms=NOW_MS - round(REPEATED_S * 1000) - 1),
        entry(said_at_ms=NOW_MS + round(REPEATED_S * 1000) + 1),
        struct.pack(">Q", NOW_MS + 1) + identity_of(record()) + msgspec.msgpack.encode(record()),
    ],
    ids=["token", "no token", "pool", "place", "old", "from the future", "version before"],
)
def test_what_no_node_of_the_pool_says_here_and_now(foreign: bytes) -> None:
    found = decoded(b"5", foreign)
    assert found == ({}, 0, 1, ("node-a at node-a.example:7700",))


def test_a_pool_without_a_token_has_no_node_with_one() -> None:
    assert decoded(b"5", entry(token=b""), token=b"").nodes == {5: record(number=5)}
    assert decoded(b"5", entry(), token=b"").strangers == 1


@pytest.mark.parametrize("place", range(8, len(entry())))
def test_every_byte_behind_the_expiry_is_under_the_stamp(place: int) -> None:
    changed = bytearray(entry())
    changed[place] ^= 1
    assert decoded(b"5", bytes(changed)).nodes == {}


@given(anything)
def test_any_other_record_is_left_out(value: object) -> None:
    encoded = struct.pack(">Q", NOW_MS + 1) + bytes(16) + msgspec.msgpack.encode(value)
    nodes, ignored, strangers, _ = decoded(b"5", encoded)
    assert (nodes, ignored + strangers) == ({}, 1)


@given(st.binary(max_size=200))
def test_no_bytes_raise(value: bytes) -> None:
    assert not decoded(b"5", value).nodes
    assert not decoded(b"5", entry()[:24] + value).nodes


def test_what_is_nested_too_deeply_is_left_out() -> None:
    nested = b"\x81\xa1x" + b"\x91" * 100_000
    for length in (RECORD_BYTES_MAX, len(nested)):
        value = struct.pack(">Q", NOW_MS + 1) + bytes(16) + nested[:length]
        assert decoded(b"5", value) == ({}, 0, 1, ())


def test_an_odd_reply_and_too_many_nodes() -> None:
    assert decoded(b"5").nodes == {}
    pairs: list[object] = []
    for number in range(1, NODES_MAX + 10):
        pairs += [str(number).encode(), entry(number=number)]
    assert len(decoded(*pairs).nodes) == NODES_MAX


@pytest.mark.parametrize("fields", BAD_RECORDS, ids=str)
def test_what_others_may_not_be_shown_is_left_out(fields: dict[str, object]) -> None:
    """A writer of the directory, with the token or without, can't send control characters to the
    terminals of its readers."""
    made = record(**{"number": 6, **fields})  # type: ignore[arg-type]
    forged = struct.pack(">Q", NOW_MS + 1) + bytes(16) + msgspec.msgpack.encode(made)
    found = decoded(b"5", entry(), b"6", forged)
    assert found == ({5: record(number=5)}, 0, 1, ())
    with pytest.raises(InvalidInput, match="shorten"):
        encode_entry(made, NOW_MS, "acme", TOKEN)


def test_a_restarted_node_has_another_identity() -> None:
    assert identity_of(record()) == identity_of(record(free_bytes=1, number=3))
    assert identity_of(record()) != identity_of(record(started_at=2.0))
    assert identity_of(record()) != identity_of(record("other"))


def test_links_that_take_too_much_room_are_left_out() -> None:
    links = {f"node-{i}": [1e9, 1e-4] for i in range(2000)}
    encoded = entry(links=links)
    assert len(encoded) <= 64 + RECORD_BYTES_MAX
    assert decoded(b"5", encoded).nodes[5] == record(number=5, links={})


def test_a_record_that_is_too_large_is_refused() -> None:
    with pytest.raises(InvalidInput, match="shorten"):
        entry(socket="x" * RECORD_BYTES_MAX)
