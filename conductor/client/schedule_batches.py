"""Calls of `schedule` that are under way at the same time go to the conductor as one.

A call of its own costs the client a third of a millisecond of CPU time, and the conductor as much.
One that comes when nothing is under way goes at once, alone; those that come meanwhile go together
as soon as that call has returned. So the busier a client is, the less each costs. With two calls
under way a gateway of two workers on two cores made 1,165 calls for 2,000 requests, with one 714,
and needed a tenth more CPU time (`tiffin bench gateway --row workers`).

But if all that wait went in one call, client and conductor would work in turns: each has nothing
to do until the other one is done with all of them. So a call has `FULL` prompts at most, and as
soon as so many wait, another call goes ahead of the answer, up to `CALLS_MAX`. With 256 requests at
a time on two cores that made 959 requests per second 1,341 (`--row requests`).

Who is cancelled while its prompt is on its way waits for the outcome first: what it then says of
the request, that it is cancelled, must not come to the conductor before the prompt does.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from ..errors import ConductorError, ConductorUnavailable
from . import calls

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence
    from typing import Any

    from ..records import Rejection
    from ..wire.models import DecisionReply
    from .calls import RestCall

    Placed: TypeAlias = "DecisionReply | Rejection"

# Of all prompts in a call; a conductor takes bodies of 1.25 MiB.
BATCH_BYTES_MAX = 512 << 10
# Prompts in a call, and calls under way.
FULL = 8
CALLS_MAX = 3


@dataclass(slots=True)
class _Prompt:
    body: bytes
    outcome: asyncio.Future[Placed]
    sent: bool = False


class ScheduleBatches:
    """See the module. `do` makes a call. For one event loop."""

    def __init__(self, do: Callable[[RestCall[Any]], Coroutine[Any, Any, Any]]) -> None:
        self._do = do
        self._waiting: deque[_Prompt] = deque()
        self._under_way = set[asyncio.Task[None]]()

    async def place(self, prompt: bytes) -> Placed:
        """What became of a prompt, a body of `calls.prompt`. Raises ConductorError."""
        loop = asyncio.get_running_loop()
        mine = _Prompt(prompt, loop.create_future())
        self._waiting.append(mine)
        if len(self._waiting) == (FULL if self._under_way else 1):
            loop.call_soon(self._send)  # with those that come in this turn of the loop
        try:
            return await asyncio.shield(mine.outcome)
        except asyncio.CancelledError:
            if not mine.sent:
                mine.outcome.cancel()
            await asyncio.wait((mine.outcome,))
            raise

    def _send(self) -> None:
        while len(self._under_way) < CALLS_MAX and (
            not self._under_way or len(self._waiting) >= FULL
        ):
            batch = self._next()
            if not batch:
                return
            call = asyncio.create_task(self._call(batch))
            self._under_way.add(call)
            call.add_done_callback(self._returned)

    def _next(self) -> list[_Prompt]:
        """The prompts of the next call, in their order."""
        batch, nbytes = list[_Prompt](), 0
        while self._waiting and len(batch) < FULL:
            one = self._waiting[0]
            if not one.outcome.done():  # else nobody waits for it any more
                nbytes += len(one.body)
                if batch and nbytes > BATCH_BYTES_MAX:
                    break
                batch.append(one)
                one.sent = True
            self._waiting.popleft()
        return batch

    async def _call(self, batch: Sequence[_Prompt]) -> None:
        bodies = [one.body for one in batch]
        results: list[Placed | ConductorError]
        try:
            if len(bodies) == 1:
                results = [await self._do(calls.schedule_one(bodies[0]))]
            else:
                results = await self._do(calls.schedule_many(bodies))
        except ConductorError as error:
            # One exception for each, as each gets the traceback of who waits for it.
            results = [type(error)(*error.args) for _ in batch]
        except BaseException:  # it is closed, or a defect
            results = [ConductorUnavailable("the prompt was not sent") for _ in batch]
            raise
        finally:
            for one, result in zip(batch, results, strict=True):
                if isinstance(result, ConductorError):
                    one.outcome.set_exception(result)
                    one.outcome.exception()  # or asyncio logs those that were cancelled meanwhile
                else:
                    one.outcome.set_result(result)

    def _returned(self, call: asyncio.Task[None]) -> None:
        self._under_way.discard(call)
        self._send()
