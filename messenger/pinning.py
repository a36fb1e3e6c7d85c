"""Host memory that a GPU copies from and to directly: page-locked, registered with CUDA.

Copies of other memory pass through a staging buffer and cost the host a copy of their own, so a
pool's shared mapping is registered once, at start. Registering locks pages: about 0.3 s per GiB of
ordinary pages is to be expected, less of huge pages (not measured here: no GPU).

What is registered is also noted in this process, so that a copier knows what it may give to a copy
engine or to a kernel as it is. A range counts as pinned only if one registration covers all of it:
a copy must not cross from one registration to the next.
"""

from __future__ import annotations

import os
import threading
import weakref
from bisect import bisect_right, insort
from typing import NamedTuple, Self

from .device_driver import DeviceError, DeviceUnavailable, Driver, load
from .errors import RangeError, RegionError
from .local import BufferLike, byte_view

# By CUresult, from cuda.h.
_REFUSALS = {
    1: "the range is not one mapping of this process, or it is read-only",
    2: "the system locks no more memory for this process: raise `ulimit -l` (LimitMEMLOCK= of a "
    "service, --ulimit memlock=-1 of a container), or pin less",
    712: "it is registered already: pin a mapping once and share the object",
    801: "this platform cannot register such memory (a file on disk, or memory of another device)",
}


class PinningError(RegionError):
    """CUDA would not register the memory. The message says what to do."""


class Registration(NamedTuple):
    """Bytes [start, stop) of this process, as a copier sees them."""

    start: int
    stop: int
    kernels: bool  # a kernel reaches it at the same address as the host


class _Book:
    """What is registered, by kind of device. Thread-safe."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """For a fork, where nothing is registered, and whose lock another thread may have held."""
        self._lock = threading.Lock()
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
            entries = self._entries.get(device_type, [])
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
    """What covers all of `nbytes` at `address`, if one `Pinned` does."""
    return _book.covering(device_type, address, address + nbytes)


def partly_registered(address: int, nbytes: int, device_type: str = "cuda") -> bool:
    """Whether a `Pinned` has some byte of it. CUDA, asked about an address, knows only that one."""
    return _book.touching(device_type, address, address + nbytes)


class Pinned:
    """`memory`, registered with CUDA until `close()`. Keeps the memory alive as long.

    On device `cpu` there is nothing to register, and the object does only the bookkeeping.

    Raises PinningError when CUDA refuses, RangeError for no bytes or memory that is not contiguous,
    DeviceUnavailable without an NVIDIA driver. Close it before the mapping goes: CUDA does not
    notice that memory is unmapped, and later copies would go astray.
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
        kernels = True if driver is None else self._register(driver)
        entry = Registration(self.address, self.address + self.nbytes, kernels)
        try:
            _book.add(self.device_type, entry)
        except PinningError:
            if driver is not None:
                _unregister(driver, self._index, entry)
            raise
        # Also for an object that is dropped without being closed.
        self._finalizer = weakref.finalize(
            self, _unpin, self.device_type, entry, driver, self._index, os.getpid(), array
        )
        # At exit CUDA may be gone before us, and the process's memory goes with it anyway.
        self._finalizer.atexit = False

    @property
    def closed(self) -> bool:
        """Whether the memory is ordinary again."""
        return not self._finalizer.alive

    def close(self) -> None:
        """Make it ordinary memory again; a second call does nothing.

        Call when no copy of it is running. Raises PinningError when CUDA refuses.
        """
        self._finalizer()

    def _register(self, driver: Driver) -> bool:
        """Register, and say whether a kernel may use the address as it is."""
        try:
            with driver.on(self._index):
                driver.register(self.address, self.nbytes)
                try:
                    return driver.device_address(self.address) == self.address
                except DeviceError:
                    return False  # the copy engines take it all the same
        except DeviceError as error:
            reason = _REFUSALS.get(error.code, "see the driver's reason")
            raise PinningError(f"cannot pin {self.nbytes} bytes: {reason} [{error}]") from error

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
        return  # a fork has the object, but nothing is registered there
    _book.remove(device_type, entry)
    if driver is not None:
        _unregister(driver, index, entry)


def _unregister(driver: Driver, index: int, entry: Registration) -> None:
    try:
        with driver.on(index):
            driver.unregister(entry.start)
    except DeviceError as error:
        raise PinningError(f"{_size(entry)} stay pinned: {error}") from error


def _size(entry: Registration) -> str:
    return f"{entry.stop - entry.start} bytes at {entry.start:#x}"
