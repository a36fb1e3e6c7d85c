"""The device of an engine: queues of kernels beside the engine's own, and events between them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch

from tiffin.kernels.ranges.copy_ranges import available
from tiffin.messenger.errors import MessengerError
from tiffin.messenger.gpu.copier import DeviceCopier
from tiffin.messenger.gpu.copy_streams import DoneEvent

from ....errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Callable

    from tiffin.messenger.gpu.copy_streams import Event


class Queue(Protocol):
    """A queue of kernels (a CUDA stream), which runs them in order."""

    def run(self, launch: Callable[[Any], None]) -> None:
        """Queue what `launch(stream)` launches on the stream; None for the calling thread."""

    def wait(self, event: Any) -> None:
        """Order everything queued later after `event`, on the device."""

    def record(self) -> Event:
        """An event that has ended when everything queued so far has."""


class Device(Protocol):
    """Where an engine's pages are. `copier` moves bytes between it and the host."""

    copier: DeviceCopier

    def queue(self) -> Queue:
        """A new queue."""

    def steps(self) -> Event:
        """An event that has ended when all steps that the engine has launched have. Call it in the
        engine's thread, whose current stream they are on."""

    def await_in_steps(self, event: Any) -> None:
        """Order what the engine launches later after `event`, on the device. Call it in the
        engine's thread, as `steps`."""

    def buffer(self, nbytes: int) -> Any:
        """A tensor uint8 [nbytes] on the device."""


class HostQueue:
    """The calling thread: everything is done before `run` returns."""

    def run(self, launch: Callable[[Any], None]) -> None:
        launch(None)

    def wait(self, event: Any) -> None:
        event.synchronize()

    def record(self) -> Event:
        return DoneEvent()


class HostDevice:
    """Host memory in place of a device: every call is done before it returns."""

    def __init__(self) -> None:
        self.copier = DeviceCopier("cpu")

    def queue(self) -> HostQueue:
        return HostQueue()

    def steps(self) -> Event:
        return DoneEvent()

    def await_in_steps(self, event: Any) -> None:
        event.synchronize()

    def buffer(self, nbytes: int) -> Any:
        return torch.empty(nbytes, dtype=torch.uint8)


class CudaQueue:
    """A CUDA stream."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def run(self, launch: Callable[[Any], None]) -> None:
        launch(self._stream)

    def wait(self, event: Any) -> None:
        self._stream.wait_event(event)

    def record(self) -> Event:
        event: Event = self._stream.record_event()
        return event


class CudaDevice:
    """An NVIDIA GPU, torch's device `device`. Raises InvalidInput if nothing can be copied there:
    no driver, no kernels, or torch is for another vendor."""

    def __init__(self, device: Any) -> None:
        if not available("cuda"):
            raise InvalidInput(
                f"no kernels on {device}: they need Triton, a C compiler and Python's headers"
            )
        self._device = device
        try:
            self.copier = DeviceCopier(str(device))
        except MessengerError as error:
            raise InvalidInput(f"no copies to or from {device}: {error}") from error

    def queue(self) -> CudaQueue:
        return CudaQueue(torch.cuda.Stream(self._device))

    def steps(self) -> Event:
        event: Event = torch.cuda.current_stream(self._device).record_event()
        return event

    def await_in_steps(self, event: Any) -> None:
        torch.cuda.current_stream(self._device).wait_event(event)

    def buffer(self, nbytes: int) -> Any:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)


def device_of(device: Any) -> Device:
    """The device of an engine's tensors, torch's `device`. Raises InvalidInput for one that the
    connector does not copy to."""
    if device.type == "cpu":
        return HostDevice()
    if device.type == "cuda":
        return CudaDevice(device)
    raise InvalidInput(f"pages on {device}: the connector copies to cuda and cpu")
