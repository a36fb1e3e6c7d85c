"""Runs long work in an event loop, in slices of a millisecond. Threads would not help: they compete
for the interpreter (the GIL)."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from ..state.sliced_work import Work

T = TypeVar("T")

SLICE_S = 1e-3


class TimeSlices:
    """Yields to the event loop whenever a slice is over.

    turns = TimeSlices()
    for one in many:
        work(one)
        await turns.give()
    """

    def __init__(self) -> None:
        self._until = time.perf_counter() + SLICE_S

    async def give(self) -> None:
        """Yield to the event loop if the slice is over; return at once while time is left."""
        if time.perf_counter() >= self._until:
            await asyncio.sleep(0)
            self._until = time.perf_counter() + SLICE_S

    async def finish(self, work: Work[T]) -> T:
        """Run all of `work`, yielding to the event loop between pieces, and return its result."""
        while True:
            try:
                next(work)
            except StopIteration as end:
                found: T = end.value
                return found
            await self.give()
