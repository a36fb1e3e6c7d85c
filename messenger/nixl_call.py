"""One call of a `NixlTransport`: chunk after chunk, two of them under way at a time."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from .errors import TransferError, TransferTimeout
from .nixl_agent import REST_S, Quarantined, StillMoving
from .nixl_rows import chunks, stream_of
from .transport import NOTHING, Range, Served

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from .local import ByteArray
    from .nixl import NixlTransport
    from .nixl_agent import Flight, Registered
    from .nixl_rows import Chunk, Runs
    from .nixl_staging import Staging
    from .transport import Arrived

# Transfers of a call under way at a time: one that moves, one that is copied out or in.
_WINDOW = 2
# In place there is nothing to copy: a chunk is how often progress is seen.
_CHUNK_BYTES = 8 << 20


class _UnderWay(NamedTuple):
    """One transfer of a call, and the piece that it passes through."""

    chunk: Chunk
    flight: Flight
    piece: ByteArray | None
    begun_at: float


class Call:
    """One `read` or `write`."""

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
        # What is done with a transfer that has ended.
        self._finished: Callable[[_UnderWay], None] = lambda _: None
        self._moved_at = time.monotonic()
        self._came = NOTHING  # ranges that came, and those that were told
        self._told = NOTHING
        self._rest = 0  # bytes that came of the range after `_came`
        self._count(0)  # leading ranges of no bytes
        self._tell()

    def read_staged(self, cursor: Cursor, far: Runs) -> Served:
        """Through staging pieces into the arrays of `cursor`."""

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

    def write_staged(self, cursor: Cursor, far: Runs) -> Served:
        """The arrays of `cursor`, through staging pieces."""
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
        """Straight into, or from, registered memory."""
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
        """A free piece. Who holds one never waits for another: all could hold one and wait."""
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
        source: Cursor | None = None,
    ) -> None:
        """Begin to move a chunk; the window has the piece from here on."""
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
        """See the last transfers through. Without a callback, the grant is confirmed only here."""
        while self._window:
            self._finish()
        if self._arrived is None and self._whole.nbytes:
            self._transport.confirmed(self._grant, self._deadline)

    def _finish(self) -> None:
        """Wait for the oldest transfer, and be done with it."""
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
        """So many more bytes came."""
        self._rest += nbytes
        index, whole_bytes = self._came
        while index < self._whole.ranges and self._ranges[index].length <= self._rest:
            self._rest -= self._ranges[index].length
            whole_bytes += self._ranges[index].length
            index += 1
        self._came = Served(index, whole_bytes)

    def _tell(self) -> None:
        """What came and was confirmed."""
        if self._arrived is not None:
            for index in range(self._told.ranges, self._came.ranges):
                self._arrived(index)
        self._told = self._came

    def _give(self, piece: ByteArray | None, flight: Flight | None) -> None:
        if piece is not None and self._staging is not None:
            self._staging.give(piece, flight, self._transport, time.monotonic())

    def _put_away(self) -> None:
        """Pieces of transfers that have not ended go into quarantine; after success, none is."""
        while self._window:
            one = self._window.popleft()
            self._give(one.piece, one.flight)

    def _under_way(self, memory: Registered) -> Quarantined:
        return self._transport.quarantined(memory, [one.flight for one in self._window])


def _patience_s(error: BaseException) -> float:
    """How long to wait for transfers after an error: those that failed end together, and soon."""
    return 0.0 if isinstance(error, TransferTimeout) else REST_S


class Cursor:
    """Where the next byte of a list of arrays lies."""

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
