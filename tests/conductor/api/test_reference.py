"""The OpenAPI description is true: the page is up to date, routes answer as described, and no
request gets a server error."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import schemathesis
from apisupport import Recorder
from fastapi.routing import APIRoute
from hypothesis import HealthCheck, settings
from serversupport import served
from starlette.testclient import TestClient

from tiffin.conductor.api import reference, request_bodies
from tiffin.conductor.api.app import create_app
from tiffin.conductor.api.examples import ANSWERS, BODIES
from tiffin.conductor.cli import commands
from tiffin.conductor.core import Conductor
from tiffin.conductor.pool.orders import NodeSpace
from tiffin.conductor.prefill.policy_registry import policy
from tiffin.conductor.records import InstanceSpec, Role
from tiffin.conductor.web import auth
from tiffin.conductor.wire import error_codes, event_batch, models, pool_models

if TYPE_CHECKING:
    from collections.abc import Iterator

DOCS = Path(__file__).parents[3] / "docs" / "conductor"
JSON = "application/json"
SERVICE = (DOCS / "service.md").read_text(encoding="utf-8")

core = Recorder()
core.register(InstanceSpec("i1", "llama-3-8b", Role.MIXED, "test"), 0.0)
core.steering.tick({"n1": NodeSpace("n1", 1 << 30, 1 << 29)}, 0.0)
app = create_app(core)
app.state.service.mailboxes.close()  # or a call of `releases` waits for a minute
schema = schemathesis.openapi.from_asgi("/openapi.json", app)
# All operations but the stream, which never ends.
finite = schema.exclude(operation_id="stream")


def no_defect(context: Any, response: Any, case: Any) -> None:
    """503 is allowed: no instance is ready. Any other 5xx means that the code has failed."""
    assert response.status_code < 500 or response.status_code == 503


def call(case: Any) -> None:
    """Send a request, and compare the answer with the description."""
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


def test_the_file_of_tokens_is_one(tmp_path: Path) -> None:
    (lines,) = re.findall(r"^```\n(read .*?)^```$", SERVICE, re.M | re.S)
    path = tmp_path / "tokens"
    path.write_text(lines.replace("...", "0" * 16))
    path.chmod(0o600)
    assert len(auth.load_tokens(path).known) == lines.count("\n")


def test_every_code_is_documented() -> None:
    page = (DOCS / "rest.md").read_text(encoding="utf-8")
    for _, _, code in error_codes._CODES[:-1]:
        if code != "unavailable":  # only clients raise this one
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
    limits = request_bodies.Limits()
    for shown in (limits.connections, limits.streams, limits.stream_backlog, auth.TOKENS_MAX):
        assert f"{shown:,}" in SERVICE


def test_every_route_that_is_served_is_described() -> None:
    described = app.openapi()["paths"]
    served = {
        (route.path, method.lower())
        for route in app.routes
        if isinstance(route, APIRoute)
        for method in route.methods - {"HEAD"}
    }
    assert served == {(path, method) for path, methods in described.items() for method in methods}
    assert len(served) == 28


def operations() -> dict[str, dict[str, Any]]:
    """The operations by id, in the order of the page."""
    return {
        operation["operationId"]: operation
        for methods in app.openapi()["paths"].values()
        for operation in methods.values()
    }


# To find the operations takes seconds for each test that does: one test, which looks longer where
# others than the fixed examples are looked for.
EXAMPLES = 8 if settings().derandomize else 60


@finite.parametrize()
@settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck), deadline=None)
def test_answers_are_as_described(case: Any) -> None:
    call(case)


# Path parameters of the examples.
IN_PATHS = {"request_id": "chatcmpl-7f3a", "event": "tokens", "node": "node-a"}


@pytest.fixture
def as_started() -> Iterator[TestClient]:
    """A conductor with its default settings, and a node of its pool."""
    core = Conductor()
    core.steering.tick({"node-a": NodeSpace("node-a", 1 << 30, 1 << 29)}, 0.0)
    with TestClient(create_app(core), base_url="http://localhost") as http:
        yield http


def examples() -> dict[str, tuple[str, str, Any]]:
    """From OpenAPI: method, path and body of each operation that has an example."""
    return {
        operation["operationId"]: (method, path, content["example"])
        for path, methods in app.openapi()["paths"].items()
        for method, operation in methods.items()
        for content in [operation.get("requestBody", {}).get("content", {}).get(JSON, {})]
        if "example" in content
    }


def test_the_examples_are_taken_as_they_stand(as_started: TestClient) -> None:
    shown = examples()
    _, path, instance = shown["announce"]
    for name in ("prefill-3", "prefill-4"):
        done = as_started.put(path.format(instance=name), json=instance)
        assert done.status_code == 204, done.text
    decode = {**instance, "role": "decode"}
    assert as_started.put(path.format(instance="decode-1"), json=decode).status_code == 204
    known = {"schedule", "event", "events", "announce", "flip", "match", "drain_node"}
    known |= {"next_prefills"}
    assert set(shown) == known
    for method, path, body in shown.values():
        where = path.format(instance="prefill-3", **IN_PATHS)
        answer = as_started.request(method, where, json=body)
        assert answer.status_code in (200, 204), (where, answer.text)


def test_the_examples_of_fields_are_taken(as_started: TestClient) -> None:
    """A model with the example schema, and a prompt of the example tokens."""
    schemas = app.openapi()["components"]["schemas"]

    def shown(kind: str, field: str) -> Any:
        found = schemas[kind]["properties"][field]
        (example,) = next(one for one in (found, *found.get("anyOf", ())) if "examples" in one)[
            "examples"
        ]
        return example

    model = shown("ScheduleBody", "model")
    body = {**examples()["announce"][2], "role": "mixed", "model": model}
    body["schema"] = {"canonical": shown("SchemaBody", "canonical")}
    done = as_started.put("/v1/instances/i1", json=body)
    assert done.status_code == 204, done.text
    asked = {"request_id": shown("ScheduleBody", "request_id"), "model": model}
    for prompt in (
        {"token_ids": shown("ScheduleBody", "token_ids")},
        {name: shown("ScheduleBody", name) for name in ("prompt_tokens", "block_keys")},
    ):
        answer = as_started.post("/v1/schedule", json={**asked, **prompt})
        assert answer.status_code == 200, answer.text
        event = {"tokens": shown("EventBody", "tokens")}
        assert as_started.post("/v1/requests/chatcmpl-7f3a/tokens", json=event).status_code == 204
        assert as_started.post("/v1/requests/chatcmpl-7f3a/finished").status_code == 204


def test_the_examples_of_answers_are_ones() -> None:
    """They have all fields, no other ones, and valid values."""
    kinds = {**vars(models), **vars(pool_models), **vars(event_batch)}
    for name, example in ANSWERS.items():
        content = operations()[name]["responses"]["200"]["content"][JSON]
        assert content["example"] == example
        name_of_kind = content["schema"]["$ref"].rpartition("/")[2]
        kind = kinds[name_of_kind]
        assert msgspec.to_builtins(msgspec.convert(example, kind)) == example, name
    chosen = ANSWERS["schedule"]["policy"]
    assert policy(chosen).name == chosen


def test_the_page_shows_no_other_json(as_started: TestClient) -> None:
    """Except an error, which is a real answer."""
    page = (DOCS / "rest.md").read_text(encoding="utf-8")
    first, *others = map(json.loads, re.findall(r"^```json\n(.*?)^```$", page, re.M | re.S))
    assert as_started.get("/v1/instances/i1").json() == first
    known = [one.get(name) for name in operations() for one in (BODIES, ANSWERS)]
    assert others == [one for one in known if one is not None]
