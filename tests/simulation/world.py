"""Virtual time, and threads as fibers: the base of the simulated cluster.

The product's blocking code runs unchanged. While a `World` runs, `time.monotonic`, `time.sleep`,
`threading.Thread`, `Lock`, `Event` and the like are replaced by those of the world, so a call that
would wait in the kernel parks a greenlet instead, and the next event of the agenda runs: a second
of waiting costs nothing, one fiber runs at a time, and the seed alone decides which runs next.

Events of the same moment are shuffled, because a wake-up takes a random time up to WAKE_S_MAX: that
is the source of interleavings.
"""

from __future__ import annotations

import contextlib
import heapq
import logging
import random
import secrets
import threading
import time
import zlib
from collections import deque
from itertools import count
from typing import TYPE_CHECKING, Any

import greenlet

from tiffin.messenger import signal_safe

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# The longest time that a thread takes to wake up.
WAKE_S_MAX = 0.0001
# The shortest wait: a loop of waits of no time must not stop the clock.
WAIT_S_MIN = 1e-6
# The clock at the beginning, and the date that goes with it.
START_S = 1000.0
EPOCH_S = 1_700_000_000.0
# How many of the last events a failure prints.
EVENTS_SHOWN = 40
# A run of a few virtual minutes has some ten thousand steps; a fiber that spins never ends.
STEPS_MAX = 1_000_000

_RealRandom = random.Random


class Violation(AssertionError):
    """An invariant does not hold. `kind` names it; see `INVARIANTS` in `cluster.py`."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind


class ProcessDied(BaseException):
    """Unwinds the fibers of a killed process. Nothing that they do meanwhile has an effect outside:
    every primitive of the world raises this again."""


class Process:
    """A process: its fibers are killed, stopped and continued together."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.dead = False
        self.fibers: dict[Fiber, None] = {}
        self.stops = 0  # how often it was stopped so far
        self.stopped = False
        self.backlog: list[tuple[Fiber, int, bool]] = []

    def stop(self) -> None:
        """SIGSTOP."""
        self.stopped = True
        self.stops += 1

    def go_on(self) -> None:
        """SIGCONT: the fibers get the wake-ups of the meantime now."""
        self.stopped = False
        backlog, self.backlog = self.backlog, []
        for fiber, ticket, value in backlog:
            self.world.push(self.world.now + self.world.jitter(), (fiber, ticket, value))

    def __repr__(self) -> str:
        return f"<Process {self.name}>"


class Fiber:
    """A thread. `ticket` numbers its waits, so that a wake-up for an earlier wait has no effect."""

    __slots__ = ("done", "greenlet", "joiners", "name", "process", "ticket")

    def __init__(self, process: Process, name: str) -> None:
        self.process = process
        self.name = name
        self.greenlet: greenlet.greenlet | None = None
        self.ticket = 0
        self.done = False
        self.joiners: list[Fiber] = []


class World:
    """The agenda of events. All randomness comes from `random`, and so from the seed."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = _RealRandom(seed)
        self.now = START_S
        self.current: Fiber | None = None
        self.failure: BaseException | None = None
        self.steps = 0
        self.trace = 0  # a checksum over every step: equal traces are equal runs
        self.events: deque[str] = deque(maxlen=EVENTS_SHOWN)
        self.processes: list[Process] = []
        self._agenda: list[tuple[float, int, Any]] = []
        self._order = count()
        self._hub = greenlet.getcurrent()

    # -- time ------------------------------------------------------------------------------------

    def monotonic(self) -> float:
        """`time.monotonic`."""
        return self.now

    def jitter(self) -> float:
        """A random delay of a wake-up."""
        return self.random.random() * WAKE_S_MAX

    def push(self, when: float, what: Any) -> None:
        """Put a wake-up, or a function to call outside all fibers, on the agenda."""
        heapq.heappush(self._agenda, (when, next(self._order), what))

    def call_at(self, when: float, action: Callable[[], None]) -> None:
        """Call `action` at the time `when`, outside all processes, for example to inject a
        fault."""
        self.push(when, action)

    def run(self, until: float) -> None:
        """Run all events up to the time `until`. Raises the exception of any fiber that failed."""
        while self._agenda and self._agenda[0][0] <= until and self.failure is None:
            when, _, what = heapq.heappop(self._agenda)
            self.now = max(self.now, when)
            if isinstance(what, tuple):
                self._resume(*what)
            else:
                what()
            self.steps += 1
            if self.steps > STEPS_MAX:
                raise Violation("deadline", f"{STEPS_MAX} steps by {self.now - START_S:.3f} s")
        if self.failure is not None:
            raise self.failure
        self.now = max(self.now, until)

    def note(self, text: str) -> None:
        """Add an event to those that a failure prints."""
        line = f"{self.now - START_S:9.4f} {text}"
        self.events.append(line)
        self.trace = zlib.crc32(line.encode(), self.trace)

    def fail(self, error: BaseException) -> None:
        """End the run with this error; only the first one counts."""
        if self.failure is None:
            self.failure = error

    # -- fibers ----------------------------------------------------------------------------------

    def process(self, name: str) -> Process:
        """A new process."""
        process = Process(self, name)
        self.processes.append(process)
        return process

    def spawn(self, process: Process, action: Callable[[], Any], name: str) -> Fiber:
        """A new fiber, which runs a moment later."""
        fiber = Fiber(process, name)
        process.fibers[fiber] = None

        def body(_: object = None) -> None:
            try:
                action()
            except ProcessDied:
                pass
            except Violation as error:
                self.fail(error)
            except BaseException as error:  # noqa: BLE001 - any exception of a thread is a finding
                failure = Violation("exception", f"{fiber.name} ended with {error!r}")
                failure.__cause__ = error
                self.fail(failure)
            finally:
                fiber.done = True
                fiber.process.fibers.pop(fiber, None)
                for joiner in fiber.joiners:
                    self.wake(joiner)

        fiber.greenlet = greenlet.greenlet(body, self._hub)
        self.push(self.now + self.jitter(), (fiber, 0, True))
        return fiber

    def _resume(self, fiber: Fiber, ticket: int, value: bool) -> None:
        if fiber.done or fiber.ticket != ticket:
            return
        if fiber.process.stopped:
            fiber.process.backlog.append((fiber, ticket, value))
            return
        self.trace = zlib.crc32(f"{self.now!r}{fiber.name}".encode(), self.trace)
        self._switch(fiber, value)

    def _switch(self, fiber: Fiber, value: bool) -> None:
        assert fiber.greenlet is not None
        before, self.current = self.current, fiber
        try:
            fiber.greenlet.switch(value)
        finally:
            self.current = before

    def park(self, timeout_s: float | None = None) -> bool:
        """Wait until a call of `wake` (True), or for `timeout_s` (False)."""
        fiber = self.current
        assert fiber is not None, "the hand of fate never waits"
        if fiber.process.dead:
            raise ProcessDied
        fiber.ticket += 1
        if timeout_s is not None:
            self.push(self.now + max(WAIT_S_MIN, timeout_s), (fiber, fiber.ticket, False))
        value = bool(self._hub.switch())
        if fiber.process.dead:
            raise ProcessDied
        return value

    def wake(self, fiber: Fiber) -> None:
        """End the fiber's wait, a moment later."""
        self.push(self.now + self.jitter(), (fiber, fiber.ticket, True))

    def sleep(self, seconds: float) -> None:
        """`time.sleep`."""
        self.park(seconds)

    def kill(self, process: Process) -> None:
        """SIGKILL. Call it only outside all processes (see `call_at`)."""
        assert self.current is None
        process.dead = True
        for fiber in list(process.fibers):
            assert fiber.greenlet is not None
            self.current = fiber
            try:
                # A fiber that has not begun ends without running at all.
                fiber.greenlet.throw(ProcessDied)
            except ProcessDied:
                fiber.done = True
            finally:
                self.current = None
        process.fibers.clear()

    # -- the patches -----------------------------------------------------------------------------

    @contextlib.contextmanager
    def rules(self) -> Iterator[None]:
        """While the `with` block runs, all code uses this world's clock and threads."""
        from .threads import stand_ins

        threads = stand_ins(self)
        patches: list[tuple[Any, str, Any]] = [
            (time, "monotonic", self.monotonic),
            (time, "time", lambda: EPOCH_S + self.now),
            (time, "time_ns", lambda: int((EPOCH_S + self.now) * 1e9)),
            (time, "sleep", self.sleep),
            (secrets, "token_bytes", self.random.randbytes),
            (random, "Random", self._dice),
            *((threading, name, kind) for name, kind in threads.items()),
            # No fiber is a main thread: no signal reaches it.
            (signal_safe, "_main", None),
            (signal_safe, "_workers", _Workers(self)),
        ]
        saved = random.getstate()
        random.seed(self.seed)
        try:
            with patched(patches), _exceptions_to(self):
                yield
        finally:
            random.setstate(saved)

    def _dice(self, seed: Any = None) -> random.Random:
        return _RealRandom(self.random.getrandbits(64) if seed is None else seed)

    def end(self) -> None:
        """Kill every process that is left."""
        for process in self.processes:
            if not process.dead:
                self.kill(process)
        self._agenda.clear()


@contextlib.contextmanager
def patched(patches: list[tuple[Any, str, Any]]) -> Iterator[None]:
    """Replace attributes for the `with` block: (object, name, value)."""
    with contextlib.ExitStack() as stack:
        for target, name, value in patches:
            stack.callback(setattr, target, name, getattr(target, name))
            setattr(target, name, value)
        yield


class _Workers:
    """Replaces the threads for tasks that must not be interrupted, by a fiber for each task."""

    def __init__(self, world: World) -> None:
        self._world = world

    def begin(self) -> None:
        """Nothing to start."""

    def put(self, action: Callable[[], object]) -> None:
        """Run `action` soon, in the calling process, if it is alive."""
        fiber = self._world.current
        if fiber is not None and not fiber.process.dead:
            self._world.spawn(fiber.process, action, "worker")


class _Exceptions(logging.Handler):
    """Product code logs unexpected exceptions and goes on; here they end the run."""

    def __init__(self, world: World) -> None:
        super().__init__(logging.ERROR)
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, Violation | None):
            return
        failure = Violation("exception", f"{record.getMessage()}: {error!r}")
        failure.__cause__ = error
        self._world.fail(failure)


@contextlib.contextmanager
def _exceptions_to(world: World) -> Iterator[None]:
    logger, handler = logging.getLogger("tiffin"), _Exceptions(world)
    before = logger.level, logger.propagate
    logger.addHandler(handler)
    # Formatting unread log records would take a third of the time.
    logger.level, logger.propagate = logging.ERROR, False
    logger.manager._clear_cache()  # type: ignore[attr-defined]
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.level, logger.propagate = before
        logger.manager._clear_cache()  # type: ignore[attr-defined]
