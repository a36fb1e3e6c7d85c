"""Authorises requests: by a token, or in a service without tokens by a Host header that names this
machine."""

from __future__ import annotations

import functools
import ipaddress
from typing import TYPE_CHECKING

from ..web.auth import bearer
from ..web.connection_limits import PROOF
from ..wire.answers import Refusal

if TYPE_CHECKING:
    from starlette.requests import Request

    from ..web.auth import Right, Tokens


class Door:
    """Authorises the requests of one application."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens

    def enter(self, request: Request, right: Right | None, instance: str | None = None) -> None:
        """Check that a request's token has `right`, or may act as `instance`. `right` None: the
        route needs no token. Marks the connection as authorised, unless the service has tokens and
        the route needs none. Raises NotAuthorized, Refusal."""
        if not self._tokens:
            _check_host(request)
        elif right is None:
            return  # this proves nothing about the client, so the connection stays unauthorised
        else:
            self._tokens.check(_authorization(request), right, instance)
        prove = request.scope.get("extensions", {}).get(PROOF)
        if prove is not None and not prove():
            raise Refusal(503, "busy", "too many connections", retry_after_s=1.0, close=True)

    def replace(self, tokens: Tokens) -> None:
        """Admit the holders of these tokens from now on, instead of those before."""
        self._tokens = tokens

    def client(self, request: Request) -> str:
        """The name that the token file gives to the client of a request; "" without one."""
        grant = self._tokens.grant(bearer(_authorization(request)))
        return "" if grant is None else grant.client

    def knows(self, request: Request) -> bool:
        """Whether the client sends a known token, with any right, or the service has no tokens."""
        return not self._tokens or self._tokens.grant(bearer(_authorization(request))) is not None


def _authorization(request: Request) -> bytes:
    return request.headers.get("authorization", "").encode("latin-1")


def _check_host(request: Request) -> None:
    """Raise Refusal unless the Host header names this machine; for a service without tokens. This
    prevents DNS rebinding: a foreign web page can have its own name resolved to 127.0.0.1, and the
    address alone would admit it. HTTP/1.0 has no Host header, and no browser speaks it."""
    host = request.headers.get("host")
    if host is None and request.scope["http_version"] == "1.0":
        return
    if not _is_here(host or ""):
        raise Refusal(
            421, "wrong_host", "without tokens this service is only called localhost or 127.0.0.1"
        )


@functools.lru_cache(maxsize=64)  # few distinct names, thousands of calls a second
def _is_here(host: str) -> bool:
    name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
    name = name.strip("[]").lower()
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
