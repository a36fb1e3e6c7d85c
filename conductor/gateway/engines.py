"""Calls to the instances: tokenise, prefill, answer. Bytes of answers are passed on unread but for
counting.

A call that is cancelled ends its connection, which is how an engine is told to stop. Nothing is
sent twice here; who calls decides what to do when an instance is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import httpx
import msgspec
from msgspec import Raw

from ..client import trusting
from . import bodies
from .counting import Counter, TooLong, answered_tokens

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping

    from .asking import Ask
    from .config import GatewayConfig
    from .known import Target

log = logging.getLogger("tiffin.gateway")

# vLLM ends connections that were idle for 5 s; one that ends while it is being used looks like an
# instance that is gone.
_IDLE_CONNECTION_S = 4.0
# What an instance says when something in front of it, or inside, has gone away: 500 is also what
# vLLM says when its engine has died.
_GONE = (500, 502, 503, 504)
# `kv_transfer_params` list blocks: a million tokens are 65,536 numbers.
_PREFILL_BYTES_MAX = 16 << 20
_PASSED_HEADERS = ("content-type", "content-encoding", "retry-after")


class EngineError(Exception):
    """An instance gave no answer that could be passed on; nothing of it was."""

    def __init__(self, target: Target, why: str) -> None:
        super().__init__(f"{target.name}: {why}")
        self.target = target


class EngineGone(EngineError):
    """It can't be reached, or its connection broke, or it is leaving: another one may do."""


class EngineSlow(EngineError):
    """It has not answered in time. Another one would take as long again."""


class EngineOdd(EngineError):
    """It answers what no engine should, or more than fits."""


class EngineBroke(Exception):
    """An instance has begun to answer and does not end it."""


@dataclass(frozen=True, slots=True)
class Whole:
    """An answer that is there: of a request that is not streamed, or a refusal of the engine."""

    status: int
    headers: dict[str, str]
    body: bytes
    tokens: int = 0

    @property
    def good(self) -> bool:
        return self.status == 200

    async def close(self) -> None:
        """Nothing to do."""


class Stream:
    """An answer that has begun: `first` are its first events, with a token among them unless it has
    ended. Close it."""

    status = 200
    good = True

    def __init__(
        self, target: Target, response: httpx.Response, idle_s: float, headers: dict[str, str]
    ) -> None:
        self.headers = headers
        self.counter = Counter()
        self.first = b""
        self._target, self._response, self._idle_s = target, response, idle_s
        self._chunks = cast("AsyncGenerator[bytes]", response.aiter_raw())

    async def begin(self) -> None:
        """Wait for the first token. Raises EngineError."""
        pieces: list[bytes] = []
        try:
            async for piece in self._chunks:
                pieces.append(self.counter.feed(piece))
                if self.counter.tokens or self.counter.ended or self.counter.failed:
                    break
            else:
                if not self.counter.ended:
                    raise EngineGone(self._target, "the answer ended before its first token")
        except httpx.TransportError as error:
            raise _translated(self._target, error) from error
        except TooLong as error:
            raise EngineOdd(self._target, str(error)) from error
        if self.counter.error_status in _GONE and not self.counter.tokens:
            # vLLM answers 200 before it computes, and says so when its engine dies then.
            raise EngineGone(
                self._target, f"its answer begins with an error {self.counter.error_status}"
            )
        self.first = b"".join(pieces)

    async def rest(self) -> AsyncGenerator[bytes]:
        """What comes after `first`. Raises EngineBroke if it does not come to its end."""
        counter = self.counter
        try:
            while True:
                async with asyncio.timeout(self._idle_s):
                    piece = await anext(self._chunks, None)
                if piece is None:
                    break
                whole = counter.feed(piece)
                if whole:
                    yield whole
        except TimeoutError as error:
            raise EngineBroke(f"nothing came for {self._idle_s:g} s") from error
        except httpx.TransportError as error:
            raise EngineBroke(f"its connection broke: {error or type(error).__name__}") from error
        except TooLong as error:
            raise EngineBroke(str(error)) from error
        if not counter.ended and not counter.failed:
            raise EngineBroke("it ended its answer early")
        rest = counter.rest()
        if rest:
            yield rest

    async def close(self) -> None:
        """End the connection, if the answer has not ended."""
        with contextlib.suppress(httpx.TransportError):
            await self._chunks.aclose()
            await self._response.aclose()


class _Prefilled(msgspec.Struct):
    kv_transfer_params: dict[str, Raw] | None = None


class _Tokenised(msgspec.Struct):
    tokens: list[int]


_prefilled = msgspec.json.Decoder(_Prefilled)
_tokenised = msgspec.json.Decoder(_Tokenised)


class Engines:
    """All instances. `token` is their API key, b"" if they have none. Close it. Raises
    InvalidRequest for a CA that is none."""

    def __init__(self, config: GatewayConfig, token: bytes = b"") -> None:
        times = config.timeouts
        self._times, self._limits = times, config.limits
        headers = {"content-type": "application/json", "accept-encoding": "identity"}
        if token:
            headers["authorization"] = f"Bearer {token.decode('latin-1')}"
        self._http = httpx.AsyncClient(
            headers=headers,
            # Requests are limited where they come in; a queue here would be one that nobody sees.
            limits=httpx.Limits(
                max_connections=None, max_keepalive_connections=256,
                keepalive_expiry=_IDLE_CONNECTION_S,
            ),
            timeout=httpx.Timeout(times.first_token_s, connect=times.connect_s),
            verify=trusting(Path(config.engine_tls_ca) if config.engine_tls_ca else None),
            trust_env=False,
        )  # fmt: skip

    async def close(self) -> None:
        """End all connections."""
        await self._http.aclose()

    async def tokenize(self, target: Target, ask: Ask) -> list[int] | None:
        """The prompt's tokens as an instance sees them; None if it does not say."""
        try:
            async with asyncio.timeout(self._times.tokenize_s):
                answer = await self._whole(target, "/tokenize", bodies.tokenize_body(ask), {})
            if answer.status == 200:
                return _tokenised.decode(answer.body).tokens
            log.debug("%s answers /tokenize with %d", target.name, answer.status)
        except (EngineError, TimeoutError, msgspec.DecodeError) as error:
            log.debug("%s does not tokenise: %s", target.name, error)
        return None

    async def prefill(
        self, target: Target, ask: Ask, headers: Mapping[str, str], *, remote_decode: bool
    ) -> dict[str, Raw] | Whole | None:
        """Have the prompt computed: what the instance that answers is to be told, None for nothing.
        A `Whole` if the engine refuses. Raises EngineError."""
        body = bodies.prefill_body(ask, remote_decode=remote_decode)
        answer = await self._whole(target, ask.path, body, headers, _PREFILL_BYTES_MAX)
        if not answer.good:
            return answer
        try:
            return _prefilled.decode(answer.body).kv_transfer_params
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise EngineOdd(target, f"its answer to a prefill is none: {error}") from error

    async def answer(
        self, target: Target, ask: Ask, body: bytes, headers: Mapping[str, str]
    ) -> Stream | Whole:
        """The answer, as soon as it has a token or, not streamed, when it is complete. Raises
        EngineError."""
        if not ask.stream:
            whole = await self._whole(
                target, ask.path, body, headers, self._limits.answer_bytes, self._times.total_s
            )
            return _counted(whole)
        try:
            async with asyncio.timeout(self._times.first_token_s):
                return await self._stream(target, ask.path, body, headers)
        except TimeoutError as error:
            raise EngineSlow(target, f"no token came in {self._times.first_token_s:g} s") from error

    async def _stream(
        self, target: Target, path: str, body: bytes, headers: Mapping[str, str]
    ) -> Stream | Whole:
        read_s = max(self._times.first_token_s, self._times.idle_s)
        response = await self._send(target, path, body, headers, read_s)
        try:
            kind = response.headers.get("content-type", "")
            if response.status_code != 200 or not kind.startswith("text/event-stream"):
                whole = await self._read(target, response, self._limits.answer_bytes)
                await response.aclose()
                return whole
            stream = Stream(target, response, self._times.idle_s, _passed(response))
            await stream.begin()
        except BaseException:
            await response.aclose()
            raise
        return stream

    async def _whole(
        self,
        target: Target,
        path: str,
        body: bytes,
        headers: Mapping[str, str],
        nbytes_max: int = _PREFILL_BYTES_MAX,
        timeout_s: float | None = None,
    ) -> Whole:
        response = await self._send(
            target, path, body, headers, timeout_s or self._times.first_token_s
        )
        try:
            return await self._read(target, response, nbytes_max)
        finally:
            await response.aclose()

    async def _send(
        self, target: Target, path: str, body: bytes, headers: Mapping[str, str], read_s: float
    ) -> httpx.Response:
        """The head of an answer. Raises EngineError."""
        if not target.url:
            raise EngineGone(target, "it has not said where it answers")
        timeout = httpx.Timeout(read_s, connect=self._times.connect_s)
        try:
            request = self._http.build_request(
                "POST", target.url.rstrip("/") + path, content=body, headers=dict(headers),
                timeout=timeout,
            )  # fmt: skip
            response = await self._http.send(request, stream=True)
        except httpx.TransportError as error:
            raise _translated(target, error) from error
        except httpx.InvalidURL as error:
            raise EngineGone(target, f"its URL is none: {error}") from error
        if response.status_code in _GONE:
            await response.aclose()
            raise EngineGone(target, f"it answers {response.status_code}")
        return response

    async def _read(self, target: Target, response: httpx.Response, nbytes_max: int) -> Whole:
        pieces: list[bytes] = []
        total = 0
        try:
            async for piece in response.aiter_raw():
                total += len(piece)
                if total > nbytes_max:
                    raise EngineOdd(target, f"its answer is longer than {nbytes_max} bytes")
                pieces.append(piece)
        except httpx.TransportError as error:
            raise _translated(target, error) from error
        return Whole(response.status_code, _passed(response), b"".join(pieces))


def _counted(whole: Whole) -> Whole:
    tokens = answered_tokens(whole.body) if whole.good else 0
    return Whole(whole.status, whole.headers, whole.body, tokens)


def _passed(response: httpx.Response) -> dict[str, str]:
    """The headers that are the client's business."""
    headers = response.headers
    return {name: headers[name] for name in _PASSED_HEADERS if name in headers}


def _translated(target: Target, error: httpx.TransportError) -> EngineGone | EngineSlow:
    """An instance that does not accept a connection is gone; one that has it and says nothing for
    minutes is slow, and asking another one would take as long again."""
    why = str(error) or type(error).__name__
    if isinstance(error, httpx.ReadTimeout | httpx.WriteTimeout):
        return EngineSlow(target, f"no answer in time ({why})")
    return EngineGone(target, why)
