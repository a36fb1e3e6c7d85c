"""Events on their way to one conductor, in batches: one call at a time, and in it all that happened
since the last one, or in the last `batch_s`.

Of each request the events stay in order. A token count that was not sent yet is replaced by a later
one, which includes it, so that a slow conductor gets fewer events and not more. Ends of requests
are sent again if the conductor does not answer; other events are not, as later ones say more.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec import structs

from ...errors import ConductorError, ConductorUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable

    from ...client.calls import EventResult
    from ...client.client import AsyncConductorClient
    from ...records import Rejection, RequestEvent

# After so long a conductor that did not answer is called again.
REST_S = 1.0
# How often the end of a request is told to a conductor that does not answer: no later event says
# so, and the request would count as running for minutes.
_END_TRIES = 4
_ENDS = ("finished", "cancelled")


@dataclass(slots=True)
class _Outgoing:
    """An event, the time when it happened, and who waits for what comes of it."""

    event: RequestEvent
    at: float
    tries: int = 1
    result: asyncio.Future[Rejection | None] | None = None


class EventOutbox:
    """See the module. For one event loop. `may_call`: whether now is a time to call the conductor
    for anything but the end of a request."""

    def __init__(
        self, client: AsyncConductorClient, batch_s: float, may_call: Callable[[], bool]
    ) -> None:
        self._client, self._batch_s, self._may_call = client, batch_s, may_call
        # By tenant and id of the request, in the order in which the first of its events came.
        self._pending: dict[tuple[str, str], list[_Outgoing]] = {}
        self._sending = 0
        self._rests = False  # after a call without an answer
        self._urgent = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        """Events that were not sent, or not answered yet."""
        return self._sending + sum(map(len, self._pending.values()))

    def put(self, event: RequestEvent) -> None:
        """Send an event within `batch_s`."""
        tries = _END_TRIES if event.kind in _ENDS else 1
        self._add(_Outgoing(event, asyncio.get_running_loop().time(), tries))

    async def ask(self, event: RequestEvent) -> Rejection | None:
        """Send an event at once, with all that wait; returns what comes of it. Raises
        ConductorError."""
        if self._rests or not self._may_call():
            raise ConductorUnavailable("the conductor did not answer a moment ago")
        loop = asyncio.get_running_loop()
        result: asyncio.Future[Rejection | None] = loop.create_future()
        self._add(_Outgoing(event, loop.time(), result=result))
        self._urgent.set()
        return await result

    def forget(self, tenant: str, request_id: str) -> None:
        """Do not send what was not sent yet of a request, but for its end."""
        key = (tenant, request_id)
        ends = [one for one in self._pending.pop(key, ()) if one.event.kind in _ENDS]
        if ends:
            self._pending[key] = ends

    async def flush(self) -> None:
        """Send everything now, and wait until all is answered or was given up."""
        self._urgent.set()
        if self._task is not None:
            await asyncio.shield(self._task)

    async def close(self) -> None:
        """Send nothing more."""
        self._pending.clear()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _add(self, outgoing: _Outgoing) -> None:
        event = outgoing.event
        pending = self._pending.setdefault((event.tenant, event.request_id), [])
        if pending and event.kind == "alive":
            return  # what waits says so
        if pending and event.kind == "tokens" == pending[-1].event.kind:
            pending[-1] = outgoing
        else:
            pending.append(outgoing)
        if self._task is None:
            self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        try:
            while self._pending:
                await _within(self._urgent, self._batch_s)
                self._urgent.clear()
                if not await self._send():
                    self._rests = True
                    await asyncio.sleep(REST_S)
                    self._rests = False
        finally:
            self._task, self._rests = None, False

    async def _send(self) -> bool:
        """Send what waits. Returns False if ends of requests have to be sent again later."""
        batch = [one for some in self._pending.values() for one in some]
        self._pending.clear()
        if not self._may_call():
            batch = [one for one in batch if one.event.kind in _ENDS or _drop(one)]
        now = asyncio.get_running_loop().time()
        events = [structs.replace(one.event, age_s=max(0.0, now - one.at)) for one in batch]
        self._sending = len(events)
        try:
            results = await self._client.observe_many(events)
        except BaseException:  # it is closed, or a defect
            for one in batch:
                _settle(one, ConductorUnavailable("the event was not sent"))
            raise
        finally:
            self._sending = 0
        again = [one for one, result in zip(batch, results, strict=True) if _settle(one, result)]
        for one in reversed(again):
            key = (one.event.tenant, one.event.request_id)
            self._pending.setdefault(key, []).insert(0, one)
        return not again


def _settle(one: _Outgoing, result: EventResult) -> bool:
    """Tell who waits for it what came of an event. Returns whether to send the event again."""
    if one.result is not None and not one.result.done():
        if isinstance(result, ConductorError):
            one.result.set_exception(result)
        else:
            one.result.set_result(result)
    if not isinstance(result, ConductorUnavailable):
        return False
    one.tries -= 1
    return one.tries > 0


def _drop(one: _Outgoing) -> bool:
    """An event that is not sent. Returns False."""
    _settle(one, ConductorUnavailable("the conductor did not answer a moment ago"))
    return False


async def _within(event: asyncio.Event, seconds: float) -> None:
    """Wait for `event`, at most `seconds`."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        pass
