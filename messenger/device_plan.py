"""How ranges get to a GPU and back: which of five paths, in which pieces. No I/O happens here.

All is decided from addresses, lengths and what the machine can do, by NumPy over the whole batch:
there is no Python step per range. The arithmetic behind the constants is in docs/device-copies.md.

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

from .errors import RangeError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    Numbers = NDArray[np.int64]

# Below this a copy engine moves ranges slower than a kernel does. Published for LMCache on an H200
# with PCIe Gen5 (its direct path): it wins above about 34 KB per entry, is two times slower at
# 16 KB and seven to eight times at 4 KB. Not measured by us.
SMALL_BYTES = 32 << 10
# From here on a copy of its own per range costs nothing: at 55 GB/s it moves for 19 us, and
# queueing it takes the host about 2 (an estimate; NVIDIA's engines start the next in less).
LARGE_BYTES = 1 << 20
# So few copies are queued sooner than a kernel is launched with its table (some 30 us, estimated).
FEW_RANGES = 16


class Direction(Enum):
    """Seen from the device."""

    TO_DEVICE = "to_device"
    FROM_DEVICE = "from_device"
    WITHIN = "within"


class Path(StrEnum):
    """See the module's table."""

    SINGLE = "single"
    BATCH = "batch"
    KERNEL = "kernel"
    STAGED = "staged"
    BOUNCED = "bounced"


@dataclass(frozen=True, slots=True)
class Able:
    """What the machine can do."""

    batches: bool  # cudaMemcpyBatchAsync
    kernels: bool  # Triton


@dataclass(frozen=True, slots=True)
class Rows:
    """Ranges as addresses: int64 [n] each.

    `owners` says which pair of allocations a range lies in: a copy must not cross from one
    allocation into the next, also where their addresses happen to touch.
    """

    targets: Numbers
    sources: Numbers
    lengths: Numbers
    owners: Numbers

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def nbytes(self) -> int:
        """All bytes to be moved."""
        return int(self.lengths.sum())

    def take(self, which: slice | Numbers) -> Rows:
        """Some of them."""
        columns = (self.targets, self.sources, self.lengths, self.owners)
        return Rows(*(column[which] for column in columns))


@dataclass(frozen=True, slots=True)
class Group:
    """What one event stands for: joined ranges and the path they take."""

    rows: Rows
    path: Path


def join(rows: Rows, direction: Direction) -> Rows:
    """In the order of the host's addresses, neighbours joined, ranges of no bytes left out."""
    host = _host_side(rows, direction)
    order = np.flatnonzero(rows.lengths)
    return merge(rows.take(order[np.argsort(host[order], kind="stable")]))


def merge(rows: Rows) -> Rows:
    """Each with its neighbour, where both its ends continue in the next; the order stays."""
    if len(rows) < 2:
        return rows
    breaks = _breaks(rows.targets, rows) | _breaks(rows.sources, rows)
    firsts = np.flatnonzero(np.concatenate(([True], breaks)))
    lengths = np.add.reduceat(rows.lengths, firsts)
    return Rows(rows.targets[firsts], rows.sources[firsts], lengths, rows.owners[firsts])


def concatenate(several: Sequence[Rows]) -> Rows:
    """All of them, one after the other."""
    if not several:
        empty = np.empty(0, np.int64)
        return Rows(empty, empty, empty, empty)
    return Rows(
        np.concatenate([rows.targets for rows in several]),
        np.concatenate([rows.sources for rows in several]),
        np.concatenate([rows.lengths for rows in several]),
        np.concatenate([rows.owners for rows in several]),
    )


def check_disjoint(rows: Rows) -> None:
    """Raises RangeError when two targets overlap, or a target and a source.

    The order in which ranges are copied is ours to choose, so such copies have no one result.
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


def choose(rows: Rows, direction: Direction, able: Able, *, pinned: bool, reachable: bool) -> Path:
    """The path of one group of joined ranges.

    `pinned` is about the host's side, and `reachable` says whether a kernel may use its addresses.
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


def is_small(rows: Rows) -> bool:
    """Whether these ranges are for a kernel rather than for a copy engine."""
    return len(rows) > FEW_RANGES and rows.nbytes < len(rows) * SMALL_BYTES


def direct(rows: Rows, able: Able) -> Path:
    """How a copy engine gets them: SINGLE or BATCH."""
    if len(rows) <= FEW_RANGES or rows.nbytes >= len(rows) * LARGE_BYTES or not able.batches:
        return Path.SINGLE
    return Path.BATCH


def pieces(rows: Rows, piece_bytes: int) -> Iterator[tuple[Rows, Numbers]]:
    """Rows in pieces of `piece_bytes` (the last may be shorter), for a buffer of that size.

    With each piece: where in the buffer each of its rows lies, int64 [n]. Rows are cut where pieces
    begin. Only the cut at hand is made, not the pieces that come later.
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
            Rows(part.targets + skipped, part.sources + skipped, lengths, part.owners),
            np.maximum(begins - start, 0),
        )


def _host_side(rows: Rows, direction: Direction) -> Numbers:
    return rows.sources if direction is Direction.TO_DEVICE else rows.targets


def _breaks(starts: Numbers, rows: Rows) -> NDArray[np.bool_]:
    """[n - 1]: whether the next range does not go on where this one ends."""
    elsewhere = np.not_equal(starts[1:], starts[:-1] + rows.lengths[:-1])
    broken: NDArray[np.bool_] = elsewhere | (rows.owners[1:] != rows.owners[:-1])
    return broken
