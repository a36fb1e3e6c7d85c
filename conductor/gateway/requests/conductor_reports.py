"""Reports of request events to the conductor: in order, one call at a time per request, with token
counts batched.

No answer waits for these reports but for `prefill_done`, to which the conductor may reply with a
rejection. A lost report changes an estimate of the conductor, not an answer. After a failed call
the gateway backs off from the conductor, so that no request waits for its timeout.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from functools import partial
from typing import TYPE_CHECKING, Any

from ...errors import ConductorError, ConductorUnavailable
from ...records import TOKENS_MAX, Rejection, RequestEvent

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from ...client.client import AsyncConductorClient

log = logging.getLogger("tiffin.gateway")

# Back-off: after so long one request, or the regular refresh, tries a failed conductor again.
REST_S = 1.0
_ENDS = ("finished", "cancelled")
# How often the end of a request is told, `REST_S` apart, to a conductor that does not answer.
_END_TRIES = 4


class Health:
    """Health of the conductor, a circuit breaker with one probe per `REST_S`. Pure: `now` is
    monotonic seconds."""

    def __init__(self) -> None:
        self._failed_at: float | None = None
        self._rests_until = float("-inf")

    @property
    def up(self) -> bool:
        """Whether the conductor answered the last call."""
        return self._failed_at is None

    def rests(self, now: float) -> bool:
        """Whether callers should back off: less than `REST_S` ago the conductor failed, or a probe
        began."""
        return not self.up and now < self._rests_until

    def try_again(self, now: float) -> bool:
        """Whether to ask the conductor for a decision now. While it does not answer, one request
        per `REST_S` is the probe for all others."""
        if self.rests(now):
            return False
        if not self.up:
            self._rests_until = now + REST_S
        return True

    def answered(self) -> None:
        """Record that the conductor answered."""
        if self._failed_at is not None:
            log.info("the conductor answers again")
        self._failed_at = None

    def failed(self, now: float, error: ConductorUnavailable) -> None:
        """Record that the conductor did not answer, and start the back-off."""
        if self._failed_at is None:
            log.warning("the conductor does not answer: %s", error)
            self._failed_at = now
        self._rests_until = now + REST_S


class Reporter:
    """Sends reports to the conductor: every `tokens` tokens, or every `interval_s`. For one event
    loop."""

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
        """The number of report tasks that still run."""
        return len(self._tasks)

    def begin(
        self, request_id: str, alive_s: float, tenant: str = "", conductor: str = ""
    ) -> ConductorReport:
        """A report for a request that the conductor at this URL ("": ours) has placed. The report
        sends an event at least every `alive_s`, so that the conductor does not let its reservation
        expire."""
        return ConductorReport(self, request_id, alive_s, tenant, conductor)

    def cancelled(self, request_id: str, tenant: str = "", conductor: str = "") -> None:
        """Report in the background that a request without a `ConductorReport` has ended; the
        conductor may never have placed it."""
        event = RequestEvent(request_id, "cancelled", tenant=tenant, conductor=conductor)
        self.spawn(self.end(event))

    async def say(self, event: RequestEvent) -> Rejection | None:
        """Send one event now. Returns a rejection if the conductor rejects the request after all.
        Raises ConductorError.

        Events that end a request are sent even during back-off: without them the conductor would
        keep the request's reservation for minutes. A failed report does not change the conductor's
        health, which decides on calls for placement.
        """
        if event.kind not in _ENDS and self._health.rests(self.now()):
            raise ConductorUnavailable("the conductor did not answer a moment ago")
        return await self._client.observe(event)

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run the coroutine as a background task; `close` waits for it."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self, timeout_s: float) -> None:
        """Wait up to `timeout_s` for the pending reports, then cancel the rest."""
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=timeout_s)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    async def end(self, event: RequestEvent) -> None:
        """Send an event that ends a request, several times if the conductor does not answer: no
        later event says so, and the request would count as running for minutes."""
        for left in reversed(range(_END_TRIES)):
            try:
                await self.say(event)
            except ConductorUnavailable:
                if left:
                    await asyncio.sleep(REST_S)
                continue
            except ConductorError:  # for example, it does not know the request
                pass
            return


class ConductorReport:
    """Sends the events of one request, in order. The owner calls `end` or `drop`."""

    def __init__(
        self, reporter: Reporter, request_id: str, alive_s: float, tenant: str, conductor: str
    ) -> None:
        self._reporter, self._alive_s = reporter, alive_s
        self._event = partial(RequestEvent, request_id, tenant=tenant, conductor=conductor)
        self._some, self._enough = asyncio.Event(), asyncio.Event()
        self._first: RequestEvent | None = None
        self._answers_at = float("inf")
        self._pending = 0
        self._end: str | None = None
        self._task: asyncio.Task[None] | None = None

    def running(self, answers_in_s: float | None = None) -> None:
        """The request is in flight: send keepalive events until there is more to report. A request
        whose first token the gateway can't see is taken to be decoding after `answers_in_s`."""
        if answers_in_s is not None:
            self._answers_at = self._reporter.now() + answers_in_s
        self._start()

    def first_token(self, route: tuple[str, str] | None = None) -> None:
        """Report the first token; of a raced request, on this route."""
        self._first = self._event("first_token", route=route)
        self._tell()

    def tokens(self, count: int) -> None:
        """Add `count` answered tokens to the next report."""
        if count <= 0:
            return
        self._pending = min(self._pending + count, TOKENS_MAX)
        self._some.set()
        if self._pending >= self._reporter.tokens:
            self._enough.set()
        self._start()

    def end(self, kind: str) -> None:
        """Report the end, "finished" or "cancelled". Later calls of `end` have no effect."""
        if self._end is None:
            self._end = kind
            self._tell()

    def drop(self) -> None:
        """Send nothing more: the request is placed again, or the conductor has rejected it."""
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
                await self._say(self._event("tokens" if answers else "alive"))
                continue
            await _within(self._enough, self._reporter.interval_s)
            first, tokens, end = self._first, self._pending, self._end
            if first and end is None:
                # Tokens that arrived together with the first one were not decoded in the time since
                # then: a later report counts them.
                tokens = 0
            self._first, ended = None, end is not None
            self._pending -= tokens
            self._enough.clear()
            if not self._pending:
                self._some.clear()
            if first:
                await self._say(first)
            if tokens:
                await self._say(self._event("tokens", tokens))
            if end:
                await self._reporter.end(self._event(end))

    async def _say(self, event: RequestEvent) -> None:
        """Send one event. A failed event is not retried: the next event says more."""
        with contextlib.suppress(ConductorError):
            await self._reporter.say(event)


async def _within(event: asyncio.Event, seconds: float) -> bool:
    """Wait for `event`; False after a timeout of `seconds`."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True
