"""`POST /v1/schedules`: several prompts in one call are as many calls of one each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from apisupport import KEY, MODEL, Recorder, spec_body, turns_of_others
from starlette.testclient import TestClient

from tiffin.conductor.api.app import create_app
from tiffin.conductor.api.scheduling import place_all
from tiffin.conductor.records import Rejection
from tiffin.conductor.web.tracing import Span, Tracing
from tiffin.conductor.wire.schedule_batch import SCHEDULES_MAX

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


@pytest.fixture
def core() -> Recorder:
    return Recorder()


@pytest.fixture
def http(core: Recorder) -> Iterator[TestClient]:
    # On a clock that stands: what was placed before is not done however slow this machine is.
    app = create_app(core, clock=lambda: 1000.0)
    with TestClient(app, base_url="http://localhost") as client:
        assert client.put("/v1/instances/i", json=spec_body()).status_code == 204
        yield client


def prompt(name: str, **changes: Any) -> dict[str, Any]:
    return {"request_id": name, "model": MODEL, "prompt_tokens": 600, **changes}


def outcomes(http: TestClient, prompts: list[Any]) -> list[dict[str, Any]]:
    response = http.post("/v1/schedules", json={"requests": prompts})
    assert response.status_code == 200, response.text
    found: list[dict[str, Any]] = response.json()["outcomes"]
    return found


def test_each_outcome_is_what_its_own_call_answers(http: TestClient) -> None:
    prompts = [
        prompt("a", block_keys=[KEY.hex()]),
        prompt("b", model="unknown"),
        prompt("c", prompt_tokens=0),
        prompt("d/"),
        {"model": MODEL},
        [1, 2],
        "text",
        prompt("e", priority="of no settings"),
        prompt("f"),
    ]
    together = outcomes(http, prompts)
    assert len(together) == len(prompts)
    for asked, outcome in zip(prompts, together, strict=True):
        alone = http.post("/v1/schedule", json=asked)  # of those that were placed: once more
        assert outcome["status"] == alone.status_code, asked
        if outcome["decision"] is None:
            assert outcome["error"] == alone.json()["error"]
        else:
            assert outcome["error"] is None
            volatile = ("expires_in_s", "held")
            same = {k: v for k, v in alone.json().items() if k not in volatile}
            assert {k: v for k, v in outcome["decision"].items() if k not in volatile} == same
    assert [one["status"] for one in together] == [200, 404, 422, 400, 422, 422, 422, 400, 200]


def test_they_are_placed_in_their_order_each_with_those_before(
    http: TestClient, core: Recorder
) -> None:
    found = outcomes(http, [prompt(name) for name in "abc"])
    assert list(core.requests) == ["a", "b", "c"]
    ttfts = [one["decision"]["predicted_ttft_s"] for one in found]
    assert ttfts == sorted(set(ttfts)), "each waits for those before it"


def test_a_rejection_is_an_outcome(http: TestClient, core: Recorder) -> None:
    core.reject = Rejection("r", "ttft", "full", retry_after_s=2.0)
    (found,) = outcomes(http, [prompt("a")])
    assert (found["status"], found["decision"]) == (429, None)
    assert found["error"]["tiffin"]["reason"] == "ttft"
    assert found["error"]["tiffin"]["retry_after_s"] == 2.0


def test_it_is_bounded(http: TestClient) -> None:
    many = {"requests": [prompt(str(n)) for n in range(SCHEDULES_MAX + 1)]}
    assert http.post("/v1/schedules", json=many).status_code == 422
    assert outcomes(http, []) == []


def test_others_have_their_turn_meanwhile(core: Recorder) -> None:
    service = create_app(core).state.service
    texts = [msgspec.Raw(b'{"request_id": "r"}')] * 10 * SCHEDULES_MAX
    assert turns_of_others(lambda: place_all(service, texts, {}, lambda: False)) > 1


def test_each_prompt_has_a_trace_context_of_its_own(core: Recorder) -> None:
    begun: list[Mapping[str, str]] = []

    class Heard(Tracing):
        def begin(self, name: str, headers: Mapping[str, str]) -> Span:
            begun.append(Span(headers).headers)
            return Span(headers)

    app = create_app(core, tracing=Heard())
    with TestClient(app, base_url="http://localhost") as http:
        http.put("/v1/instances/i", json=spec_body())
        trace = {"traceparent": "00-1-2-01", "tracestate": "x=1"}
        body = {"requests": [prompt("a", trace=trace), prompt("b")]}
        http.post("/v1/schedules", json=body, headers={"traceparent": "00-9-9-01"})
        http.post("/v1/schedule", json=prompt("c", trace=trace), headers={"traceparent": "0"})
    assert begun == [trace, {"traceparent": "00-9-9-01"}, trace]
