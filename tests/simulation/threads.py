"""Replacements for `threading` and `concurrent.futures`, as far as the product uses them."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

from .world import ProcessDied

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from .world import Fiber, World


def stand_ins(world: World) -> dict[str, Any]:
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
        """Release it completely; returns its depth."""
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
    """`threading.Condition`."""

    world: World

    def __init__(self, lock: VRLock | None = None) -> None:
        self._lock = lock or type("RLock", (VRLock,), {"world": self.world})()
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
        """Run the action, unless it was cancelled."""
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
    """The result of `wait`."""

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
        # The process has died, so none of its fibers runs any more: all futures count as done.
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
