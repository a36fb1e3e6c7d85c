"""Reads over several transports to one peer: the fastest first, the next where one fails.

Before a read, the messenger chooses the path with the shortest predicted time for so many bytes,
from its measurements. When a path fails in the middle, the next path reads only the ranges that
have not arrived. A refusal (GrantError) comes from the peer and is the same on every path, so the
messenger raises it at once, without a retry.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from .errors import FrameError, TransferError
from .link_health import LinkHealth, order_paths
from .transport import Served

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .shm.host_copy import ByteArray
    from .transport import Arrived, Range, Transport


class Messenger:
    """`paths`, at least one, are transports to the same peer; `links` has the measurements of each.
    Thread-safe."""

    def __init__(self, paths: Sequence[Transport]) -> None:
        self._paths = list(paths)
        self._lock = threading.Lock()
        self.links = [LinkHealth(path.name) for path in paths]

    def read(
        self,
        grant: int,
        ranges: Sequence[Range],
        targets: Sequence[ByteArray],
        *,
        deadline: float,
        arrived: Arrived | None = None,
    ) -> Served:
        """See `Transport.read`. Raises the last path's error, once all paths have failed; a
        TransferError's `served` counts what all paths together have moved."""
        done = told = 0

        def tell(index: int) -> None:
            nonlocal told
            told += 1
            if arrived is not None:
                arrived(done + index)

        paths = self._choose(sum(length for _, length in ranges))
        while True:
            path, told = paths.pop(0), 0
            until = deadline
            if paths:  # half of the time that is left is for the next path
                now = time.monotonic()
                until = now + (deadline - now) / 2
            try:
                served = self._try(
                    path,
                    grant,
                    ranges[done:],
                    targets[done:],
                    until,
                    None if arrived is None else tell,
                )
                return _leading(ranges, done + served.ranges)
            except (TransferError, FrameError) as error:
                moved = error.served.ranges if isinstance(error, TransferError) else 0
                # Ranges reported to `arrived` are not reported again, others are retried.
                done += moved if arrived is None else told
                if not paths or time.monotonic() >= deadline:
                    if isinstance(error, TransferError):
                        error.served = _leading(ranges, done)
                    raise

    def _choose(self, nbytes: int) -> list[int]:
        with self._lock:
            return order_paths(self.links, nbytes, time.monotonic())

    def _try(
        self,
        path: int,
        grant: int,
        ranges: Sequence[Range],
        targets: Sequence[ByteArray],
        deadline: float,
        arrived: Arrived | None,
    ) -> Served:
        """Read by one path, and measure it."""
        started = time.monotonic()
        try:
            served = self._paths[path].read(
                grant, ranges, targets, deadline=deadline, arrived=arrived
            )
        except (TransferError, FrameError):
            with self._lock:
                self.links[path].failed(time.monotonic())
            raise
        with self._lock:
            self.links[path].succeeded(served.nbytes, time.monotonic() - started)
        return served


def _leading(ranges: Sequence[Range], count: int) -> Served:
    """The first `count` of the ranges."""
    return Served(count, sum(length for _, length in ranges[:count]))
