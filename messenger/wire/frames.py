"""The frames of a TCP connection, as bytes. No I/O happens here. See docs/wire.md.

    u32 length of what follows | u8 kind | body                            all little-endian

A MESSAGE's body is the application's. The four other kinds begin alike, with a head of 32 bytes:

     0        4    5      6       8        12       16         24       32
    ┌────────┬────┬──────┬───────┬────────┬────────┬──────────┬────────┐
    │ length │kind│status│ 0     │ ranges │ 0      │ number   │ 0      │
    └────────┴────┴──────┴───────┴────────┴────────┴──────────┴────────┘

    READ     number = the grant; `ranges` times (u64 offset, u64 length) follow
    WRITE    as READ, and after the frame the raw bytes of all its ranges
    DATA     number = how many raw bytes follow the frame; if refused, the reason is in the frame
    WRITTEN  as DATA, and no raw bytes follow

Why 32 bytes: the kernel copies a head and the bytes behind it to one place, and on AMD Zen a copy
runs at less than half speed when its target lies 1 to 15 bytes further into a page than its source
(`rep movsb`; glibc's bug 30994 is the same). Measured on loopback, sending 64 KiB took 28 us behind
a head of 18 bytes and 11 us behind one of 32, from an array of NumPy, 16 bytes into its page. Heads
of a multiple of 16 bytes keep sources at multiples of 16 out of that zone.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from ..errors import FrameError, RangeError
from ..transport import NOTHING, Range, Served
from .framing import FRAME_BYTES_MAX
from .ranges import pack_ranges, unpack_ranges

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray


class Kind(IntEnum):
    """The kind of a frame; the byte after its length."""

    MESSAGE = 1
    READ = 2
    DATA = 3
    WRITE = 4
    WRITTEN = 5


class FrameStatus(IntEnum):
    """The status in the answer to a READ or WRITE."""

    OK = 0
    REFUSED = 1


# Means: the grant in the answer to the last message on this stream. So a client can request bytes
# in the same packet as their lease.
LAST_GRANT = 0

# Ranges of one frame: 1 MiB of them. A prompt of a million tokens in 2,048 blocks, 32 ranges each.
RANGES_MAX = 65_536
# Bytes of one range of a WRITE. The sum of 65,536 of them fits 64 bits.
RANGE_BYTES_MAX = 1 << 40
# The reason of a refusal, in UTF-8.
REASON_BYTES_MAX = 1024

HEADER = struct.Struct("<IB")
# length, kind, status, 0, ranges, 0, number, 0; and the part of it after the first five bytes.
_HEAD = struct.Struct("<IBBHIIQQ")
_HEAD_BODY = struct.Struct("<BHIIQQ")
HEAD_BYTES = _HEAD.size
assert HEAD_BYTES == HEADER.size + _HEAD_BODY.size == 32
# A `length` does not count its own four bytes.
_HEAD_LENGTH = HEAD_BYTES - 4
_RANGE_BYTES = 16
# Requests of few ranges are packed in one call, in a third of the time of the general case.
_FEW = [struct.Struct("<IBBHIIQQ" + "QQ" * count) for count in range(9)]

# The lookup, done for every frame, takes half the time of `Kind(code)`.
_KINDS = {int(kind): kind for kind in Kind}

# The longest body of each kind, without length and kind.
BODY_BYTES_MAX = {
    Kind.MESSAGE: FRAME_BYTES_MAX,
    Kind.READ: _HEAD_BODY.size + _RANGE_BYTES * RANGES_MAX,
    Kind.DATA: _HEAD_BODY.size + REASON_BYTES_MAX,
    Kind.WRITE: _HEAD_BODY.size + _RANGE_BYTES * RANGES_MAX,
    Kind.WRITTEN: _HEAD_BODY.size + REASON_BYTES_MAX,
}


class FrameHeader(NamedTuple):
    """The first five bytes of a frame."""

    kind: Kind
    body_bytes: int


def message_header(body_bytes: int) -> bytes:
    """The header of a message. Raises RangeError above FRAME_BYTES_MAX."""
    if body_bytes > FRAME_BYTES_MAX:
        raise RangeError(f"a message of {body_bytes} bytes; the limit is {FRAME_BYTES_MAX}")
    return HEADER.pack(1 + body_bytes, Kind.MESSAGE)


def request(kind: Kind, grant: int, ranges: Sequence[Range]) -> bytes:
    """A READ or WRITE frame. Raises RangeError for too many ranges, or numbers outside u64."""
    count = len(ranges)
    if count > RANGES_MAX:
        raise RangeError(f"{count} ranges in one frame; the limit is {RANGES_MAX}")
    length = _HEAD_LENGTH + _RANGE_BYTES * count
    try:
        if count < len(_FEW):
            numbers = chain.from_iterable(ranges)
            return _FEW[count].pack(length, kind, 0, 0, count, 0, grant, 0, *numbers)
        return _HEAD.pack(length, kind, 0, 0, count, 0, grant, 0) + pack_ranges(ranges)
    except struct.error as error:
        raise RangeError(f"grants, offsets and lengths are numbers below 2**64: {error}") from error


def answer(kind: Kind, served: Served) -> bytes:
    """A DATA or WRITTEN frame with the ranges and bytes served."""
    return _HEAD.pack(_HEAD_LENGTH, kind, FrameStatus.OK, 0, served.ranges, 0, served.nbytes, 0)


def refusal(kind: Kind, reason: str) -> bytes:
    """A DATA or WRITTEN frame that refuses the request: no raw bytes, and the reason."""
    why = reason.encode("utf-8", "replace")[:REASON_BYTES_MAX]
    return _HEAD.pack(_HEAD_LENGTH + len(why), kind, FrameStatus.REFUSED, 0, 0, 0, 0, 0) + why


def parse_header(data: memoryview, message_bytes_max: int, at: int = 0) -> FrameHeader:
    """The header at `at`. Raises FrameError for an unknown kind or a length above what that kind
    can have."""
    length, code = HEADER.unpack_from(data, at)
    kind = _KINDS.get(code)
    if kind is None:
        raise FrameError(f"a frame of unknown kind {code}")
    limit = message_bytes_max if kind is Kind.MESSAGE else BODY_BYTES_MAX[kind]
    if not 1 <= length <= limit + 1:
        raise FrameError(f"a {kind.name} frame of {length} bytes; the limit is {limit + 1}")
    return FrameHeader(kind, length - 1)


def parse_request(body: bytes | memoryview) -> tuple[int, NDArray[np.uint64]]:
    """Grant, and ranges [count, 2], of a READ or WRITE body. Raises FrameError."""
    count, grant = _parse_request_head(body)
    return grant, unpack_ranges(body, _HEAD_BODY.size, count)


def grant_of(body: bytes) -> int:
    """The grant of a READ's body. Raises FrameError unless the body has the ranges it announces."""
    return _parse_request_head(body)[1]


def parse_answer(body: bytes | memoryview) -> tuple[Served, str | None]:
    """The ranges and bytes served, and the reason if refused (else None). Raises FrameError."""
    status, count, nbytes = _parse_head(body)
    reason = bytes(body[_HEAD_BODY.size :])
    if status == FrameStatus.OK and not reason:
        return Served(count, nbytes), None
    if status == FrameStatus.REFUSED and not count and not nbytes:
        return NOTHING, reason.decode("utf-8", "replace")
    raise FrameError(f"an answer with status {status}, {count} ranges and {nbytes} bytes")


def parse_whole_answer(data: memoryview, at: int, kind: Kind) -> Served | None:
    """The fast path: the ranges and bytes served, if there is a whole answer of this kind at `at`
    that is no refusal. None for anything else, which the caller has to parse in full."""
    length, code, status, zero, count, zero_too, nbytes, zero_also = _HEAD.unpack_from(data, at)
    if length != _HEAD_LENGTH or code != kind or status or zero or zero_too or zero_also:
        return None
    return Served(count, nbytes)


def _parse_request_head(body: bytes | memoryview) -> tuple[int, int]:
    """The number of ranges, and the grant."""
    status, count, grant = _parse_head(body)
    if status or count > RANGES_MAX or len(body) != _HEAD_BODY.size + _RANGE_BYTES * count:
        raise FrameError(f"a request of {len(body)} bytes with status {status}, {count} ranges")
    return count, grant


def _parse_head(body: bytes | memoryview) -> tuple[int, int, int]:
    """Status, number of ranges, and the head's `number`."""
    if len(body) < _HEAD_BODY.size:
        raise FrameError(f"a frame of {len(body)} bytes is shorter than its head")
    status, zero, count, zero_too, number, zero_also = _HEAD_BODY.unpack_from(body)
    if zero or zero_too or zero_also:
        raise FrameError("a head whose reserved bytes are not zero: a later version's?")
    return status, count, number
