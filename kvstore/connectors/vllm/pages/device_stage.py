"""What one call of a copier has of a device: a queue of kernels, and two buffers in turn."""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING, Any

from tiffin.messenger.gpu.copier import StillCopying
from tiffin.messenger.gpu.pipeline import until

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tiffin.messenger.gpu.copier import Copies, DeviceTransfer
    from tiffin.messenger.gpu.copy_streams import Event

    from .device_queue import Device, Queue

# How long a copy may be queued. The copies before it wait for no step, so that takes milliseconds;
# a device that needs longer has hung, and the engine with it.
_QUEUE_TIMEOUT_S = 60.0


class StageBuffer:
    """Memory on the device for one piece, and the event after which it is free."""

    def __init__(self, memory: Any) -> None:
        self.memory = memory
        self.free: Event | None = None


class Stage:
    """What one call uses at a time: a queue, two buffers, and the transfers that it began."""

    def __init__(self, device: Device, nbytes: int) -> None:
        self.queue: Queue = device.queue()
        self._copier = device.copier
        self._buffers = deque(StageBuffer(device.buffer(nbytes)) for _ in range(2))
        self._begun: list[DeviceTransfer] = []

    def buffer(self) -> StageBuffer:
        """The buffer that was used longest ago, once it is free."""
        buffer = self._buffers[0]
        self._buffers.rotate(-1)
        if buffer.free is not None:
            until(buffer.free.query, math.inf)
            buffer.free = None
        return buffer

    def copy(self, copies: Sequence[Copies], after: Event | None = None) -> Event:
        """Queue copies between a buffer and the host; returns their end. Raises MessengerError."""
        try:
            transfer = self._copier.submit([copies], after=after, timeout_s=_QUEUE_TIMEOUT_S)
        except StillCopying as error:
            self._begun.append(error.transfer)
            raise
        self._begun.append(transfer)
        assert transfer.event is not None  # it was queued
        return transfer.event

    def settle(self) -> None:
        """Return when the device uses neither pages nor blocks nor buffers any more. There is no
        deadline: what it does can't be taken back, and would go to memory of others."""
        until(self.queue.record().query, math.inf)
        begun, self._begun = self._begun, []
        for transfer in begun:
            transfer.wait(math.inf)
