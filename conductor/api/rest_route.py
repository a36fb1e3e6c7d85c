"""What all REST routes have in common: how they answer errors and count answers, what they need of
the application, and how they are described."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute

from ..errors import ConductorError
from ..wire.answers import JSON, Refusal, error, failed, refused

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    import msgspec
    from starlette.requests import Request
    from starlette.responses import Response

    from .conductor_service import Service
    from .request_bodies import Intake

    Handler = Callable[[Request], Coroutine[Any, Any, Response]]

T = TypeVar("T")

REF = "#/components/schemas/{name}"


class RestRoute(APIRoute):
    """A route whose errors have the service's one format, and whose answers are counted."""

    def get_route_handler(self) -> Handler:
        """FastAPI calls this once, for the function that serves the route."""
        handler = super().get_route_handler()
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


def service_of(http: Request) -> Service:
    """The conductor that a request is for."""
    service: Service = http.app.state.service
    return service


async def body_of(http: Request, decoder: msgspec.json.Decoder[T]) -> T:
    """Receive and decode a body. Raises Refusal."""
    intake: Intake = http.app.state.intake
    return await intake.body(http, decoder)


async def optional_body_of(http: Request, decoder: msgspec.json.Decoder[T], default: T) -> T:
    """As `body_of`, but returns `default` for a request without a body. Raises Refusal."""
    intake: Intake = http.app.state.intake
    return await intake.optional(http, decoder, default)


def takes(kind: type, *, required: bool = True) -> dict[str, Any]:
    """Describes a body to OpenAPI: FastAPI does not see it, since msgspec decodes it."""
    return {"requestBody": {"required": required, "content": {JSON: {"schema": _schema(kind)}}}}


def answers(
    kind: type | None = None, errors: dict[int, str] | None = None, *, media: str = JSON
) -> dict[int | str, dict[str, Any]]:
    """Describes answers to OpenAPI: the struct of a success, if it has a body, and the errors that
    other routes do not have."""
    described: dict[int | str, dict[str, Any]] = {
        status: {"description": what} for status, what in (errors or {}).items()
    }
    if kind is not None:
        described[200] = {"content": {media: {"schema": _schema(kind)}}}
    return described


def _schema(kind: type) -> dict[str, Any]:
    plain = {dict: "object", str: "string"}
    return {"type": plain[kind]} if kind in plain else {"$ref": REF.format(name=kind.__name__)}
