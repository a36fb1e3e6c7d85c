"""All paths to one peer as one: the best is chosen, and when it fails the next one goes on.

A transfer is moved in chunks. Before each, it takes its turn among all transfers of the process
(`budget.py`) and the path that should be fastest for so many bytes is chosen anew, by what was
measured. When a path fails in the middle, the next one repeats only the ranges that have not
arrived. A refusal (GrantError) is the peer's word and the same on every path, so it is raised at
once.
"""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from .budget import SHARED, Budget, Priority
from .errors import FrameError, PeerLost, TransferError
from .links import Link
from .plan import InOrder, Slice, cut, order_paths, sliced
from .ranges import Served
from .stream import views_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .local import ByteArray
    from .ranges import Range
    from .transport import Arrived, Transport

# Between chunks something more urgent goes first: 64 MiB are 20 ms at 3 GB/s, and a pause of 0.1 ms
# between two is half a percent.
_CHUNK_BYTES = 64 << 20


class _Attempt(Protocol):
    """One path's `read` or `write` of some ranges."""

    def __call__(
        self,
        path: Transport,
        ranges: Sequence[Range],
        arrays: Sequence[ByteArray],
        *,
        deadline: float,
        arrived: Arrived,
    ) -> Served: ...


class Messenger:
    """`paths` are transports to the same peer; the messenger closes them. Any thread may use it."""

    def __init__(self, paths: Sequence[Transport], *, budget: Budget = SHARED) -> None:
        if not paths:
            raise ValueError("a messenger needs at least one path to its peer")
        self._paths = list(paths)
        self._budget = budget
        self._lock = threading.Lock()
        self._links = [Link(path.name) for path in paths]

    def read(
        self,
        grant: int,
        ranges: Sequence[Range],
        targets: Sequence[ByteArray],
        *,
        deadline: float,
        priority: Priority = Priority.PREFILL,
        arrived: Arrived | None = None,
    ) -> Served:
        """See `Transport.read`. Raises what the last path raised, once all have failed."""
        views_of(ranges, targets, writable=True)

        def attempt(
            path: Transport,
            ranges: Sequence[Range],
            arrays: Sequence[ByteArray],
            *,
            deadline: float,
            arrived: Arrived,
        ) -> Served:
            return path.read(grant, ranges, arrays, deadline=deadline, arrived=arrived)

        return self._move(attempt, ranges, targets, deadline, priority, arrived)

    def write(
        self,
        grant: int,
        ranges: Sequence[Range],
        sources: Sequence[ByteArray],
        *,
        deadline: float,
        priority: Priority = Priority.PREFILL,
    ) -> Served:
        """See `Transport.write`. Raises what the last path raised, once all have failed."""
        views_of(ranges, sources, writable=False)

        def attempt(
            path: Transport,
            ranges: Sequence[Range],
            arrays: Sequence[ByteArray],
            *,
            deadline: float,
            arrived: Arrived,
        ) -> Served:
            try:
                served = path.write(grant, ranges, arrays, deadline=deadline)
            except TransferError as error:
                _tell(arrived, error.served.ranges)
                raise
            _tell(arrived, served.ranges)
            return served

        return self._move(attempt, ranges, sources, deadline, priority, None)

    def statistics(self) -> dict[str, dict[str, Any]]:
        """Per path, by its transport's name (numbered from the second of a name): `latency_s`,
        `bandwidth_bytes_s`, `transfers`, `bytes`, `errors`, `healthy`."""
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

    def _move(
        self,
        attempt: _Attempt,
        ranges: Sequence[Range],
        arrays: Sequence[ByteArray],
        deadline: float,
        priority: Priority,
        arrived: Arrived | None,
    ) -> Served:
        chunks = cut(ranges, _CHUNK_BYTES)
        progress = InOrder(ranges, chunks, arrived)
        for index, chunk in enumerate(chunks):
            part = sliced(ranges, arrays, chunk) if len(chunks) > 1 else (ranges, arrays)
            mark = partial(progress.mark, index)
            try:
                if not self._move_chunk(attempt, *part, chunk, deadline, priority, mark):
                    break
            except TransferError as error:
                error.served = progress.served
                raise
        return progress.served

    def _move_chunk(
        self,
        attempt: _Attempt,
        ranges: Sequence[Range],
        arrays: Sequence[ByteArray],
        chunk: Sequence[Slice],
        deadline: float,
        priority: Priority,
        mark: partial[None],
    ) -> bool:
        """Whether all of it was served; False where the peer's grant ends."""
        nbytes = sum(stop - start for _, start, stop in chunk)
        done = 0

        def arrived(_: int) -> None:
            nonlocal done
            done += 1
            mark()

        with self._budget.hold(nbytes, priority, deadline):
            paths = self._choose(nbytes)
            while True:
                path = paths.pop(0)
                try:
                    self._try(attempt, path, ranges[done:], arrays[done:], deadline, arrived, paths)
                    return done == len(ranges)
                except (TransferError, FrameError):
                    if not paths or time.monotonic() >= deadline:
                        raise

    def _try(
        self,
        attempt: _Attempt,
        path: int,
        ranges: Sequence[Range],
        arrays: Sequence[ByteArray],
        deadline: float,
        arrived: Arrived,
        others: list[int],
    ) -> None:
        """One attempt. While there are other paths, it may take half the time that is left."""
        started = time.monotonic()
        until = started + (deadline - started) / 2 if others else deadline
        try:
            served = attempt(self._paths[path], ranges, arrays, deadline=until, arrived=arrived)
        except (TransferError, FrameError):
            with self._lock:
                self._links[path].failed(time.monotonic())
            raise
        with self._lock:
            self._links[path].succeeded(served.nbytes, time.monotonic() - started)

    def _choose(self, nbytes: int) -> list[int]:
        with self._lock:
            return order_paths(self._links, nbytes, time.monotonic())


def _tell(arrived: Arrived, count: int) -> None:
    for index in range(count):
        arrived(index)
