"""Splitting loses no byte, and arrivals are reported in order."""

from __future__ import annotations

import threading
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiffin.messenger.transfer_plan import InOrderArrivals, Slice, split
from tiffin.messenger.transport import NOTHING, Range, Served

if TYPE_CHECKING:
    import random

LENGTHS = st.lists(st.integers(0, 50), max_size=20)


def ranges_of(lengths: list[int]) -> list[Range]:
    return [Range(1000 * index, length) for index, length in enumerate(lengths)]


def parts_of(lengths: list[int], part_bytes: int) -> list[list[Slice]]:
    """As many parts as it takes, of so many bytes each."""
    return split(ranges_of(lengths), sum(lengths) + 1, part_bytes)


@given(LENGTHS, st.integers(1, 60))
def test_parts_are_the_ranges_in_order(lengths: list[int], part_bytes: int) -> None:
    parts = parts_of(lengths, part_bytes)
    slices = [one for part in parts for one in part]
    for index, length in enumerate(lengths):
        mine = [one for one in slices if one.item == index]
        assert mine, "every range, also one of no bytes, has a slice"
        assert mine[0].start == 0
        assert mine[-1].stop == length
        assert all(a.stop == b.start for a, b in pairwise(mine))
    assert [one.item for one in slices] == sorted(one.item for one in slices)
    sizes = [sum(stop - start for _, start, stop in part) for part in parts]
    assert all(size == part_bytes for size in sizes[:-1])
    assert sizes[-1] <= part_bytes


@given(LENGTHS, st.integers(1, 5))
def test_parts_are_few_and_not_small(lengths: list[int], parts_max: int) -> None:
    parts = split(ranges_of(lengths), parts_max, part_bytes_min=20)
    sizes = [sum(stop - start for _, start, stop in part) for part in parts]
    assert len(parts) <= parts_max
    assert sum(sizes) == sum(lengths)
    assert all(size >= 20 for size in sizes[:-1])


@given(LENGTHS, st.integers(1, 60), st.randoms(use_true_random=False))
def test_arrivals_are_told_in_order(
    lengths: list[int], part_bytes: int, chance: random.Random
) -> None:
    """In whatever order slices arrive, exactly the complete leading ranges have been reported."""
    ranges = ranges_of(lengths)
    parts = parts_of(lengths, part_bytes)
    told: list[int] = []
    order = InOrderArrivals(ranges, parts, told.append)
    come = [0] * len(parts)
    waiting = [part for part, slices in enumerate(parts) for _ in slices]
    chance.shuffle(waiting)
    for part in waiting:
        come[part] += 1
        order.mark(part)
        here = {one for p, n in enumerate(come) for one in parts[p][:n]}
        missing = [one.item for slices in parts for one in slices if one not in here]
        count = min(missing, default=len(ranges))
        assert told == list(range(count))
        assert order.served == Served(count, sum(lengths[:count]))
    assert len(told) == len(ranges)


def test_arrivals_from_threads() -> None:
    ranges = ranges_of([8] * 3000)
    parts = parts_of([8] * 3000, 8 * 1000)
    told: list[int] = []
    order = InOrderArrivals(ranges, parts, told.append)

    def work(part: int) -> None:
        for _ in parts[part]:
            order.mark(part)

    threads = [threading.Thread(target=work, args=(part,)) for part in (2, 1, 0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert told == list(range(3000))


def test_nothing_has_arrived_at_first() -> None:
    assert InOrderArrivals(ranges_of([5]), parts_of([5], 3), None).served == NOTHING


@pytest.mark.parametrize("count", [0, 1, 5])
def test_a_transfer_of_empty_ranges_is_one_part(count: int) -> None:
    assert split([Range(0, 0)] * count, 3, 10) == [[Slice(i, 0, 0) for i in range(count)]]
