"""Transports for peers on this host: the caller's thread copies memory.

`LocalTransport` reaches grants of the same process, `ShmTransport` those of a process whose region
is mapped here. Neither has a connection; a deadline and `close` can interrupt a copy, which checks
for them every 8 MiB (about a millisecond).
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Protocol

import numpy as np

from ..errors import GrantError, PeerLost, TransferError, TransferTimeout
from ..transport import NOTHING, Range, Served
from ..usage_gate import UsageGate
from ..wire.ranges import RangePiece, lay_out, pack_ranges, unpack_ranges, views_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ..transport import Arrived, Grants
    from .host_copy import ByteArray

# One copy: about a millisecond.
_STEP_BYTES = 8 << 20


class LocalTransport:
    """Grants of this process. See `Transport`."""

    name = "local"

    def __init__(self, grants: Grants) -> None:
        self._grants = grants
        self._gate = UsageGate(lambda: PeerLost("this transport is closed"))

    def read(
        self,
        grant: int,
        ranges: Sequence[Range],
        targets: Sequence[ByteArray],
        *,
        deadline: float,
        arrived: Arrived | None = None,
    ) -> Served:
        """See `Transport.read`."""
        views_of(ranges, targets, writable=True)
        with self._copying(deadline), self._grants.open(grant, writes=False) as arrays:
            served, pieces = _lay_out(ranges, arrays)
            copy = _Copy(self._gate, ranges, deadline, arrived)
            copy.run(list(targets[: served.ranges]), _cut(arrays, pieces), into_ranges=False)
            return served

    def write(
        self,
        grant: int,
        ranges: Sequence[Range],
        sources: Sequence[ByteArray],
        *,
        deadline: float,
    ) -> Served:
        """See `Transport.write`."""
        views_of(ranges, sources, writable=False)
        with self._copying(deadline), self._grants.open(grant, writes=True) as arrays:
            served, pieces = _lay_out(ranges, arrays)
            copy = _Copy(self._gate, ranges, deadline, None)
            copy.run(list(sources[: served.ranges]), _cut(arrays, pieces), into_ranges=True)
            return served

    def close(self) -> None:
        """Refuse new calls, and wait until no copy runs any more."""
        self._gate.close()

    @contextlib.contextmanager
    def _copying(self, deadline: float) -> Iterator[None]:
        with self._gate:
            _check_time(deadline)
            yield


class Resolve(Protocol):
    """Callback: where the bytes of a peer's grant lie, as ranges of the peer's region, in order."""

    def __call__(self, grant: int, *, writes: bool) -> Sequence[Range]:
        """Resolve a grant. Raises GrantError."""


class ShmTransport(LocalTransport):
    """Grants of a process on this host whose region is mapped here. See `Transport`.

    `memory` is the whole region (writable if the caller wants to write); `resolve` asks the peer,
    or caches its answer. It is the caller's lease, not this class, that keeps the peer from reusing
    the memory during a read.
    """

    name = "shm"

    def __init__(self, memory: ByteArray, resolve: Resolve) -> None:
        super().__init__(_Mapped(memory, resolve))


class _Mapped:
    """The grants of a peer, as arrays of its mapped region."""

    def __init__(self, memory: ByteArray, resolve: Resolve) -> None:
        self._memory = memory
        self._resolve = resolve

    @contextlib.contextmanager
    def open(self, grant: int, *, writes: bool) -> Iterator[Sequence[ByteArray]]:
        """See `Grants.open`."""
        places = self._resolve(grant, writes=writes)
        if writes and not self._memory.flags.writeable:
            raise GrantError("the peer's region is mapped read-only here")
        for offset, length in places:
            if not 0 <= offset <= offset + length <= len(self._memory):
                raise GrantError(f"bytes {offset} to {offset + length} are not in the region")
        yield [self._memory[offset : offset + length] for offset, length in places]


def _check_time(deadline: float) -> None:
    if time.monotonic() >= deadline:
        raise TransferTimeout("not all bytes were copied by the deadline: allow more time")


class _Copy:
    """One transfer between a list of arrays, one for each range, and the pieces of a grant."""

    def __init__(
        self, gate: UsageGate, ranges: Sequence[Range], deadline: float, arrived: Arrived | None
    ) -> None:
        self._gate = gate
        self._ranges = ranges
        self._deadline = deadline
        self._arrived = arrived

    def run(self, arrays: list[ByteArray], pieces: list[ByteArray], *, into_ranges: bool) -> None:
        """Copy all of `arrays` from the pieces, or into them; both have equally many bytes."""
        served = NOTHING
        rest = iter(pieces)
        piece = np.empty(0, np.uint8)
        for index, array in enumerate(arrays):
            at = 0
            while at < len(array):
                if not len(piece):
                    piece = next(rest)
                nbytes = min(len(array) - at, len(piece), _STEP_BYTES)
                self._check(served)
                mine, theirs = array[at : at + nbytes], piece[:nbytes]
                np.copyto(*((theirs, mine) if into_ranges else (mine, theirs)))
                at, piece = at + nbytes, piece[nbytes:]
            served = Served(index + 1, served.nbytes + len(array))
            if self._arrived is not None:
                self._arrived(index)

    def _check(self, served: Served) -> None:
        try:
            self._gate.check()
            _check_time(self._deadline)
        except TransferError as error:
            error.served = served
            raise


def _lay_out(
    ranges: Sequence[Range], arrays: Sequence[ByteArray]
) -> tuple[Served, list[RangePiece]]:
    packed = unpack_ranges(pack_ranges(ranges), 0, len(ranges))
    return lay_out(packed, [len(array) for array in arrays])


def _cut(arrays: Sequence[ByteArray], pieces: list[RangePiece]) -> list[ByteArray]:
    return [arrays[array][start:stop] for array, start, stop in pieces]
