"""The service's description is true: the page is up to date, routes answer as described, and
whatever is sent, no answer is a defect."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from apisupport import Recorder, spec_body
from hypothesis import HealthCheck, settings
from serversupport import served
from starlette.testclient import TestClient

from tiffin.conductor import auth
from tiffin.conductor.api import codes, intake, reference
from tiffin.conductor.api.app import create_app
from tiffin.conductor.api.table import ROUTES
from tiffin.conductor.cli import commands
from tiffin.conductor.orders import NodeSpace
from tiffin.conductor.records import InstanceSpec, Role

DOCS = Path(__file__).parents[2] / "docs" / "conductor"
SERVICE = (DOCS / "service.md").read_text(encoding="utf-8")

core = Recorder()
core.register(InstanceSpec("i1", "llama-3-8b", Role.MIXED, "test"), 0.0)
core.steering.tick({"n1": NodeSpace("n1", 1 << 30, 1 << 29)}, 0.0)
app = create_app(core)
schema = schemathesis.openapi.from_asgi("/openapi.json", app)
# A stream has no end to wait for.
finite = schema.exclude(operation_id="stream")


def no_defect(context: Any, response: Any, case: Any) -> None:
    """503 is an answer: nothing is ready. The others mean that the code has failed."""
    assert response.status_code < 500 or response.status_code == 503


def call(case: Any) -> None:
    """Send it, and compare the answer with the description."""
    case.call_and_validate(
        headers={"host": "localhost"},
        checks=(
            no_defect,
            schemathesis.checks.status_code_conformance,
            schemathesis.checks.content_type_conformance,
            schemathesis.checks.response_schema_conformance,
        ),
    )


def test_the_page_is_what_the_code_says() -> None:
    page = (DOCS / "rest.md").read_text(encoding="utf-8")
    assert page == reference.render(), (
        "run: python -m tiffin.conductor.api.reference docs/conductor/rest.md"
    )


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```$", SERVICE, re.M | re.S)
    with served(Recorder()) as url:
        exec(code.replace("http://127.0.0.1:7800", url), {})
    assert capsys.readouterr().out == "prefill-3 prefill-3\n"


def test_every_code_is_documented() -> None:
    page = (DOCS / "rest.md").read_text(encoding="utf-8")
    for _, _, code in codes._CODES[:-1]:
        if code != "unavailable":  # which only clients raise
            assert f"`{code}`" in page


def test_every_metric_is_documented() -> None:
    with TestClient(app, base_url="http://localhost") as http:
        names = re.findall(r"^# TYPE tiffin_conductor_(\S+)", http.get("/metrics").text, re.M)
    assert len(names) > 20
    for name in names:
        if not name.endswith("_created"):
            assert f"`{name}`" in SERVICE, name


def test_every_option_right_and_limit_is_documented() -> None:
    import typer
    from typer.main import get_command

    program = typer.Typer()
    commands(program)
    program.command("other")(lambda: None)
    group = get_command(program).commands["conductor"]  # type: ignore[attr-defined]
    for command in (group, *group.commands.values()):
        for parameter in command.params:
            if parameter.name != "help" and parameter.opts[0].startswith("--"):
                assert f"`{parameter.opts[0]}`" in SERVICE, parameter.opts
    for right in auth.Right:
        assert f"| `{right}` |" in SERVICE
    limits = intake.Limits()
    for shown in (limits.connections, limits.streams, limits.stream_backlog, auth.TOKENS_MAX):
        assert f"{shown:,}" in SERVICE


def test_every_route_of_the_table_is_described() -> None:
    described = app.openapi()["paths"]
    assert {(route.path, route.method.lower()) for route in ROUTES} == {
        (path, method) for path, methods in described.items() for method in methods
    }


@finite.parametrize()
@settings(max_examples=8, suppress_health_check=list(HealthCheck), deadline=None)
def test_answers_are_as_described(case: Any) -> None:
    call(case)


@pytest.mark.slow
@finite.parametrize()
@settings(max_examples=400, suppress_health_check=list(HealthCheck), deadline=None)
def test_answers_are_as_described_at_length(case: Any) -> None:
    call(case)


def test_the_examples_are_accepted() -> None:
    core = Recorder()
    core.steering.tick({"node-a": NodeSpace("node-a", 1 << 30, 1 << 29)}, 0.0)
    with TestClient(create_app(core), base_url="http://localhost") as http:
        for name in ("prefill-3", "prefill-4"):
            http.put(f"/v1/instances/{name}", json=spec_body())
        for route in ROUTES:
            if route.body_example is None:
                continue
            path = route.path.format(
                request_id="chatcmpl-7f3a", event="tokens", instance="prefill-3", node="node-a"
            )
            response = http.request(route.method, path, json=route.body_example)
            assert response.status_code in (200, 204), (path, response.text)
