"""Which bytes here are which bytes there."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiffin.messenger.nixl.descriptors import chunks, runs_of, stream_of


def test_neighbours_are_one_run_and_empty_ones_none() -> None:
    runs = runs_of([(100, 0), (100, 10), (110, 5), (120, 1), (121, 0), (0, 100), (100, 1)])
    assert runs.tolist() == [[100, 15], [120, 1], [0, 101]]
    assert runs_of([]).shape == runs_of([(7, 0)]).shape == (0, 2)


def test_rows_are_cut_where_a_run_of_either_side_ends_and_at_chunks() -> None:
    near, far = runs_of([(1000, 6), (2000, 4)]), runs_of([(50, 3), (70, 7)])
    one, two = chunks(near, far, 8)
    assert (one.start, one.stop) == (0, 8)
    assert one.rows.tolist() == [[1000, 50, 3], [1003, 70, 3], [2000, 73, 2]]
    assert (two.start, two.stop, two.rows.tolist()) == (8, 10, [[2002, 75, 2]])


def test_nothing_is_no_chunk() -> None:
    assert list(chunks(stream_of(0), runs_of([]), 10)) == []


LENGTHS = st.lists(st.integers(0, 40), min_size=1, max_size=30)


@given(near=LENGTHS, far=LENGTHS, chunk_bytes=st.integers(1, 60), rows_max=st.integers(1, 5))
def test_every_byte_is_in_one_row(
    near: list[int], far: list[int], chunk_bytes: int, rows_max: int
) -> None:
    """Against the plain definition: the addresses of every byte, side by side."""
    total = min(sum(near), sum(far))
    sides = [_places(near, total, step=100), _places(far, total, step=1000)]
    expected = np.column_stack([_bytes_of(places) for places in sides])
    made = list(chunks(runs_of(sides[0]), runs_of(sides[1]), chunk_bytes, rows_max))
    found = [
        (here + at, there + at)
        for chunk in made
        for here, there, length in chunk.rows.tolist()
        for at in range(length)
    ]
    assert np.array_equal(np.array(found).reshape(-1, 2), expected)
    assert all(chunk.stop - chunk.start <= chunk_bytes for chunk in made)
    assert all(chunk.stop - chunk.start == chunk.rows[:, 2].sum() for chunk in made)
    assert all(1 <= len(chunk.rows) <= rows_max for chunk in made)
    assert all(one.stop == two.start for one, two in pairwise(made))


def _places(lengths: list[int], total: int, step: int) -> list[tuple[int, int]]:
    """Scattered places of these lengths, `total` bytes together."""
    places = []
    for index, length in enumerate(lengths):
        places.append((index * step, min(length, total)))
        total -= min(length, total)
    return places


def _bytes_of(places: list[tuple[int, int]]) -> np.ndarray:
    return np.array([at + i for at, length in places for i in range(length)], np.int64)


def test_a_transfer_of_many_rows_is_split() -> None:
    far = runs_of([(2 * at, 1) for at in range(3000)])
    assert [len(chunk.rows) for chunk in chunks(stream_of(3000), far, 1 << 20)] == [1024, 1024, 952]


def test_both_sides_have_as_many_bytes() -> None:
    with pytest.raises(AssertionError):
        list(chunks(stream_of(3), runs_of([(0, 4)]), 10))
