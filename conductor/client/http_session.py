"""The HTTP client behind `AsyncConductorClient` and the gateway's calls to engines: aiohttp, with
errors that say what became of a request.

Answers are passed on as they come, without decompression or decoding. Cancelling a call, or closing
an answer before its end, closes the connection, so that the server stops to work on it; after a
whole answer the connection is used again. The choice of the library: docs/decisions/http.md.
"""

from __future__ import annotations

import os
from contextvars import ContextVar
from functools import lru_cache
from io import BytesIO
from typing import TYPE_CHECKING, Any

import aiohttp
from yarl import URL

from ..errors import InvalidRequest

if TYPE_CHECKING:
    import ssl
    from collections.abc import Mapping
    from pathlib import Path

# vLLM closes connections that were idle for 5 s; a connection that closes just as a request is sent
# on it looks like a server that is gone.
_IDLE_CONNECTION_S = 4.0
# URLs repeat: a few paths of each server. Parsing one takes as long as a quarter of a call.
_URLS_MAX = 1024
# Longer bodies are sent in parts: aiohttp writes bytes at once, and warns from here on that the
# event loop stands still meanwhile.
_AT_ONCE_BYTES_MAX = 1 << 20


class HttpFailure(Exception):
    """A request got no answer, or not all of it."""


class NotConnected(HttpFailure):
    """No connection was made, so nothing was sent. `late`: the timeout for it passed."""

    def __init__(self, why: str, *, late: bool = False) -> None:
        super().__init__(why)
        self.late = late


class Broken(HttpFailure):
    """The connection broke, or what came is no HTTP. `reused`: it had been idle before this
    request, so the server may have hung up just as the request was sent, and not have read it."""

    def __init__(self, why: str, *, reused: bool = False) -> None:
        super().__init__(why)
        self.reused = reused


class Silent(HttpFailure):
    """Nothing came for as long as the caller allows."""


class TooLarge(HttpFailure):
    """An answer is larger than the caller takes."""


# Whether the request of this context has opened a connection.
_opened: ContextVar[bool] = ContextVar("opened", default=False)


class _Connector(aiohttp.TCPConnector):
    """Opens connections, without a limit: whoever sends requests limits them. A queue in here would
    show up in no metric."""

    async def _create_connection(self, *arguments: Any, **named: Any) -> Any:
        _opened.set(True)
        return await super()._create_connection(*arguments, **named)


class HttpAnswer:
    """An answer whose head has come. The caller closes it."""

    __slots__ = ("_answer", "headers", "status")

    def __init__(self, answer: aiohttp.ClientResponse) -> None:
        self._answer = answer
        self.status, self.headers = answer.status, answer.headers

    async def piece(self) -> bytes:
        """The next bytes of the body, as many as have come; b"" at its end. Raises HttpFailure."""
        try:
            return await self._answer.content.readany()
        except _FAILURES as error:
            raise _failure(error) from error

    async def read(self, nbytes_max: int) -> bytes:
        """The whole body. Raises HttpFailure."""
        pieces: list[bytes] = []
        nbytes = 0
        while piece := await self.piece():
            nbytes += len(piece)
            if nbytes > nbytes_max:
                raise TooLarge(f"its answer is longer than {nbytes_max} bytes")
            pieces.append(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def close(self) -> None:
        """Close the connection, unless the answer was read to its end. Who waits for a piece gets
        Broken."""
        self._answer.close()


class HttpSession:
    """Sends requests; for one event loop, and any number of requests at a time.

    `headers` go with all of them. `tls` is for https. `connect_s` is the timeout for a connection
    (None: the caller has one).
    """

    def __init__(
        self,
        headers: Mapping[str, str],
        tls: ssl.SSLContext | None = None,
        connect_s: float | None = None,
    ) -> None:
        self._headers, self._tls, self._connect_s = headers, tls, connect_s
        self._opened: aiohttp.ClientSession | None = None  # which needs a running event loop
        self._closed = False

    async def close(self) -> None:
        """Close all connections. The session can't be used after it."""
        self._closed = True
        if self._opened is not None:
            await self._opened.close()

    async def send(
        self,
        method: str,
        url: str,
        body: bytes | None,
        headers: Mapping[str, str],
        silence_s: float | None = None,
    ) -> HttpAnswer:
        """Send a request; returns once the head of the answer has come. `silence_s`: for how long
        nothing may come (None: for ever). Redirects are not followed. Raises HttpFailure, and
        InvalidRequest for a URL that is none."""
        timeout = _timeout(self._connect_s, silence_s)
        _opened.set(False)
        try:
            answer = await self._session().request(
                method, _parsed(url), data=_parts(body), headers=headers, timeout=timeout,
                allow_redirects=False,
            )  # fmt: skip
        except _FAILURES as error:
            raise _failure(error, reused=not _opened.get()) from error
        return HttpAnswer(answer)

    def _session(self) -> aiohttp.ClientSession:
        if self._closed:
            raise NotConnected("the client is closed")
        if self._opened is None:
            self._opened = aiohttp.ClientSession(
                connector=_Connector(
                    limit=0,
                    keepalive_timeout=_IDLE_CONNECTION_S,
                    ssl=True if self._tls is None else self._tls,
                ),
                headers=self._headers,
                auto_decompress=False,
                cookie_jar=aiohttp.DummyCookieJar(),
                skip_auto_headers=("User-Agent", "Accept-Encoding"),
            )
            # It would send a GET or PUT once more by itself; who calls has rules for that. aiohttp
            # has no option for it, and its own test client sets this, too.
            self._opened._retry_connection = False
        return self._opened


def trusting(tls_ca: Path | None) -> ssl.SSLContext:
    """A TLS context that trusts this CA alone, or the CAs that this machine trusts. Raises
    InvalidRequest."""
    import ssl

    try:
        return ssl.create_default_context(cafile=tls_ca)
    except OSError as error:
        raise InvalidRequest(f"can't load the CA {tls_ca}: {error}") from error


@lru_cache(maxsize=_URLS_MAX)
def _parsed(url: str) -> URL:
    try:
        parsed = URL(url)
    except ValueError as error:
        raise InvalidRequest(f"{url!r} is not a URL: {error}") from error
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise InvalidRequest(f"{url!r} is not http://HOST:PORT or https://HOST:PORT")
    return parsed


@lru_cache(maxsize=64)
def _timeout(connect_s: float | None, silence_s: float | None) -> aiohttp.ClientTimeout:
    return aiohttp.ClientTimeout(total=None, connect=connect_s, sock_read=silence_s)


_FAILURES = (aiohttp.ClientError, OSError)


def _failure(error: Exception, *, reused: bool = False) -> HttpFailure:
    """An error of aiohttp as ours."""
    why = str(error) or type(error).__name__
    if isinstance(error, aiohttp.ConnectionTimeoutError):
        return NotConnected(why, late=True)
    if isinstance(error, aiohttp.ClientConnectorError):
        return NotConnected(_in_words(error))
    if isinstance(error, aiohttp.ServerTimeoutError):
        return Silent(why)
    return Broken(why, reused=reused)


def _in_words(error: aiohttp.ClientConnectorError) -> str:
    """Why there is no connection; aiohttp's own text tells its TLS settings (`ssl:default`)."""
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return f"its certificate is refused: {error.certificate_error}"
    cause = error.os_error
    # One attempt's error names errno and address; that of several addresses lists them.
    why = os.strerror(cause.errno) if cause.errno and cause.errno > 0 else str(cause)
    return f"no connection to {error.host}:{error.port}: {why}"


def _parts(body: bytes | None) -> bytes | BytesIO | None:
    return body if body is None or len(body) <= _AT_ONCE_BYTES_MAX else BytesIO(body)
