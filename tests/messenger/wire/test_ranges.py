"""Which bytes of a grant a list of ranges means, whatever numbers a peer sends."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiffin.messenger.errors import RangeError
from tiffin.messenger.transport import Range, Served
from tiffin.messenger.wire.ranges import RangePiece, lay_out, pack_ranges, unpack_ranges

U64 = 2**64 - 1
SIZES = st.lists(st.integers(0, 40), max_size=6)
# Small numbers hit every boundary; large ones every overflow.
NUMBERS = st.integers(0, 70) | st.sampled_from([2**31, 2**32, 2**63 - 1, 2**63, U64 - 7, U64])
RANGES = st.lists(st.tuples(NUMBERS, NUMBERS).map(lambda pair: Range(*pair)), max_size=40)


def laid_out(ranges: list[Range], sizes: list[int]) -> tuple[Served, list[RangePiece]]:
    return lay_out(unpack_ranges(pack_ranges(ranges), 0, len(ranges)), sizes)


def space(sizes: list[int]) -> list[tuple[int, int]]:
    """Every byte of the address space, as (array, index)."""
    return [(array, index) for array, size in enumerate(sizes) for index in range(size)]


@given(RANGES, SIZES)
def test_pieces_are_the_bytes_of_the_leading_ranges_inside(
    ranges: list[Range], sizes: list[int]
) -> None:
    served, pieces = laid_out(ranges, sizes)
    total = sum(sizes)
    inside = [offset + length <= total for offset, length in ranges]
    count = inside.index(False) if False in inside else len(ranges)
    assert served == Served(count, sum(length for _, length in ranges[:count]))
    expected = [
        byte for offset, length in ranges[:count] for byte in space(sizes)[offset : offset + length]
    ]
    assert [(a, i) for a, start, stop in pieces for i in range(start, stop)] == expected
    assert all(start < stop for _, start, stop in pieces)


def test_neighbours_are_one_piece() -> None:
    ranges = [Range(at, 16) for at in range(0, 1600, 16)]
    assert laid_out(ranges, [2000])[1] == [RangePiece(0, 0, 1600)]
    assert laid_out(ranges, [1000, 1000])[1] == [RangePiece(0, 0, 1000), RangePiece(1, 0, 600)]
    assert laid_out(ranges[:5], [2000])[1] == [RangePiece(0, 0, 80)]


@pytest.mark.parametrize("wrong", [Range(-1, 0), Range(0, -1), Range(2**64, 0), Range(0, 2**64)])
@pytest.mark.parametrize("count", [1, 50])
def test_numbers_that_are_not_u64_are_refused(wrong: Range, count: int) -> None:
    with pytest.raises(RangeError):
        pack_ranges([Range(0, 0)] * (count - 1) + [wrong])


def test_packing_is_two_little_endian_numbers() -> None:
    assert pack_ranges([Range(1, 2), Range(U64, 3)]).hex() == (
        "01000000000000000200000000000000ffffffffffffffff0300000000000000"
    )
    assert np.array_equal(unpack_ranges(pack_ranges([Range(1, 2)]), 0, 1), [[1, 2]])
