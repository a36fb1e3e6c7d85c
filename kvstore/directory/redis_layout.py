"""The keys and values in Redis, and the scripts that change them. Pure; docs/directory.md.

    tiffin:{POOL:m}:nodes     hash: number -> a node's authenticated record (`node_records.py`)
    tiffin:{POOL:m}:number    the last number given
    tiffin:{POOL:m}:events    stream: field "e" = DirectoryEvent (msgpack)
    tiffin:{POOL:B}:b:KEY     string: the numbers of the nodes that have block KEY, u32 each, little
                              endian, the one that published last at the end

POOL is checked to be a plain word, KEY is 16 raw bytes and B is 0, or in a cluster the key's first
byte modulo 64: the hash tag in braces chooses the shard, so all keys of one B can be read and
written together. Readers treat any other value under these names as empty, and writers replace it.
"""

from __future__ import annotations

import hashlib
import re
import struct
from typing import TYPE_CHECKING

import msgspec

from ..format.header import KEY_BYTES
from .base import NODES_MAX, NUMBER_MAX, PUBLISH_KEYS_MAX, DirectoryEvent
from .node_records import CLAIM_BYTES, IDENTITY_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable

# The names of pools as keys of their memberships (`Layout.nodes`).
POOLS = b"tiffin:{*:m}:nodes"
_POOL = re.compile(rb"tiffin:\{([A-Za-z0-9._-]{1,64}):m\}:nodes")

# The bucket of the membership; the buckets of locations are 0 and up.
MEMBERS = -1

# More buckets than shards in all but the largest clusters, and few enough for one MGET each.
CLUSTER_BUCKETS = 64

# The most nodes listed per block: a reader finds enough of its replicas; publishing one more drops
# the node that has not published it for longest.
HOLDERS_MAX = 64
_HOLDERS_BYTES_MAX = 4 * HOLDERS_MAX

# Keys of one script call: 1 ms, so that Redis serves readers in between.
SCRIPT_KEYS_MAX = 250

# A new number is 1 to this larger than the last: 8 million registrations before they start anew.
STEP_MAX = 1024

# Redis trims the stream to about this many batches: with 100 nodes that publish 20 times a second,
# that is 4 s; a batch is mostly tens of keys. If all were full, they would take 300 MB.
STREAM_ENTRIES_MAX = 8192
_EVENT_BYTES_MAX = 64 * 1024

# The most decoded values that `HolderSet` caches; there are about as many as combinations of nodes.
_DECODED_MAX = 16_384


class Script:
    """A Lua script: sent by its hash, and in full to a server that does not know it yet."""

    def __init__(self, text: str) -> None:
        self.text = text.encode()
        # Redis names scripts by their SHA-1; nothing here rests on its strength.
        self.sha = hashlib.sha1(self.text, usedforsecurity=False).hexdigest().encode()


# KEYS: block keys, the added ones first. ARGV: number (4 bytes), how many are added, TTL in ms.
# A refreshed number moves to the end, so numbers that are no longer refreshed are at the front.
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

# KEYS: nodes, number. ARGV: TTL in ms, identity, 31 random bits. Returns the new number, 0 if full;
# the first heartbeat writes its record. An emptied Redis starts at a random number, and steps are
# of random length, so that numbers which Redis has lost (a failover may roll it back) are most
# probably not given again. If one is, HEARTBEAT detects it.
REGISTER = Script(
    f"""{_LUA_NOW}
local nodes = redis.pcall('HGETALL', KEYS[1])
if nodes.err then redis.call('DEL', KEYS[1]); nodes = {{}} end
local alive = 0
for i = 1, #nodes, 2 do
  if #nodes[i + 1] < {CLAIM_BYTES} or is_over(nodes[i + 1]) then
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

# KEYS: nodes. ARGV: number, TTL in ms, entry without its expiry. Returns 1, or 0 if the number is
# not registered (any more) or is another node's: after a failover Redis may give a number again.
HEARTBEAT = Script(
    f"""{_LUA_NOW}
local old = redis.pcall('HGET', KEYS[1], ARGV[1])
if type(old) ~= 'string' or #old < {CLAIM_BYTES} then return 0 end
if string.sub(old, 9, {CLAIM_BYTES}) ~= string.sub(ARGV[3], 1, {IDENTITY_BYTES}) then return 0 end
if is_over(old) then
  redis.call('HDEL', KEYS[1], ARGV[1])
  return 0
end
redis.call('HSET', KEYS[1], ARGV[1], expiry(ARGV[2]) .. ARGV[3])
return 1
"""
)


def pool_of(name: object) -> str:
    """The pool whose membership has this Redis key; "" for any other key."""
    found = _POOL.fullmatch(name) if isinstance(name, bytes) else None
    return found[1].decode() if found is not None else ""


class Layout:
    """The key names of one pool."""

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
        """The bucket of a block's key: its first byte modulo the buckets, as keys are hashes."""
        return key[0] % self.buckets

    def names(self, bucket: int, keys: Iterable[bytes]) -> list[bytes]:
        """The Redis keys of the locations of `keys`."""
        prefix = self._prefixes[bucket]
        return [prefix + key for key in keys]


# -- values ----------------------------------------------------------------------------------------

_event_decoder = msgspec.msgpack.Decoder(DirectoryEvent)
_encoder = msgspec.msgpack.Encoder()

# The decoders' exceptions: malformed or of another type, no UTF-8, nested too deeply.
_NOT_OURS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def encode_number(number: int) -> bytes:
    """A number as 4 bytes, as in location values."""
    return number.to_bytes(4, "little")


def encode_event(event: DirectoryEvent) -> bytes:
    """An event as bytes for the stream."""
    return _encoder.encode(event)


def decode_event(value: object) -> DirectoryEvent | None:
    """The event, or None for any value that `encode_event` cannot have made."""
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


class HolderSet(dict[bytes | None, tuple[int, ...]]):
    """Location value -> the numbers of the live nodes in it, for one membership.

    A cache of decoded values: the blocks of a prompt mostly have the same few values, so that
    decoding one costs a dictionary look-up. An invalid value has no nodes.
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
