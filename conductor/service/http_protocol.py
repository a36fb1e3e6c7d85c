"""HTTP protocol of conductor and gateway: uvicorn's, with limits on everything outside of bodies.

httptools buffers an incomplete head and joins it again with each piece that arrives: a head without
an end takes time quadratic in its length. So the protocol counts the bytes that the parser has not
handed on yet, whether of a request line, header fields, chunk framing or trailers, and sets a
deadline for the client that sends them. It answers 431 to a head that is too large (414 if it is
the URL), and 408 to one that is too slow.

A request may be answered before its body has come, as with 413. If the server closed the connection
then, what the client still sends would reset it, and take the answer from a client that reads only
once it has sent all. So the rest of the body is read and dropped, within a time and a size.

An app reports that it has authorised a request by calling `scope["extensions"][PROOF]()`, which is
False if there is no room for more connections (`connection_limits.py`). It asks whether the client
has hung up by calling `scope["extensions"][GONE]()` (`hang_ups.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from ..web.connection_limits import PROOF, Connections
from ..web.hang_ups import GONE, ended_there
from ..wire.answers import error
from .held_head import HeldHead

if TYPE_CHECKING:
    import asyncio

    from uvicorn.server import ServerState

    from ..web.connection_limits import ConnectionLimits

# Of a whole head: twice the limit of nginx and four times that of Node. Our clients' heads have 300
# bytes.
HEAD_BYTES_MAX = 64 << 10
HEADERS_MAX = 100
# RFC 9112, section 3, recommends 8000 at least. Our URLs contain an id of 256 characters, each %XX
# at most.
URL_BYTES_MAX = 8192
# Pipelined requests that wait for an earlier answer. Current clients do not pipeline.
PIPELINED_MAX = 16
# Of a body that is dropped as its request is answered already: eight times what a gateway takes by
# default. Longer ones are cut off, and their clients may not see the answer.
DROPPED_BYTES_MAX = 64 << 20

# Bytes that are parsed at a time: a head that begins behind another request may exceed the limit by
# so much at most.
_PIECE_BYTES = 16 << 10


class WebConfig(uvicorn.Config):
    """uvicorn's configuration, with the server's table of connections."""

    def __init__(self, app: Any, limits: ConnectionLimits, **options: Any) -> None:
        super().__init__(app, http=LimitedProtocol, ws="none", **options)
        self.table = Connections[LimitedProtocol](limits)


# What a client offers that would rather speak HTTP/2 (h2c). RFC 9110, section 7.8: a server that
# does not take the offer ignores it.
_OFFER = (b"upgrade", b"http2-settings")


class _UntilClose(int):
    """The length of a body that ends with the connection, as uvicorn counts it down."""

    def __lt__(self, nbytes: int) -> bool:
        return False

    def __sub__(self, nbytes: int) -> _UntilClose:
        return self

    def __ne__(self, nbytes: object) -> bool:
        return False

    __hash__ = None  # type: ignore[assignment]


class _Refused(Exception):
    """Raised in a callback of the parser: status, code and message of the answer."""


class LimitedProtocol(HttpToolsProtocol):
    """The protocol of one connection."""

    config: WebConfig

    def __init__(
        self,
        config: WebConfig,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._table = config.table
        self._head_s = config.table.limits.head_s
        self._in_head = True  # within a request's head, or before it
        self._pending_bytes = 0  # received, but not yet handed on by the parser
        self._fields = 0  # header and trailer fields of this request
        self._refused = False
        self._dropped_bytes = 0  # of this request's body, after its answer
        self._leaves = False  # the connection closes at the end of this body at the latest
        self._offered = False  # this request came with an offer to speak another protocol
        self._deadline: asyncio.TimerHandle | None = None

    # -- connection --------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Register the new connection as a stranger, and abort the connections that the table
        evicts for it."""
        super().connection_made(transport)
        self.transport = HeldHead(transport, self.loop, self._lingers)  # type: ignore[assignment]
        address = self.client[0] if self.client else ""
        for other in self._table.came(self, address, self.loop.time()):
            other.transport.abort()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Remove the connection from the table. Either side may have closed it."""
        super().connection_lost(exc)
        self._table.left(self)
        self._unset_keepalive_if_required()
        self._cancel_deadline()
        if self.scope is not None:
            # Break the reference cycle through `PROOF`, to save the garbage collector the work.
            self.scope["extensions"] = {GONE: _yes}  # type: ignore[dict-item]

    def data_received(self, data: bytes) -> None:
        """Parse received data in pieces, until a request is refused."""
        at = 0
        while at < len(data) and not self._refused and not self.transport.is_closing():
            room = max(1, HEAD_BYTES_MAX - self._pending_bytes)
            piece = data[at : at + min(_PIECE_BYTES, room)]
            at += len(piece)
            self._feed(piece)
        self._watch()

    def _feed(self, piece: bytes) -> None:
        self._pending_bytes += len(piece)
        try:
            self.parser.feed_data(piece)
        except httptools.HttpParserUpgrade as upgrade:
            if self._offered:
                self._feed_without_offer(piece[upgrade.args[0] :])
                return
            # CONNECT: the request gets a plain answer, and the rest is not parsed.
            self._refused = True
            self.cycle.keep_alive = False
        except httptools.HttpParserError as failure:
            refused = failure.__context__
            if isinstance(refused, _Refused):
                self._refuse(*refused.args)
            else:
                self._refuse(400, "invalid_http", "this is not HTTP/1.1")
        else:
            if self._pending_bytes >= HEAD_BYTES_MAX:
                self._refuse(*_too_large(f"{HEAD_BYTES_MAX} bytes"))

    def _feed_without_offer(self, rest: bytes) -> None:
        """Parse a request again as it would be without its offer, as the parser takes what follows
        an offer for another protocol, bodies too."""
        head = [b"%b %b HTTP/1.1\r\n" % (self.parser.get_method(), self.url)]
        for name, value in self.headers:
            if name == b"connection":
                tokens = (token.strip() for token in value.split(b","))
                value = b", ".join(token for token in tokens if token.lower() not in _OFFER)
            if name not in _OFFER:
                head.append(b"%b: %b\r\n" % (name, value))
        self._offered, self._in_head, self._pending_bytes = False, True, 0
        self.parser = httptools.HttpRequestParser(self)
        self._feed(b"".join(head) + b"\r\n" + rest)

    # -- what the parser finds ---------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """A request begins, perhaps before the previous one was answered (pipelining)."""
        if len(self.pipeline) >= PIPELINED_MAX:
            raise _Refused(400, "pipelined", f"at most {PIPELINED_MAX} requests may wait here")
        super().on_message_begin()
        self.scope["extensions"] = {PROOF: self._prove, GONE: self._has_gone}  # type: ignore[dict-item]
        self._fields = 0
        self._pending_bytes = self._pending_bytes or 1

    def on_url(self, url: bytes) -> None:
        """A part of the URL has arrived."""
        if len(self.url) + len(url) > URL_BYTES_MAX:
            raise _Refused(414, "url_too_long", f"a URL has at most {URL_BYTES_MAX} bytes")
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header field or a trailer has arrived. Trailers are counted and then ignored."""
        self._fields += 1
        if self._fields > HEADERS_MAX:
            raise _Refused(*_too_large(f"{HEADERS_MAX} fields"))
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head is complete: the app starts, or is queued behind earlier requests."""
        self._in_head, self._pending_bytes = False, 0
        self._offered = self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"
        if self._offered:
            return  # `_feed` begins again
        self._dropped_bytes = 0
        self._table.heard(self, self.loop.time())
        super().on_headers_complete()
        if self.parser.get_http_version() == "1.0":  # it knows no chunks
            self.cycle.chunked_encoding = False
            self.cycle.expected_content_length = _UntilClose()

    def on_chunk_header(self) -> None:
        """A chunk begins, perhaps the last one."""
        self._pending_bytes = 0

    def on_body(self, body: bytes) -> None:
        """A part of the body has arrived."""
        self._pending_bytes = 0
        super().on_body(body)
        if not self._answering:
            self._dropped_bytes += len(body)
            if self._dropped_bytes > DROPPED_BYTES_MAX:
                self._leave()

    def on_message_complete(self) -> None:
        """The request is complete: the next bytes belong to another request."""
        if self._offered:
            return
        self._in_head, self._pending_bytes = True, 0
        super().on_message_complete()
        if self._leaves:
            self._leave()

    def on_response_complete(self) -> None:
        """The app has answered, perhaps before the whole request arrived."""
        super().on_response_complete()
        self._watch()

    # -- limits ------------------------------------------------------------------------------------

    def _prove(self) -> bool:
        return self._table.prove(self)

    def _has_gone(self) -> bool:
        if self.transport.is_closing():
            return True
        door = self.transport.get_extra_info("socket")
        return door is not None and ended_there(door.fileno())

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _lingers(self) -> bool:
        """Whether to read on rather than to close: the rest of a body whose request is answered."""
        cycle = self.cycle
        answered = cycle is not None and cycle.response_complete and not self._in_head
        lingers, self._leaves = answered and not self._leaves, True
        return lingers

    def _leave(self) -> None:
        """Close the connection, whatever the client still sends."""
        self._leaves = True
        self.transport.close()

    def _watch(self) -> None:
        """Set a deadline for the data that the client has to send next, unless the app waits for
        it; or the keep-alive timeout for an idle connection."""
        if self.transport.is_closing():
            return
        idle = self._in_head and not self._pending_bytes and self.cycle is not None
        if self._answering or idle:
            self._cancel_deadline()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(self._head_s, self._give_up)
        if self._answering or not idle:
            self._unset_keepalive_if_required()
        elif self.timeout_keep_alive_task is None:
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _give_up(self) -> None:
        self._deadline = None
        if self._in_head and self._pending_bytes:
            self._refuse(408, "too_slow", f"the head did not arrive in {self._head_s:g} s")
        else:
            self._leave()

    def _refuse(self, status: int, code: str, message: str) -> None:
        """Answer with this error and close the connection, after earlier requests are answered."""
        self._refused = True
        if self._answering and (self._in_head or self.cycle.response_started):
            # Of the last request: the connection closes once that and all before it are answered.
            self.cycle.keep_alive = False
            return
        if not self.pipeline:
            self.transport.write(_answer(status, code, message))
        if self.cycle is not None:
            self.cycle.disconnected = True
        self._leave()


def _yes() -> bool:
    return True


def _too_large(limit: str) -> tuple[int, str, str]:
    return 431, "head_too_large", f"a request's head and its trailers have at most {limit}"


def _answer(status: int, code: str, message: str) -> bytes:
    answer = error(status, code, message, headers={"connection": "close"})
    fields = (b"%b: %b\r\n" % field for field in answer.raw_headers)
    return b"".join((STATUS_LINE[status], *fields, b"\r\n", bytes(answer.body)))
