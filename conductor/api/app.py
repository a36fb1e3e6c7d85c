"""The ASGI application: the routes of `route_table.py` in FastAPI, with token checks and a single
error format.

    app = create_app(conductor, auth=load_tokens(path))
    app.state.service.schedule(...)      # for code that serves requests in the same process

FastAPI provides routing and `/openapi.json`; `/docs` comes from `docs_page.py`. msgspec decodes
bodies and encodes answers: a prompt of 256 keys takes 20 µs, and 400 µs through pydantic models.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

from ..errors import ConductorError
from ..web.auth import Tokens
from ..wire.answers import Refusal, error, failed, refused
from .authorisation import Door
from .conductor_service import Service
from .docs_page import add_docs_page
from .openapi import DESCRIPTION, TITLE, VERSION, document
from .route_table import ROUTES, Route
from .routes import Routes

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from ..core.conductor import Conductor
    from ..service.feeds import Feeding
    from .request_bodies import Limits

    Endpoint = Callable[[Request], Awaitable[Response]]

log = logging.getLogger("tiffin.conductor")

_CODES = {404: "no_such_route", 405: "method_not_allowed"}


def create_app(
    conductor: Conductor,
    *,
    auth: Tokens | None = None,
    limits: Limits | None = None,
    reasons: tuple[Callable[[], str], ...] = (),
    clock: Callable[[], float] = time.monotonic,
    feeding: Feeding | None = None,
) -> FastAPI:
    """The ASGI application of a conductor; `app.state.service` is its `Service`.

    Without `auth` it admits every request whose Host header names this machine. `reasons`: health
    checks of `/readyz` besides that of the instances. `clock`: monotonic seconds. `feeding` follows
    the events of instances that publish them.
    """
    service = Service(conductor, limits, reasons=reasons, clock=clock, feeding=feeding)
    app = FastAPI(
        title=TITLE, description=DESCRIPTION, version=VERSION, redirect_slashes=False,
        docs_url=None, redoc_url=None,
    )  # fmt: skip
    app.state.service = service
    door = Door(auth or Tokens())
    routes = Routes(service, door)
    for route in ROUTES:
        # Not `add_api_route`: FastAPI has no dependency to inject and no model to validate here,
        # and `add_route` saves 15 µs per request.
        endpoint = _endpoint(route, routes, door, service)
        app.add_route(route.path, endpoint, methods=[route.method], name=route.name)
    add_docs_page(app)
    app.add_exception_handler(HTTPException, _not_routed)
    app.add_exception_handler(Exception, _broken)
    described = document(type(conductor.settings))
    app.openapi = lambda: described  # type: ignore[method-assign]
    return app


def _endpoint(route: Route, routes: Routes, door: Door, service: Service) -> Endpoint:
    """Wrap a handler for FastAPI: `door` authorises the request first, and errors become HTTP
    answers."""
    handler, right, pattern = route.handler, route.right, route.pattern
    answered = service.metrics.answered

    async def endpoint(request: Request) -> Response:
        started = time.perf_counter()
        try:
            own = request.path_params["instance"] if route.own else None
            door.enter(request, right, own)
            response = await handler(routes, request)
        except ConductorError as failure:
            response = failed(failure)
        except Refusal as refusal:
            response = refused(refusal)
        answered(pattern, response.status_code, time.perf_counter() - started)
        return response

    return endpoint


async def _not_routed(request: Request, failure: Any) -> Response:
    """The answer for a path or a method that does not exist."""
    code = _CODES.get(failure.status_code, "refused")
    message = f"{request.method} {request.url.path[:200]}: {failure.detail}"
    return error(failure.status_code, code, message, headers=failure.headers)


async def _broken(request: Request, failure: Exception) -> Response:
    """The answer to an unhandled exception, a defect of the conductor. Starlette raises the
    exception again, and the server logs it with its traceback."""
    return error(500, "internal_error", "the conductor failed; its log has the cause")
