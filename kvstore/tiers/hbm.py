"""The HBM tier: one byte tensor per device. On device `cpu` the same class runs anywhere.

The memory is a `DeviceRegion`, so that other processes on the host can map it. If a `DeviceRegion`
is not available for a device that torch supports (a GPU without NVIDIA's driver), torch allocates
the memory, and other processes cannot map it.

Copies run on a CUDA stream of the tier's own, so that they neither wait for an engine's kernels nor
delay them; a verb returns after its copies have ended. Memory that CUDA has registered
(`pin_memory`) moves at the link's speed; other memory goes through the driver's staging buffer at
about half.
"""

from __future__ import annotations

import contextlib
import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np

from tiffin.messenger.errors import MessengerError
from tiffin.messenger.gpu.cuda_driver import DeviceUnavailable
from tiffin.messenger.gpu.device_region import DeviceRegion

from ..errors import InvalidInput, TierUnavailable
from ..extras import need
from .base import Tier, TierName

if TYPE_CHECKING:
    from tiffin.messenger.shm.host_copy import ByteArray

    from ..memory.arena import Extent


class HbmTier(Tier):
    """`nbytes` of memory, rounded down to whole pages, of a torch device such as `cuda:0` or `cpu`.

    Raises MissingExtra without torch, InvalidInput for a device that it does not know,
    TierUnavailable when the device does not have enough memory.
    """

    def __init__(self, nbytes: int, device: str = "cuda:0") -> None:
        super().__init__(TierName.HBM, nbytes)
        self._torch = _import_torch()
        try:
            self.device = self._torch.device(device)
        except RuntimeError as error:
            raise InvalidInput(f"torch knows no device {device!r}: {error}") from error
        on_gpu = self.device.type == "cuda"
        try:
            if on_gpu and self.device.index is None:
                self.device = self._torch.device("cuda", self._torch.cuda.current_device())
            self._region, self._tensor = self._allocate()
        except (RuntimeError, AssertionError, MessengerError) as error:
            # AssertionError: torch without CUDA
            raise TierUnavailable(f"no HBM tier on {device}: {error}") from error
        self._stream = self._torch.cuda.Stream(self.device) if on_gpu else None

    def _allocate(self) -> tuple[DeviceRegion | None, Any]:
        try:
            region = DeviceRegion.create(self.capacity_bytes, str(self.device))
        except DeviceUnavailable:
            kind = self._torch.uint8
            return None, self._torch.empty(self.capacity_bytes, dtype=kind, device=self.device)
        return region, region.tensor

    @property
    def region(self) -> DeviceRegion:
        """The region that another process can attach to: an extent's offset is its offset in the
        region. Raises TierUnavailable after `close()`, and for memory that cannot be shared."""
        self._slice(0, 0)
        if self._region is None:
            raise TierUnavailable(f"memory of {self.device} cannot be shared with other processes")
        return self._region

    @property
    def tensor(self) -> Any:
        """The whole tier, uint8 [capacity_bytes]; None after `close()`."""
        return self._tensor

    @property
    def torch(self) -> Any:
        """The module torch, which this package imports only when it is needed."""
        return self._torch

    def view_all(self) -> Any:
        """As `tensor`, but raises TierUnavailable after `close()`."""
        return self._slice(0, self.capacity_bytes)

    def view(self, extent: Extent) -> Any:
        """The extent's bytes on the device, uint8 [length], not copied.

        The caller orders its own streams: the tier does not wait for work queued on this view.
        """
        self._locate(extent, 0, extent.length)
        return self._slice(extent.offset, extent.length)

    def close(self) -> None:
        # Not the region's own `close`: views that callers still have keep the memory allocated.
        self._tensor = self._region = None

    def _write(self, start: int, data: ByteArray) -> None:
        self._copy(self._slice(start, len(data)), self._host_tensor(data))

    def _read(self, start: int, data: ByteArray) -> None:
        self._copy(self._host_tensor(data), self._slice(start, len(data)))

    def _slice(self, start: int, nbytes: int) -> Any:
        if self._tensor is None:
            raise TierUnavailable("the HBM tier is not usable: it is closed")
        return self._tensor[start : start + nbytes]

    def _copy(self, target: Any, source: Any) -> None:
        stream = self._stream
        context = contextlib.nullcontext() if stream is None else self._torch.cuda.stream(stream)
        try:
            with context:
                target.copy_(source, non_blocking=stream is not None)
            if stream is not None:
                stream.synchronize()
        except RuntimeError as error:
            self._fail()
            raise TierUnavailable(f"a copy on {self.device} failed: {error}") from error

    def _host_tensor(self, data: ByteArray) -> Any:
        """A tensor over the same memory, valid while `data` is.

        torch warns about read-only arrays, as it cannot promise not to write to them. Copies only
        read their source, so the tensor of a read-only array is made over its address instead.
        """
        if not data.flags.writeable:
            alias = (ctypes.c_uint8 * len(data)).from_address(data.ctypes.data)
            data = np.frombuffer(memoryview(alias), np.uint8)
        return self._torch.from_numpy(data)


def _import_torch() -> Any:
    need("an HBM tier", "torch")
    import torch

    return torch
