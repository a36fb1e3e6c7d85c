"""One read by a `NixlTransport`: chunk after chunk, two of them in flight at a time."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..errors import TransferError
from ..transport import NOTHING, Range, Served
from .descriptors import chunks

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ..shm.host_copy import ByteArray
    from ..transport import Arrived
    from .agent import NixlTransfer
    from .descriptors import Chunk, Runs
    from .nixl_transport import NixlTransport
    from .staging import Staging

# Transfers of a call in flight at a time: one moves while another is copied out.
_WINDOW = 2


class _UnderWay(NamedTuple):
    """One in-flight transfer of a call, and its staging piece."""

    chunk: Chunk
    flight: NixlTransfer
    piece: ByteArray
    begun_at: float


class NixlCall:
    """One `read` call in progress."""

    def __init__(
        self,
        transport: NixlTransport,
        grant: int,
        ranges: Sequence[Range],
        whole: Served,
        deadline: float,
        arrived: Arrived | None,
    ) -> None:
        self._transport = transport
        self._grant = grant
        self._ranges = ranges
        self._whole = whole
        self._deadline = deadline
        self._arrived = arrived
        self._window: deque[_UnderWay] = deque()
        self._moved_at = time.monotonic()
        self._came = NOTHING  # leading ranges whose bytes came
        self._told = NOTHING  # leading ranges reported to `arrived`
        self._rest = 0  # bytes that came of the range after `_came`
        self._count(0)  # leading ranges of zero bytes
        self._tell()

    def read(self, cursor: ChunkCursor, far: Runs) -> Served:
        """Read the bytes at `far`, through staging pieces, into the arrays of `cursor`."""
        staging = self._transport.staging()
        try:
            for chunk in chunks(far, staging.piece_bytes):
                self._launch(chunk, self._piece(staging, cursor), staging)
            while self._window:
                self._finish(staging, cursor)
            if self._arrived is None and self._whole.nbytes:
                self._transport.confirmed(self._grant, self._deadline)
        except TransferError as error:
            error.served = self._told
            raise
        finally:
            self._put_away(staging)
        return self._whole

    # -- the window ------------------------------------------------------------------------------

    def _piece(self, staging: Staging, cursor: ChunkCursor) -> ByteArray:
        """A free piece. A call that has one never waits for another, which could be a deadlock:
        all calls could have one and wait."""
        if len(self._window) == _WINDOW:
            self._finish(staging, cursor)
        piece = staging.try_take()
        while piece is None and self._window:
            self._finish(staging, cursor)
            piece = staging.try_take()
        if piece is None:
            piece = staging.take(self._deadline, self._transport.check)
        return piece

    def _launch(self, chunk: Chunk, piece: ByteArray, staging: Staging) -> None:
        """Start the transfer of a chunk; from now on the window owns the piece."""
        rows = np.add(chunk.rows, (piece.ctypes.data - chunk.start, 0, 0))
        try:
            flight = self._transport.prepare(rows)
        except BaseException:
            staging.give(piece, None, self._transport, time.monotonic())
            raise
        self._window.append(_UnderWay(chunk, flight, piece, time.monotonic()))
        flight.post()

    def _finish(self, staging: Staging, cursor: ChunkCursor) -> None:
        """Wait for the oldest transfer, copy its bytes out, give back its piece, and report the
        ranges that arrived."""
        one = self._window[0]
        since = max(one.begun_at, self._moved_at)
        self._transport.wait(one.flight, since, self._deadline)
        self._moved_at = time.monotonic()
        nbytes = one.chunk.stop - one.chunk.start
        for target, staged in cursor.beside(one.piece, nbytes):
            np.copyto(target, staged)
        self._window.popleft()
        staging.give(one.piece, one.flight, self._transport, time.monotonic())
        self._count(nbytes)
        if self._arrived is not None and self._came != self._told:
            self._transport.confirmed(self._grant, self._deadline)
            self._tell()

    def _count(self, nbytes: int) -> None:
        """Count `nbytes` more bytes that came."""
        self._rest += nbytes
        index, whole_bytes = self._came
        while index < self._whole.ranges and self._ranges[index].length <= self._rest:
            self._rest -= self._ranges[index].length
            whole_bytes += self._ranges[index].length
            index += 1
        self._came = Served(index, whole_bytes)

    def _tell(self) -> None:
        """Report the ranges that came and were confirmed to `arrived`."""
        if self._arrived is not None:
            for index in range(self._told.ranges, self._came.ranges):
                self._arrived(index)
        self._told = self._came

    def _put_away(self, staging: Staging) -> None:
        """Put the pieces of transfers that have not ended into quarantine; after success there are
        none."""
        while self._window:
            one = self._window.popleft()
            staging.give(one.piece, one.flight, self._transport, time.monotonic())


class ChunkCursor:
    """The position of the next byte in a list of arrays."""

    def __init__(self, arrays: Sequence[ByteArray]) -> None:
        self._arrays = arrays
        self._index = 0
        self._at = 0

    def beside(self, piece: ByteArray, nbytes: int) -> Iterator[tuple[ByteArray, ByteArray]]:
        """The next `nbytes` bytes as slices of the arrays, each with its part of `piece`."""
        done = 0
        while done < nbytes:
            array = self._arrays[self._index]
            part = array[self._at : self._at + nbytes - done]
            self._at += len(part)
            if self._at == len(array):
                self._index, self._at = self._index + 1, 0
            if len(part):
                yield part, piece[done : done + len(part)]
                done += len(part)
