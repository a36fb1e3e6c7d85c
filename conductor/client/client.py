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
id. Rejections are answers, and are not retried. Needs the libraries of the extra `conductor`: httpx
for the blocking client, aiohttp for the other one (docs/decisions/http.md).
"""

from __future__ import annotations

import asyncio
import functools
import math
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, Self, TypeVar, overload
from urllib.parse import urlsplit

import httpx
from httpx_sse import aconnect_sse, connect_sse

from tiffin.kvstore.credentials import read_token

from ..errors import ConductorError, ConductorLate, ConductorUnavailable, InvalidRequest
from ..wire.event_batch import EVENTS_MAX
from . import calls
from .http_session import HttpFailure, HttpSession, NotConnected, trusting
from .schedule_batches import ScheduleBatches

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence

    from tiffin.kvstore.format.media import Media

    from ..records import Rejection, Request, RequestEvent
    from ..wire.models import DecisionReply, EntryReply
    from .calls import EventResult, RestCall

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


class _Verbs:
    """What both clients have: the verbs, and the rules for retries."""

    schedule = _Verb(calls.schedule)
    observe = _Verb(calls.observe)
    release = _Verb(calls.release)
    releases = _Verb(calls.releases)
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
    add_engine = _Verb(calls.add_engine)
    engines = _Verb(calls.engines)
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
        self._timeout_s, self._retries = timeout_s, retries
        self._url, self._headers = _checked(url), _authorization(token_file)
        self._tls: ssl.SSLContext | None = None
        if self._url.startswith("https:") or tls_ca is not None:
            self._tls = trusting(tls_ca)
        self._open()

    def _open(self) -> None:
        """Make what sends requests."""
        raise NotImplementedError

    def _httpx(self) -> dict[str, Any]:
        """The options of httpx. It ignores the environment's proxies and `.netrc`."""
        return {
            "base_url": self._url, "headers": self._headers, "trust_env": False,
            "verify": True if self._tls is None else self._tls, "follow_redirects": False,
        }  # fmt: skip

    def _pause_s(self, call: RestCall[Any], error: Exception, attempt: int, left_s: float) -> float:
        """How long to wait before a call is sent again. Raises ConductorUnavailable if it may not
        be, or has been often enough."""
        pause_s: float = _PAUSE_S * 2**attempt
        last = self._retries + bool(call.at)
        if attempt == last or pause_s >= left_s or not _may_repeat(call, error):
            raise _unavailable(self._url, error) from error
        return pause_s


class ConductorClient(_Verbs):
    """A blocking client; for one thread at a time. Close it, or use it in a `with`.

    `token_file` (else the file that TIFFIN_CONDUCTOR_TOKEN_FILE names) contains one token, and only
    its owner may have access to it. `tls_ca`: a CA other than those that this machine trusts.
    `timeout_s` is the timeout of a call, retries included; httpx applies what is left of it to each
    connect, read and write. Raises InvalidRequest for a URL that can't work, and from every method
    ConductorUnavailable without an answer.
    """

    def _open(self) -> None:
        self._http = httpx.Client(**self._httpx())
        # Calls that wait have connections of their own, as many as there are calls: others do not
        # wait for one. It opens none before the first such call.
        self._patient = httpx.Client(**self._httpx(), limits=_UNLIMITED)

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
            timeout = httpx.Timeout(self._timeout_s, read=_SILENCE_S)
            with connect_sse(self._http, "GET", path, timeout=timeout) as source:
                if source.response.status_code != 200:
                    raise calls.failure(source.response.status_code, source.response.read())
                yield from filter(None, map(calls.entry_of, source.iter_sse()))
        except httpx.TransportError as error:
            raise _unavailable(self._url, error) from error

    def _verb(self, make: Callable[P, RestCall[T]]) -> Callable[P, T]:
        return lambda *args, **named: self._do(make(*args, **named))

    def _do(self, call: RestCall[T]) -> T:
        attempt, ends_at = 0, time.monotonic() + self._timeout_s + call.waits_s
        while True:
            left_s = max(ends_at - time.monotonic(), 0.001)
            try:
                response = (self._patient if call.waits_s else self._http).request(
                    call.method,
                    _url(self._url, call, attempt),
                    content=call.body,
                    headers=_HEADERS,
                    timeout=left_s,
                )
            except httpx.TransportError as error:
                if call.ends is not None and _is_void(call, error):
                    return call.ends()
                time.sleep(self._pause_s(call, error, attempt, ends_at - time.monotonic()))
                attempt += 1
            else:
                return call.answered(response.status_code, response.content, again=attempt > 0)


class AsyncConductorClient(_Verbs):
    """As `ConductorClient`, for asyncio; for one event loop, and any number of calls at a time."""

    def _open(self) -> None:
        self._http = HttpSession(self._headers, self._tls)
        self._schedules = ScheduleBatches(self._do)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections."""
        await self._http.close()

    async def schedule(
        self,
        request: Request,
        *,
        token_ids: Sequence[int] | None = None,
        namespace: str = "",
        cache_salt: str = "",
        media: Sequence[Media] = (),
        waiter: str = "",
        trace: Mapping[str, str] | None = None,
    ) -> DecisionReply | Rejection:
        """See `calls.schedule`. Those that are under way at the same time go as one call."""
        prompt = calls.prompt(
            request,
            token_ids=token_ids,
            namespace=namespace,
            cache_salt=cache_salt,
            media=media,
            waiter=waiter,
            trace=trace,
        )
        return await self._schedules.place(prompt)

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
            # By httpx, for which there is a reader of events: one stream, a few events a second.
            timeout = httpx.Timeout(self._timeout_s, read=_SILENCE_S)
            async with (
                httpx.AsyncClient(**self._httpx(), timeout=timeout) as http,
                aconnect_sse(http, "GET", path) as source,
            ):
                if source.response.status_code != 200:
                    raise calls.failure(source.response.status_code, await source.response.aread())
                async for event in source.aiter_sse():
                    if (entry := calls.entry_of(event)) is not None:
                        yield entry
        except httpx.TransportError as error:
            raise _unavailable(self._url, error) from error

    def _verb(self, make: Callable[P, RestCall[T]]) -> Callable[P, Coroutine[Any, Any, T]]:
        async def verb(*args: P.args, **named: P.kwargs) -> T:
            return await self._do(make(*args, **named))

        return verb

    async def _do(self, call: RestCall[T]) -> T:
        try:
            async with asyncio.timeout(self._timeout_s + call.waits_s):
                return await self._attempts(call)
        except TimeoutError as error:
            said = f"no answer of {self._url} in {self._timeout_s + call.waits_s:g} s"
            raise ConductorLate(said) from error

    async def _attempts(self, call: RestCall[T]) -> T:
        attempt = 0
        while True:
            try:
                url = _url(self._url, call, attempt)
                answer = await self._http.send(call.method, url, call.body, _HEADERS)
                try:
                    body = await answer.read(_ANSWER_BYTES_MAX)
                finally:
                    answer.close()
            except HttpFailure as error:
                if call.ends is not None and _is_void(call, error):
                    return call.ends()
                await asyncio.sleep(self._pause_s(call, error, attempt, math.inf))
                attempt += 1
            else:
                return call.answered(answer.status, body, again=attempt > 0)


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


def _url(own: str, call: RestCall[Any], attempt: int) -> str:
    """Where to send a call: at first to the conductor that it names, then to the client's own one.
    Our token goes with it, so not to a URL without TLS if the client's has TLS."""
    schemes = ("https://", "http://") if own.startswith("http:") else "https://"
    there = (attempt == 0 or call.only_there) and call.at.startswith(schemes)
    return (call.at.rstrip("/") if there else own) + call.path


_UNLIMITED = httpx.Limits(max_connections=None, max_keepalive_connections=20)
_NOT_CONNECTED = httpx.ConnectError | httpx.ConnectTimeout | NotConnected
_LATE = httpx.ReadTimeout | httpx.WriteTimeout
_HEADERS = {"content-type": "application/json"}
# The longest answer is the instances' list: a thousand of them with labels are a megabyte.
_ANSWER_BYTES_MAX = 64 << 20


def _checked(url: str) -> str:
    """A conductor's URL without a slash at its end. Raises InvalidRequest."""
    try:
        parsed = urlsplit(url)
        usable = bool(parsed.hostname) and parsed.port != 0 and "@" not in parsed.netloc
    except ValueError as error:
        raise InvalidRequest(f"{url!r} is not a URL: {error}") from error
    if parsed.scheme not in ("http", "https") or not usable or not url.isprintable():
        raise InvalidRequest("a conductor's URL is http://HOST:PORT or https://HOST:PORT")
    return url.rstrip("/")


def _authorization(token_file: Path | None) -> dict[str, str]:
    """The header that every call has. Raises InvalidRequest for a file with more than a token."""
    chosen = token_file or os.environ.get(TOKEN_FILE_VARIABLE)
    if not chosen:
        return {}
    token = read_token(Path(chosen))
    if not token.isalnum() and b" " in token:
        raise InvalidRequest(f"{chosen} has more than a token; a client's has one, alone")
    return {"authorization": f"Bearer {token.decode('latin-1')}"}


def _may_repeat(call: RestCall[Any], error: Exception) -> bool:
    """Whether to retry a call: if it may be sent twice, or was not sent at all because no
    connection was made."""
    return call.repeatable or isinstance(error, _NOT_CONNECTED)


def _is_void(call: RestCall[Any], error: Exception) -> bool:
    """Whether the only conductor that a call is for is gone, and with it what the call would
    end."""
    return bool(call.at) and call.only_there and isinstance(error, _NOT_CONNECTED)


def _unavailable(url: str, error: Exception) -> ConductorUnavailable:
    why = str(error) or type(error).__name__
    hint = next((hint for sign, hint in _HINTS.items() if sign in why), "")
    kind = ConductorLate if isinstance(error, _LATE) else ConductorUnavailable
    return kind(f"no answer of {url}: {why}{hint}")


# Parts of error messages of OpenSSL and HTTP, and the wrong setting that may be the cause.
_HINTS = {
    "get local issuer certificate": "; a CA of your own is trusted where tls_ca names it",
    "self-signed certificate": "; a CA of your own is trusted where tls_ca names it",
    "WRONG_VERSION_NUMBER": "; it may not serve https but http",
    "erver disconnected": "; it may not serve http but https",
}
