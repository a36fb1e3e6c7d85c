"""What lies in Redis: names, values and the scripts that change them. Pure; docs/directory.md.

    tiffin:{POOL:m}:nodes     hash: number -> expiry (8 bytes, ms since 1970, big endian), identity
                              (16 bytes), record (msgpack)
    tiffin:{POOL:m}:number    the last number given
    tiffin:{POOL:m}:events    stream: field "e" = DirectoryEvent (msgpack)
    tiffin:{POOL:B}:b:KEY     string: the numbers of the nodes that have block KEY, u32 each, little
                              endian, the one that published last at the end

POOL is checked to be a plain word, KEY is 16 raw bytes and B is 0, or of a cluster the key's first
byte modulo 64: what stands in braces chooses the shard, so all keys of one B can be read and
written together. Whatever else is found under these names is taken for nothing and, by whoever
writes, replaced.
"""

from __future__ import annotations

import hashlib
import struct
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import xxhash

from ..block import KEY_BYTES
from ..errors import InvalidInput
from .base import (
    NODES_MAX,
    NUMBER_MAX,
    PUBLISH_KEYS_MAX,
    RECORD_BYTES_MAX,
    DirectoryEvent,
    NodeRecord,
    check_record,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

# The bucket of membership, beside 0 and up for locations.
MEMBERS = -1

# More than shards in all but the largest clusters, few enough for one MGET each.
CLUSTER_BUCKETS = 64

# Nodes named per block. Who looks for one of 64 replicas finds one; the oldest word leaves.
HOLDERS_MAX = 64
_HOLDERS_BYTES_MAX = 4 * HOLDERS_MAX

# Keys of one script: 1 ms, so that readers are served in between.
SCRIPT_KEYS_MAX = 250

# Numbers grow by 1 to this: 8 million registrations before they begin anew.
STEP_MAX = 1024

# The stream is trimmed to about this many batches: with 100 nodes that publish 20 times a second,
# 4 s; a batch is mostly tens of keys. Were all of them full, 300 MB.
STREAM_ENTRIES_MAX = 8192
_EVENT_BYTES_MAX = 64 * 1024

_EXPIRY = struct.Struct(">Q")
_IDENTITY_BYTES = 16
_HEAD_BYTES = _EXPIRY.size + _IDENTITY_BYTES

# A value is remembered in decoded form; there are about as many as combinations of nodes.
_DECODED_MAX = 16_384


class Script:
    """A Lua script: sent by its hash, and as a whole to a server that does not know it yet."""

    def __init__(self, text: str) -> None:
        self.text = text.encode()
        # Redis names scripts by their SHA-1; nothing here rests on its strength.
        self.sha = hashlib.sha1(self.text, usedforsecurity=False).hexdigest().encode()


# KEYS: block keys, the added ones first. ARGV: number (4 bytes), how many are added, TTL in ms.
# A refreshed number goes to the end, so the front holds those that nobody refreshes any more.
PUBLISH = Script(
    f"""
local number, added, ttl = ARGV[1], tonumber(ARGV[2]), ARGV[3]
for i = 1, #KEYS do
  local key = KEYS[i]
  local old = redis.pcall('GET', key)
  if type(old) ~= 'string' or #old % 4 ~= 0 or #old > {_HOLDERS_BYTES_MAX} then old = '' end
  if old == '' or old == number then
    if i <= added then redis.call('SET', key, number, 'PX', ttl) else redis.call('DEL', key) end
  else
    local kept = {{}}
    for j = 1, #old, 4 do
      local holder = string.sub(old, j, j + 3)
      if holder ~= number then kept[#kept + 1] = holder end
    end
    if i <= added then
      if #kept >= {HOLDERS_MAX} then table.remove(kept, 1) end
      kept[#kept + 1] = number
    end
    redis.call('SET', key, table.concat(kept), 'PX', ttl)
  end
end
return #KEYS
"""
)

# KEYS: events. ARGV: how many to keep, the event.
APPEND = Script(
    """
local added = redis.pcall('XADD', KEYS[1], 'MAXLEN', '~', ARGV[1], '*', 'e', ARGV[2])
if type(added) == 'table' and added.err and string.find(added.err, 'WRONGTYPE', 1, true) then
  redis.call('DEL', KEYS[1])
  added = redis.call('XADD', KEYS[1], 'MAXLEN', '~', ARGV[1], '*', 'e', ARGV[2])
end
return added
"""
)

_LUA_NOW = """
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local function expiry(after)  -- 8 bytes, big endian
  local bytes, left = {}, now + after
  for i = 8, 1, -1 do
    bytes[i] = string.char(left % 256)
    left = math.floor(left / 256)
  end
  return table.concat(bytes)
end
local function is_over(value)  -- numbers, not strings: how Lua orders strings depends on the locale
  local expires = 0
  for i = 1, 8 do expires = expires * 256 + string.byte(value, i) end
  return expires <= now
end
"""

# KEYS: nodes, number. ARGV: TTL in ms, identity and record, 31 random bits. Returns the new number,
# 0 if full. An emptied Redis begins anywhere, and steps are of random length, so that numbers which
# it has forgotten (a failover may roll it back) are most probably not given again. If one is,
# HEARTBEAT finds out.
REGISTER = Script(
    f"""{_LUA_NOW}
local nodes = redis.pcall('HGETALL', KEYS[1])
if nodes.err then redis.call('DEL', KEYS[1]); nodes = {{}} end
local alive = 0
for i = 1, #nodes, 2 do
  if #nodes[i + 1] < {_HEAD_BYTES} or is_over(nodes[i + 1]) then
    redis.call('HDEL', KEYS[1], nodes[i])
  else
    alive = alive + 1
  end
end
if alive >= {NODES_MAX} then return 0 end
local last = redis.pcall('GET', KEYS[2])
last = type(last) == 'string' and tonumber(last) or 0
local dice = tonumber(ARGV[3])
if not (last > 0 and last <= {NUMBER_MAX} - {STEP_MAX}) then last = dice end
local number = string.format('%.0f', math.floor(last) + 1 + dice % {STEP_MAX})
redis.call('SET', KEYS[2], number)
redis.call('HSET', KEYS[1], number, expiry(ARGV[1]) .. ARGV[2])
return tonumber(number)
"""
)

# KEYS: nodes. ARGV: number, TTL in ms, identity and record. Returns 1, or 0 if it is not known (any
# more) or is another's: a failover may forget a number and give it again.
HEARTBEAT = Script(
    f"""{_LUA_NOW}
local old = redis.pcall('HGET', KEYS[1], ARGV[1])
if type(old) ~= 'string' or #old < {_HEAD_BYTES} then return 0 end
if string.sub(old, 9, {_HEAD_BYTES}) ~= string.sub(ARGV[3], 1, {_IDENTITY_BYTES}) then return 0 end
if is_over(old) then
  redis.call('HDEL', KEYS[1], ARGV[1])
  return 0
end
redis.call('HSET', KEYS[1], ARGV[1], expiry(ARGV[2]) .. ARGV[3])
return 1
"""
)


class Layout:
    """The names of one pool."""

    def __init__(self, pool: str, buckets: int) -> None:
        self.buckets = buckets
        self._prefixes = [f"tiffin:{{{pool}:{bucket}}}:b:".encode() for bucket in range(buckets)]
        members = f"tiffin:{{{pool}:m}}:"
        self.nodes = f"{members}nodes".encode()
        self.number = f"{members}number".encode()
        self.events = f"{members}events".encode()
        self.tags = {bucket: f"{pool}:{bucket}".encode() for bucket in range(buckets)}
        self.tags[MEMBERS] = f"{pool}:m".encode()

    def bucket(self, key: bytes) -> int:
        """The bucket of a block's key. Keys are hashes, so any byte is as good as another."""
        return key[0] % self.buckets

    def names(self, bucket: int, keys: Iterable[bytes]) -> list[bytes]:
        """Where the numbers of `keys` are."""
        prefix = self._prefixes[bucket]
        return [prefix + key for key in keys]


# -- values ----------------------------------------------------------------------------------------

_record_decoder = msgspec.msgpack.Decoder(NodeRecord)
_event_decoder = msgspec.msgpack.Decoder(DirectoryEvent)
_encoder = msgspec.msgpack.Encoder()

# What the decoders raise: broken or of another type, no UTF-8, nested too deeply.
_NOT_OURS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def encode_number(number: int) -> bytes:
    """A number as it stands in locations."""
    return number.to_bytes(4, "little")


def encode_record(record: NodeRecord) -> bytes:
    """Identity and record. Links are for people: they are left out when they take too much room.

    Raises InvalidInput for a record that is too large without them, or that nobody would take.
    """
    check_record(record)
    identity = xxhash.xxh3_128_digest(_encoder.encode([record.name, record.started_at]))
    encoded = _encoder.encode(record)
    if len(encoded) > RECORD_BYTES_MAX:
        encoded = _encoder.encode(msgspec.structs.replace(record, links={}))
    if len(encoded) > RECORD_BYTES_MAX:
        raise InvalidInput(
            f"a node's record has {len(encoded)} bytes, at most {RECORD_BYTES_MAX} are possible; "
            "shorten its name, address or socket"
        )
    return identity + encoded


class Found(NamedTuple):
    """The live nodes by number, and how many entries are nothing that a node would have written."""

    nodes: dict[int, NodeRecord]
    ignored: int


def decode_nodes(pairs: Sequence[object], now_ms: int) -> Found:
    """What is in the reply to HGETALL; what is no record is left out, and counted."""
    nodes: dict[int, NodeRecord] = {}
    ignored = 0
    for field, value in zip(pairs[::2], pairs[1::2], strict=False):
        if _has_ended(value, now_ms):
            continue
        number, record = _number(field), _decode_record(value)
        if not number or record is None:
            ignored += 1
        elif len(nodes) < NODES_MAX:
            nodes[number] = msgspec.structs.replace(record, number=number)
    return Found(nodes, ignored)


def _has_ended(value: object, now_ms: int) -> bool:
    is_entry = isinstance(value, bytes) and len(value) > _HEAD_BYTES
    return is_entry and _EXPIRY.unpack_from(value)[0] <= now_ms  # type: ignore[arg-type]


def _number(field: object) -> int:
    """The number of a registration; 0 for anything else."""
    if not isinstance(field, bytes) or not field.isdigit() or len(field) > 10:
        return 0
    number = int(field)
    return number if number <= NUMBER_MAX else 0


def _decode_record(value: object) -> NodeRecord | None:
    if not isinstance(value, bytes):
        return None
    if not _HEAD_BYTES < len(value) <= _HEAD_BYTES + RECORD_BYTES_MAX:
        return None
    try:
        return _record_decoder.decode(memoryview(value)[_HEAD_BYTES:])
    except _NOT_OURS:
        return None


def encode_event(event: DirectoryEvent) -> bytes:
    """An entry of the stream."""
    return _encoder.encode(event)


def decode_event(value: object) -> DirectoryEvent | None:
    """The event, or None for anything that `encode_event` would not have made."""
    if not isinstance(value, bytes) or len(value) > _EVENT_BYTES_MAX:
        return None
    try:
        event = _event_decoder.decode(value)
    except _NOT_OURS:
        return None
    keys = len(event.added) + len(event.removed)
    lengths = {len(key) for key in event.added} | {len(key) for key in event.removed}
    possible = (
        0 < event.number <= NUMBER_MAX
        and event.first_seq > 0
        and keys <= PUBLISH_KEYS_MAX
        and lengths <= {KEY_BYTES}
    )
    return event if possible else None


class Holders(dict[bytes | None, tuple[int, ...]]):
    """Location value -> the numbers in it that are alive, for one membership.

    A memo: the blocks of a prompt mostly have the same few values, so looking one up is what it
    costs to decode it. Anything that is no value is nobody.
    """

    def __init__(self, alive: Iterable[int]) -> None:
        super().__init__({None: ()})
        self.alive = frozenset(alive)

    def __missing__(self, value: object) -> tuple[int, ...]:
        if not isinstance(value, bytes) or len(value) % 4 or len(value) > _HOLDERS_BYTES_MAX:
            return ()
        numbers = struct.unpack(f"<{len(value) // 4}I", value)
        found = tuple(dict.fromkeys(number for number in numbers if number in self.alive))
        if len(self) < _DECODED_MAX:
            self[value] = found
        return found
