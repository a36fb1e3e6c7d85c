"""One call of a `NixlTransport`: chunk after chunk, two of them in flight at a time."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..errors import TransferError, TransferTimeout
from ..transport import NOTHING, Range, Served
from .agent import REST_S, Quarantined, StillMoving
from .descriptors import chunks, stream_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ..shm.host_copy import ByteArray
    from ..transport import Arrived
    from .agent import NixlTransfer, Registered
    from .descriptors import Chunk, Runs
    from .nixl_transport import NixlTransport
    from .staging import Staging

# Transfers of a call in flight at a time: one moves while another is copied out or in.
_WINDOW = 2
# In place there is nothing to copy: the chunk size only decides how often progress is noticed.
_CHUNK_BYTES = 8 << 20


class _UnderWay(NamedTuple):
    """One in-flight transfer of a call, and its staging piece (None in place)."""

    chunk: Chunk
    flight: NixlTransfer
    piece: ByteArray | None
    begun_at: float


class NixlCall:
    """One `read` or `write` call in progress."""

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
        self._staging: Staging | None = None
        # Callback for a transfer that has ended: a staged read copies its bytes out.
        self._finished: Callable[[_UnderWay], None] = lambda _: None
        self._moved_at = time.monotonic()
        self._came = NOTHING  # leading ranges whose bytes came
        self._told = NOTHING  # leading ranges reported to `arrived`
        self._rest = 0  # bytes that came of the range after `_came`
        self._count(0)  # leading ranges of zero bytes
        self._tell()

    def read_staged(self, cursor: ChunkCursor, far: Runs) -> Served:
        """Read through staging pieces into the arrays of `cursor`."""

        def empty(one: _UnderWay) -> None:
            assert one.piece is not None
            for part, staged in cursor.beside(one.piece, one.chunk.stop - one.chunk.start):
                np.copyto(part, staged)

        self._finished = empty
        staging, memory = self._transport.staging()
        try:
            for chunk in chunks(stream_of(self._whole.nbytes), far, staging.piece_bytes):
                self._launch(memory, chunk, self._piece(staging), write=False)
            self._complete()
        except TransferError as error:
            error.served = self._told
            raise
        finally:
            self._put_away()
        return self._whole

    def write_staged(self, cursor: ChunkCursor, far: Runs) -> Served:
        """Write the arrays of `cursor` through staging pieces."""
        staging, memory = self._transport.staging()
        try:
            for chunk in chunks(stream_of(self._whole.nbytes), far, staging.piece_bytes):
                self._launch(memory, chunk, self._piece(staging), write=True, source=cursor)
            self._complete()
        except TransferError as error:
            flights = self._under_way(memory)
            if not flights.ended(_patience_s(error)):
                raise StillMoving(f"a write given up has not ended: {error}", flights) from error
            raise
        finally:
            self._put_away()
        return self._whole

    def move_in_place(self, memory: Registered, near: Runs, far: Runs, *, write: bool) -> Served:
        """Read directly into registered memory, or write directly from it."""
        try:
            for chunk in chunks(near, far, _CHUNK_BYTES):
                if len(self._window) == _WINDOW:
                    self._finish()
                self._launch(memory, chunk, None, write=write)
            self._complete()
        except BaseException as error:
            flights = self._under_way(memory)
            if not flights.wait(2 * _patience_s(error)):
                self._transport.keep([one.flight for one in self._window])
                raise StillMoving(f"given up, and not ended: {error}", flights) from error
            if isinstance(error, TransferError):
                error.served = self._told
            raise
        return self._whole

    # -- the window ------------------------------------------------------------------------------

    def _piece(self, staging: Staging) -> ByteArray:
        """A free piece. A call that has one never waits for another, which could be a deadlock:
        all calls could have one and wait."""
        self._staging = staging
        if len(self._window) == _WINDOW:
            self._finish()
        piece = staging.try_take()
        while piece is None and self._window:
            self._finish()
            piece = staging.try_take()
        if piece is None:
            piece = staging.take(self._deadline, self._transport.check)
        return piece

    def _launch(
        self,
        memory: Registered,
        chunk: Chunk,
        piece: ByteArray | None,
        *,
        write: bool,
        source: ChunkCursor | None = None,
    ) -> None:
        """Start the transfer of a chunk; from now on the window owns the piece."""
        rows = chunk.rows
        if piece is not None:
            rows = np.add(rows, (piece.ctypes.data - chunk.start, 0, 0))
        try:
            if source is not None and piece is not None:
                for part, staged in source.beside(piece, chunk.stop - chunk.start):
                    np.copyto(staged, part)
            flight = self._transport.prepare(memory, rows, write=write)
        except BaseException:
            self._give(piece, None)
            raise
        self._window.append(_UnderWay(chunk, flight, piece, time.monotonic()))
        last = chunk.stop == self._whole.nbytes
        flight.post(self._transport.notification(self._grant) if write and last else b"")

    def _complete(self) -> None:
        """Wait for the last transfers. Without an `arrived` callback, the grant is confirmed only
        here."""
        while self._window:
            self._finish()
        if self._arrived is None and self._whole.nbytes:
            self._transport.confirmed(self._grant, self._deadline)

    def _finish(self) -> None:
        """Wait for the oldest transfer, give back its piece, and report the ranges that arrived."""
        one = self._window[0]
        since = max(one.begun_at, self._moved_at)
        self._transport.wait(one.flight, since, self._deadline)
        self._moved_at = time.monotonic()
        self._finished(one)
        self._window.popleft()
        self._give(one.piece, one.flight)
        self._count(one.chunk.stop - one.chunk.start)
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

    def _give(self, piece: ByteArray | None, flight: NixlTransfer | None) -> None:
        if piece is not None and self._staging is not None:
            self._staging.give(piece, flight, self._transport, time.monotonic())

    def _put_away(self) -> None:
        """Put the pieces of transfers that have not ended into quarantine; after success there are
        none."""
        while self._window:
            one = self._window.popleft()
            self._give(one.piece, one.flight)

    def _under_way(self, memory: Registered) -> Quarantined:
        return self._transport.quarantined(memory, [one.flight for one in self._window])


def _patience_s(error: BaseException) -> float:
    """How long to wait for in-flight transfers after an error: after a failure all end soon; after
    a timeout there is no point in waiting."""
    return 0.0 if isinstance(error, TransferTimeout) else REST_S


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
