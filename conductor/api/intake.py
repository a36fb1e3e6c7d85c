"""Reading what clients send, within limits: size, time, and memory for all of them together."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import msgspec
from starlette.requests import ClientDisconnect

from .answers import Refusal, invalid_json

if TYPE_CHECKING:
    from starlette.requests import Request

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Limits:
    """What one client, and all together, may take of the service.

    `body_bytes`: 8 MiB are a million token ids. `held_bytes`: of all bodies that are being
    received. `body_s`: a body that arrives slower is given up. `streams`: connections that follow
    the decisions; `stream_backlog`: how many each may lag behind before it misses some.
    `connections`: more are answered 503.
    """

    body_bytes: int = 8 << 20
    held_bytes: int = 256 << 20
    body_s: float = 30.0
    streams: int = 64
    stream_backlog: int = 1024
    connections: int = 4096


class Intake:
    """Receives bodies."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._held_bytes = 0

    async def body(self, request: Request, decoder: msgspec.json.Decoder[T]) -> T:
        """The body, decoded. Raises Refusal: 400, 408, 413, 415, 422 or 503."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            # Also keeps out forms of foreign web pages, which browsers send without asking.
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

    async def optional(self, request: Request, decoder: msgspec.json.Decoder[T], default: T) -> T:
        """The same; `default` for a request without a body."""
        if request.headers.get("content-length", "0") == "0" and not request.headers.get(
            "transfer-encoding"
        ):
            return default
        return await self.body(request, decoder)

    async def _receive(self, request: Request) -> bytes:
        declared = request.headers.get("content-length", "")
        if declared.isascii() and declared.isdigit():
            # Before a byte of it is read: nobody has to carry 100 MB here to be told.
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
            raise Refusal(
                413, "too_large", f"a body has at most {limits.body_bytes} bytes", close=True
            )
        if self._held_bytes > limits.held_bytes:
            raise Refusal(503, "busy", "too much is being received", retry_after_s=1.0, close=True)
