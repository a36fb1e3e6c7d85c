"""Reads request bodies within limits: size and time of each, and the memory of all together."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import msgspec
from starlette.requests import ClientDisconnect

from ..web.connection_limits import PER_PEER
from ..wire.answers import Refusal, invalid_json

if TYPE_CHECKING:
    from starlette.requests import Request

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on the resources that one client, and all clients together, may use.

    `body_bytes`: 1.25 MiB are all keys of the longest prompt, or 180,000 token ids. Decoding the
    part that is decoded at once takes 2 ms, during which the conductor decides nothing else.
    `held_bytes`: all bodies that are being received. `body_s`: timeout for receiving a body.
    `streams`: connections that subscribe to the decisions; `stream_backlog`: by how many decisions
    a stream may lag before it misses some. `connections`: authorised connections; a request on any
    further one gets 503. `peer_connections`: unauthorised connections of one address; above that
    the server closes those that were silent for longest. `head_s`: timeout for a request's head.
    """

    body_bytes: int = 1280 << 10
    held_bytes: int = 256 << 20
    body_s: float = 30.0
    streams: int = 64
    stream_backlog: int = 1024
    connections: int = 4096
    peer_connections: int = PER_PEER
    head_s: float = 10.0


class Intake:
    """Receives bodies. `instead` is appended to the error message for a body that is too large."""

    def __init__(self, limits: Limits, instead: str = "") -> None:
        self._limits, self._instead = limits, instead
        self._held_bytes = 0

    async def body(self, request: Request, decoder: msgspec.json.Decoder[T]) -> T:
        """Receive and decode the body. Raises Refusal: 400, 408, 413, 415, 422 or 503."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            # This also rejects forms of foreign web pages (CSRF), which browsers send without a
            # preflight request.
            raise Refusal(
                415, "unsupported_media_type", "send JSON: Content-Type: application/json"
            )
        raw = await self._receive(request)
        try:
            return decoder.decode(raw)
        except (msgspec.DecodeError, RecursionError) as error:
            raise invalid_json(error) from error
        except UnicodeDecodeError as error:
            raise Refusal(400, "invalid_json", "the body is not UTF-8") from error

    async def raw(self, request: Request) -> bytes:
        """The body as it is. Raises Refusal."""
        return await self._receive(request)

    async def optional(self, request: Request, decoder: msgspec.json.Decoder[T], default: T) -> T:
        """As `body`, but returns `default` for a request without a body."""
        if request.headers.get("content-length", "0") == "0" and not request.headers.get(
            "transfer-encoding"
        ):
            return default
        return await self.body(request, decoder)

    async def _receive(self, request: Request) -> bytes:
        declared = request.headers.get("content-length", "")
        if declared.isascii() and declared.isdigit():
            # Checked before the first byte is read, so that no client uploads 100 MB only to get
            # the error.
            self._check(int(declared[:20]))
        received: list[bytes] = []
        total = 0
        try:
            async with asyncio.timeout(self._limits.body_s):
                async for chunk in request.stream():
                    total += len(chunk)
                    self._held_bytes += len(chunk)
                    self._check(total)
                    received.append(chunk)
        except TimeoutError as error:
            raise Refusal(
                408, "too_slow", f"the body did not arrive in {self._limits.body_s:g} s", close=True
            ) from error
        except ClientDisconnect as error:
            raise Refusal(400, "incomplete", "the body ended early", close=True) from error
        finally:
            self._held_bytes -= total
        return received[0] if len(received) == 1 else b"".join(received)

    def _check(self, body_bytes: int) -> None:
        limits = self._limits
        if body_bytes > limits.body_bytes:
            said = f"a body has at most {limits.body_bytes} bytes{self._instead}"
            raise Refusal(413, "too_large", said, close=True, final=True)
        if self._held_bytes > limits.held_bytes:
            raise Refusal(503, "busy", "too much is being received", retry_after_s=1.0, close=True)
