"""Where copies are queued: CUDA streams, or nothing but the calling thread on device `cpu`.

A lane runs what it is given in order; lanes wait for each other by events and never stop the host.
What is queued when is decided by `device_moves`, which is the same for both.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from tiffin.kernels import ranges as kernels

from .device_driver import DeviceError, DeviceMemoryError, DeviceUnavailable, Driver, load
from .device_plan import Able, Rows

if TYPE_CHECKING:
    from collections.abc import Iterator

# Zero is the lowest priority that CUDA has, and also the default: kernels of an engine go first
# only where the engine's own stream is of a higher one.
_PRIORITY = 0


class Event(Protocol):
    """A moment of a lane, as torch.cuda.Event."""

    def query(self) -> bool:
        """Whether everything queued before it has ended."""

    def synchronize(self) -> None:
        """Stop this thread until it has."""


@dataclass(frozen=True, slots=True)
class Buffer:
    """Memory of a copier's own. `memory` keeps it alive."""

    address: int
    nbytes: int
    memory: Any


class Lanes(Protocol):
    """What `device_moves` needs of a device. Rows are of addresses and do not overlap."""

    able: Able

    def lane(self) -> Any:
        """A new queue."""

    def single(self, lane: Any, rows: Rows) -> None:
        """Queue one copy per range."""

    def batch(self, lane: Any, rows: Rows) -> None:
        """Queue all ranges at once, for a copy engine."""

    def kernel(self, lane: Any, rows: Rows, programs: int | None) -> None:
        """Queue all ranges as one kernel of at most so many programs; None is the whole device."""

    def record(self, lane: Any) -> Event:
        """The moment when everything queued so far will have ended."""

    def wait(self, lane: Any, event: Any) -> None:
        """What is queued from now on runs after `event`; the host goes on."""

    def copy_on_host(self, rows: Rows) -> None:
        """Copy host memory, now, in this thread."""

    def host_buffer(self, nbytes: int) -> Buffer:
        """Pinned host memory."""

    def device_buffer(self, nbytes: int, lane: Any) -> Buffer:
        """Device memory, for `lane` from now on; other lanes wait for that one first."""

    def all_queued(self) -> contextlib.AbstractContextManager[None]:
        """Around every other call: makes the device current and types its errors."""


class DoneEvent:
    """The event of a device whose copies end before the call returns."""

    def query(self) -> bool:
        """Always."""
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

    def single(self, lane: None, rows: Rows) -> None:
        self.copy_on_host(rows)

    def batch(self, lane: None, rows: Rows) -> None:
        self.copy_on_host(rows)

    def kernel(self, lane: None, rows: Rows, programs: int | None) -> None:
        self.copy_on_host(rows)

    def record(self, lane: None) -> DoneEvent:
        return DoneEvent()

    def wait(self, lane: None, event: Any) -> None:
        """A host event of any kind: all that can be done here is to stop until it has come."""
        event.synchronize()

    def copy_on_host(self, rows: Rows) -> None:
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

    def single(self, lane: Any, rows: Rows) -> None:
        self._driver.copy_each(rows.targets, rows.sources, rows.lengths, lane.cuda_stream)

    def batch(self, lane: Any, rows: Rows) -> None:
        self._driver.copy_batch(rows.targets, rows.sources, rows.lengths, lane.cuda_stream)

    def kernel(self, lane: Any, rows: Rows, programs: int | None) -> None:
        with self._torch.cuda.stream(lane):
            kernels.copy_ranges(
                rows.targets, rows.sources, rows.lengths, device=self._device, programs=programs
            )

    def record(self, lane: Any) -> Event:
        event: Event = lane.record_event()
        return event

    def wait(self, lane: Any, event: Any) -> None:
        lane.wait_event(event)

    def copy_on_host(self, rows: Rows) -> None:
        kernels.copy_ranges_host(rows.targets, rows.sources, rows.lengths)

    def host_buffer(self, nbytes: int) -> Buffer:
        tensor = self._torch.empty(nbytes, dtype=self._torch.uint8, pin_memory=True)
        return Buffer(tensor.data_ptr(), nbytes, tensor)

    def device_buffer(self, nbytes: int, lane: Any) -> Buffer:
        # What torch's allocator hands out may still be in use, but only on the stream it is for.
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
            raise DeviceError(f"a copy on {self._device} failed: {error}") from error
