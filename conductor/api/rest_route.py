"""What all REST routes have in common: how they ask for a token, read bodies, answer errors, count
answers, and are described to FastAPI."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from fastapi import APIRouter, Depends, Request, Security
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer
from starlette.responses import Response

from ..errors import ConductorError
from ..web.auth import Right
from ..wire.answers import JSON, Refusal, error, failed, refused

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from starlette.types import Receive, Scope, Send

    from .authorisation import Door
    from .conductor_service import Service
    from .request_bodies import Intake

    Handler = Callable[[Request], Coroutine[Any, Any, Response]]

T = TypeVar("T")

_decoders: dict[type, msgspec.json.Decoder[Any]] = {}

REF = "#/components/schemas/{}"
_PLAIN: dict[type, str] = {dict: "object", str: "string"}


class RestRoute(APIRoute):
    """A route whose errors have the service's one format, and whose answers are counted."""

    def get_route_handler(self) -> Handler:
        """FastAPI calls this once, for the function that serves the route."""
        return self._counted(super().get_route_handler())

    def _counted(self, handler: Handler) -> Handler:
        pattern = f"{min(self.methods or ())} {self.path}"  # how metrics call it

        async def handle(http: Request) -> Response:
            started = time.perf_counter()
            try:
                response = await handler(http)
            except ConductorError as failure:
                response = failed(failure)
            except Refusal as refusal:
                response = refused(refusal)
            except RequestValidationError as failure:
                first = failure.errors()[0]
                said = f"{first['loc'][-1]}: {first['msg']}"
                response = error(400, "invalid_request", said)
            took_s = time.perf_counter() - started
            service_of(http).metrics.answered(pattern, response.status_code, took_s)
            return response

        return handle


class HotRoute(RestRoute):
    """A route that FastAPI describes as any other, and that is served without it: without its
    resolving of dependencies and parameters, its router and its middleware, which take 100 us
    (docs/decisions/fastapi.md). Its function gets parameters as text that it has to check, and ""
    for what a query lacks."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._handle = self.get_route_handler()
        self.app = self._serve

    def takes(self, scope: Scope) -> bool:
        """Whether this route is for a request. If so, its path's parameters are in the scope."""
        if scope["method"] not in (self.methods or ()):
            return False
        found = self.path_regex.match(scope["path"])
        if found is None:
            return False
        scope["path_params"] = found.groupdict()
        return True

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            response = await self._handle(Request(scope, receive, send))
        except Exception:
            await broken()(scope, receive, send)
            raise  # the server logs it
        await response(scope, receive, send)

    def get_route_handler(self) -> Handler:
        """See `RestRoute`."""
        enter, serve = self.dependencies[0].dependency, self.endpoint
        queries = [field.name for field in self.dependant.query_params]
        assert enter is not None

        async def handle(http: Request) -> Response:
            await enter(http)
            asked = {name: http.query_params.get(name, "") for name in queries}
            response: Response = await serve(http, **http.path_params, **asked)
            return response

        return self._counted(handle)


def broken() -> Response:
    """The answer to an unhandled exception, a defect of the conductor. The server logs the
    exception with its traceback."""
    return error(500, "internal_error", "the conductor failed; its log has the cause")


def router_of(kind: type[RestRoute]) -> APIRouter:
    """A router whose routes are of this kind."""
    return APIRouter(
        route_class=kind,
        default_response_class=Response,
        generate_unique_id_function=lambda route: route.name,
    )


class _BearerToken(HTTPBearer):
    """A dependency of routes that need a token with `right`, or with `own` one of the instance in
    the path. To OpenAPI it is FastAPI's scheme for bearer tokens."""

    def __init__(self, right: Right, *, own: bool) -> None:
        super().__init__(scheme_name="token")
        self._right, self._own = right, own

    async def __call__(self, http: Request) -> None:  # type: ignore[override]
        own = http.path_params["instance"] if self._own else None
        door_of(http).enter(http, self._right, own)


async def _enter_freely(http: Request) -> None:
    """A dependency of routes that need no token."""
    door_of(http).enter(http, None)


def service_of(http: Request) -> Service:
    """The conductor that a request is for."""
    service: Service = http.app.state.service
    return service


def door_of(http: Request) -> Door:
    """What authorises a request."""
    door: Door = http.app.state.door
    return door


async def body_of(http: Request, kind: type[T], *, optional: bool = False) -> T:
    """Receive and decode a body; `optional`: without one, the defaults. Raises Refusal."""
    intake: Intake = http.app.state.intake
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.json.Decoder(kind)
    return await (
        intake.optional(http, decoder, kind()) if optional else intake.body(http, decoder)
    )


def rest(
    tag: str,
    right: Right | None,
    reply: type | None = None,
    errors: dict[int, str] | None = None,
    *,
    body: type | None = None,
    optional: bool = False,
    own: bool = False,
    media: str = JSON,
) -> dict[str, Any]:
    """Options of a route, for FastAPI and its document.

    `right`: what a token needs; with `own`, an instance may do it to itself with a token of its
    own. `reply` and `body`: structs; FastAPI does not see them, since msgspec encodes and decodes.
    `errors`: statuses that other routes do not have, or for another reason.
    """
    extra: dict[str, Any] = {}
    if body is not None:
        extra["requestBody"] = {"required": not optional, **_content(body, JSON)}
    if own:
        extra["security"] = [{"token": [Right.INSTANCE]}]  # instead of the other one
    responses = {status: {"description": what} for status, what in (errors or {}).items()}
    token = Depends(_enter_freely)
    if right is not None:
        token = Security(_BearerToken(right, own=own), scopes=[right])
    return {
        "tags": [tag],
        "dependencies": [token],
        "status_code": 204 if reply is None else 200,
        "responses": responses if reply is None else {200: _content(reply, media), **responses},
        "openapi_extra": extra,
    }


def _content(kind: type, media: str) -> dict[str, Any]:
    schema = {"type": _PLAIN[kind]} if kind in _PLAIN else {"$ref": REF.format(kind.__name__)}
    return {"content": {media: {"schema": schema}}}
