"""Reports of request events to the conductors: of each request in order, and of all requests that a
conductor decided in batches.

No answer waits for these reports but for `prefill_done`, to which the conductor may reply with a
rejection. A lost report changes an estimate of the conductor, not an answer. After a failed call
the gateway backs off from the conductor, so that no request waits for its timeout.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from functools import partial
from typing import TYPE_CHECKING

from ...errors import ConductorLate
from ...records import TOKENS_MAX, Rejection, RequestEvent
from .event_outbox import REST_S, EventOutbox

if TYPE_CHECKING:
    from collections.abc import Callable

    from ...client.client import AsyncConductorClient
    from ...errors import ConductorUnavailable

log = logging.getLogger("tiffin.gateway")


class Health:
    """Health of the conductor, a circuit breaker with one probe per `REST_S`. Pure: `now` is
    monotonic seconds."""

    def __init__(self) -> None:
        self._failed_at: float | None = None
        self._answered_at = float("-inf")
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

    def heard_since(self, then: float) -> bool:
        """Whether the conductor has answered anything since `then`: it lives."""
        return self._answered_at >= then

    def answered(self, now: float) -> None:
        """Record that the conductor answered."""
        self._answered_at = now
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
    """Sends reports to the conductors: of each request every `tokens` tokens, or every
    `interval_s`, and of all requests together what happened in `batch_s`. An answer waits for what
    comes of a report for `wait_s` at most. For one event loop."""

    def __init__(
        self,
        client: AsyncConductorClient,
        health: Health,
        clock: Callable[[], float],
        *,
        tokens: int,
        interval_s: float,
        batch_s: float,
        wait_s: float,
    ) -> None:
        self.tokens, self.interval_s = tokens, interval_s
        self._client, self._health, self.now = client, health, clock
        self._batch_s, self._wait_s = batch_s, wait_s
        self._outboxes: dict[str, EventOutbox] = {}  # by the conductor's URL

    def __len__(self) -> int:
        """The number of events that were not sent, or not answered yet."""
        return sum(map(len, self._outboxes.values()))

    def begin(
        self, request_id: str, alive_s: float, tenant: str = "", conductor: str = ""
    ) -> ConductorReport:
        """A report for a request that the conductor at this URL ("": ours) has placed. The report
        sends an event at least every `alive_s`, so that the conductor does not let its reservation
        expire."""
        return ConductorReport(self, request_id, alive_s, tenant, conductor)

    def cancelled(self, request_id: str, tenant: str = "", conductor: str = "") -> None:
        """Report that a request without a `ConductorReport` has ended; the conductor may never have
        placed it."""
        event = RequestEvent(request_id, "cancelled", tenant=tenant, conductor=conductor)
        self.outbox(conductor).put(event)

    async def say(self, event: RequestEvent) -> Rejection | None:
        """Send one event now. Returns a rejection if the conductor rejects the request after all.
        Raises ConductorError. A failed report does not change the conductor's health, which decides
        on calls for placement."""
        try:
            async with asyncio.timeout(self._wait_s):
                return await self.outbox(event.conductor).ask(event)
        except TimeoutError as error:
            raise ConductorLate(f"no answer to a report in {self._wait_s:g} s") from error

    def outbox(self, conductor: str) -> EventOutbox:
        """What goes to the conductor at this URL."""
        found = self._outboxes.get(conductor)
        if found is None:
            # Conductors that went, and of which nothing is under way.
            self._outboxes = {url: one for url, one in self._outboxes.items() if len(one)}
            found = EventOutbox(self._client, self._batch_s, self._may_call)
            self._outboxes[conductor] = found
        return found

    async def close(self, timeout_s: float) -> None:
        """Wait up to `timeout_s` for the pending reports, then give the rest up."""
        every = list(self._outboxes.values())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await asyncio.gather(*(one.flush() for one in every))
        for one in every:
            await one.close()

    def _may_call(self) -> bool:
        """Events that end a request are sent even during back-off: without them the conductor would
        keep the request's reservation for minutes."""
        return not self._health.rests(self.now())


class ConductorReport:
    """The events of one request, in order. The owner calls `end` or `drop`."""

    def __init__(
        self, reporter: Reporter, request_id: str, alive_s: float, tenant: str, conductor: str
    ) -> None:
        self._reporter, self._alive_s = reporter, alive_s
        self._event = partial(RequestEvent, request_id, tenant=tenant, conductor=conductor)
        self._key, self._conductor = (tenant, request_id), conductor
        self._answers_at = float("inf")
        self._total = self._told = 0  # tokens that were answered, and that the conductor knows of
        self._over = False
        self._said_at = 0.0
        self._alive: asyncio.TimerHandle | None = None
        self._later: asyncio.TimerHandle | None = None

    def running(self, answers_in_s: float | None = None) -> None:
        """The request is in flight: send keepalive events until there is more to report. A request
        whose first token the gateway can't see is taken to be decoding after `answers_in_s`."""
        if answers_in_s is not None:
            self._answers_at = self._reporter.now() + answers_in_s
        self._watch()

    def first_token(self, route: tuple[str, str] | None = None) -> None:
        """Report the first token; of a raced request, on this route."""
        self._total = self._told = max(self._total, 1)
        self._say(self._event("first_token", route=route))

    def tokens(self, count: int) -> None:
        """Add `count` answered tokens to the next report."""
        if count <= 0 or self._over:
            return
        self._total = min(self._total + count, TOKENS_MAX)
        if self._later is None:
            # Also tokens that arrived with the first one wait: they were not decoded since then.
            loop = asyncio.get_running_loop()
            self._later = loop.call_later(self._reporter.interval_s, self._tell_tokens)
        elif self._total - self._told >= self._reporter.tokens:
            self._tell_tokens()

    def end(self, kind: str, found_tokens: int | None = None) -> None:
        """Report the end, "finished" or "cancelled"; of a finished one, what of the prompt was
        cached. Later calls of `end` have no effect."""
        if not self._over:
            total = self._total if self._total > self._told else None
            found = found_tokens if kind == "finished" else None
            self._say(self._event(kind, total_tokens=total, found_tokens=found))
            self._stop()

    def drop(self) -> None:
        """Send nothing more: the request is placed again, or the conductor has rejected it."""
        if not self._over:
            self._reporter.outbox(self._conductor).forget(*self._key)
            self._stop()

    def _tell_tokens(self) -> None:
        if self._later is not None:
            self._later.cancel()
            self._later = None
        if self._total > self._told:
            self._told = self._total
            self._say(self._event("tokens", total_tokens=self._total))

    def _say(self, event: RequestEvent) -> None:
        if not self._over:
            self._said_at = asyncio.get_running_loop().time()
            self._reporter.outbox(self._conductor).put(event)
            self._watch()

    def _watch(self) -> None:
        """Say that the request lives whenever nothing else was said for `alive_s`."""
        if self._alive is None and not self._over:
            loop = asyncio.get_running_loop()
            self._said_at = self._said_at or loop.time()
            self._alive = loop.call_at(self._said_at + self._alive_s, self._lives)

    def _lives(self) -> None:
        self._alive = None
        if asyncio.get_running_loop().time() < self._said_at + self._alive_s:
            self._watch()
            return
        answers = self._reporter.now() >= self._answers_at
        self._say(
            self._event("tokens", total_tokens=self._total) if answers else self._event("alive")
        )

    def _stop(self) -> None:
        self._over = True
        for timer in (self._alive, self._later):
            if timer is not None:
                timer.cancel()
