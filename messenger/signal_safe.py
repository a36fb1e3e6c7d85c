"""Signal safety: actions that no exception from a signal handler can interrupt half done.

Python runs signal handlers in the main thread, between any two of its steps, and their exceptions
(KeyboardInterrupt, an alarm's timeout) propagate from there: out of a constructor, an `__exit__`, a
`finally`, a `Condition.wait` that has not taken its lock again. No Python code can be written so
that such an exception never leaves anything half done. So a worker thread carries out the actions
of the main thread that change shared state, and the main thread only waits: in a lock implemented
in C, where a signal ends only the wait. That takes some 16 us; other threads carry out their
actions themselves.

The main thread itself may do the following, because each is one step. All of it held in tests with
tens of thousands of interrupts under CPython 3.11, 3.12 and 3.13, while `with` on a
`threading.Condition` failed in every third:

- one call of a C function, such as `SimpleQueue.put`, `dict.pop`, `list.append`, and one
  assignment;
- `with lock:` on a `threading.Lock` or `RLock`, which are implemented in C;
- to call a function and store its result: `noted.extend(map(function, (argument,)))`;
- the first call of a `finally`.
"""

from __future__ import annotations

import _thread
import contextvars
import logging
import os
import threading
import weakref
from functools import partial, wraps
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger(__name__)
S = TypeVar("S")
P = ParamSpec("P")
T = TypeVar("T")

# Limit of idle worker threads: one is always there, and most work is done before the next comes.
_IDLE_MAX = 2
# The main thread waits for a lock in steps of this timeout. A signal just before the wait does not
# end it: its handler would run only after the action, perhaps long after a Ctrl-C.
_NOTICE_S = 0.05
NAME = "tiffin-uninterrupted"


class _Workers:
    """A pool of worker threads that grows as needed: each action begins at once."""

    def __init__(self) -> None:
        self._work: SimpleQueue[Callable[[], object]] = SimpleQueue()
        # Reentrant: any thread can call it, also a finaliser that interrupts any other code.
        self.put = self._work.put
        self._began = False
        self._counting = threading.Lock()
        self._idle = 0

    def begin(self) -> None:
        """Start the first worker thread, unless that has been done. Idempotent."""
        if not self._began:
            # Not a `Thread`, whose start waits for an event: a thread that gets no signals starts
            # that one. To do this twice does no harm.
            _thread.start_new_thread(self._more, ())
            self._began = True

    def _more(self) -> None:
        with self._counting:
            self._idle += 1
        threading.Thread(target=self._run, name=NAME, daemon=True).start()

    def _run(self) -> None:
        while True:
            action = self._work.get()
            with self._counting:
                self._idle -= 1
                alone = not self._idle
            if alone:
                self._more()
            _carry_out(action)
            del action
            with self._counting:
                if self._idle >= _IDLE_MAX:
                    return
                self._idle += 1


class Once:
    """An action to be done once, by the first caller of `take`. Thread-safe."""

    __slots__ = ("_left",)

    def __init__(self) -> None:
        self._left = [True]

    @property
    def taken(self) -> bool:
        """Whether a caller has taken it."""
        return not self._left

    def take(self) -> bool:
        """Whether this caller is the first, which then has to do the action."""
        try:
            self._left.pop()
        except IndexError:
            return False
        return True


class _Task(Generic[T]):
    """One action, its outcome, and the lock on which its caller waits."""

    __slots__ = (
        "_action",
        "_undo",
        "_undoing",
        "abandoned",
        "ended",
        "error",
        "has_ended",
        "outcome",
    )

    def __init__(self, action: Callable[[], T], undo: Callable[[T], object] | None) -> None:
        self._action = action
        self._undo = undo
        self._undoing = Once()
        self.abandoned = False
        self.has_ended = False
        self.outcome: T | None = None
        self.error: BaseException | None = None
        self.ended = threading.Lock()
        self.ended.acquire()

    def __call__(self) -> None:
        try:
            self.outcome = self._action()
        except BaseException as error:  # noqa: BLE001 - raised again in the waiting caller
            self.error = error
        self.has_ended = True
        self.ended.release()
        if self.abandoned:
            self.undo()

    def undo(self) -> None:
        """Pass the outcome, which no caller gets any more, to the `undo` callback, once."""
        if not self._undoing.take():
            return
        outcome, self.outcome = self.outcome, None
        if self._undo is not None and self.error is None:
            self._undo(outcome)  # type: ignore[arg-type]


def interruptible() -> bool:
    """Whether a signal handler may raise in this thread."""
    return threading.get_ident() == _main


def uninterrupted(
    action: Callable[[], T],
    *,
    undo: Callable[[T], object] | None = None,
    cancel: Callable[[], object] | None = None,
    within: SerialThread | None = None,
) -> T:
    """Call `action()` in a thread where no signal handler raises, and return its result; `within`
    a certain thread, if the action has to be queued behind those given to that thread before.

    If a signal handler raises meanwhile in the caller, the callback `undo` gets the outcome, and
    the exception propagates: at once or, with a `cancel` callback, which should make the action end
    early, when the action has ended. `cancel` is for actions that access the caller's memory.
    """
    if threading.get_ident() != _main:
        return action()
    # In the caller's context: a cancellation or a deadline of the call applies to the action too.
    task = _Task(partial(contextvars.copy_context().run, action), undo)
    _workers.begin()
    put = _workers.put if within is None else within.put
    try:
        put(task)
        while not task.ended.acquire(timeout=_NOTICE_S):
            pass
        error = task.error
        if error is None:
            return task.outcome  # type: ignore[return-value]
    except BaseException:
        task.abandoned = True
        if task.has_ended:
            _workers.put(task.undo)
        elif cancel is not None:
            _workers.put(cancel)
            _outlast(task)
        raise
    try:
        raise error
    finally:
        # An error that a frame of its own traceback refers to would be a reference cycle, and keep
        # alive every object of these frames.
        del error, task


def _outlast(task: _Task[Any]) -> None:
    """Wait for the end of the task, and ignore exceptions meanwhile."""
    while not task.has_ended:
        try:
            task.ended.acquire()
        except BaseException:  # noqa: BLE001 - the caller raises the first exception
            continue


def off_main_thread(
    carry_out: Callable[[Any, partial[Any]], Any],
) -> Callable[[Callable[Concatenate[S, P], T]], Callable[Concatenate[S, P], T]]:
    """A decorator of methods: a call in the main thread becomes `carry_out(owner, action)`."""

    def decorated(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
        @wraps(method)
        def carried_out(owner: S, /, *args: P.args, **options: P.kwargs) -> T:
            if not interruptible():
                return method(owner, *args, **options)
            found: T = carry_out(owner, partial(method, owner, *args, **options))
            return found

        return carried_out

    return decorated


def later(action: Callable[[], object]) -> None:
    """Call `action` soon, in a worker thread. Its errors are logged."""
    _workers.begin()
    _workers.put(action)


def finaliser() -> Callable[[Any], None]:
    """A callback for a `weakref.ref`: a worker thread soon calls the reference itself. The callback
    is a C function, so that no signal handler can interrupt it."""
    _workers.begin()
    return _workers.put


class Forsaken(weakref.ref[Any]):
    """A weak reference that cleans up after an object which was neither ended nor given back,
    because an exception interrupted that."""

    __slots__ = ("action",)

    action: Callable[[], object]

    @classmethod
    def when(cls, forsaken: object, action: Callable[[], object]) -> Forsaken:
        """Call `action`, which must not refer to `forsaken`, in another thread once `forsaken` has
        been garbage-collected."""
        made = cls(forsaken, finaliser())
        made.action = action
        _kept[id(made)] = made  # else this reference may be collected together with `forsaken`
        return made

    def forget(self) -> None:
        """Cancel the clean-up, unless it has begun."""
        _kept.pop(id(self), None)

    def __call__(self) -> None:
        self.forget()
        self.action()


_kept: dict[int, Forsaken] = {}


class SerialThread:
    """A thread that carries out the actions of its queue, one after the other."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._work: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def put(self, action: Callable[[], object]) -> None:
        """Queue an action behind all earlier ones. Its errors are logged, not raised here."""
        if self._thread is None:
            uninterrupted(self._begin)
        self._work.put(action)

    def close(self) -> None:
        """Wait until all queued actions are done, and end the thread."""
        thread = self._thread
        if thread is not None:
            self._work.put(None)
            thread.join()

    def _begin(self) -> None:
        if self._thread is None:
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            thread.start()
            self._thread = thread

    def _run(self) -> None:
        while (action := self._work.get()) is not None:
            _carry_out(action)
            del action


def _carry_out(action: Callable[[], object]) -> None:
    try:
        action()
    except Exception:
        log.exception("what was to be done in the background failed")


_workers = _Workers()
_main = threading.main_thread().ident


def _forget_all() -> None:
    """In a forked child: its only thread is its main one, and the workers are the parent's."""
    global _workers, _main
    _workers, _main = _Workers(), threading.get_ident()


os.register_at_fork(after_in_child=_forget_all)

__all__ = [
    "Forsaken",
    "Once",
    "SerialThread",
    "finaliser",
    "interruptible",
    "later",
    "off_main_thread",
    "uninterrupted",
]
