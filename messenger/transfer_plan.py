"""Splitting a transfer into parts that move in parallel over several streams. No I/O happens here.

The list of ranges is split, in order, at equal numbers of bytes, and so perhaps within a range; a
range has arrived when its last slice has, and the ranges reported to the caller are always a
leading part of the list, in whatever order the slices arrive.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, NamedTuple

from .transport import Served

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .transport import Arrived, Range

# Below this a second stream costs more (a thread to wake, 50 to 100 us, and a round trip) than
# splitting the 3 ms that 8 MiB take at 3 GB/s saves.
PART_BYTES_MIN = 8 << 20


class Slice(NamedTuple):
    """Bytes [start, stop) of one range; `item` is the range's index in the list of ranges."""

    item: int
    start: int
    stop: int


def split(
    ranges: Sequence[Range], parts_max: int, part_bytes_min: int = PART_BYTES_MIN
) -> list[list[Slice]]:
    """The ranges in order, in up to `parts_max` lists of equal bytes, none but the last below the
    minimum."""
    total_bytes = sum(length for _, length in ranges)
    part_bytes = max(part_bytes_min, -(-total_bytes // parts_max))
    parts: list[list[Slice]] = [[]]
    room = part_bytes
    for index, (_, length) in enumerate(ranges):
        start = 0
        while True:
            stop = min(length, start + room)
            if stop > start or not length:
                parts[-1].append(Slice(index, start, stop))
            room -= stop - start
            start = stop
            if start == length:
                break
            parts.append([])
            room = part_bytes
    return parts


class InOrderArrivals:
    """Collects the arrivals of slices that several threads see out of order, and reports whole
    ranges in order through the callback `arrived`. Thread-safe.

    Arrivals of a later part are kept until all earlier parts are complete.
    """

    def __init__(
        self, ranges: Sequence[Range], parts: Sequence[Sequence[Slice]], arrived: Arrived | None
    ) -> None:
        self._ranges = ranges
        self._parts = parts
        self._arrived = arrived
        self._lock = threading.Lock()
        self._marked = [0] * len(parts)  # leading slices of each part that have arrived
        self._part = 0  # the next slice to report: slice `_at` of this part
        self._at = 0
        self._served = Served(0, 0)

    @property
    def served(self) -> Served:
        """The leading ranges that have arrived completely."""
        return self._served

    def mark(self, part: int, count: int = 1) -> None:
        """`count` more slices of a part have arrived."""
        with self._lock:
            self._marked[part] += count
            while self._part < len(self._parts):
                if self._at == len(self._parts[self._part]):
                    self._part, self._at = self._part + 1, 0
                elif self._at < self._marked[self._part]:
                    self._tell(self._parts[self._part][self._at])
                    self._at += 1
                else:
                    return

    def _tell(self, one: Slice) -> None:
        length = self._ranges[one.item].length
        if one.stop < length:
            return
        self._served = Served(one.item + 1, self._served.nbytes + length)
        if self._arrived is not None:
            self._arrived(one.item)
