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
import logging
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec
from starlette.responses import Response

from ...errors import ConductorError, ConductorUnavailable, NotAuthorized
from ...wire.answers import NOT_AGAIN, REASON_HEADER, Refusal, error, failed, refused, rejected
from ..engines.engine_client import (
    AnswerStream,
    EngineBroke,
    EngineError,
    EngineShut,
    EngineSlow,
    EngineUnfit,
    Whole,
)
from ..openai.engine_bodies import last_events
from ..openai.openai_request import RESPONSES
from .attempts import Attempts, Rejected, latin
from .continuation import Continuation, continuable, with_ids
from .placement import NoInstance, NoShards
from .poison import Poisonous
from .stream_latencies import StreamLatencies

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.types import Receive, Scope, Send

    from ...web.tracing import Span
    from ..clients.client_limits import Visit
    from ..gateway import Gateway
    from ..openai.openai_request import ClientRequest

log = logging.getLogger("tiffin.gateway")

STREAM_HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}
_WAITING = b": waiting\n\n"


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
        self._asked = ask  # by the client; the attempts' is what runs, the rest of it after a break
        self._rest: Continuation | None = None
        if continuable(ask, gateway.config.continuation):
            self._rest = Continuation(ask, asks_ids="return_token_ids" in ask.fields)
            ask = with_ids(ask)
        self._answers: list[AnswerStream] = []  # one after the other
        self._gateway, self._span, self._release = gateway, span, release
        self._told = ask.wishes.told
        self._attempts = Attempts(gateway, ask, span, self._told)
        self._sent_head = False
        self._complete = False  # nothing more is sent; a disconnect from now on cancels nothing
        self._started_at = started_at
        self._visit, self._answered = visit, 0  # tokens of the answer, once it has ended
        self._found: int | None = None  # tokens of the prompt that were cached, by its engine

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
            self._attempts.close()
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
                    with self._span.call("decode", **{"tiffin.instance": self._attempts.decodes}):
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
        if not self._attempts.ask.stream or not interval_s:
            return await self._begun()
        begun = asyncio.create_task(self._begun())
        try:
            while not (await asyncio.wait((begun,), timeout=interval_s))[0]:
                if self._attempts.decided:
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
        gateway, ask = self._gateway, self._attempts.ask
        try:
            with self._span.call("tokenize"):
                sized = await gateway.size(ask)
            self._span.set({"gen_ai.usage.input_tokens": sized.prompt_tokens})
            self._told["x-tiffin-tokens"] = sized.how
            self._visit.prompt(sized.prompt_tokens, gateway.clock())
            self._told.update(self._visit.limits_left(gateway.clock()))
            return await self._attempts.answer(sized), None
        except Rejected as refused_late:
            self._attempts.forget()
            return None, rejected(refused_late.rejection)
        except ConductorError as failure:
            # A conductor whose answer did not arrive may have placed the request.
            if not isinstance(failure, ConductorUnavailable):
                self._attempts.forget()
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
            log.error("%s: %s", self._attempts.ask.wishes.shown, failure)
            gateway.metrics.poisoned.labels("died").inc()
            why = "instances ended while they computed this request: it is not tried again"
            return None, error(502, "request_poisonous", why, headers=NOT_AGAIN)
        except EngineSlow as failure:
            log.warning("%s", failure)
            return None, error(504, "engine_timeout", "the instance did not answer in time")
        except EngineUnfit as failure:
            log.warning("%s", failure)
            return None, _unfit(failure)
        except EngineShut as failure:
            log.warning("%s", failure)
            why = "instances refuse the gateway's key; its log names them"
            return None, error(502, "misconfigured", why, headers=NOT_AGAIN)
        except EngineError as failure:
            log.warning("%s", failure)
            return None, error(502, "engine_failed", "no instance gave an answer; try again")

    # -- what the client sees ----------------------------------------------------------------------

    async def _pass_on(self, answer: AnswerStream, send: Send) -> str:
        """Send a whole stream to the client. Returns "finished" or "cancelled"."""
        gateway = self._gateway
        assert self._attempts.route is not None
        if self._attempts.degraded:
            self._rest = None  # another model answers
        latencies = StreamLatencies(gateway.metrics, self._attempts.ask, self._attempts.route)
        latencies.first(answer.counter.events, self._started_at, gateway.clock())
        if not self._sent_head:
            await self._head(send, 200, {**STREAM_HEADERS, **answer.headers, **self._told})
        self._answers = [answer]
        try:
            while (ended := await self._passed(answer, latencies, send)) is None:
                more = await self._go_on()
                if more is None:
                    broke = error(502, "engine_failed", "the instance broke off")
                    gateway.metrics.broken.inc()
                    await self._last(send, as_event(broke))
                    return "cancelled"
                self._answers.append(more)
                answer = more
            return ended
        finally:
            for other in self._answers[1:]:
                await other.close()
            self._answered = sum(one.counter.tokens for one in self._answers)
            if len(self._answers) == 1:  # else two instances have computed the prompt
                self._found = answer.counter.found_tokens
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
                    if self._attempts.report is not None:
                        self._attempts.report.tokens(answer.counter.tokens - told)
                    told = answer.counter.tokens
                    latencies.more(answer.counter.events, gateway.clock())
                    if answer.gone and self._rest is not None and self._rest.possible:
                        raise EngineBroke(f"an error {answer.counter.error_status} in its stream")
                    await self._events(data, send)
                    if (cap := self._reached(answer)) is not None:
                        return await self._cut(cap, send)
        except EngineBroke as failure:
            log.warning("a stream broke: %s", failure)
            gateway.breakers.failed(self._attempts.decodes, gateway.clock())
            return None
        except EngineUnfit as failure:
            log.warning("%s", failure)
            gateway.metrics.broken.inc()
            await self._last(send, as_event(_unfit(failure)))
            return "cancelled"
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
        attempts = self._attempts
        attempts.broke()
        try:
            ids = await gateway.settled(rest, attempts.ask.model, attempts.gone)
            ask = None if ids is None else rest.rest(ids)
            if ask is None:
                return None
            attempts.ask = replace(ask, wishes=self._asked.wishes.part(len(self._answers)))
            answer = await attempts.patient_answer(await gateway.size(attempts.ask))
        except (ConductorError, EngineError, NoInstance, NoShards, Poisonous, Refusal) as failure:
            log.warning("%s does not go on: %s", self._asked.wishes.shown, failure)
            return None
        except Rejected as failure:
            attempts.forget()
            log.warning("%s does not go on: %s", self._asked.wishes.shown, failure)
            return None
        if isinstance(answer, AnswerStream) and not attempts.degraded:
            gateway.metrics.continued.inc()
            return answer
        await answer.close()  # a refusal, or the rest as another model would say it
        return None

    def _reached(self, answer: AnswerStream) -> int | None:
        """The cap of answers like this one where it is decoded, if it has reached that and not its
        end. An answer with several choices is left alone: it has an end for each; so is a
        response, whose last event repeats all of it."""
        assert self._attempts.route is not None
        if self._attempts.ask.whole or answer.counter.ended or self._asked.path == RESPONSES:
            return None
        name, priority = self._attempts.route.decode.name, self._attempts.ask.wishes.priority
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
        if self._attempts.report is not None:
            self._attempts.report.tokens(answer.usage.answered_tokens)
        self._answered = answer.usage.answered_tokens
        self._found = answer.usage.found_tokens
        self._gateway.metrics.answered_tokens.inc(self._answered)
        return Response(answer.body, answer.status, answer.headers)

    async def _respond(
        self, response: Response, scope: Scope, receive: Receive, send: Send
    ) -> None:
        if self._sent_head:
            self._gateway.metrics.broken.inc()
            await self._last(send, as_event(response))
            return
        response.headers.update(self._told)
        self._began(response.status_code)
        self._complete = True
        await response(scope, receive, send)

    async def _head(self, send: Send, status: int, headers: dict[str, str]) -> None:
        raw = [(name.encode("latin-1"), latin(value)) for name, value in headers.items()]
        self._began(status)
        await send({"type": "http.response.start", "status": status, "headers": raw})

    async def _comment(self, send: Send) -> None:
        """Send a keepalive comment, after the head if that is not sent yet. The head does not name
        the instances: the request may still be placed again."""
        if not self._sent_head:
            kind = {"content-type": "text/event-stream; charset=utf-8"}
            await self._head(send, 200, {**STREAM_HEADERS, **kind, **self._told})
        await _body(send, _WAITING, more=True)

    async def _late(self, total_s: float, scope: Scope, receive: Receive, send: Send) -> None:
        message = f"the answer took longer than {total_s:g} s, which is the limit here"
        await self._respond(error(504, "timeout", message), scope, receive, send)

    async def _last(self, send: Send, data: bytes) -> None:
        self._complete = True
        await _body(send, data, more=False)

    def _began(self, status: int) -> None:
        self._sent_head = True
        self._gateway.metrics.requests.labels(self._attempts.ask.path, str(status)).inc()

    def _end(self, how: str) -> None:
        """Report the request's end to the conductor, and with its span."""
        self._span.set({"tiffin.end": how, "gen_ai.usage.output_tokens": self._answered})
        self._attempts.end(how, self._found)


async def _hung_up(receive: Receive) -> None:
    """Return when the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _body(send: Send, data: bytes, *, more: bool) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": more})


def _unfit(failure: EngineUnfit) -> Response:
    """The error response for an answer that can't be passed on."""
    return error(502, failure.code, failure.why, headers=NOT_AGAIN)


def _unplaced(failure: ConductorError) -> Response:
    """The error response for a request that the conductor did not place."""
    if isinstance(failure, NotAuthorized):
        log.error("the conductor does not let the gateway in: %s", failure)
        return error(503, "misconfigured", "the gateway has no right to schedule; its log has more")
    if isinstance(failure, ConductorUnavailable):  # the log, not the client, gets its address
        headers = {"retry-after": "1"}
        return error(503, "unavailable", "the conductor does not answer", headers=headers)
    return failed(failure)


def as_event(response: Response) -> bytes:
    """An error response as the last event of a stream, in the form of vLLM and OpenAI: no [DONE]
    follows it."""
    try:
        body = msgspec.json.format(bytes(response.body), indent=-1)  # in one line
    except msgspec.DecodeError:
        body = bytes(error(502, "engine_failed", "the instance's answer is no event").body)
    return b"data: " + body + b"\n\n"
