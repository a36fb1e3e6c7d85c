"""Requests that wait for another one's blocks, which are computed just now.

The conductor may find that it is cheaper to wait for them than to compute them twice
(`Decision.wait_for`). Engines know nothing of that, so a request is held here until the prefill
that it waits for is over, as far as this gateway sees it. A hint, and never more: nobody waits for
a request that is not under way here, and nobody for longer than it was worth.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from ..computing import LATE_S_MIN

if TYPE_CHECKING:
    from .placing import Placement


class Prefill:
    """The prefill of one request. Whoever has one says that it is `over`, whatever became of it."""

    def __init__(self, prefills: Prefills, request_id: str) -> None:
        self._prefills, self._request_id = prefills, request_id
        self._over = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None

    def over_in(self, seconds: float) -> None:
        """Nobody will see when it is over: take it to be by then."""
        self._timer = asyncio.get_running_loop().call_later(seconds, self.over)

    def over(self) -> None:
        """It is done, or was given up."""
        if self._timer is not None:
            self._timer.cancel()
        self._over.set()
        self._prefills.forget(self._request_id, self)

    async def wait(self, seconds: float) -> None:
        """Until it is over, but no longer than so many seconds."""
        try:
            async with asyncio.timeout(seconds):
                await self._over.wait()
        except TimeoutError:
            pass


class Prefills:
    """All that are under way here, by the ids of their requests. For one event loop."""

    def __init__(self) -> None:
        self._prefills: dict[str, Prefill] = {}

    def __len__(self) -> int:
        return len(self._prefills)

    def begin(self, request_id: str) -> Prefill:
        """A request is placed now. Of two with one id, the later one is waited for."""
        prefill = self._prefills[request_id] = Prefill(self, request_id)
        return prefill

    def get(self, request_id: str) -> Prefill | None:
        """None if it is not under way here, or not any more."""
        return self._prefills.get(request_id)

    def forget(self, request_id: str, prefill: Prefill) -> None:
        """Nobody begins to wait for this one any more."""
        if self._prefills.get(request_id) is prefill:
            del self._prefills[request_id]


def hold_s(placement: Placement) -> float:
    """How long a request is held at most: until its first token is late by as much again as was
    predicted, and by a second at least. The conductor itself does not believe for longer that the
    other one will still be done."""
    predicted_s = placement.predicted_ttft_s or 0.0
    return predicted_s + max(LATE_S_MIN, predicted_s)
