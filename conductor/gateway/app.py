"""The gateway's routes: OpenAI's, and those of a service.

    async with Gateway(client, config) as gateway:
        app = create_app(gateway, auth=load_tokens(path))

Tokens are API keys: `schedule` allows completions, `read` the rest, and a key alone everything.
"""

from __future__ import annotations

import hashlib
import ipaddress
import secrets
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Route

from ..api.answers import Refusal, answer, error, failed, refused
from ..api.intake import Intake, Limits
from ..api.models import HealthReply
from ..auth import Right, Tokens
from ..errors import ConductorError
from ..metrics import CONTENT_TYPE
from .asking import CHAT, COMPLETIONS, read_ask, read_wishes
from .serving import Serving

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from starlette.requests import Request

    from .gateway import Gateway

    Endpoint = Callable[[Request], Awaitable[Response]]

_raw: Any = msgspec.json.Decoder(msgspec.Raw)
_CODES = {404: "no_such_route", 405: "method_not_allowed"}
# Passed on to the engines, so that traces reach them.
_TRACE_HEADERS = ("traceparent", "tracestate")


class Model(msgspec.Struct):
    """An entry of `GET /v1/models`."""

    id: str
    object: str = "model"
    created: int = 0
    owned_by: str = "tiffin"


class Models(msgspec.Struct):
    """What instances serve."""

    data: list[Model]
    object: str = "list"


def create_app(gateway: Gateway, *, auth: Tokens | None = None) -> Starlette:
    """The ASGI application. Without `auth` everybody is let in who calls it by a name of this
    machine."""
    routes = _Routes(gateway)
    tokens = auth or Tokens()
    table: list[tuple[str, str, Endpoint, Right | None]] = [
        ("POST", CHAT, routes.complete, Right.SCHEDULE),
        ("POST", COMPLETIONS, routes.complete, Right.SCHEDULE),
        ("GET", "/v1/models", routes.models, Right.READ),
        ("GET", "/livez", routes.livez, None),
        ("GET", "/readyz", routes.readyz, None),
        ("GET", "/metrics", routes.metrics, Right.READ),
    ]
    return Starlette(
        routes=[
            Route(path, _endpoint(handler, right, path, tokens, gateway), methods=[method])
            for method, path, handler, right in table
        ],
        exception_handlers={HTTPException: _not_routed, Exception: _broken},
    )


class _Routes:
    """Handlers. They raise ConductorError and Refusal."""

    def __init__(self, gateway: Gateway) -> None:
        limits = gateway.config.limits
        self._gateway = gateway
        self._intake = Intake(Limits(body_bytes=limits.body_bytes, held_bytes=limits.held_bytes))

    async def complete(self, http: Request) -> Response:
        """Both kinds of completions."""
        gate = self._gateway.gate
        held = 0
        gate.enter()
        try:
            raw = bytes(await self._intake.body(http, _raw))
            gate.hold(len(raw))
            held = len(raw)
            made = f"{'chatcmpl' if http.url.path == CHAT else 'cmpl'}-{secrets.token_hex(12)}"
            honour = self._gateway.config.honour
            wishes = read_wishes(http.headers, made, _tenant(http), honour)
            ask = read_ask(http.url.path, raw, wishes)
        except BaseException:
            gate.leave(held)
            raise
        trace = {name: http.headers[name] for name in _TRACE_HEADERS if name in http.headers}
        return Serving(self._gateway, ask, trace, lambda: gate.leave(held))

    async def models(self, http: Request) -> Response:
        """What instances serve, in OpenAI's shape."""
        return answer(Models([Model(name) for name in self._gateway.known.models()]))

    async def livez(self, http: Request) -> Response:
        """Whether the process answers."""
        return answer(HealthReply(status="ok"))

    async def readyz(self, http: Request) -> Response:
        """Whether a request could be served now; 503 with what is missing."""
        missing = self._gateway.missing()
        if missing:
            return answer(HealthReply(status="not ready", reasons=missing), 503)
        return answer(HealthReply(status="ok"))

    async def metrics(self, http: Request) -> Response:
        """For Prometheus."""
        return Response(self._gateway.metrics.text(), headers={"content-type": CONTENT_TYPE})


def _endpoint(
    handler: Endpoint, right: Right | None, path: str, tokens: Tokens, gateway: Gateway
) -> Endpoint:
    """The handler behind the door, with its errors as answers."""

    async def endpoint(request: Request) -> Response:
        try:
            if not tokens:
                _check_host(request.headers.get("host", ""))
            elif right is not None:
                tokens.check(request.headers.get("authorization", "").encode("latin-1"), right)
            response = await handler(request)
        except ConductorError as failure:
            response = failed(failure)
        except Refusal as refusal:
            response = refused(refusal)
        if not isinstance(response, Serving):  # that one says when it knows
            gateway.metrics.requests.labels(path, str(response.status_code)).inc()
        return response

    return endpoint


def _tenant(http: Request) -> str:
    """Who shares fairly with others, of those who do not say: a digest of the API key."""
    key = http.headers.get("authorization", "")
    return "key-" + hashlib.sha256(key.encode("latin-1")).hexdigest()[:16] if key else ""


def _check_host(host: str) -> None:
    """Without tokens: whether we are called by a name of this machine, and not by a web page whose
    own name was made to point here."""
    name = host.rpartition(":")[0] if ":" in host and not host.endswith("]") else host
    name = name.strip("[]").lower()
    try:
        local = name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        local = False
    if not local:
        raise Refusal(
            421, "wrong_host", "without tokens this service is only called localhost or 127.0.0.1"
        )


async def _not_routed(request: Request, failure: Exception) -> Response:
    """A path or a method that does not exist."""
    assert isinstance(failure, HTTPException)
    code = _CODES.get(failure.status_code, "refused")
    message = f"{request.method} {request.url.path[:200]}: {failure.detail}"
    return error(failure.status_code, code, message, headers=failure.headers)


async def _broken(request: Request, failure: Exception) -> Response:
    """A defect of ours. Starlette raises it again, and the server logs it with its traceback."""
    return error(500, "internal_error", "the gateway failed; its log has the cause")
