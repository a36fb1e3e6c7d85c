"""The gateway's OpenAPI document is true: routes answer as described, whatever is sent."""

from __future__ import annotations

import asyncio
import threading
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import schemathesis
from gatewaysupport import CONFIG, Whole, cluster
from hypothesis import HealthCheck, settings

from tiffin.conductor.gateway.app import create_app
from tiffin.conductor.gateway.openapi import document

if TYPE_CHECKING:
    from collections.abc import Iterator

schema = schemathesis.openapi.from_dict(document())


@contextmanager
def front() -> Iterator[str]:
    """The URL of a gateway with an engine, in a thread."""
    url: list[str] = []
    ready, over = threading.Event(), threading.Event()

    async def serve() -> None:
        async with cluster(Whole("m0"), config=CONFIG) as it:
            url.append(str(it.http.base_url))
            ready.set()
            await asyncio.to_thread(over.wait)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert ready.wait(30)
    try:
        yield url[0]
    finally:
        over.set()
        thread.join()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with front() as it:
        yield it


def no_defect(context: Any, response: Any, case: Any) -> None:
    """No instance may be ready for what was made up; any other 5xx is a defect."""
    assert response.status_code < 500 or response.status_code == 503


@schema.parametrize()
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
def test_routes_answer_as_described(case: Any, url: str) -> None:
    case.call_and_validate(
        base_url=url,
        checks=(
            no_defect,
            schemathesis.checks.status_code_conformance,
            schemathesis.checks.content_type_conformance,
            schemathesis.checks.response_schema_conformance,
        ),
    )


def test_every_route_is_described() -> None:
    nothing: Any = SimpleNamespace(config=CONFIG)
    app = create_app(nothing)
    served = {route.path.replace(":path", "") for route in app.routes}  # type: ignore[attr-defined]
    assert served - {"/metrics", "/openapi.json"} == set(document()["paths"])
