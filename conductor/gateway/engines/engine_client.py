"""HTTP calls to the instances: tokenise, prefill, answer. The gateway reads an answer's bytes only
to count tokens, and passes them on unchanged.

Cancelling a call closes its connection, which makes the engine abort the request. This client
retries only what an instance did not read; the caller decides what to do when an instance is gone.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec import Raw

from ...client.http_session import (
    Broken,
    HttpAnswer,
    HttpFailure,
    HttpSession,
    NotConnected,
    Silent,
    TooLarge,
    trusting,
)
from ...errors import InvalidRequest
from ..openai import engine_bodies
from ..openai.token_counter import NO_USAGE, Counter, TooLong, Usage, usage_in
from .inflated import KNOWN, Inflated, plain
from .rendered import Tokens, rendered

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping, Sequence

    from ..config import GatewayConfig, Handoff
    from ..openai.openai_request import ClientRequest
    from .instance_cache import CallTarget

log = logging.getLogger("tiffin.gateway")

# HTTP statuses of an instance whose engine, or a proxy in front of it, is down: vLLM also answers
# 500 when its engine has died.
_FAILED = 500
_GONE = (_FAILED, 502, 503, 504)
# Of an instance that has another key than the gateway (the client's key is never sent there), or of
# a proxy in front of it.
_SHUT = (401, 403)
# What a failing instance says is no longer than this.
_WORDS_BYTES_MAX = 64 << 10
# `kv_transfer_params` list blocks: a million tokens are 65,536 numbers.
_PREFILL_BYTES_MAX = 16 << 20
# A stream that could go on waits longer than a prompt, whose length can be estimated: the instances
# that are left have just got the requests of another one.
_DETOKENIZE_S = 30.0
# vLLM has it if it was started with `--enable-scale-out`, and else answers 403; one that does not
# is asked again after so long, as a chat with images has megabytes.
_RENDER = "/v1/chat/completions/render"
_RENDER_AGAIN_S = 60.0
_JSON = {"content-type": "application/json"}
_PASSED_HEADERS = ("content-type", "content-encoding", "retry-after")


class EngineError(Exception):
    """An instance gave no answer that the gateway could pass on; the client has received nothing
    of it."""

    def __init__(self, target: CallTarget, why: str) -> None:
        super().__init__(f"{target.name}: {why}")
        self.target = target


class EngineGone(EngineError):
    """The instance can't be reached, or its connection broke, or it is shutting down: a retry on
    another instance may succeed."""


class EngineDied(EngineGone):
    """The instance had the request, and its connection broke or ended before an answer."""


class EngineShut(EngineGone):
    """The instance refuses the gateway's own key."""


class EngineFailed(EngineGone):
    """The instance answers 500: it may be down (vLLM's whose engine has died answers so), or the
    request may be the reason. `answer` is what it says."""

    def __init__(self, target: CallTarget, answer: Whole) -> None:
        super().__init__(target, "it answers 500")
        self.answer = answer


class EngineSlow(EngineError):
    """The instance ran into a timeout. A retry on another instance would take as long again."""


class EngineOdd(EngineError):
    """The instance's answer is malformed."""


class EngineUnfit(EngineError):
    """The instance's answer can't be passed on, nor could that of another try: a client is to be
    told `code` and `why`, and not to try again."""

    def __init__(self, target: CallTarget, code: str, why: str) -> None:
        super().__init__(target, why)
        self.code, self.why = code, why


def _too_large(target: CallTarget, limit: str) -> EngineUnfit:
    return EngineUnfit(target, "answer_too_large", f"the instance's answer has more than {limit}")


class EngineBroke(Exception):
    """An instance broke off its answer after the gateway had begun to pass it on."""


@dataclass(frozen=True, slots=True)
class Whole:
    """A complete answer: that of a request that is not streamed, or an engine's refusal."""

    status: int
    headers: dict[str, str]
    body: bytes
    usage: Usage = NO_USAGE

    @property
    def good(self) -> bool:
        return self.status == 200

    @property
    def plain(self) -> bytes:
        """The body as it was before something in between compressed it."""
        return plain(self.body, self.headers.get("content-encoding", ""))

    async def close(self) -> None:
        """Do nothing, as the connection is closed already; for the interface of `AnswerStream`."""


class AnswerStream:
    """A streamed answer that has begun. `first` holds its first events, which contain a token
    unless the stream has ended or carries an error. The caller closes it."""

    status = 200
    good = True

    def __init__(
        self,
        target: CallTarget,
        response: HttpAnswer | Inflated,
        idle_s: float,
        headers: dict[str, str],
        *,
        hides_usage: bool = False,
    ) -> None:
        self.headers = headers
        self.counter = Counter(hides_usage=hides_usage)
        self.first = b""
        self._target, self._response, self._idle_s = target, response, idle_s

    @property
    def gone(self) -> bool:
        """Whether an event says that the instance is down."""
        return self.counter.failed and self.counter.error_status in _GONE

    async def begin(self) -> None:
        """Wait for the first token. Raises EngineError."""
        counter, pieces = self.counter, list[bytes]()
        try:
            while not (counter.tokens or counter.ended or counter.failed):
                piece = await self._response.piece()
                if not piece:
                    raise EngineDied(self._target, "the answer ended before its first token")
                pieces.append(counter.feed(piece))
        except HttpFailure as error:
            raise _translated(self._target, error) from error
        except TooLong as error:
            raise _too_large(self._target, str(error)) from error
        if self.gone and not counter.tokens:
            # vLLM sends status 200 before it computes; if its engine dies then, it sends an event
            # with the error.
            if counter.error_status == _FAILED:
                body = b'{"error":' + counter.error + b"}"
                raise EngineFailed(self._target, Whole(_FAILED, dict(_JSON), body))
            raise EngineGone(
                self._target, f"its answer begins with an error {counter.error_status}"
            )
        self.first = b"".join(pieces)

    async def rest(self) -> AsyncGenerator[bytes]:
        """The events after `first`. Raises EngineBroke if the stream breaks off before its end, and
        EngineUnfit."""
        counter, response = self.counter, self._response
        silence = _Silence(self._idle_s, response)
        try:
            while piece := await silence.piece():
                whole = counter.feed(piece)
                if whole:
                    yield whole
        except HttpFailure as error:
            why = silence.passed or f"its connection broke: {error}"
            raise EngineBroke(why) from error
        except TooLong as error:
            raise _too_large(self._target, str(error)) from error
        finally:
            silence.end()
        if not counter.ended and not counter.failed:
            raise EngineBroke("it ended its answer early")
        rest = counter.rest()
        if rest:
            yield rest

    async def close(self) -> None:
        """Close the connection, if the answer has not ended."""
        self._response.close()


class Relayed:
    """A streamed answer that is passed on as it comes. The caller closes it."""

    def __init__(self, response: HttpAnswer) -> None:
        self.headers = _passed(response)
        self._response = response

    async def pieces(self) -> AsyncGenerator[bytes]:
        """All of it. Raises EngineBroke if it breaks off."""
        try:
            while piece := await self._response.piece():
                yield piece
        except HttpFailure as error:
            raise EngineBroke(f"its connection broke: {error}") from error

    def close(self) -> None:
        """Close the connection, if the answer has not ended."""
        self._response.close()


class _Silence:
    """Closes an answer of which nothing comes for `idle_s` while a piece of it is waited for. One
    timer for the whole stream: to set one for each piece takes as long as to pass the piece on."""

    def __init__(self, idle_s: float, response: HttpAnswer | Inflated) -> None:
        self.passed = ""
        self._idle_s, self._response = idle_s, response
        self._loop = asyncio.get_running_loop()
        self._waits_since = math.inf
        self._timer = self._loop.call_later(idle_s, self._look)

    async def piece(self) -> bytes:
        """The next piece. Raises HttpFailure."""
        self._waits_since = self._loop.time()
        piece = await self._response.piece()
        self._waits_since = math.inf
        return piece

    def end(self) -> None:
        """Watch no longer."""
        self._timer.cancel()

    def _look(self) -> None:
        now = self._loop.time()
        ends_at = min(self._waits_since, now) + self._idle_s
        if now >= ends_at:
            self.passed = f"nothing came for {self._idle_s:g} s"
            self._response.close()
        else:
            self._timer = self._loop.call_at(ends_at, self._look)


class Prefilled(msgspec.Struct):
    """The answer of an instance that has prefilled a prompt: what the decode instance is told."""

    kv_transfer_params: dict[str, Raw] | None = None
    usage: Usage | None = None


class _Tokenised(msgspec.Struct):
    tokens: list[int]


class _Detokenised(msgspec.Struct):
    prompt: str


_detokenised = msgspec.json.Decoder(_Detokenised)
_prefilled = msgspec.json.Decoder(Prefilled)
_tokenised = msgspec.json.Decoder(_Tokenised)


class Engines:
    """HTTP client of all instances. `token` is their API key, b"" if they have none. The caller
    closes it. Raises InvalidRequest for an invalid CA file."""

    def __init__(self, config: GatewayConfig, token: bytes = b"") -> None:
        times = config.timeouts
        self._times, self._limits, self._asks_usage = times, config.limits, config.asks_usage
        headers = {"content-type": "application/json", "accept-encoding": "identity"}
        if token:
            headers["authorization"] = f"Bearer {token.decode('latin-1')}"
        ca = Path(config.engine_tls_ca) if config.engine_tls_ca else None
        # `CapacityGate` limits requests where they arrive.
        self._http = HttpSession(headers, trusting(ca), times.connect_s)
        self._renders_again: dict[str, float] = {}  # by the instance's name, in time.monotonic()

    async def close(self) -> None:
        """Close all connections."""
        await self._http.close()

    async def healthy(self, target: CallTarget, timeout_s: float) -> bool:
        """Whether the instance says at `/health` that it is well. One that has no such route is, if
        it answers at all."""
        url = target.url.rstrip("/") + "/health"
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self._http.send("GET", url, b"", {}, timeout_s)
        except (HttpFailure, InvalidRequest, TimeoutError) as error:
            log.debug("%s gives no answer to a health check: %s", target.name, error)
            return False
        answer.close()
        return answer.status < _FAILED

    async def tokenize(
        self, target: CallTarget, ask: ClientRequest, *, media: bool = False
    ) -> Tokens | None:
        """The prompt's token ids, from the instance's `/tokenize`; None on an error or timeout.
        With what is behind its placeholders, if `media` is asked for and the instance can tell."""
        try:
            async with asyncio.timeout(self._times.tokenize_s):
                if media and (found := await self._render(target, ask)) is not None:
                    return found
                answer = await self._whole(
                    target, "/tokenize", engine_bodies.tokenize_body(ask), {}
                )
            if answer.status == 200:
                return Tokens(_tokenised.decode(answer.plain).tokens)
            log.debug("%s answers /tokenize with %d", target.name, answer.status)
        except TimeoutError:
            log.debug("%s does not tokenise in time", target.name)
            if media:  # rendering may be what takes so long
                self._rest(target)
        except (EngineError, msgspec.DecodeError) as error:
            log.debug("%s does not tokenise: %s", target.name, error)
        return None

    async def _render(self, target: CallTarget, ask: ClientRequest) -> Tokens | None:
        """The tokens of a chat, and its media; None if the instance does not tell them."""
        if time.monotonic() < self._renders_again.get(target.name, 0.0):
            return None
        try:
            answer = await self._whole(target, _RENDER, engine_bodies.render_body(ask), {})
        except EngineError as error:
            log.debug("%s does not render: %s", target.name, error)
            self._rest(target)
            return None
        if answer.status not in (200, 400):
            self._rest(target)
        return rendered(answer.plain) if answer.status == 200 else None

    def _rest(self, target: CallTarget) -> None:
        """Do not ask it to render for a while."""
        now = time.monotonic()
        self._renders_again = {one: at for one, at in self._renders_again.items() if at > now}
        self._renders_again[target.name] = now + _RENDER_AGAIN_S

    async def detokenize(self, target: CallTarget, model: str, ids: Sequence[int]) -> str | None:
        """The text of token ids, from the instance's `/detokenize`; None on an error or timeout."""
        body = msgspec.json.encode({"model": model, "tokens": ids})
        try:
            async with asyncio.timeout(_DETOKENIZE_S):
                answer = await self._whole(target, "/detokenize", body, {})
            if answer.status == 200:
                return _detokenised.decode(answer.plain).prompt
            log.debug("%s answers /detokenize with %d", target.name, answer.status)
        except (EngineError, TimeoutError, msgspec.DecodeError) as error:
            log.debug("%s does not detokenise: %s", target.name, error)
        return None

    async def prefill(
        self,
        target: CallTarget,
        ask: ClientRequest,
        headers: Mapping[str, str],
        handoff: Handoff,
        fetched: tuple[int, float] | None = None,
    ) -> Prefilled | Whole:
        """Prefill the prompt on the instance `target`. Returns a `Whole` if the engine refuses.
        Raises EngineError."""
        body = engine_bodies.prefill_body(ask, handoff, target.block_tokens, fetched)
        answer = await self._whole(target, ask.path, body, headers, _PREFILL_BYTES_MAX)
        if not answer.good:
            return answer
        try:
            return _prefilled.decode(answer.plain)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise EngineOdd(target, f"its answer to a prefill is none: {error}") from error

    async def forward(
        self, target: CallTarget, method: str, path: str, body: bytes
    ) -> Whole | Relayed:
        """A call as a client made it. Raises EngineError."""
        response = await self._send(
            target, path, body, {}, self._times.first_token_s, method=method
        )
        if _streams(response):
            return Relayed(response)
        try:
            return await self._read(target, response)
        finally:
            response.close()

    async def answer(
        self, target: CallTarget, ask: ClientRequest, body: bytes, headers: Mapping[str, str]
    ) -> AnswerStream | Whole:
        """Run the request on the instance `target`. A streamed answer is returned as soon as it has
        a token, any other when it is complete. Raises EngineError."""
        if not ask.stream:
            whole = await self._whole(target, ask.path, body, headers, None, self._times.total_s)
            return _counted(whole)
        try:
            async with asyncio.timeout(self._times.first_token_s):
                return await self._stream(target, ask, body, headers)
        except TimeoutError as error:
            raise EngineSlow(target, f"no token came in {self._times.first_token_s:g} s") from error

    async def _stream(
        self, target: CallTarget, ask: ClientRequest, body: bytes, sent: Mapping[str, str]
    ) -> AnswerStream | Whole:
        response = await self._send(target, ask.path, body, sent)
        try:
            if not _streams(response):
                whole = await self._read(target, response)
                response.close()
                return whole
            headers = _passed(response)
            encoding = headers.pop("content-encoding", "identity").strip().lower()
            if encoding != "identity" and encoding not in KNOWN:
                why = f"the instance's stream is compressed as {encoding[:32]!r}"
                raise EngineUnfit(target, "engine_failed", why)
            events = response if encoding == "identity" else Inflated(response)
            hides_usage = self._asks_usage and engine_bodies.lacks_usage(ask)
            stream = AnswerStream(
                target, events, self._times.idle_s, headers, hides_usage=hides_usage
            )
            await stream.begin()
        except BaseException:
            response.close()
            raise
        return stream

    async def _whole(
        self,
        target: CallTarget,
        path: str,
        body: bytes,
        headers: Mapping[str, str],
        nbytes_max: int | None = _PREFILL_BYTES_MAX,
        timeout_s: float | None = None,
    ) -> Whole:
        response = await self._send(
            target, path, body, headers, timeout_s or self._times.first_token_s
        )
        try:
            return await self._read(target, response, nbytes_max)
        finally:
            response.close()

    async def _send(
        self,
        target: CallTarget,
        path: str,
        body: bytes,
        headers: Mapping[str, str],
        silence_s: float | None = None,
        *,
        method: str = "POST",
    ) -> HttpAnswer:
        """Send a request and return the response with its head read. Raises EngineError."""
        if not target.url:
            raise EngineGone(target, "it has not said where it answers")
        url = target.url.rstrip("/") + path
        try:
            try:
                response = await self._http.send(method, url, body, headers, silence_s)
            except (NotConnected, Broken) as error:
                # Who is late to connect may have been kept waiting by this machine, not by that.
                unread = error.late if isinstance(error, NotConnected) else error.reused
                if not unread:
                    raise
                response = await self._http.send(method, url, body, headers, silence_s)
        except HttpFailure as error:
            raise _translated(target, error) from error
        except InvalidRequest as error:
            raise EngineGone(target, str(error)) from error
        if response.status == _FAILED:
            try:
                words = await self._read(target, response, _WORDS_BYTES_MAX)
            except EngineUnfit as error:
                raise EngineGone(target, "it answers 500, and says too much") from error
            finally:
                response.close()
            raise EngineFailed(target, words)
        if response.status in _SHUT and path != _RENDER:
            response.close()
            log.error("%s refuses the gateway's key: %d", target.name, response.status)
            raise EngineShut(target, f"it refuses the gateway's key: {response.status}")
        if response.status in _GONE:
            response.close()
            raise EngineGone(target, f"it answers {response.status}")
        if 300 <= response.status < 400:
            # The operator has not allowed the redirect's target, and following it would send the
            # API key there. Nor is the redirect passed on to the client.
            response.close()
            why = f"the instance answers with a redirect ({response.status}), which leads nowhere"
            raise EngineUnfit(target, "engine_failed", why)
        return response

    async def _read(
        self, target: CallTarget, response: HttpAnswer, nbytes_max: int | None = None
    ) -> Whole:
        """The whole answer, of `limits.answer_bytes` at most if there is no other limit."""
        limit = "" if nbytes_max else ", which is limits.answer_bytes of the gateway"
        nbytes_max = nbytes_max or self._limits.answer_bytes
        try:
            body = await response.read(nbytes_max)
        except TooLarge as error:
            raise _too_large(target, f"{nbytes_max} bytes{limit}") from error
        except HttpFailure as error:
            raise _translated(target, error) from error
        return Whole(response.status, _passed(response), body)


def _counted(whole: Whole) -> Whole:
    usage = usage_in(whole.plain) if whole.good else NO_USAGE
    return Whole(whole.status, whole.headers, whole.body, usage)


def _streams(response: HttpAnswer) -> bool:
    kind = response.headers.get("content-type", "")
    return response.status == 200 and kind.startswith("text/event-stream")


def _passed(response: HttpAnswer) -> dict[str, str]:
    """The response headers that the gateway passes on to the client."""
    headers = response.headers
    return {name: headers[name] for name in _PASSED_HEADERS if name in headers}


def _translated(target: CallTarget, error: HttpFailure) -> EngineError:
    """Translate a failed call. An instance that does not accept a connection is gone; an instance
    that accepts a request and sends nothing for minutes is slow, and a retry on another instance
    would take as long again."""
    if isinstance(error, Silent):
        return EngineSlow(target, f"no answer in time ({error})")
    if isinstance(error, Broken):
        return EngineDied(target, str(error))
    return EngineGone(target, str(error))
