"""Counts of all workers in memory that they share, so that limits hold for all of them together.

Each worker writes its own cells and reads all. A limit may be exceeded by the requests that come at
the same moment, one per worker.
"""

from __future__ import annotations

import mmap

CELL_BYTES = 8
_CELLS = 2  # of a worker: requests, bytes of their bodies


class SharedCounts:
    """Of this worker, number `worker` of those that share the `memory`."""

    def __init__(self, memory: mmap.mmap | bytearray, worker: int = 0) -> None:
        self._all = memoryview(memory).cast("q")
        self._own = _CELLS * worker

    @classmethod
    def alone(cls) -> SharedCounts:
        """Of a gateway of one process."""
        return cls(bytearray(size_of(1)))

    @classmethod
    def of(cls, descriptor: int, workers: int, worker: int) -> SharedCounts:
        """In the memory behind this file descriptor. Raises OSError."""
        return cls(mmap.mmap(descriptor, size_of(workers)), worker)

    @property
    def requests(self) -> int:
        """Requests of all workers."""
        return sum(self._all[::_CELLS])

    @property
    def held_bytes(self) -> int:
        """Bytes of the bodies of all workers' requests."""
        return sum(self._all[1::_CELLS])

    @property
    def own(self) -> tuple[int, int]:
        """Requests and bytes of this worker."""
        return self._all[self._own], self._all[self._own + 1]

    def add(self, requests: int, nbytes: int) -> None:
        """Change this worker's counts."""
        self._all[self._own] += requests
        self._all[self._own + 1] += nbytes

    def clear(self) -> None:
        """This worker has ended, and its requests with it."""
        self._all[self._own] = self._all[self._own + 1] = 0


def size_of(workers: int) -> int:
    """Bytes that so many workers need."""
    return CELL_BYTES * _CELLS * workers
