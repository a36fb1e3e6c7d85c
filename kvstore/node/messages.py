"""What clients and nodes say to each other, in one process or over a socket.

msgpack arrays (msgspec `array_like`), one tagged struct per request; every request carries an `id`
that its reply repeats, so that a client may give up on one and go on. Fields are only ever added at
the end, with a default; anything else raises `PROTOCOL_VERSION`. Keys travel joined, 16 bytes each.
Offsets are bytes from the start of the node's DRAM region: the one that `Welcome` came with on a
unix socket. Over the network nobody maps it, and only leases name memory (`remote.py`).
"""

from __future__ import annotations

import re
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from .. import names
from ..block import MAX_HEADER_BYTES, MAX_SEGMENTS
from .records import Reason

PROTOCOL_VERSION = 1

# Limits of one message, checked while it is decoded, by whoever it came from. 65,536 keys are 33
# million tokens.
KEYS_MAX = 65_536
KEYS_BYTES_MAX = KEYS_MAX * 16
TIMEOUT_S_MAX = 3600.0
NAME_MAX = names.NAME_MAX

# The id of a request that is not answered: releases, aborts, reports. Half of a reader's messages.
UNAWAITED = 0

Keys = Annotated[bytes, Meta(max_length=KEYS_BYTES_MAX)]
Key = Annotated[bytes, Meta(min_length=16, max_length=16)]
Name = Annotated[str, Meta(max_length=NAME_MAX, pattern=names.PLAIN)]
Timeout = Annotated[float, Meta(ge=0, le=TIMEOUT_S_MAX)]
NATURAL_MAX = (1 << 63) - 1
Natural = Annotated[int, Meta(ge=0, le=NATURAL_MAX)]
Why = Annotated[int, Meta(ge=0, le=int(max(Reason)))]
# Writers of one block: no more than it has segments. A header comes without the zeros at its end.
Ranks = Annotated[int, Meta(ge=1, le=MAX_SEGMENTS)]
Bitmap = Annotated[bytes, Meta(max_length=MAX_SEGMENTS // 8)]
HeaderBytes = Annotated[bytes, Meta(max_length=MAX_HEADER_BYTES)]
# Of one slot per key at most: the slots of a commit, what a reservation or a lease grants.
PerKey = Annotated[list[Natural], Meta(max_length=KEYS_MAX)]
Lengths = Annotated[list[Annotated[int, Meta(ge=1, le=NATURAL_MAX)]], Meta(max_length=KEYS_MAX)]
Headers = Annotated[list[HeaderBytes], Meta(max_length=KEYS_MAX)]
# A byte per key.
KeyFlags = Annotated[bytes, Meta(max_length=KEYS_MAX)]
# Of one publication: 131,072 checksums, a layer of 16 segments of 8,192 blocks; more go in several.
# And of one answer to an await: a layer of one segment of every block of a lease, 16 times.
PUBLISHED_BYTES_MAX = 1 << 20
AWAITED_BYTES_MAX = 8 << 20
Segments = Annotated[list[Natural], Meta(max_length=MAX_SEGMENTS)]
Spans = Annotated[list[Natural], Meta(max_length=2 * MAX_SEGMENTS)]
Checksums = Annotated[bytes, Meta(max_length=PUBLISHED_BYTES_MAX)]
AwaitedChecksums = Annotated[bytes, Meta(max_length=AWAITED_BYTES_MAX)]
# Nonces, proofs and session names of the network handshake (`handshake.py`).
Secret = Annotated[bytes, Meta(max_length=32)]

# Keys per page of an inventory: 1 MiB of frame.
INVENTORY_KEYS = 65_536
InventoryKeys = Annotated[bytes, Meta(max_length=16 * INVENTORY_KEYS)]
InventoryTiers = Annotated[bytes, Meta(max_length=INVENTORY_KEYS)]
# Events per answer; 16 bytes and two flags each.
EVENTS_MAX = 16_384
EventFlags = Annotated[bytes, Meta(max_length=EVENTS_MAX)]
EventKeys = Annotated[bytes, Meta(max_length=16 * EVENTS_MAX)]
# A node has some 20 kinds of numbers; what is in each is bounded by the frame.
NestedNumbers = Annotated[dict[str, Any], Meta(max_length=256)]
# Why something was refused: some lines for people, with no control characters but these two.
REFUSAL_MAX = 4096
ErrorName = Annotated[str, Meta(max_length=100)]
Text = Annotated[str, Meta(max_length=REFUSAL_MAX, pattern=r"\A[^\x00-\x08\x0b-\x1f\x7f-\x9f]*\Z")]
_NO_TEXT = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class Request(msgspec.Struct, array_like=True, forbid_unknown_fields=False, gc=False):
    """The base: `id` is repeated in the reply; UNAWAITED asks for none."""

    id: Natural


class Hello(Request, tag="hello"):
    """The first request of a connection. `pid` is for display; the kernel says who is dead.

    Over the network also: `session`, 16 random bytes that the client's connections share; `nonce`
    and `proof` (see `handshake.py`).
    """

    version: int
    name: Name = ""
    pid: Natural = 0
    session: Secret = b""
    nonce: Secret = b""
    proof: Secret = b""


class Match(Request, tag="match"):
    """Which leading blocks are resident?"""

    keys: Keys


class Exists(Request, tag="exists"):
    """Which blocks are resident, each on its own?"""

    keys: Keys


class Reserve(Request, tag="reserve"):
    """Extents to write the missing ones of `keys` in place; `depth` is the first one's index.

    With `ranks` above 1, so many writers share each extent, and this is writer `rank`: `owned` has
    a bit for each segment of a block that it writes (bit 0 of byte 0 is the first one's).
    """

    keys: Keys
    parent: Key
    depth: Natural
    extent_bytes: Natural
    timeout_s: Timeout
    rank: Natural = 0
    ranks: Ranks = 1
    owned: Bitmap = b""


class Commit(Request, tag="commit"):
    """The headers and payloads of this reservation are in place; `skip` lists slots to drop.

    One writer of several sends a header per slot instead (empty for one to drop), with its own
    segments' checksums and zeros for the others': the node unites and writes them.
    """

    lease: Natural
    skip: PerKey = []
    headers: Headers = []


class Abort(Request, tag="abort"):
    """The writer has stopped; nothing of this reservation is to be kept."""

    lease: Natural


class Lease(Request, tag="lease"):
    """Hold the leading resident blocks and bring them into DRAM. With `follow` also those that are
    being written: of such a lease only what was awaited can be read."""

    keys: Keys
    timeout_s: Timeout
    follow: bool = False


class Publish(Request, tag="publish"):
    """These `segments` of these slots of a reservation are complete and will not change. `spans`:
    offset and length of each segment in its extent; `checksums`: of 8 bytes each, little-endian,
    those of the first slot's segments first."""

    lease: Natural
    slots: PerKey
    segments: Segments
    spans: Spans
    checksums: Checksums


class Await(Request, tag="await"):
    """Wait until these segments of all blocks of a follower's lease are published, or their blocks
    committed, and expose them to reads; without segments, until all blocks are committed."""

    lease: Natural
    segments: Segments
    timeout_s: Timeout


class Release(Request, tag="release"):
    """The reader is done with this lease; 0 over the network: the last one of this connection."""

    lease: Natural


class Report(Request, tag="report"):
    """A reader found this generation of a block damaged; the node checks it itself."""

    key: Key
    generation: Natural


class Pin(Request, tag="pin"):
    """Pin (`level` 1 soft, 2 hard) or unpin (0) the resident ones of `keys`."""

    keys: Keys
    level: Annotated[int, Meta(ge=0, le=2)]
    ttl_s: Annotated[float, Meta(gt=0)]


class Remove(Request, tag="remove"):
    """Forget these blocks."""

    keys: Keys


class Statistics(Request, tag="statistics"):
    """Everything that `tiffin status` shows."""


class Inventory(Request, tag="inventory"):
    """The keys of all resident blocks, a page at a time: those after the first `after` ones. With
    0 the node takes stock anew; pages of different `seq` don't belong together: begin again."""

    after: Natural = 0


class Events(Request, tag="events"):
    """What was added and removed after event number `after`, at most EVENTS_MAX of it."""

    after: Natural


class Pull(Request, tag="pull"):
    """Copy the missing ones of `keys`, consecutive blocks of one prefix, from the node that the
    directory knows as `source`. Answered when it is done, or with `wait` false when it is queued.
    """

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
    """How is this node's DRAM read by NIXL?"""


class Confirm(Request, tag="confirm"):
    """Is this read lease still held? Asked after a one-sided read of it, which nobody can stop."""

    lease: Natural


class Drain(Request, tag="drain"):
    """Take no more reservations (`on`), or take them again. What is here stays readable."""

    on: bool


class Goodbye(Request, tag="goodbye"):
    """The client leaves and touches the region no more; its leases end here."""


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
    | Goodbye
)


class Reply(msgspec.Struct, array_like=True, gc=False):
    """The base: `id` is the request's."""

    id: int


class Challenge(Reply, tag="challenge"):
    """The first frame of a connection over the network: what the client's proof has to cover."""

    nonce: Secret
    version: int


class Welcome(Reply, tag="welcome"):
    """The connection is open. On a unix socket the region's descriptor came with this frame; over
    the network `proof` shows that the node knows the token as well."""

    version: int
    node: Name
    region_bytes: int
    proof: Secret = b""


class Flags(Reply, tag="flags"):
    """One byte per key (`Match`, `Exists`) or per slot (`Commit`: 1 stored, 0 refused, 2 waiting
    for the other writers of the block)."""

    flags: KeyFlags


class Reserved(Reply, tag="reserved"):
    """`statuses` per key decided on; offsets and generations of the granted ones, in order."""

    statuses: KeyFlags
    reason: Why
    lease: Natural
    offsets: PerKey
    generations: PerKey


class Leased(Reply, tag="leased"):
    """The leading blocks that are held; `reason` says why not more. `lengths`, over the network
    only: how long each extent is, header and payload; the lease's ranges count through them."""

    reason: Why
    lease: Natural
    offsets: PerKey
    generations: PerKey
    lengths: Lengths = []


class Awaited(Reply, tag="awaited"):
    """Whether what was awaited is there, and only it can be read now. `checksums` of its segments
    by the writers' word, 8 bytes each, little-endian, those of the first block first."""

    ready: bool
    checksums: AwaitedChecksums = b""


class Done(Reply, tag="done"):
    """It was done to `count` blocks."""

    count: int = 0


class Numbers(Reply, tag="numbers"):
    """Statistics as nested plain values."""

    numbers: NestedNumbers


class KeyPage(Reply, tag="key_page"):
    """A page of the inventory as it was at event number `seq`; `more` if others follow. `tiers[i]`
    is where key i is: IN_DRAM, or IN_NVME if it is there alone. Empty: the node doesn't say."""

    seq: int
    keys: InventoryKeys
    more: bool
    tiers: InventoryTiers = b""


class EventPage(Reply, tag="event_page"):
    """Events `first` and following: `added[i]` is 1 if key i was added, 0 if it was removed.
    `gap`: events after the one asked for were forgotten; take the inventory. `tiers[i]` is where
    key i is from then on, as in a KeyPage, 0 if it was removed; one that was here and is in another
    tier now is added again."""

    first: int
    added: EventFlags
    keys: EventKeys
    gap: bool = False
    tiers: EventFlags = b""


class Described(Reply, tag="described"):
    """What NIXL needs to read this node's DRAM; `metadata` is empty if it is not offered. The
    region of `nbytes` begins at `base_address`, in `memory` ("DRAM") of `device`."""

    metadata: Annotated[bytes, Meta(max_length=65_536)] = b""
    base_address: Annotated[int, Meta(ge=0)] = 0
    nbytes: Natural = 0
    memory: Name = "DRAM"
    device: Natural = 0


class Refused(Reply, tag="refused"):
    """The request failed; `error` names a class of `tiffin.kvstore.errors`."""

    error: ErrorName
    message: Text


def refusal(request_id: int, error: Exception) -> Refused:
    """The reply that tells of an error, shortened and cleaned to what a `Refused` can say."""
    text = _NO_TEXT.sub("?", str(error)[:REFUSAL_MAX])
    # Paths may hold what is no UTF-8.
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
    | Described
    | Refused
)

encoder = msgspec.msgpack.Encoder()
request_decoder = msgspec.msgpack.Decoder(AnyRequest)
reply_decoder = msgspec.msgpack.Decoder(AnyReply)

# What decoding raises for bytes that are no message: besides msgspec's own error, text that is not
# UTF-8 and arrays nested too deeply.
NOT_A_MESSAGE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
