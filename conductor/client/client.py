"""Clients of the conductor's REST service: a method per call; they raise the errors of `errors.py`.

    with ConductorClient("http://10.0.0.9:7800", token_file=Path("/etc/tiffin/conductor")) as it:
        placed = it.schedule(Request("chat-1", "llama-3-8b", 4096, keys))
        if isinstance(placed, Rejection):
            ...                                 # 429 or 503, with placed.retry_after_s
        it.observe(RequestEvent("chat-1", "first_token", conductor=placed.conductor))

Of several conductors, a request's events go to the one that has decided it, which the decision
names; if that one is gone, they are of use to no other one, and `observe` returns all the same.

The clients retry a call without an answer, with back-off, except the event "tokens", which is not
idempotent and is retried only if no connection was made. Scheduling is idempotent by the request's
id. Rejections are answers, and are not retried. Needs the library httpx, of the extra `conductor`.
"""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import httpx

from tiffin.kvstore.credentials import read_token

from ..errors import ConductorUnavailable, InvalidRequest
from . import calls

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator, Iterator, Sequence

    from tiffin.kvstore import KVSchema

    from ..records import InstanceSpec, Load, Rejection, Request, RequestEvent, Role
    from ..wire.models import (
        DecisionReply,
        DrainReply,
        EntryReply,
        HealthReply,
        HotPrefixReply,
        InstanceReply,
        MatchReply,
        PlansReply,
    )
    from .calls import RestCall

T = TypeVar("T")

TOKEN_FILE_VARIABLE = "TIFFIN_CONDUCTOR_TOKEN_FILE"
TIMEOUT_S = 5.0
RETRIES = 2
_PAUSE_S = 0.05  # back-off before the second attempt; twice as long before each further one
# Read timeout of the decision stream, which has a keepalive comment every 15 s.
_SILENCE_S = 60.0


class ConductorClient:
    """A blocking client; for one thread at a time. Close it, or use it in a `with`.

    `token_file` (else the file that TIFFIN_CONDUCTOR_TOKEN_FILE names) contains one token, and only
    its owner may have access to it. `tls_ca`: a CA other than those that this machine trusts.
    `timeout_s` is the timeout of a call, retries included; httpx applies what is left of it to each
    connect, read and write. Raises InvalidRequest for a URL that can't work, and from every method
    ConductorUnavailable without an answer.
    """

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
        self._http = httpx.Client(**_options(url, token_file, tls_ca))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections."""
        self._http.close()

    def schedule(
        self, request: Request, *, token_ids: Sequence[int] | None = None, namespace: str = ""
    ) -> DecisionReply | Rejection:
        """Place a request: a decision, or a rejection with its reason. With `token_ids` the client
        does not send the keys and the length in `request`, and the conductor computes them."""
        return self._do(calls.schedule(request, token_ids, namespace))

    def observe(self, event: RequestEvent) -> Rejection | None:
        """Report an event of an in-flight request. Returns a rejection if the conductor rejects the
        request after its prefill, as admission in the mode "baseline" does. Raises UnknownRequest,
        but not for an event that names its conductor."""
        return self._do(calls.observe(event))

    def register(
        self, spec: InstanceSpec, load: Load | None = None, schema: KVSchema | None = None
    ) -> None:
        """Register an instance, or repeat its registration, best with every heartbeat. With
        `schema`, clients can send prompts of its model as token ids."""
        self._do(calls.register(spec, load, schema))

    def heartbeat(self, instance: str, load: Load) -> None:
        """Report that an instance is alive, and its load. Raises UnknownInstance: then register."""
        self._do(calls.heartbeat(instance, load))

    def drain(self, instance: str) -> None:
        """Drain an instance: it gets no new work."""
        self._do(calls.leave(instance, now=False))

    def remove(self, instance: str) -> None:
        """Remove an instance at once."""
        self._do(calls.leave(instance, now=True))

    def flip(self, instance: str, role: Role) -> None:
        """Start to change an instance's role. Raises UnknownInstance, Conflict."""
        self._do(calls.flip(instance, role))

    def instances(self) -> list[InstanceReply]:
        """All registered instances."""
        return self._do(calls.instances())

    def instance(self, name: str) -> InstanceReply:
        """One registered instance. Raises UnknownInstance."""
        return self._do(calls.instance(name))

    def match(self, keys: Sequence[bytes], *, limit: int = 100) -> MatchReply:
        """The holders of a prefix, and how many of its blocks each has; at most `limit` holders."""
        return self._do(calls.match(keys, limit))

    def hot(self, limit: int = 100) -> list[HotPrefixReply]:
        """The most popular prefixes."""
        return self._do(calls.hot(limit))

    def decisions(
        self, limit: int = 100, *, candidates: int = 0, instance: str | None = None
    ) -> list[EntryReply]:
        """The latest entries of the decision log."""
        return self._do(calls.decisions(limit, candidates, instance))

    def why(self, request_id: str, *, tenant: str = "") -> EntryReply:
        """The decision about a request, with all candidates and every term of their costs; without
        a tenant, about the latest request with this id. Raises UnknownRequest."""
        return self._do(calls.why(request_id, tenant))

    def plans(self) -> PlansReply:
        """The conductor's fleet plans with their reasons, and whether this conductor leads."""
        return self._do(calls.plans())

    def drains(self) -> list[DrainReply]:
        """The drains of nodes and instances, in progress and ended."""
        return self._do(calls.drains())

    def drain_node(self, node: str, deadline_s: float | None = None) -> DrainReply:
        """Drain a kvstore node; `drains` shows the progress. Raises UnknownNode, and Conflict
        while an order to take new blocks again is on its way to the node."""
        return self._do(calls.drain_node(node, deadline_s))

    def undrain_node(self, node: str) -> DrainReply:
        """Let a node take new blocks again. Raises UnknownNode."""
        return self._do(calls.undrain_node(node))

    def settings(self) -> dict[str, Any]:
        """All settings."""
        return self._do(calls.settings())

    def patch(self, changes: dict[str, Any]) -> dict[str, Any]:
        """Change some settings, and return all. Raises InvalidRequest; then none has changed."""
        return self._do(calls.patch(changes))

    def ready(self) -> HealthReply:
        """Whether the conductor is ready to schedule requests, and if not, why."""
        return self._do(calls.ready())

    def follow(self, candidates: int = 0) -> Iterator[EntryReply]:
        """Subscribe to the decisions, until the conductor stops or the iterator is closed."""
        lines = calls.EventLines()
        timeout = httpx.Timeout(self._timeout_s, read=_SILENCE_S)
        try:
            path = calls.following(candidates)
            with self._http.stream("GET", path, timeout=timeout) as response:
                if response.status_code != 200:
                    raise calls.failure(response.status_code, response.read())
                for line in response.iter_lines():
                    entry = lines.read(line)
                    if entry is not None:
                        yield entry
        except httpx.TransportError as error:
            raise _unavailable(self._http.base_url, error) from error

    def _do(self, call: RestCall[T]) -> T:
        ends_at = time.monotonic() + self._timeout_s
        last = self._retries + bool(call.at)
        for attempt in range(last + 1):
            left_s = max(ends_at - time.monotonic(), 0.001)
            url = _url(self._http.base_url, call, attempt)
            try:
                response = self._http.request(
                    call.method, url, content=call.body, headers=_HEADERS, timeout=left_s
                )
            except httpx.TransportError as error:
                if call.ends is not None and _is_void(call, error):
                    return call.ends()
                pause_s = _PAUSE_S * 2**attempt
                late = time.monotonic() + pause_s >= ends_at
                if late or attempt == last or not _may_repeat(call, error):
                    raise _unavailable(self._http.base_url, error) from error
                time.sleep(pause_s)
            else:
                return call.answered(response.status_code, response.content, again=attempt > 0)
        raise AssertionError("the last attempt returns or raises")


class AsyncConductorClient:
    """As `ConductorClient`, for asyncio; for one event loop, and any number of calls at a time."""

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
        self._http = httpx.AsyncClient(**_options(url, token_file, tls_ca))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def schedule(
        self, request: Request, *, token_ids: Sequence[int] | None = None, namespace: str = ""
    ) -> DecisionReply | Rejection:
        """Place a request: a decision, or a rejection with its reason. With `token_ids` the client
        does not send the keys and the length in `request`, and the conductor computes them."""
        return await self._do(calls.schedule(request, token_ids, namespace))

    async def observe(self, event: RequestEvent) -> Rejection | None:
        """Report an event of an in-flight request. Returns a rejection if the conductor rejects the
        request after its prefill, as admission in the mode "baseline" does. Raises UnknownRequest,
        but not for an event that names its conductor."""
        return await self._do(calls.observe(event))

    async def register(
        self, spec: InstanceSpec, load: Load | None = None, schema: KVSchema | None = None
    ) -> None:
        """Register an instance, or repeat its registration, best with every heartbeat. With
        `schema`, clients can send prompts of its model as token ids."""
        await self._do(calls.register(spec, load, schema))

    async def heartbeat(self, instance: str, load: Load) -> None:
        """Report that an instance is alive, and its load. Raises UnknownInstance: then register."""
        await self._do(calls.heartbeat(instance, load))

    async def drain(self, instance: str) -> None:
        """Drain an instance: it gets no new work."""
        await self._do(calls.leave(instance, now=False))

    async def remove(self, instance: str) -> None:
        """Remove an instance at once."""
        await self._do(calls.leave(instance, now=True))

    async def flip(self, instance: str, role: Role) -> None:
        """Start to change an instance's role. Raises UnknownInstance, Conflict."""
        await self._do(calls.flip(instance, role))

    async def instances(self) -> list[InstanceReply]:
        """All registered instances."""
        return await self._do(calls.instances())

    async def instance(self, name: str) -> InstanceReply:
        """One registered instance. Raises UnknownInstance."""
        return await self._do(calls.instance(name))

    async def match(self, keys: Sequence[bytes], *, limit: int = 100) -> MatchReply:
        """The holders of a prefix, and how many of its blocks each has; at most `limit` holders."""
        return await self._do(calls.match(keys, limit))

    async def hot(self, limit: int = 100) -> list[HotPrefixReply]:
        """The most popular prefixes."""
        return await self._do(calls.hot(limit))

    async def decisions(
        self, limit: int = 100, *, candidates: int = 0, instance: str | None = None
    ) -> list[EntryReply]:
        """The latest entries of the decision log."""
        return await self._do(calls.decisions(limit, candidates, instance))

    async def why(self, request_id: str, *, tenant: str = "") -> EntryReply:
        """The decision about a request, with all candidates and every term of their costs; without
        a tenant, about the latest request with this id. Raises UnknownRequest."""
        return await self._do(calls.why(request_id, tenant))

    async def plans(self) -> PlansReply:
        """The conductor's fleet plans with their reasons, and whether this conductor leads."""
        return await self._do(calls.plans())

    async def drains(self) -> list[DrainReply]:
        """The drains of nodes and instances, in progress and ended."""
        return await self._do(calls.drains())

    async def drain_node(self, node: str, deadline_s: float | None = None) -> DrainReply:
        """Drain a kvstore node; `drains` shows the progress. Raises UnknownNode, and Conflict
        while an order to take new blocks again is on its way to the node."""
        return await self._do(calls.drain_node(node, deadline_s))

    async def undrain_node(self, node: str) -> DrainReply:
        """Let a node take new blocks again. Raises UnknownNode."""
        return await self._do(calls.undrain_node(node))

    async def settings(self) -> dict[str, Any]:
        """All settings."""
        return await self._do(calls.settings())

    async def patch(self, changes: dict[str, Any]) -> dict[str, Any]:
        """Change some settings, and return all. Raises InvalidRequest; then none has changed."""
        return await self._do(calls.patch(changes))

    async def ready(self) -> HealthReply:
        """Whether the conductor is ready to schedule requests, and if not, why."""
        return await self._do(calls.ready())

    async def follow(self, candidates: int = 0) -> AsyncIterator[EntryReply]:
        """Subscribe to the decisions, until the conductor stops or the iterator is closed."""
        lines = calls.EventLines()
        timeout = httpx.Timeout(self._timeout_s, read=_SILENCE_S)
        try:
            path = calls.following(candidates)
            async with self._http.stream("GET", path, timeout=timeout) as response:
                if response.status_code != 200:
                    raise calls.failure(response.status_code, await response.aread())
                async for line in response.aiter_lines():
                    entry = lines.read(line)
                    if entry is not None:
                        yield entry
        except httpx.TransportError as error:
            raise _unavailable(self._http.base_url, error) from error

    async def _do(self, call: RestCall[T]) -> T:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._attempts(call)
        except TimeoutError as error:
            raise ConductorUnavailable(
                f"no answer of {self._http.base_url} in {self._timeout_s:g} s"
            ) from error

    async def _attempts(self, call: RestCall[T]) -> T:
        last = self._retries + bool(call.at)
        for attempt in range(last + 1):
            url = _url(self._http.base_url, call, attempt)
            try:
                response = await self._http.request(
                    call.method, url, content=call.body, headers=_HEADERS, timeout=None
                )
            except httpx.TransportError as error:
                if call.ends is not None and _is_void(call, error):
                    return call.ends()
                if attempt == last or not _may_repeat(call, error):
                    raise _unavailable(self._http.base_url, error) from error
                await asyncio.sleep(_PAUSE_S * 2**attempt)
            else:
                return call.answered(response.status_code, response.content, again=attempt > 0)
        raise AssertionError("the last attempt returns or raises")


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


def _url(own: httpx.URL, call: RestCall[Any], attempt: int) -> str:
    """Where to send a call: at first to the conductor that it names, then to the client's own one.
    Our token goes with it, so not to a URL without TLS if the client's has TLS."""
    schemes = ("https://", "http://") if own.scheme == "http" else ("https://",)
    there = (attempt == 0 or call.only_there) and call.at.startswith(schemes)
    return call.at.rstrip("/") + call.path if there else call.path


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
