"""One request from its placement to its answer's last byte, as an ASGI response.

    place -> hold -> run -> pass on    an instance is gone: place again, a few times
                     |
                     nobody has seen anything of the answer until its first token is there, so until
                     then whatever goes wrong has a status of its own, or is tried elsewhere

Held are requests that wait for blocks that another one is computing. A stream whose first token
takes long begins without it, with comments, so that nobody between here and the client takes it for
dead: from then on what goes wrong, and is not mended elsewhere, is an event of the stream.

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
from .placing import NoInstance, NoShards, Placement
from .running import handed_over
from .waiting import hold_s

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.types import Receive, Scope, Send

    from .asking import Ask
    from .gateway import Gateway
    from .known import Route
    from .reporting import Report
    from .tokenizing import Sized
    from .waiting import Prefill

log = logging.getLogger("tiffin.gateway")

_STREAM_HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}
_WAITING = b": waiting\n\n"


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
        self._decided = False  # where it runs: it is not refused at once
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
                answer, refusal = await self._awaited(send)
                if answer is None:
                    assert refusal is not None
                    await self._respond(refusal, scope, receive, send)
                elif isinstance(answer, Whole):
                    good = answer.good and not self._sent_head  # which was that of a stream
                    await self._respond(self._whole(answer), scope, receive, send)
                    ended = "finished" if good else "cancelled"
                else:
                    ended = await self._pass_on(answer, send)
        except TimeoutError:
            await self._late(total_s, scope, receive, send)
        finally:
            if answer is not None:
                await answer.close()
            self._end(ended)

    async def _awaited(self, send: Send) -> tuple[Stream | Whole | None, Response | None]:
        """`_begun`. A stream begins meanwhile, if that takes long."""
        interval_s = self._gateway.config.keepalive_s
        if not self._ask.stream or not interval_s:
            return await self._begun()
        begun = asyncio.create_task(self._begun())
        try:
            while not (await asyncio.wait((begun,), timeout=interval_s))[0]:
                if self._decided:
                    await self._comment(send)
            return begun.result()
        except BaseException:
            begun.cancel()
            (outcome,) = await asyncio.gather(begun, return_exceptions=True)
            if isinstance(outcome, tuple) and outcome[0] is not None:
                await outcome[0].close()
            raise

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
            if not isinstance(failure, ConductorUnavailable):  # else it may have placed it
                self._forget()
            return None, _unplaced(failure)
        except NoInstance as failure:
            headers = {"retry-after": "1"}
            return None, error(503, "no_instance", str(failure), headers=headers)
        except NoShards as failure:
            log.error("%s", failure)
            why = "no instance can take its part of this long context; the gateway's log has more"
            return None, error(503, "misconfigured", why)
        except EngineSlow as failure:
            log.warning("%s", failure)
            return None, error(504, "engine_timeout", "the instance did not answer in time")
        except EngineError as failure:
            log.warning("%s", failure)
            return None, error(502, "engine_failed", "no instance gave an answer; try again")

    async def _attempts(self, sized: Sized) -> Stream | Whole:
        """Place it and run it; place it again if its instance is gone."""
        gateway, gone = self._gateway, set[str]()
        attempt = 0
        while True:
            prefill = gateway.prefills.begin(self._ask.wishes.request_id)
            try:
                return await self._attempt(sized, prefill, attempt, gone)
            except EngineGone as failure:
                log.info("placed again: %s", failure)
                self._drop_report()
                attempt += 1
                if attempt > gateway.config.reschedules:
                    raise
                gateway.metrics.rescheduled.inc()
            finally:
                prefill.over()

    async def _attempt(
        self, sized: Sized, prefill: Prefill, attempt: int, gone: set[str]
    ) -> Stream | Whole:
        """Place it, on none of those that are `gone`, and run it. `prefill` is over when this
        returns, or before."""
        gateway, ask = self._gateway, self._ask
        before, self._placed = self._placed, True
        placed = await gateway.place(ask, sized, gone)
        if isinstance(placed, Rejection):
            raise _Refused(placed)
        self._placed = before or placed.in_doubt or not placed.fallback
        self._decided, self._prefill_told = True, False
        unseen = not ask.stream and not handed_over(ask, placed.routes[0])
        if not placed.fallback:
            self._report = gateway.reporter.begin(ask.wishes.request_id, placed.alive_s)
            # Of an answer in one piece nobody sees when its prefill is over.
            self._report.running(placed.predicted_ttft_s or 0.0 if unseen else None)
        await self._hold(placed)
        if unseen:
            prefill.over_in(placed.predicted_ttft_s or 0.0)

        async def prefilled(route: Route) -> None:
            prefill.over()
            await self._prefilled(placed, route)

        number, answer = await gateway.running.run(
            ask, placed, self._trace, attempt, prefilled, gone
        )
        self._ran(placed, number, answer)
        return answer

    async def _hold(self, placed: Placement) -> None:
        """Until the blocks are there that it waits for, if they are computed for a request that is
        under way here."""
        other = self._gateway.prefills.get(placed.wait_for)
        if other is None or placed.wait_for == self._ask.wishes.request_id:
            return
        metrics, started = self._gateway.metrics, self._gateway.clock()
        metrics.held.inc()
        try:
            await other.wait(hold_s(placed))
        finally:
            metrics.held.dec()
            metrics.held_s.observe(self._gateway.clock() - started)

    def _ran(self, placed: Placement, number: int, answer: Stream | Whole) -> None:
        """The answer begins, on this route."""
        route = placed.routes[number]
        self._describe(placed, route)
        if len(placed.routes) > 1:
            self._gateway.metrics.races.labels("first" if number == 0 else "other").inc()
        if isinstance(answer, Stream) and self._report is not None:
            self._report.first_token(route.names if placed.raced else None)
            self._report.tokens(answer.counter.tokens - 1)

    async def _prefilled(self, placed: Placement, route: Route) -> None:
        """Tell the conductor at once: it may refuse the request now. Raises _Refused."""
        if placed.fallback or self._prefill_told:
            return
        self._prefill_told = True
        rejection: Rejection | None = None
        with contextlib.suppress(ConductorError):
            names = route.names if placed.raced else None
            event = RequestEvent(self._ask.wishes.request_id, "prefill_done", route=names)
            rejection = await self._gateway.reporter.say(event)
        if rejection is not None:
            raise _Refused(rejection)

    # -- what the client sees ----------------------------------------------------------------------

    async def _pass_on(self, answer: Stream, send: Send) -> str:
        """All of a stream. Returns how it ended."""
        self._gateway.metrics.ttft_s.observe(self._gateway.clock() - self._started_at)
        if not self._sent_head:
            await self._head(send, 200, {**_STREAM_HEADERS, **answer.headers, **self._told})
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
            await self._last(send, _as_event(error(502, "engine_failed", "the instance broke off")))
            return "cancelled"
        finally:
            self._gateway.metrics.answered_tokens.inc(answer.counter.tokens)
        await self._last(send, b"")
        if answer.counter.failed:
            self._gateway.metrics.broken.inc()
            return "cancelled"
        return "finished"

    def _whole(self, answer: Whole) -> Response:
        """An answer in one piece: the engine's, its refusals included."""
        if self._report is not None:
            self._report.tokens(answer.tokens)
        self._gateway.metrics.answered_tokens.inc(answer.tokens)
        return Response(answer.body, answer.status, answer.headers)

    async def _respond(
        self, response: Response, scope: Scope, receive: Receive, send: Send
    ) -> None:
        if self._sent_head:
            self._gateway.metrics.broken.inc()
            await self._last(send, _as_event(response))
            return
        response.headers.update(self._told)
        self._began(response.status_code)
        self._complete = True
        await response(scope, receive, send)

    async def _head(self, send: Send, status: int, headers: dict[str, str]) -> None:
        raw = [(name.encode("latin-1"), _latin(value)) for name, value in headers.items()]
        self._began(status)
        await send({"type": "http.response.start", "status": status, "headers": raw})

    async def _comment(self, send: Send) -> None:
        """Show that it is still being worked on. Where it runs may yet change."""
        if not self._sent_head:
            kind = {"content-type": "text/event-stream; charset=utf-8"}
            await self._head(send, 200, {**_STREAM_HEADERS, **kind, **self._told})
        await _body(send, _WAITING, more=True)

    async def _late(self, total_s: float, scope: Scope, receive: Receive, send: Send) -> None:
        message = f"the answer took longer than {total_s:g} s, which is the limit here"
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


async def _body(send: Send, data: bytes, *, more: bool) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": more})


def _unplaced(failure: ConductorError) -> Response:
    """Why a request was not placed."""
    if isinstance(failure, NotAuthorized):
        log.error("the conductor does not let the gateway in: %s", failure)
        return error(503, "misconfigured", "the gateway has no right to schedule; its log has more")
    if isinstance(failure, ConductorUnavailable):  # where it is, the log says
        headers = {"retry-after": "1"}
        return error(503, "unavailable", "the conductor does not answer", headers=headers)
    return failed(failure)


def _as_event(response: Response) -> bytes:
    """How a stream says that it has failed, as vLLM and OpenAI do: without [DONE] after it."""
    try:
        body = msgspec.json.format(bytes(response.body), indent=-1)  # in one line
    except msgspec.DecodeError:
        body = bytes(error(502, "engine_failed", "the instance's answer is no event").body)
    return b"data: " + body + b"\n\n"


def _latin(text: str) -> bytes:
    """As a header's value; ids of instances may have any printable character."""
    return text.encode("latin-1", "replace")
