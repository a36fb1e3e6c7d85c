"""Ranges of a grant, and where they lie in its arrays. No I/O happens here.

A grant is a list of arrays that its owner lets a peer read or write. Laid end to end, they are the
grant's address space, and a `Range` is a part of that. A peer names grants by number and never by
address, and every range it asks for is checked here against the arrays themselves: offsets and
lengths are any 64-bit numbers, so that the sums of two of them do not fit and are not formed before
each is known to be small.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate, chain
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from .errors import RangeError
from .transport import NOTHING, Range, Served

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

__all__ = ["NOTHING", "Piece", "Range", "Served", "lay_out", "pack_ranges", "unpack_ranges"]

# Up to here plain Python is faster than numpy, whose operations cost a microsecond each.
_FEW = 12


class Piece(NamedTuple):
    """Bytes [start, stop) of one array of a grant."""

    array: int
    start: int
    stop: int


def pack_ranges(ranges: Sequence[Range]) -> bytes:
    """Offset and length of each as two u64, little-endian. Raises RangeError outside those."""
    try:
        return np.fromiter(chain.from_iterable(ranges), "<u8", 2 * len(ranges)).tobytes()
    except (OverflowError, ValueError) as error:
        raise RangeError(f"offsets and lengths are numbers below 2**64: {error}") from error


def unpack_ranges(body: bytes | memoryview, at: int, count: int) -> NDArray[np.uint64]:
    """`count` ranges from byte `at` of `body`: [count, 2], offset and length."""
    return np.frombuffer(body, "<u8", 2 * count, at).reshape(count, 2)


def lay_out(ranges: NDArray[np.uint64], sizes: Sequence[int]) -> tuple[Served, list[Piece]]:
    """The leading ranges that lie wholly inside arrays of these sizes, and which bytes they are.

    Pieces are in the order of the ranges; neighbours are joined, so that a contiguous read of many
    ranges is one piece. Ranges of no bytes need an offset inside the space or at its end.
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
    # From here on everything is at most `total`, and at most 2**16 of it: int64 is enough.
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


def _cut(runs: list[tuple[int, int]], sizes: Sequence[int]) -> list[Piece]:
    """Each run, cut where one array ends and the next begins."""
    ends = list(accumulate(sizes))
    pieces = []
    for start, stop in runs:
        array = bisect_right(ends, start)
        while start < stop:
            base = ends[array] - sizes[array]
            piece_stop = min(stop, ends[array])
            if piece_stop > start:
                pieces.append(Piece(array, start - base, piece_stop - base))
            start = piece_stop
            array += 1
    return pieces
