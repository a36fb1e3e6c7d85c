"""Ranges of a grant, and where they lie in its arrays. No I/O happens here.

A grant is a list of arrays that its owner lets a peer read or write. Laid end to end, they are the
grant's address space, and a `Range` is a part of that. A peer names grants by number and never by
address, and this module checks every requested range against the arrays themselves: offsets and
lengths may be any 64-bit numbers, whose sum can overflow, so the code adds two only after it has
checked that each is small.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate, chain
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..errors import RangeError
from ..transport import NOTHING, Range, Served

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ..shm.host_copy import ByteArray

__all__ = [
    "NOTHING",
    "Range",
    "RangePiece",
    "Served",
    "lay_out",
    "pack_ranges",
    "unpack_ranges",
    "views_of",
]

# Up to so many ranges plain Python is faster than numpy, whose operations cost a microsecond each.
_FEW = 12


class RangePiece(NamedTuple):
    """Bytes [start, stop) of one array of a grant."""

    array: int
    start: int
    stop: int


def pack_ranges(ranges: Sequence[Range]) -> bytes:
    """Offset and length of each range as two u64, little-endian. Raises RangeError for numbers
    outside u64."""
    try:
        return np.fromiter(chain.from_iterable(ranges), "<u8", 2 * len(ranges)).tobytes()
    except (OverflowError, ValueError) as error:
        raise RangeError(f"offsets and lengths are numbers below 2**64: {error}") from error


def unpack_ranges(body: bytes | memoryview, at: int, count: int) -> NDArray[np.uint64]:
    """`count` ranges from byte `at` of `body`: [count, 2], offset and length."""
    return np.frombuffer(body, "<u8", 2 * count, at).reshape(count, 2)


def lay_out(ranges: NDArray[np.uint64], sizes: Sequence[int]) -> tuple[Served, list[RangePiece]]:
    """The leading ranges that lie wholly inside arrays of these sizes, and their pieces of the
    arrays.

    Pieces are in the order of the ranges; adjacent ones are joined, so that a contiguous read of
    many ranges is one piece. Ranges of zero bytes need an offset inside the grant's address space
    or at its end.
    """
    served, runs = (
        _few_runs(ranges, sum(sizes)) if len(ranges) <= _FEW else _runs(ranges, sum(sizes))
    )
    return served, _cut(runs, sizes)


def _few_runs(ranges: NDArray[np.uint64], total: int) -> tuple[Served, list[tuple[int, int]]]:
    runs: list[tuple[int, int]] = []
    count = nbytes = 0
    for offset, length in ranges.tolist():
        if offset + length > total:  # Python's integers: no overflow
            break
        count += 1
        nbytes += length
        if runs and runs[-1][1] == offset:
            runs[-1] = (runs[-1][0], offset + length)
        elif length:
            runs.append((offset, offset + length))
    return Served(count, nbytes), runs


def _runs(ranges: NDArray[np.uint64], total: int) -> tuple[Served, list[tuple[int, int]]]:
    bound = np.uint64(total)
    lengths = np.minimum(ranges[:, 1], bound)
    inside = (ranges[:, 1] <= bound) & (ranges[:, 0] <= bound - lengths)
    count = len(ranges) if inside.all() else int(inside.argmin())
    # From here on each number is at most `total`, and there are at most 2**16: int64 is enough.
    offsets = ranges[:count, 0].astype(np.int64)
    lengths = lengths[:count].astype(np.int64)
    served = Served(count, int(lengths.sum()))
    offsets, lengths = offsets[lengths > 0], lengths[lengths > 0]
    if not len(offsets):
        return served, []
    ends = offsets + lengths
    breaks = np.flatnonzero(offsets[1:] != ends[:-1])
    starts = offsets[np.concatenate(([0], breaks + 1))].tolist()
    stops = ends[np.concatenate((breaks, [len(ends) - 1]))].tolist()
    return served, list(zip(starts, stops, strict=True))


def _cut(runs: list[tuple[int, int]], sizes: Sequence[int]) -> list[RangePiece]:
    """The runs as pieces, split where one array ends and the next begins."""
    ends = list(accumulate(sizes))
    pieces = []
    for start, stop in runs:
        array = bisect_right(ends, start)
        while start < stop:
            base = ends[array] - sizes[array]
            piece_stop = min(stop, ends[array])
            if piece_stop > start:
                pieces.append(RangePiece(array, start - base, piece_stop - base))
            start = piece_stop
            array += 1
    return pieces


def views_of(
    ranges: Sequence[Range], arrays: Sequence[ByteArray], *, writable: bool
) -> list[memoryview]:
    """Views of the arrays' bytes. Raises RangeError for an array that does not fit its range."""
    if len(ranges) != len(arrays):
        raise RangeError(f"{len(ranges)} ranges for {len(arrays)} arrays")
    views = [array.data for array in arrays]
    for (offset, length), view in zip(ranges, views, strict=True):
        if offset < 0 or offset >> 64:
            raise RangeError(f"an offset of {offset}; offsets are numbers below 2**64")
        if view.nbytes != length or view.format != "B" or view.ndim != 1 or not view.c_contiguous:
            raise RangeError(
                f"a range of {length} bytes needs a contiguous uint8 array of as many, "
                f"not one of shape {view.shape} and format {view.format!r}"
            )
        if writable and view.readonly:
            raise RangeError("a target that is read-only; pass memory that can be written")
    return views
