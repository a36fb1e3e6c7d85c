"""The copy pipeline: queues the copies and kernels that move a group of ranges in one direction.

A pipeline has two lanes: one for the copies over the link and one for the kernels that gather or
scatter inside the device, so that piece i+1 is on the link while piece i is scattered. Pieces go
through slots in turn, each with a buffer on the host and one on the device, made when first needed.
Before a slot is used again,

- a lane that writes its device buffer waits for the lane that read it (an event; the host does not
  block);
- the host, which writes or reads the pinned buffer itself, waits for the link's copy of it.

Only the second wait blocks the calling thread, and only for memory that is not pinned.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from tiffin.kernels.ranges.copy_ranges import link_programs

from ..errors import TransferTimeout
from .copy_plan import CopyRows, Direction, Group, Path, direct, is_small, merge, pieces

if TYPE_CHECKING:
    from collections.abc import Callable

    from .copy_plan import Numbers
    from .copy_streams import Buffer, Event, Lanes

# For kernels between pages and a staging buffer, concurrent with a copy over the link that they
# feed: 32 programs of 8 warps move some hundred GB/s (an estimate) and leave most of a GPU free.
_FEEDING_PROGRAMS = 32

# Polling interval of an event, with back-off: short at first, as most copies take microseconds.
NAP_S_MIN, NAP_S_MAX = 20e-6, 1e-3


class _Slot:
    """A place in the pipeline: two buffers, and the events after which they may be reused."""

    def __init__(self) -> None:
        self.host: Buffer | None = None
        self.device: Buffer | None = None
        self.host_free: Event | None = None
        self.device_free: Event | None = None
        self.to_unpack: CopyRows | None = None  # to copy out of `host` once `host_free` has ended


class CopyPipeline:
    """Moves groups in one direction. Not thread-safe; call it inside `lanes.all_queued()`."""

    def __init__(
        self, lanes: Lanes, direction: Direction, staging_bytes: int, staging_count: int
    ) -> None:
        self._lanes = lanes
        self._direction = direction
        self._staging_bytes = staging_bytes
        self._slots = [_Slot() for _ in range(staging_count)]
        self._turn = 0
        self._link = lanes.lane()
        self._gather = lanes.lane()

    def begin(self, after: Any) -> None:
        """Begin a submit: later moves wait for `after`, on the device."""
        for slot in self._slots:
            slot.to_unpack = None  # left by a submit that was given up
        if after is not None:
            self._lanes.wait(self._link, after)
            self._lanes.wait(self._gather, after)

    def move(self, group: Group, deadline: float) -> Event:
        """Queue a group; returns the event of its end. Host memory that is not pinned is copied
        before this returns. Raises TransferTimeout when the link does not finish that by the
        deadline; copies already queued continue."""
        lanes, rows = self._lanes, group.rows
        if not len(rows):
            return lanes.record(self._link)
        if group.path in (Path.STAGED, Path.BOUNCED):
            return self._move_in_pieces(rows, bounced=group.path is Path.BOUNCED, deadline=deadline)
        if group.path is Path.KERNEL:
            within = self._direction is Direction.WITHIN
            lanes.kernel(self._link, rows, None if within else _link_programs(rows))
        else:
            self._copy(rows, group.path)
        return lanes.record(self._link)

    def end(self) -> Event:
        """An event that has ended when everything queued so far on both lanes has."""
        self._lanes.wait(self._link, self._lanes.record(self._gather))
        return self._lanes.record(self._link)

    def _move_in_pieces(self, rows: CopyRows, *, bounced: bool, deadline: float) -> Event:
        small = self._lanes.able.kernels and is_small(rows)
        step = self._up if self._direction is Direction.TO_DEVICE else self._down
        ended: Event | None = None
        for piece, at in pieces(rows, self._staging_bytes):
            slot = self._slots[self._turn]
            self._turn = (self._turn + 1) % len(self._slots)
            ended = step(slot, piece, at, small, bounced, deadline)
        for slot in self._in_turn():
            self._unpack(slot, deadline)
        assert ended is not None
        return ended

    def _up(
        self,
        slot: _Slot,
        rows: CopyRows,
        at: Numbers,
        small: bool,
        bounced: bool,
        deadline: float,
    ) -> Event:
        lanes = self._lanes
        sources = rows.sources
        if bounced:
            sources = self._host_of(slot).address + at
            self._wait_on_host(slot, deadline)
            lanes.copy_on_host(CopyRows(sources, rows.sources, rows.lengths, rows.owners))
        if not small:
            self._copy(merge(CopyRows(rows.targets, sources, rows.lengths, rows.owners)))
            slot.host_free = lanes.record(self._link)
            return slot.host_free
        staged = self._device_of(slot).address + at
        if slot.device_free is not None:
            lanes.wait(self._link, slot.device_free)
        self._copy(merge(CopyRows(staged, sources, rows.lengths, rows.owners)))
        slot.host_free = lanes.record(self._link)
        lanes.wait(self._gather, slot.host_free)
        scattered = CopyRows(rows.targets, staged, rows.lengths, rows.owners)
        lanes.kernel(self._gather, scattered, _FEEDING_PROGRAMS)
        slot.device_free = lanes.record(self._gather)
        return slot.device_free

    def _down(
        self,
        slot: _Slot,
        rows: CopyRows,
        at: Numbers,
        small: bool,
        bounced: bool,
        deadline: float,
    ) -> Event:
        lanes = self._lanes
        sources, targets = rows.sources, rows.targets
        if bounced:
            self._unpack(slot, deadline)
            targets = self._host_of(slot).address + at
        if small:
            staged = self._device_of(slot).address + at
            if slot.device_free is not None:
                lanes.wait(self._gather, slot.device_free)
            gathered = CopyRows(staged, sources, rows.lengths, rows.owners)
            lanes.kernel(self._gather, gathered, _FEEDING_PROGRAMS)
            lanes.wait(self._link, lanes.record(self._gather))
            sources = staged
        self._copy(merge(CopyRows(targets, sources, rows.lengths, rows.owners)))
        ended = lanes.record(self._link)
        if small:
            slot.device_free = ended
        if bounced:
            slot.host_free = ended
            slot.to_unpack = CopyRows(rows.targets, targets, rows.lengths, rows.owners)
        return ended

    def _unpack(self, slot: _Slot, deadline: float) -> None:
        """Copy the bytes that came into the slot's host buffer to their targets."""
        if slot.to_unpack is None:
            return
        self._wait_on_host(slot, deadline)
        rows, slot.to_unpack = slot.to_unpack, None
        self._lanes.copy_on_host(rows)

    def _copy(self, rows: CopyRows, path: Path | None = None) -> None:
        """Queue the rows for a copy engine."""
        path = direct(rows, self._lanes.able) if path is None else path
        queue = self._lanes.batch if path is Path.BATCH else self._lanes.single
        queue(self._link, rows)

    def _wait_on_host(self, slot: _Slot, deadline: float) -> None:
        if slot.host_free is not None and not until(slot.host_free.query, deadline):
            raise TransferTimeout("a staging buffer was still being copied at the deadline")

    def _host_of(self, slot: _Slot) -> Buffer:
        if slot.host is None:
            slot.host = self._lanes.host_buffer(self._staging_bytes)
        return slot.host

    def _device_of(self, slot: _Slot) -> Buffer:
        if slot.device is None:
            slot.device = self._lanes.device_buffer(self._staging_bytes, self._link)
            self._lanes.wait(self._gather, self._lanes.record(self._link))
        return slot.device

    def _in_turn(self) -> list[_Slot]:
        """The slots, oldest first."""
        return self._slots[self._turn :] + self._slots[: self._turn]


def until(happened: Callable[[], bool], deadline: float) -> bool:
    """Poll `happened()` until `deadline` (`time.monotonic()`), at least once; returns whether it
    was true."""
    nap_s = NAP_S_MIN
    while not happened():
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            return False
        time.sleep(min(nap_s, left_s))
        nap_s = min(2 * nap_s, NAP_S_MAX)
    return True


def _link_programs(rows: CopyRows) -> int:
    return link_programs(max(1, rows.nbytes // len(rows)))
