"""Path selection and failover between all transports to one peer.

A transfer is moved in chunks. Before each chunk, the transfer waits for room in the budget that all
transfers of the process share (`budget.py`), and the messenger chooses the path with the shortest
predicted time for so many bytes, from its measurements. When a path fails in the middle, the next
path retries only the ranges that have not arrived. A refusal (GrantError) comes from the peer and
is the same on every path, so the messenger raises it at once, without a retry.
"""

from __future__ import annotations

import threading
import time
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from .budget import SHARED, Budget, Priority
from .errors import FrameError, TransferError
from .link_health import LinkHealth
from .transfer_plan import Slice, cut, order_paths, sliced
from .transport import NOTHING, Served
from .wire.ranges import views_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from .shm.host_copy import ByteArray
    from .transport import Arrived, Range, Transport

    Arrays = Sequence[ByteArray]

# Between two chunks a more urgent transfer can go first: 64 MiB are 20 ms at 3 GB/s, and a pause of
# 0.1 ms between two chunks is half a percent.
_CHUNK_BYTES = 64 << 20

# One path's `read` or `write` of (grant, ranges, arrays, deadline, arrived).
_Attempt: TypeAlias = (
    "Callable[[Transport, int, Sequence[Range], Arrays, float, Arrived | None], Served]"
)


class _Job(NamedTuple):
    """A transfer, or the rest of one, to be moved."""

    attempt: _Attempt
    grant: int
    ranges: Sequence[Range]
    arrays: Arrays
    deadline: float
    priority: Priority

    def only(self, chunk: Sequence[Slice]) -> _Job:
        """The job of only these slices."""
        ranges, arrays = sliced(self.ranges, self.arrays, chunk)
        return self._replace(ranges=ranges, arrays=arrays)

    def served(self, count: int) -> Served:
        """The first `count` ranges."""
        return Served(count, sum(length for _, length in self.ranges[:count]))

    def after(self, count: int) -> _Job:
        """The job without the first `count` ranges."""
        if not count:
            return self
        return self._replace(ranges=self.ranges[count:], arrays=self.arrays[count:])


class Messenger:
    """`paths` are transports to the same peer; the messenger closes them. Thread-safe. `budget`:
    None for a caller that already has room in a budget: to wait for room twice could be a
    deadlock with itself."""

    def __init__(self, paths: Sequence[Transport], *, budget: Budget | None = SHARED) -> None:
        if not paths:
            raise ValueError("a messenger needs at least one path to its peer")
        self._paths = list(paths)
        self._budget = budget
        self._lock = threading.Lock()
        self._links = [LinkHealth(path.name) for path in paths]

    def read(
        self,
        grant: int,
        ranges: Sequence[Range],
        targets: Arrays,
        *,
        deadline: float,
        priority: Priority = Priority.PREFILL,
        arrived: Arrived | None = None,
    ) -> Served:
        """See `Transport.read`. Raises the last path's error, once all paths have failed."""
        job = _Job(_read, grant, ranges, targets, deadline, priority)
        return self._move(job, arrived)

    def write(
        self,
        grant: int,
        ranges: Sequence[Range],
        sources: Arrays,
        *,
        deadline: float,
        priority: Priority = Priority.PREFILL,
    ) -> Served:
        """See `Transport.write`. Raises the last path's error, once all paths have failed."""
        job = _Job(_write, grant, ranges, sources, deadline, priority)
        return self._move(job, None)

    def statistics(self) -> dict[str, dict[str, Any]]:
        """Statistics per path, by its transport's name (the second path of a name, and later ones,
        have a number): `latency_s`, `bandwidth_bytes_s`, `transfers`, `bytes`, `errors`, `healthy`.
        """
        numbers: dict[str, dict[str, Any]] = {}
        now = time.monotonic()
        with self._lock:
            for link in self._links:
                same = sum(name.partition("-")[0] == link.name for name in numbers)
                numbers[f"{link.name}-{same + 1}" if same else link.name] = link.as_dict(now)
        return numbers

    def predicted_s(self, nbytes: int) -> float:
        """How long a transfer of `nbytes` would take on the path that would be chosen."""
        with self._lock:
            best = order_paths(self._links, nbytes, time.monotonic())[0]
            return self._links[best].statistics.predicted_s(nbytes)

    def close(self) -> None:
        """Close every path."""
        for path in self._paths:
            path.close()

    def _move(self, job: _Job, arrived: Arrived | None) -> Served:
        if sum(length for _, length in job.ranges) <= _CHUNK_BYTES:
            return self._move_chunk(job, arrived)
        # Check all arrays before any byte moves, not each only with its chunk.
        views_of(job.ranges, job.arrays, writable=job.attempt is _read)
        done = NOTHING
        for chunk in cut(job.ranges, _CHUNK_BYTES):
            tell = None if arrived is None else partial(_tell, job.ranges, chunk, arrived)
            try:
                served = self._move_chunk(job.only(chunk), tell)
            except TransferError as error:
                error.served = _add(done, job.ranges, chunk[: error.served.ranges])
                raise
            done = _add(done, job.ranges, chunk[: served.ranges])
            if served.ranges < len(chunk):
                break
        return done

    def _move_chunk(self, job: _Job, arrived: Arrived | None) -> Served:
        """Move the whole chunk; less where the peer's grant ends. A TransferError's `served` counts
        what all paths together have moved."""
        nbytes = sum(length for _, length in job.ranges)
        done = told = 0

        def tell(index: int) -> None:
            nonlocal told
            told += 1
            if arrived is not None:
                arrived(done + index)

        with self._turn(nbytes, job):
            paths = self._choose(nbytes)
            while True:
                path, told = paths.pop(0), 0
                heard = None if arrived is None else tell
                try:
                    served = self._try(path, job.after(done), heard, last=not paths)
                    return job.served(done + served.ranges)
                except (TransferError, FrameError) as error:
                    moved = error.served.ranges if isinstance(error, TransferError) else 0
                    # Ranges reported to `arrived` are not reported again, others are retried.
                    done += moved if arrived is None else told
                    if not paths or time.monotonic() >= job.deadline:
                        if isinstance(error, TransferError):
                            error.served = job.served(done)
                        raise

    def _turn(self, nbytes: int, job: _Job) -> AbstractContextManager[None]:
        if self._budget is None:
            return nullcontext()
        return self._budget.hold(nbytes, job.priority, job.deadline)

    def _try(self, path: int, job: _Job, arrived: Arrived | None, *, last: bool) -> Served:
        """One attempt on one path. Unless it is the last path, its timeout is half of the time left
        until the deadline."""
        started = time.monotonic()
        until = job.deadline if last else started + (job.deadline - started) / 2
        transport = self._paths[path]
        try:
            served = job.attempt(transport, job.grant, job.ranges, job.arrays, until, arrived)
        except (TransferError, FrameError):
            with self._lock:
                self._links[path].failed(time.monotonic())
            raise
        with self._lock:
            self._links[path].succeeded(served.nbytes, time.monotonic() - started)
        return served

    def _choose(self, nbytes: int) -> list[int]:
        with self._lock:
            return order_paths(self._links, nbytes, time.monotonic())


def _read(
    path: Transport,
    grant: int,
    ranges: Sequence[Range],
    targets: Arrays,
    deadline: float,
    arrived: Arrived | None,
) -> Served:
    return path.read(grant, ranges, targets, deadline=deadline, arrived=arrived)


def _write(
    path: Transport,
    grant: int,
    ranges: Sequence[Range],
    sources: Arrays,
    deadline: float,
    _: Arrived | None,
) -> Served:
    return path.write(grant, ranges, sources, deadline=deadline)


def _tell(ranges: Sequence[Range], chunk: Sequence[Slice], arrived: Arrived, index: int) -> None:
    """A slice has arrived: call `arrived` if it was the last of its range."""
    item, _, stop = chunk[index]
    if stop == ranges[item].length:
        arrived(item)


def _add(done: Served, ranges: Sequence[Range], slices: Sequence[Slice]) -> Served:
    """`done` and the ranges that end in these slices."""
    ended = [ranges[item].length for item, _, stop in slices if stop == ranges[item].length]
    return Served(done.ranges + len(ended), done.nbytes + sum(ended))
