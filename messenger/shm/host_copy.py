"""Bulk copies inside one host, and the checksum of the copied bytes.

A checksum is computed over the *target*, right after the copy, and so matches the stored bytes: if
the source's owner changes it during the copy, the block still matches its checksum (and the changed
content is the owner's mistake), whereas with a checksum of the source the block would never verify.

Copying first and hashing later reads all bytes from memory a second time; when copying and hashing
alternate piece by piece, the piece is still in a CPU cache. The size of a piece is a compromise
with the C library: below 1 MiB its copy runs at half speed on AMD Zen when the target lies a few
bytes further into its page than the source into its own (glibc bug 30994), and a large NumPy array
(16 bytes into its page) lies just so relative to a block of a pool (at a page's start). One thread,
64 MiB in segments of 2 MiB, as a ratio to one plain copy of the whole (AMD EPYC, 1 MiB of L2 per
core; copy 12 to 13 GB/s):

    target - source, mod 4096     128 KiB  256 KiB  512 KiB   1 MiB   2 MiB
    0                                0.76     0.81     0.66    0.78    0.77
    16 (a get into an array)         0.38     0.39     0.38    0.79    0.79
    4080 (a put from an array)       0.73     0.72     0.62    0.88    0.85

So pieces are 2 MiB. One core still does not use all memory bandwidth: from 8 MiB on, a second
thread takes every other segment, which gives 1.0 to 1.2 of one thread's plain copy. More threads
were not tried; the machine had two cores.

NumPy releases the GIL while it copies and python-xxhash (3.0 and later) while it hashes, so that
calling these from a worker thread does not block an event loop: measured, another thread never
waited longer than 0.2 ms during calls of 10 ms each.

Not so with `xxh3_64_pages` (`tiffin.kernels.checksum.page_hash`): xxhash keeps the GIL for an input
as short as a page. A thread that waits for the GIL would wait for 5 ms, Python's switch interval,
every time. So after each 8 MiB of pure hashing the thread calls `sleep(0)`, which takes 70 us and
lets other threads run: another thread waited 0.3 to 0.7 ms then. And two threads hash pages no
faster than one, so that the helper thread is not used.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import numpy as np
import xxhash
from numpy.typing import NDArray

from tiffin.kernels.checksum import page_hash

from ..errors import RangeError
from ..signal_safe import uninterrupted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

# The arrays of the functions below: one-dimensional, contiguous. `byte_view` makes one.
ByteArray: TypeAlias = NDArray[np.uint8]

# Anything that `byte_view` accepts.
BufferLike: TypeAlias = bytes | bytearray | memoryview | NDArray[Any]

# The checksum algorithm of a segment: XXH3-64 of all its bytes, or of each of its pages
# (`page_hash`).
Algorithm: TypeAlias = Literal["xxh3_64", "xxh3_64_pages"]
XXH3_64: Final = "xxh3_64"
XXH3_64_PAGES: Final = "xxh3_64_pages"

# See the table above.
PIECE_BYTES = 2 << 20
# Below this, handing work to another thread (about 50 us) costs more than it saves.
SHARED_BYTES_MIN = 8 << 20
# After hashing so many bytes of pages, the thread lets other threads take the GIL.
_TURN_BYTES = 8 << 20

# Checksum functions of contiguous bytes, by algorithm.
HASHES: Final[dict[Algorithm, Callable[[memoryview], int]]] = {
    XXH3_64: xxhash.xxh3_64_intdigest,
    XXH3_64_PAGES: page_hash.checksum,
}
_hash = HASHES[XXH3_64]


def byte_view(buffer: BufferLike) -> ByteArray:
    """A view of the bytes of `buffer`, in memory order; read-only when `buffer` is.

    Accepts arrays of every dtype, including those without a buffer protocol (bfloat16). Raises
    RangeError for memory that is not contiguous: its bytes have no single order; and for masked
    arrays.
    """
    if isinstance(buffer, np.ma.MaskedArray):
        raise RangeError("a masked array is more than its bytes; pass its values: .filled(0)")
    if isinstance(buffer, np.ndarray):
        if not buffer.flags.c_contiguous:
            raise RangeError("an array that is not C-contiguous has no byte view; copy it first")
        return buffer.reshape(-1).view(np.uint8)
    if isinstance(buffer, memoryview) and not buffer.c_contiguous:
        raise RangeError("a memoryview that is not contiguous has no byte view; copy it first")
    return np.frombuffer(buffer, np.uint8)


def copy(target: ByteArray, source: ByteArray) -> None:
    """Copy all of `source` over all of `target`. Raises RangeError when the lengths differ."""
    _check_lengths(target, source)
    np.copyto(target, source)


def copy_blocks_hashed(
    targets: Sequence[ByteArray],
    sources: Sequence[ByteArray],
    segments: Iterable[tuple[int, int]],
    algorithm: Algorithm = XXH3_64,
    *,
    piece_bytes: int = PIECE_BYTES,
) -> NDArray[np.uint64]:
    """Copy each (offset, length) of each of `sources` to the same offset of its target; returns a
    checksum for each, uint64 [blocks, segments].

    Bytes outside every segment are not copied. Raises RangeError, before anything is copied, when
    lengths differ or a segment is not inside them. Neighbours are copied at once, up to
    `piece_bytes`: to copy and hash 16 blocks of 32 segments of 2 KiB takes half a millisecond, and
    one by one two.
    """
    for target, source in zip(targets, sources, strict=True):
        _check_lengths(target, source)
    plan = _plan(tuple(segments), piece_bytes)
    nbytes = plan.check(targets)
    ranges, runs = plan.ranges, plan.runs
    copy_one, hash_one = _COPIES[algorithm], HASHES[algorithm]
    found: list[list[int]] = [[]] * (len(targets) * len(runs))

    def one(i: int) -> None:
        block, run = divmod(i, len(runs))
        (first, end), target, source = runs[run], targets[block], sources[block]
        start, stop = ranges[first][0], ranges[end - 1][1]
        if end - first == 1:
            found[i] = [copy_one(target[start:stop], source[start:stop], piece_bytes)]
            return
        np.copyto(target[start:stop], source[start:stop])
        view = target.data
        found[i] = [hash_one(view[a:b]) for a, b in ranges[first:end]]

    _each(one, len(found), nbytes if algorithm == XXH3_64 else 0)
    return _table(found, len(targets), len(ranges))


def hash_segments(
    source: ByteArray, segments: Iterable[tuple[int, int]], algorithm: Algorithm = XXH3_64
) -> NDArray[np.uint64]:
    """The checksum of each (offset, length) of `source`. Raises RangeError for one not inside."""
    found: NDArray[np.uint64] = hash_blocks([source], segments, algorithm)[0]
    return found


def hash_blocks(
    sources: Sequence[ByteArray],
    segments: Iterable[tuple[int, int]],
    algorithm: Algorithm = XXH3_64,
) -> NDArray[np.uint64]:
    """`hash_segments` of several blocks, which have the same segments: uint64 [blocks, segments]"""
    plan = _plan(tuple(segments), PIECE_BYTES)
    nbytes = plan.check(sources)
    hash_one, ranges, runs = HASHES[algorithm], plan.ranges, plan.runs
    if algorithm == XXH3_64_PAGES and nbytes >= SHARED_BYTES_MIN:
        hashed = [_hash_pages(source.data, ranges) for source in sources]
        return _table(hashed, len(sources), len(ranges))
    # Slicing a memoryview costs a third of slicing an array, which matters at 2 KiB each.
    views = [source.data for source in sources]
    found: list[list[int]] = [[]] * (len(views) * len(runs))

    def one(i: int) -> None:
        block, run = divmod(i, len(runs))
        (first, end), view = runs[run], views[block]
        found[i] = [hash_one(view[start:stop]) for start, stop in ranges[first:end]]

    _each(one, len(found), nbytes)
    return _table(found, len(sources), len(ranges))


def _table(found: list[list[int]], blocks: int, segments: int) -> NDArray[np.uint64]:
    return np.array(list(chain.from_iterable(found)), np.uint64).reshape(blocks, segments)


@dataclass(frozen=True, slots=True)
class _Plan:
    """How the segments of a call are copied. Blocks of one schema share it."""

    ranges: list[tuple[int, int]]  # (start, stop) of each segment
    runs: list[tuple[int, int]]  # (first, end) indices of segments that are copied at once
    nbytes: int  # of all segments of a block
    end: float  # the least that a block has to have: infinite if a segment is none

    def check(self, blocks: Sequence[ByteArray]) -> int:
        """The bytes of all segments of `blocks`. Raises RangeError for one that is not inside."""
        if (shortest := min(map(len, blocks), default=math.inf)) < self.end:
            raise RangeError(f"segments up to {self.end} are not inside {shortest} bytes")
        return self.nbytes * len(blocks)


@functools.lru_cache(maxsize=64)
def _plan(segments: tuple[tuple[int, int], ...], piece_bytes: int) -> _Plan:
    ranges = [(offset, offset + length) for offset, length in segments]
    runs: list[tuple[int, int]] = []
    for i, (start, stop) in enumerate(ranges):
        first = runs[-1][0] if runs else i
        if first < i and start == ranges[i - 1][1] and stop - ranges[first][0] <= piece_bytes:
            runs[-1] = first, i + 1
        else:
            runs.append((i, i + 1))
    are_segments = all(0 <= start <= stop for start, stop in ranges)
    end = max((stop for _, stop in ranges), default=0) if are_segments else math.inf
    return _Plan(ranges, runs, sum(stop - start for start, stop in ranges), end)


def _hash_pages(view: memoryview, ranges: list[tuple[int, int]]) -> list[int]:
    """`page_hash.checksum` of each range; lets other threads run after each `_TURN_BYTES`."""
    turn_bytes, found = 0, []
    for start, stop in ranges:
        hashes = []
        for at in range(start, max(stop, start + 1), PIECE_BYTES):
            end = min(stop, at + PIECE_BYTES)
            hashes.append(page_hash.page_hashes(view[at:end]))
            turn_bytes += end - at
            if turn_bytes >= _TURN_BYTES:
                turn_bytes = 0
                time.sleep(0)
        found.append(page_hash.fold(np.concatenate(hashes), stop - start))
    return found


def _each(action: Callable[[int], None], count: int, nbytes: int) -> None:
    """Call `action(i)` for i below `count`, shared with a helper thread from SHARED_BYTES_MIN on.

    Both threads take the next index until none is left, so a helper that is busy with another call
    costs nothing. Returns, or raises, only when neither accesses the memory any more.
    """
    if count < 2 or nbytes < SHARED_BYTES_MIN:
        for i in range(count):
            action(i)
        return
    rest = deque(range(count))
    # With a helper, an exception from a signal handler must not end only one of the two threads.
    uninterrupted(partial(_share, action, rest), cancel=rest.clear)


def _share(action: Callable[[int], None], rest: deque[int]) -> None:
    def work() -> None:
        with contextlib.suppress(IndexError):
            while True:
                action(rest.popleft())

    helper = _helper().submit(work)
    try:
        work()
    finally:
        rest.clear()
        if not helper.cancel():
            wait([helper])
    if not helper.cancelled():
        helper.result()


@functools.cache
def _helper() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="tiffin-copy")


# A forked child has the executor, but not its thread.
os.register_at_fork(after_in_child=_helper.cache_clear)


def _copy_hashed(target: ByteArray, source: ByteArray, piece_bytes: int) -> int:
    nbytes = len(target)
    if nbytes <= piece_bytes:
        np.copyto(target, source)
        return _hash(target.data)
    state = xxhash.xxh3_64()
    for start in range(0, nbytes, piece_bytes):
        stop = start + piece_bytes
        piece = target[start:stop]
        np.copyto(piece, source[start:stop])
        state.update(piece.data)
    return state.intdigest()


def _copy_paged(target: ByteArray, source: ByteArray, piece_bytes: int) -> int:
    nbytes = len(target)
    if nbytes <= piece_bytes:
        np.copyto(target, source)
        return page_hash.checksum(target.data)
    whole_bytes = -(-piece_bytes // page_hash.PAGE_BYTES) * page_hash.PAGE_BYTES
    hashes = []
    for start in range(0, nbytes, whole_bytes):
        piece = target[start : start + whole_bytes]
        np.copyto(piece, source[start : start + whole_bytes])
        hashes.append(page_hash.page_hashes(piece))
    return page_hash.fold(np.concatenate(hashes), nbytes)


_COPIES: Final[dict[Algorithm, Callable[[ByteArray, ByteArray, int], int]]] = {
    XXH3_64: _copy_hashed,
    XXH3_64_PAGES: _copy_paged,
}


def _check_lengths(target: ByteArray, source: ByteArray) -> None:
    # Without this, NumPy would broadcast a source of one byte over the whole target.
    if target.shape != source.shape or target.ndim != 1:
        raise RangeError(f"a target of {target.nbytes} bytes for a source of {source.nbytes}")
