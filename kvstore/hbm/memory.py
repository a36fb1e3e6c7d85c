"""The device's side of an HBM tier: its bytes, copies, checksums and events.

Everything that touches a stream is here, so that the store has none in sight. Own work runs on own
streams: the copier's, and one for checksums. Each begins behind an event of whoever wrote the bytes
and is waited for by the host before anything is decided from it; nothing synchronises a device.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from tiffin.kernels import pagehash
from tiffin.kernels.errors import KernelError
from tiffin.messenger.device import (
    IN_FLIGHT_BYTES,
    DeviceCopier,
    DeviceError,
    DeviceUnavailable,
    StillCopying,
)
from tiffin.messenger.errors import MessengerError, RangeError, RegionError, TransferTimeout

from ..errors import TierUnavailable
from ..tiers.hbm import HbmTier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from tiffin.messenger.device import Transfer

    Bytes = NDArray[np.uint8]
    Pairs = Sequence[tuple[Any, Any]]


# What is submitted at a time. A copier has room for IN_FLIGHT_BYTES; more than that would have to
# wait until nothing else is under way, which may never be.
COPY_BYTES = IN_FLIGHT_BYTES // 4


class Passed(Protocol):
    """Work on a device that ends some time."""

    def done(self) -> bool:
        """Whether it has ended. Raises MessengerError where nobody can know."""


class Point:
    """Where a stream was at one moment; on the CPU that moment is over at once."""

    def __init__(self, event: Any) -> None:
        self.event = event

    def done(self) -> bool:
        """Whether the stream has passed it. Raises DeviceError."""
        try:
            return self.event is None or bool(self.event.query())
        except RuntimeError as error:
            raise DeviceError(f"a stream failed: {error}") from error


class Never:
    """Of a copy that failed, or that was interrupted, nobody knows whether it has ended."""

    def done(self) -> bool:
        """Raises DeviceError."""
        raise DeviceError("a copy failed, or was interrupted: its memory is not used again")


class All:
    """Several, each on its own."""

    def __init__(self, parts: Sequence[Passed]) -> None:
        self._parts = parts

    def done(self) -> bool:
        """Whether all have ended. Raises what one of them does."""
        return all(part.done() for part in self._parts)


class Unfinished(Exception):
    """A copy that did not end well. `passed` is when its memory may be used again, None if nothing
    was begun; `late` if time ran out, `interrupt` if somebody wanted no more of it (Ctrl-C), else
    the device refused."""

    def __init__(self, cause: BaseException, passed: Passed | None, *, late: bool) -> None:
        super().__init__(str(cause))
        self.passed = passed
        self.late = late
        self.interrupt = None if isinstance(cause, Exception) else cause


class HbmMemory:
    """`nbytes` of a device, and what is done with them. Any thread may call any of it.

    Raises InvalidInput and TierUnavailable like `HbmTier`.
    """

    def __init__(self, nbytes: int, device: str) -> None:
        self.tier = HbmTier(nbytes, device)
        self._torch = self.tier.torch
        self.device = self.tier.device
        self._on_gpu = self.device.type == "cuda"
        self._lock = threading.Lock()
        self._copies = 0  # that are being queued or waited for
        self._stream = self._torch.cuda.Stream(self.device) if self._on_gpu else None
        # An event that has passed, for whoever wants to wait for one; None on the CPU.
        self.passed_event = None if self._stream is None else self._stream.record_event()
        try:
            self.copier = DeviceCopier(str(self.device))
        except DeviceUnavailable as error:
            self.tier.close()
            raise TierUnavailable(f"no copies to or from {device}: {error}") from error

    @property
    def tensor(self) -> Any:
        """All of it, uint8 [capacity_bytes]. Raises TierUnavailable after `close`."""
        return self.tier.view_all()

    def view(self, offset: int, nbytes: int) -> Any:
        """uint8 [nbytes], not copied. Raises TierUnavailable after `close`."""
        return self.tensor[offset : offset + nbytes]

    # -- streams ---------------------------------------------------------------------------------

    def point(self, stream: Any = None) -> Point:
        """Where `stream` is now; without one, the calling thread's current stream there.

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
        """Copy each (target, source), all one way: tensors of this device, uint8 arrays of the
        host. Returns when all bytes are there. Raises Unfinished."""
        with self._lock:
            self._copies += 1
        try:
            self._copy(pairs, deadline)
        finally:
            with self._lock:
                self._copies -= 1

    def _copy(self, pairs: Pairs, deadline: float) -> None:
        begun: list[Transfer] = []
        queueing = False
        try:
            for part in _cut(pairs):
                queueing = True
                begun.append(self.copier.submit([part], timeout_s=left_s(deadline)))
                queueing = False
            for transfer in begun:
                transfer.wait(left_s(deadline))
        except StillCopying as error:
            # Of a submit or of a wait; asking a transfer twice does no harm.
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
        """Do `action` while nothing is copied and no copy begins; whether that was so."""
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
        """`xxh3_64_pages` of each of `spans`, (offset, length) in a block, of the blocks that begin
        at `offsets`: uint64 [blocks, spans], computed on the device once the stream has passed
        `after`. Waits for the result.

        Raises TierUnavailable when the device refuses.
        """
        from tiffin.kernels.checksum import segment_checksums

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
        """Wait for copies that are under way, then let go of the memory. Of copies that do not end
        the memory stays: the copier keeps it alive."""
        with contextlib.suppress(MessengerError):
            self.copier.close(timeout_s)
        self.tier.close()


def _all(begun: Sequence[Passed]) -> Passed | None:
    return All(begun) if begun else None


def _cut(pairs: Pairs) -> Iterator[list[tuple[Any, Any]]]:
    """Pieces of at most COPY_BYTES, or of one pair."""
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
    """The same checksums of host memory, uint8 [n]; uint64 [spans]."""
    return pagehash.checksums(data, spans)


def left_s(deadline: float) -> float:
    """The time until then, not negative."""
    return max(0.0, deadline - time.monotonic())


def spans_at(offsets: Sequence[int], spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The `spans` of a block, for each block that begins at one of `offsets`."""
    return [(offset + at, length) for offset in offsets for at, length in spans]
