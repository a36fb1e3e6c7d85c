"""The interface of every tier, whatever its medium: HBM, DRAM and NVMe.

A tier is an arena (the allocator of its bytes: pure bookkeeping) and a medium (the bytes). They are
separate because a node's core decides without I/O: it allocates from `tier.arena` itself, and an
I/O shell carries out its decisions. So there are two ways to use a tier:

    a core and its shell      arena.allocate   write... commit   erase     arena.free
    any other caller          reserve          write... commit   release

A restarted node finds an extent after its `commit` and before its `erase`. `commit` writes the
header to the medium last, so that the writer of every block that is found had finished.

An erase is only as durable as the medium's writes: a power cut may restore a block, whose bytes are
still correct. Blocks that must not be found again are wiped (`wipe`).

Threads: `write`, `read`, `commit`, `erase` and `wipe` may run concurrently in any threads, as long
as no two of them access the same 4 KiB page while one of them writes it. Only one thread may use
the arena, and with it `reserve` and `release`.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Self

from tiffin.messenger.errors import RangeError
from tiffin.messenger.shm.host_copy import BufferLike, ByteArray, byte_view

from ..errors import CorruptBlock, InvalidInput, NoRoom, VersionMismatch
from ..format.header import PAGE_BYTES, read_header
from ..memory.arena import Arena, Extent
from ..sizes import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ..format.header import Header

# Extents begin and end on pages: O_DIRECT requires it, and a header is whole pages.
GRANULE_BYTES = PAGE_BYTES


class TierName(StrEnum):
    """The tiers of a node, fastest first."""

    HBM = "hbm"
    DRAM = "dram"
    NVME = "nvme"


class TierWarning(UserWarning):
    """A tier works, but not as configured; the message says what is slower or lost."""


@dataclass(frozen=True, slots=True)
class TierStatistics:
    """A snapshot of one tier. Counts start when the tier is opened and never decrease."""

    name: TierName
    capacity_bytes: int
    used_bytes: int
    free_bytes: int
    largest_free_bytes: int  # the longest extent that `reserve` could give right now
    read_bytes: int  # as requested; the medium may move whole pages around them
    written_bytes: int  # payload and headers
    reads: int
    writes: int  # including commits
    errors: int  # operations that the medium refused
    damaged: int  # extents that a scan refused to yield
    healthy: bool  # False from the first error on: the node should stop using the tier
    direct_io: bool  # NVMe: whether I/O bypasses the page cache. False for other tiers


class Tier(ABC):
    """Extents of one medium. A context manager, which closes the tier.

    Errors of every verb: InvalidInput for a range that is misaligned or outside its extent or its
    tier, raised before any byte is accessed; TierUnavailable when the medium refuses.
    """

    def __init__(self, name: TierName, capacity_bytes: int) -> None:
        self.name = name
        self.arena = Arena(whole_granules(capacity_bytes), GRANULE_BYTES)
        self.capacity_bytes = self.arena.capacity_bytes
        # Protected by _counts_lock.
        self._counts_lock = threading.Lock()
        self._reads = self._writes = self._read_bytes = self._written_bytes = 0
        self._errors = self._damaged = 0
        self._healthy = True

    def reserve(self, length: int) -> Extent:
        """Allocate `length` bytes, rounded up to whole pages, of undefined content.

        Raises NoRoom when no free range is that long.
        """
        offset = self.arena.allocate(length)
        if offset is None:
            raise NoRoom(
                f"{self.name} has no {format_bytes(length)} in a row: "
                f"{format_bytes(self.arena.free_bytes)} of {format_bytes(self.capacity_bytes)} are "
                f"free, at most {format_bytes(self.arena.largest_free_bytes)} together"
            )
        return Extent(offset, self.arena.round_up(length))

    def write(self, extent: Extent, at: int, source: BufferLike) -> None:
        """Copy all of `source` to byte `at` of `extent`. Returns when the medium has the bytes.

        Fastest when `at`, the length and the memory are aligned to pages.
        """
        data = _bytes_of(source)
        start = self._locate(extent, at, len(data))
        if len(data):
            self._write(start, data)
        self._count(writes=1, written_bytes=len(data))

    def read(self, extent: Extent, at: int, target: BufferLike) -> None:
        """Fill all of `target` from byte `at` of `extent`. Bytes never written are undefined."""
        data = _bytes_of(target)
        if not data.flags.writeable:
            raise InvalidInput("the target of a read is read-only memory")
        start = self._locate(extent, at, len(data))
        if len(data):
            self._read(start, data)
        self._count(reads=1, read_bytes=len(data))

    def commit(self, extent: Extent, header: BufferLike) -> None:
        """Write `header` to the start of `extent` and make it findable; call after all writes.

        Raises InvalidInput unless `header` is an intact header of exactly this extent: otherwise
        the block would seem committed and be lost at the next restart.
        """
        data = _bytes_of(header)
        self._locate(extent, 0, len(data))
        header_read = _checked_header(data, extent)
        self._write(extent.offset, data)
        self._mark(extent, header_read.generation)
        self._count(writes=1, written_bytes=len(data))

    def erase(self, extent: Extent) -> None:
        """Make `extent` unfindable; its bytes stay until they are overwritten. Idempotent."""
        self._locate(extent, 0, 0)
        self._unmark(extent)

    def wipe(self, extents: Sequence[Extent]) -> None:
        """Make `extents` durably unfindable. After it returns, no power cut restores their blocks,
        nor blocks that were erased before this call."""
        for extent in extents:
            self._locate(extent, 0, 0)
        self._wipe(extents)

    def release(self, extent: Extent) -> None:
        """`erase`, and return the extent to the arena."""
        self.erase(extent)
        self.arena.free(extent.offset, extent.length)

    def scan(self) -> Iterator[tuple[Extent, Header]]:
        """Yield the blocks that survived from before this tier was opened: intact, and no two
        overlapping.

        Does not change the arena: the caller claims the extents that it keeps and erases the
        others. A volatile tier yields nothing.
        """
        return iter(())

    def statistics(self) -> TierStatistics:
        """A snapshot of the arena and the counters."""
        with self._counts_lock:
            return TierStatistics(
                name=self.name,
                capacity_bytes=self.capacity_bytes,
                used_bytes=self.arena.used_bytes,
                free_bytes=self.arena.free_bytes,
                largest_free_bytes=self.arena.largest_free_bytes,
                read_bytes=self._read_bytes,
                written_bytes=self._written_bytes,
                reads=self._reads,
                writes=self._writes,
                errors=self._errors,
                damaged=self._damaged,
                healthy=self._healthy,
                direct_io=self._direct_io(),
            )

    @property
    def healthy(self) -> bool:
        """False once the medium has refused an operation."""
        return self._healthy

    @abstractmethod
    def close(self) -> None:
        """Release the medium; call when no verb is running. Idempotent.

        Committed blocks stay findable on NVMe, and every later verb raises TierUnavailable.
        """

    @abstractmethod
    def _write(self, start: int, data: ByteArray) -> None:
        """Copy `data` to byte `start` of the medium."""

    @abstractmethod
    def _read(self, start: int, data: ByteArray) -> None:
        """Fill `data` from byte `start` of the medium."""

    def _mark(self, extent: Extent, generation: int) -> None:  # noqa: B027 - nothing if volatile
        """Record persistently, for a restart, that a header of this generation begins here."""

    def _unmark(self, extent: Extent) -> None:  # noqa: B027
        """Undo `_mark`, or do nothing."""

    def _wipe(self, extents: Sequence[Extent]) -> None:
        """Unmark the extents, destroy their headers, and flush. Volatile media, and media whose
        writes are durable at once, only need to unmark."""
        for extent in extents:
            self._unmark(extent)

    def _direct_io(self) -> bool:
        return False

    def _count(
        self,
        *,
        reads: int = 0,
        read_bytes: int = 0,
        writes: int = 0,
        written_bytes: int = 0,
        damaged: int = 0,
    ) -> None:
        with self._counts_lock:
            self._reads += reads
            self._read_bytes += read_bytes
            self._writes += writes
            self._written_bytes += written_bytes
            self._damaged += damaged

    def _fail(self) -> None:
        """Count an operation that the medium refused, and mark the tier unhealthy."""
        with self._counts_lock:
            self._errors += 1
            self._healthy = False

    def _locate(self, extent: Extent, at: int, nbytes: int) -> int:
        """The position of byte `at` of `extent` in the medium. Raises InvalidInput if the range is
        not inside the extent and the tier."""
        offset, length = extent.offset, extent.length
        if offset % GRANULE_BYTES or length % GRANULE_BYTES or length < 1:
            raise InvalidInput(f"{extent} does not consist of whole pages of {GRANULE_BYTES} bytes")
        if offset < 0 or offset + length > self.capacity_bytes:
            raise InvalidInput(f"{extent} is outside a tier of {self.capacity_bytes} bytes")
        if at < 0 or at + nbytes > length:
            raise InvalidInput(f"bytes [{at}, {at + nbytes}) are outside {extent}")
        return offset + at

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        health = "healthy" if self._healthy else "unhealthy"
        used, capacity = self.arena.used_bytes, self.capacity_bytes
        return f"<{type(self).__name__} {used} of {capacity} bytes used, {health}>"


def whole_granules(nbytes: int) -> int:
    """`nbytes` rounded down to whole pages. Raises InvalidInput for less than one page."""
    if nbytes < GRANULE_BYTES:
        raise InvalidInput(
            f"a tier of {format_bytes(nbytes)}; it needs at least {format_bytes(GRANULE_BYTES)}"
        )
    return nbytes // GRANULE_BYTES * GRANULE_BYTES


def _bytes_of(buffer: BufferLike) -> ByteArray:
    try:
        return byte_view(buffer)
    except RangeError as error:
        raise InvalidInput(str(error)) from error


def _checked_header(data: ByteArray, extent: Extent) -> Header:
    try:
        header = read_header(data, offset_expected=extent.offset)
    except (CorruptBlock, VersionMismatch) as error:
        raise InvalidInput(f"cannot commit {extent}: {error}") from error
    if header.header_bytes != len(data) or header.extent_bytes != extent.length:
        raise InvalidInput(
            f"cannot commit {extent}: {len(data)} bytes of header that say header_bytes "
            f"{header.header_bytes}, extent_bytes {header.extent_bytes}"
        )
    return header
