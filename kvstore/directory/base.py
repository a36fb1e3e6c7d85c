"""The directory: which nodes said that they have which block. The contract of every kind of it.

A hint, never the truth. A node may be named that has dropped the block since, or not be named
though it has it; both cost time, neither costs correctness, because a reader asks the node for a
lease and compares checksums. That is why a directory may lose anything, at any time, and why nodes
publish again what is missing from it (`kvstore/node/publisher.py`).

Two things are kept apart:

    membership    number -> NodeRecord    few, small, gone some seconds after the last heartbeat
    locations     key -> numbers          many, only ever read together with the membership

A number names one registration and is never given twice, so all locations of a node that restarted
become void at once, without anybody deleting them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Protocol

import msgspec
from msgspec import Meta

from ..block import KEY_BYTES
from ..errors import InvalidInput
from ..names import NAME_MAX, PLAIN

if TYPE_CHECKING:
    from collections.abc import Sequence

# How long a registration outlives its last heartbeat, and how often heartbeats come: two may be
# lost on the way. Mooncake's client TTL is 10 s as well.
REGISTRATION_TTL_S = 10.0
HEARTBEAT_S = 3.0

# Locations that nobody publishes again leave after this. Six times the interval of the rolling
# re-publication, so that a slow one loses nothing.
LOCATION_TTL_S = 3600.0

# How long one call may wait for a directory that does not answer.
TIMEOUT_S = 0.5

# Membership may be this old in the answer of `locate`.
MEMBERSHIP_AGE_S = 1.0

# One batch of `publish`: 32 KiB of keys, some ms of work for Redis.
PUBLISH_KEYS_MAX = 2000

# One `locate`: a million tokens in blocks of 16. A prompt of 131,072 in blocks of 512 asks for 256.
LOCATE_KEYS_MAX = 65_536

# Events of one answer: 64 batches of 2,000 keys are 2 MiB.
EVENTS_MAX = 64

# Nodes of one pool, and bytes of one record: together the most that membership can weigh, 64 MiB.
NODES_MAX = 4096
RECORD_BYTES_MAX = 16 * 1024

# Numbers are stored as u32.
NUMBER_MAX = 2**32 - 1

# What a record may say, checked while it is decoded: others show it, connect to it and compute with
# it. An address is a host's name of 253 characters, brackets and a port; a path is as long as Linux
# knows one.
Name = Annotated[str, Meta(max_length=NAME_MAX, pattern=PLAIN)]
Address = Annotated[str, Meta(max_length=300, pattern=PLAIN)]
SocketPath = Annotated[str, Meta(max_length=4096, pattern=PLAIN)]
Nbytes = Annotated[int, Meta(ge=0, le=2**63 - 1)]
# Bandwidth and latency.
Way = Annotated[list[Annotated[float, Meta(ge=0)]], Meta(min_length=2, max_length=2)]


class NodeRecord(msgspec.Struct, frozen=True):
    """What a node says about itself.

    `address` is "host:port" of its TCP port, "" if it has none. `host` and `socket` are for clients
    on the same machine: its `host_id()` and the path of its unix socket. Bytes are of DRAM. `links`
    tells what it measured on the way to other nodes, by their names: [bandwidth in bytes/s, latency
    in s]. `started_at` is seconds since 1970; with the name it tells registrations apart.
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


class DirectoryEvent(msgspec.Struct, frozen=True, array_like=True):
    """One batch that a node published.

    `first_seq` numbers the batch's first key among all that this registration published, from 1
    on, `added` before `removed`. So the next batch of the same number begins at `next_seq`:

    - it begins there: apply it;
    - it begins earlier: a repetition after a timeout; apply it, that changes nothing;
    - it begins later: the stream has lost something. Ask the node for its inventory, or wait: it
      publishes all of it again within minutes.
    """

    number: int
    first_seq: int
    added: list[bytes]
    removed: list[bytes]

    @property
    def next_seq(self) -> int:
        """Where the next batch of this registration begins."""
        return self.first_seq + len(self.added) + len(self.removed)


class Directory(Protocol):
    """Every method is thread-safe and blocks for about `TIMEOUT_S` at most.

    Errors: DirectoryUnavailable when the directory does not answer, at once while it is known to be
    down; InvalidInput for keys that are no keys, records that no reader would take and batches over
    the limits; ClientClosed after `close`. What it stores is checked when it is read: broken
    entries are left out, never raised.
    """

    def register(self, record: NodeRecord) -> int:
        """A new number for this node, valid until `REGISTRATION_TTL_S` after its last heartbeat."""
        ...

    def heartbeat(self, record: NodeRecord) -> bool:
        """Keep `record.number` alive and replace its record.

        False: the registration had vanished (Redis was restarted, emptied or has failed over). The
        node registers again and publishes everything under its new number.
        """
        ...

    def withdraw(self, number: int) -> None:
        """End a registration now; all its locations are void. Unknown numbers are ignored."""
        ...

    def publish(
        self, number: int, added: Sequence[bytes], removed: Sequence[bytes], first_seq: int
    ) -> None:
        """Node `number` has the blocks `added` (again), and not those `removed`.

        At most `PUBLISH_KEYS_MAX` keys of 16 bytes, none in both. The batch is also an event of the
        shared stream, with `first_seq` (see `DirectoryEvent`). Repeating a batch changes nothing.
        """
        ...

    def nodes(self) -> dict[int, NodeRecord]:
        """The live nodes by number."""
        ...

    def locate(self, keys: Sequence[bytes]) -> list[tuple[int, ...]]:
        """Per key, the numbers of live nodes that said they have it; () where nobody did.

        One round trip for a whole prompt. A node may be missing, or named though it has just died,
        for up to `MEMBERSHIP_AGE_S` longer than its registration.
        """
        ...

    def events(self, after: str) -> tuple[str, list[DirectoryEvent]]:
        """Up to `EVENTS_MAX` batches that came after the position `after`, and the new position.

        "0" is the oldest that is kept. Never waits: an empty list means that nothing came.
        """
        ...

    def statistics(self) -> dict[str, Any]:
        """Plain numbers for people; asks nobody."""
        ...

    def close(self) -> None:
        """Give back connections. Registrations live on until they expire."""
        ...


def check_record(record: NodeRecord) -> None:
    """Raise InvalidInput for a record that readers would leave out."""
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
