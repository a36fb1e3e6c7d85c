"""Passes a streamed answer on that is of no request placed here: that of a response which an
instance keeps. An ASGI response."""

from __future__ import annotations

import logging
from contextlib import aclosing
from typing import TYPE_CHECKING

from starlette.responses import StreamingResponse

from ...wire.answers import error
from ..engines.engine_client import EngineBroke
from .answer_stream import STREAM_HEADERS, as_event

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from starlette.types import Receive, Scope, Send

    from ..engines.engine_client import Relayed

log = logging.getLogger("tiffin.gateway")


class Relay(StreamingResponse):
    """The answer as it comes. A client that hangs up ends it. Calls `release` at its end."""

    def __init__(self, answer: Relayed, release: Callable[[], None]) -> None:
        super().__init__(self._pieces(), headers={**STREAM_HEADERS, **answer.headers})
        self._answer, self._release = answer, release

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass it on."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._answer.close()
            self._release()

    async def _pieces(self) -> AsyncGenerator[bytes]:
        try:
            async with aclosing(self._answer.pieces()) as pieces:
                async for piece in pieces:
                    yield piece
        except EngineBroke as failure:
            log.warning("a stream broke: %s", failure)
            # Perhaps within an event: that ends here.
            yield b"\n\n" + as_event(error(502, "engine_failed", "the instance broke off"))
