"""The virtual clock: what happens when, in order of time and, at one time, in order of asking."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class ScheduledEvent:
    """What is to happen at `at_s`; not after `cancel`."""

    __slots__ = ("act", "at_s", "number")

    def __init__(self, at_s: float, number: int, act: Callable[[], None]) -> None:
        self.at_s, self.number = at_s, number
        self.act: Callable[[], None] | None = act

    def cancel(self) -> None:
        """It does not happen."""
        self.act = None

    def __lt__(self, other: ScheduledEvent) -> bool:
        return (self.at_s, self.number) < (other.at_s, other.number)


class VirtualClock:
    """Seconds since the start, which pass only in `run`."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._events: list[ScheduledEvent] = []
        self._number = 0

    def at(self, at_s: float, act: Callable[[], None]) -> ScheduledEvent:
        """Call `act` at `at_s`; at once if that is over."""
        self._number += 1
        event = ScheduledEvent(max(at_s, self.now_s), self._number, act)
        heapq.heappush(self._events, event)
        return event

    def after(self, seconds: float, act: Callable[[], None]) -> ScheduledEvent:
        """Call `act` in so many seconds."""
        return self.at(self.now_s + seconds, act)

    def run(self, while_true: Callable[[], bool]) -> None:
        """Let time pass from event to event, until there is none or the condition ends."""
        while self._events and while_true():
            event = heapq.heappop(self._events)
            if event.act is not None:
                self.now_s = event.at_s
                event.act()
