"""Requests that wait to be placed: so many calls to the conductor at a time, tenants in turn.

The time of a call counts from when it is sent, so a gateway with many requests does not take its
own queue for a conductor that is slow. A request that would not be placed in time, by how many of
this queue are placed per second, is refused as it comes, with its place in the queue and when to
come back. A queue that has just come to be has to show that first: of 1,024 requests at once the
first ones are placed when the last one was read, a third of a second later.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict, deque
from math import inf
from typing import TYPE_CHECKING

from ...wire.answers import Refusal

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from ..metrics import GatewayMetrics

# Calls to the conductor at a time: it decides one after the other, and more would only wait there,
# in the order in which they came, whoever sent them.
AT_ONCE = 32
# For this part of the longest wait is counted how many are placed, and then again.
_COUNTED = 0.5


class PlacingQueue:
    """See the module. A request waits for `patience_s` at most. For one event loop."""

    def __init__(
        self, patience_s: float, metrics: GatewayMetrics, clock: Callable[[], float]
    ) -> None:
        self._patience_s, self._metrics, self._clock = patience_s, metrics, clock
        self._calls = 0
        self._per_s = inf  # placed, as was counted last; of a new queue not known
        self._counts_since, self._counted = 0.0, 0
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()  # by tenant

    def __len__(self) -> int:
        """How many requests wait."""
        return sum(map(len, self._waiting.values()))

    def check(self, tenant: str) -> None:
        """Raises Refusal if a request of this tenant would not be placed in time."""
        if self._calls >= AT_ONCE and self._waiting:
            self._place(tenant)

    @contextlib.asynccontextmanager
    async def turn(self, tenant: str) -> AsyncIterator[None]:
        """Wait for this request's turn; the body is its call. Raises Refusal if that is not in
        time."""
        if self._calls >= AT_ONCE:
            await self._wait(tenant)
        else:
            self._calls += 1
        try:
            yield
        finally:
            self._counted += 1
            self._next()

    def _place(self, tenant: str) -> int:
        """The place of one more request of this tenant: others have as many turns before it. Raises
        Refusal if its turn would not come in time."""
        own = len(self._waiting.get(tenant, ()))
        others = ((name != tenant, len(waiting)) for name, waiting in self._waiting.items())
        place = 1 + sum(min(waiting, own + other) for other, waiting in others)
        expected_s = place / self._pace()
        if expected_s > self._patience_s:
            raise self._refusal(place, expected_s)
        return place

    def _pace(self) -> float:
        """How many requests of this queue are placed per second; infinite as long as that is not
        known."""
        passed_s = self._clock() - self._counts_since
        if passed_s >= _COUNTED * self._patience_s:
            self._per_s = max(self._counted, 1) / passed_s
            self._count_anew()
        return self._per_s

    def _count_anew(self) -> None:
        self._counts_since, self._counted = self._clock(), 0

    async def _wait(self, tenant: str) -> None:
        if not self._waiting:
            self._per_s = inf
            self._count_anew()
        place = self._place(tenant)
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(mine)
        self._metrics.placing.set(len(self))
        try:
            async with asyncio.timeout(self._patience_s):
                await mine
        except TimeoutError:
            self._leave(tenant, mine)
            raise self._refusal(place, self._patience_s) from None
        except asyncio.CancelledError:
            self._leave(tenant, mine)
            raise

    def _leave(self, tenant: str, mine: asyncio.Future[None]) -> None:
        """Give up, also if it is this request's turn just now."""
        if mine.done() and not mine.cancelled():
            self._next()
            return
        waiting = self._waiting.get(tenant)
        if waiting is None or mine not in waiting:
            return  # `_next` has passed it by
        waiting.remove(mine)
        if not waiting:
            del self._waiting[tenant]
        self._metrics.placing.set(len(self))

    def _next(self) -> None:
        """A call has ended: the next request of the tenant whose turn it is takes its place."""
        while self._waiting:
            tenant, waiting = self._waiting.popitem(last=False)
            mine = waiting.popleft()
            if waiting:
                self._waiting[tenant] = waiting  # behind all others
            self._metrics.placing.set(len(self))
            if not mine.done():
                mine.set_result(None)
                return
        self._calls -= 1

    def _refusal(self, place: int, expected_s: float) -> Refusal:
        self._metrics.not_placed.labels("queue").inc()
        return Refusal(
            503,
            "not_placed_in_time",
            f"{place - 1} requests wait to be placed before this one: come back in "
            f"{expected_s:.1f} s",
            retry_after_s=expected_s,
        )
