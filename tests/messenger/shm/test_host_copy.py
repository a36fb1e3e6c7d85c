"""Copies: whole or not at all; hashes equal the plain XXH3-64 however they were split."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import xxhash

from tiffin.kernels.checksum import page_hash
from tiffin.messenger.errors import RangeError
from tiffin.messenger.shm import host_copy
from tiffin.messenger.shm.host_copy import (
    PIECE_BYTES,
    XXH3_64,
    XXH3_64_PAGES,
    byte_view,
    copy,
    hash_segments,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from tiffin.messenger.shm.host_copy import Algorithm


def copy_segments_hashed(target: Any, source: Any, *how: Any, **options: Any) -> Any:
    """Of one block."""
    return host_copy.copy_blocks_hashed([target], [source], *how, **options)[0]


def _random(nbytes: int, seed: int = 1) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


@pytest.mark.parametrize("algorithm", [XXH3_64, XXH3_64_PAGES])
@pytest.mark.parametrize("nbytes", [0, 1, 4096, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES - 7])
@pytest.mark.parametrize("piece_bytes", [1000, PIECE_BYTES])
def test_a_segment_is_copied_and_hashed_however_it_is_cut(
    algorithm: Algorithm, nbytes: int, piece_bytes: int
) -> None:
    source, target, whole = _random(nbytes), np.zeros(nbytes, np.uint8), [(0, nbytes)]
    checksums = {
        XXH3_64: xxhash.xxh3_64_intdigest(source.tobytes()),
        XXH3_64_PAGES: page_hash.checksum(source),
    }
    found = copy_segments_hashed(target, source, whole, algorithm, piece_bytes=piece_bytes)
    assert np.array_equal(target, source)
    assert found.tolist() == hash_segments(source, whole, algorithm).tolist()
    assert found.tolist() == [checksums[algorithm]]
    assert checksums[XXH3_64] != checksums[XXH3_64_PAGES]


def test_segments() -> None:
    source, target = _random(3 * PIECE_BYTES), np.zeros(3 * PIECE_BYTES, np.uint8)
    segments = [(0, 10), (10, 2 * PIECE_BYTES), (2 * PIECE_BYTES + 20, 100), (7, 0)]
    checksums = copy_segments_hashed(target, source, segments)
    assert checksums.dtype == np.uint64
    expected = [xxhash.xxh3_64_intdigest(source[o : o + n].tobytes()) for o, n in segments]
    assert checksums.tolist() == expected == hash_segments(target, segments).tolist()
    gap = slice(2 * PIECE_BYTES + 10, 2 * PIECE_BYTES + 20)
    assert not target[gap].any()
    assert copy_segments_hashed(target, source, []).tolist() == []


@pytest.mark.parametrize("algorithm", [XXH3_64, XXH3_64_PAGES])
@pytest.mark.parametrize("block_bytes", [5000, host_copy.SHARED_BYTES_MIN // 4])
def test_blocks_of_one_layout_in_one_call(algorithm: Algorithm, block_bytes: int) -> None:
    """Neighbours are copied at once, and large calls shared with the helper thread."""
    sources = [_random(block_bytes, seed) for seed in range(5)]
    targets = [np.zeros(block_bytes, np.uint8) for _ in sources]
    segments = [(0, 1000), (1000, 0), (1000, 2000), (3100, block_bytes - 3100), (10, 20)]
    found = host_copy.copy_blocks_hashed(targets, sources, segments, algorithm)
    assert (found.dtype, found.shape) == (np.uint64, (5, 5))
    assert found.tolist() == host_copy.hash_blocks(sources, segments, algorithm).tolist()
    for target, source, row in zip(targets, sources, found, strict=True):
        assert row.tolist() == [
            host_copy.HASHES[algorithm](source[o : o + n].data) for o, n in segments
        ]
        assert np.array_equal(target[:3000], source[:3000])
        assert not target[3000:3100].any()
        assert np.array_equal(target[3100:], source[3100:])
    assert host_copy.hash_blocks([], segments).size == 0
    with pytest.raises(RangeError):
        host_copy.hash_blocks([sources[0], sources[1][:4000]], segments, algorithm)
    with pytest.raises(RangeError):
        host_copy.copy_blocks_hashed(targets, [*sources[:4], sources[4][:-1]], segments)


@pytest.mark.parametrize("nbytes", [3 * PIECE_BYTES, 10 * PIECE_BYTES])
def test_segments_of_pages(nbytes: int) -> None:
    """Small ones, and ones so large that plain segments would be shared with the helper thread."""
    source, target = _random(nbytes), np.zeros(nbytes, np.uint8)
    segments = [(0, 10), (10, 2 * PIECE_BYTES), (2 * PIECE_BYTES + 20, 100), (7, 0)]
    if nbytes > host_copy.SHARED_BYTES_MIN:
        segments += [(3 * PIECE_BYTES, 5 * PIECE_BYTES + 3), (9 * PIECE_BYTES, PIECE_BYTES)]
    expected = page_hash.checksums(source, segments)
    found = copy_segments_hashed(target, source, segments, XXH3_64_PAGES)
    assert (found.dtype, found.tolist()) == (np.uint64, expected.tolist())
    assert hash_segments(target, segments, XXH3_64_PAGES).tolist() == expected.tolist()
    assert not target[2 * PIECE_BYTES + 10 : 2 * PIECE_BYTES + 20].any()


@pytest.mark.parametrize("segment", [(-1, 5), (96, 5), (0, 101), (50, -1)])
def test_segments_outside_copy_nothing(segment: tuple[int, int]) -> None:
    target = np.zeros(100, np.uint8)
    with pytest.raises(RangeError):
        copy_segments_hashed(target, _random(100), [(0, 50), segment])
    assert not target.any()
    with pytest.raises(RangeError):
        hash_segments(target, [segment])


@pytest.mark.parametrize("nbytes", [0, 1, 99, 101])
def test_lengths_must_agree(nbytes: int) -> None:
    """One byte would broadcast over the target if NumPy were asked."""
    target, source = np.zeros(100, np.uint8), _random(nbytes)
    with pytest.raises(RangeError):
        copy(target, source)
    with pytest.raises(RangeError):
        copy_segments_hashed(target, source, [])
    assert not target.any()


def test_byte_view_of_everything() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    array = np.arange(6, dtype=ml_dtypes.bfloat16).reshape(2, 3)
    view = byte_view(array)
    assert view.shape == (12,)
    view[:] = 0
    assert (array == 0).all()
    assert byte_view(b"abc").tolist() == [97, 98, 99]
    assert not byte_view(b"abc").flags.writeable
    assert byte_view(bytearray(3)).flags.writeable
    assert byte_view(array.view(np.uint16).data).shape == (12,)
    assert byte_view(b"").shape == byte_view(memoryview(b"")).shape == (0,)
    with pytest.raises(RangeError):
        byte_view(array[:, ::2])
    with pytest.raises(RangeError):
        byte_view(memoryview(b"abcd")[::2])


def test_other_threads_run_meanwhile() -> None:
    """The GIL is released: a thread that only counts goes on counting during a copy of 64 MiB."""
    source, target = np.zeros(64 << 20, np.uint8), np.ones(64 << 20, np.uint8)
    longest_s, count, stopping = 0.0, 0, False

    def keep_counting() -> None:
        nonlocal longest_s, count
        last = time.perf_counter()
        while not stopping:
            now = time.perf_counter()
            longest_s, last = max(longest_s, now - last), now
            count += 1
            time.sleep(0)

    thread = threading.Thread(target=keep_counting)
    thread.start()

    def counted(action: Callable[[], object]) -> bool:
        """Whether the counter never stopped for half as long as a call takes."""
        nonlocal longest_s
        start, longest_s = time.perf_counter(), 0.0
        action()
        took_s, before = time.perf_counter() - start, count
        while count < before + 2:  # then it has measured how long it stood
            time.sleep(0)
        return longest_s < took_s / 2

    # If it were held, every call would stop the counter for its whole duration. A busy machine
    # stops it often, but not always.
    found = []
    whole = [(0, len(source))]
    for action in (lambda: hash_segments(source, whole), lambda: copy(target, source)):
        good = (turn for turn in range(60) if counted(action))
        found.append(len(list(islice(good, 3))))
    stopping = True
    thread.join()
    assert found == [3, 3]


def _large() -> tuple[np.ndarray, np.ndarray, list[tuple[int, int]]]:
    """Enough bytes for the helper thread to be used; segments of unequal length, with gaps."""
    source = np.random.default_rng(7).integers(0, 256, host_copy.SHARED_BYTES_MIN + 4096, np.uint8)
    third = len(source) // 3
    segments = [(0, third), (third, third), (2 * third, 4096), (2 * third + 4096, third - 8192)]
    segments += [(len(source) - 10, 10), (third, 100_000)]
    return np.zeros_like(source), source, segments


def test_large_copies_are_shared_with_a_helper_and_hash_the_same() -> None:
    target, source, segments = _large()
    found = copy_segments_hashed(target, source, segments)
    assert found.tolist() == [xxhash.xxh3_64_intdigest(source[o : o + n]) for o, n in segments]
    assert host_copy.hash_segments(target, segments).tolist() == found.tolist()
    for offset, length in segments:
        assert np.array_equal(target[offset : offset + length], source[offset : offset + length])


def test_a_busy_helper_is_not_waited_for() -> None:
    target, source, segments = _large()
    begun, end = threading.Event(), threading.Event()
    blocker = host_copy._helper().submit(lambda: (begun.set(), end.wait(30)))
    begun.wait(30)
    found = copy_segments_hashed(target, source, segments)
    end.set()
    assert blocker.result(30)
    assert found.tolist() == [xxhash.xxh3_64_intdigest(source[o : o + n]) for o, n in segments]


def test_a_forked_child_has_a_helper_of_its_own() -> None:
    target, source, segments = _large()
    wanted = copy_segments_hashed(target, source, segments).tolist()
    program = (
        "import os, sys, numpy as np\n"
        "from tiffin.messenger.shm import host_copy\n"
        "data = np.arange(host_copy.SHARED_BYTES_MIN, dtype=np.uint8)\n"
        "half = len(data) // 2\n"
        "parts = [(0, half), (half, half)]\n"
        "before = host_copy.hash_segments(data, parts).tolist()\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    os._exit(host_copy.hash_segments(data, parts).tolist() != before)\n"
        "sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 0
    assert wanted == host_copy.hash_segments(source, segments).tolist()
