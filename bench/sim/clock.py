"""The virtual clock: what happens when, in order of time and, at one time, in order of asking."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class ScheduledEvent:
    """What is to happen; not after `cancel`."""

    __slots__ = ("act",)

    def __init__(self, act: Callable[[], None]) -> None:
        self.act: Callable[[], None] | None = act

    def cancel(self) -> None:
        """It does not happen."""
        self.act = None


class VirtualClock:
    """Seconds since the start, which pass only in `run`."""

    def __init__(self) -> None:
        self.now_s = 0.0
        # Tuples are compared in C. Numbers differ, so events themselves are never compared.
        self._events: list[tuple[float, int, ScheduledEvent]] = []
        self._number = 0

    def at(self, at_s: float, act: Callable[[], None]) -> ScheduledEvent:
        """Call `act` at `at_s`; at once if that is over."""
        self._number += 1
        event = ScheduledEvent(act)
        heapq.heappush(self._events, (max(at_s, self.now_s), self._number, event))
        return event

    def after(self, seconds: float, act: Callable[[], None]) -> ScheduledEvent:
        """Call `act` in so many seconds."""
        return self.at(self.now_s + seconds, act)

    def run(self, while_true: Callable[[], bool]) -> None:
        """Let time pass from event to event, until there is none or the condition ends."""
        while self._events and while_true():
            at_s, _, event = heapq.heappop(self._events)
            if event.act is not None:
                self.now_s = at_s
                event.act()
