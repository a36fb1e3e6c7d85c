"""Requests that wait for blocks which the prefill of another in-flight request is computing.

The conductor may find that it is cheaper to wait for them than to compute them twice
(`Decision.wait_for`). Engines do not support that, so the gateway holds a request until the prefill
that it waits for is over, as far as this gateway sees it. `wait_for` is only a hint: the gateway
does not wait for a request that is not in flight here, nor for longer than `hold_s`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from ...state.inflight_prefills import LATE_S_MIN

if TYPE_CHECKING:
    from .placement import Placement


class Prefill:
    """The prefill of one request. The owner calls `over` at its end, also after a failure."""

    def __init__(self, prefills: Prefills, request_id: str) -> None:
        self._prefills, self._request_id = prefills, request_id
        self._over = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None

    def over_in(self, seconds: float) -> None:
        """Call `over` after `seconds`: for a prefill whose end the gateway can't see."""
        self._timer = asyncio.get_running_loop().call_later(seconds, self.over)

    def over(self) -> None:
        """The prefill is done, or was given up: wake all that wait for it. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
        self._over.set()
        self._prefills.forget(self._request_id, self)

    async def wait(self, seconds: float) -> None:
        """Wait until the prefill is over, at most `seconds`."""
        try:
            async with asyncio.timeout(seconds):
                await self._over.wait()
        except TimeoutError:
            pass


class Prefills:
    """All in-flight prefills of this gateway, by request id. For one event loop."""

    def __init__(self) -> None:
        self._prefills: dict[str, Prefill] = {}

    def __len__(self) -> int:
        return len(self._prefills)

    def begin(self, request_id: str) -> Prefill:
        """Add the prefill of a request that is being placed. Of two with the same id, requests wait
        for the later one."""
        prefill = self._prefills[request_id] = Prefill(self, request_id)
        return prefill

    def get(self, request_id: str) -> Prefill | None:
        """The request's prefill; None if it is not, or no longer, in flight here."""
        return self._prefills.get(request_id)

    def forget(self, request_id: str, prefill: Prefill) -> None:
        """Remove a prefill: no request begins to wait for it any more."""
        if self._prefills.get(request_id) is prefill:
            del self._prefills[request_id]


def hold_s(placement: Placement) -> float:
    """How long a request is held at most: until its first token is late by as much again as was
    predicted, and by a second at least. For longer the conductor itself does not expect the other
    request's prefill to finish either."""
    predicted_s = placement.predicted_ttft_s or 0.0
    return predicted_s + max(LATE_S_MIN, predicted_s)
