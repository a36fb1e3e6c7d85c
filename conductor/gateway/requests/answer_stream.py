"""One request from its placement to its answer's last byte, as an ASGI response.

    place -> wait -> run -> pass on    an instance is gone: place again, a few times
                     |
                     the client has received nothing until the answer's first token arrives, so a
                     failure before that has an HTTP status of its own, or the gateway retries the
                     request on another instance

A request waits until the conductor releases it (`releases.py`). If the first token takes long, the
gateway starts the stream with keepalive comments, so that no proxy between the gateway and the
client closes the connection as idle. From then on a failure that no retry mends is an event of the
stream.

A client that hangs up cancels the whole request: the gateway closes the engine's connection and
reports the request to the conductor as cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec
from starlette.responses import Response

from ...errors import ConductorError, ConductorUnavailable, NotAuthorized
from ...records import Rejection, RequestEvent
from ...wire.answers import REASON_HEADER, Refusal, error, failed, refused, rejected
from ..engines.engine_client import (
    AnswerStream,
    EngineBroke,
    EngineError,
    EngineGone,
    EngineSlow,
    Whole,
)
from ..openai.engine_bodies import last_events
from ..openai.openai_request import CHAT, COMPLETIONS, RESPONSES
from .continuation import Continuation, continuable, with_ids
from .execution import handed_over
from .placement import NoInstance, NoShards, Placement
from .poison import Poisonous, own_answer
from .stream_latencies import StreamLatencies

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.types import Receive, Scope, Send

    from ...web.tracing import Span
    from ..clients.client_limits import Visit
    from ..engines.instance_cache import InstanceRoute
    from ..gateway import Gateway
    from ..openai.openai_request import ClientRequest
    from ..openai.tokenizing import Sized
    from .conductor_reports import ConductorReport

log = logging.getLogger("tiffin.gateway")

_STREAM_HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}
_WAITING = b": waiting\n\n"
# How soon the rest of a stream is placed again that was rejected for load.
_RETRY_S, _RETRY_MAX_S = 0.25, 5.0
# OpenTelemetry's semantic conventions for generative AI.
_OPERATIONS = {
    CHAT: "chat",
    COMPLETIONS: "text_completion",
    RESPONSES: "generate_content",
    "/v1/embeddings": "embeddings",
}


class _Refused(Exception):
    """The conductor rejects the request, when it is placed or after its prefill."""

    def __init__(self, rejection: Rejection) -> None:
        super().__init__(rejection.reason)
        self.rejection = rejection


class Serving(Response):
    """The ASGI response to `ask`, which runs the request while it sends the answer. The request's
    head came at `started_at` of the gateway's clock. It calls `release` when the answer has ended.
    """

    def __init__(
        self,
        gateway: Gateway,
        ask: ClientRequest,
        span: Span,
        started_at: float,
        visit: Visit,
        release: Callable[[], None],
    ) -> None:
        super().__init__()
        self._asked = ask  # by the client; `_ask` is what runs, the rest of it after a break
        self._rest: Continuation | None = None
        if continuable(ask, gateway.config.continuation):
            self._rest = Continuation(ask, asks_ids="return_token_ids" in ask.fields)
            ask = with_ids(ask)
        self._gone: set[str] = set()
        self._answers: list[AnswerStream] = []  # one after the other
        self._gateway, self._ask, self._span, self._release = gateway, ask, span, release
        self._told = {"x-request-id": ask.wishes.request_id}
        self._report: ConductorReport | None = None
        self._placed = False  # the conductor may have placed it; its end is not reported yet
        self._route: InstanceRoute | None = None  # on which its answer begins
        self._running_on: InstanceRoute | None = None  # where it counts as running
        self._conductor = ""  # the URL of the conductor that has placed it, if it is one of several
        self._decided = False  # a route is chosen, so the request was not rejected at placement
        self._prefill_told = False
        self._sent_head = False
        self._complete = False  # nothing more is sent; a disconnect from now on cancels nothing
        self._started_at = started_at
        self._visit, self._answered = visit, 0  # tokens of the answer, once it has ended

    @property
    def begun(self) -> bool:
        """Whether the head of the answer was sent."""
        return self._sent_head

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the request, until a client that hangs up cancels it."""
        serving, left = asyncio.current_task(), False
        assert serving is not None

        def leave(_: asyncio.Task[None]) -> None:
            nonlocal left
            if not self._complete:
                left = True
                serving.cancel()

        gone = asyncio.create_task(_hung_up(receive))
        gone.add_done_callback(leave)
        try:
            await self._work(scope, receive, send)
        except asyncio.CancelledError:
            if not left:
                raise
            self._gateway.metrics.cancelled.inc()
        finally:
            if left:
                serving.uncancel()
            self._complete = True
            gone.cancel()
            self._run_on(None)
            self._release()
            self._visit.leave(self._answered, self._gateway.clock())
            self._span.end()
            self._gateway.metrics.total_s.observe(self._gateway.clock() - self._started_at)

    # -- the three steps ---------------------------------------------------------------------------

    async def _work(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the request and send its answer, or an error; neither if the task is cancelled."""
        total_s = self._gateway.config.timeouts.total_s
        ended = "cancelled"
        answer: AnswerStream | Whole | None = None
        try:
            async with asyncio.timeout(total_s):
                answer, refusal = await self._awaited(send)
                if answer is None:
                    assert refusal is not None
                    await self._respond(refusal, scope, receive, send)
                elif isinstance(answer, Whole):
                    # If a head was already sent, it was a stream's: the answer becomes an event.
                    good = answer.good and not self._sent_head
                    await self._respond(self._whole(answer), scope, receive, send)
                    ended = "finished" if good else "cancelled"
                else:
                    with self._span.call("decode", **{"tiffin.instance": self._decodes}):
                        ended = await self._pass_on(answer, send)
        except TimeoutError:
            await self._late(total_s, scope, receive, send)
        finally:
            if answer is not None:
                await answer.close()
            self._end(ended)

    async def _awaited(self, send: Send) -> tuple[AnswerStream | Whole | None, Response | None]:
        """Await `_begun`. If that takes longer than `keepalive_s`, start the stream and send
        keepalive comments meanwhile."""
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

    async def _begun(self) -> tuple[AnswerStream | Whole | None, Response | None]:
        """Run the request until its answer begins: the answer, or the error response to send
        instead."""
        gateway, ask = self._gateway, self._ask
        try:
            with self._span.call("tokenize"):
                sized = await gateway.size(ask)
            self._span.set({"gen_ai.usage.input_tokens": sized.prompt_tokens})
            self._told["x-tiffin-tokens"] = sized.how
            self._visit.prompt(sized.prompt_tokens, gateway.clock())
            self._told |= self._visit.limits_left(gateway.clock())
            return await self._attempts(sized), None
        except _Refused as refused_late:
            self._forget()
            return None, rejected(refused_late.rejection)
        except ConductorError as failure:
            # A conductor whose answer did not arrive may have placed the request.
            if not isinstance(failure, ConductorUnavailable):
                self._forget()
            return None, _unplaced(failure)
        except Refusal as refusal:
            # What was placed before, if anything was, is reported as its end is.
            response = refused(refusal)
            response.headers[REASON_HEADER] = refusal.code
            return None, response
        except NoInstance as failure:
            headers = {"retry-after": "1"}
            return None, error(503, "no_instance", str(failure), headers=headers)
        except NoShards as failure:
            log.error("%s", failure)
            why = "no instance can take its part of this long context; the gateway's log has more"
            return None, error(503, "misconfigured", why)
        except Poisonous as failure:
            log.error("%s: %s", self._ask.wishes.request_id, failure)
            gateway.metrics.poisoned.labels("died").inc()
            why = "instances ended while they computed this request: it is not tried again"
            return None, error(502, "request_poisonous", why)
        except EngineSlow as failure:
            log.warning("%s", failure)
            return None, error(504, "engine_timeout", "the instance did not answer in time")
        except EngineError as failure:
            log.warning("%s", failure)
            return None, error(502, "engine_failed", "no instance gave an answer; try again")

    async def _attempts(self, sized: Sized) -> AnswerStream | Whole:
        """Place the request and run it; place it again if its instance is gone."""
        gateway, gone = self._gateway, self._gone
        failures: list[EngineGone] = []
        while True:
            try:
                return await self._attempt(sized, len(failures), gone)
            except EngineGone as failure:
                failures.append(failure)
                own = own_answer(failures)
                if own is not None:
                    gateway.metrics.poisoned.labels("answered_500").inc()
                    return own
                log.info("placed again: %s", failure)
                self._drop_report()
                if len(failures) > gateway.config.reschedules:
                    raise
                gateway.metrics.rescheduled.inc()

    async def _attempt(self, sized: Sized, attempt: int, gone: set[str]) -> AnswerStream | Whole:
        """Place the request, excluding the instances in `gone`, and run it."""
        gateway, ask = self._gateway, self._ask
        placed, answers_s = await self._turn(sized, gone)
        self._run_on(placed.routes[0], decided=not placed.fallback)
        self._decided, self._prefill_told = True, False
        unseen = not ask.stream and not handed_over(ask, placed.routes[0])
        if self._report is not None:
            # The gateway can't see when the prefill of an answer in one piece is over, so it takes
            # the predicted TTFT.
            self._report.running(answers_s if unseen else None)

        async def prefilled(route: InstanceRoute) -> None:
            await self._prefilled(placed, route)

        number, answer = await gateway.running.run(
            ask, placed, self._span, attempt, prefilled, gone
        )
        self._ran(placed, number, answer)
        return answer

    async def _turn(self, sized: Sized, gone: set[str]) -> tuple[Placement, float]:
        """Place the request, and wait for its release if the conductor holds it. Returns its
        placement, and the predicted seconds to its first token. Raises _Refused."""
        while True:
            placed = await self._place(sized, gone)
            if not placed.held:
                return placed, placed.predicted_ttft_s or 0.0
            self._decided = True
            try:
                with self._span.call("hold"):
                    released = await self._gateway.releases.wait(self._ask.wishes, placed)
            except ConductorUnavailable:
                return self._gateway.placing.still(placed), placed.predicted_ttft_s or 0.0
            if isinstance(released, Rejection):
                raise _Refused(released)
            if released.state == "released":
                return placed, released.first_token_s
            self._drop_report()

    def _run_on(self, route: InstanceRoute | None, *, decided: bool = False) -> None:
        """Count the request as running on this route, and on none before."""
        last_known = self._gateway.last_known
        if self._running_on is not None:
            last_known.ended(self._running_on)
        self._running_on = route
        if route is not None:
            last_known.began(route, self._gateway.clock(), decided=decided)

    async def _place(self, sized: Sized, gone: set[str]) -> Placement:
        gateway, wishes = self._gateway, self._ask.wishes
        before, self._placed = self._placed, True
        placed = await gateway.place(self._ask, sized, gone, self._span)
        if isinstance(placed, Rejection):
            raise _Refused(placed)
        self._placed = before or placed.in_doubt or not placed.fallback
        if not placed.fallback:
            if self._conductor != placed.conductor:
                self._release_elsewhere()
            self._conductor = placed.conductor
            self._report = gateway.reporter.begin(
                wishes.request_id, placed.alive_s, wishes.tenant, placed.conductor
            )
        return placed

    def _ran(self, placed: Placement, number: int, answer: AnswerStream | Whole) -> None:
        """Record that the answer begins on route `number`: response headers, metrics, and the
        report of the first token."""
        self._route = route = placed.routes[number]
        if placed.model:
            self._rest = None  # the rest would be another model's
        self._describe(placed, route)
        self._span.set(
            {
                "gen_ai.operation.name": _OPERATIONS.get(self._ask.path, self._ask.path),
                "gen_ai.request.model": self._ask.model,
                "gen_ai.response.model": placed.model or self._ask.model,
                "tiffin.prefill": route.prefill.name,
                "tiffin.decode": route.decode.name,
                "tiffin.cached_tokens": placed.cached_tokens,
            }
        )
        if len(placed.routes) > 1:
            self._gateway.metrics.races.labels("first" if number == 0 else "other").inc()
        if isinstance(answer, AnswerStream) and self._report is not None:
            self._report.first_token(route.names if placed.raced else None)
            self._report.tokens(answer.counter.tokens - 1)

    async def _prefilled(self, placed: Placement, route: InstanceRoute) -> None:
        """Report `prefill_done` to the conductor at once, which may reject the request now. Raises
        _Refused."""
        if placed.fallback or self._prefill_told:
            return
        self._prefill_told = True
        rejection: Rejection | None = None
        with contextlib.suppress(ConductorError):
            names = route.names if placed.raced else None
            wishes = self._ask.wishes
            event = RequestEvent(
                wishes.request_id, "prefill_done", 0, names, wishes.tenant, placed.conductor
            )
            rejection = await self._gateway.reporter.say(event)
        if rejection is not None:
            raise _Refused(rejection)

    # -- what the client sees ----------------------------------------------------------------------

    async def _pass_on(self, answer: AnswerStream, send: Send) -> str:
        """Send a whole stream to the client. Returns "finished" or "cancelled"."""
        gateway = self._gateway
        assert self._route is not None
        latencies = StreamLatencies(gateway.metrics, self._ask, self._route)
        latencies.first(answer.counter.events, self._started_at, gateway.clock())
        if not self._sent_head:
            await self._head(send, 200, {**_STREAM_HEADERS, **answer.headers, **self._told})
        self._answers = [answer]
        try:
            while (ended := await self._passed(answer, latencies, send)) is None:
                more = await self._go_on()
                if more is None:
                    broke = error(502, "engine_failed", "the instance broke off")
                    gateway.metrics.broken.inc()
                    await self._last(send, _as_event(broke))
                    return "cancelled"
                self._answers.append(more)
                answer = more
            return ended
        finally:
            for other in self._answers[1:]:
                await other.close()
            self._answered = sum(one.counter.tokens for one in self._answers)
            gateway.metrics.answered_tokens.inc(self._answered)

    async def _passed(
        self, answer: AnswerStream, latencies: StreamLatencies, send: Send
    ) -> str | None:
        """Send the stream of one instance to the client. Returns "finished" or "cancelled"; None if
        it broke off."""
        gateway = self._gateway
        await self._events(answer.first, send)
        told = answer.counter.tokens
        try:
            if (cap := self._reached(answer)) is not None:
                return await self._cut(cap, send)
            async with aclosing(answer.rest()) as events:
                async for data in events:
                    if self._report is not None:
                        self._report.tokens(answer.counter.tokens - told)
                    told = answer.counter.tokens
                    latencies.more(answer.counter.events, gateway.clock())
                    if answer.gone and self._rest is not None and self._rest.possible:
                        raise EngineBroke(f"an error {answer.counter.error_status} in its stream")
                    await self._events(data, send)
                    if (cap := self._reached(answer)) is not None:
                        return await self._cut(cap, send)
        except EngineBroke as failure:
            log.warning("a stream broke: %s", failure)
            gateway.breakers.failed(self._decodes, gateway.clock())
            return None
        await self._last(send, b"")
        if answer.counter.failed:
            self._gateway.metrics.broken.inc()
            return "cancelled"
        return "finished"

    async def _events(self, data: bytes, send: Send) -> None:
        """Send whole events to the client."""
        rest = self._rest
        if rest is not None:
            if len(self._answers) > 1:
                data = rest.rewritten(data)
            data = rest.seen(data)
        await _body(send, data, more=True)

    async def _go_on(self) -> AnswerStream | None:
        """The rest of the answer, which another instance has begun; None if that can't be."""
        gateway, rest = self._gateway, self._rest
        if rest is None or not rest.possible or len(self._answers) > gateway.config.reschedules:
            return None
        self._gone.add(self._decodes)
        self._end("cancelled")  # the conductor knows the rest by a name of its own
        self._report, self._placed, self._conductor = None, False, ""
        try:
            ids = await gateway.settled(rest, self._ask.model, self._gone)
            ask = None if ids is None else rest.rest(ids)
            if ask is None:
                return None
            self._ask = replace(ask, wishes=self._asked.wishes.part(len(self._answers)))
            answer = await self._admitted(await gateway.size(self._ask))
        except (ConductorError, EngineError, NoInstance, NoShards, Poisonous, Refusal) as failure:
            log.warning("%s does not go on: %s", self._asked.wishes.request_id, failure)
            return None
        except _Refused as failure:
            self._forget()
            log.warning("%s does not go on: %s", self._asked.wishes.request_id, failure)
            return None
        if isinstance(answer, AnswerStream):
            gateway.metrics.continued.inc()
            return answer
        return None

    async def _admitted(self, sized: Sized) -> AnswerStream | Whole:
        """`_attempts`, again and again while the conductor rejects for load, for as long as a
        stream may say nothing: the client has half an answer already. Raises _Refused at last."""
        clock = self._gateway.clock
        until = clock() + self._gateway.config.timeouts.idle_s
        while True:
            try:
                return await self._attempts(sized)
            except _Refused as failure:
                told_s = failure.rejection.retry_after_s or 0.0
                retry_s = min(max(told_s, _RETRY_S), _RETRY_MAX_S)
                if not failure.rejection.overloaded or clock() + retry_s > until:
                    raise
                self._forget()
                await asyncio.sleep(retry_s)

    def _reached(self, answer: AnswerStream) -> int | None:
        """The cap of answers like this one where it is decoded, if it has reached that and not its
        end. An answer with several choices is left alone: it has an end for each; so is a
        response, whose last event repeats all of it."""
        assert self._route is not None
        if self._ask.whole or answer.counter.ended or self._asked.path == RESPONSES:
            return None
        name, priority = self._route.decode.name, self._ask.wishes.priority
        cap = self._gateway.known.output_cap(name, priority)
        tokens = sum(one.counter.tokens for one in self._answers)
        return cap if cap is not None and tokens >= cap else None

    async def _cut(self, cap: int, send: Send) -> str:
        """End the answer here, as at a limit of its own, and say why."""
        self._gateway.metrics.cut.inc()
        self._span.set({"tiffin.cut_at": cap})
        await self._last(send, last_events(self._asked, f"cut_answer:{cap}"))
        return "finished"

    def _whole(self, answer: Whole) -> Response:
        """The engine's answer in one piece, or its refusal, as a response."""
        if self._report is not None:
            self._report.tokens(answer.tokens)
        self._answered = answer.tokens
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
        """Send a keepalive comment, after the head if that is not sent yet. The head does not name
        the instances: the request may still be placed again."""
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

    def _describe(self, placed: Placement, route: InstanceRoute) -> None:
        """Put the instances and the cached tokens into the response headers."""
        prefill = route.decode if self._ask.whole else route.prefill
        self._told["x-tiffin-prefill"] = _latin(prefill.name).decode("latin-1")
        self._told["x-tiffin-decode"] = _latin(route.decode.name).decode("latin-1")
        self._told["x-tiffin-cached-tokens"] = str(placed.cached_tokens)
        if placed.fallback:
            self._told["x-tiffin-fallback"] = placed.fallback
        if placed.degraded:
            self._told["x-tiffin-degraded"] = ", ".join(placed.degraded)

    def _began(self, status: int) -> None:
        self._sent_head = True
        self._gateway.metrics.requests.labels(self._ask.path, str(status)).inc()

    def _end(self, how: str) -> None:
        """Report the request's end to the conductor, if the conductor has placed it or may have."""
        self._span.set({"tiffin.end": how, "gen_ai.usage.output_tokens": self._answered})
        if self._report is not None:
            self._report.end(how)
        elif self._placed:
            wishes = self._ask.wishes
            self._gateway.reporter.cancelled(wishes.request_id, wishes.tenant, self._conductor)

    def _release_elsewhere(self) -> None:
        """Tell the conductor that has placed the request before that it is no more in flight there:
        another one of several was asked since."""
        if self._conductor:
            wishes = self._ask.wishes
            self._gateway.reporter.cancelled(wishes.request_id, wishes.tenant, self._conductor)

    def _forget(self) -> None:
        """Report no end: the conductor has no such in-flight request."""
        self._release_elsewhere()
        self._placed = False
        self._drop_report()

    @property
    def _decodes(self) -> str:
        """The id of the instance that answers."""
        return "" if self._route is None else self._route.decode.name

    def _drop_report(self) -> None:
        if self._report is not None:
            self._report.drop()
            self._report = None


async def _hung_up(receive: Receive) -> None:
    """Return when the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _body(send: Send, data: bytes, *, more: bool) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": more})


def _unplaced(failure: ConductorError) -> Response:
    """The error response for a request that the conductor did not place."""
    if isinstance(failure, NotAuthorized):
        log.error("the conductor does not let the gateway in: %s", failure)
        return error(503, "misconfigured", "the gateway has no right to schedule; its log has more")
    if isinstance(failure, ConductorUnavailable):  # the log, not the client, gets its address
        headers = {"retry-after": "1"}
        return error(503, "unavailable", "the conductor does not answer", headers=headers)
    return failed(failure)


def _as_event(response: Response) -> bytes:
    """An error response as the last event of a stream, in the form of vLLM and OpenAI: no [DONE]
    follows it."""
    try:
        body = msgspec.json.format(bytes(response.body), indent=-1)  # in one line
    except msgspec.DecodeError:
        body = bytes(error(502, "engine_failed", "the instance's answer is no event").body)
    return b"data: " + body + b"\n\n"


def _latin(text: str) -> bytes:
    """Encode a header's value. Instance ids may contain any printable character, so those outside
    Latin-1 are replaced."""
    return text.encode("latin-1", "replace")
