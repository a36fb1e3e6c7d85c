"""Pinned host memory, which a GPU copies from and to directly: page-locked, registered with CUDA.

Copies of unpinned memory pass through a staging buffer and cost the host an extra copy, so a pool's
shared mapping is registered once, at start. Registering locks pages: expect about 0.3 s per GiB of
ordinary pages, less for huge pages (not measured here: no GPU).

This module also records the registrations of the process, so that a copier can look up which memory
it may pass directly to a copy engine or to a kernel. A range counts as pinned only if one
registration covers all of it: a copy must not cross from one registration to the next.
"""

from __future__ import annotations

import os
import threading
import weakref
from bisect import bisect_right, insort
from typing import NamedTuple, Self

from ..errors import RangeError, RegionError
from ..shm.host_copy import BufferLike, byte_view
from .cuda_driver import CudaError, DeviceUnavailable, Driver, load

# Reasons of refusals, by CUresult, from cuda.h.
_REFUSALS = {
    1: "the range is not one mapping of this process",
    2: "the system locks no more memory for this process: raise `ulimit -l` (LimitMEMLOCK= of a "
    "service, --ulimit memlock=-1 of a container), or pin less",
    712: "it is registered already: pin a mapping once and share the object",
    801: "this platform cannot register such memory (mapped read-only, where the device attribute "
    "READ_ONLY_HOST_REGISTER_SUPPORTED is 0; a file on disk; memory of another device)",
}


class PinningError(RegionError):
    """CUDA refused to register the memory. The message contains the remedy."""


class Registration(NamedTuple):
    """Registered bytes [start, stop) of this process's address space."""

    start: int
    stop: int
    kernels: bool  # a kernel reaches it at the same address as the host


class _Book:
    """The registrations of this process, by kind of device. Thread-safe."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Reset; also called in a forked child, where nothing is registered and the lock may be
        left locked by another thread of the parent."""
        # Reentrant: a finaliser in this thread may interrupt any method, and remove an entry.
        self._lock = threading.RLock()
        self._entries: dict[str, list[Registration]] = {}

    def add(self, device_type: str, entry: Registration) -> None:
        with self._lock:
            entries = self._entries.setdefault(device_type, [])
            at = bisect_right(entries, entry)
            around = entries[max(0, at - 1) : at + 1]
            if any(other.start < entry.stop and entry.start < other.stop for other in around):
                raise PinningError(f"cannot pin {_size(entry)}: {_REFUSALS[712]}")
            insort(entries, entry)

    def remove(self, device_type: str, entry: Registration) -> None:
        with self._lock:
            self._entries[device_type].remove(entry)

    def covering(self, device_type: str, start: int, stop: int) -> Registration | None:
        with self._lock:
            entries = self._entries.get(device_type, []).copy()
            at = bisect_right(entries, start, key=lambda entry: entry.start)
            entry = entries[at - 1] if at else None
        return entry if entry is not None and stop <= entry.stop else None

    def touching(self, device_type: str, start: int, stop: int) -> bool:
        with self._lock:
            entries = self._entries.get(device_type, [])
            at = bisect_right(entries, stop - 1, key=lambda entry: entry.start)
        return at > 0 and entries[at - 1].stop > start


_book = _Book()
os.register_at_fork(after_in_child=_book.forget)


def registration(address: int, nbytes: int, device_type: str = "cuda") -> Registration | None:
    """The registration that covers all of `nbytes` at `address`, if that of one `Pinned` does."""
    return _book.covering(device_type, address, address + nbytes)


def partly_registered(address: int, nbytes: int, device_type: str = "cuda") -> bool:
    """Whether a `Pinned` covers some byte of the range. CUDA can be asked only about a single
    address."""
    return _book.touching(device_type, address, address + nbytes)


class Pinned:
    """`memory`, registered with CUDA until `close()`, and kept alive as long. The registration is
    read-only if the memory is.

    On device `cpu` there is nothing to register, and the object does only the bookkeeping.

    Raises PinningError when CUDA refuses, RangeError for no bytes or memory that is not contiguous,
    DeviceUnavailable without an NVIDIA driver. Close it before the memory is unmapped: CUDA does
    not notice an unmapping, and later copies would use wrong memory.
    """

    def __init__(self, memory: BufferLike, device: str = "cuda:0") -> None:
        array = byte_view(memory)
        if not len(array):
            raise RangeError("no bytes to pin")
        self.nbytes = len(array)
        self.address = int(array.__array_interface__["data"][0])
        self.device_type, _, index = device.partition(":")
        if self.device_type not in ("cpu", "cuda") or not (index or "0").isdecimal():
            raise DeviceUnavailable(f"memory is pinned for cuda or cpu, not for {device!r}")
        on_gpu = self.device_type == "cuda"
        driver, self._index = (load() if on_gpu else None), int(index or 0)
        writable = bool(array.flags.writeable)
        kernels = True if driver is None else self._register(driver, writable=writable)
        entry = Registration(self.address, self.address + self.nbytes, kernels)
        try:
            _book.add(self.device_type, entry)
        except PinningError:
            if driver is not None:
                _unregister(driver, self._index, entry)
            raise
        # Also unpins an object that is garbage-collected without `close`.
        self._finalizer = weakref.finalize(
            self, _unpin, self.device_type, entry, driver, self._index, os.getpid(), array
        )
        # At exit CUDA may be gone before this runs, and the process's memory is freed anyway.
        self._finalizer.atexit = False

    @property
    def closed(self) -> bool:
        """Whether the memory is no longer pinned."""
        return not self._finalizer.alive

    def close(self) -> None:
        """Unpin the memory. Idempotent.

        Call it when no copy uses the memory. Raises PinningError when CUDA refuses.
        """
        self._finalizer()

    def _register(self, driver: Driver, *, writable: bool) -> bool:
        """Register; returns whether a kernel can use the host's address."""
        try:
            with driver.on(self._index):
                driver.register(self.address, self.nbytes, writable=writable)
                try:
                    return driver.device_address(self.address) == self.address
                except CudaError:
                    return False  # the copy engines can use it nevertheless
        except CudaError as error:
            reason = _REFUSALS.get(error.code, "see the driver's reason")
            size = f"{self.nbytes / 2**30:.1f} GiB"
            raise PinningError(f"cannot pin {size}: {reason} [{error}]") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self.closed else self.device_type
        return f"<Pinned {self.nbytes} bytes, {state}>"


def _unpin(
    device_type: str,
    entry: Registration,
    driver: Driver | None,
    index: int,
    process: int,
    _memory: object,
) -> None:
    if os.getpid() != process:
        return  # a forked child has the object, but nothing is registered there
    _book.remove(device_type, entry)
    if driver is not None:
        _unregister(driver, index, entry)


def _unregister(driver: Driver, index: int, entry: Registration) -> None:
    try:
        with driver.on(index):
            driver.unregister(entry.start)
    except CudaError as error:
        raise PinningError(f"{_size(entry)} stay pinned: {error}") from error


def _size(entry: Registration) -> str:
    return f"{entry.stop - entry.start} bytes at {entry.start:#x}"
