"""The page `/docs`: Swagger UI with all its files served from here, for machines without a network.

Its scripts come with the package `fastapi-swagger`, of which only the files are used. The page
requests nothing from other hosts, and its content security policy makes browsers enforce that.
"""

from __future__ import annotations

from html import escape
from importlib.util import find_spec
from typing import TYPE_CHECKING

from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.staticfiles import StaticFiles

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.requests import Request

_PACKAGE = "fastapi_swagger"

# The URLs are relative, so that the page also works behind a proxy's path prefix.
_PAGE = """\
<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>{title}</title>
<link rel="icon" href="docs/files/favicon-32x32.png">
<link rel="stylesheet" href="docs/files/swagger-ui.css">
<div id="page"></div>
<script src="docs/files/swagger-ui-bundle.js"></script>
<script src="docs/start.js"></script>
</html>
"""
# `validatorUrl: null` turns off Swagger's online validator, to which the page would send its URL.
_START = """\
SwaggerUIBundle({url: "openapi.json", dom_id: "#page", deepLinking: true, validatorUrl: null});
"""
# Swagger UI sets styles on elements and has its pictures in the script. Forms can't be submitted,
# and no other page may frame this one (clickjacking).
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data:; font-src 'self' data:; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {"content-security-policy": _POLICY, "x-content-type-options": "nosniff"}


def add_docs_page(app: FastAPI) -> None:
    """Add the route `/docs` and its files; the page shows `/openapi.json`."""
    if find_spec(_PACKAGE) is None:
        app.add_route("/docs", _without, include_in_schema=False)
        return
    page = _PAGE.format(title=escape(app.title))

    async def docs(request: Request) -> Response:
        return HTMLResponse(page, headers=_HEADERS)

    app.add_route("/docs", docs, include_in_schema=False)
    app.add_route("/docs/start.js", _start, include_in_schema=False)
    app.mount("/docs/files", StaticFiles(packages=[(_PACKAGE, "resources")]))


async def _start(request: Request) -> Response:
    return Response(_START, media_type="text/javascript")


async def _without(request: Request) -> Response:
    """The answer if `fastapi-swagger` is not installed: the page is optional."""
    text = 'This page needs fastapi-swagger: pip install "tiffin[conductor]". See /openapi.json.\n'
    return PlainTextResponse(text, 501)
