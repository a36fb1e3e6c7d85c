"""The messages (requests and replies) between clients and nodes, in one process or over a socket.

msgpack arrays (msgspec `array_like`), one tagged struct per request; every request carries an `id`
that its reply repeats, so that a client may abandon a request and continue. New fields are only
ever added at the end, with a default; any other change increments `PROTOCOL_VERSION`. Keys travel
joined, 16 bytes each. Offsets are bytes from the start of the node's DRAM region, whose descriptor
comes with `Welcome` on a unix socket. Network clients do not map the region; they address memory
only through leases (`tcp_server.py`).
"""

from __future__ import annotations

import re
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from ... import text
from ...errors import VersionMismatch
from ...format.header import MAX_HEADER_BYTES, MAX_SEGMENTS
from ...format.key_space import SPACE_BYTES_MAX
from .records import Reason

PROTOCOL_VERSION = 4

# Limits of one message, which the decoder checks whether a client or a node sent it. 65,536 keys
# are 33 million tokens.
KEYS_MAX = 65_536
KEYS_BYTES_MAX = KEYS_MAX * 16
TIMEOUT_S_MAX = 3600.0
NAME_MAX = text.NAME_MAX

# The id of a request without a reply: releases, aborts, reports. Half of a reader's messages.
UNAWAITED = 0

Keys = Annotated[bytes, Meta(max_length=KEYS_BYTES_MAX)]
Key = Annotated[bytes, Meta(min_length=16, max_length=16)]
Name = Annotated[str, Meta(max_length=NAME_MAX, pattern=text.PLAIN)]
Timeout = Annotated[float, Meta(ge=0, le=TIMEOUT_S_MAX)]
NATURAL_MAX = (1 << 63) - 1
Natural = Annotated[int, Meta(ge=0, le=NATURAL_MAX)]
Why = Annotated[int, Meta(ge=0, le=int(max(Reason)))]
# Writers of one block: at most one per segment. A header travels without its trailing zeros.
Ranks = Annotated[int, Meta(ge=1, le=MAX_SEGMENTS)]
Bitmap = Annotated[bytes, Meta(max_length=MAX_SEGMENTS // 8)]
HeaderBytes = Annotated[bytes, Meta(max_length=MAX_HEADER_BYTES)]
# At most one entry per key: the slots of a commit; offsets and generations of a reservation or a
# lease.
PerKey = Annotated[list[Natural], Meta(max_length=KEYS_MAX)]
Lengths = Annotated[list[Annotated[int, Meta(ge=1, le=NATURAL_MAX)]], Meta(max_length=KEYS_MAX)]
Headers = Annotated[list[HeaderBytes], Meta(max_length=KEYS_MAX)]
# A byte per key.
KeyFlags = Annotated[bytes, Meta(max_length=KEYS_MAX)]
# Limits of the checksums in one `Publish`: 131,072 of them, a layer of 16 segments of 8,192 blocks
# (a writer splits larger publications); and in one `Awaited`: 16 times a layer of one segment of
# every block of a lease.
PUBLISHED_BYTES_MAX = 1 << 20
AWAITED_BYTES_MAX = 8 << 20
Segments = Annotated[list[Natural], Meta(max_length=MAX_SEGMENTS)]
Spans = Annotated[list[Natural], Meta(max_length=2 * MAX_SEGMENTS)]
Checksums = Annotated[bytes, Meta(max_length=PUBLISHED_BYTES_MAX)]
AwaitedChecksums = Annotated[bytes, Meta(max_length=AWAITED_BYTES_MAX)]
# Nonces, proofs and session names of the network's greeting (`token_proofs.py`).
Secret = Annotated[bytes, Meta(max_length=32)]

# A `KeySpace`, encoded; clients that announce one: engines of a host.
SPACES_MAX = 256
Space = Annotated[bytes, Meta(max_length=SPACE_BYTES_MAX)]

# A host name of 253 characters, brackets and a port.
Address = Annotated[str, Meta(max_length=300, pattern=text.PLAIN)]

# Keys per page of an inventory: 1 MiB of frame.
INVENTORY_KEYS = 65_536
InventoryKeys = Annotated[bytes, Meta(max_length=16 * INVENTORY_KEYS)]
InventoryTiers = Annotated[bytes, Meta(max_length=INVENTORY_KEYS)]
# Events per answer; 16 bytes and two flags each.
EVENTS_MAX = 16_384
EventFlags = Annotated[bytes, Meta(max_length=EVENTS_MAX)]
EventKeys = Annotated[bytes, Meta(max_length=16 * EVENTS_MAX)]
# A session's connections on a unix socket: one for each call at a time.
CONNECTIONS_MAX = 64
# 16 times as many as a session may have.
LeaseIds = Annotated[list[Natural], Meta(max_length=65_536)]
# A node has some 20 kinds of statistics; the frame size bounds each of them.
NestedNumbers = Annotated[dict[str, Any], Meta(max_length=256)]
# A refusal's message: some human-readable lines, without control characters except tab and newline.
REFUSAL_MAX = 4096
ErrorName = Annotated[str, Meta(max_length=100)]
Text = Annotated[str, Meta(max_length=REFUSAL_MAX, pattern=r"\A[^\x00-\x08\x0b-\x1f\x7f-\x9f]*\Z")]
_NO_TEXT = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class Request(msgspec.Struct, array_like=True, forbid_unknown_fields=False, gc=False):
    """The base of all requests: the reply repeats `id`; with UNAWAITED there is no reply."""

    id: Natural


class Hello(Request, tag="hello"):
    """The first request of a connection. `pid` is for display only: the node asks the kernel
    whether a process is dead. `session`: 16 random bytes that the client's connections share; on a
    unix socket `connection` is this one's number among them (`Settle`).

    Over the network also: `nonce` and `proof` (`token_proofs.Greeting`); the configured address,
    `dialled`, and the address that the client's connection reached, `reached`, both "host:port";
    and `of_bytes`, whether block bytes must have tags as well.
    """

    version: int
    name: Name = ""
    pid: Natural = 0
    session: Secret = b""
    nonce: Secret = b""
    proof: Secret = b""
    dialled: Address = ""
    reached: Address = ""
    of_bytes: bool = False
    connection: Natural = 0


class Match(Request, tag="match"):
    """Ask which leading blocks are resident or, with `writing`, resident or reserved by a writer.
    With `at_least` the node answers when so many are there, or after `timeout_s`."""

    keys: Keys
    writing: bool = False
    at_least: Natural = 0
    timeout_s: Timeout = 0.0


class Exists(Request, tag="exists"):
    """Ask which blocks are resident, each regardless of the others."""

    keys: Keys


class Reserve(Request, tag="reserve"):
    """Reserve extents for the missing blocks of `keys`, to be written in place; `depth` is the
    index of the first key in its prefix.

    With `ranks` above 1, that many writers share each extent, and the client is writer `rank`:
    `owned` has a bit for each segment of a block that it writes (bit 0 of byte 0 is the first
    segment's).

    `copy`: the blocks are copied from other nodes. Whoever asks has to lease them there, or to see
    that they are there, after this request was answered: a removal of a block that comes meanwhile
    ends its reservation.
    """

    keys: Keys
    parent: Key
    depth: Natural
    extent_bytes: Natural
    timeout_s: Timeout
    rank: Natural = 0
    ranks: Ranks = 1
    owned: Bitmap = b""
    copy: bool = False


class Commit(Request, tag="commit"):
    """Commit a reservation: headers and payloads are in place; `skip` lists slots to drop.

    If several ranks write the blocks, each sends a header per slot instead (empty to drop the
    slot), with its own segments' checksums and zeros for those of other ranks: the node unites the
    headers and writes them.
    """

    lease: Natural
    skip: PerKey = []
    headers: Headers = []


class Abort(Request, tag="abort"):
    """Cancel a reservation: its writer has stopped, and the node drops all its blocks."""

    lease: Natural


class Lease(Request, tag="lease"):
    """Hold the leading resident blocks and promote them into DRAM. With `follow` the lease also
    holds blocks that are being written, and the client can read only the segments it awaited."""

    keys: Keys
    timeout_s: Timeout
    follow: bool = False


class Publish(Request, tag="publish"):
    """Publish complete segments before the commit: these `segments` of these slots of a reservation
    will not change. `spans`: offset and length of each segment in its extent; `checksums`: of 8
    bytes each, little-endian, those of the first slot's segments first."""

    lease: Natural
    slots: PerKey
    segments: Segments
    spans: Spans
    checksums: Checksums


class Await(Request, tag="await"):
    """Wait until these segments of all blocks of a follower's lease are published, or their blocks
    committed, and expose them to reads; without segments, wait until all blocks are committed."""

    lease: Natural
    segments: Segments
    timeout_s: Timeout


class Release(Request, tag="release"):
    """End a read lease; over the network, 0 means the lease of this connection's last request."""

    lease: Natural


class Report(Request, tag="report"):
    """Report that a reader found this generation of a block damaged; the node verifies it."""

    key: Key
    generation: Natural


class Pin(Request, tag="pin"):
    """Pin (`level` 1 soft, 2 hard) or unpin (0) the resident blocks among `keys`."""

    keys: Keys
    level: Annotated[int, Meta(ge=0, le=2)]
    ttl_s: Annotated[float, Meta(gt=0)]


class Remove(Request, tag="remove"):
    """Remove these blocks. The node replies when the removal is durable against a power cut, or
    with DeadlineExceeded after `timeout_s`."""

    keys: Keys
    timeout_s: Timeout = 5.0


class Statistics(Request, tag="statistics"):
    """Request the statistics that `tiffin status` shows."""


class Inventory(Request, tag="inventory"):
    """Request a page of the keys of all resident blocks: those after the first `after` ones. With 0
    the client starts to read a snapshot of the node, one at a time, and may pause for up to 30 s
    between pages. Pages of different `seq` are of different snapshots: the client must start
    again."""

    after: Natural = 0


class Events(Request, tag="events"):
    """Request the blocks added and removed after event number `after`, at most EVENTS_MAX.

    With `removals`: the keys that were removed by requests, for the node with this `slab`, which
    was away. `after` counts removals then.
    """

    after: Natural
    removals: bool = False
    slab: Secret = b""


class Pull(Request, tag="pull"):
    """Copy the missing blocks of `keys`, consecutive blocks of one prefix, from the node with
    number `source` in the directory. The reply comes when the copy is done, or with `wait` false
    when it is queued: then a reader is about to come, and the copy goes before other copies."""

    keys: Keys
    parent: Key
    depth: Natural
    source: Natural
    timeout_s: Timeout
    wait: bool = True


class Evacuate(Request, tag="evacuate"):
    """Copy every block that no other node has to nodes with room, for up to `timeout_s`."""

    timeout_s: Timeout


class Describe(Request, tag="describe"):
    """Request what NIXL needs to read this node's DRAM."""


class Confirm(Request, tag="confirm"):
    """Ask whether the session still holds this read lease. A client sends this after a one-sided
    read, which the node cannot stop."""

    lease: Natural


class Drain(Request, tag="drain"):
    """Refuse new reservations (`on`), or accept them again. Resident blocks stay readable."""

    on: bool


class Announce(Request, tag="announce"):
    """Say what the keys of this client's blocks are made of: a `KeySpace`, which holds while the
    client is connected, instead of what it announced before. Empty: none any more."""

    space: Space


class Spaces(Request, tag="spaces"):
    """Request the key spaces that clients have announced, unless they are those of `seq`."""

    seq: Natural = 0


class Settle(Request, tag="settle"):
    """Close connections of this session whose calls the client gave up, and end what was granted
    over them, but the leases in `live`. On a unix socket only."""

    connections: Annotated[list[Natural], Meta(max_length=CONNECTIONS_MAX)]
    live: LeaseIds


class Goodbye(Request, tag="goodbye"):
    """Close the session: the client no longer accesses the region, and its leases end."""


AnyRequest = (
    Hello
    | Match
    | Exists
    | Reserve
    | Commit
    | Abort
    | Lease
    | Publish
    | Await
    | Release
    | Report
    | Pin
    | Remove
    | Statistics
    | Inventory
    | Events
    | Pull
    | Evacuate
    | Describe
    | Confirm
    | Drain
    | Announce
    | Spaces
    | Settle
    | Goodbye
)


class Reply(msgspec.Struct, array_like=True, gc=False):
    """The base of all replies: `id` is the request's."""

    id: int


class Challenge(Reply, tag="challenge"):
    """The first frame of a network connection; the client's proof must cover it."""

    nonce: Secret
    version: int


class Welcome(Reply, tag="welcome"):
    """The connection is open. On a unix socket the region's descriptor came with this frame, if
    this is the session's first connection; else `region_bytes` is 0. `session` is another with each
    session that begins: a client that knows none of it has missed its beginning. Over the network
    `proof` shows that the node has the token as well, `address` is the node's advertised address,
    and `of_bytes` says whether block bytes have tags."""

    version: int
    node: Name
    region_bytes: int
    proof: Secret = b""
    address: Address = ""
    of_bytes: bool = False
    session: Secret = b""


class Flags(Reply, tag="flags"):
    """One byte per key (`Match`, `Exists`) or per slot (`Commit`: 1 stored, 0 refused, 2 waiting
    for the other writers of the block)."""

    flags: KeyFlags


class Reserved(Reply, tag="reserved"):
    """The result of a reservation: `statuses` per processed key; offsets and generations of the
    granted extents, in order."""

    statuses: KeyFlags
    reason: Why
    lease: Natural
    offsets: PerKey
    generations: PerKey


class Leased(Reply, tag="leased"):
    """The lease on the leading blocks; `reason` says why it covers no more. `lengths`, over the
    network only: the length of each extent, header and payload; byte ranges of the lease address
    the extents as one concatenation."""

    reason: Why
    lease: Natural
    offsets: PerKey
    generations: PerKey
    lengths: Lengths = []


class Awaited(Reply, tag="awaited"):
    """Whether the awaited segments are complete; only these can be read now. `checksums` of the
    segments as their writers gave them, 8 bytes each, little-endian, those of the first block
    first."""

    ready: bool
    checksums: AwaitedChecksums = b""


class Done(Reply, tag="done"):
    """The request succeeded, for `count` blocks."""

    count: int = 0


class Numbers(Reply, tag="numbers"):
    """Statistics as nested plain values."""

    numbers: NestedNumbers


class KeyPage(Reply, tag="key_page"):
    """A page of the inventory as it was at event number `seq`; `more` if further pages follow.
    `tiers[i]` is the tier of key i: IN_DRAM, or IN_NVME if it is only there. Empty `tiers`: the
    node did not send them."""

    seq: int
    keys: InventoryKeys
    more: bool
    tiers: InventoryTiers = b""


class EventPage(Reply, tag="event_page"):
    """Events `first` and following: `added[i]` is 1 if key i was added, 0 if it was removed.
    `gap`: the log no longer has all events after the requested one; the client takes the inventory.
    `tiers[i]` is the tier of key i from then on, as in a KeyPage, 0 if it was removed; a block that
    moved to another tier is listed as added again.

    Of removals: `added[i]` is 1 if the node of the slab may have missed the removal of key i; all
    that it may have missed are listed if `whole`. `gap`: the node that answers has forgotten some.
    `removals` is set; a node of an older version does not know the question.
    """

    first: int
    added: EventFlags
    keys: EventKeys
    gap: bool = False
    tiers: EventFlags = b""
    removals: bool = False
    whole: bool = False


class SpacesPage(Reply, tag="spaces_page"):
    """The announced key spaces; none if the asker has those of `seq` already."""

    seq: Natural
    spaces: Annotated[list[Space], Meta(max_length=SPACES_MAX)]


class Described(Reply, tag="described"):
    """What NIXL needs to read this node's DRAM; `metadata` is empty if the node does not offer it.
    The region of `nbytes` begins at `base_address`."""

    metadata: Annotated[bytes, Meta(max_length=65_536)] = b""
    base_address: Annotated[int, Meta(ge=0)] = 0
    nbytes: Natural = 0


class Refused(Reply, tag="refused"):
    """The request failed; `error` names a class of `tiffin.kvstore.errors`."""

    error: ErrorName
    message: Text


def check_version(theirs: int, them: str, us: str) -> None:
    """Raise VersionMismatch, which names the older side, unless `theirs` is this version."""
    if theirs != PROTOCOL_VERSION:
        older = them if theirs < PROTOCOL_VERSION else us
        raise VersionMismatch(
            f"{them} speaks protocol {theirs}, {us} protocol {PROTOCOL_VERSION}: {older} is older; "
            "run the same version of tiffin on both sides"
        )


def without_proof(message: Hello | Welcome) -> bytes:
    """The encoded `Hello` or `Welcome` that its proof covers. Unlike in other messages, a new field
    in one of them needs a new version: a peer that does not know the field would compute another
    proof."""
    return encoder.encode(msgspec.structs.replace(message, proof=b""))


def refusal(request_id: int, error: Exception) -> Refused:
    """The reply for an error, with its text truncated and cleaned to what `Refused` permits."""
    text = _NO_TEXT.sub("?", str(error)[:REFUSAL_MAX])
    # Paths may contain bytes that are not UTF-8.
    text = text.encode("utf-8", "replace").decode()
    return Refused(request_id, type(error).__name__, text)


AnyReply = (
    Challenge
    | Welcome
    | Flags
    | Reserved
    | Leased
    | Awaited
    | Done
    | Numbers
    | KeyPage
    | EventPage
    | SpacesPage
    | Described
    | Refused
)

encoder = msgspec.msgpack.Encoder()
request_decoder = msgspec.msgpack.Decoder(AnyRequest)
reply_decoder = msgspec.msgpack.Decoder(AnyReply)

# Exceptions of the decoder for bytes that are no message: besides msgspec's own error, those for
# text that is not UTF-8 and for arrays nested too deeply.
NOT_A_MESSAGE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
