"""Which bytes of a read are which bytes of the peer's memory."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from tiffin.messenger.nixl.descriptors import chunks, runs_of


def test_neighbours_are_one_run_and_empty_ones_none() -> None:
    runs = runs_of([(100, 0), (100, 10), (110, 5), (120, 1), (121, 0), (0, 100), (100, 1)])
    assert runs.tolist() == [[100, 15], [120, 1], [0, 101]]
    assert runs_of([]).shape == runs_of([(7, 0)]).shape == (0, 2)


def test_rows_are_cut_where_a_run_ends_and_at_chunks() -> None:
    one, two = chunks(runs_of([(50, 3), (70, 7)]), 8)
    assert (one.start, one.stop) == (0, 8)
    assert one.rows.tolist() == [[0, 50, 3], [3, 70, 5]]
    assert (two.start, two.stop, two.rows.tolist()) == (8, 10, [[8, 75, 2]])


def test_nothing_is_no_chunk() -> None:
    assert list(chunks(runs_of([]), 10)) == []


@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=30),
    chunk_bytes=st.integers(1, 60),
    rows_max=st.integers(1, 5),
)
def test_every_byte_is_in_one_row(lengths: list[int], chunk_bytes: int, rows_max: int) -> None:
    """Against the plain definition: each byte's position and its address."""
    places = [(1000 * index, length) for index, length in enumerate(lengths)]
    addresses = [at + i for at, length in places for i in range(length)]
    made = list(chunks(runs_of(places), chunk_bytes, rows_max))
    found = [
        (here + at, there + at)
        for chunk in made
        for here, there, length in chunk.rows.tolist()
        for at in range(length)
    ]
    assert found == list(enumerate(addresses))
    assert all(chunk.stop - chunk.start <= chunk_bytes for chunk in made)
    assert all(chunk.stop - chunk.start == chunk.rows[:, 2].sum() for chunk in made)
    assert all(1 <= len(chunk.rows) <= rows_max for chunk in made)
    assert all(one.stop == two.start for one, two in pairwise(made))


def test_a_transfer_of_many_rows_is_split() -> None:
    far = runs_of([(2 * at, 1) for at in range(3000)])
    assert [len(chunk.rows) for chunk in chunks(far, 1 << 20)] == [1024, 1024, 952]
