"""Waits for the conductor to release held requests.

A decision may say `held`: it is not the request's turn yet. Until the conductor releases it, it can
be overtaken, and it may have to leave a full queue; sent to its instance, it can't. A request that
is not held costs no call, and those that are held share one: it returns with all that were released
since the last. Each asks for itself every `WAIT_S`, which keeps it alive at the conductor, and when
the shared call has failed.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import OrderedDict
from typing import TYPE_CHECKING, TypeAlias

from ...client.calls import WAIT_S
from ...errors import ConductorError, UnknownRequest
from ...records import Rejection
from ...wire.models import ReleaseReply

if TYPE_CHECKING:
    from collections.abc import Callable

    from ...client.calls import Released
    from ...client.client import AsyncConductorClient
    from ..metrics import GatewayMetrics
    from ..openai.openai_request import Wishes
    from .placement import Placement

    Outcome: TypeAlias = ReleaseReply | Rejection

_MOVED = ReleaseReply(state="moved")
# A release may overtake the decision's answer, which comes with those of other requests. It is kept
# for so long, for so many requests.
_EARLY_S = 5.0
_EARLY_MAX = 4096


class Releases:
    """Waits for releases. For one event loop."""

    def __init__(
        self, client: AsyncConductorClient, metrics: GatewayMetrics, clock: Callable[[], float]
    ) -> None:
        self._client, self._metrics, self._clock = client, metrics, clock
        self.waiter = secrets.token_hex(16)
        self._calls: dict[str, _SharedCall] = {}  # by conductor

    async def wait(self, wishes: Wishes, placed: Placement) -> Outcome:
        """Wait until a held request is released, or "moved": then it has to be placed again.
        Returns its rejection if it had to leave the queue. Raises ConductorUnavailable: nobody
        knows whose turn it is."""
        started = self._clock()
        self._metrics.queued.inc()
        try:
            return await self._call_to(placed.conductor).outcome(wishes)
        finally:
            self._metrics.queued.dec()
            self._metrics.queued_s.observe(self._clock() - started)

    async def close(self) -> None:
        """Wait for nothing any more."""
        for call in self._calls.values():
            await call.close()

    def _call_to(self, conductor: str) -> _SharedCall:
        found = self._calls.get(conductor)
        if found is None:
            self._calls = {url: one for url, one in self._calls.items() if one.busy}
            found = _SharedCall(self._client, conductor, self.waiter, self._clock)
            self._calls[conductor] = found
        return found


class _SharedCall:
    """The call of all held requests of one conductor."""

    def __init__(
        self,
        client: AsyncConductorClient,
        conductor: str,
        waiter: str,
        clock: Callable[[], float],
    ) -> None:
        self._client, self._conductor, self._waiter = client, conductor, waiter
        self._clock = clock
        # By tenant and id. A future without an outcome: the request asks for itself.
        self._waiting: dict[tuple[str, str], asyncio.Future[Outcome | None]] = {}
        self._early: OrderedDict[tuple[str, str], tuple[float, Outcome]] = OrderedDict()
        self._task: asyncio.Task[None] | None = None

    @property
    def busy(self) -> bool:
        """Whether it is under way."""
        return self._task is not None

    async def outcome(self, wishes: Wishes) -> Outcome:
        """What became of a held request. Raises ConductorUnavailable."""
        key = (wishes.tenant, wishes.request_id)
        early = self._early.pop(key, None)
        if early is not None and self._clock() - early[0] < _EARLY_S:
            return early[1]
        mine: asyncio.Future[Outcome | None] = asyncio.get_running_loop().create_future()
        self._waiting[key] = mine
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        try:
            while not (await asyncio.wait((mine,), timeout=WAIT_S))[0]:
                found = await self._ask(wishes, 0.0)
                if isinstance(found, Rejection) or found.state != "held":
                    return found
        finally:
            if self._waiting.get(key) is mine:
                del self._waiting[key]
        return mine.result() or await self._alone(wishes)

    async def close(self) -> None:
        """Stop it."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        try:
            while self._waiting:
                for released in await self._client.releases(
                    self._waiter, conductor=self._conductor
                ):
                    self._give(released)
        except ConductorError:
            pass  # as each hears that asks for itself
        finally:
            self._task = None
            for mine in self._waiting.values():
                if not mine.done():
                    mine.set_result(None)

    def _give(self, released: Released) -> None:
        key, outcome = (released.tenant, released.request_id), released.outcome
        mine = self._waiting.get(key)
        if mine is None:
            self._early[key] = self._clock(), outcome
            if len(self._early) > _EARLY_MAX:
                self._early.popitem(last=False)
        elif not mine.done():
            mine.set_result(outcome)

    async def _alone(self, wishes: Wishes) -> Outcome:
        while True:
            found = await self._ask(wishes, WAIT_S)
            if isinstance(found, Rejection) or found.state != "held":
                return found

    async def _ask(self, wishes: Wishes, wait_s: float) -> Outcome:
        try:
            return await self._client.release(
                wishes.request_id, tenant=wishes.tenant, wait_s=wait_s, conductor=self._conductor
            )
        except UnknownRequest:  # the conductor was restarted
            return _MOVED
