"""One request from its placement to its answer's last byte, as an ASGI response.

    place -> run -> pass on            an instance is gone: place again, a few times
             |
             nobody has seen anything of the answer until its first token is there, so until then
             whatever goes wrong has a status of its own, or is tried elsewhere

A client that hangs up cancels all of it: the engine's connection ends, and the conductor hears that
the request was cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from contextlib import aclosing
from typing import TYPE_CHECKING

import msgspec
from starlette.responses import Response

from ..api.answers import error, failed, rejected
from ..errors import ConductorError, ConductorUnavailable, NotAuthorized
from ..records import Rejection, RequestEvent
from .engines import EngineBroke, EngineError, EngineGone, EngineSlow, Stream, Whole
from .placing import NoInstance, Placement

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.types import Receive, Scope, Send

    from .asking import Ask
    from .gateway import Gateway
    from .known import Route
    from .reporting import Report
    from .tokenizing import Sized

log = logging.getLogger("tiffin.gateway")

_encoder = msgspec.json.Encoder()


class _Refused(Exception):
    """The conductor takes the request back after its prefill."""

    def __init__(self, rejection: Rejection) -> None:
        super().__init__(rejection.reason)
        self.rejection = rejection


class Serving(Response):
    """The answer to `ask`, made while it is sent. `release` is called when it has ended."""

    def __init__(
        self, gateway: Gateway, ask: Ask, trace: dict[str, str], release: Callable[[], None]
    ) -> None:
        super().__init__()
        self._gateway, self._ask, self._trace, self._release = gateway, ask, trace, release
        self._told = {"x-request-id": ask.wishes.request_id}
        self._report: Report | None = None
        self._placed = False  # the conductor may have placed it, and has not heard that it ended
        self._prefill_told = False
        self._sent_head = False
        self._complete = False  # nothing more is sent; that the client hangs up now is no news
        self._started_at = gateway.clock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        metrics = self._gateway.metrics
        work = asyncio.create_task(self._work(scope, receive, send))
        gone = asyncio.create_task(_hung_up(receive))
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
            if not work.done() and not self._complete:
                metrics.cancelled.inc()
                work.cancel()
        except asyncio.CancelledError:
            work.cancel()
            raise
        finally:
            gone.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)
            self._release()
            metrics.total_s.observe(self._gateway.clock() - self._started_at)
        if not work.cancelled():
            work.result()

    # -- the three steps ---------------------------------------------------------------------------

    async def _work(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Ends with whatever can be said, unless it is cancelled."""
        total_s = self._gateway.config.timeouts.total_s
        ended = "cancelled"
        answer: Stream | Whole | None = None
        try:
            async with asyncio.timeout(total_s):
                answer, refusal = await self._begun()
                if answer is None:
                    assert refusal is not None
                    await self._respond(refusal, scope, receive, send)
                elif isinstance(answer, Whole):
                    await self._respond(self._whole(answer), scope, receive, send)
                    ended = "finished" if answer.good else "cancelled"
                else:
                    ended = await self._pass_on(answer, send)
        except TimeoutError:
            await self._late(total_s, scope, receive, send)
        finally:
            if answer is not None:
                await answer.close()
            self._end(ended)

    async def _begun(self) -> tuple[Stream | Whole | None, Response | None]:
        """The answer, as far as it goes before anything is sent; or what is sent instead."""
        gateway, ask = self._gateway, self._ask
        try:
            sized = await gateway.size(ask)
            self._told["x-tiffin-tokens"] = sized.how
            return await self._attempts(sized), None
        except _Refused as refused:
            self._forget()
            return None, rejected(refused.rejection)
        except ConductorError as failure:
            self._forget()
            return None, _unplaced(failure)
        except NoInstance as failure:
            headers = {"retry-after": "1"}
            return None, error(503, "no_instance", str(failure), headers=headers)
        except EngineSlow as failure:
            log.warning("%s", failure)
            return None, error(504, "engine_timeout", "the instance did not answer in time")
        except EngineError as failure:
            log.warning("%s", failure)
            return None, error(502, "engine_failed", "no instance gave an answer; try again")

    async def _attempts(self, sized: Sized) -> Stream | Whole:
        """Place it and run it; place it again if its instance is gone."""
        gateway, avoid = self._gateway, set[str]()
        attempt = 0
        while True:
            self._placed = True
            placed = await gateway.place(self._ask, sized, avoid)
            if isinstance(placed, Rejection):
                raise _Refused(placed)
            self._placed = not placed.fallback
            try:
                return await self._attempt(placed, attempt)
            except EngineGone as failure:
                log.info("placed again: %s", failure)
                avoid.add(failure.target.name)
                self._drop_report()
                attempt += 1
                if attempt > gateway.config.reschedules:
                    raise
                gateway.metrics.rescheduled.inc()

    async def _attempt(self, placed: Placement, attempt: int) -> Stream | Whole:
        gateway, ask = self._gateway, self._ask
        self._prefill_told = False
        if not placed.fallback:
            self._report = gateway.reporter.begin(ask.wishes.request_id, placed.alive_s)
            if not ask.stream:
                self._report.running()
        prefilled = self._prefilled if not placed.fallback else _nobody
        number, answer = await gateway.running.run(ask, placed, self._trace, attempt, prefilled)
        self._describe(placed, placed.routes[number])
        if len(placed.routes) > 1:
            gateway.metrics.races.labels("first" if number == 0 else "other").inc()
        if isinstance(answer, Stream) and self._report is not None:
            # A race that another route won says nothing about the one that was predicted.
            if number == 0:
                self._report.first_token()
                self._report.tokens(answer.counter.tokens - 1)
            else:
                self._report.tokens(answer.counter.tokens)
        return answer

    async def _prefilled(self) -> None:
        """Tell the conductor at once: it may refuse the request now. Raises _Refused."""
        if self._prefill_told:
            return
        self._prefill_told = True
        rejection: Rejection | None = None
        with contextlib.suppress(ConductorError):
            event = RequestEvent(self._ask.wishes.request_id, "prefill_done")
            rejection = await self._gateway.reporter.say(event)
        if rejection is not None:
            raise _Refused(rejection)

    # -- what the client sees ----------------------------------------------------------------------

    async def _pass_on(self, answer: Stream, send: Send) -> str:
        """All of a stream. Returns how it ended."""
        self._gateway.metrics.ttft_s.observe(self._gateway.clock() - self._started_at)
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        await self._head(send, 200, {**headers, **answer.headers, **self._told})
        await _body(send, answer.first, more=True)
        told = answer.counter.tokens
        try:
            async with aclosing(answer.rest()) as events:
                async for data in events:
                    if self._report is not None:
                        self._report.tokens(answer.counter.tokens - told)
                    told = answer.counter.tokens
                    await _body(send, data, more=True)
        except EngineBroke as failure:
            log.warning("a stream broke: %s", failure)
            self._gateway.metrics.broken.inc()
            await self._last(send, _broken_event("engine_failed", "the instance broke off"))
            return "cancelled"
        finally:
            self._gateway.metrics.answered_tokens.inc(answer.counter.tokens)
        await self._last(send, b"")
        return "cancelled" if answer.counter.failed else "finished"

    def _whole(self, answer: Whole) -> Response:
        """An answer in one piece: the engine's, its refusals included."""
        if self._report is not None:
            self._report.tokens(answer.tokens)
        self._gateway.metrics.answered_tokens.inc(answer.tokens)
        return Response(answer.body, answer.status, answer.headers)

    async def _respond(
        self, response: Response, scope: Scope, receive: Receive, send: Send
    ) -> None:
        response.headers.update(self._told)
        self._began(response.status_code)
        self._complete = True
        await response(scope, receive, send)

    async def _head(self, send: Send, status: int, headers: dict[str, str]) -> None:
        raw = [(name.encode("latin-1"), _latin(value)) for name, value in headers.items()]
        self._began(status)
        await send({"type": "http.response.start", "status": status, "headers": raw})

    async def _late(self, total_s: float, scope: Scope, receive: Receive, send: Send) -> None:
        message = f"the answer took longer than {total_s:g} s, which is the limit here"
        if self._sent_head:
            await self._last(send, _broken_event("timeout", message))
        else:
            await self._respond(error(504, "timeout", message), scope, receive, send)

    async def _last(self, send: Send, data: bytes) -> None:
        self._complete = True
        await _body(send, data, more=False)

    def _describe(self, placed: Placement, route: Route) -> None:
        """Say where it ran."""
        prefill = route.decode if self._ask.whole else route.prefill
        self._told["x-tiffin-prefill"] = _latin(prefill.name).decode("latin-1")
        self._told["x-tiffin-decode"] = _latin(route.decode.name).decode("latin-1")
        self._told["x-tiffin-cached-tokens"] = str(placed.cached_tokens)
        if placed.fallback:
            self._told["x-tiffin-fallback"] = placed.fallback

    def _began(self, status: int) -> None:
        self._sent_head = True
        self._gateway.metrics.requests.labels(self._ask.path, str(status)).inc()

    def _end(self, how: str) -> None:
        """The conductor hears how it ended, if it has placed it, or may have."""
        if self._report is not None:
            self._report.end(how)
        elif self._placed:
            self._gateway.reporter.cancelled(self._ask.wishes.request_id)

    def _forget(self) -> None:
        """It is not in flight, and the conductor knows."""
        self._placed = False
        self._drop_report()

    def _drop_report(self) -> None:
        if self._report is not None:
            self._report.drop()
            self._report = None


async def _hung_up(receive: Receive) -> None:
    """Until the client is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _nobody() -> None:
    """Nobody is told of a prefill."""


async def _body(send: Send, data: bytes, *, more: bool) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": more})


def _unplaced(failure: ConductorError) -> Response:
    """Why a request was not placed."""
    if isinstance(failure, NotAuthorized):
        log.error("the conductor does not let the gateway in: %s", failure)
        return error(503, "misconfigured", "the gateway has no right to schedule; its log has more")
    response = failed(failure)
    if isinstance(failure, ConductorUnavailable):
        response.headers["retry-after"] = "1"
    return response


def _broken_event(code: str, message: str) -> bytes:
    """How a stream says that it has failed, as vLLM and OpenAI do: without [DONE] after it."""
    detail = {"message": message, "type": "server_error", "code": code, "param": None}
    return b"data: " + _encoder.encode({"error": detail}) + b"\n\n"


def _latin(text: str) -> bytes:
    """As a header's value; ids of instances may have any printable character."""
    return text.encode("latin-1", "replace")
