"""The interface of a directory: which nodes have published that they have which block.

Its locations are hints. It may list a node that has evicted the block since, or not list a node
that has it; both cost time, neither costs correctness, because a reader requests a lease from the
node and compares checksums. So a directory may lose any entry, at any time, and nodes publish
missing entries again (`kvstore/node/publisher.py`).

It has two separate tables:

    membership    number -> NodeRecord    few, small, expire some seconds after the last heartbeat
    locations     key -> numbers          many, always read together with the membership

A number identifies one registration and is not given again (by Redis: most probably not, see
`REGISTER` in `redis_layout.py`), so all locations of a node that restarted become void at once,
without deleting them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Protocol

import msgspec
from msgspec import Meta

from ..errors import InvalidInput
from ..format.header import KEY_BYTES
from ..text import NAME_MAX, PLAIN

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# A registration's time to live after its last heartbeat, and the interval of heartbeats: two may be
# lost on the way. Mooncake's client TTL is 10 s as well.
REGISTRATION_TTL_S = 10.0
HEARTBEAT_S = 3.0

# The time to live of locations that no node publishes again. Six times the interval of the rolling
# re-publication, so that a slow one loses nothing.
LOCATION_TTL_S = 3600.0

# The timeout of a wait for a directory that does not answer.
TIMEOUT_S = 0.5

# The greatest age of the cached membership that `locate` uses.
MEMBERSHIP_AGE_S = 1.0

# The most keys of one `publish` batch: 32 KiB of keys, some ms of work for Redis.
PUBLISH_KEYS_MAX = 2000

# The most keys of one `locate`: a million tokens in blocks of 16. A prompt of 131,072 tokens in
# blocks of 512 has 256 keys.
LOCATE_KEYS_MAX = 65_536

# The most events of one `events` call: 64 batches of 2,000 keys are 2 MiB.
EVENTS_MAX = 64

# The most nodes of one pool, and bytes of one record: together they bound the membership to 64 MiB.
NODES_MAX = 4096
RECORD_BYTES_MAX = 16 * 1024

# Numbers are stored as u32.
NUMBER_MAX = 2**32 - 1

# The valid values of a record's fields, checked when a reader decodes it, as readers show them,
# connect to them and compute with them. An address is a host's name of 253 characters, brackets and
# a port; a path is as long as Linux allows.
Name = Annotated[str, Meta(max_length=NAME_MAX, pattern=PLAIN)]
Address = Annotated[str, Meta(max_length=300, pattern=PLAIN)]
SocketPath = Annotated[str, Meta(max_length=4096, pattern=PLAIN)]
Nbytes = Annotated[int, Meta(ge=0, le=2**63 - 1)]
# Bandwidth and latency.
Way = Annotated[list[Annotated[float, Meta(ge=0)]], Meta(min_length=2, max_length=2)]


class NodeRecord(msgspec.Struct, frozen=True):
    """A node's self-description, which it registers in the directory.

    `address` is "host:port" of its TCP port, "" if it has none. `host` and `socket` are for clients
    on the same machine: its `host_id()` and the path of its unix socket. Bytes are of DRAM. `links`
    are its measurements of the network to other nodes, by their names: [bandwidth in bytes/s,
    latency in s]. `slab` names, in hex, what the node has on NVMe (or this life of a node without),
    once it has heard of all removals; "" before that. `started_at` is seconds since 1970; name and
    `started_at` together tell registrations apart.
    """

    name: Name
    address: Address
    host: Name
    socket: SocketPath
    capacity_bytes: Nbytes
    free_bytes: Nbytes
    draining: bool = False
    number: int = 0
    started_at: float = 0.0
    links: dict[Name, Way] = {}
    slab: Annotated[str, Meta(pattern=r"\A([0-9a-f]{32})?\Z")] = ""


class DirectoryEvent(msgspec.Struct, frozen=True, array_like=True):
    """One batch of a node's `publish`, in the event stream.

    `first_seq` is the sequence number of the batch's first key among all keys that this
    registration has published, from 1 on, `added` before `removed`. So the next batch of the same
    number begins at `next_seq`:

    - it begins there: apply it;
    - it begins earlier: a retry after a timeout; apply it, which is idempotent;
    - it begins later: the stream has lost events. Request the node's inventory, or wait: the node
      publishes all of it again within minutes.
    """

    number: int
    first_seq: int
    added: list[bytes]
    removed: list[bytes]

    @property
    def next_seq(self) -> int:
        """The `first_seq` of the next batch of this registration."""
        return self.first_seq + len(self.added) + len(self.removed)


class Directory(Protocol):
    """The interface of a directory. Every method is thread-safe. One wait for the server is
    `TIMEOUT_S` at most; a query may have several (`patience_s`).

    Errors: DirectoryUnavailable when the directory does not answer, at once while it is known to be
    down; InvalidInput for invalid keys, records that no reader would accept and batches over the
    limits; ClientClosed after `close`. Stored entries are checked when they are read: invalid ones
    are left out, never raised.
    """

    # The longest time that a query may take; 0 for a directory without a server.
    patience_s: float = 0.0

    def register(self, record: NodeRecord) -> int:
        """Register this node. Returns its new number, valid until `REGISTRATION_TTL_S` after its
        last heartbeat."""
        ...

    def heartbeat(self, record: NodeRecord) -> bool:
        """Renew the registration `record.number` and replace its record.

        Returns False if the registration is gone (Redis was restarted, emptied or has failed over).
        The node then registers again and publishes all its blocks under its new number.
        """
        ...

    def withdraw(self, number: int) -> None:
        """End a registration now; all its locations are void. Ignores unknown numbers."""
        ...

    def publish(
        self, number: int, added: Sequence[bytes], removed: Sequence[bytes], first_seq: int
    ) -> None:
        """Add locations: node `number` has the blocks `added` (again); and delete those of
        `removed`, which it no longer has.

        At most `PUBLISH_KEYS_MAX` keys of 16 bytes, none in both. The batch is also an event of the
        shared stream, with `first_seq` (see `DirectoryEvent`). Idempotent.
        """
        ...

    def nodes(self, *, fresh: bool = False) -> dict[int, NodeRecord]:
        """The live nodes by number. `fresh`: as they are now, and not some time ago."""
        ...

    def locate(self, keys: Sequence[bytes]) -> list[tuple[int, ...]]:
        """For each key, the numbers of the live nodes that have published it; () if none has.

        One round trip for a whole prompt. As the membership is cached for `MEMBERSHIP_AGE_S`, a new
        node may be missing that long, and a dead one listed that much longer than its registration.
        """
        ...

    def events(self, after: str) -> tuple[str, list[DirectoryEvent]]:
        """The new position, and up to `EVENTS_MAX` batches after the position `after`.

        "0" is before the oldest event kept. Never waits for events: the list is empty if there are
        no new ones.
        """
        ...

    def statistics(self) -> dict[str, Any]:
        """Counters and state for people; sends no request."""
        ...

    def pools(self) -> list[str]:
        """Names of pools that have nodes here, for people, sorted; some may be missing."""
        return []

    def close(self) -> None:
        """Close the connections. Registrations stay until they expire."""
        ...


def unreadable(statistics: Mapping[str, Any], own: int = 0) -> str:
    """Why a reader of the membership finds no node but its `own`, though some are registered; else
    "". `statistics` are those of its directory. Where some nodes can be read, the token is right,
    and the others may be of another version or forged."""
    strangers = statistics.get("unauthenticated_records", 0)
    if not strangers or statistics["nodes"] > own:
        return ""
    return (
        f"none of the {strangers} nodes registered in this pool has our token: give the pool's "
        "token (token_file= in a URL, --token-file, or TIFFIN_TOKEN_FILE), and nodes of one version"
    )


def nobody(statistics: Mapping[str, Any]) -> str:
    """That no node is registered in the pool, which may be another pool's name mistyped; else "".
    `statistics` are those of its directory."""
    if not statistics.get("membership_read") or statistics["nodes"]:
        return ""
    return f"no node is registered in pool {statistics['pool']!r}: is that its name?"


def check_record(record: NodeRecord) -> None:
    """Raise InvalidInput for a record that readers would reject."""
    try:
        _record_decoder.decode(_encoder.encode(record))
    except (msgspec.ValidationError, UnicodeEncodeError, OverflowError) as error:
        raise InvalidInput(
            f"no node can be registered as {record.name[:NAME_MAX]!r} with this record: {error}; "
            "shorten its name, address and socket path, and leave control characters out"
        ) from error


_encoder = msgspec.msgpack.Encoder()
_record_decoder = msgspec.msgpack.Decoder(NodeRecord)


def check_keys(keys: Sequence[bytes], keys_max: int) -> None:
    """Raise InvalidInput unless `keys` are at most `keys_max` keys of 16 bytes."""
    if len(keys) > keys_max:
        raise InvalidInput(f"{len(keys)} keys in one call; at most {keys_max} are possible")
    lengths = set(map(len, keys))
    if lengths - {KEY_BYTES}:
        wrong = sorted(lengths - {KEY_BYTES})[0]
        raise InvalidInput(f"a key of {wrong} bytes; keys have {KEY_BYTES}")


def check_number(number: int) -> None:
    """Raise InvalidInput unless `number` can have come from `register`."""
    if not 0 < number <= NUMBER_MAX:
        raise InvalidInput(f"{number} names no registration; `register` gives numbers")


def check_batch(
    number: int, added: Sequence[bytes], removed: Sequence[bytes], first_seq: int
) -> None:
    """Raise InvalidInput unless these are arguments for `publish`."""
    check_number(number)
    check_keys(added, PUBLISH_KEYS_MAX - len(removed))
    check_keys(removed, PUBLISH_KEYS_MAX)
    if first_seq < 1:
        raise InvalidInput(f"first_seq counts from 1, not {first_seq}")
