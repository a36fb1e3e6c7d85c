"""The ASGI application: FastAPI with the routes of `routes.py` and a single error format.

    app = create_app(conductor, auth=load_tokens(path))
    app.state.service.schedule(...)      # for code that serves requests in the same process

What FastAPI does and what it does not, with numbers: docs/decisions/fastapi.md.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

from ..web.auth import Tokens
from ..wire.answers import error
from .authorisation import Door
from .conductor_service import Service
from .docs_page import add_docs_page
from .openapi import TITLE, document
from .request_bodies import Intake
from .rest_route import HotRoute, RestRoute, broken
from .routes import rest_routes

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.routing import BaseRoute
    from starlette.types import Receive, Scope, Send

    from ..core.conductor import Conductor
    from ..recording.recorder import Recorder
    from ..service.feeds import Feeding
    from ..web.tracing import Tracing
    from .request_bodies import Limits

_CODES = {404: "no_such_route", 405: "method_not_allowed"}


class _Application(FastAPI):
    """FastAPI, and ahead of it the routes that it only describes."""

    hot: tuple[HotRoute, ...] = ()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        if scope["type"] == "http":
            for route in self.hot:
                if route.takes(scope):
                    scope["app"] = self
                    await route.app(scope, receive, send)
                    return
        await super().__call__(scope, receive, send)


def create_app(
    conductor: Conductor,
    *,
    auth: Tokens | None = None,
    limits: Limits | None = None,
    reasons: tuple[Callable[[], str], ...] = (),
    clock: Callable[[], float] = time.monotonic,
    feeding: Feeding | None = None,
    tracing: Tracing | None = None,
    recorder: Recorder | None = None,
) -> FastAPI:
    """The ASGI application of a conductor; `app.state.service` is its `Service`.

    Without `auth` it admits every request whose Host header names this machine. `reasons`: health
    checks of `/readyz` besides that of the instances. `clock`: monotonic seconds. `feeding` follows
    the events of instances that publish them. `tracing` records spans of decisions, `recorder`
    requests and what became of them.
    """
    service = Service(
        conductor,
        limits,
        reasons=reasons,
        clock=clock,
        feeding=feeding,
        tracing=tracing,
        recorder=recorder,
    )
    app = _Application(title=TITLE, redirect_slashes=False, docs_url=None, redoc_url=None)
    app.state.service, app.state.door = service, Door(auth or Tokens())
    app.state.intake = Intake(service.limits, "; of a prompt send block_keys, 35 for each block")
    app.openapi = document  # type: ignore[method-assign]
    # Not `include_router`: FastAPI then merges the options of both routers at every request, which
    # takes 18 us.
    routes = _rest_routes()
    app.router.routes += routes
    app.hot = tuple(route for route in routes if isinstance(route, HotRoute))
    add_docs_page(app)
    app.add_exception_handler(HTTPException, _not_routed)
    app.add_exception_handler(Exception, _broken)
    return app


def _rest_routes() -> list[BaseRoute]:
    """The REST routes. They answer HEAD as well as GET, as routes of Starlette do, and the document
    is made before: to FastAPI it would be an operation of its own."""
    document()
    found = rest_routes()
    for route in found:
        if isinstance(route, RestRoute) and route.methods == {"GET"}:
            route.methods.add("HEAD")
    return found


async def _not_routed(request: Request, failure: Any) -> Response:
    """The answer for a path or a method that does not exist."""
    code = _CODES.get(failure.status_code, "refused")
    message = f"{request.method} {request.url.path[:200]}: {failure.detail}"
    return error(failure.status_code, code, message, headers=failure.headers)


async def _broken(request: Request, failure: Exception) -> Response:
    """The answer to an unhandled exception, which Starlette raises again."""
    return broken()
