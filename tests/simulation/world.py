"""Virtual time, and threads that are fibers: the ground that the simulated cluster stands on.

The product's blocking code runs as it is. While a `World` runs, `time.monotonic`, `time.sleep`,
`threading.Thread`, `Lock`, `Event` and the like are this file's, so what would wait in the kernel
parks a greenlet instead, and the next event of the agenda goes on: a second of waiting costs
nothing, one fiber runs at a time, and who runs next follows from the seed alone.

Events of the same moment are shuffled, because what wakes somebody takes up to WAKE_S_MAX: that is
where the interleavings come from.
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
from typing import TYPE_CHECKING, Any, NamedTuple

import greenlet

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

# How long a thread takes to notice what it waited for.
WAKE_S_MAX = 0.0001
# The least that a wait takes: a loop that waits for nothing must not stop the clock.
WAIT_S_MIN = 1e-6
# The clock at the beginning, and the date that goes with it.
START_S = 1000.0
EPOCH_S = 1_700_000_000.0
# What a failure prints.
EVENTS_SHOWN = 40
# A run of a few virtual minutes has some ten thousand steps; a fiber that spins never ends.
STEPS_MAX = 1_000_000

_RealRandom = random.Random


class Violation(AssertionError):
    """An invariant does not hold. `kind` says which one; see `INVARIANTS` in `cluster.py`."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind


class ProcessDied(BaseException):
    """Unwinds the fibers of a process that was killed. Nothing they do on the way has an effect
    outside: every primitive of the world raises this again."""


class Process:
    """What dies, stops and continues as one: its fibers."""

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
        """SIGCONT: all that happened meanwhile is noticed now."""
        self.stopped = False
        backlog, self.backlog = self.backlog, []
        for fiber, ticket, value in backlog:
            self.world.push(self.world.now + self.world.jitter(), (fiber, ticket, value))

    def __repr__(self) -> str:
        return f"<Process {self.name}>"


class Fiber:
    """A thread. `ticket` numbers its waits, so that what wakes an earlier one has no effect."""

    __slots__ = ("done", "greenlet", "joiners", "name", "process", "ticket")

    def __init__(self, process: Process, name: str) -> None:
        self.process = process
        self.name = name
        self.greenlet: greenlet.greenlet | None = None
        self.ticket = 0
        self.done = False
        self.joiners: list[Fiber] = []


class World:
    """The agenda. Everything random comes from `random`, so from the seed."""

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
        """How late a thread notices something."""
        return self.random.random() * WAKE_S_MAX

    def push(self, when: float, what: Any) -> None:
        """Put a wake-up, or a function to call outside all fibers, on the agenda."""
        heapq.heappush(self._agenda, (when, next(self._order), what))

    def call_at(self, when: float, action: Callable[[], None]) -> None:
        """Call `action` then: the hand of fate, which belongs to no process."""
        self.push(when, action)

    def run(self, until: float) -> None:
        """Let it happen until then. Raises what any fiber failed with."""
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
        """Something worth telling when the run fails."""
        line = f"{self.now - START_S:9.4f} {text}"
        self.events.append(line)
        self.trace = zlib.crc32(line.encode(), self.trace)

    def fail(self, error: BaseException) -> None:
        """End the run with this; the first one counts."""
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
            except BaseException as error:  # noqa: BLE001 - any way a thread can end is a finding
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
        """Wait until somebody calls `wake` (True), or for this long (False)."""
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
        """End its wait, a moment later."""
        self.push(self.now + self.jitter(), (fiber, fiber.ticket, True))

    def sleep(self, seconds: float) -> None:
        """`time.sleep`."""
        self.park(seconds)

    def kill(self, process: Process) -> None:
        """SIGKILL. Called by the hand of fate only."""
        assert self.current is None
        process.dead = True
        for fiber in list(process.fibers):
            assert fiber.greenlet is not None
            self.current = fiber
            try:
                # One that has not begun ends without running at all.
                fiber.greenlet.throw(ProcessDied)
            except ProcessDied:
                fiber.done = True
            finally:
                self.current = None
        process.fibers.clear()

    # -- the patches -----------------------------------------------------------------------------

    @contextlib.contextmanager
    def rules(self) -> Iterator[None]:
        """While the block runs, this world's clock and threads are everybody's."""
        threads = _threads(self)
        patches: list[tuple[Any, str, Any]] = [
            (time, "monotonic", self.monotonic),
            (time, "time", lambda: EPOCH_S + self.now),
            (time, "time_ns", lambda: int((EPOCH_S + self.now) * 1e9)),
            (time, "sleep", self.sleep),
            (secrets, "token_bytes", self.random.randbytes),
            (random, "Random", self._dice),
            *((threading, name, kind) for name, kind in threads.items()),
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
    """Attributes replaced for the block: (object, name, value)."""
    with contextlib.ExitStack() as stack:
        for target, name, value in patches:
            stack.callback(setattr, target, name, getattr(target, name))
            setattr(target, name, value)
        yield


class _Exceptions(logging.Handler):
    """Product code logs what it did not expect and goes on; here it ends the run."""

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
    # Formatting what nobody reads would take a third of the time.
    logger.level, logger.propagate = logging.ERROR, False
    logger.manager._clear_cache()  # type: ignore[attr-defined]
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.level, logger.propagate = before
        logger.manager._clear_cache()  # type: ignore[attr-defined]


# -- threading, as far as the product uses it ------------------------------------------------------


def _threads(world: World) -> dict[str, Any]:
    """Classes under the names of the `threading` module, bound to one world."""

    def bound(kind: type[Any]) -> type[Any]:
        return type(kind.__name__, (kind,), {"world": world})

    names = {"Thread": VThread, "Lock": VLock, "RLock": VRLock, "Event": VEvent}
    return {name: bound(kind) for name, kind in names.items()} | {"Condition": _condition(world)}


def _condition(world: World) -> type[Any]:
    return type("Condition", (VCondition,), {"world": world})


class VLock:
    """`threading.Lock`: first come, first served."""

    world: World

    def __init__(self) -> None:
        self._locked = False
        self._waiters: deque[list[Any]] = deque()  # [fiber, whether it got the lock]

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """See `threading.Lock.acquire`."""
        if not self._locked:
            self._locked = True
            return True
        if not blocking or timeout == 0:
            return False
        waiter = [self.world.current, False]
        self._waiters.append(waiter)
        try:
            self.world.park(None if timeout < 0 else timeout)
        except ProcessDied:
            self._leave(waiter)
            raise
        if not waiter[1]:
            self._waiters.remove(waiter)
        return bool(waiter[1])

    def _leave(self, waiter: list[Any]) -> None:
        if waiter[1]:
            self.release()
        else:
            self._waiters.remove(waiter)

    def release(self) -> None:
        """See `threading.Lock.release`."""
        if not self._locked:
            raise RuntimeError("release unlocked lock")
        if self._waiters:
            waiter = self._waiters.popleft()
            waiter[1] = True
            self.world.wake(waiter[0])
        else:
            self._locked = False

    def locked(self) -> bool:
        """See `threading.Lock.locked`."""
        return self._locked

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class VRLock:
    """`threading.RLock`."""

    world: World

    def __init__(self) -> None:
        self._lock = type("Lock", (VLock,), {"world": self.world})()
        self._owner: Any = None
        self._depth = 0

    def _me(self) -> Any:
        return self.world.current or self.world

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """See `threading.RLock.acquire`."""
        if self._owner is not self._me():
            if not self._lock.acquire(blocking, timeout):
                return False
            self._owner = self._me()
        self._depth += 1
        return True

    def release(self) -> None:
        """See `threading.RLock.release`."""
        if self._owner is not self._me():
            raise RuntimeError("cannot release un-acquired lock")
        self._depth -= 1
        if not self._depth:
            self._owner = None
            self._lock.release()

    def drop(self) -> int:
        """Release it whatever its depth, which is returned."""
        depth, self._depth, self._owner = self._depth, 0, None
        self._lock.release()
        return depth

    def take(self, depth: int) -> None:
        """Undo `drop`."""
        self._lock.acquire()
        self._owner, self._depth = self._me(), depth

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class VEvent:
    """`threading.Event`."""

    world: World

    def __init__(self) -> None:
        self._set = False
        self._waiters: list[Fiber] = []

    def is_set(self) -> bool:
        """See `threading.Event.is_set`."""
        return self._set

    def set(self) -> None:
        """See `threading.Event.set`."""
        self._set = True
        waiters, self._waiters = self._waiters, []
        for fiber in waiters:
            self.world.wake(fiber)

    def clear(self) -> None:
        """See `threading.Event.clear`."""
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        """See `threading.Event.wait`."""
        if self._set:
            return True
        fiber = self.world.current
        assert fiber is not None
        self._waiters.append(fiber)
        woken = self.world.park(timeout)
        if fiber in self._waiters:
            self._waiters.remove(fiber)
        return woken or self._set


class VCondition:
    """`threading.Condition` with a lock of its own."""

    world: World

    def __init__(self) -> None:
        self._lock = type("RLock", (VRLock,), {"world": self.world})()
        self._waiters: deque[list[Any]] = deque()

    def wait(self, timeout: float | None = None) -> bool:
        """See `threading.Condition.wait`."""
        waiter = [self.world.current, False]
        self._waiters.append(waiter)
        depth = self._lock.drop()
        try:
            self.world.park(timeout)
        finally:
            if not waiter[1]:
                self._waiters.remove(waiter)
            self._lock.take(depth)
        return bool(waiter[1])

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        """See `threading.Condition.wait_for`."""
        deadline = None if timeout is None else self.world.now + timeout
        while not (result := predicate()):
            left_s = None if deadline is None else deadline - self.world.now
            if left_s is not None and left_s <= 0:
                break
            self.wait(left_s)
        return result

    def notify(self, n: int = 1) -> None:
        """See `threading.Condition.notify`."""
        for _ in range(min(n, len(self._waiters))):
            waiter = self._waiters.popleft()
            waiter[1] = True
            self.world.wake(waiter[0])

    def notify_all(self) -> None:
        """See `threading.Condition.notify_all`."""
        self.notify(len(self._waiters))

    def __enter__(self) -> bool:
        return bool(self._lock.acquire())

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class VThread:
    """`threading.Thread`: a fiber of the process that starts it."""

    world: World

    def __init__(
        self,
        group: None = None,
        target: Callable[..., Any] | None = None,
        name: str | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        daemon: bool | None = None,
    ) -> None:
        self.name = name or "thread"
        self.daemon = daemon
        self._call = (target, args, kwargs or {})
        self._fiber: Fiber | None = None

    def start(self) -> None:
        """See `threading.Thread.start`."""
        current = self.world.current
        assert current is not None, "threads are started by processes"
        target, args, kwargs = self._call
        assert target is not None
        name = f"{current.process.name}/{self.name}"
        self._fiber = self.world.spawn(current.process, lambda: target(*args, **kwargs), name)

    @property
    def ident(self) -> int | None:
        """See `threading.Thread.ident`."""
        return None if self._fiber is None else id(self._fiber)

    def is_alive(self) -> bool:
        """See `threading.Thread.is_alive`."""
        fiber = self._fiber
        return fiber is not None and not fiber.done and not fiber.process.dead

    def join(self, timeout: float | None = None) -> None:
        """See `threading.Thread.join`."""
        assert self._fiber is not None, "cannot join a thread before it is started"
        if not self._fiber.done:
            assert self.world.current is not None
            self._fiber.joiners.append(self.world.current)
            self.world.park(timeout)


class VFuture:
    """`concurrent.futures.Future`, as far as the pool uses it."""

    def __init__(self, action: Callable[[], Any]) -> None:
        self._action = action
        self._done = threading.Event()
        self._begun = self._cancelled = False
        self._result: Any = None
        self._error: BaseException | None = None

    def run(self) -> None:
        """Carry it out, unless it was cancelled."""
        if self._cancelled:
            return
        self._begun = True
        try:
            self._result = self._action()
        except Exception as error:  # noqa: BLE001 - raised again by `result`
            self._error = error
        self._done.set()

    def cancel(self) -> bool:
        """See `Future.cancel`."""
        if not self._begun:
            self._cancelled = True
            self._done.set()
        return self._cancelled

    def done(self) -> bool:
        """See `Future.done`."""
        return self._done.is_set()

    def result(self, timeout: float | None = None) -> Any:
        """See `Future.result`."""
        if not self._done.wait(timeout):
            raise TimeoutError
        if self._error is not None:
            raise self._error
        return self._result

    def settled(self, timeout: float | None) -> bool:
        """Whether it has ended, or does within this time."""
        return self._done.wait(timeout)


class Waited(NamedTuple):
    """What `wait` returns."""

    done: set[VFuture]
    not_done: set[VFuture]


def wait(futures: Iterable[VFuture], timeout: float | None = None) -> Waited:
    """`concurrent.futures.wait` for all of them."""
    futures = list(futures)
    deadline = None if timeout is None else time.monotonic() + timeout
    try:
        for future in futures:
            left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            future.settled(left_s)
    except ProcessDied:
        # Who waits until nothing runs any more need not: nothing does.
        return Waited(set(futures), set())
    done = {future for future in futures if future.done()}
    return Waited(done, set(futures) - done)


class VExecutor:
    """`ThreadPoolExecutor`: as many fibers at a time as it has workers."""

    def __init__(self, max_workers: int, thread_name_prefix: str = "worker") -> None:
        self._name = thread_name_prefix
        self._idle = max_workers
        self._queue: deque[VFuture] = deque()
        self._running: list[Any] = []
        self._shut = False

    def submit(self, action: Callable[..., Any], *args: Any) -> VFuture:
        """See `Executor.submit`."""
        if self._shut:
            raise RuntimeError("cannot schedule new futures after shutdown")
        future = VFuture(lambda: action(*args))
        self._queue.append(future)
        if self._idle:
            self._idle -= 1
            self._running = [thread for thread in self._running if thread.is_alive()]
            thread = threading.Thread(target=self._work, name=self._name)
            self._running.append(thread)
            thread.start()
        return future

    def _work(self) -> None:
        while self._queue:
            self._queue.popleft().run()
        self._idle += 1

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """See `Executor.shutdown`."""
        self._shut = True
        if cancel_futures:
            for future in self._queue:
                future.cancel()
            self._queue.clear()
        for thread in self._running if wait else ():
            thread.join()
