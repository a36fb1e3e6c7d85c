"""What the conductor is told of requests: in order, one call at a time each, tokens added up.

Nobody waits for a report, and one that is lost changes an estimate, not an answer. A conductor that
does not answer is left alone for a while, so that requests do not wait for it either.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Any

from ..errors import ConductorError, ConductorUnavailable
from ..records import TOKENS_MAX, Rejection, RequestEvent

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from ..client import AsyncConductorClient

log = logging.getLogger("tiffin.gateway")

# A conductor that has failed is asked again after so long, by one request or the regular refresh.
REST_S = 1.0
_ENDS = ("finished", "cancelled")


class Health:
    """Whether the conductor answers. Pure: `now` is monotonic seconds."""

    def __init__(self) -> None:
        self._failed_at: float | None = None
        self._rests_until = float("-inf")

    @property
    def up(self) -> bool:
        """Whether its last answer came."""
        return self._failed_at is None

    def rests(self, now: float) -> bool:
        """Whether it has failed a moment ago, so that it is of no use to ask."""
        return not self.up and now < self._rests_until

    def try_again(self, now: float) -> bool:
        """Whether to ask for a decision now. While it does not answer, one request at a time finds
        out for all others."""
        if self.rests(now):
            return False
        if not self.up:
            self._rests_until = now + REST_S
        return True

    def answered(self) -> None:
        """It did."""
        if self._failed_at is not None:
            log.info("the conductor answers again")
        self._failed_at = None

    def failed(self, now: float, error: ConductorUnavailable) -> None:
        """It did not."""
        if self._failed_at is None:
            log.warning("the conductor does not answer: %s", error)
            self._failed_at = now
        self._rests_until = now + REST_S


class Reporter:
    """Tells the conductor. `tokens` at a time, or every `interval_s`. For one event loop."""

    def __init__(
        self,
        client: AsyncConductorClient,
        health: Health,
        clock: Callable[[], float],
        *,
        tokens: int,
        interval_s: float,
    ) -> None:
        self.tokens, self.interval_s = tokens, interval_s
        self._client, self._health, self.now = client, health, clock
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        """Requests of which there is still something to be said."""
        return len(self._tasks)

    def begin(self, request_id: str, alive_s: float) -> Report:
        """A request was placed. The conductor forgets it unless it hears of it within `alive_s`."""
        return Report(self, request_id, alive_s)

    def cancelled(self, request_id: str) -> None:
        """A request ended before anything could be said of it, or was perhaps never placed."""
        self.spawn(self._cancelled(request_id))

    async def say(self, event: RequestEvent) -> Rejection | None:
        """Tell one thing, now. A rejection if the conductor has changed its mind. Raises
        ConductorError.

        Ends are told even to one that seems to be gone: what they free would be missing for
        minutes. That something could not be told says nothing of the next decision.
        """
        if event.kind not in _ENDS and self._health.rests(self.now()):
            raise ConductorUnavailable("the conductor did not answer a moment ago")
        return await self._client.observe(event)

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Do it beside everything else; `close` waits for it."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self, timeout_s: float) -> None:
        """Say what is left to say, for so long."""
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=timeout_s)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    async def _cancelled(self, request_id: str) -> None:
        with contextlib.suppress(ConductorError):
            await self.say(RequestEvent(request_id, "cancelled"))


class Report:
    """What is to be said of one request. Whoever has one ends it: `end`, or `drop`."""

    def __init__(self, reporter: Reporter, request_id: str, alive_s: float) -> None:
        self._reporter, self._request_id, self._alive_s = reporter, request_id, alive_s
        self._some, self._enough = asyncio.Event(), asyncio.Event()
        self._first: RequestEvent | None = None
        self._answers_at = float("inf")
        self._pending = 0
        self._end: str | None = None
        self._task: asyncio.Task[None] | None = None

    def running(self, answers_in_s: float | None = None) -> None:
        """It was sent on its way: keep its place until there is more to say. One whose first token
        nobody will see is taken to be answering after `answers_in_s`."""
        if answers_in_s is not None:
            self._answers_at = self._reporter.now() + answers_in_s
        self._start()

    def first_token(self, route: tuple[str, str] | None = None) -> None:
        """The answer begins; of a race, on this route."""
        self._first = RequestEvent(self._request_id, "first_token", route=route)
        self._tell()

    def tokens(self, count: int) -> None:
        """So many more were answered."""
        if count <= 0:
            return
        self._pending = min(self._pending + count, TOKENS_MAX)
        self._some.set()
        if self._pending >= self._reporter.tokens:
            self._enough.set()
        self._start()

    def end(self, kind: str) -> None:
        """It has "finished" or was "cancelled"; what is said later does not count."""
        if self._end is None:
            self._end = kind
            self._tell()

    def drop(self) -> None:
        """Say nothing more: the request is placed anew."""
        self._end = ""
        if self._task is not None:
            self._task.cancel()

    def _tell(self) -> None:
        self._some.set()
        self._enough.set()
        self._start()

    def _start(self) -> None:
        if self._task is None and self._end != "":
            self._task = self._reporter.spawn(self._run())

    async def _run(self) -> None:
        ended = False
        while not ended:
            if not await _within(self._some, self._alive_s):
                answers = self._reporter.now() >= self._answers_at
                await self._say(RequestEvent(self._request_id, "tokens" if answers else "alive"))
                continue
            await _within(self._enough, self._reporter.interval_s)
            first, tokens, end = self._first, self._pending, self._end
            if first and end is None:
                # Tokens that came with the first one were not made in the time since then.
                tokens = 0
            self._first, ended = None, end is not None
            self._pending -= tokens
            self._enough.clear()
            if not self._pending:
                self._some.clear()
            if first:
                await self._say(first)
            if tokens:
                await self._say(RequestEvent(self._request_id, "tokens", tokens))
            if end:
                await self._say(RequestEvent(self._request_id, end))

    async def _say(self, event: RequestEvent) -> None:
        """What was not heard is not said again: the next one says more."""
        with contextlib.suppress(ConductorError):
            await self._reporter.say(event)


async def _within(event: asyncio.Event, seconds: float) -> bool:
    """Whether it came in time."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True
