"""Lanes, the queues of copies: CUDA streams, or just the calling thread on device `cpu`.

A lane runs its copies in order; lanes wait for each other by events and never block the host. The
module `pipeline` decides which copies go to which lane, and is the same for both.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from tiffin.kernels.ranges import copy_ranges as kernels

from .copy_plan import Able, CopyRows
from .cuda_driver import CudaError, DeviceMemoryError, DeviceUnavailable, Driver, load

if TYPE_CHECKING:
    from collections.abc import Iterator

# Zero is the lowest priority of CUDA streams, and also the default: kernels of an engine go first
# only where the engine's own stream has a higher one.
_PRIORITY = 0


class Event(Protocol):
    """A point in a lane's queue, as torch.cuda.Event."""

    def query(self) -> bool:
        """Whether everything queued before the event has ended."""

    def synchronize(self) -> None:
        """Block this thread until everything queued before the event has ended."""


@dataclass(frozen=True, slots=True)
class Buffer:
    """A staging buffer of a copier. `memory` keeps it alive."""

    address: int
    nbytes: int
    memory: Any


class Lanes(Protocol):
    """The device operations that `pipeline` needs. Rows contain addresses and do not overlap."""

    able: Able

    def lane(self) -> Any:
        """A new queue."""

    def single(self, lane: Any, rows: CopyRows) -> None:
        """Queue one copy per range."""

    def batch(self, lane: Any, rows: CopyRows) -> None:
        """Queue all ranges at once, for a copy engine."""

    def kernel(self, lane: Any, rows: CopyRows, programs: int | None) -> None:
        """Queue all ranges as one kernel of at most so many programs; None is the whole device."""

    def record(self, lane: Any) -> Event:
        """An event that has ended when everything queued so far has."""

    def wait(self, lane: Any, event: Any) -> None:
        """Order everything queued later after `event`; does not block the host."""

    def copy_on_host(self, rows: CopyRows) -> None:
        """Copy host memory synchronously, in this thread."""

    def host_buffer(self, nbytes: int) -> Buffer:
        """Allocate pinned host memory."""

    def device_buffer(self, nbytes: int, lane: Any) -> Buffer:
        """Allocate device memory for `lane`; another lane must wait for that lane before use."""

    def all_queued(self) -> contextlib.AbstractContextManager[None]:
        """A context for all other calls: makes the device current and converts its errors."""


class DoneEvent:
    """The event of a device whose copies end before the call returns."""

    def query(self) -> bool:
        """Always True."""
        return True

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def wait(self, stream: object = None) -> None:
        """Nothing to wait for."""


class HostLanes:
    """Device `cpu`: every copy is done before the call returns."""

    able = Able(batches=True, kernels=True)

    def lane(self) -> None:
        return None

    def single(self, lane: None, rows: CopyRows) -> None:
        self.copy_on_host(rows)

    def batch(self, lane: None, rows: CopyRows) -> None:
        self.copy_on_host(rows)

    def kernel(self, lane: None, rows: CopyRows, programs: int | None) -> None:
        self.copy_on_host(rows)

    def record(self, lane: None) -> DoneEvent:
        return DoneEvent()

    def wait(self, lane: None, event: Any) -> None:
        """Block this thread until `event`, a host event of any kind, has ended."""
        event.synchronize()

    def copy_on_host(self, rows: CopyRows) -> None:
        kernels.copy_ranges_host(rows.targets, rows.sources, rows.lengths)

    def host_buffer(self, nbytes: int) -> Buffer:
        array = np.empty(nbytes, np.uint8)
        return Buffer(array.ctypes.data, nbytes, array)

    def device_buffer(self, nbytes: int, lane: None) -> Buffer:
        return self.host_buffer(nbytes)

    def all_queued(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


class CudaLanes:
    """An NVIDIA GPU: streams of torch, copies of the driver, kernels of Triton.

    Raises DeviceUnavailable when torch or the driver is missing, or torch is for another vendor.
    """

    def __init__(self, torch: Any, device: Any, driver: Driver | None = None) -> None:
        if torch.version.hip is not None:
            raise DeviceUnavailable("copies are written for NVIDIA's driver; this torch is ROCm's")
        if not torch.cuda.is_available():
            raise DeviceUnavailable(f"no device {device}: torch sees no CUDA device here")
        self._torch = torch
        self._device = device
        self._driver = load() if driver is None else driver
        self.able = Able(self._driver.batches, kernels.available("cuda"))

    def lane(self) -> Any:
        return self._torch.cuda.Stream(self._device, priority=_PRIORITY)

    def single(self, lane: Any, rows: CopyRows) -> None:
        self._driver.copy_each(rows.targets, rows.sources, rows.lengths, lane.cuda_stream)

    def batch(self, lane: Any, rows: CopyRows) -> None:
        self._driver.copy_batch(rows.targets, rows.sources, rows.lengths, lane.cuda_stream)

    def kernel(self, lane: Any, rows: CopyRows, programs: int | None) -> None:
        with self._torch.cuda.stream(lane):
            kernels.copy_ranges(
                rows.targets, rows.sources, rows.lengths, device=self._device, programs=programs
            )

    def record(self, lane: Any) -> Event:
        event: Event = lane.record_event()
        return event

    def wait(self, lane: Any, event: Any) -> None:
        lane.wait_event(event)

    def copy_on_host(self, rows: CopyRows) -> None:
        kernels.copy_ranges_host(rows.targets, rows.sources, rows.lengths)

    def host_buffer(self, nbytes: int) -> Buffer:
        tensor = self._torch.empty(nbytes, dtype=self._torch.uint8, pin_memory=True)
        return Buffer(tensor.data_ptr(), nbytes, tensor)

    def device_buffer(self, nbytes: int, lane: Any) -> Buffer:
        # Memory from torch's allocator may still be in use, but only on the stream it is for.
        with self._torch.cuda.stream(lane):
            tensor = self._torch.empty(nbytes, dtype=self._torch.uint8, device=self._device)
        return Buffer(tensor.data_ptr(), nbytes, tensor)

    @contextlib.contextmanager
    def all_queued(self) -> Iterator[None]:
        try:
            with self._torch.cuda.device(self._device), self._driver.on(self._device.index):
                yield
        except self._torch.cuda.OutOfMemoryError as error:
            raise DeviceMemoryError(f"no staging on {self._device}: {error}") from error
        except RuntimeError as error:
            raise CudaError(f"a copy on {self._device} failed: {error}") from error
