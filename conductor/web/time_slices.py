"""Runs long work in an event loop, in slices of a quarter of a millisecond. Threads would not
help: they compete for the interpreter (the GIL).

Of several jobs that wait for a slice, one has the next one, in turn, and only after all that the
loop has received meanwhile was served. So a decision waits for the rest of one slice, whatever else
goes on.

A loop that has more to serve than it can would leave next to nothing to the jobs: a quarter of a
millisecond after each ten. One of them takes the ends of requests, without which the conductor
would have no room for others. So the loop owes the jobs that wait half the time that it works for
others, which makes a third of all, and what it owes them beyond 20 ms makes slices longer: a burst
of decisions does not, more of them than it can make do. Then decisions wait for each other anyway,
and now half as long again.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import TYPE_CHECKING, TypeVar
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from ..state.sliced_work import Work

T = TypeVar("T")

SLICE_S = 2.5e-4
# What waiting jobs are owed, as a part of the time that the loop works for others; how much of it
# they wait for with short slices; and how long a slice may be.
SHARE = 0.5
PATIENCE_S = 2e-2
SLICE_S_MAX = 1e-2


class TimeSlices:
    """Yields to the event loop whenever a slice is over.

    turns = TimeSlices()
    for one in many:
        work(one)
        await turns.give()
    """

    def __init__(self) -> None:
        self._until = time.perf_counter() + SLICE_S
        self._had_slice = False

    async def give(self) -> None:
        """Yield to the event loop if the slice is over; return at once while time is left."""
        if time.perf_counter() >= self._until:
            loop = asyncio.get_running_loop()
            turns = _turns_of(loop)
            await turns.next(loop, had_slice=self._had_slice)
            self._until = time.perf_counter() + turns.slice_s()
            self._had_slice = True

    async def finish(self, work: Work[T]) -> T:
        """Run all of `work`, yielding to the event loop between pieces, and return its result."""
        while True:
            try:
                next(work)
            except StopIteration as end:
                found: T = end.value
                return found
            await self.give()


class _Turns:
    """The jobs of one loop that wait for a slice, the longest waiting first."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._owed_s = 0.0  # to the jobs
        self._since = 0.0  # the last slice, or when it began; of what the loop has worked

    def next(self, loop: asyncio.AbstractEventLoop, *, had_slice: bool) -> asyncio.Future[None]:
        """Done when it is the caller's turn."""
        if had_slice:
            self._owed_s = max(self._owed_s - self._passed_s(), 0.0)
        elif not self._waiting:
            self._owed_s, self._since = 0.0, _worked_s()
        turn = loop.create_future()
        self._waiting.append(turn)
        if len(self._waiting) == 1:
            loop.call_soon(self._received, loop)
        return turn

    def slice_s(self) -> float:
        """How long the slice is that begins now."""
        self._owed_s = min(self._owed_s + SHARE * self._passed_s(), PATIENCE_S + SLICE_S_MAX)
        return max(self._owed_s - PATIENCE_S, SLICE_S)

    def _passed_s(self) -> float:
        """Since this was asked for the last time."""
        before, self._since = self._since, _worked_s()
        return self._since - before

    def _received(self, loop: asyncio.AbstractEventLoop) -> None:
        """The loop has read what came during the last slice; it is served before the next one."""
        loop.call_soon(self._begin, loop)

    def _begin(self, loop: asyncio.AbstractEventLoop) -> None:
        turn = self._waiting.popleft()
        if not turn.done():  # its job was cancelled
            turn.set_result(None)
        if self._waiting:
            loop.call_soon(self._received, loop)


# Not by the clock: of a busy machine other processes have a part, too.
_worked_s = time.thread_time

_turns: WeakKeyDictionary[asyncio.AbstractEventLoop, _Turns] = WeakKeyDictionary()


def _turns_of(loop: asyncio.AbstractEventLoop) -> _Turns:
    turns = _turns.get(loop)
    if turns is None:
        turns = _turns[loop] = _Turns()
    return turns
