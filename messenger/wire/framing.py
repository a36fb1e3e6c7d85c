"""Frames: a u32 little-endian length, then so many bytes of body. No I/O happens here.

A connection owns one `FrameDecoder`, fills it with bytes (by letting the event loop read straight
into the decoder's buffer, which saves a copy and an allocation per read), and takes whole bodies
out.

    get_buffer ──recv_into──► buffer_updated ──► take() ──► [body, body, ...]

The buffer starts at 64 KiB, where almost every exchange fits, and doubles only as bytes arrive: a
peer that announces 16 MiB and sends nothing costs nothing. A body that outgrew the first buffer is
not copied out of it; the buffer is handed over and replaced, so memory shrinks by itself.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from ..errors import FrameError

if TYPE_CHECKING:
    from collections.abc import Iterator

# The largest legitimate message reserves the blocks of a prompt of one million tokens, 2,048 blocks
# of 512: per block 16 B of key, 2 KiB of tokens and, for 80 layers of K and V, 160 checksums of 9 B
# in msgpack. That is 3.5 KiB × 2,048 = 7 MiB. Twice that, as a power of two.
FRAME_BYTES_MAX = 16 << 20

# One read of a socket at its default receive buffer, and 16 requests of 4 KiB.
_BUFFER_BYTES = 64 << 10

# With less room than this at the end of the buffer, the decoder moves the pending bytes to the
# front, so that reads do not become tiny.
_ROOM_BYTES_MIN = 4 << 10

_LENGTH = struct.Struct("<I")
_HEADER_BYTES = _LENGTH.size
_length_at = _LENGTH.unpack_from


def encode_frame(body: bytes | bytearray | memoryview) -> bytes:
    """`body` after its length. Copies it once; raises FrameError above FRAME_BYTES_MAX."""
    nbytes = body.nbytes if isinstance(body, memoryview) else len(body)
    if nbytes > FRAME_BYTES_MAX:
        raise FrameError(f"a frame of {nbytes} bytes; the limit is {FRAME_BYTES_MAX}")
    return _LENGTH.pack(nbytes) + body


class FrameDecoder:
    """Splits one byte stream into bodies. Not thread-safe; one per connection.

    A body is `bytes`, or for a large one a `memoryview` of memory that only this view uses. After a
    FrameError the stream cannot be continued: every later `take` raises it again.
    """

    __slots__ = ("_buffer", "_end", "_frame_bytes_max", "_start", "_view")

    def __init__(self, frame_bytes_max: int = FRAME_BYTES_MAX) -> None:
        self._frame_bytes_max = frame_bytes_max
        self._buffer = bytearray(_BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        # Invariant: 0 <= _start <= _end <= len(_buffer); [_start, _end) contains the bytes received
        # and not yet taken.
        self._start = 0
        self._end = 0

    @property
    def pending_bytes(self) -> int:
        """Bytes received and not yet taken; above 0 at the end of a stream means it was cut off."""
        return self._end - self._start

    def get_buffer(self, sizehint: int = -1) -> memoryview:
        """The buffer for the next bytes of the stream; never empty. As in asyncio.BufferedProtocol.

        `sizehint` is ignored: a larger read than the room is only two reads.
        """
        if len(self._buffer) - self._end < _ROOM_BYTES_MIN:
            self._make_room()
        return self._view[self._end :]

    def buffer_updated(self, nbytes: int) -> None:
        """`nbytes` bytes were written to the start of the last `get_buffer()`."""
        self._end += nbytes
        assert self._end <= len(self._buffer)

    def take(self) -> list[bytes | memoryview]:
        """Take every complete body, in order; call it after each `buffer_updated`.

        Raises FrameError for a length above the limit as soon as its four bytes have arrived;
        bodies before it in the same call are lost with the connection.
        """
        bodies: list[bytes | memoryview] = []
        buffer, start, end = self._buffer, self._start, self._end
        while end - start >= _HEADER_BYTES:
            (length,) = _length_at(buffer, start)
            if length > self._frame_bytes_max:
                raise FrameError(f"a frame of {length} bytes; the limit is {self._frame_bytes_max}")
            stop = start + _HEADER_BYTES + length
            if stop > end:
                break
            if length > _BUFFER_BYTES:
                bodies.append(self._view[start + _HEADER_BYTES : stop].toreadonly())
                self._replace_buffer(_BUFFER_BYTES, stop)
                buffer, start, end = self._buffer, 0, self._end
            else:
                bodies.append(bytes(self._view[start + _HEADER_BYTES : stop]))
                start = stop
        if start == end:
            start = self._end = 0
        self._start = start
        return bodies

    def __iter__(self) -> Iterator[bytes | memoryview]:
        """The bodies that `take` returns."""
        return iter(self.take())

    def feed(self, data: bytes | bytearray | memoryview) -> list[bytes | memoryview]:
        """Copy `data` in and `take`: for callers without a BufferedProtocol, and for tests."""
        bodies: list[bytes | memoryview] = []
        rest = memoryview(data).cast("B")
        while rest:
            room = self.get_buffer()
            nbytes = min(len(room), len(rest))
            room[:nbytes] = rest[:nbytes]
            self.buffer_updated(nbytes)
            bodies += self.take()
            rest = rest[nbytes:]
        return bodies

    def _make_room(self) -> None:
        """Move the pending bytes to the front; into a buffer of twice the size when they fill more
        than half of it."""
        pending_bytes = self._end - self._start
        nbytes = len(self._buffer)
        if 2 * pending_bytes > nbytes:
            nbytes = min(2 * nbytes, _HEADER_BYTES + self._frame_bytes_max + _BUFFER_BYTES)
            if nbytes < pending_bytes + _ROOM_BYTES_MIN:  # more than one whole frame
                raise FrameError(f"{pending_bytes} bytes received and not taken")
            self._replace_buffer(nbytes, self._start)
        else:
            self._buffer[:pending_bytes] = self._buffer[self._start : self._end]
            self._start, self._end = 0, pending_bytes

    def _replace_buffer(self, nbytes: int, start: int) -> None:
        """Continue in a new buffer with the bytes pending from `start`; a body returned by `take`
        may be a view of the old one."""
        pending_bytes = self._end - start
        buffer = bytearray(max(nbytes, pending_bytes + _ROOM_BYTES_MIN))
        buffer[:pending_bytes] = self._view[start : self._end]
        self._buffer, self._view = buffer, memoryview(buffer)
        self._start, self._end = 0, pending_bytes
