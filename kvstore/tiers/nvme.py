"""The NVMe tier: one preallocated slab file, direct I/O, no journal.

The write order makes crashes harmless. The tier writes a block's payload, then its header, then its
map entry; an erase only clears the map entry. Whenever the process dies, each map entry points to a
complete block, or there is no entry. A power cut can reorder writes that had not reached the disk;
then the checksums of every header and segment detect the damage.

Nothing is flushed until `close`, except by `wipe`: a cache that loses its last seconds loses blocks
that can be computed again, and a flush per block costs about 1 ms, for which all queued I/O waits.
A wipe destroys the header as well as the map entry: otherwise, after a power cut, the map entry of
a newer block whose own header was lost could point to the stale header.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import mmap
import os
import uuid
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..errors import CorruptBlock, InvalidInput, TierUnavailable, VersionMismatch
from ..memory.arena import Extent
from ..sizes import format_bytes
from .base import Tier, TierName, TierWarning
from .directio import PIECE_BYTES, QUEUE_DEPTH, DirectFile
from .slab import (
    GRANULE_BYTES,
    SLAB_NAME,
    MapEntry,
    SlabLayout,
    map_entries,
    map_entry_offset,
    probe_extent,
    resolve_overlaps,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tiffin.messenger.shm.host_copy import ByteArray

    from ..format.header import Header

_log = logging.getLogger(__name__)

# Number of headers that one task of a scan reads: 32 × 0.1 ms hide the cost of queueing a task for
# a thread.
_SCAN_BATCH = 32

# Page-aligned, as direct I/O requires.
_BLANK_PAGE = np.frombuffer(mmap.mmap(-1, GRANULE_BYTES), np.uint8)

# Limit on damaged slabs that are kept: more would mean that slabs get damaged again and again, and
# each may be as large as the disk.
_DAMAGED_SLABS_MAX = 8


class NvmeTier(Tier):
    """`capacity_bytes` (rounded down to whole pages) in a slab file inside `directory`.

    The first start creates the directory and the file (another 1/1024 for the map) and allocates
    all its space, so that a full disk fails the start and not later writes. Later starts open the
    file, and `scan` yields its blocks. Locks on the directory and on the file, which may have
    another name elsewhere, admit one process at a time.

    Raises TierUnavailable when the disk is too small, refuses, or another process holds the lock;
    InvalidInput when the directory has a slab of another capacity. Emits a TierWarning when the
    filesystem refuses direct I/O, and when a damaged slab was set aside or extended.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        capacity_bytes: int,
        *,
        queue_depth: int = QUEUE_DEPTH,
        piece_bytes: int = PIECE_BYTES,
        direct_io: bool = True,
    ) -> None:
        super().__init__(TierName.NVME, capacity_bytes)
        if not 1 <= queue_depth <= 64:
            raise InvalidInput(f"queue_depth {queue_depth}; it is 1 to 64")
        self.directory = Path(directory)
        self.path = self.directory / SLAB_NAME
        with contextlib.ExitStack() as stack, _translated(f"no NVMe tier in {self.directory}"):
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            directory_fd = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            stack.callback(os.close, directory_fd)
            _lock(
                directory_fd,
                f"{self.directory} is in use by another node; every node needs a directory of its "
                "own",
            )
            # Buffered I/O, for the superblock and the map; direct I/O never accesses their pages.
            self._map_fd, self.layout, self._intact_bytes = self._open_slab()
            stack.callback(os.close, self._map_fd)
            self._file = DirectFile(
                self.path, queue_depth=queue_depth, piece_bytes=piece_bytes, direct_io=direct_io
            )
            stack.callback(self._file.close)
            if direct_io and not self._file.direct_io:
                _warn(
                    f"{self.directory} is on a filesystem without direct I/O: the page cache will "
                    f"hold a second copy of blocks, and this tier is only as fast as it"
                )
            self._closing = stack.pop_all()

    @property
    def identity(self) -> bytes:
        """16 bytes that name this slab, and no other."""
        return self.layout.uuid

    def scan(self) -> Iterator[tuple[Extent, Header]]:
        """Yield the blocks that survived, then erase the extents that failed a check. Call before
        the first reservation.

        Reads the map and one page per block, several at a time: 2,000 blocks in 0.1 s.
        """
        with self._medium("the scan"):
            found, refused = self._read_headers()
        kept, lost = resolve_overlaps(found, self.capacity_bytes)
        refused += [extent.offset for extent, _ in lost]
        self._count(damaged=len(refused))
        return self._survivors(kept, refused)

    def _survivors(
        self, kept: list[tuple[Extent, Header]], refused: list[int]
    ) -> Iterator[tuple[Extent, Header]]:
        """Yield the intact blocks before the erases: if the disk has become read-only, the erases
        fail, and the caller has all blocks by then."""
        yield from kept
        if refused:
            with self._medium("an erase"):
                for offset in refused:
                    self._set_map_entry(MapEntry(offset, 0))
            _log.warning("%s: %d damaged extents were erased", self.path, len(refused))

    def close(self) -> None:
        """Flush and unlock. Call when no verb is running. Idempotent."""
        if self._map_fd < 0:
            return
        map_fd, self._map_fd = self._map_fd, -1
        try:
            os.fsync(map_fd)
        except OSError as error:
            _log.warning("%s: not flushed: %s", self.path, _text(error))
        self._closing.close()

    def _write(self, start: int, data: ByteArray) -> None:
        with self._medium("a write"):
            self._file.write(self.layout.data_offset + start, data)

    def _read(self, start: int, data: ByteArray) -> None:
        with self._medium("a read"):
            self._file.read(self.layout.data_offset + start, data)

    def _mark(self, extent: Extent, generation: int) -> None:
        with self._medium("a commit"):
            self._set_map_entry(MapEntry(*extent, MapEntry.tag_of(generation)))

    def _unmark(self, extent: Extent) -> None:
        with self._medium("an erase"):
            self._set_map_entry(MapEntry(extent.offset, 0))

    def _wipe(self, extents: Sequence[Extent]) -> None:
        with self._medium("a wipe"):
            for extent in extents:
                self._set_map_entry(MapEntry(extent.offset, 0))
            self._file.each(self._blank_header, extents)
            os.fdatasync(self._map_fd)  # flushes the whole file, and the disk's own cache

    def _blank_header(self, extent: Extent) -> None:
        self._file.write(self.layout.data_offset + extent.offset, _BLANK_PAGE)

    def _direct_io(self) -> bool:
        return self._file.direct_io

    def _set_map_entry(self, entry: MapEntry) -> None:
        os.pwrite(self._map_fd, entry.pack(), map_entry_offset(self.layout, entry.offset))

    @contextlib.contextmanager
    def _medium(self, what: str) -> Iterator[None]:
        """Turn an OSError into TierUnavailable, count it, and mark the tier unhealthy."""
        if self._map_fd < 0:
            raise TierUnavailable(f"{what} on {self.path} after it was closed")
        try:
            yield
        except OSError as error:
            self._fail()
            raise TierUnavailable(f"{what} on {self.path} failed: {_text(error)}") from error

    def _read_headers(self) -> tuple[list[tuple[Extent, Header]], list[int]]:
        """(intact extents, offsets of refused ones), each from a nonzero map entry."""
        entries = list(map_entries(self._map_fd, self.layout))
        batches = [entries[i : i + _SCAN_BATCH] for i in range(0, len(entries), _SCAN_BATCH)]
        found: list[tuple[Extent, Header]] = []
        refused: list[int] = []
        for some_found, some_refused in self._file.each(self._probe, batches):
            found += some_found
            refused += some_refused
        return found, refused

    def _probe(self, entries: Sequence[MapEntry]) -> tuple[list[tuple[Extent, Header]], list[int]]:
        found: list[tuple[Extent, Header]] = []
        refused: list[int] = []
        for entry in entries:
            try:
                header = probe_extent(self._read_at, entry, self._intact_bytes)
            except (CorruptBlock, VersionMismatch) as error:
                _log.warning("%s: extent at %d refused: %s", self.path, entry.offset, error)
                refused.append(entry.offset)
            else:
                found.append((Extent(entry.offset, entry.length), header))
        return found, refused

    def _read_at(self, offset: int, nbytes: int) -> bytes:
        return self._file.read_bytes(self.layout.data_offset + offset, nbytes)

    def _open_slab(self) -> tuple[int, SlabLayout, int]:
        """(descriptor, layout, bytes of the data area that the file had before)."""
        try:
            fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return self._create_slab()
        try:
            self._lock_slab(fd)
            layout = SlabLayout.unpack(os.pread(fd, GRANULE_BYTES, 0))
            self._check_capacity(layout)
            return fd, layout, self._extend_slab(fd, layout)
        except CorruptBlock as error:
            os.close(fd)
            self._set_aside(error)
            return self._create_slab()
        except VersionMismatch as error:
            os.close(fd)
            raise TierUnavailable(f"{self.path}: {error}. Move it away to start empty") from error
        except BaseException:
            os.close(fd)
            raise

    def _lock_slab(self, fd: int) -> None:
        """Lock the file itself: a hard link gives it a name in another directory."""
        _lock(
            fd,
            f"{self.path} is in use by another node, which has the same file under another name: "
            "delete this name, or give this node another directory",
        )

    def _create_slab(self) -> tuple[int, SlabLayout, int]:
        """Create the slab under another name and rename it when it is complete, so that an
        interrupted start leaves no slab."""
        layout = SlabLayout.plan(self.capacity_bytes, uuid.uuid4().bytes)
        unfinished = self.path.with_suffix(".new")
        unfinished.unlink(missing_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(unfinished, flags, 0o600)
        try:
            self._lock_slab(fd)
            _preallocate(fd, layout.file_bytes, self.directory)
            os.pwrite(fd, layout.pack(), 0)
            os.fsync(fd)
            unfinished.rename(self.path)
        except BaseException:
            os.close(fd)
            unfinished.unlink(missing_ok=True)
            raise
        return fd, layout, layout.capacity_bytes

    def _check_capacity(self, layout: SlabLayout) -> None:
        if layout.capacity_bytes != self.capacity_bytes:
            raise InvalidInput(
                f"{self.path} was created with {format_bytes(layout.capacity_bytes)} and "
                f"{format_bytes(self.capacity_bytes)} are asked for: ask for exactly "
                f"{layout.capacity_bytes} bytes, or delete the file and lose its blocks"
            )

    def _extend_slab(self, fd: int, layout: SlabLayout) -> int:
        """Extend a truncated file to its full length; returns how many bytes of the data area it
        had, so that `scan` refuses the lost blocks."""
        file_bytes = os.fstat(fd).st_size
        missing_bytes = layout.file_bytes - file_bytes
        if missing_bytes <= 0:
            return layout.capacity_bytes
        _preallocate(fd, layout.file_bytes, self.directory)
        _warn(f"{self.path} was {format_bytes(missing_bytes)} short; the blocks in them are lost")
        return max(0, file_bytes - layout.data_offset)

    def _set_aside(self, reason: CorruptBlock) -> None:
        for number in range(1, _DAMAGED_SLABS_MAX + 1):
            aside = self.path.with_name(f"{SLAB_NAME}.damaged-{number}")
            if not aside.exists():
                self.path.rename(aside)
                _warn(f"{self.path} is no slab ({reason}); it is now {aside}, delete it for room")
                return
        raise TierUnavailable(
            f"{self.path} is no slab ({reason}); {_DAMAGED_SLABS_MAX} damaged ones are beside it"
        )


def _lock(fd: int, refusal: str) -> None:
    """Lock what `fd` has open, or raise TierUnavailable with this text. The lock lasts until the
    descriptor is closed: the kernel does that when the process ends, even if it is killed."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise TierUnavailable(refusal) from error


def _preallocate(fd: int, nbytes: int, directory: Path) -> None:
    """Allocate the file's space. If the filesystem cannot do that, only set the length."""
    room = os.statvfs(directory)
    free_bytes = room.f_bavail * room.f_frsize + os.fstat(fd).st_blocks * 512
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            os.ftruncate(fd, nbytes)
            return
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        missing_bytes = nbytes - free_bytes
        short = f", {format_bytes(missing_bytes)} too little" if missing_bytes > 0 else ""
        raise TierUnavailable(
            f"a slab of {format_bytes(nbytes)} does not fit in {directory}: {_text(error)}; "
            f"{format_bytes(free_bytes)} are free{short}"
        ) from error


@contextlib.contextmanager
def _translated(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise TierUnavailable(f"{what}: {_text(error)}") from error


def _text(error: OSError) -> str:
    name = errno.errorcode.get(error.errno or 0, "unknown")
    return f"{error.strerror or error} ({name})"


def _warn(message: str) -> None:
    _log.warning("%s", message)
    warnings.warn(message, TierWarning, stacklevel=2)
