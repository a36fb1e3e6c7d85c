"""How late this process is: the time in which its event loop did not run when it was to.

A timeout that passes in that time says nothing of the other side, whose answer may have come and
could not be read.
"""

from __future__ import annotations

import asyncio
import time

# Often enough to see half of the shortest useful timeout, and 20 wake-ups a second.
_TICK_S = 0.05


class OwnLateness:
    """Measures; `start` needs a running event loop."""

    def __init__(self) -> None:
        self.lost_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0

    def start(self) -> None:
        """Begin to measure."""
        self._wait()

    def stop(self) -> None:
        """End it."""
        if self._timer is not None:
            self._timer.cancel()

    def now_lost_s(self) -> float:
        """Seconds that were lost so far, those since the last tick included."""
        return self.lost_s + max(0.0, time.monotonic() - self._due)

    def _wait(self) -> None:
        # Real time, whatever the event loop's clock says.
        self._due = time.monotonic() + _TICK_S
        self._timer = asyncio.get_running_loop().call_later(_TICK_S, self._tick)

    def _tick(self) -> None:
        self.lost_s = self.now_lost_s()
        self._wait()
