"""Planning of copies to and from a GPU: which of five paths, in which pieces. No I/O happens here.

The plan depends on addresses, lengths and the machine's capabilities; NumPy computes it over the
whole batch, without a Python step per range. For the arithmetic of the constants see
docs/device-copies.md.

    single   one asynchronous copy per range         few ranges, or each is large
    batch    one call for all, by the copy engine    many ranges of middle size
    kernel   one launch; host memory where it lies   many small ranges, both sides scattered
    staged   kernel <-> device buffer <-> one copy   many small ranges, the host's side in one piece
    bounced  through pinned buffers                  host memory that is not pinned
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import TYPE_CHECKING

import numpy as np

from ..errors import RangeError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    Numbers = NDArray[np.int64]

# Below this a copy engine moves ranges slower than a kernel does. Published for LMCache on an H200
# with PCIe Gen5 (its direct path): the copy engine wins above about 34 KB per entry, is two times
# slower at 16 KB and seven to eight times at 4 KB. Not measured for Tiffin.
SMALL_BYTES = 32 << 10
# From this size on a separate copy per range costs nothing: at 55 GB/s it moves for 19 us, and
# queueing it takes the host about 2 (an estimate; NVIDIA's engines start the next in less).
LARGE_BYTES = 1 << 20
# Queueing so few copies takes less time than launching a kernel with its table (some 30 us,
# estimated).
FEW_RANGES = 16


class Direction(Enum):
    """The direction of a copy, as seen from the device."""

    TO_DEVICE = "to_device"
    FROM_DEVICE = "from_device"
    WITHIN = "within"


class Path(StrEnum):
    """The path of a copy; see the module's table."""

    SINGLE = "single"
    BATCH = "batch"
    KERNEL = "kernel"
    STAGED = "staged"
    BOUNCED = "bounced"


@dataclass(frozen=True, slots=True)
class Able:
    """The capabilities of the machine."""

    batches: bool  # cuMemcpyBatchAsync
    kernels: bool  # Triton


@dataclass(frozen=True, slots=True)
class CopyRows:
    """Ranges as addresses: int64 [n] each.

    `owners` is the number of the pair of allocations in which a range lies: a copy must not cross
    from one allocation into the next, even where their addresses happen to be adjacent.
    """

    targets: Numbers
    sources: Numbers
    lengths: Numbers
    owners: Numbers

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def nbytes(self) -> int:
        """The number of bytes to move."""
        return int(self.lengths.sum())

    def take(self, which: slice | Numbers) -> CopyRows:
        """The rows of a slice or of these indices."""
        columns = (self.targets, self.sources, self.lengths, self.owners)
        return CopyRows(*(column[which] for column in columns))


@dataclass(frozen=True, slots=True)
class Group:
    """Joined ranges with one path, and one event at their end."""

    rows: CopyRows
    path: Path


def join(rows: CopyRows, direction: Direction) -> CopyRows:
    """Sort by the host's addresses, join adjacent ranges, and drop ranges of zero bytes."""
    host = _host_side(rows, direction)
    order = np.flatnonzero(rows.lengths)
    return merge(rows.take(order[np.argsort(host[order], kind="stable")]))


def merge(rows: CopyRows) -> CopyRows:
    """Join each range with the next one, where source and target both continue in it; keeps the
    order."""
    if len(rows) < 2:
        return rows
    breaks = _breaks(rows.targets, rows) | _breaks(rows.sources, rows)
    firsts = np.flatnonzero(np.concatenate(([True], breaks)))
    lengths = np.add.reduceat(rows.lengths, firsts)
    return CopyRows(rows.targets[firsts], rows.sources[firsts], lengths, rows.owners[firsts])


def concatenate(several: Sequence[CopyRows]) -> CopyRows:
    """The rows of all batches, one after the other."""
    if not several:
        empty = np.empty(0, np.int64)
        return CopyRows(empty, empty, empty, empty)
    return CopyRows(
        np.concatenate([rows.targets for rows in several]),
        np.concatenate([rows.sources for rows in several]),
        np.concatenate([rows.lengths for rows in several]),
        np.concatenate([rows.owners for rows in several]),
    )


def check_disjoint(rows: CopyRows) -> None:
    """Raise RangeError when two targets overlap, or a target and a source.

    The order in which ranges are copied is undefined, so the result of such copies would be too.
    """
    if not len(rows):
        return
    order = np.argsort(rows.targets, kind="stable")
    starts = rows.targets[order]
    stops = starts + rows.lengths[order]
    if (starts[1:] < stops[:-1]).any():
        raise RangeError("two ranges of one submit have overlapping targets")
    # Targets are disjoint now, so the last one that starts before a source's end decides.
    before = np.searchsorted(starts, rows.sources + rows.lengths, "left") - 1
    if ((before >= 0) & (stops[before] > rows.sources)).any():
        raise RangeError("a target overlaps a source of the same submit")


def choose(
    rows: CopyRows, direction: Direction, able: Able, *, pinned: bool, reachable: bool
) -> Path:
    """The path of one group of joined ranges.

    `pinned`: the host's side is pinned memory; `reachable`: a kernel may use its addresses.
    """
    if direction is Direction.WITHIN:
        large = len(rows) <= FEW_RANGES or rows.nbytes >= len(rows) * LARGE_BYTES
        return Path.KERNEL if able.kernels and not large else direct(rows, able)
    if not pinned:
        return Path.BOUNCED
    if not is_small(rows) or not able.kernels:
        return direct(rows, able)
    runs = 1 + int(_breaks(_host_side(rows, direction), rows).sum())
    if rows.nbytes >= runs * SMALL_BYTES:
        return Path.STAGED
    return Path.KERNEL if reachable else direct(rows, able)


def is_small(rows: CopyRows) -> bool:
    """Whether a kernel moves these ranges faster than a copy engine."""
    return len(rows) > FEW_RANGES and rows.nbytes < len(rows) * SMALL_BYTES


def direct(rows: CopyRows, able: Able) -> Path:
    """The copy engine's path for these ranges: SINGLE or BATCH."""
    if len(rows) <= FEW_RANGES or rows.nbytes >= len(rows) * LARGE_BYTES or not able.batches:
        return Path.SINGLE
    return Path.BATCH


def pieces(rows: CopyRows, piece_bytes: int) -> Iterator[tuple[CopyRows, Numbers]]:
    """Split rows into pieces of `piece_bytes` (the last may be shorter), for a buffer of that size.

    With each piece: the offset of each of its rows in the buffer, int64 [n]. Rows are split where
    pieces begin. A generator: each piece is made only when it is needed.
    """
    stops = np.cumsum(rows.lengths)
    total = int(stops[-1]) if len(rows) else 0
    for start in range(0, total, piece_bytes):
        stop = min(total, start + piece_bytes)
        first = int(np.searchsorted(stops, start, "right"))
        last = int(np.searchsorted(stops, stop, "left"))
        part = rows.take(slice(first, last + 1))
        begins = stops[first : last + 1] - part.lengths
        skipped = np.maximum(start - begins, 0)
        lengths = np.minimum(stops[first : last + 1], stop) - begins - skipped
        yield (
            CopyRows(part.targets + skipped, part.sources + skipped, lengths, part.owners),
            np.maximum(begins - start, 0),
        )


def _host_side(rows: CopyRows, direction: Direction) -> Numbers:
    return rows.sources if direction is Direction.TO_DEVICE else rows.targets


def _breaks(starts: Numbers, rows: CopyRows) -> NDArray[np.bool_]:
    """[n - 1]: whether the next range does not begin where this one ends."""
    elsewhere = np.not_equal(starts[1:], starts[:-1] + rows.lengths[:-1])
    broken: NDArray[np.bool_] = elsewhere | (rows.owners[1:] != rows.owners[:-1])
    return broken
