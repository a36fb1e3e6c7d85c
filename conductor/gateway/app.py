"""The gateway's HTTP routes: OpenAI's API, and health checks and metrics.

    async with Gateway(client, config) as gateway:
        app = create_app(gateway, auth=load_tokens(path))

The tokens are API keys: the right `schedule` allows completions, `read` the rest, and a key without
rights everything.
"""

from __future__ import annotations

import hashlib
import secrets
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ..api.authorisation import Door
from ..api.request_bodies import Intake, Limits
from ..errors import ConductorError, UnknownModel
from ..web.auth import Right, Tokens, bearer
from ..web.metrics import CONTENT_TYPE
from ..wire.answers import Refusal, answer, error, failed, ready, refused
from ..wire.models import HealthReply
from .engines.engine_client import Relayed
from .openai.openai_request import (
    CHAT,
    COMPLETIONS,
    ID_KINDS,
    LISTENING,
    POOLING,
    RESPONSES,
    SPEECH,
    Wishes,
    read_ask,
    read_form,
    read_wishes,
)
from .openai.response_ids import holder
from .openapi import document
from .requests.answer_stream import Serving
from .requests.relay import Relay

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from starlette.types import Receive, Scope, Send

    from .gateway import Gateway

    Endpoint = Callable[[Request], Awaitable[Response]]

_raw: Any = msgspec.json.Decoder(msgspec.Raw)
# Placed by the conductor.
_COMPUTED = (CHAT, COMPLETIONS, RESPONSES, *POOLING, SPEECH, *LISTENING)
# vLLM has the latter two: whoever checks an engine there is told of the gateway that it can serve.
READY = ("/readyz", "/health", "/ping")
_CODES = {404: "no_such_route", 405: "method_not_allowed"}


class ModelCard(msgspec.Struct):
    """An entry of `GET /v1/models`."""

    id: str
    object: str = "model"
    created: int = 0
    owned_by: str = "tiffin"


class ModelList(msgspec.Struct):
    """The answer of `GET /v1/models`: the models that instances serve."""

    data: list[ModelCard]
    object: str = "list"


def create_app(
    gateway: Gateway,
    *,
    auth: Tokens | None = None,
    scrape: Callable[[], Awaitable[bytes]] | None = None,
) -> Starlette:
    """The ASGI application. Without `auth` it admits every request whose Host header names this
    machine. `scrape` gives the metrics, if not those of this gateway alone."""
    door = Door(auth or Tokens())
    routes = _Routes(gateway, door, scrape)
    table: list[tuple[str, str, Endpoint, Right | None]] = [
        *(("POST", path, routes.complete, Right.SCHEDULE) for path in _COMPUTED),
        ("GET", RESPONSES + "/{response_id}", routes.response, Right.SCHEDULE),
        ("POST", RESPONSES + "/{response_id}/cancel", routes.response, Right.SCHEDULE),
        ("POST", "/tokenize", routes.forward, Right.SCHEDULE),
        ("POST", "/detokenize", routes.forward, Right.SCHEDULE),
        ("GET", "/v1/models", routes.models, Right.READ),
        ("GET", "/v1/models/{model:path}", routes.model, Right.READ),
        ("GET", "/openapi.json", routes.openapi, None),
        ("GET", "/livez", routes.livez, None),
        *(("GET", path, routes.readyz, None) for path in READY),
        ("GET", "/metrics", routes.metrics, Right.READ),
    ]
    endpoints = [
        (method, path, _endpoint(handler, right, path, door, gateway))
        for method, path, handler, right in table
    ]
    app = _Application(
        routes=[Route(path, endpoint, methods=[method]) for method, path, endpoint in endpoints],
        exception_handlers={HTTPException: _not_routed, Exception: _broken},
    )
    app.computed = {path: endpoint for _, path, endpoint in endpoints if path in _COMPUTED}
    if origins := gateway.config.allowed_origins:
        app.shared = CORSMiddleware(
            app.serve, origins, ("GET", "POST"), allow_headers=("*",), expose_headers=("*",)
        )
    app.state.door = door  # whose tokens can be replaced
    return app


class _Application(Starlette):
    """Starlette, and ahead of it what engines compute: its router and its middleware, through which
    each piece of a stream goes, take a tenth of a request's time."""

    computed: Mapping[str, Endpoint] = {}
    shared: CORSMiddleware | None = None  # what web pages of other origins go through

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        await (self.shared or self.serve)(scope, receive, send)

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request that is no question of a browser's."""
        endpoint = None
        if scope["type"] == "http" and scope["method"] == "POST":
            endpoint = self.computed.get(scope["path"])
        if endpoint is None:
            await super().__call__(scope, receive, send)
            return
        request, response = Request(scope, receive, send), None
        try:
            response = await endpoint(request)
            await response(scope, receive, send)
        except Exception as failure:
            if not (isinstance(response, Serving) and response.begun):
                await (await _broken(request, failure))(scope, receive, send)
            raise  # the server logs it


class _Routes:
    """The route handlers. They raise ConductorError and Refusal."""

    def __init__(
        self, gateway: Gateway, door: Door, scrape: Callable[[], Awaitable[bytes]] | None
    ) -> None:
        limits = gateway.config.limits
        self._gateway, self._door, self._scrape = gateway, door, scrape
        self._intake = Intake(
            Limits(body_bytes=limits.body_bytes, held_bytes=limits.held_bytes),
            ", which is limits.body_bytes of the gateway",
        )

    async def complete(self, http: Request) -> Response:
        """Whatever engines compute: completions, responses, embeddings, speech."""
        gateway, path = self._gateway, http.url.path
        began, gate, owner = gateway.clock(), gateway.gate, _owner(http)
        client = self._client(http, owner)
        made = ID_KINDS.get(path, "req-") + secrets.token_hex(12)
        wishes = read_wishes(http.headers, made, owner, gateway.config.honour)
        gateway.placing_queue.check(wishes.tenant)
        gate.enter(gateway.clients.settings_of(client).priority(wishes.priority))
        held = 0
        try:
            form = path in LISTENING
            raw = (
                await self._intake.raw(http) if form else bytes(await self._intake.body(http, _raw))
            )
            gate.hold(len(raw))
            held = len(raw)
            if form:
                ask = read_form(path, raw, http.headers.get("content-type", ""), wishes)
            else:
                ask = read_ask(path, raw, wishes)
            ask = gateway.allowed(client, gateway.named(client, ask))
            visit = gateway.clients.enter(client, began)
        except BaseException:
            gate.leave(held)
            raise
        span = gateway.tracing.begin(f"POST {path}", http.headers)
        return Serving(gateway, ask, span, began, visit, lambda: gate.leave(held))

    def _client(self, http: Request, owner: str) -> str:
        """Whose limits count: the name that its key has, or the key itself."""
        return self._door.client(http) or owner

    async def models(self, http: Request) -> Response:
        """The models that instances serve, and what stands for them, in OpenAI's format."""
        return answer(ModelList([ModelCard(name) for name in self._gateway.models()]))

    async def model(self, http: Request) -> Response:
        """One of them."""
        name = http.path_params["model"]
        if name not in self._gateway.models():
            raise UnknownModel(f"no instance serves {name[:200]!r}")
        return answer(ModelCard(name))

    async def response(self, http: Request) -> Response:
        """A response that an instance keeps: what it is by now, or its cancellation."""
        gateway, response_id = self._gateway, http.path_params["response_id"]
        name = holder(response_id, gateway.known.names())
        if name is None:
            raise Refusal(404, "unknown_response", f"no instance has {response_id[:80]!r}")
        path = http.url.path + (f"?{http.url.query}" if http.url.query else "")
        return await self._forwarded(http.method, path, "", b"", name)

    async def forward(self, http: Request) -> Response:
        """Tokens of a text, or the text of tokens, by any instance of the model."""
        raw = bytes(await self._intake.body(http, _raw))
        ask = read_ask(http.url.path, raw, Wishes(""))
        ask = self._gateway.named(self._client(http, _owner(http)), ask)
        return await self._forwarded("POST", http.url.path, ask.model, ask.raw)

    async def _forwarded(self, *call: Any) -> Response:
        """The answer to a call (`Gateway.forward`), which counts as a request under way."""
        with ExitStack() as under_way:
            self._gateway.gate.enter()
            under_way.callback(self._gateway.gate.leave, 0)
            answer = await self._gateway.forward(*call)
            if isinstance(answer, Relayed):
                return Relay(answer, under_way.pop_all().close)
            return Response(answer.body, answer.status, answer.headers)

    async def openapi(self, http: Request) -> Response:
        """What all this is, for tools."""
        return answer(document())

    async def livez(self, http: Request) -> Response:
        """Whether the process answers."""
        return answer(HealthReply(status="ok"))

    async def readyz(self, http: Request) -> Response:
        """Whether the gateway could serve a request now; else 503, with the reasons if the client
        sends a valid token or needs none."""
        return ready(self._gateway.missing(), details=self._door.knows(http))

    async def metrics(self, http: Request) -> Response:
        """The metrics, for Prometheus."""
        text = await self._scrape() if self._scrape is not None else self._gateway.metrics.text()
        return Response(text, headers={"content-type": CONTENT_TYPE})


def _endpoint(
    handler: Endpoint, right: Right | None, path: str, door: Door, gateway: Gateway
) -> Endpoint:
    """Wrap a handler: `door` authorises the request first, and errors become HTTP answers."""

    async def endpoint(request: Request) -> Response:
        try:
            door.enter(request, right)
            response = await handler(request)
        except ConductorError as failure:
            response = failed(failure)
        except Refusal as refusal:
            response = refused(refusal)
        if not isinstance(response, Serving):  # which counts itself once its status is known
            gateway.metrics.requests.labels(path, str(response.status_code)).inc()
        return response

    return endpoint


def _owner(http: Request) -> str:
    """A digest of the client's API key, whichever way the header around it is written; "" without
    a key."""
    key = bearer(http.headers.get("authorization", "").encode("latin-1"))
    return "key-" + hashlib.sha256(b"Bearer " + key).hexdigest()[:16] if key else ""


async def _not_routed(request: Request, failure: Exception) -> Response:
    """The answer for a path or a method that does not exist."""
    assert isinstance(failure, HTTPException)
    code = _CODES.get(failure.status_code, "refused")
    message = f"{request.method} {request.url.path[:200]}: {failure.detail}"
    return error(failure.status_code, code, message, headers=failure.headers)


async def _broken(request: Request, failure: Exception) -> Response:
    """The answer to an unhandled exception, a defect of the gateway. The exception is raised again,
    and the server logs it with its traceback."""
    return error(500, "internal_error", "the gateway failed; its log has the cause")
