"""A request's way to an instance that answers: placed, held until its turn, run, and placed again
if its instance is gone; and what the conductor hears of it meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from ...errors import ConductorError, ConductorUnavailable
from ...records import Rejection, RequestEvent
from ...wire.answers import NOT_AGAIN
from ..engines.engine_client import AnswerStream, EngineGone, EngineShut, Whole
from ..openai.openai_request import CHAT, COMPLETIONS, RESPONSES
from .execution import handed_over
from .placement import NoInstance
from .poison import own_answer

if TYPE_CHECKING:
    from ...web.tracing import Span
    from ..engines.instance_cache import InstanceRoute
    from ..gateway import Gateway
    from ..openai.openai_request import ClientRequest
    from ..openai.token_counter import Usage
    from ..openai.tokenizing import Sized
    from .conductor_reports import ConductorReport
    from .placement import Placement

log = logging.getLogger("tiffin.gateway")

# How soon the rest of a stream is placed again that was rejected for load.
_RETRY_S, _RETRY_MAX_S = 0.25, 5.0
# OpenTelemetry's semantic conventions for generative AI.
_OPERATIONS = {
    CHAT: "chat",
    COMPLETIONS: "text_completion",
    RESPONSES: "generate_content",
    "/v1/embeddings": "embeddings",
}


class Rejected(Exception):
    """The conductor rejects the request, when it is placed or after its prefill."""

    def __init__(self, rejection: Rejection) -> None:
        super().__init__(rejection.reason)
        self.rejection = rejection


class Attempts:
    """See the module. `ask` is what runs; `told` are headers for the client, to which the instances
    are added. Whoever makes one closes it."""

    def __init__(
        self, gateway: Gateway, ask: ClientRequest, span: Span, told: dict[str, str]
    ) -> None:
        self.ask = ask
        self.route: InstanceRoute | None = None  # on which its answer begins
        self.report: ConductorReport | None = None
        self.decided = False  # a route is chosen, so the request was not rejected at placement
        self.degraded = False  # another model answers
        self._gateway, self._span, self._told = gateway, span, told
        self._gone: set[str] = set()
        self._placed = False  # the conductor may have placed it; its end is not reported yet
        self._running_on: InstanceRoute | None = None  # where it counts as running
        self._conductor = ""  # the URL of the conductor that has placed it, if it is one of several
        self._prefill_told = False
        self._raced_by_other = False  # another route than the decision's answers

    @property
    def decodes(self) -> str:
        """The id of the instance that answers."""
        return "" if self.route is None else self.route.decode.name

    @property
    def gone(self) -> frozenset[str]:
        """The ids of the instances that have failed it."""
        return frozenset(self._gone)

    async def answer(self, sized: Sized) -> AnswerStream | Whole:
        """Place the request and run it; place it again if its instance is gone. Its answer has
        begun. Raises Rejected, and what placing and running raise."""
        gateway = self._gateway
        failures: list[EngineGone] = []
        while True:
            try:
                return await self._attempt(sized, len(failures))
            except EngineGone as failure:
                failures.append(failure)
                own = own_answer(failures)
                if own is not None:
                    gateway.metrics.poisoned.labels("answered_500").inc()
                    return replace(own, headers=own.headers | NOT_AGAIN)
                log.info("placed again: %s", failure)
                self._drop_report()
                if len(failures) > gateway.config.reschedules:
                    raise
                gateway.metrics.rescheduled.inc()
            except NoInstance:
                if failures and isinstance(failures[-1], EngineShut):
                    raise failures[-1] from None  # that is why there is none
                raise

    async def patient_answer(self, sized: Sized) -> AnswerStream | Whole:
        """`answer`, again and again while the conductor rejects for load, for as long as a stream
        may say nothing: the client has half an answer already. Raises Rejected at last."""
        clock = self._gateway.clock
        until = clock() + self._gateway.config.timeouts.idle_s
        while True:
            try:
                return await self.answer(sized)
            except Rejected as failure:
                told_s = failure.rejection.retry_after_s or 0.0
                retry_s = min(max(told_s, _RETRY_S), _RETRY_MAX_S)
                if not failure.rejection.overloaded or clock() + retry_s > until:
                    raise
                self.forget()
                await asyncio.sleep(retry_s)

    def broke(self) -> None:
        """The instance that answered is gone. The conductor knows what follows by a name of its
        own."""
        self._gone.add(self.decodes)
        self.end("cancelled")
        self.report, self._placed, self._conductor = None, False, ""

    def end(self, how: str, found_tokens: int | None = None) -> None:
        """Report the request's end to the conductor, if the conductor has placed it or may have,
        and what of the prompt was cached where it was computed."""
        if self.report is not None:
            other = self._raced_by_other or (
                self.route is not None and handed_over(self.ask, self.route)
            )
            self.report.end(how, None if other else found_tokens)
        elif self._placed:
            self._cancel()

    def forget(self) -> None:
        """Report no end: the conductor has no such in-flight request."""
        self._release_elsewhere()
        self._placed = False
        self._drop_report()

    def close(self) -> None:
        """It runs nowhere any more."""
        self._run_on(None)

    # -- one attempt -------------------------------------------------------------------------------

    async def _attempt(self, sized: Sized, attempt: int) -> AnswerStream | Whole:
        ask = self.ask
        placed, answers_s = await self._turn(sized)
        self._run_on(placed.routes[0], decided=not placed.fallback)
        self.decided, self._prefill_told = True, False
        unseen = not ask.stream and not handed_over(ask, placed.routes[0])
        if self.report is not None:
            # The gateway can't see when the prefill of an answer in one piece is over, so it takes
            # the predicted TTFT.
            self.report.running(answers_s if unseen else None)

        async def prefilled(route: InstanceRoute, usage: Usage | None) -> None:
            await self._prefilled(placed, route, usage)

        number, answer = await self._gateway.running.run(
            ask, placed, self._span, attempt, prefilled, self._gone
        )
        self._ran(placed, number, answer)
        return answer

    async def _turn(self, sized: Sized) -> tuple[Placement, float]:
        """Place the request, and wait for its release if the conductor holds it. Returns its
        placement, and the predicted seconds to its first token. Raises Rejected."""
        while True:
            placed = await self._place(sized)
            if not placed.held:
                return placed, placed.predicted_ttft_s or 0.0
            self.decided = True
            try:
                with self._span.call("hold"):
                    released = await self._gateway.releases.wait(self.ask.wishes, placed)
            except ConductorUnavailable:
                return self._gateway.placing.still(placed), placed.predicted_ttft_s or 0.0
            if isinstance(released, Rejection):
                raise Rejected(released)
            if released.state == "released":
                return placed, released.first_token_s
            self._drop_report()

    async def _place(self, sized: Sized) -> Placement:
        gateway, wishes = self._gateway, self.ask.wishes
        before, self._placed = self._placed, True
        placed = await gateway.place(self.ask, sized, self._gone, self._span)
        if isinstance(placed, Rejection):
            raise Rejected(placed)
        self._placed = before or placed.in_doubt or not placed.fallback
        if not placed.fallback:
            if self._conductor != placed.conductor:
                self._release_elsewhere()
            self._conductor = placed.conductor
            self.report = gateway.reporter.begin(
                wishes.request_id, placed.alive_s, wishes.tenant, placed.conductor
            )
        return placed

    def _run_on(self, route: InstanceRoute | None, *, decided: bool = False) -> None:
        """Count the request as running on this route, and on none before."""
        last_known = self._gateway.last_known
        if self._running_on is not None:
            last_known.ended(self._running_on)
        self._running_on = route
        if route is not None:
            last_known.began(route, self._gateway.clock(), decided=decided)

    async def _prefilled(
        self, placed: Placement, route: InstanceRoute, usage: Usage | None
    ) -> None:
        """Report `prefill_done` to the conductor at once, which may reject the request now. Raises
        Rejected."""
        if placed.fallback or self._prefill_told:
            return
        self._prefill_told = True
        rejection: Rejection | None = None
        with contextlib.suppress(ConductorError):
            names = route.names if placed.raced else None
            wishes = self.ask.wishes
            event = RequestEvent(
                wishes.request_id,
                "prefill_done",
                route=names,
                tenant=wishes.tenant,
                conductor=placed.conductor,
                found_tokens=None if usage is None else usage.found_tokens,
            )
            rejection = await self._gateway.reporter.say(event)
        if rejection is not None:
            raise Rejected(rejection)

    def _ran(self, placed: Placement, number: int, answer: AnswerStream | Whole) -> None:
        """Record that the answer begins on route `number`: response headers, metrics, and the
        report of the first token."""
        self.route = route = placed.routes[number]
        self._raced_by_other = number > 0
        self.degraded = self.degraded or bool(placed.model)
        self._describe(placed, route)
        self._span.set(
            {
                "gen_ai.operation.name": _OPERATIONS.get(self.ask.path, self.ask.path),
                "gen_ai.request.model": self.ask.model,
                "gen_ai.response.model": placed.model or self.ask.model,
                "tiffin.prefill": route.prefill.name,
                "tiffin.decode": route.decode.name,
                "tiffin.cached_tokens": placed.cached_tokens,
            }
        )
        if len(placed.routes) > 1:
            self._gateway.metrics.races.labels("first" if number == 0 else "other").inc()
        if isinstance(answer, AnswerStream) and self.report is not None:
            self.report.first_token(route.names if placed.raced else None)
            self.report.tokens(answer.counter.tokens - 1)

    def _describe(self, placed: Placement, route: InstanceRoute) -> None:
        """Put the instances and the cached tokens into the response headers."""
        prefill = route.decode if self.ask.whole else route.prefill
        self._told["x-tiffin-prefill"] = latin(prefill.name).decode("latin-1")
        self._told["x-tiffin-decode"] = latin(route.decode.name).decode("latin-1")
        self._told["x-tiffin-cached-tokens"] = str(placed.cached_tokens)
        if placed.fallback:
            self._told["x-tiffin-fallback"] = placed.fallback
        if placed.degraded:
            self._told["x-tiffin-degraded"] = ", ".join(placed.degraded)

    # -- what the conductor hears ------------------------------------------------------------------

    def _release_elsewhere(self) -> None:
        """Tell the conductor that has placed the request before that it is no more in flight there:
        another one of several was asked since."""
        if self._conductor:
            self._cancel()

    def _cancel(self) -> None:
        wishes = self.ask.wishes
        self._gateway.reporter.cancelled(wishes.request_id, wishes.tenant, self._conductor)

    def _drop_report(self) -> None:
        if self.report is not None:
            self.report.drop()
            self.report = None


def latin(text: str) -> bytes:
    """Encode a header's value. Instance ids may contain any printable character, so those outside
    Latin-1 are replaced."""
    return text.encode("latin-1", "replace")
