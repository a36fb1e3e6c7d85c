"""Cutting loses nothing, arrivals are told in order, paths are ranked."""

from __future__ import annotations

import threading
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiffin.messenger.link_health import LinkHealth
from tiffin.messenger.transfer_plan import InOrderArrivals, Slice, cut, order_paths, sliced, split
from tiffin.messenger.transport import NOTHING, Range, Served

if TYPE_CHECKING:
    import random

LENGTHS = st.lists(st.integers(0, 50), max_size=20)


def ranges_of(lengths: list[int]) -> list[Range]:
    return [Range(1000 * index, length) for index, length in enumerate(lengths)]


@given(LENGTHS, st.integers(1, 60))
def test_chunks_are_the_ranges_in_order(lengths: list[int], chunk_bytes: int) -> None:
    ranges = ranges_of(lengths)
    chunks = cut(ranges, chunk_bytes)
    slices = [one for chunk in chunks for one in chunk]
    for index, (_, length) in enumerate(ranges):
        mine = [one for one in slices if one.item == index]
        assert mine, "every range, also one of no bytes, has a slice"
        assert mine[0].start == 0
        assert mine[-1].stop == length
        assert all(a.stop == b.start for a, b in pairwise(mine))
    assert [one.item for one in slices] == sorted(one.item for one in slices)
    sizes = [sum(stop - start for _, start, stop in chunk) for chunk in chunks]
    assert all(size == chunk_bytes for size in sizes[:-1])
    assert sizes[-1] <= chunk_bytes


@given(LENGTHS, st.integers(1, 5))
def test_parts_are_few_and_not_small(lengths: list[int], parts_max: int) -> None:
    parts = split(ranges_of(lengths), parts_max, part_bytes_min=20)
    sizes = [sum(stop - start for _, start, stop in part) for part in parts]
    assert len(parts) <= parts_max
    assert sum(sizes) == sum(lengths)
    assert all(size >= 20 for size in sizes[:-1])


def test_slices_of_arrays() -> None:
    array = np.arange(10, dtype=np.uint8)
    ranges, arrays = sliced([Range(100, 10)], [array], [Slice(0, 3, 7)])
    assert ranges == [Range(103, 4)]
    assert arrays[0].tolist() == [3, 4, 5, 6]


@given(LENGTHS, st.integers(1, 60), st.randoms(use_true_random=False))
def test_arrivals_are_told_in_order(
    lengths: list[int], chunk_bytes: int, chance: random.Random
) -> None:
    """Whatever order the parts' slices come in, in any moment the leading ranges are known."""
    ranges = ranges_of(lengths)
    parts = cut(ranges, chunk_bytes)
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
    parts = cut(ranges, 8 * 1000)
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
    assert InOrderArrivals(ranges_of([5]), cut(ranges_of([5]), 3), None).served == NOTHING


def test_paths_by_predicted_time_and_health() -> None:
    shm, tcp, nixl = LinkHealth("shm"), LinkHealth("tcp"), LinkHealth("nixl")
    links = [tcp, shm, nixl]
    assert order_paths(links, 100, 0.0) == [1, 2, 0]  # latency decides
    assert order_paths(links, 1 << 30, 0.0) == [2, 1, 0]  # bandwidth decides
    nixl.failed(10.0)
    assert order_paths(links, 1 << 30, 10.05) == [1, 0, 2]
    shm.failed(10.0)
    shm.failed(10.0)
    tcp.failed(10.0)
    tcp.failed(10.0)
    tcp.failed(10.0)
    assert order_paths(links, 1 << 30, 10.05) == [2, 1, 0]  # all rest: who has rested most
    assert order_paths(links, 1 << 30, 99.0) == [2, 1, 0]


@pytest.mark.parametrize("count", [0, 1, 5])
def test_a_transfer_of_empty_ranges_is_one_chunk(count: int) -> None:
    assert cut([Range(0, 0)] * count, 10) == [[Slice(i, 0, 0) for i in range(count)]]
