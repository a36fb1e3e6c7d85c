"""Waits for the conductor to release held requests.

A decision may say `held`: it is not the request's turn yet. Until the conductor releases it, it can
be overtaken, and it may have to leave a full queue; sent to its instance, it can't. A request that
is not held costs no call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...errors import UnknownRequest
from ...records import Rejection
from ...wire.models import ReleaseReply

if TYPE_CHECKING:
    from collections.abc import Callable

    from ...client.client import AsyncConductorClient
    from ..metrics import GatewayMetrics
    from ..openai.openai_request import Wishes
    from .placement import Placement

_MOVED = ReleaseReply(state="moved")


class Releases:
    """Waits for releases. For one event loop."""

    def __init__(
        self, client: AsyncConductorClient, metrics: GatewayMetrics, clock: Callable[[], float]
    ) -> None:
        self._client, self._metrics, self._clock = client, metrics, clock

    async def wait(self, wishes: Wishes, placed: Placement) -> ReleaseReply | Rejection:
        """Wait until a held request is released, or "moved": then it has to be placed again.
        Returns its rejection if it had to leave the queue. Raises ConductorUnavailable: nobody
        knows whose turn it is."""
        started = self._clock()
        self._metrics.queued.inc()
        try:
            while True:
                answer = await self._ask(wishes, placed.conductor)
                if isinstance(answer, Rejection) or answer.state != "held":
                    return answer
        finally:
            self._metrics.queued.dec()
            self._metrics.queued_s.observe(self._clock() - started)

    async def _ask(self, wishes: Wishes, conductor: str) -> ReleaseReply | Rejection:
        try:
            return await self._client.release(
                wishes.request_id, tenant=wishes.tenant, conductor=conductor
            )
        except UnknownRequest:  # the conductor was restarted
            return _MOVED
