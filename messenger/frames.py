"""The frames of a TCP connection, as bytes. No I/O happens here. The page: docs/wire.md.

frame   = u32 length of what follows | u8 kind | body                  all little-endian
MESSAGE = the application's bytes
READ    = u64 grant | u32 count | count x (u64 offset, u64 length)
DATA    = u8 status | u32 ranges | u64 nbytes | why, if refused        then nbytes raw bytes
WRITE   = as READ                                     then the raw bytes of all its ranges
WRITTEN = u8 status | u32 ranges | u64 nbytes | why, if refused
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

from .errors import FrameError, RangeError
from .ranges import Range, Served, pack_ranges, unpack_ranges
from .wire import FRAME_BYTES_MAX

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray


class Kind(IntEnum):
    """What a frame is; the byte after its length."""

    MESSAGE = 1
    READ = 2
    DATA = 3
    WRITE = 4
    WRITTEN = 5


class Status(IntEnum):
    """How a transfer was answered."""

    OK = 0
    REFUSED = 1


# "The grant that the last message on this stream was answered with". A client can ask for bytes in
# the same packet as for their lease.
LAST_GRANT = 0

# Ranges of one frame: 1 MiB of them. A prompt of a million tokens in 2,048 blocks, 32 ranges each.
RANGES_MAX = 65_536
# Bytes of one range of a WRITE. 65,536 of them can be added in 64 bits.
RANGE_BYTES_MAX = 1 << 40
# Why a grant was refused, in UTF-8.
REASON_BYTES_MAX = 1024

HEADER = struct.Struct("<IB")
_REQUEST = struct.Struct("<QI")
_ANSWER = struct.Struct("<IBBIQ")
ANSWER_BYTES = _ANSWER.size
# Of an answer's body, after its kind and without a reason.
_ANSWER_BODY_BYTES = ANSWER_BYTES - HEADER.size

# The longest body of each kind.
BODY_BYTES_MAX = {
    Kind.MESSAGE: FRAME_BYTES_MAX,
    Kind.READ: _REQUEST.size + 16 * RANGES_MAX,
    Kind.DATA: _ANSWER_BODY_BYTES + REASON_BYTES_MAX,
    Kind.WRITE: _REQUEST.size + 16 * RANGES_MAX,
    Kind.WRITTEN: _ANSWER_BODY_BYTES + REASON_BYTES_MAX,
}


class Header(NamedTuple):
    """The first five bytes of a frame."""

    kind: Kind
    body_bytes: int


def message_header(body_bytes: int) -> bytes:
    """What goes before a message. Raises RangeError above FRAME_BYTES_MAX."""
    if body_bytes > FRAME_BYTES_MAX:
        raise RangeError(f"a message of {body_bytes} bytes; the limit is {FRAME_BYTES_MAX}")
    return HEADER.pack(1 + body_bytes, Kind.MESSAGE)


def request(kind: Kind, grant: int, ranges: Sequence[Range]) -> bytes:
    """A READ or WRITE frame. Raises RangeError for too many ranges, or numbers outside u64."""
    count = len(ranges)
    if count > RANGES_MAX:
        raise RangeError(f"{count} ranges in one frame; the limit is {RANGES_MAX}")
    try:
        if count == 1:  # a third of the time of the general way
            return _ONE_RANGE.pack(_REQUEST.size + 17, kind, grant, 1, *ranges[0])
        packed = pack_ranges(ranges)
        return (
            HEADER.pack(1 + _REQUEST.size + len(packed), kind)
            + _REQUEST.pack(grant, count)
            + packed
        )
    except (OverflowError, struct.error, ValueError) as error:
        raise RangeError(f"grants, offsets and lengths are numbers below 2**64: {error}") from error


_ONE_RANGE = struct.Struct("<IBQIQQ")


def answer(kind: Kind, served: Served) -> bytes:
    """A DATA or WRITTEN frame that says how far the transfer comes, or came."""
    return _ANSWER.pack(_ANSWER_BODY_BYTES + 1, kind, Status.OK, *served)


def refusal(kind: Kind, reason: str) -> bytes:
    """A DATA or WRITTEN frame without bytes, and why."""
    why = reason.encode("utf-8", "replace")[:REASON_BYTES_MAX]
    return _ANSWER.pack(_ANSWER_BODY_BYTES + 1 + len(why), kind, Status.REFUSED, 0, 0) + why


def parse_header(data: memoryview, message_bytes_max: int) -> Header:
    """Raises FrameError for an unknown kind or a length above what that kind can have."""
    length, code = HEADER.unpack_from(data)
    limit = message_bytes_max if code == Kind.MESSAGE else BODY_BYTES_MAX.get(code, -1)
    if limit < 0:
        raise FrameError(f"a frame of unknown kind {code}")
    if not 1 <= length <= limit + 1:
        raise FrameError(f"a {Kind(code).name} frame of {length} bytes; the limit is {limit + 1}")
    return Header(Kind(code), length - 1)


def parse_request(body: bytes | memoryview) -> tuple[int, NDArray[np.uint64]]:
    """Grant, and ranges [count, 2], of a READ or WRITE body. Raises FrameError."""
    if len(body) < _REQUEST.size:
        raise FrameError(f"a request of {len(body)} bytes")
    grant, count = _REQUEST.unpack_from(body)
    if count > RANGES_MAX or len(body) != _REQUEST.size + 16 * count:
        raise FrameError(f"a request of {len(body)} bytes that announces {count} ranges")
    return grant, unpack_ranges(body, _REQUEST.size, count)


def parse_answer(body: bytes | memoryview) -> tuple[Served, str | None]:
    """What was served, and why not if refused. Raises FrameError."""
    if len(body) < _ANSWER_BODY_BYTES:
        raise FrameError(f"an answer of {len(body)} bytes")
    status, ranges, nbytes = _ANSWER_BODY.unpack_from(body)
    reason = bytes(body[_ANSWER_BODY_BYTES:])
    if status == Status.OK and not reason:
        return Served(ranges, nbytes), None
    if status == Status.REFUSED and not ranges and not nbytes:
        return Served(0, 0), reason.decode("utf-8", "replace")
    raise FrameError(f"an answer with status {status}, {ranges} ranges and {nbytes} bytes")


_ANSWER_BODY = struct.Struct("<BIQ")
