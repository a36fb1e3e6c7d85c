"""Clients of the REST service: the conductor's verbs, with the errors of `errors.py`.

    with ConductorClient("http://10.0.0.9:7800", token_file=Path("/etc/tiffin/conductor")) as it:
        placed = it.schedule(Request("chat-1", "llama-3-8b", 4096, keys))
        if isinstance(placed, Rejection):
            ...                                 # 429 or 503, with placed.retry_after_s
        it.observe(RequestEvent("chat-1", "first_token"))

A call that was not answered is sent again where twice is as good as once, which is all but the
event "tokens": scheduling is idempotent by the request's id. Rejections are answers, and are not
repeated. Needs the library httpx, of the extra `conductor`.
"""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import httpx

from tiffin.kvstore.credentials import read_token

from . import calls
from .errors import ConductorUnavailable, InvalidRequest

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator, Iterator, Sequence

    from tiffin.kvstore import KVSchema

    from .api.models import (
        DecisionReply,
        DrainReply,
        EntryReply,
        HealthReply,
        HotPrefixReply,
        InstanceReply,
        MatchReply,
        PlansReply,
    )
    from .calls import Call
    from .records import InstanceSpec, Load, Rejection, Request, RequestEvent, Role

T = TypeVar("T")

TOKEN_FILE_VARIABLE = "TIFFIN_CONDUCTOR_TOKEN_FILE"
TIMEOUT_S = 5.0
RETRIES = 2
_PAUSE_S = 0.05  # before the second attempt; twice as long before each further one
# Between two events of the stream comes a comment every 15 s.
_SILENCE_S = 60.0


class ConductorClient:
    """Blocking; for one thread at a time. Close it, or use it in a `with`.

    `token_file` (else what TIFFIN_CONDUCTOR_TOKEN_FILE names) has one token, for its owner alone to
    read. `tls_ca`: a CA other than those that this machine trusts. `timeout_s` is for a whole call,
    repetitions included. Raises InvalidRequest for a URL that can't work, and from every verb
    ConductorUnavailable when no answer came.
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
        """End all connections."""
        self._http.close()

    def schedule(
        self, request: Request, *, token_ids: Sequence[int] | None = None, namespace: str = ""
    ) -> DecisionReply | Rejection:
        """Where the request runs, or why not now. With `token_ids`, the keys and the length in
        `request` are left out, and the conductor makes them."""
        return self._do(calls.schedule(request, token_ids, namespace))

    def observe(self, event: RequestEvent) -> Rejection | None:
        """What became of a request. A rejection, if it was refused after its prefill, as admission
        in the mode "baseline" does. Raises UnknownRequest."""
        return self._do(calls.observe(event))

    def register(
        self, spec: InstanceSpec, load: Load | None = None, schema: KVSchema | None = None
    ) -> None:
        """Register an instance, or say again what it is: best with every heartbeat. With `schema`
        prompts of its model can be sent as token ids."""
        self._do(calls.register(spec, load, schema))

    def heartbeat(self, instance: str, load: Load) -> None:
        """It is still there. Raises UnknownInstance: then register."""
        self._do(calls.heartbeat(instance, load))

    def drain(self, instance: str) -> None:
        """No new work for it."""
        self._do(calls.leave(instance, now=False))

    def remove(self, instance: str) -> None:
        """Forget it at once."""
        self._do(calls.leave(instance, now=True))

    def flip(self, instance: str, role: Role) -> None:
        """Change what it does."""
        self._do(calls.flip(instance, role))

    def instances(self) -> list[InstanceReply]:
        """All of them."""
        return self._do(calls.instances())

    def instance(self, name: str) -> InstanceReply:
        """One of them. Raises UnknownInstance."""
        return self._do(calls.instance(name))

    def match(self, keys: Sequence[bytes], *, limit: int = 100) -> MatchReply:
        """Who holds how much of a prefix."""
        return self._do(calls.match(keys, limit))

    def hot(self, limit: int = 100) -> list[HotPrefixReply]:
        """The most popular prefixes."""
        return self._do(calls.hot(limit))

    def decisions(
        self, limit: int = 100, *, candidates: int = 0, instance: str | None = None
    ) -> list[EntryReply]:
        """The latest of the log."""
        return self._do(calls.decisions(limit, candidates, instance))

    def why(self, request_id: str) -> EntryReply:
        """All candidates with every term. Raises UnknownRequest."""
        return self._do(calls.why(request_id))

    def plans(self) -> PlansReply:
        """What the conductor plans, why, and whether it leads."""
        return self._do(calls.plans())

    def drains(self) -> list[DrainReply]:
        """Nodes and instances that are emptied, and those that were."""
        return self._do(calls.drains())

    def drain_node(self, node: str, deadline_s: float | None = None) -> DrainReply:
        """Empty a kvstore node; `drains` shows how far it is. Raises UnknownNode, and Conflict
        while it is being told to take new blocks again."""
        return self._do(calls.drain_node(node, deadline_s))

    def undrain_node(self, node: str) -> DrainReply:
        """Let a node take new blocks again. Raises UnknownNode."""
        return self._do(calls.undrain_node(node))

    def settings(self) -> dict[str, Any]:
        """All settings."""
        return self._do(calls.settings())

    def patch(self, changes: dict[str, Any]) -> dict[str, Any]:
        """Change some; all settings after that. Raises InvalidRequest, and then nothing changed."""
        return self._do(calls.patch(changes))

    def ready(self) -> HealthReply:
        """Whether a request could be scheduled now."""
        return self._do(calls.ready())

    def follow(self, candidates: int = 0) -> Iterator[EntryReply]:
        """Decisions as they are made, until the conductor stops or the iterator is closed."""
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

    def _do(self, call: Call[T]) -> T:
        ends_at = time.monotonic() + self._timeout_s
        for attempt in range(self._retries + 1):
            left_s = max(ends_at - time.monotonic(), 0.001)
            try:
                response = self._http.request(
                    call.method, call.path, content=call.body, headers=_HEADERS, timeout=left_s
                )
            except httpx.TransportError as error:
                pause_s = _PAUSE_S * 2**attempt
                late = time.monotonic() + pause_s >= ends_at
                if late or attempt == self._retries or not _may_repeat(call, error):
                    raise _unavailable(self._http.base_url, error) from error
                time.sleep(pause_s)
            else:
                return call.answered(response.status_code, response.content, again=attempt > 0)
        raise AssertionError("the last attempt returns or raises")


class AsyncConductorClient:
    """The same for asyncio; for one event loop, and any number of calls at a time."""

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
        """End all connections."""
        await self._http.aclose()

    async def schedule(
        self, request: Request, *, token_ids: Sequence[int] | None = None, namespace: str = ""
    ) -> DecisionReply | Rejection:
        """Where the request runs, or why not now. With `token_ids`, the keys and the length in
        `request` are left out, and the conductor makes them."""
        return await self._do(calls.schedule(request, token_ids, namespace))

    async def observe(self, event: RequestEvent) -> Rejection | None:
        """What became of a request. A rejection, if it was refused after its prefill, as admission
        in the mode "baseline" does. Raises UnknownRequest."""
        return await self._do(calls.observe(event))

    async def register(
        self, spec: InstanceSpec, load: Load | None = None, schema: KVSchema | None = None
    ) -> None:
        """Register an instance, or say again what it is: best with every heartbeat. With `schema`
        prompts of its model can be sent as token ids."""
        await self._do(calls.register(spec, load, schema))

    async def heartbeat(self, instance: str, load: Load) -> None:
        """It is still there. Raises UnknownInstance: then register."""
        await self._do(calls.heartbeat(instance, load))

    async def drain(self, instance: str) -> None:
        """No new work for it."""
        await self._do(calls.leave(instance, now=False))

    async def remove(self, instance: str) -> None:
        """Forget it at once."""
        await self._do(calls.leave(instance, now=True))

    async def flip(self, instance: str, role: Role) -> None:
        """Change what it does."""
        await self._do(calls.flip(instance, role))

    async def instances(self) -> list[InstanceReply]:
        """All of them."""
        return await self._do(calls.instances())

    async def instance(self, name: str) -> InstanceReply:
        """One of them. Raises UnknownInstance."""
        return await self._do(calls.instance(name))

    async def match(self, keys: Sequence[bytes], *, limit: int = 100) -> MatchReply:
        """Who holds how much of a prefix."""
        return await self._do(calls.match(keys, limit))

    async def hot(self, limit: int = 100) -> list[HotPrefixReply]:
        """The most popular prefixes."""
        return await self._do(calls.hot(limit))

    async def decisions(
        self, limit: int = 100, *, candidates: int = 0, instance: str | None = None
    ) -> list[EntryReply]:
        """The latest of the log."""
        return await self._do(calls.decisions(limit, candidates, instance))

    async def why(self, request_id: str) -> EntryReply:
        """All candidates with every term. Raises UnknownRequest."""
        return await self._do(calls.why(request_id))

    async def plans(self) -> PlansReply:
        """What the conductor plans, why, and whether it leads."""
        return await self._do(calls.plans())

    async def drains(self) -> list[DrainReply]:
        """Nodes and instances that are emptied, and those that were."""
        return await self._do(calls.drains())

    async def drain_node(self, node: str, deadline_s: float | None = None) -> DrainReply:
        """Empty a kvstore node; `drains` shows how far it is. Raises UnknownNode, and Conflict
        while it is being told to take new blocks again."""
        return await self._do(calls.drain_node(node, deadline_s))

    async def undrain_node(self, node: str) -> DrainReply:
        """Let a node take new blocks again. Raises UnknownNode."""
        return await self._do(calls.undrain_node(node))

    async def settings(self) -> dict[str, Any]:
        """All settings."""
        return await self._do(calls.settings())

    async def patch(self, changes: dict[str, Any]) -> dict[str, Any]:
        """Change some; all settings after that. Raises InvalidRequest, and then nothing changed."""
        return await self._do(calls.patch(changes))

    async def ready(self) -> HealthReply:
        """Whether a request could be scheduled now."""
        return await self._do(calls.ready())

    async def follow(self, candidates: int = 0) -> AsyncIterator[EntryReply]:
        """Decisions as they are made, until the conductor stops or the iterator is closed."""
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

    async def _do(self, call: Call[T]) -> T:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._attempts(call)
        except TimeoutError as error:
            raise ConductorUnavailable(
                f"no answer of {self._http.base_url} in {self._timeout_s:g} s"
            ) from error

    async def _attempts(self, call: Call[T]) -> T:
        for attempt in range(self._retries + 1):
            try:
                response = await self._http.request(
                    call.method, call.path, content=call.body, headers=_HEADERS, timeout=None
                )
            except httpx.TransportError as error:
                if attempt == self._retries or not _may_repeat(call, error):
                    raise _unavailable(self._http.base_url, error) from error
                await asyncio.sleep(_PAUSE_S * 2**attempt)
            else:
                return call.answered(response.status_code, response.content, again=attempt > 0)
        raise AssertionError("the last attempt returns or raises")


_HEADERS = {"content-type": "application/json"}


def _options(url: str, token_file: Path | None, tls_ca: Path | None) -> dict[str, Any]:
    """What both clients give to httpx. Proxies and `.netrc` of the environment are not for us."""
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
    return {"base_url": parsed, "headers": headers, "verify": verify, "trust_env": False}


def trusting(tls_ca: Path | None) -> ssl.SSLContext:
    """What a client checks certificates by: this CA alone, or those that this machine trusts (and
    not the list that httpx comes with). Raises InvalidRequest."""
    import ssl

    try:
        return ssl.create_default_context(cafile=tls_ca)
    except OSError as error:
        raise InvalidRequest(f"can't load the CA {tls_ca}: {error}") from error


def _may_repeat(call: Call[Any], error: httpx.TransportError) -> bool:
    """Without a connection nothing was sent."""
    return call.repeatable or isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)


def _unavailable(url: object, error: httpx.TransportError) -> ConductorUnavailable:
    why = str(error) or type(error).__name__
    hint = next((hint for sign, hint in _HINTS.items() if sign in why), "")
    return ConductorUnavailable(f"no answer of {url}: {why}{hint}")


# What OpenSSL and HTTP say of a wrong setting, and what it may be.
_HINTS = {
    "get local issuer certificate": "; a CA of your own is trusted where tls_ca names it",
    "self-signed certificate": "; a CA of your own is trusted where tls_ca names it",
    "WRONG_VERSION_NUMBER": "; it may not serve https but http",
    "disconnected without sending": "; it may not serve http but https",
}
