"""Asynchronous copies between a GPU and the host, and within the GPU, concurrent with an engine.

A copier has its own lanes (streams) in each direction, so that its copies neither wait for an
engine's kernels nor delay them; events order the two, on the device. A submit is planned as a whole
(`copy_plan`), queued with a few calls (`pipeline`), and returns while the bytes move. The copier
never synchronises a whole device, and only a large range has an event or a call of its own.

    copier = DeviceCopier("cuda:0")
    filled = torch.cuda.current_stream().record_event()
    saved = copier.submit([[(host, pages)]], after=filled)        # one group, one pair
    saved.wait(timeout_s=1.0)

    layers = [[(pages[i], host[i])] for i in range(32)]           # one group per layer
    loaded = copier.submit(layers)
    for i in range(32):
        loaded.stream_wait(torch.cuda.current_stream(), group=i)  # and layer i may be used

On device `cpu` host copies carry out the same plan, before `submit` returns.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, Any, Self

from ..errors import MessengerError, RangeError, RegionError, TransferTimeout
from .copy_buffers import Copies, Memory, Pair, look_at
from .copy_plan import Direction, Group, check_disjoint, choose, concatenate, join
from .copy_streams import CudaLanes, HostLanes
from .cuda_driver import CudaError, DeviceUnavailable
from .pipeline import NAP_S_MAX, CopyPipeline, until

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .copy_streams import Event, Lanes

__all__ = [
    "Copies",
    "CudaError",
    "DeviceCopier",
    "DeviceTransfer",
    "DeviceUnavailable",
    "Direction",
    "Memory",
    "Pair",
    "StillCopying",
]

# 16 MiB take 0.3 ms on a PCIe Gen5 link, in which the host prepares the next piece. Two buffers per
# direction, each on the host and on the device, are 64 MiB of each, if ever needed.
STAGING_BYTES = 16 << 20
STAGING_COUNT = 2
_STAGING_BYTES_MIN = 4096
# Limit of the bytes in flight: 20 ms of such a link, the longest queue before an urgent copy.
IN_FLIGHT_BYTES = 1 << 30


# Copiers that were garbage-collected while the device still uses their buffers and both ends of
# their copies. Every submit of another copier polls them, so that they are freed some time.
_dropped: list[DeviceCopier] = []


class StillCopying(MessengerError):
    """An abandoned copy that has not ended: the device may access source and target until
    `transfer.done()`. The copier keeps their memory alive until then; an allocator of parts of that
    memory must not reuse them before. Not a TransferError, because a retry must not use the same
    memory."""

    def __init__(self, message: str, transfer: DeviceTransfer) -> None:
        super().__init__(message)
        self.transfer = transfer


class DeviceTransfer:
    """The copies of one submit. Thread-safe.

    `events[i]` is the end of group i and `event` the end of all groups: torch.cuda.Event, or on
    device `cpu` an object with `query`, `synchronize` and `wait` that has ended already.
    """

    def __init__(self, copier: DeviceCopier, nbytes: int, keep: object) -> None:
        """Private: use `DeviceCopier.submit`."""
        self._copier = copier
        self._keep = keep  # sources and targets, so that their memory is not freed and reused
        self.nbytes = nbytes
        self.events: tuple[Event, ...] = ()
        self.event: Event | None = None

    def done(self) -> bool:
        """Whether all copies have ended, without waiting. Raises CudaError when they failed; then
        the content of the targets is undefined."""
        if self.event is None:  # being queued, or the device failed before it recorded the event
            return False
        try:
            ended = self.event.query()
        except RuntimeError as error:
            raise CudaError(f"a copy of {self.nbytes} bytes failed: {error}") from error
        if ended:
            self._keep = None
            self._copier._ended(self)
        return ended

    def wait(self, timeout_s: float) -> None:
        """Wait until all copies have ended.

        Raises StillCopying after the timeout, and CudaError as `done` does.
        """
        if not until(self.done, time.monotonic() + timeout_s):
            self._copier._gave_up(self)
            raise StillCopying(f"{self.nbytes} bytes were still moving after {timeout_s} s", self)

    def stream_wait(self, stream: Any, group: int | None = None) -> None:
        """Order all later work on `stream` after this transfer (or after one group of it), on the
        device: the host does not wait. Does nothing on device `cpu`."""
        event: Any = self.event if group is None else self.events[group]
        if event is None:
            raise CudaError("the transfer could not be queued; it has no end to wait for")
        event.wait(stream)

    def __repr__(self) -> str:
        return f"<Transfer {self.nbytes} bytes, {len(self.events)} groups>"


class DeviceCopier:
    """Copies ranges to, from and within one torch device, such as `cuda:0` or `cpu`.

    Each direction allocates `staging_count` buffers of `staging_bytes` when a path first needs
    them. At most `in_flight_bytes` are in flight; a larger submit waits until no other is. `lanes`
    is for tests.

    Thread-safe. Submits of one direction end in order; those of different directions are not
    ordered, except by `after`.

    Raises DeviceUnavailable when torch, the driver or the device is missing, RangeError for sizes
    below their minimum.
    """

    def __init__(
        self,
        device: str = "cuda:0",
        *,
        staging_bytes: int = STAGING_BYTES,
        staging_count: int = STAGING_COUNT,
        in_flight_bytes: int = IN_FLIGHT_BYTES,
        lanes: Lanes | None = None,
    ) -> None:
        if staging_bytes < _STAGING_BYTES_MIN or staging_count < 1 or in_flight_bytes < 1:
            raise RangeError(
                f"{staging_count} staging buffers of {staging_bytes} bytes, {in_flight_bytes} in "
                f"flight: at least 1, {_STAGING_BYTES_MIN} and 1"
            )
        self.device, self._lanes = _open(device, lanes)
        self._in_flight_bytes = in_flight_bytes
        with self._lanes.all_queued():
            self._movers = {
                way: CopyPipeline(self._lanes, way, staging_bytes, staging_count)
                for way in Direction
            }
        self._turns = {way: threading.Lock() for way in Direction}
        # Protected by _lock.
        self._lock = threading.Lock()
        self._live: dict[DeviceTransfer, bool] = {}  # True: its caller gave it up
        self._counts: Counter[str] = Counter()
        self._closed = False

    def submit(
        self,
        groups: Sequence[Sequence[Pair | Copies]],
        *,
        after: Any = None,
        timeout_s: float = 30.0,
    ) -> DeviceTransfer:
        """Queue the copy of every range of every group, in this order of groups.

        All groups have the same direction. No target may overlap another target or a source: the
        order inside a group is undefined. `after` is an event that the copies wait for on the
        device: without it they run at once, even if the caller's streams still use the same memory.

        Returns at once, but for two cases, which `timeout_s` bounds: no room in flight, and host
        memory that is not pinned, which this thread copies itself. The caller must not change or
        free sources and targets until the transfer is done.

        Raises RangeError before any copy is queued, TransferTimeout when there was no room or
        another submit of the direction was still being queued, StillCopying when the device made no
        progress, CudaError when it failed, RegionError after `close()`.
        """
        asked = look_at(groups, self.device)
        check_disjoint(concatenate([one.rows for one in asked]))
        way = asked[0].direction if asked else Direction.WITHIN
        planned = []
        for one in asked:
            rows = join(one.rows, way)
            able = self._lanes.able
            path = choose(rows, way, able, pinned=one.pinned, reachable=one.reachable)
            planned.append(Group(rows, path))
        nbytes = sum(group.rows.nbytes for group in planned)
        transfer = DeviceTransfer(self, nbytes, [list(group) for group in groups])
        deadline = time.monotonic() + timeout_s
        self._make_room(transfer, deadline)
        if not self._turns[way].acquire(timeout=max(0.0, deadline - time.monotonic())):
            self._ended(transfer)
            raise TransferTimeout("another submit of this direction was still being queued")
        try:
            self._queue(transfer, planned, self._movers[way], after, deadline)
        finally:
            self._turns[way].release()
        self._count(way, planned)
        return transfer

    def statistics(self) -> dict[str, int]:
        """Counters since the start, `<direction>.<path>.bytes` and `.ranges` (after joining) and
        `<direction>.transfers`; and the current `in_flight_bytes` and `given_up_bytes`."""
        self._reap()
        with self._lock:
            live = list(self._live.items())
            counts = dict(sorted(self._counts.items()))
        counts["in_flight_bytes"] = sum(transfer.nbytes for transfer, _ in live)
        counts["given_up_bytes"] = sum(transfer.nbytes for transfer, gone in live if gone)
        return counts

    def close(self, timeout_s: float = 30.0) -> None:
        """Refuse further submits, and release the staging buffers when all transfers have ended.

        Raises StillCopying, with a transfer that has not ended (call again), and CudaError when one
        failed. Idempotent.
        """
        with self._lock:
            self._closed = True
            live = list(self._live)
        deadline = time.monotonic() + timeout_s
        for transfer in live:
            transfer.wait(max(0.0, deadline - time.monotonic()))
        self._movers.clear()

    def __del__(self) -> None:
        # Memory that is freed now could be reused while the device still copies it.
        if getattr(self, "_live", None):
            _dropped.append(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _queue(
        self,
        transfer: DeviceTransfer,
        groups: list[Group],
        mover: CopyPipeline,
        after: Any,
        deadline: float,
    ) -> None:
        try:
            with self._lanes.all_queued():
                try:
                    mover.begin(after)
                    transfer.events = tuple(mover.move(group, deadline) for group in groups)
                finally:
                    # Also for a part of the groups: at its end the memory is free again.
                    transfer.event = mover.end()
        except TransferTimeout as error:
            self._gave_up(transfer)
            raise StillCopying(str(error), transfer) from error
        except BaseException:
            self._gave_up(transfer)
            raise

    def _make_room(self, transfer: DeviceTransfer, deadline: float) -> None:
        _reap_dropped()
        while True:
            self._reap()
            with self._lock:
                if self._closed:
                    raise RegionError("the copier is closed")
                used = sum(other.nbytes for other in self._live)
                if not used or used + transfer.nbytes <= self._in_flight_bytes:
                    self._live[transfer] = False
                    return
            if time.monotonic() >= deadline:
                raise TransferTimeout(
                    f"no room for {transfer.nbytes} bytes by the deadline: {used} of "
                    f"{self._in_flight_bytes} are in flight"
                )
            time.sleep(NAP_S_MAX)

    def _reap(self) -> None:
        with self._lock:
            live = list(self._live)
        for transfer in live:
            # A failed copy stays: the device may still be writing to its memory.
            with contextlib.suppress(CudaError):
                transfer.done()

    def _ended(self, transfer: DeviceTransfer) -> None:
        with self._lock:
            self._live.pop(transfer, None)

    def _gave_up(self, transfer: DeviceTransfer) -> None:
        with self._lock:
            if transfer in self._live:
                self._live[transfer] = True

    def _count(self, way: Direction, groups: list[Group]) -> None:
        with self._lock:
            self._counts[f"{way.value}.transfers"] += 1
            for group in groups:
                name = f"{way.value}.{group.path.value}"
                self._counts[f"{name}.ranges"] += len(group.rows)
                self._counts[f"{name}.bytes"] += group.rows.nbytes


def _reap_dropped() -> None:
    for copier in tuple(_dropped):
        copier._reap()
        if not copier._live:
            with contextlib.suppress(ValueError):  # another thread has removed it
                _dropped.remove(copier)


def _open(device: str, lanes: Lanes | None) -> tuple[Any, Lanes]:
    """(torch.device with its index, the lanes to queue copies on)."""
    try:
        import torch
    except ImportError as error:
        raise DeviceUnavailable("a copier needs torch: pip install 'tiffin[torch]'") from error
    try:
        where = torch.device(device)
    except RuntimeError as error:
        raise DeviceUnavailable(f"torch knows no device {device!r}: {error}") from error
    if lanes is not None:
        return where, lanes
    if where.type == "cpu":
        return where, HostLanes()
    if where.type != "cuda":
        raise DeviceUnavailable(f"copies are written for cuda and cpu, not for {device!r}")
    if where.index is None and torch.cuda.is_available():
        where = torch.device("cuda", torch.cuda.current_device())
    return where, CudaLanes(torch, where)
