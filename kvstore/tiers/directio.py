"""Reads and writes of one file past the page cache, several at a time.

A pool of KV blocks gains nothing from the page cache: DRAM is a tier of its own, and a second copy
there would be evicted by the kernel's rules instead of ours. O_DIRECT moves bytes straight between
the disk and the DRAM tier's memory, but only in whole pages from page-aligned memory. Three cases:

1. Offset, length and memory are aligned (blocks in our own tiers): straight, cut in pieces.
2. They are aligned to each other but not at the ends: the ends bounce, the middle goes straight.
3. They are not (a caller's array): every piece bounces through a page-aligned buffer.

A write that covers part of a page reads the page first. Pieces of one call never share a page.

Threads, not io_uring: a system call per 2 MiB is nothing beside the transfer, preadv and pwritev
release the GIL, and both measure the same here (1.26 GB/s read, 3.2 GB/s write, the disk's limits,
from 1 MiB pieces and a depth of 2 up). It would be another matter for 4 KiB pages at 100,000 per
second, which only a scan resembles.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor, wait
from queue import LifoQueue
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from ..block import PAGE_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from tiffin.messenger.local import ByteArray

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

# From 1 to 4 MiB measured alike; 2 MiB is what NVMe drives commonly take as one transfer or few.
PIECE_BYTES = 2 << 20
QUEUE_DEPTH = 4

_Transfer = tuple[int, "ByteArray"]  # byte in the file, memory


class DirectFile:
    """An existing file, opened for reading and writing. Raises OSError only.

    `direct_io` says whether the page cache is bypassed: some filesystems refuse (EINVAL), and then
    the same calls go through it.

    Threads: all verbs but `close` may run at the same time. Together they have `queue_depth`
    pieces with the disk, besides one per thread whose call is a single piece. A call queues no
    more than that at once, so a long one and a short one take turns.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        queue_depth: int = QUEUE_DEPTH,
        piece_bytes: int = PIECE_BYTES,
        direct_io: bool = True,
    ) -> None:
        self._queue_depth = queue_depth
        self._piece_bytes = max(PAGE_BYTES, piece_bytes // PAGE_BYTES * PAGE_BYTES)
        self._bounces: LifoQueue[ByteArray] = LifoQueue()
        for _ in range(queue_depth):  # takes no memory until used
            mapping = mmap.mmap(-1, self._piece_bytes + 2 * PAGE_BYTES)
            self._bounces.put(np.frombuffer(mapping, np.uint8))
        self._fd, self.direct_io = self._open(os.fspath(path), direct_io)
        self._pool = ThreadPoolExecutor(queue_depth, thread_name_prefix="tiffin-disk")

    def _open(self, path: str, direct_io: bool) -> tuple[int, bool]:
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
        if direct_io:
            try:
                fd = os.open(path, flags | os.O_DIRECT)
                if self._accepts_direct(fd):
                    return fd, True
                os.close(fd)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
        return os.open(path, flags), False

    def _accepts_direct(self, fd: int) -> bool:
        """Some filesystems take the flag and refuse the first read."""
        bounce = self._bounces.get()
        try:
            os.preadv(fd, [bounce[:PAGE_BYTES].data], 0)
        except OSError as error:
            if error.errno == errno.EINVAL:
                return False
            os.close(fd)
            raise
        finally:
            self._bounces.put(bounce)
        return True

    def write(self, start: int, data: ByteArray) -> None:
        """Write all of `data` at byte `start`. The disk has it, perhaps in its own cache."""
        self.each(self._write_piece, self._cut(start, data))

    def read(self, start: int, data: ByteArray) -> None:
        """Fill `data` from byte `start`."""
        self.each(self._read_piece, self._cut(start, data))

    def read_bytes(self, start: int, nbytes: int) -> bytes:
        """`read` into new memory: for a few pages, starting on a page."""
        bounce = self._bounces.get()
        try:
            if nbytes <= len(bounce):
                pages = bounce[: _round_up(nbytes)]
                self._transfer(os.preadv, start, pages)
                return pages[:nbytes].tobytes()
        finally:
            self._bounces.put(bounce)
        data = np.empty(nbytes, np.uint8)
        for piece in self._cut(start, data):
            self._read_piece(piece)
        return data.tobytes()

    def each(self, work: Callable[[_Item], _Result], items: Iterable[_Item]) -> list[_Result]:
        """`[work(item) for item in items]`, up to `queue_depth` at a time.

        When one raises, the rest are given up, and this returns after those under way have ended:
        the caller may then reuse the memory they were reading into or writing from.
        """
        todo = list(items)
        if len(todo) < 2:
            return [work(item) for item in todo]
        under_way: deque[Future[_Result]] = deque()
        results: list[_Result] = []
        try:
            for item in todo:
                if len(under_way) == self._queue_depth:
                    results.append(under_way.popleft().result())
                under_way.append(self._pool.submit(work, item))
            while under_way:
                results.append(under_way.popleft().result())
        finally:
            for future in under_way:
                future.cancel()
            wait(under_way)
        return results

    def close(self) -> None:
        """Call when no verb is running; a second call does nothing."""
        self._pool.shutdown()
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _cut(self, start: int, data: ByteArray) -> Iterator[_Transfer]:
        """Pieces that begin and end on pages of the file, except where `data` does not."""
        stop = start + len(data)
        head_stop = min(stop, _round_up(start))
        tail_start = max(head_stop, _round_down(stop))
        straight = not self.direct_io or (_address(data) - start) % PAGE_BYTES == 0
        if not straight:  # all of it bounces, the ends with it
            head_stop, tail_start = start, stop
        if start < head_stop:
            yield start, data[: head_stop - start]
        at = head_stop
        while at < tail_start:
            until = min(tail_start, _round_down(at) + self._piece_bytes)
            yield at, data[at - start : until - start]
            at = until
        if tail_start < stop:
            yield tail_start, data[tail_start - start :]

    def _write_piece(self, piece: _Transfer) -> None:
        start, data = piece
        if self._goes_straight(start, data):
            self._transfer(os.pwritev, start, data)
            return
        first, last = _round_down(start), _round_up(start + len(data))
        bounce = self._bounces.get()
        try:
            pages = bounce[: last - first]
            if start != first:
                self._transfer(os.preadv, first, pages[:PAGE_BYTES])
            if start + len(data) != last and (start == first or last - first > PAGE_BYTES):
                self._transfer(os.preadv, last - PAGE_BYTES, pages[-PAGE_BYTES:])
            pages[start - first : start - first + len(data)] = data
            self._transfer(os.pwritev, first, pages)
        finally:
            self._bounces.put(bounce)

    def _read_piece(self, piece: _Transfer) -> None:
        start, data = piece
        if self._goes_straight(start, data):
            self._transfer(os.preadv, start, data)
            return
        first, last = _round_down(start), _round_up(start + len(data))
        bounce = self._bounces.get()
        try:
            pages = bounce[: last - first]
            self._transfer(os.preadv, first, pages)
            np.copyto(data, pages[start - first : start - first + len(data)])
        finally:
            self._bounces.put(bounce)

    def _goes_straight(self, start: int, data: ByteArray) -> bool:
        return not self.direct_io or (start | len(data) | _address(data)) % PAGE_BYTES == 0

    def _transfer(
        self, verb: Callable[[int, list[memoryview], int], int], start: int, data: ByteArray
    ) -> None:
        """Go on after a short read or write, which signals and full disks cause, until it is done.

        A direct transfer can only go on from a page, so it repeats a page that was cut.
        """
        done = 0
        while done < len(data):
            moved = done + verb(self._fd, [data[done:].data], start + done)
            if self.direct_io and moved < len(data):
                moved = _round_down(moved)
            if moved <= done:
                raise OSError(errno.EIO, f"the file ends or stalls at byte {start + done}")
            done = moved


def _address(data: ByteArray) -> int:
    return int(data.__array_interface__["data"][0])


def _round_down(nbytes: int) -> int:
    return nbytes & -PAGE_BYTES


def _round_up(nbytes: int) -> int:
    return (nbytes + PAGE_BYTES - 1) & -PAGE_BYTES
