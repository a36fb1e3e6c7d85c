"""The page `/docs`: FastAPI's, with Swagger UI served from here, for machines without a network.

Its files come with the package `fastapi-swagger`, of which nothing else is used. The page requests
nothing from other hosts, and its content security policy makes browsers enforce that.
"""

from __future__ import annotations

import base64
import hashlib
import re
from importlib.util import find_spec
from typing import TYPE_CHECKING

from fastapi.openapi.docs import get_swagger_ui_html
from starlette.responses import PlainTextResponse, Response
from starlette.staticfiles import StaticFiles

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.requests import Request

_PACKAGE = "fastapi_swagger"
# Swagger UI sets styles on elements and has its pictures in the script. Of scripts in the page only
# the one that FastAPI writes runs, by its digest. Forms can't be submitted, and no other page may
# frame this one (clickjacking).
_POLICY = (
    "default-src 'none'; script-src 'self' 'sha256-{}'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data:; font-src 'self' data:; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
_MISSING = 'This page needs fastapi-swagger: pip install "tiffin[conductor]". See /openapi.json.\n'


def add_docs_page(app: FastAPI) -> None:
    """Add the route `/docs` and its files; the page shows `/openapi.json`. The package is
    optional: without it the page says so."""
    page: Response = PlainTextResponse(_MISSING, 501)
    if find_spec(_PACKAGE) is not None:
        page = _page(app.title)
        app.mount("/docs/files", StaticFiles(packages=[(_PACKAGE, "resources")]))

    async def docs(request: Request) -> Response:
        return page

    app.add_route("/docs", docs, include_in_schema=False)


def _page(title: str) -> Response:
    # The URLs are relative, so that the page also works behind a proxy's path prefix.
    page = get_swagger_ui_html(
        openapi_url="openapi.json",
        title=title,
        swagger_js_url="docs/files/swagger-ui-bundle.js",
        swagger_css_url="docs/files/swagger-ui.css",
        swagger_favicon_url="docs/files/favicon-32x32.png",
        # Swagger's online validator would be sent this page's URL.
        swagger_ui_parameters={"validatorUrl": None},
    )
    (script,) = re.findall(rb"<script>(.*?)</script>", bytes(page.body), re.S)
    digest = base64.b64encode(hashlib.sha256(script).digest()).decode()
    page.headers["content-security-policy"] = _POLICY.format(digest)
    page.headers["x-content-type-options"] = "nosniff"
    return page
