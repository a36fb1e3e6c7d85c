"""Device memory of an HBM tier: its bytes, copies, checksums and stream events.

All code that touches a CUDA stream is here, none in the store. Our own work runs on our own
streams: the copier's, and one for checksums. Such work starts after an event of the stream that
wrote the bytes, and the host waits for it before it uses the result. Only `all_passed` synchronises
the whole device, for leases that were dropped without a release.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

from tiffin.kernels.checksum import page_hash
from tiffin.kernels.errors import KernelError
from tiffin.messenger.errors import MessengerError, RangeError, RegionError, TransferTimeout
from tiffin.messenger.gpu.copier import (
    IN_FLIGHT_BYTES,
    CudaError,
    DeviceCopier,
    DeviceUnavailable,
    StillCopying,
)

from ...deadlines import until_s
from ...errors import TierUnavailable
from ...tiers.hbm import HbmTier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from tiffin.messenger.gpu.copier import DeviceTransfer

    Bytes = NDArray[np.uint8]
    Pairs = Sequence[tuple[Any, Any]]

T = TypeVar("T")

# The most bytes of one submitted copy. A copier has room for IN_FLIGHT_BYTES; a larger copy would
# have to wait until no other is in flight, which may never be.
COPY_BYTES = IN_FLIGHT_BYTES // 4


class Passed(Protocol):
    """Work on a device that will end, such as a copy or a stream up to an event."""

    def done(self) -> bool:
        """Whether it has ended. Raises MessengerError if it failed, so that its end is unknown."""


class Point:
    """A point in a stream (an event); on the CPU, and without an event, it has passed at once."""

    def __init__(self, event: Any) -> None:
        self.event = event

    def done(self) -> bool:
        """Whether the stream has passed it. Raises CudaError."""
        try:
            return self.event is None or bool(self.event.query())
        except RuntimeError as error:
            raise CudaError(f"a stream failed: {error}") from error


class Never:
    """Failed work: whether it has ended can't be known."""

    def done(self) -> bool:
        """Raises CudaError."""
        raise CudaError("a copy or a stream failed: its memory is not used again")


class All:
    """The end of several pieces of work."""

    def __init__(self, parts: Sequence[Passed]) -> None:
        self._parts = parts

    def done(self) -> bool:
        """Whether all have ended. Raises MessengerError if one of them failed."""
        return all(part.done() for part in self._parts)


class Unfinished(Exception):
    """A copy failed or timed out. Its memory may be reused once `passed` is done, at once if that
    is None (no copy began); `late` if the copy timed out, else the device refused it."""

    def __init__(self, cause: BaseException, passed: Passed | None, *, late: bool) -> None:
        super().__init__(str(cause))
        self.passed = passed
        self.late = late


class _Alias:
    """GPU memory under `__cuda_array_interface__`, for torch. Stream None: the caller synchronises
    its own streams."""

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor
        self.__cuda_array_interface__ = {
            "data": (tensor.data_ptr(), False),
            "shape": (tensor.numel(),),
            "typestr": "|u1",
            "version": 3,
            "stream": None,
        }


class HbmMemory:
    """`nbytes` of a device's memory, with copies and checksums of it. Thread-safe.

    Raises InvalidInput and TierUnavailable like `HbmTier`.
    """

    def __init__(self, nbytes: int, device: str) -> None:
        self.tier = HbmTier(nbytes, device)
        self._torch = self.tier.torch
        self.device = self.tier.device
        self._on_gpu = self.device.type == "cuda"
        self._lock = threading.Lock()
        self._copies = 0  # calls of `copy` in flight
        self._stream = self._torch.cuda.Stream(self.device) if self._on_gpu else None
        # An event that has passed already, for callers that want one to wait for; None on the CPU.
        self.passed_event = None if self._stream is None else self._stream.record_event()
        try:
            self.copier = DeviceCopier(str(self.device))
        except DeviceUnavailable as error:
            self.tier.close()
            raise TierUnavailable(f"no copies to or from {device}: {error}") from error

    @property
    def tensor(self) -> Any:
        """The whole memory, uint8 [capacity_bytes]. Raises TierUnavailable after `close`."""
        return self.tier.view_all()

    def view(self, offset: int, nbytes: int) -> Any:
        """uint8 [nbytes], not copied. Raises TierUnavailable after `close`."""
        return self.tensor[offset : offset + nbytes]

    def lent(self) -> tuple[Any, object]:
        """A new tensor of the whole memory, uint8 [capacity_bytes], to slice for one caller; and an
        object that lives as long as any view of this tensor does. Slices of a tensor refer to its
        storage and not to the tensor, so each call makes a storage of its own. Raises
        TierUnavailable after `close`."""
        if self._torch.is_inference_mode_enabled():
            # A tensor made in inference mode can't be written outside of it, unlike one made here.
            with self._torch.inference_mode(False):
                return self.lent()
        tensor = self.tensor
        if self._on_gpu:
            alias = _Alias(tensor)
            return self._torch.as_tensor(alias, device=self.device), alias
        # Not a view of the numpy array: its base would be that array.
        array = np.frombuffer(tensor.numpy().data, np.uint8)
        return self._torch.from_numpy(array), array

    # -- streams ---------------------------------------------------------------------------------

    def all_passed(self) -> Passed | None:
        """Synchronise the device: wait for all its streams in this process. For memory whose user's
        stream is unknown. Returns None, or `Never` if the device refuses."""
        if self._on_gpu:
            try:
                self._torch.cuda.synchronize(self.device)
            except RuntimeError:
                return Never()
        return None

    def point(self, stream: Any = None) -> Point:
        """Record an event in `stream` now; without one, in the calling thread's current stream on
        this device.

        Raises TierUnavailable when the device refuses.
        """
        if not self._on_gpu:
            return Point(None)
        try:
            event = self._torch.cuda.Event()
            event.record(self._torch.cuda.current_stream(self.device) if stream is None else stream)
        except RuntimeError as error:
            raise TierUnavailable(f"a stream on {self.device} failed: {error}") from error
        return Point(event)

    # -- copies ----------------------------------------------------------------------------------

    def copy(self, pairs: Pairs, deadline: float) -> None:
        """Copy each (target, source) pair, all in one direction: tensors of this device, uint8
        arrays of the host. Returns when all copies have ended. Raises Unfinished."""
        with self._lock:
            self._copies += 1
        try:
            self._copy(pairs, deadline)
        finally:
            with self._lock:
                self._copies -= 1

    def _copy(self, pairs: Pairs, deadline: float) -> None:
        begun: list[DeviceTransfer] = []
        queueing = False
        try:
            for part in _cut(pairs):
                queueing = True
                begun.append(self.copier.submit([part], timeout_s=until_s(deadline)))
                queueing = False
            for transfer in begun:
                transfer.wait(until_s(deadline))
        except StillCopying as error:
            # Raised by a submit or a wait; a transfer that is in the list twice does no harm.
            raise Unfinished(error, All([*begun, error.transfer]), late=True) from error
        except TransferTimeout as error:
            raise Unfinished(error, _all(begun), late=True) from error
        except (RangeError, RegionError) as error:
            raise Unfinished(error, _all(begun), late=False) from error
        except MessengerError as error:
            raise Unfinished(error, Never(), late=False) from error
        except BaseException as error:
            passed = Never() if queueing else _all(begun)
            raise Unfinished(error, passed, late=False) from error

    def while_idle(self, action: Callable[[], None]) -> bool:
        """Run `action` if no copy is in flight, and let none begin meanwhile. Returns whether it
        ran."""
        with self._lock:
            if self._copies or self.copier.statistics()["in_flight_bytes"]:
                return False
            action()
            return True

    # -- checksums -------------------------------------------------------------------------------

    def checksums(
        self,
        offsets: Sequence[int],
        spans: Sequence[tuple[int, int]],
        after: Point | None = None,
    ) -> NDArray[np.uint64]:
        """`xxh3_64_pages` of each of `spans`, (offset, length) in a block, for the blocks at
        `offsets`: uint64 [blocks, spans]. The device computes them after its stream has passed
        `after`, and this call waits for the result.

        Raises TierUnavailable when the device refuses.
        """
        from tiffin.kernels.checksum.segment_checksum import segment_checksums

        if not offsets:
            return np.empty((0, len(spans)), np.uint64)
        try:
            with self._own_stream(after):
                sums: NDArray[np.uint64] = segment_checksums(self.tensor, spans_at(offsets, spans))
        except (RuntimeError, KernelError) as error:
            raise TierUnavailable(f"checksums on {self.device} failed: {error}") from error
        return sums.reshape(len(offsets), len(spans))

    @contextlib.contextmanager
    def _own_stream(self, after: Point | None) -> Any:
        if self._stream is None:
            yield
            return
        with self._torch.cuda.stream(self._stream):
            if after is not None and after.event is not None:
                self._stream.wait_event(after.event)
            yield

    def close(self, timeout_s: float) -> None:
        """Wait for copies in flight, then release the memory. If a copy does not end within
        `timeout_s`, its memory stays: the copier keeps it alive."""
        with contextlib.suppress(MessengerError):
            self.copier.close(timeout_s)
        self.tier.close()


def on_current_stream(device: Any, action: Callable[[], T]) -> Callable[[], T]:
    """Wrap `action` so that another thread can run it on the calling thread's current stream on
    `device` ("cuda:0", or torch's)."""
    torch = sys.modules.get("torch")
    if not str(device).startswith("cuda") or torch is None or not torch.cuda.is_initialized():
        return action  # no stream can have been chosen
    try:
        stream = torch.cuda.current_stream(device)
    except (RuntimeError, ValueError, AssertionError):
        return action  # no such device; `action` will raise for it

    def carried_out() -> T:
        with torch.cuda.stream(stream):
            return action()

    return carried_out


def _all(begun: Sequence[Passed]) -> Passed | None:
    return All(begun) if begun else None


def _cut(pairs: Pairs) -> Iterator[list[tuple[Any, Any]]]:
    """Split the pairs into batches of at most COPY_BYTES, or of one pair."""
    part: list[tuple[Any, Any]] = []
    nbytes = 0
    for pair in pairs:
        size = int(pair[0].nbytes)
        if part and nbytes + size > COPY_BYTES:
            yield part
            part, nbytes = [], 0
        part.append(pair)
        nbytes += size
    if part:
        yield part


def host_checksums(data: Bytes, spans: Sequence[tuple[int, int]]) -> NDArray[np.uint64]:
    """The checksums of `HbmMemory.checksums` for host memory, uint8 [n]; uint64 [spans]."""
    return page_hash.checksums(data, spans)


def spans_at(offsets: Sequence[int], spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The `spans` of a block, for each block that begins at one of `offsets`."""
    return [(offset + at, length) for offset in offsets for at, length in spans]
