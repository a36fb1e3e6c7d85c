"""What clients and nodes say to each other, in one process or over a socket.

msgpack arrays (msgspec `array_like`), one tagged struct per request; every request carries an `id`
that its reply repeats, so that a client may give up on one and go on. Fields are only ever added at
the end, with a default; anything else raises `PROTOCOL_VERSION`. Keys travel joined, 16 bytes each.
Offsets are bytes from the start of the DRAM region that `Welcome` came with.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

PROTOCOL_VERSION = 1

# Limits of one request, checked while it is decoded. 65,536 keys are 33 million tokens; names are
# for people to read in `tiffin status`.
KEYS_BYTES_MAX = 65_536 * 16
TIMEOUT_S_MAX = 3600.0
NAME_MAX = 200

# The id of a request that is not answered: releases, aborts, reports. Half of a reader's messages.
UNAWAITED = 0

Keys = Annotated[bytes, Meta(max_length=KEYS_BYTES_MAX)]
Key = Annotated[bytes, Meta(min_length=16, max_length=16)]
Name = Annotated[str, Meta(max_length=NAME_MAX)]
Timeout = Annotated[float, Meta(ge=0, le=TIMEOUT_S_MAX)]
Natural = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]


class Request(msgspec.Struct, array_like=True, forbid_unknown_fields=False, gc=False):
    """The base: `id` is repeated in the reply; UNAWAITED asks for none."""

    id: Natural


class Hello(Request, tag="hello"):
    """The first request of a connection. `pid` is for display; the kernel says who is dead."""

    version: int
    name: Name = ""
    pid: Natural = 0


class Match(Request, tag="match"):
    """Which leading blocks are resident?"""

    keys: Keys


class Exists(Request, tag="exists"):
    """Which blocks are resident, each on its own?"""

    keys: Keys


class Reserve(Request, tag="reserve"):
    """Extents to write the missing ones of `keys` in place; `depth` is the first one's index."""

    keys: Keys
    parent: Key
    depth: Natural
    extent_bytes: Natural
    timeout_s: Timeout


class Commit(Request, tag="commit"):
    """The headers and payloads of this reservation are in place; `skip` lists slots to drop."""

    lease: Natural
    skip: list[Natural] = []


class Abort(Request, tag="abort"):
    """The writer has stopped; nothing of this reservation is to be kept."""

    lease: Natural


class Lease(Request, tag="lease"):
    """Hold the leading resident blocks and bring them into DRAM."""

    keys: Keys
    timeout_s: Timeout


class Release(Request, tag="release"):
    """The reader is done with this lease."""

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
    | Release
    | Report
    | Pin
    | Remove
    | Statistics
    | Goodbye
)


class Reply(msgspec.Struct, array_like=True, gc=False):
    """The base: `id` is the request's."""

    id: int


class Welcome(Reply, tag="welcome"):
    """The connection is open; the region's descriptor came with this frame."""

    version: int
    node: str
    region_bytes: int


class Flags(Reply, tag="flags"):
    """One byte per key (`Match`, `Exists`) or per slot (`Commit`: 1 stored, 0 refused)."""

    flags: bytes


class Reserved(Reply, tag="reserved"):
    """`statuses` per key decided on; offsets and generations of the granted ones, in order."""

    statuses: bytes
    reason: int
    lease: int
    offsets: list[int]
    generations: list[int]


class Leased(Reply, tag="leased"):
    """The leading blocks that are held; `reason` says why not more."""

    reason: int
    lease: int
    offsets: list[int]
    generations: list[int]


class Done(Reply, tag="done"):
    """It was done to `count` blocks."""

    count: int = 0


class Numbers(Reply, tag="numbers"):
    """Statistics as nested plain values."""

    numbers: dict[str, Any]


class Refused(Reply, tag="refused"):
    """The request failed; `error` names a class of `tiffin.kvstore.errors`."""

    error: str
    message: str


AnyReply = Welcome | Flags | Reserved | Leased | Done | Numbers | Refused

encoder = msgspec.msgpack.Encoder()
request_decoder = msgspec.msgpack.Decoder(AnyRequest)
reply_decoder = msgspec.msgpack.Decoder(AnyReply)
