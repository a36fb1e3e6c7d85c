"""Clients of the conductor's REST service; they raise the errors of `errors.py`.

    with ConductorClient("http://10.0.0.9:7800", token_file=Path("/etc/tiffin/conductor")) as it:
        placed = it.schedule(Request("chat-1", "llama-3-8b", 4096, keys))
        if isinstance(placed, Rejection):
            ...                                 # 429 or 503, with placed.retry_after_s
        it.observe(RequestEvent("chat-1", "first_token", conductor=placed.conductor))

Of several conductors, a request's events go to the one that has decided it, which the decision
names; if that one is gone, no other conductor can use them, and `observe` returns without an error.

The clients retry a call without an answer, with back-off, except the event "tokens", which is not
idempotent and is retried only if no connection was made. Scheduling is idempotent by the request's
id. Rejections are answers, and are not retried. Needs the library httpx, of the extra `conductor`.
"""

from __future__ import annotations

import asyncio
import functools
import math
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, ParamSpec, Self, TypeVar, overload

import httpx
from httpx_sse import aconnect_sse, connect_sse

from tiffin.kvstore.credentials import read_token

from ..errors import ConductorError, ConductorUnavailable, InvalidRequest
from ..wire.event_batch import EVENTS_MAX
from . import calls

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence

    from ..records import RequestEvent
    from ..wire.models import EntryReply
    from .calls import EventResult, RestCall

H = TypeVar("H", httpx.Client, httpx.AsyncClient)
P = ParamSpec("P")
T = TypeVar("T")

TOKEN_FILE_VARIABLE = "TIFFIN_CONDUCTOR_TOKEN_FILE"
TIMEOUT_S = 5.0
RETRIES = 2
_PAUSE_S = 0.05  # back-off before the second attempt; twice as long before each further one
# Read timeout of the decision stream, which has a keepalive comment every 15 s.
_SILENCE_S = 60.0


class _Verb(Generic[P, T]):
    """A verb of both clients, with the signature of the function that makes its call: blocking in
    `ConductorClient`, a coroutine in `AsyncConductorClient`."""

    def __init__(self, make: Callable[P, RestCall[T]]) -> None:
        self._make = make
        self.__doc__ = make.__doc__

    @overload
    def __get__(self, client: None, owner: type) -> Self: ...

    @overload
    def __get__(self, client: ConductorClient, owner: type) -> Callable[P, T]: ...

    @overload
    def __get__(
        self, client: AsyncConductorClient, owner: type
    ) -> Callable[P, Coroutine[Any, Any, T]]: ...

    def __get__(self, client: Any, owner: type) -> Any:
        return self if client is None else functools.wraps(self._make)(client._verb(self._make))


class _Verbs(Generic[H]):
    """What both clients have: the verbs, and how they are opened. `_open` is httpx's client."""

    _open: ClassVar[Callable[..., Any]]

    schedule = _Verb(calls.schedule)
    observe = _Verb(calls.observe)
    release = _Verb(calls.release)
    next_prefills = _Verb(calls.next_prefills)
    register = _Verb(calls.register)
    heartbeat = _Verb(calls.heartbeat)
    drain = _Verb(calls.drain)
    remove = _Verb(calls.remove)
    flip = _Verb(calls.flip)
    instances = _Verb(calls.instances)
    instance = _Verb(calls.instance)
    match = _Verb(calls.match)
    hot = _Verb(calls.hot)
    decisions = _Verb(calls.decisions)
    why = _Verb(calls.why)
    plans = _Verb(calls.plans)
    drains = _Verb(calls.drains)
    drain_node = _Verb(calls.drain_node)
    undrain_node = _Verb(calls.undrain_node)
    settings = _Verb(calls.settings)
    patch = _Verb(calls.patch)
    ready = _Verb(calls.ready)

    def __init__(
        self,
        url: str,
        *,
        token_file: Path | None = None,
        tls_ca: Path | None = None,
        timeout_s: float = TIMEOUT_S,
        retries: int = RETRIES,
    ) -> None:
        self._timeout_s: float = timeout_s
        self._retries: int = retries
        options = _options(url, token_file, tls_ca)
        self._http: H = self._open(**options)
        # Calls that wait have connections of their own, as many as there are calls: others do not
        # wait for one. It opens none before the first such call.
        self._patient: H = self._open(**options, limits=_UNLIMITED)
        self._stream_timeout = httpx.Timeout(timeout_s, read=_SILENCE_S)

    def _for(self, call: RestCall[Any]) -> H:
        return self._patient if call.waits_s else self._http

    def _pause_s(
        self, call: RestCall[Any], error: httpx.TransportError, attempt: int, left_s: float
    ) -> float:
        """How long to wait before a call is sent again. Raises ConductorUnavailable if it may not
        be, or has been often enough."""
        pause_s: float = _PAUSE_S * 2**attempt
        last = self._retries + bool(call.at)
        if attempt == last or pause_s >= left_s or not _may_repeat(call, error):
            raise _unavailable(self._http.base_url, error) from error
        return pause_s


class ConductorClient(_Verbs[httpx.Client]):
    """A blocking client; for one thread at a time. Close it, or use it in a `with`.

    `token_file` (else the file that TIFFIN_CONDUCTOR_TOKEN_FILE names) contains one token, and only
    its owner may have access to it. `tls_ca`: a CA other than those that this machine trusts.
    `timeout_s` is the timeout of a call, retries included; httpx applies what is left of it to each
    connect, read and write. Raises InvalidRequest for a URL that can't work, and from every method
    ConductorUnavailable without an answer.
    """

    _open = httpx.Client

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections."""
        self._http.close()
        self._patient.close()

    def observe_many(self, events: Sequence[RequestEvent]) -> list[EventResult]:
        """Report events of several requests in as few calls as possible, each to the conductor that
        it names. Returns for each event, in their order: None if it was taken, a rejection after
        its prefill, or the error of this event. Never raises ConductorError. The call is repeated
        if no event has `tokens`: report `total_tokens`."""
        report = _BatchReport(events)
        for batch in report.batches():
            while batch.places:
                try:
                    batch.enter(self._do(batch.call()))
                except ConductorError as error:
                    batch.enter([error] * len(batch.places))
        return report.results

    def follow(self, candidates: int = 0) -> Iterator[EntryReply]:
        """Subscribe to the decisions, until the conductor stops or the iterator is closed."""
        path = calls.following(candidates)
        try:
            with connect_sse(self._http, "GET", path, timeout=self._stream_timeout) as source:
                if source.response.status_code != 200:
                    raise calls.failure(source.response.status_code, source.response.read())
                yield from filter(None, map(calls.entry_of, source.iter_sse()))
        except httpx.TransportError as error:
            raise _unavailable(self._http.base_url, error) from error

    def _verb(self, make: Callable[P, RestCall[T]]) -> Callable[P, T]:
        return lambda *args, **named: self._do(make(*args, **named))

    def _do(self, call: RestCall[T]) -> T:
        attempt, ends_at = 0, time.monotonic() + self._timeout_s + call.waits_s
        while True:
            left_s = max(ends_at - time.monotonic(), 0.001)
            try:
                request = _request_of(self._http.base_url, call, attempt)
                response = self._for(call).request(**request, timeout=left_s)
            except httpx.TransportError as error:
                if call.ends is not None and _is_void(call, error):
                    return call.ends()
                time.sleep(self._pause_s(call, error, attempt, ends_at - time.monotonic()))
                attempt += 1
            else:
                return call.answered(response.status_code, response.content, again=attempt > 0)


class AsyncConductorClient(_Verbs[httpx.AsyncClient]):
    """As `ConductorClient`, for asyncio; for one event loop, and any number of calls at a time."""

    _open = httpx.AsyncClient

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections."""
        await self._http.aclose()
        await self._patient.aclose()

    async def observe_many(self, events: Sequence[RequestEvent]) -> list[EventResult]:
        """See `ConductorClient.observe_many`."""
        report = _BatchReport(events)
        for batch in report.batches():
            while batch.places:
                try:
                    batch.enter(await self._do(batch.call()))
                except ConductorError as error:
                    batch.enter([error] * len(batch.places))
        return report.results

    async def follow(self, candidates: int = 0) -> AsyncIterator[EntryReply]:
        """Subscribe to the decisions, until the conductor stops or the iterator is closed."""
        path = calls.following(candidates)
        try:
            async with aconnect_sse(
                self._http, "GET", path, timeout=self._stream_timeout
            ) as source:
                if source.response.status_code != 200:
                    raise calls.failure(source.response.status_code, await source.response.aread())
                async for event in source.aiter_sse():
                    if (entry := calls.entry_of(event)) is not None:
                        yield entry
        except httpx.TransportError as error:
            raise _unavailable(self._http.base_url, error) from error

    def _verb(self, make: Callable[P, RestCall[T]]) -> Callable[P, Coroutine[Any, Any, T]]:
        async def verb(*args: P.args, **named: P.kwargs) -> T:
            return await self._do(make(*args, **named))

        return verb

    async def _do(self, call: RestCall[T]) -> T:
        try:
            async with asyncio.timeout(self._timeout_s + call.waits_s):
                return await self._attempts(call)
        except TimeoutError as error:
            said = f"no answer of {self._http.base_url} in {self._timeout_s + call.waits_s:g} s"
            raise ConductorUnavailable(said) from error

    async def _attempts(self, call: RestCall[T]) -> T:
        attempt = 0
        while True:
            try:
                request = _request_of(self._http.base_url, call, attempt)
                response = await self._for(call).request(**request, timeout=None)
            except httpx.TransportError as error:
                if call.ends is not None and _is_void(call, error):
                    return call.ends()
                await asyncio.sleep(self._pause_s(call, error, attempt, math.inf))
                attempt += 1
            else:
                return call.answered(response.status_code, response.content, again=attempt > 0)


class _BatchReport:
    """Events on their way to the conductors that they name, and what came of each."""

    def __init__(self, events: Sequence[RequestEvent]) -> None:
        self.events = events
        self.results: list[EventResult] = [None] * len(events)

    def batches(self) -> Iterator[_Batch]:
        """Batches for one conductor each, with the events in their order."""
        places: dict[str, list[int]] = {}
        for at, event in enumerate(self.events):
            places.setdefault(event.conductor, []).append(at)
        for conductor, some in places.items():
            for start in range(0, len(some), EVENTS_MAX):
                yield _Batch(self, conductor, some[start : start + EVENTS_MAX])


class _Batch:
    """Some events, by their `places` among all, that are still to be sent to one conductor."""

    def __init__(self, report: _BatchReport, conductor: str, places: list[int]) -> None:
        self._report, self.places = report, places
        self._conductor, self._named = conductor, bool(conductor)

    def call(self) -> RestCall[list[EventResult]]:
        events = [self._report.events[at] for at in self.places]
        return calls.observe_many(events, self._conductor, forgotten=self._named)

    def enter(self, results: list[EventResult]) -> None:
        """Take the answer. If the named conductor is gone, what is left goes to the client's own
        one, which may be the same at another address; but no cancellation: another one may have
        made a new decision for the request."""
        if not results:
            self._conductor = ""
            events = self._report.events
            self.places = [at for at in self.places if events[at].kind != "cancelled"]
            return
        for at, result in zip(self.places, results, strict=True):
            self._report.results[at] = result
        self.places = []


def _request_of(own: httpx.URL, call: RestCall[Any], attempt: int) -> dict[str, Any]:
    url = _url(own, call, attempt)
    headers = {**call.headers, **_HEADERS}
    return {"method": call.method, "url": url, "content": call.body, "headers": headers}


def _url(own: httpx.URL, call: RestCall[Any], attempt: int) -> str:
    """Where to send a call: at first to the conductor that it names, then to the client's own one.
    Our token goes with it, so not to a URL without TLS if the client's has TLS."""
    schemes = ("https://", "http://") if own.scheme == "http" else "https://"
    there = (attempt == 0 or call.only_there) and call.at.startswith(schemes)
    return call.at.rstrip("/") + call.path if there else call.path


_UNLIMITED = httpx.Limits(max_connections=None, max_keepalive_connections=20)
_NOT_CONNECTED = httpx.ConnectError | httpx.ConnectTimeout
_HEADERS = {"content-type": "application/json"}


def _options(url: str, token_file: Path | None, tls_ca: Path | None) -> dict[str, Any]:
    """The options of httpx for both clients. They ignore the environment's proxies and `.netrc`."""
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise InvalidRequest(f"{url!r} is not a URL: {error}") from error
    if parsed.scheme not in ("http", "https") or not parsed.host or parsed.userinfo:
        raise InvalidRequest("a conductor's URL is http://HOST:PORT or https://HOST:PORT")
    chosen = token_file or os.environ.get(TOKEN_FILE_VARIABLE)
    headers = {}
    if chosen:
        token = read_token(Path(chosen))
        if not token.isalnum() and b" " in token:
            raise InvalidRequest(f"{chosen} has more than a token; a client's has one, alone")
        headers["authorization"] = f"Bearer {token.decode('latin-1')}"
    secure = parsed.scheme == "https" or tls_ca is not None
    verify: Any = trusting(tls_ca) if secure else True
    return {
        "base_url": parsed, "headers": headers, "verify": verify, "trust_env": False,
        "follow_redirects": False,
    }  # fmt: skip


def trusting(tls_ca: Path | None) -> ssl.SSLContext:
    """A TLS context that trusts this CA alone, or the CAs that this machine trusts (and not the
    list that httpx comes with). Raises InvalidRequest."""
    import ssl

    try:
        return ssl.create_default_context(cafile=tls_ca)
    except OSError as error:
        raise InvalidRequest(f"can't load the CA {tls_ca}: {error}") from error


def _may_repeat(call: RestCall[Any], error: httpx.TransportError) -> bool:
    """Whether to retry a call: if it may be sent twice, or was not sent at all because no
    connection was made."""
    return call.repeatable or isinstance(error, _NOT_CONNECTED)


def _is_void(call: RestCall[Any], error: httpx.TransportError) -> bool:
    """Whether the only conductor that a call is for is gone, and with it what the call would
    end."""
    return bool(call.at) and call.only_there and isinstance(error, _NOT_CONNECTED)


def _unavailable(url: object, error: httpx.TransportError) -> ConductorUnavailable:
    why = str(error) or type(error).__name__
    hint = next((hint for sign, hint in _HINTS.items() if sign in why), "")
    return ConductorUnavailable(f"no answer of {url}: {why}{hint}")


# Parts of error messages of OpenSSL and HTTP, and the wrong setting that may be the cause.
_HINTS = {
    "get local issuer certificate": "; a CA of your own is trusted where tls_ca names it",
    "self-signed certificate": "; a CA of your own is trusted where tls_ca names it",
    "WRONG_VERSION_NUMBER": "; it may not serve https but http",
    "disconnected without sending": "; it may not serve http but https",
}
