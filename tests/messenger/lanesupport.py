"""A simulated device: its lanes run late, in any order that their events allow.

Memory is the host's and bytes are moved for real, so that a missing wait is a wrong byte.
"""

from __future__ import annotations

import contextlib
from collections import deque
from typing import TYPE_CHECKING, Any

from tiffin.messenger.gpu.copy_plan import Able, CopyRows
from tiffin.messenger.gpu.copy_streams import Buffer, HostLanes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class SimulatedEvent:
    """Is done when its lane has reached it."""

    def __init__(self, device: SimulatedLanes) -> None:
        self.device = device
        self.come = False

    def query(self) -> bool:
        """Every query lets the device take a few steps, so that waiting ends."""
        for _ in range(4):
            if not self.come:
                self.device.step()
        return self.come

    def synchronize(self) -> None:
        while not self.query():
            assert self.device.runnable(), "the device waits for what nobody will do"

    def wait(self, stream: SimulatedLane) -> None:
        self.device.wait(stream, self)


class SimulatedLane:
    """A queue of (event to wait for or None, what to do)."""

    def __init__(self) -> None:
        self.todo: deque[tuple[SimulatedEvent | None, Callable[[], None]]] = deque()


class SimulatedLanes(HostLanes):
    """`choose(n)` gives a number below n: which of the n runnable lanes runs.

    `log` lists what was queued. `frozen` stops the device; `fault`, when set, is raised by the next
    copy that is queued.
    """

    def __init__(self, choose: Callable[[int], int], *, batches: bool = True) -> None:
        self.able = Able(batches=batches, kernels=True)
        self.log: list[tuple[str, int]] = []
        self.frozen = False
        self.fault: Exception | None = None
        self._choose = choose
        self._lanes: list[SimulatedLane] = []

    def lane(self) -> Any:
        self._lanes.append(SimulatedLane())
        return self._lanes[-1]

    def single(self, lane: Any, rows: CopyRows) -> None:
        self._queue(lane, "single", rows)

    def batch(self, lane: Any, rows: CopyRows) -> None:
        assert self.able.batches
        self._queue(lane, "batch", rows)

    def kernel(self, lane: Any, rows: CopyRows, programs: int | None) -> None:
        self._queue(lane, "kernel", rows)

    def record(self, lane: Any) -> Any:
        event = SimulatedEvent(self)
        lane.todo.append((None, lambda: setattr(event, "come", True)))
        return event

    def wait(self, lane: Any, event: Any) -> None:
        lane.todo.append((event, lambda: None))

    def device_buffer(self, nbytes: int, lane: Any) -> Buffer:
        return self.host_buffer(nbytes)

    @contextlib.contextmanager
    def all_queued(self) -> Iterator[None]:
        yield

    def runnable(self) -> list[SimulatedLane]:
        """Lanes whose next step could run now."""
        if self.frozen:
            return []
        lanes = [lane for lane in self._lanes if lane.todo]
        return [lane for lane in lanes if lane.todo[0][0] is None or lane.todo[0][0].come]

    def step(self) -> None:
        """Run one step of one lane, if any is runnable."""
        lanes = self.runnable()
        if lanes:
            lanes[self._choose(len(lanes))].todo.popleft()[1]()

    def _queue(self, lane: SimulatedLane, what: str, rows: CopyRows) -> None:
        if self.fault is not None:
            fault, self.fault = self.fault, None
            raise fault
        self.log.append((what, len(rows)))
        lane.todo.append((None, lambda: self.copy_on_host(rows)))
