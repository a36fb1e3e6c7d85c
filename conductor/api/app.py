"""The ASGI application: routes of `table.py` in FastAPI, tokens checked, errors in one shape.

    app = create_app(conductor, auth=load_tokens(path))
    app.state.service.schedule(...)      # for whoever serves requests in the same process

FastAPI gives routing, `/docs` and `/openapi.json`. Bodies are decoded and answers encoded by
msgspec: a prompt of 256 keys takes 20 µs so, and 400 µs through pydantic models.
"""

from __future__ import annotations

import functools
import ipaddress
import logging
import time
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

from ..auth import Tokens
from ..errors import ConductorError
from .answers import Refusal, error, failed, refused
from .openapi import DESCRIPTION, TITLE, VERSION, document
from .routes import Routes
from .service import Service
from .table import ROUTES, Route

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from ..core import Conductor
    from ..feeding import Feeding
    from .intake import Limits

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
    """The service of a conductor; `app.state.service` is its `Service`.

    Without `auth` everybody is let in who calls it by a name of this machine. `reasons`: what
    `/readyz` asks besides the instances. `clock`: monotonic seconds. `feeding`: what follows the
    events of instances that publish them.
    """
    service = Service(conductor, limits, reasons=reasons, clock=clock, feeding=feeding)
    app = FastAPI(
        title=TITLE, description=DESCRIPTION, version=VERSION, redirect_slashes=False,
        redoc_url=None,
    )  # fmt: skip
    app.state.service = service
    routes = Routes(service)
    for route in ROUTES:
        # Not `add_api_route`: FastAPI has nothing to inject or to check here, which saves 15 µs.
        endpoint = _endpoint(route, routes, auth or Tokens(), service)
        app.add_route(route.path, endpoint, methods=[route.method], name=route.name)
    app.add_exception_handler(HTTPException, _not_routed)
    app.add_exception_handler(Exception, _broken)
    described = document(type(conductor.settings))
    app.openapi = lambda: described  # type: ignore[method-assign]
    return app


def _endpoint(route: Route, routes: Routes, tokens: Tokens, service: Service) -> Endpoint:
    """What FastAPI calls: the handler behind the door, with its errors as answers."""
    handler, right, pattern = route.handler, route.right, route.pattern
    answered = service.metrics.answered

    async def endpoint(request: Request) -> Response:
        started = time.perf_counter()
        try:
            if not tokens:
                _check_host(request.headers.get("host", ""))
            elif right is not None:
                tokens.check(request.headers.get("authorization", "").encode("latin-1"), right)
            response = await handler(routes, request)
        except ConductorError as failure:
            response = failed(failure)
        except Refusal as refusal:
            response = refused(refusal)
        answered(pattern, response.status_code, time.perf_counter() - started)
        return response

    return endpoint


def _check_host(host: str) -> None:
    """Without tokens: whether we are called by a name of this machine. A web page of elsewhere can
    have its own name resolved to 127.0.0.1, and would be let in by the address alone."""
    if not _is_here(host):
        raise Refusal(
            421, "wrong_host", "without tokens this service is only called localhost or 127.0.0.1"
        )


@functools.lru_cache(maxsize=64)  # few names, thousands of times a second
def _is_here(host: str) -> bool:
    name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
    name = name.strip("[]").lower()
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


async def _not_routed(request: Request, failure: Any) -> Response:
    """A path or a method that does not exist."""
    code = _CODES.get(failure.status_code, "refused")
    message = f"{request.method} {request.url.path[:200]}: {failure.detail}"
    return error(failure.status_code, code, message, headers=failure.headers)


async def _broken(request: Request, failure: Exception) -> Response:
    """A defect of ours. Starlette raises it again, and the server logs it with its traceback."""
    return error(500, "internal_error", "the conductor failed; its log has the cause")
