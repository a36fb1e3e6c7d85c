"""A region: shared memory of fixed size that a peer on the same host can map.

A node keeps its DRAM tier in one region and passes a descriptor over its unix socket. From then
on a client reads a block in place (zero-copy), and messages contain only offsets. Four properties
make it safe:

- **A reader can't write.** The descriptor that the node passes is read-only, and so is its mapping:
  a stray write, from any code, ends the process that made it (SIGSEGV) and damages nothing. A
  writer has to request write access, and reopens the file. (That guards against accidents. A
  malicious process of the same user may do the same.)

- **It cannot shrink.** A mapping of a file that some process truncates raises SIGBUS in every
  process that accesses it. The region is a memfd whose size is sealed before any other process sees
  it, and `attach` refuses a descriptor whose size is not sealed.
- **It does not survive a fork.** A writer that vanished is fenced by the death of its process. A
  forked child that kept a writable view would outlive that fence, so it does not get the mapping:
  in a child every access is a SIGSEGV, at once and in the right process (`dontfork.py`).
- **It is prefaulted before use.** The first write to a page costs five to ten times a copy of the
  same bytes (the kernel zeroes it, and a virtual machine may have to ask its host), so a pool is
  prefaulted once, at start, where the wait is expected and its progress can be shown.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import mmap
import os
import weakref
from typing import TYPE_CHECKING, Self

import numpy as np

from ..errors import RangeError, RegionError
from .dontfork import keep_from_children

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from numpy.typing import NDArray

_log = logging.getLogger(__name__)

# Since Linux 5.14; the mmap module has no names for them.
_MADV_POPULATE_READ = 22
_MADV_POPULATE_WRITE = 23

# One step of `prefault`: CPython holds the GIL during madvise, and 16 MiB is 8 ms at 2 GB/s.
_POPULATE_STEP_BYTES = 16 << 20

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Region:
    """Shared memory of `nbytes` bytes, made with `create` or mapped with `attach`.

    Constant after construction: `fd`, `nbytes`, `writable`, `hugepages`. The owner defines the
    meaning of the bytes and which process may write which of them when; a region does not
    synchronise accesses.
    """

    def __init__(
        self, fd: int, mapping: mmap.mmap, nbytes: int, *, writable: bool, hugepages: bool
    ) -> None:
        """Private: use `create` or `attach`."""
        self._fd = fd
        # Also closes the descriptor of a region that is garbage-collected without `close`.
        self._close_fd = weakref.finalize(self, os.close, fd)
        self._mapping: mmap.mmap | None = mapping
        self._array: NDArray[np.uint8] | None = np.frombuffer(mapping, np.uint8, nbytes)
        self._populated_bytes = 0
        self.nbytes = nbytes
        self.writable = writable
        self.hugepages = hugepages

    @classmethod
    def create(cls, nbytes: int, *, hugepages: bool = False, name: str = "tiffin") -> Region:
        """Make `nbytes` of zeroed shared memory and map it writable; it uses no memory until it is
        touched (`prefault`).

        `name` shows in /proc/<pid>/maps and need not be unique. `hugepages` requests pages from the
        system's reserved pool (`vm.nr_hugepages`), which makes copies and registrations faster;
        when the pool is too small, the region uses ordinary pages and logs a warning.

        Raises RangeError for a size below 1, RegionError when the system refuses.
        """
        if nbytes < 1:
            raise RangeError(f"a region of {nbytes} bytes: it needs at least 1")
        if hugepages:
            try:
                return cls._create(nbytes, name, hugepages=True)
            except OSError as error:
                _log.warning(
                    "no huge pages for a region of %.1f GiB (%s); using ordinary pages. "
                    "Reserve them with: sysctl vm.nr_hugepages=%d",
                    nbytes / 2**30, error.strerror, -(-nbytes // _hugepage_bytes()),
                )  # fmt: skip
        try:
            return cls._create(nbytes, name, hugepages=False)
        except OSError as error:
            raise RegionError(
                f"cannot make a region of {nbytes / 2**30:.1f} GiB: {error}"
            ) from error

    @classmethod
    def _create(cls, nbytes: int, name: str, *, hugepages: bool) -> Region:
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        fd = os.memfd_create(name, flags | (os.MFD_HUGETLB if hugepages else 0))
        with _closed_on_error(fd):
            page_bytes = os.fstat(fd).st_blksize if hugepages else mmap.PAGESIZE
            mapped_bytes = _round_up(nbytes, page_bytes)
            os.ftruncate(fd, mapped_bytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            mapping = _map(fd, mapped_bytes, writable=True)
            reading = _reopen(fd, os.O_RDONLY)
        os.close(fd)
        return cls(reading, mapping, nbytes, writable=True, hugepages=hugepages)

    @classmethod
    def attach(cls, fd: int, nbytes: int, *, writable: bool = False) -> Region:
        """Map the first `nbytes` of a region that a peer passed as the descriptor `fd`, read-only:
        a stray write is an error in this process instead of damage to the peer. `writable` is for
        a process that has to write.

        Takes ownership of `fd`: it is closed with the region, and also when this raises.

        Raises RegionError when `fd` is smaller than `nbytes`, when its size is not sealed (its
        owner could shrink it while it is mapped here), or when the system refuses.
        """
        with _closed_on_error(fd):
            try:
                return cls._attach(fd, nbytes, writable=writable)
            except OSError as error:
                raise RegionError(f"cannot map descriptor {fd}: {error}") from error

    @classmethod
    def _attach(cls, fd: int, nbytes: int, *, writable: bool) -> Region:
        status = os.fstat(fd)
        if not 1 <= nbytes <= status.st_size:
            raise RegionError(
                f"the peer announced {nbytes} bytes and passed a descriptor of {status.st_size}"
            )
        if not _seals(fd) & fcntl.F_SEAL_SHRINK:
            raise RegionError("the peer passed a descriptor whose size is not sealed")
        mapped_bytes = min(_round_up(nbytes, status.st_blksize), status.st_size)
        # The descriptor that the peer passed is read-only.
        opened = _reopen(fd, os.O_RDWR) if writable else fd
        try:
            mapping = _map(opened, mapped_bytes, writable=writable)
        finally:
            if writable:
                os.close(opened)
        hugepages = status.st_blksize > mmap.PAGESIZE
        return cls(fd, mapping, nbytes, writable=writable, hugepages=hugepages)

    @property
    def fd(self) -> int:
        """The read-only descriptor to pass to a peer. Raises RegionError after `close()`."""
        self._open_array()
        return self._fd

    @property
    def array(self) -> NDArray[np.uint8]:
        """All bytes. Raises RegionError after `close()`."""
        return self._open_array()

    def view(self, offset: int, length: int) -> NDArray[np.uint8]:
        """A view of `length` bytes at `offset`.

        Raises RangeError when they are not all inside the region, RegionError after `close()`.
        """
        stop = offset + length
        if offset < 0 or length < 0 or stop > self.nbytes:
            raise RangeError(f"[{offset}, {stop}) is not inside a region of {self.nbytes} bytes")
        return self._open_array()[offset:stop]

    def prefault(self) -> None:
        """Allocate memory for every page; keeps the content. Call once, before sharing the region.

        Takes about 0.5 s per GiB where memory was used before and up to 3 s per GiB in a fresh
        virtual machine.

        Raises RegionError when the machine has too little available memory: without this check the
        kernel's OOM killer ends the process instead.
        """
        if not self.hugepages:
            missing_bytes = self.nbytes - self._populated_bytes - _available_bytes()
            if missing_bytes > 0:
                raise RegionError(
                    f"a region of {self.nbytes / 2**30:.1f} GiB does not fit: "
                    f"this machine has {missing_bytes / 2**30:.1f} GiB too little available memory"
                )
        self._populate(_MADV_POPULATE_WRITE, _touch_writing)

    def populate(self) -> None:
        """Fill this process's page tables for memory that the owner has prefaulted.

        Saves an attached reader its page faults: about 0.05 s per GiB, once, and a writer 0.2 s.
        """
        advice = _MADV_POPULATE_WRITE if self.writable else _MADV_POPULATE_READ
        # Other processes may be writing, so where the kernel lacks the call, this only reads.
        self._populate(advice, _touch_reading)

    def _populate(self, advice: int, touch: Callable[[NDArray[np.uint8]], None]) -> None:
        array = self._open_array()
        assert self._mapping is not None
        for start in range(0, self.nbytes, _POPULATE_STEP_BYTES):
            length = min(_POPULATE_STEP_BYTES, self.nbytes - start)
            try:
                self._mapping.madvise(advice, start, length)
            except OSError as error:
                if error.errno != errno.EINVAL:  # EINVAL: before Linux 5.14
                    raise RegionError(f"cannot populate {self.nbytes} bytes: {error}") from error
                touch(array[start : start + length : mmap.PAGESIZE])
            self._populated_bytes = max(self._populated_bytes, start + length)

    def close(self) -> None:
        """Close the descriptor and unmap the memory. Idempotent.

        Existing views stay valid: the memory is unmapped when the last of them is gone.
        """
        mapping, self._mapping, self._array = self._mapping, None, None
        if mapping is None:
            return
        self._close_fd()
        # BufferError: views are alive; the memory is unmapped with the last of them.
        with contextlib.suppress(BufferError):
            mapping.close()

    def _open_array(self) -> NDArray[np.uint8]:
        if self._array is None:
            raise RegionError("the region is closed")
        return self._array

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._array is None else f"fd {self._fd}"
        return f"<Region {self.nbytes} bytes, {state}>"


def _map(fd: int, length: int, *, writable: bool) -> mmap.mmap:
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    mapping = mmap.mmap(fd, length, flags=mmap.MAP_SHARED, prot=protection)
    keep_from_children(mapping)
    return mapping


def _reopen(fd: int, mode: int) -> int:
    """A new descriptor of the same file, opened with another mode."""
    return os.open(f"/proc/self/fd/{fd}", mode | os.O_CLOEXEC)


def _touch_writing(pages: NDArray[np.uint8]) -> None:
    """Write one byte per page, its old value. Undoes a concurrent write of another process."""
    pages |= np.uint8(0)


def _touch_reading(pages: NDArray[np.uint8]) -> None:
    pages.max()


def _seals(fd: int) -> int:
    try:
        return int(fcntl.fcntl(fd, fcntl.F_GET_SEALS))
    except OSError as error:
        if error.errno != errno.EINVAL:  # EINVAL: a file of a kind that has no seals
            raise
        return 0


def _round_up(nbytes: int, multiple: int) -> int:
    return -(-nbytes // multiple) * multiple


def _meminfo_bytes(field: str) -> int | None:
    with open("/proc/meminfo", encoding="ascii") as lines:
        for line in lines:
            name, _, rest = line.partition(":")
            if name == field:
                return int(rest.split()[0]) * 1024
    return None


def _available_bytes() -> int:
    available_bytes = _meminfo_bytes("MemAvailable")
    return 1 << 62 if available_bytes is None else available_bytes


def _hugepage_bytes() -> int:
    return _meminfo_bytes("Hugepagesize") or 2 << 20


class _closed_on_error(contextlib.AbstractContextManager[None]):  # noqa: N801 - reads as a verb
    """Closes `fd` when the block raises; otherwise the block has passed on its ownership."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is not None:
            with contextlib.suppress(OSError):  # EBADF: it never was a descriptor
                os.close(self._fd)
