"""A transport that sends an answer's head together with the first piece of its body.

uvicorn writes them one after the other, and uvloop passes each on at once: two packets, which cost
both sides as much as two messages. Of a short answer before which nothing else was computed that is
a tenth of the time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

_HEAD = b"HTTP/1.1 "


class HeldHead:
    """See the module. All but these methods are the transport's own. A head without a body goes out
    in the next turn of the event loop. `lingers()`: it is not to be closed yet but
    for what is sent, and is closed again later."""

    def __init__(
        self,
        transport: asyncio.Transport,
        loop: asyncio.AbstractEventLoop,
        lingers: Callable[[], bool],
    ) -> None:
        self._transport, self._loop, self._lingers = transport, loop, lingers
        self._head = b""
        self.is_closing = transport.is_closing
        self.get_extra_info = transport.get_extra_info

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Send data, or hold it if it is a head."""
        if self._head:
            data, self._head = self._head + data, b""
        elif data.startswith(_HEAD):
            self._head = data
            self._loop.call_soon(self._flush)
            return
        self._transport.write(data)

    def close(self) -> None:
        """Send what is held, and close; if it lingers, in this direction alone."""
        self._flush()
        if not self._lingers():
            self._transport.close()
        elif self._transport.can_write_eof():  # not over TLS
            self._transport.write_eof()

    def _flush(self) -> None:
        if self._head:
            head, self._head = self._head, b""
            self._transport.write(head)
