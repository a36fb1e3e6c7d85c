"""Entries of the membership in Redis: a node's record, authenticated with the pool's token. Pure.

    expiry      8 bytes, ms since 1970, big endian: when the registration ends, by Redis' clock
    identity   16 bytes: a hash of the node's name and start
    said at     8 bytes, ms since 1970, big endian: when the node wrote this, by Redis' clock
    stamp      32 bytes: HMAC-SHA256 by the pool's token (`token_proofs.stamp`) of all that
               follows the expiry but itself, for this pool
    record      msgpack: a `NodeRecord`, with the number of its entry

An attacker that can write to Redis but does not have the token can remove entries and replay
genuine ones, for `REPEATED_S` at most and under their own numbers; readers ignore entries that it
forges. An entry that ends after the identity is a new registration, whose record follows with the
first heartbeat.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import xxhash

from ..errors import InvalidInput
from ..token_proofs import STAMP_BYTES, is_stamped, stamp
from .base import NODES_MAX, NUMBER_MAX, RECORD_BYTES_MAX, NodeRecord, check_record

if TYPE_CHECKING:
    from collections.abc import Sequence

PURPOSE = "node record"
EXPIRY = struct.Struct(">Q")
_SAID_AT = struct.Struct(">Q")
IDENTITY_BYTES = 16
# Expiry and identity.
CLAIM_BYTES = EXPIRY.size + IDENTITY_BYTES
_STAMP_AT = CLAIM_BYTES + _SAID_AT.size
_RECORD_AT = _STAMP_AT + STAMP_BYTES

# Readers reject an entry that is older than this, or so far in the future: heartbeats come every
# 3 s. Longer than Redis' clock jumps in a failover, as a node reads it with its next heartbeat.
REPEATED_S = 60.0
# How many of the entries with an invalid stamp a log message names.
_NAMED_MAX = 3

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(NodeRecord)
# The decoder's exceptions: malformed or of another type, no UTF-8, nested too deeply.
_NOT_OURS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def identity_of(record: NodeRecord) -> bytes:
    """A 16-byte hash that tells apart two nodes, and two runs of one node."""
    return xxhash.xxh3_128_digest(_encoder.encode([record.name, record.started_at]))


def encode_entry(record: NodeRecord, said_at_ms: int, pool: str, token: bytes) -> bytes:
    """Encode an entry without its expiry. Links are for people: they are left out if the record is
    too large with them.

    Raises InvalidInput for a record that is too large without them, or that no reader would accept.
    """
    check_record(record)
    encoded = _encoder.encode(record)
    if len(encoded) > RECORD_BYTES_MAX:
        encoded = _encoder.encode(msgspec.structs.replace(record, links={}))
    if len(encoded) > RECORD_BYTES_MAX:
        raise InvalidInput(
            f"a node's record has {len(encoded)} bytes, at most {RECORD_BYTES_MAX} are possible; "
            "shorten its name, address or socket"
        )
    head = identity_of(record) + _SAID_AT.pack(said_at_ms)
    return head + stamp(token, PURPOSE, pool, head + encoded) + encoded


class Found(NamedTuple):
    """The live nodes by number; how many entries are malformed (`ignored`); how many do not have
    the pool's stamp, or are replays (`strangers`); and the claimed names of some of the latter."""

    nodes: dict[int, NodeRecord]
    ignored: int
    strangers: int
    named: tuple[str, ...]


def decode_entries(pairs: Sequence[object], now_ms: int, pool: str, token: bytes) -> Found:
    """Decode the reply to HGETALL. Leaves out expired entries, and counts invalid ones."""
    nodes: dict[int, NodeRecord] = {}
    ignored = strangers = 0
    named: list[str] = []
    for field, value in zip(pairs[::2], pairs[1::2], strict=False):
        number = _number(field)
        if not number or not isinstance(value, bytes) or len(value) < CLAIM_BYTES:
            ignored += 1
        elif len(value) == CLAIM_BYTES or EXPIRY.unpack_from(value)[0] <= now_ms:
            continue
        elif record := _genuine(number, value, now_ms, pool, token):
            if len(nodes) < NODES_MAX:
                nodes[number] = record
        else:
            strangers += 1
            if len(named) < _NAMED_MAX:
                named += _claims(value)
    return Found(nodes, ignored, strangers, tuple(named))


def _number(field: object) -> int:
    """The number of a registration; 0 for anything else."""
    if not isinstance(field, bytes) or not field.isdigit() or len(field) > 10:
        return 0
    number = int(field)
    return number if number <= NUMBER_MAX else 0


def _genuine(number: int, value: bytes, now_ms: int, pool: str, token: bytes) -> NodeRecord | None:
    """The record of an entry that a node of this pool wrote under this number within `REPEATED_S`;
    None for any other entry."""
    if not _RECORD_AT < len(value) <= _RECORD_AT + RECORD_BYTES_MAX:
        return None
    body = value[EXPIRY.size : _STAMP_AT] + value[_RECORD_AT:]
    if not is_stamped(token, PURPOSE, pool, body, value[_STAMP_AT:_RECORD_AT]):
        return None
    (said_at_ms,) = _SAID_AT.unpack_from(value, CLAIM_BYTES)
    if abs(now_ms - said_at_ms) > REPEATED_S * 1000:
        return None
    record = _decode(value[_RECORD_AT:])
    return record if record is not None and record.number == number else None


def _claims(value: bytes) -> list[str]:
    """The name and address that a rejected entry claims, in the format of this version or the one
    before."""
    for at in (_RECORD_AT, CLAIM_BYTES):
        record = _decode(value[at : at + RECORD_BYTES_MAX])
        if record is not None:
            return [f"{record.name} at {record.address or 'no address'}"]
    return []


def _decode(encoded: bytes) -> NodeRecord | None:
    try:
        return _decoder.decode(encoded)
    except _NOT_OURS:
        return None
