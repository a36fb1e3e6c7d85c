"""Deadline propagation: the deadline of a whole call, which bounds each wait inside it.

A verb has one `timeout_s` and many waits: for its turn, a connection, the directory, an answer of
the home node and then of other nodes. Each wait has its own timeout, but does not know how much
time earlier waits took. So the deadline of the whole call is in the context (`ContextVar`) that the
call runs in, of which its worker threads have a copy, and each wait calls `left_s` to cap its
timeout. Outside of calls, in background threads, waits keep their own timeouts.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from contextvars import ContextVar, Token
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

T = TypeVar("T")

# A node answers parked requests at their deadline; after this grace the node itself is late.
GRACE_S = 0.25
# A call ends half a second after its deadline at most: a reply may be late (GRACE_S), and one more
# wait may follow, such as to tell the node that the call gave up. The rest is for overhead of this
# machine: threads that wake up, memory that is freed.
OVERRUN_S = 0.45


class Within:
    """A call with a deadline, `timeout_s` and OVERRUN_S from its start; a nested call ends with the
    outer one at the latest. For one use."""

    __slots__ = ("_outer", "_task", "_timeout_s", "_tokens", "end")

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._tokens: list[Token[Within | None]] = []
        self._task: asyncio.Task[Any] | None = None

    def run(self, action: Callable[[], T]) -> T:
        """Run `action()` under this deadline."""
        self._begin()
        try:
            # Set and recorded in one step, which no signal interrupts (`messenger/signal_safe.py`).
            self._tokens.extend(map(_current.set, (self,)))
            return action()
        finally:
            # Inline: a signal could interrupt the first step of a function of ours.
            if self._tokens:
                _current.reset(self._tokens[0])

    async def run_soon(self, action: Callable[[], Awaitable[T]]) -> T:
        """`await action()` under this deadline."""
        self._begin()
        self._task = asyncio.current_task()
        try:
            self._tokens.extend(map(_current.set, (self,)))
            return await action()
        finally:
            if self._tokens:
                # The call is lost (`is_lost`), or another task's context runs this.
                with contextlib.suppress(ValueError, RuntimeError):
                    _current.reset(self._tokens[0])
            self._task = None  # break a cycle: the traceback of the task's error refers to us

    def _begin(self) -> None:
        self._outer = _call()
        self.end = time.monotonic() + self._timeout_s + OVERRUN_S
        if self._outer is not None:
            self.end = min(self.end, self._outer.end)

    def is_lost(self) -> bool:
        """Whether this call is stale: a loop whose run was interrupted abandoned its task, and the
        current task is another one in the very same context, as the tasks of an `asyncio.Runner`
        are. If so, removes the call from the context. A task that works for the call has a copy of
        the context, where that fails."""
        if self._task is None or asyncio._get_running_loop() is None:
            return False
        if self._task is asyncio.current_task():
            return False
        try:
            _current.reset(self._tokens[0])
        except (ValueError, RuntimeError):
            return False
        return True

    def worked(self, seconds: float) -> None:
        """See `worked`."""
        self.end += seconds
        if self._outer is not None:
            self._outer.worked(seconds)


def end() -> float:
    """The deadline of the current call, by `time.monotonic()`; infinite outside of a call."""
    call = _call()
    return math.inf if call is None else call.end


def left_s(wait_s: float) -> float:
    """The timeout for a wait: `wait_s`, or the time left of the current call if that is less."""
    call = _call()
    return wait_s if call is None else max(0.0, min(wait_s, call.end - time.monotonic()))


def until_s(deadline: float) -> float:
    """The seconds from now to a deadline by `time.monotonic()`; 0 once it has passed."""
    return max(0.0, deadline - time.monotonic())


def worked(seconds: float) -> None:
    """Extend the deadline of the current call, and of its outer calls, by `seconds` of local work
    (copying, hashing). Such work is not cut short, and does not shorten later waits."""
    call = _call()
    if call is not None:
        call.worked(seconds)


def _call() -> Within | None:
    while (call := _current.get()) is not None and call.is_lost():
        pass
    return call


_current: ContextVar[Within | None] = ContextVar("call", default=None)
