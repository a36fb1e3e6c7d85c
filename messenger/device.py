"""Copies between a GPU and the host, and within the GPU, beside an engine's own work.

A copier has lanes (streams) of its own in each direction, so that its copies neither wait for an
engine's kernels nor hold them up; order between the two is by events, on the device. A submit is
planned as a whole (`device_plan`), queued with a few calls (`device_moves`), and returns while the
bytes move. Nothing here waits for a whole device, and no range has an event or a call to itself
unless it is large.

    copier = DeviceCopier("cuda:0")
    filled = torch.cuda.current_stream().record_event()
    saved = copier.submit([[(host, pages)]], after=filled)        # one group, one pair
    saved.wait(timeout_s=1.0)

    layers = [[(pages[i], host[i])] for i in range(32)]           # one group per layer
    loaded = copier.submit(layers)
    for i in range(32):
        loaded.stream_wait(torch.cuda.current_stream(), group=i)  # and layer i may be used

On device `cpu` the same plan is carried out by host copies, before `submit` returns.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, Any, Self

from .device_driver import DeviceError, DeviceUnavailable
from .device_lanes import CudaLanes, HostLanes
from .device_memory import Copies, Memory, Pair, look_at
from .device_moves import NAP_S_MAX, Mover, until
from .device_plan import Direction, Group, check_disjoint, choose, concatenate, join
from .errors import MessengerError, RangeError, RegionError, TransferTimeout

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .device_lanes import Event, Lanes

__all__ = [
    "Copies",
    "DeviceCopier",
    "DeviceError",
    "DeviceUnavailable",
    "Direction",
    "Memory",
    "Pair",
    "StillCopying",
    "Transfer",
]

# 16 MiB are on a PCIe Gen5 link for 0.3 ms, in which the host gets the next piece ready. Two of
# them per direction, each on the host and on the device, are 64 MiB of each, if ever needed.
STAGING_BYTES = 16 << 20
STAGING_COUNT = 2
_STAGING_BYTES_MIN = 4096
# What may be in flight: 20 ms of such a link, the longest that something urgent queues behind.
IN_FLIGHT_BYTES = 1 << 30


# Copiers that nobody holds any more, and whose buffers and both ends the device still uses. Every
# submit of another looks at them, so that they do not stay for good.
_dropped: list[DeviceCopier] = []


class StillCopying(MessengerError):
    """Given up, and not ended: the device may touch both ends until `transfer.done()`. The copier
    keeps their memory alive until then; whoever gives out parts of it must not reuse them. Not a
    TransferError, because nothing else may be tried with the same memory."""

    def __init__(self, message: str, transfer: Transfer) -> None:
        super().__init__(message)
        self.transfer = transfer


class Transfer:
    """What one submit moves. Any thread may ask.

    `events[i]` is the end of group i and `event` that of all: torch.cuda.Event, or on device `cpu`
    an object with `query`, `synchronize` and `wait`, for which everything has ended already.
    """

    def __init__(self, copier: DeviceCopier, nbytes: int, keep: object) -> None:
        """Not for callers: see `DeviceCopier.submit`."""
        self._copier = copier
        self._keep = keep  # both ends, so that nobody else gets the memory
        self.nbytes = nbytes
        self.events: tuple[Event, ...] = ()
        self.event: Event | None = None

    def done(self) -> bool:
        """Whether everything has ended, without waiting. Raises DeviceError when it failed; then
        nobody knows what the targets hold."""
        if self.event is None:  # being queued, or the device failed before it could be asked
            return False
        try:
            ended = self.event.query()
        except RuntimeError as error:
            raise DeviceError(f"a copy of {self.nbytes} bytes failed: {error}") from error
        if ended:
            self._keep = None
            self._copier._ended(self)
        return ended

    def wait(self, timeout_s: float) -> None:
        """Return when everything has ended.

        Raises StillCopying at the deadline, and DeviceError as `done` does.
        """
        if not until(self.done, time.monotonic() + timeout_s):
            self._copier._gave_up(self)
            raise StillCopying(f"{self.nbytes} bytes were still moving after {timeout_s} s", self)

    def stream_wait(self, stream: Any, group: int | None = None) -> None:
        """What is queued on `stream` from now on runs after this (or after one group of it), on
        the device: the host does not wait. Does nothing on device `cpu`."""
        event: Any = self.event if group is None else self.events[group]
        if event is None:
            raise DeviceError("the transfer could not be queued; it has no end to wait for")
        event.wait(stream)

    def __repr__(self) -> str:
        return f"<Transfer {self.nbytes} bytes, {len(self.events)} groups>"


class DeviceCopier:
    """Moves ranges to, from and within one torch device, such as `cuda:0` or `cpu`.

    `staging_count` buffers of `staging_bytes` are made per direction when a path first needs them.
    At most `in_flight_bytes` are under way; a larger submit waits until nothing else is. `lanes` is
    for tests.

    Threads: any may submit. Submits of one direction end in order; those of different directions
    know nothing of each other, unless `after` says so.

    Raises DeviceUnavailable when torch, the driver or the device is missing, RangeError for sizes
    below their least.
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
                way: Mover(self._lanes, way, staging_bytes, staging_count) for way in Direction
            }
        self._turns = {way: threading.Lock() for way in Direction}
        # Protected by _lock.
        self._lock = threading.Lock()
        self._live: dict[Transfer, bool] = {}  # whether somebody gave it up
        self._counts: Counter[str] = Counter()
        self._closed = False

    def submit(
        self,
        groups: Sequence[Sequence[Pair | Copies]],
        *,
        after: Any = None,
        timeout_s: float = 30.0,
    ) -> Transfer:
        """Queue the copy of every range of every group, in this order of groups.

        All go one way. No target may overlap another target or a source: the order inside a group
        is not yours. `after` is an event that the copies wait for on the device: without it they
        run at once, whatever streams of yours still do with the same memory.

        Returns at once, but for two cases, which `timeout_s` bounds: no room in flight, and host
        memory that is not pinned, which this thread copies itself. Both ends must stay as they are
        until the transfer is done.

        Raises RangeError before anything is queued, TransferTimeout when there was no room,
        StillCopying when the device did not get on, DeviceError when it failed, RegionError after
        `close()`.
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
        transfer = Transfer(self, nbytes, [list(group) for group in groups])
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
        """Counts since the start, `<direction>.<path>.bytes` and `.ranges` (after joining) and
        `<direction>.transfers`; and `in_flight_bytes` and `given_up_bytes`, which are of now."""
        self._reap()
        with self._lock:
            live = list(self._live.items())
            counts = dict(sorted(self._counts.items()))
        counts["in_flight_bytes"] = sum(transfer.nbytes for transfer, _ in live)
        counts["given_up_bytes"] = sum(transfer.nbytes for transfer, gone in live if gone)
        return counts

    def close(self, timeout_s: float = 30.0) -> None:
        """Refuse further submits and let go of the staging buffers, when all transfers have ended.

        Raises StillCopying, with one that has not (call again), and DeviceError when one failed. A
        second call does nothing.
        """
        with self._lock:
            self._closed = True
            live = list(self._live)
        deadline = time.monotonic() + timeout_s
        for transfer in live:
            transfer.wait(max(0.0, deadline - time.monotonic()))
        self._movers.clear()

    def __del__(self) -> None:
        # Memory that is given back now would be somebody else's while it is being copied.
        if getattr(self, "_live", None):
            _dropped.append(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _queue(
        self, transfer: Transfer, groups: list[Group], mover: Mover, after: Any, deadline: float
    ) -> None:
        try:
            with self._lanes.all_queued():
                try:
                    mover.begin(after)
                    transfer.events = tuple(mover.move(group, deadline) for group in groups)
                finally:
                    # Also of a part: its end is when the memory is free again.
                    transfer.event = mover.end()
        except TransferTimeout as error:
            self._gave_up(transfer)
            raise StillCopying(str(error), transfer) from error
        except BaseException:
            self._gave_up(transfer)
            raise

    def _make_room(self, transfer: Transfer, deadline: float) -> None:
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
            # A copy that failed stays: nobody knows whether its memory is still being written.
            with contextlib.suppress(DeviceError):
                transfer.done()

    def _ended(self, transfer: Transfer) -> None:
        with self._lock:
            self._live.pop(transfer, None)

    def _gave_up(self, transfer: Transfer) -> None:
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
            with contextlib.suppress(ValueError):  # another thread was sooner
                _dropped.remove(copier)


def _open(device: str, lanes: Lanes | None) -> tuple[Any, Lanes]:
    """(torch.device with its index, what to queue copies with)."""
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
