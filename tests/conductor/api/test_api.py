"""The REST routes: what each one takes, answers and refuses."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import re
import time
from typing import TYPE_CHECKING, Any

import httpx
import msgspec
import numpy as np
import pytest
from apisupport import KEY, MODEL, Recorder, spec_body, turns_of_others
from starlette.testclient import TestClient

from tiffin.conductor.api import conductor_service
from tiffin.conductor.api.app import create_app
from tiffin.conductor.api.event_batches import observe_all
from tiffin.conductor.api.openapi import document
from tiffin.conductor.api.request_bodies import Limits
from tiffin.conductor.pool.draining import GONE_S
from tiffin.conductor.pool.leader import LeaderLease
from tiffin.conductor.pool.orders import Ended, NodeSpace
from tiffin.conductor.pool.prompt_sums import PromptSums
from tiffin.conductor.records import Rejection, Request, RequestEvent
from tiffin.conductor.state.part_keys import part_keys
from tiffin.conductor.web.auth import Grant, Right, Tokens, load_tokens
from tiffin.conductor.web.hang_ups import GONE
from tiffin.conductor.wire.event_batch import EVENTS_MAX
from tiffin.conductor.wire.schema_text import parse_schema
from tiffin.kvstore import KVSchema
from tiffin.kvstore.format.media import Media, media_extras

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SCHEMA = KVSchema.gqa(
    model=MODEL, layers=2, kv_heads=2, head_dim=8, dtype="float16", block_tokens=16
)
HEX = KEY.hex()
NODES = {"node-a": NodeSpace("node-a", 1 << 30, 1 << 29)}


@pytest.fixture
def core() -> Recorder:
    return Recorder()


@pytest.fixture
def http(core: Recorder) -> Iterator[TestClient]:
    with TestClient(create_app(core), base_url="http://localhost") as client:
        yield client


def image(offset: int, length: int, identifier: str = "cat") -> dict[str, Any]:
    return {"identifier": identifier, "offset": offset, "length": length}


def prompt(**changes: Any) -> dict[str, Any]:
    return {"request_id": "r1", "model": MODEL, "prompt_tokens": 600, **changes}


def error_of(response: Any) -> dict[str, Any]:
    """The error of an answer, in the shape that every error has."""
    (name, detail), *more = response.json().items()
    assert (name, more) == ("error", [])
    assert set(detail) == {"message", "type", "code", "param", "tiffin"}
    assert detail["message"]
    return dict(detail)


def register(http: TestClient, name: str = "i1", **changes: Any) -> None:
    response = http.put(f"/v1/instances/{name}", json=spec_body(**changes))
    assert response.status_code == 204, response.text


class TestSchedule:
    def test_a_prompt_by_its_keys(self, http: TestClient, core: Recorder) -> None:
        register(http, url="http://127.0.0.1:8000")
        response = http.post("/v1/schedule", json=prompt(block_keys=[HEX], output_tokens_max=9))
        assert response.status_code == 200
        decision = response.json()
        assert (decision["prefill"], decision["decode"]) == ("i1", "i1")
        assert decision["prefill_url"] == "http://127.0.0.1:8000"
        assert decision["predicted_ttft_s"] > 0
        assert 0 < decision["expires_in_s"] <= core.settings.core.decision_ttl_s
        assert "candidates" not in decision, "a thousand of them are asked for with why"
        asked = core.requests["r1"]
        assert (asked.keys, asked.prompt_tokens, asked.output_tokens_max) == ((KEY,), 600, 9)

    def test_instances_that_must_not_be_chosen(self, http: TestClient, core: Recorder) -> None:
        register(http)
        body = prompt(exclude=["who", "knows"])
        assert http.post("/v1/schedule", json=body).status_code == 200, "they may have left"
        assert core.requests["r1"].exclude == ("who", "knows")

    def test_a_prompt_by_its_length(self, http: TestClient, core: Recorder) -> None:
        register(http)
        assert http.post("/v1/schedule", json=prompt()).status_code == 200
        assert core.requests["r1"].keys == ()

    def test_a_prompt_by_its_tokens(self, http: TestClient, core: Recorder) -> None:
        canonical = SCHEMA.canonical_bytes().decode()
        register(http, block_tokens=16, schema={"canonical": canonical})
        tokens = np.arange(40).tolist()
        body = {"request_id": "r1", "model": MODEL, "token_ids": tokens, "namespace": "acme"}
        assert http.post("/v1/schedule", json=body).status_code == 200
        asked = core.requests["r1"]
        assert asked.prompt_tokens == 40
        assert asked.keys == SCHEMA.prefix(tokens, "acme").keys

    def test_the_first_tokens_of_a_prompt(self, http: TestClient, core: Recorder) -> None:
        schema = KVSchema.gqa(model=MODEL, layers=2, kv_heads=2, head_dim=8, dtype="float16")
        register(http, schema={"canonical": schema.canonical_bytes().decode()}, part_tokens=64)
        assert http.get("/v1/instances").json()["instances"][0]["part_tokens"] == 64
        tokens = np.arange(40).tolist()
        body = {"request_id": "r1", "model": MODEL, "token_ids": tokens}
        assert http.post("/v1/schedule", json=body).status_code == 200
        keys = part_keys(schema.prefix(tokens))
        assert core.requests["r1"].part_keys == keys
        named = [key.hex() for key in keys]
        both = http.post("/v1/schedule", json=body | {"request_id": "r2", "part_keys": named})
        assert both.status_code == 400
        core.hold("i1", "hbm", keys[:1], 0.0, parts=True)
        asked = {"model": MODEL, "token_ids": tokens}
        (holder,) = http.post("/v1/blocks/match", json=asked).json()["holders"]
        assert (holder["holder"], holder["blocks"], holder["part_tokens"]) == ("i1/hbm", 0, 16)
        assert http.post("/v1/schedule", json=prompt(part_keys=["0g" * 16])).status_code == 400
        body = prompt(request_id="r3", prompt_tokens=40, part_keys=named)
        assert http.post("/v1/schedule", json=body).status_code == 200
        assert core.requests["r3"].part_keys == keys
        body = prompt(request_id="r4", prompt_tokens=31, part_keys=named)
        assert http.post("/v1/schedule", json=body).status_code == 400, "they would not fit"

    def test_a_long_prompt_by_its_tokens(self, http: TestClient, core: Recorder) -> None:
        canonical = SCHEMA.canonical_bytes().decode()
        register(http, block_tokens=16, schema={"canonical": canonical})
        tokens = np.arange(150_000).tolist()
        for name, separators in (("close", (",", ":")), ("wide", (" , ", " : "))):
            body = {"request_id": name, "model": MODEL, "token_ids": tokens}
            raw = json.dumps(body, separators=separators)
            headers = {"content-type": "application/json"}
            assert http.post("/v1/schedule", content=raw, headers=headers).status_code == 200
            assert core.requests[name].prompt_tokens == len(tokens)
            assert core.requests[name].keys == SCHEMA.prefix(tokens).keys
        found = http.post("/v1/blocks/match", json={"model": MODEL, "token_ids": tokens})
        assert found.json()["asked_blocks"] == len(tokens) // 16

    @pytest.mark.parametrize("bad", ["-1", "4294967296", '"1,2"', "[1,2]", "1.5", "null", "{}"])
    @pytest.mark.parametrize("at", [0, 50_000, 99_999])
    def test_token_ids_are_checked_wherever_they_stand(
        self, http: TestClient, bad: str, at: int
    ) -> None:
        tokens = ["100000"] * 100_000
        tokens[at] = bad
        raw = f'{{"request_id": "r", "model": "m", "token_ids": [{",".join(tokens)}]}}'
        headers = {"content-type": "application/json"}
        response = http.post("/v1/schedule", content=raw, headers=headers)
        assert response.status_code == 422
        assert error_of(response)["param"] == "token_ids"

    @pytest.mark.parametrize("tokens", ["[]", "[1,]", "[1", "7", '"1"', "[,1]"])
    def test_what_is_no_list_of_ids_is_refused(self, http: TestClient, tokens: str) -> None:
        raw = f'{{"request_id": "r", "model": "m", "token_ids": {tokens}}}'
        headers = {"content-type": "application/json"}
        response = http.post("/v1/schedule", content=raw, headers=headers)
        assert response.status_code in (400, 422)

    def test_others_have_their_turn_while_a_long_prompt_is_read(
        self, core: Recorder, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Turns of the event loop while one request is answered: more for a longer prompt."""
        monkeypatch.setattr("tiffin.conductor.web.time_slices.SLICE_S", 0.0)  # as on a slow machine
        app = create_app(core)
        turns = 0

        async def ask(http: httpx.AsyncClient, tokens: int) -> int:
            body = {"model": MODEL, "token_ids": [100_000] * tokens}
            before = turns
            response = await http.post("/v1/blocks/match", json=body)
            assert response.status_code == 400, "no schema"
            return turns - before

        async def count() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        async def scenario() -> tuple[int, int]:
            counting = asyncio.create_task(count())
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
                found = await ask(http, 10), await ask(http, 150_000)
            counting.cancel()
            return found

        short, long = asyncio.run(scenario())
        assert long >= short + 10

    def test_a_million_tokens_are_too_many(self, http: TestClient) -> None:
        raw = '{"request_id": "r", "model": "m", "token_ids": [' + "100000," * 1_000_000 + "1]}"
        headers = {"content-type": "application/json"}
        response = http.post("/v1/schedule", content=raw, headers=headers)
        assert response.status_code == 413
        assert "1310720 bytes" in error_of(response)["message"]
        assert "block_keys" in error_of(response)["message"]

    def test_tokens_take_a_schema(self, http: TestClient) -> None:
        register(http)
        body = {"request_id": "r1", "model": MODEL, "token_ids": [1, 2]}
        response = http.post("/v1/schedule", json=body)
        assert response.status_code == 400
        assert "send block_keys" in error_of(response)["message"]

    def test_a_restarted_conductor_does_not_call_tokens_wrong(self, http: TestClient) -> None:
        body = {"request_id": "r1", "model": MODEL, "token_ids": [1, 2]}
        response = http.post("/v1/schedule", json=body)
        assert response.status_code == 404
        assert error_of(response)["code"] == "unknown_model"

    def test_asking_again_gives_the_same_and_counts_once(self, http: TestClient) -> None:
        register(http)
        first, second = (http.post("/v1/schedule", json=prompt()).json() for _ in range(2))
        del first["expires_in_s"], second["expires_in_s"]
        assert first == second
        counted = re.findall(r"_decisions_total{.*} (.*)", http.get("/metrics").text)
        assert counted == ["1.0"]

    def test_another_prompt_under_the_same_id_is_a_conflict(self, http: TestClient) -> None:
        register(http)
        http.post("/v1/schedule", json=prompt())
        response = http.post("/v1/schedule", json=prompt(prompt_tokens=1))
        assert (response.status_code, error_of(response)["code"]) == (409, "conflict")

    def test_an_unknown_model_is_not_found(self, http: TestClient) -> None:
        response = http.post("/v1/schedule", json=prompt())
        assert (response.status_code, error_of(response)["code"]) == (404, "unknown_model")

    def test_a_rejection_says_why_and_when_to_come_back(
        self, http: TestClient, core: Recorder
    ) -> None:
        register(http)
        core.reject = Rejection(
            "", "ttft", "the queue is 9 s long", 9.25, 0.03, 2.1, {"queue": 9.0}
        )
        response = http.post("/v1/schedule", json=prompt())
        assert response.status_code == 429
        assert response.headers["retry-after"] == "3", "whole seconds, not before it is worth it"
        assert response.headers["x-tiffin-reject-reason"] == "ttft"
        error = error_of(response)
        assert (error["type"], error["code"]) == ("rate_limit_error", "rejected_ttft")
        assert error["tiffin"] == {
            "request_id": "r1",
            "reason": "ttft",
            "predicted_ttft_s": 9.25,
            "predicted_tbt_s": 0.03,
            "retry_after_s": 2.1,
            "terms": {"queue": 9.0},
        }

    def test_nothing_schedulable_is_503(self, http: TestClient) -> None:
        register(http, role="decode")
        response = http.post("/v1/schedule", json=prompt())
        assert response.status_code == 503
        assert response.headers["x-tiffin-reject-reason"] == "no_prefill"
        assert int(response.headers["retry-after"]) >= 1

    @pytest.mark.parametrize(
        ("seconds", "header"), [(math.inf, "3600"), (math.nan, "1"), (0.0, "1"), (None, "1")]
    )
    def test_retry_after_is_always_a_number(
        self, http: TestClient, core: Recorder, seconds: float | None, header: str
    ) -> None:
        register(http)
        core.reject = Rejection("", "queue_full", "full", retry_after_s=seconds)
        response = http.post("/v1/schedule", json=prompt())
        assert response.headers["retry-after"] == header

    @pytest.mark.parametrize(
        ("changes", "status", "word"),
        [
            ({"prompt_tokens": None}, 400, "send token_ids"),
            ({"token_ids": [1]}, 400, "token_ids say all"),
            ({"namespace": "a"}, 400, "namespace, cache_salt and media go with token_ids"),
            ({"media": [image(0, 1)]}, 400, "namespace, cache_salt and media go with token_ids"),
            ({"media": [image(0, 1)] * 4097}, 422, "<= 4096"),
            ({"media": [image(0, 0)]}, 422, ">= 1"),
            ({"media": [image(-1, 1)]}, 422, ">= 0"),
            ({"media": [image(0, 1, "a\nb")]}, 422, "regex"),
            ({"media": [image(0, 1, "a" * 1025)]}, 422, "<= 1024"),
            ({"media": [{"identifier": "a"}]}, 422, "offset"),
            ({"request_id": ""}, 400, "request_id"),
            ({"request_id": "a/b"}, 400, "request_id"),
            ({"request_id": ".."}, 400, "means something else in a URL"),
            ({"request_id": "a\nb"}, 400, "request_id"),
            ({"request_id": "a\u202eb"}, 400, "request_id"),
            ({"request_id": "a" * 257}, 400, "request_id"),
            ({"block_keys": ["0" * 31]}, 400, r"block_keys\[0\]"),
            ({"block_keys": [HEX, "0" * 33, "0" * 31]}, 400, r"block_keys\[1\]"),
            ({"block_keys": [HEX, " " + "0" * 31]}, 400, r"block_keys\[1\]"),
            ({"block_keys": ["x" * 32]}, 400, r"block_keys\[0\]"),
            ({"block_keys": [7]}, 422, "str"),
            ({"prompt_tokens": 0}, 422, ">= 1"),
            ({"prompt_tokens": True}, 422, "int"),
            ({"prompt_tokens": 10**30}, 422, "<="),
            ({"prompt_tokens": 1.5}, 422, "int"),
            ({"objectives": {"ttft": 1}}, 422, "unknown field"),
            ({"objectives": {"ttft_s": -1}}, 422, "> 0"),
            ({"objectives": {"ttft_s": 1e9}}, 422, "<="),
            ({"priorty": "high"}, 422, "unknown field"),
            ({"exclude": ["a/b"]}, 400, "exclude"),
            ({"exclude": [""]}, 400, "exclude"),
            ({"exclude": ["a"] * 257}, 422, "<= 256"),
            ({"exclude": "i1"}, 422, "array"),
        ],
    )
    def test_what_makes_no_sense_is_refused(
        self, http: TestClient, changes: dict[str, Any], status: int, word: str
    ) -> None:
        register(http)
        response = http.post("/v1/schedule", json=prompt(**changes))
        assert response.status_code == status
        assert re.search(word, error_of(response)["message"]), response.text

    @pytest.mark.parametrize(
        ("media", "word"),
        [
            ([(0, 4), (3, 2)], r"media\[1\] begins at token 3, where others are up to 4"),
            ([(8, 1), (0, 1)], r"media\[1\] begins at token 0"),
            ([(0, 1), (8, 3)], r"media\[1\] is up to token 11 of a prompt of 10"),
        ],
    )
    @pytest.mark.parametrize("route", ["schedule", "blocks/match"])
    def test_images_are_in_order_and_within_the_prompt(
        self, http: TestClient, route: str, media: list[tuple[int, int]], word: str
    ) -> None:
        register(http, block_tokens=16, schema={"canonical": SCHEMA.canonical_bytes().decode()})
        body = {"model": MODEL, "token_ids": list(range(10))}
        body |= {"media": [image(*one) for one in media]}
        body |= {"request_id": "r1"} if route == "schedule" else {}
        response = http.post(f"/v1/{route}", json=body)
        assert response.status_code == 400
        assert re.search(word, error_of(response)["message"]), response.text

    def test_images_make_keys(self, http: TestClient, core: Recorder) -> None:
        register(http, block_tokens=16, schema={"canonical": SCHEMA.canonical_bytes().decode()})
        ids = list(range(40))
        body = prompt(prompt_tokens=None, token_ids=ids, media=[image(20, 5, "cat")])
        assert http.post("/v1/schedule", json=body).status_code == 200
        extras = media_extras([Media("cat", 20, 5)], 16)
        assert core.requests["r1"].keys == SCHEMA.prefix(ids, extras=extras).keys

    def test_the_wrong_field_is_named(self, http: TestClient) -> None:
        body = prompt(objectives={"ttft_s": "soon"})
        assert error_of(http.post("/v1/schedule", json=body))["param"] == "objectives.ttft_s"


class TestEvents:
    def test_they_reach_the_core(self, http: TestClient, core: Recorder) -> None:
        register(http)
        http.post("/v1/schedule", json=prompt())
        for kind in ("alive", "prefill_done", "first_token", "tokens", "finished"):
            body = {"tokens": 4} if kind == "tokens" else {}
            assert http.post(f"/v1/requests/r1/{kind}", json=body).status_code == 204
        assert core.events[0] == RequestEvent("r1", "alive")
        assert core.events[3] == RequestEvent("r1", "tokens", 4)
        response = http.post("/v1/requests/r1/cancelled")
        assert (response.status_code, error_of(response)["code"]) == (404, "unknown_request")

    def test_of_a_race_they_say_which_route(self, http: TestClient, core: Recorder) -> None:
        register(http)
        http.post("/v1/schedule", json=prompt())
        body = {"route": {"prefill": "i1", "decode": "i2"}}
        for kind in ("prefill_began", "prefill_done", "handed_over", "first_token"):
            assert http.post(f"/v1/requests/r1/{kind}", json=body).status_code == 204
            assert core.events[-1] == RequestEvent("r1", kind, route=("i1", "i2"))
        response = http.post("/v1/requests/r1/finished", json=body)
        assert response.status_code == 400
        assert "route goes with" in error_of(response)["message"]
        body["route"]["decode"] = "a/b"
        assert http.post("/v1/requests/r1/first_token", json=body).status_code == 400

    def test_they_need_no_body(self, http: TestClient) -> None:
        register(http)
        http.post("/v1/schedule", json=prompt())
        assert http.post("/v1/requests/r1/first_token").status_code == 204

    def test_ids_are_quoted_in_paths(self, http: TestClient) -> None:
        register(http)
        http.post("/v1/schedule", json=prompt(request_id="chat 1?ä#%"))
        path = "/v1/requests/chat%201%3F%C3%A4%23%25/finished"
        assert http.post(path).status_code == 204

    @pytest.mark.parametrize(
        ("path", "body", "word"),
        [
            ("r1/began", None, "no event 'began'"),
            ("r1/finished", {"tokens": 3}, "tokens goes with"),
            ("a%0Ab/finished", None, "printable"),
        ],
    )
    def test_what_makes_no_sense_is_refused(
        self, http: TestClient, path: str, body: Any, word: str
    ) -> None:
        response = http.post(f"/v1/requests/{path}", json=body)
        assert response.status_code == 400
        assert word in error_of(response)["message"]


class TestEventsInBatches:
    def test_of_several_requests_in_their_order(self, http: TestClient, core: Recorder) -> None:
        register(http)
        for name, tenant in (("r1", ""), ("r1", "acme"), ("r2", "")):
            http.post("/v1/schedule", json=prompt(request_id=name, tenant=tenant))
        events = [
            {"request_id": "r1", "event": "first_token"},
            {"request_id": "r1", "event": "first_token", "tenant": "acme"},
            {"request_id": "r2", "event": "prefill_done"},
            {"request_id": "r1", "event": "tokens", "total_tokens": 17},
            {"request_id": "r1", "event": "finished"},
        ]
        response = http.post("/v1/events", json={"events": events})
        assert (response.status_code, response.json()) == (200, {"taken": 5, "failed": []})
        assert [(e.request_id, e.kind) for e in core.events] == [
            ("r1", "first_token"), ("acme/r1", "first_token"), ("r2", "prefill_done"),
            ("r1", "tokens"), ("r1", "finished"),
        ]  # fmt: skip

    def test_a_bad_one_spoils_no_other(self, http: TestClient, core: Recorder) -> None:
        register(http)
        http.post("/v1/schedule", json=prompt())
        events: list[Any] = [
            {"request_id": "r1", "event": "finished", "tokens": 3},
            {"request_id": "gone", "event": "alive"},
            {"request_id": "r1", "event": "began"},
            {"request_id": "a/b", "event": "alive"},
            {"request_id": "r1", "event": "tokens", "tokens": -1},
            {"request_id": "r1", "event": "tokens", "tokens": 1, "total_tokens": 2},
            {"request_id": "r1", "event": "alive", "colour": "red"},
            7,
            {"request_id": "r1", "event": "first_token"},
        ]
        response = http.post("/v1/events", json={"events": events})
        answer = response.json()
        assert (response.status_code, answer["taken"]) == (200, 1)
        assert [(one["at"], one["status"], one["error"]["code"]) for one in answer["failed"]] == [
            (0, 400, "invalid_request"), (1, 404, "unknown_request"), (2, 400, "invalid_request"),
            (3, 400, "invalid_request"), (4, 422, "invalid_body"), (5, 400, "invalid_request"),
            (6, 422, "invalid_body"), (7, 422, "invalid_body"),
        ]  # fmt: skip
        assert [event.kind for event in core.events] == ["first_token"]

    def test_a_rejection_after_the_prefill_is_told(self, http: TestClient, core: Recorder) -> None:
        register(http)
        body = {"admission": {"mode": "baseline"}}
        assert http.patch("/v1/policy", json=body).status_code == 200
        http.post("/v1/schedule", json=prompt(objectives={"tbt_s": 1e-6}))
        events = [{"request_id": "r1", "event": "prefill_done"}]
        (failed,) = http.post("/v1/events", json={"events": events}).json()["failed"]
        assert (failed["at"], failed["status"]) == (0, 429)
        assert failed["error"]["code"] == "rejected_tbt"
        assert failed["error"]["tiffin"]["request_id"] == "r1"

    def test_a_total_may_be_told_twice(self, http: TestClient, core: Recorder) -> None:
        register(http)
        http.post("/v1/schedule", json=prompt())
        for total in (None, 17, 17, 9, 33):
            event: dict[str, Any] = {"request_id": "r1", "event": "first_token"}
            if total is not None:
                event |= {"event": "tokens", "total_tokens": total}
            http.post("/v1/events", json={"events": [event]})
        flight = core.ledger.get("r1")
        assert flight is not None
        assert flight.answered_tokens == 33
        assert [event.tokens for event in core.events] == [0, 16, 0, 0, 16]

    def test_it_is_bounded(self, http: TestClient) -> None:
        events = [{"request_id": "r", "event": "alive"}] * (EVENTS_MAX + 1)
        assert http.post("/v1/events", json={"events": events}).status_code == 422
        answer = http.post("/v1/events", json={"events": events[1:]}).json()
        assert len(answer["failed"]) == EVENTS_MAX

    def test_others_have_their_turn_meanwhile(self, core: Recorder) -> None:
        """A thousand events take longer than a decision may wait."""
        service = create_app(core).state.service
        texts = [msgspec.Raw(b'{"request_id": "r", "event": "alive"}')] * EVENTS_MAX
        assert turns_of_others(lambda: observe_all(service, texts)) > 1

    @pytest.mark.parametrize("hangs_up", [True, False])
    def test_what_was_given_up_in_the_queue_is_not_taken(
        self, core: Recorder, http: TestClient, hangs_up: bool
    ) -> None:
        """Its client sends it again: a conductor that took both would fall behind with each."""
        register(http)
        http.post("/v1/schedule", json=prompt())
        app = create_app(core)
        body = b'{"events": [{"request_id": "r1", "event": "first_token"}]}'
        scope = {
            "type": "http", "method": "POST", "path": "/v1/events", "query_string": b"",
            "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
            "http_version": "1.1", "scheme": "http", "raw_path": b"/v1/events",
            "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2), "root_path": "",
            "extensions": {GONE: lambda: hangs_up},
        }  # fmt: skip

        async def scenario() -> None:
            came, left = asyncio.Event(), asyncio.Event()

            async def receive() -> dict[str, Any]:
                if not came.is_set():
                    came.set()
                    return {"type": "http.request", "body": body, "more_body": False}
                await left.wait()
                return {"type": "http.disconnect"}

            async def send(_: Any) -> None:
                pass

            async with app.state.service.batch_turn:
                task = asyncio.create_task(app(scope, receive, send))
                await came.wait()
                for _ in range(10):
                    await asyncio.sleep(0)
            await asyncio.wait_for(task, 20)

        asyncio.run(scenario())
        assert [event.kind for event in core.events] == ([] if hangs_up else ["first_token"])


class TestHangUps:
    @pytest.mark.parametrize("hangs_up", [True, False])
    @pytest.mark.parametrize("path", ["/v1/schedule", "/v1/schedules"])
    def test_who_has_hung_up_is_not_placed(
        self, core: Recorder, http: TestClient, path: str, hangs_up: bool
    ) -> None:
        """It may have cancelled the request while its tokens were read."""
        register(http)
        asked = prompt() if path == "/v1/schedule" else {"requests": [prompt()]}
        body = json.dumps(asked).encode()
        app = create_app(core)
        scope = {
            "type": "http", "method": "POST", "path": path, "query_string": b"",
            "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
            "http_version": "1.1", "scheme": "http", "raw_path": path.encode(),
            "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2), "root_path": "",
            "extensions": {GONE: lambda: hangs_up},
        }  # fmt: skip

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(_: Any) -> None:
            pass

        asyncio.run(app(scope, receive, send))
        assert len(core.ledger) == (not hangs_up)


class TestPool:
    def test_plans_say_why_and_who_leads(self, http: TestClient, core: Recorder) -> None:
        empty = {"leads": True, "leader": "", "plans": [], "flips": []}
        assert http.get("/v1/plans").json() == empty
        for name, role in (("p1", "prefill"), ("p2", "prefill"), ("d", "decode")):
            register(http, name, role=role)
        http.post("/v1/schedule", json=prompt())
        core.steering.tick({}, time.monotonic() + 1000.0)
        (plan,) = http.get("/v1/plans").json()["plans"]
        assert (plan["model"], plan["prefill"], plan["decode"]) == (MODEL, 2, 1)
        assert plan["planned_at"] == pytest.approx(time.time() + 1000.0, abs=60.0)
        assert {"name", "value", "unit", "why"} == set(plan["reasons"][0])
        core.steering.lease = LeaderLease("us", 3.0)
        core.steering.lease.answered("them", time.monotonic())
        told = http.get("/v1/plans").json()
        assert (told["leads"], told["leader"]) == (False, "them")
        metrics = http.get("/metrics").text
        assert "tiffin_conductor_leads 0.0" in metrics

    def test_numbers_that_are_infinite_are_null(self, http: TestClient, core: Recorder) -> None:
        register(http, role="decode")  # and nobody prefills
        core.steering.came(MODEL, PromptSums.of(600, 600), time.monotonic())
        core.steering.tick({}, time.monotonic() + 1000.0)
        (plan,) = http.get("/v1/plans").json()["plans"]
        assert (plan["load"], plan["serves_rate"]) == (None, 0.0)

    def test_flips_are_seen_from_their_begin_to_their_end(
        self, http: TestClient, core: Recorder
    ) -> None:
        for name in ("p1", "p2"):
            register(http, name, role="prefill")
        register(http, "d", role="decode")
        http.post("/v1/instances/p1/role", json={"role": "decode"})
        (flip,) = http.get("/v1/plans").json()["flips"]
        assert (flip["instance"], flip["old"], flip["new"]) == ("p1", "prefill", "decode")
        assert (flip["step"], flip["why"]) == ("draining", "asked for")
        assert flip["began_at"] == pytest.approx(time.time(), abs=60.0)
        assert flip["ends_at"] - flip["began_at"] == pytest.approx(120.0)
        core.steering.tick({}, time.monotonic())
        (flip,) = http.get("/v1/plans").json()["flips"]
        assert flip["step"] == "ready"

    def test_drains_are_listed(self, http: TestClient, core: Recorder) -> None:
        assert http.get("/v1/drains").json() == {"drains": []}
        register(http)
        http.post("/v1/schedule", json=prompt())
        http.delete("/v1/instances/i1")
        core.steering.tick(NODES, time.monotonic())
        assert http.put("/v1/nodes/node-a/drain").status_code == 200
        core.steering.tick({}, time.monotonic() + GONE_S)
        node, instance = http.get("/v1/drains").json()["drains"]
        assert (node["kind"], node["name"], node["phase"]) == ("node", "node-a", "lost")
        assert (instance["kind"], instance["name"]) == ("instance", "i1")
        assert (instance["phase"], instance["requests"]) == ("waiting", 1)
        assert 500 < instance["left_s"] <= 600
        assert node["left_s"] == 0

    def test_a_node_is_drained_and_opened_again(self, http: TestClient, core: Recorder) -> None:
        path = "/v1/nodes/node-a/drain"
        for method in ("PUT", "DELETE"):
            response = http.request(method, path)
            assert (response.status_code, error_of(response)["code"]) == (404, "unknown_node")
        core.steering.tick(NODES, time.monotonic())
        told = http.put(path, json={"deadline_s": 60}).json()
        assert (told["kind"], told["name"], told["phase"]) == ("node", "node-a", "closing")
        assert 50 < told["left_s"] <= 60
        again = http.put(path, json={"deadline_s": 600}).json()
        assert 50 < again["left_s"] <= 60, "it goes on as it was asked to"
        (closed,) = core.steering.tick(NODES, time.monotonic()).orders
        core.steering.ended(Ended(closed.number), time.monotonic())
        assert http.delete(path).json()["phase"] == "cancelled"
        response = http.put(path)
        assert (response.status_code, error_of(response)["code"]) == (409, "conflict")
        (opened,) = core.steering.tick(NODES, time.monotonic()).orders
        core.steering.ended(Ended(opened.number), time.monotonic())
        assert http.put(path).status_code == 200

    @pytest.mark.parametrize(
        ("node", "body", "status"),
        [
            ("node-a", {"deadline_s": 0}, 422),
            ("node-a", {"deadline_s": 86_401}, 422),
            ("node-a", {"deadline": 1}, 422),
            ("a%0Ab", {}, 400),
            ("a" * 257, {}, 400),
            ("%2E%2E", {}, 400),
        ],
    )
    def test_a_drain_that_makes_no_sense_is_refused(
        self, http: TestClient, core: Recorder, node: str, body: dict[str, Any], status: int
    ) -> None:
        core.steering.tick(NODES, time.monotonic())
        assert http.put(f"/v1/nodes/{node}/drain", json=body).status_code == status
        assert http.get("/v1/drains").json() == {"drains": []}


class TestInstances:
    def test_they_register_and_are_listed(self, http: TestClient) -> None:
        register(http, labels={"zone": "a"}, load={"running": 3})
        (one,) = http.get("/v1/instances").json()["instances"]
        again = http.get("/v1/instances/i1").json()
        assert 0 <= one.pop("heard_s") <= again.pop("heard_s")
        assert one == again
        assert (one["id"], one["role"], one["status"]) == ("i1", "mixed", "ready")
        assert one["labels"] == {"zone": "a"}
        assert one["load"]["batch"] == 3

    def test_a_heartbeat_alone_takes_an_instance(self, http: TestClient, core: Recorder) -> None:
        response = http.put("/v1/instances/i1", json={"load": {"running": 1}})
        assert (response.status_code, error_of(response)["code"]) == (404, "unknown_instance")
        register(http)
        assert http.put("/v1/instances/i1", json={"load": {"queued": 2}}).status_code == 204
        assert core.loads["i1"].queued == 2

    def test_a_full_heartbeat_does_not_end_a_drain(self, http: TestClient, core: Recorder) -> None:
        register(http)
        assert http.delete("/v1/instances/i1").status_code == 204
        register(http, load={"running": 1})
        assert http.get("/v1/instances/i1").json()["status"] == "draining"
        assert len(core.registrations) == 1
        register(http, batch_max=8)
        assert http.get("/v1/instances/i1").json()["status"] == "ready"

    def test_they_are_removed(self, http: TestClient) -> None:
        register(http)
        assert http.delete("/v1/instances/i1?now=true").status_code == 204
        for response in (
            http.get("/v1/instances/i1"),
            http.delete("/v1/instances/i1"),
            http.delete("/v1/instances/i1?now=true"),
            http.post("/v1/instances/i1/role", json={"role": "decode"}),
        ):
            assert (response.status_code, error_of(response)["code"]) == (404, "unknown_instance")

    def test_they_flip(self, http: TestClient, core: Recorder) -> None:
        register(http)
        alone = http.post("/v1/instances/i1/role", json={"role": "decode"})
        assert (alone.status_code, error_of(alone)["code"]) == (409, "conflict")
        register(http, "i2")
        assert http.post("/v1/instances/i1/role", json={"role": "decode"}).status_code == 204
        assert http.get("/v1/instances/i1").json()["status"] == "draining"
        core.steering.tick({}, time.monotonic())
        one = http.get("/v1/instances/i1").json()
        assert (one["role"], one["status"]) == ("decode", "ready")
        assert http.post("/v1/instances/i1/role", json={"role": "judge"}).status_code == 422

    @pytest.mark.parametrize(
        ("body", "status"),
        [
            ({}, 400),
            ({"model": MODEL}, 400),
            (spec_body(profile="unknown"), 400),
            (spec_body(schema={"canonical": "[]"}), 400),
            (spec_body(schema={"canonical": "{"}), 400),
            (spec_body(schema={"canonical": SCHEMA.canonical_bytes().decode()}), 400),
            (spec_body(load={"running": -1}), 422),
            (spec_body(labels={str(i): "" for i in range(65)}), 422),
            (spec_body(block_tokens=0), 422),
        ],
    )
    def test_what_makes_no_sense_is_refused(self, http: TestClient, body: Any, status: int) -> None:
        response = http.put("/v1/instances/i1", json=body)
        assert response.status_code == status, response.text
        assert http.get("/v1/instances").json()["instances"] == []

    def test_instances_of_a_model_agree_on_its_keys(self, http: TestClient) -> None:
        ours = {"canonical": SCHEMA.canonical_bytes().decode()}
        other = KVSchema.gqa(
            model=MODEL, layers=3, kv_heads=2, head_dim=8, dtype="float16", block_tokens=16
        )
        theirs = {"canonical": other.canonical_bytes().decode()}
        register(http, "i1", block_tokens=16, schema=ours)
        body = spec_body(block_tokens=16, schema=theirs)
        assert http.put("/v1/instances/i2", json=body).status_code == 409
        assert http.put("/v1/instances/i1", json=body).status_code == 204, "it was the only one"

    def test_a_schema_is_read_once_not_with_every_heartbeat(
        self, http: TestClient, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        schema = {"canonical": SCHEMA.canonical_bytes().decode()}
        read: list[str] = []

        def reading(canonical: str) -> KVSchema:
            read.append(canonical)
            return parse_schema(canonical)

        monkeypatch.setattr(conductor_service, "parse_schema", reading)
        for name in ("i1", "i1", "i2"):
            register(http, name, block_tokens=16, schema=schema)
        assert len(read) == 1
        body = spec_body(block_tokens=32, schema=schema)
        assert http.put("/v1/instances/i1", json=body).status_code == 400, "still compared"


class TestBlocks:
    def test_match_lists_the_longest_first(self, http: TestClient, core: Recorder) -> None:
        now = time.monotonic()
        core.hold("node-b", "nvme", [KEY], now)
        core.hold("node-a", "dram", [KEY, KEY[::-1]], now)
        asked = [HEX, KEY[::-1].hex(), "0" * 32]
        found = http.post("/v1/blocks/match", json={"block_keys": asked}).json()
        assert (found["asked_blocks"], found["blocks"]) == (3, 2)
        holders = [(one["holder"], one["blocks"]) for one in found["holders"]]
        assert holders == [("node-a/dram", 2), ("node-b/nvme", 1)]
        assert all(one["age_s"] >= 0 for one in found["holders"])
        one = http.post("/v1/blocks/match?limit=1", json={"block_keys": [HEX]})
        assert len(one.json()["holders"]) == 1

    @pytest.mark.parametrize(
        "body", [{}, {"token_ids": [1]}, {"token_ids": [1], "block_keys": []}, {"model": MODEL}]
    )
    def test_match_takes_one_form_of_a_prefix(self, http: TestClient, body: Any) -> None:
        assert http.post("/v1/blocks/match", json=body).status_code == 400

    def test_hot_prefixes_go_by_their_last_key(self, http: TestClient) -> None:
        register(http)
        keys = [HEX, KEY[::-1].hex()]
        for name in ("a", "b"):
            body = prompt(request_id=name, block_keys=keys)
            assert http.post("/v1/schedule", json=body).status_code == 200
        (hot,) = http.get("/v1/blocks/hot?limit=1").json()["prefixes"]
        assert (hot["model"], hot["blocks"], hot["last_key"]) == (MODEL, 2, keys[1])
        assert http.get("/v1/blocks/hot?limit=0").json() == {"prefixes": []}

    @pytest.mark.parametrize("limit", ["-1", "x", "1001", "1e3", "²", "9" * 5000])
    def test_a_limit_is_a_number(self, http: TestClient, limit: str) -> None:
        assert http.get("/v1/blocks/hot", params={"limit": limit}).status_code == 400


class TestDecisions:
    def test_the_log_latest_first(self, http: TestClient, core: Recorder) -> None:
        register(http, "i1")
        register(http, "i2")
        for name in ("a", "b"):
            http.post("/v1/schedule", json=prompt(request_id=name))
        core.reject = Rejection("", "ttft", "full")
        http.post("/v1/schedule", json=prompt(request_id="c"))
        entries = http.get("/v1/decisions").json()["decisions"]
        assert [one["request_id"] for one in entries] == ["c", "b", "a"]
        assert [one["outcome"] for one in entries] == ["rejection", "decision", "decision"]
        assert entries[1]["candidates_count"] == 2, "instances that could have prefilled it"
        assert entries[1]["candidates"] == []
        shown = http.get("/v1/decisions?outcome=decision&candidates=1&limit=1").json()["decisions"]
        assert [len(one["candidates"]) for one in shown] == [1]
        where = entries[1]["prefill"]
        there = http.get(f"/v1/decisions?instance={where}").json()["decisions"]
        assert [one["request_id"] for one in there] == ["b"]
        assert http.get("/v1/decisions?outcome=maybe").status_code == 400

    def test_why_shows_every_term_the_cheapest_first(self, http: TestClient) -> None:
        register(http, "i1")
        register(http, "i2")
        http.post("/v1/schedule", json=prompt())
        entry = http.get("/v1/decisions/r1/why").json()
        costs = [one["cost"] for one in entry["candidates"]]
        assert len(costs) == 2
        assert costs == sorted(costs)
        assert entry["candidates"][0]["instance"] == entry["prefill"]
        assert entry["candidates"][0]["terms"]
        missing = http.get("/v1/decisions/r2/why")
        assert (missing.status_code, error_of(missing)["code"]) == (404, "unknown_request")

    def test_its_times_are_unix_times(self, http: TestClient) -> None:
        register(http)
        http.post("/v1/schedule", json=prompt())
        decided_at = http.get("/v1/decisions/r1/why").json()["decided_at"]
        assert abs(decided_at - time.time()) < 60


class TestWhatBecameOfIt:
    def test_is_told_with_the_decision(self, http: TestClient, core: Recorder) -> None:
        register(http)
        http.post("/v1/schedule", json=prompt(objectives={"ttft_s": 60.0}))
        why = http.get("/v1/decisions/r1/why").json()
        assert why["became"] == {
            "end": "", "observed_ttft_s": None, "observed_tbt_s": None, "output_tokens": 0,
            "found_tokens": None, "ended_at": None,
        }  # fmt: skip
        events = [
            {"request_id": "r1", "event": "first_token"},
            {"request_id": "r1", "event": "finished", "total_tokens": 17, "found_tokens": 512},
        ]
        http.post("/v1/events", json={"events": events})
        for entry in (
            http.get("/v1/decisions/r1/why").json(),
            http.get("/v1/decisions").json()["decisions"][0],
            http.get("/v1/decisions", params={"kept": "asked"}).json()["decisions"][0],
        ):
            became = entry["became"]
            assert (became["end"], became["output_tokens"]) == ("finished", 17)
            assert became["found_tokens"] == 512
            assert became["observed_ttft_s"] > 0
            assert abs(became["ended_at"] - time.time()) < 60
        assert http.get("/v1/decisions", params={"kept": "lost"}).json()["decisions"] == []

    def test_of_a_rejection_there_is_nothing_but_why(
        self, http: TestClient, core: Recorder
    ) -> None:
        register(http)
        register(http, "i2", role="prefill")
        http.post("/v1/schedule", json=prompt(objectives={"ttft_s": 1e-6}))
        why = http.get("/v1/decisions/r1/why").json()
        assert (why["outcome"], why["became"]) == ("rejection", None)
        assert [one["instance"] for one in why["decode_candidates"]] == ["i1"]
        assert why["decode_left_out"] == {"other_role": 1}
        assert why["output_source"] == "default"
        (kept,) = http.get("/v1/decisions", params={"kept": "ttft"}).json()["decisions"]
        assert kept["request_id"] == "r1"


class TestSettings:
    def test_they_are_changed_in_part(self, http: TestClient) -> None:
        before = http.get("/v1/policy").json()
        after = http.patch("/v1/policy", json={"core": {"log_max": 7}}).json()
        assert after == {**before, "core": {**before["core"], "log_max": 7}}
        assert http.get("/v1/policy").json() == after

    @pytest.mark.parametrize(
        "change",
        [
            {"core": {"log_max": "x"}},
            {"core": {"log_max": 0}},
            {"core": {"log": 1}},
            {"core": None},
            {"policy": {"name": "best"}},
            {"core": {"log_max": 7}, "wait": 1},
        ],
    )
    def test_what_does_not_validate_changes_nothing(self, http: TestClient, change: Any) -> None:
        before = http.get("/v1/policy").json()
        assert http.patch("/v1/policy", json=change).status_code == 400
        assert http.get("/v1/policy").json() == before

    def test_they_are_an_object(self, http: TestClient) -> None:
        assert http.patch("/v1/policy", json=[1]).status_code == 422


class TestHealth:
    def test_alive_at_once_ready_when_something_can_be_scheduled(self, http: TestClient) -> None:
        assert http.get("/livez").json() == {"status": "ok", "reasons": [], "notes": []}
        response = http.get("/readyz")
        assert response.status_code == 503
        assert len(response.json()["reasons"]) == 2
        register(http, "p", role="prefill")
        assert http.get("/readyz").json()["reasons"] == ["no instance that decodes is ready"]
        register(http, "d", role="decode")
        assert http.get("/readyz").status_code == 200

    def test_who_has_no_token_is_not_told_what_is_missing(self, core: Recorder) -> None:
        tokens = Tokens({hashlib.sha256(b"t" * 43).digest(): Grant(frozenset({Right.SCHEDULE}))})
        with TestClient(create_app(core, auth=tokens), base_url="http://localhost") as http:
            known = {"authorization": f"Bearer {'t' * 43}"}
            unknown = {"authorization": f"Bearer {'u' * 43}"}
            assert len(http.get("/readyz", headers=known).json()["reasons"]) == 2
            for headers in ({}, unknown):
                said = http.get("/readyz", headers=headers)
                assert said.status_code == 503
                assert said.json()["reasons"] == ["who sends a token is told"]

    def test_asking_often_counts_instances_once(self, core: Recorder) -> None:
        """Anybody may ask, so it costs the same with any number of instances and nodes."""
        asked: list[int] = []
        core.instances = lambda now: asked.append(1) or []  # type: ignore[method-assign, func-returns-value]

        def feeds() -> str:
            asked.append(2)
            return "a node is away"

        app = create_app(core, reasons=(feeds,), clock=lambda: 5.0)
        with TestClient(app, base_url="http://localhost") as http:
            for _ in range(50):
                assert "a node is away" in http.get("/readyz").json()["reasons"]
        assert asked == [2]

    def test_feeds_say_what_is_missing(self, core: Recorder) -> None:
        app = create_app(core, reasons=(lambda: "the directory is away",))
        with TestClient(app, base_url="http://localhost") as http:
            assert "the directory is away" in http.get("/readyz").json()["reasons"]

    def test_what_stops_is_not_ready(self, core: Recorder) -> None:
        app = create_app(core)
        with TestClient(app, base_url="http://localhost") as http:
            app.state.service.stop()
            assert http.get("/readyz").json()["reasons"] == ["the conductor is stopping"]


class TestLimits:
    @pytest.fixture
    def small(self, core: Recorder) -> Iterator[TestClient]:
        limits = Limits(body_bytes=1000, held_bytes=10_000)
        with TestClient(create_app(core, limits=limits), base_url="http://localhost") as client:
            yield client

    def test_a_body_that_says_it_is_too_large_is_not_read(self, small: TestClient) -> None:
        headers = {"content-type": "application/json", "content-length": "100000000"}
        response = small.post("/v1/schedule", content=b"{}", headers=headers)
        assert response.status_code == 413
        assert response.headers["connection"] == "close"

    def test_one_that_does_not_say_is_read_up_to_the_limit(self, small: TestClient) -> None:
        chunks = iter([b"x" * 600, b"x" * 600])
        headers = {"content-type": "application/json"}
        response = small.post("/v1/schedule", content=chunks, headers=headers)
        assert response.status_code == 413

    @pytest.mark.parametrize(
        ("content", "status"),
        [
            (b"", 400),
            (b"{", 400),
            (b'{"request_id": "\xff", "model": "m"}', 400),
            (b"[" * 900, 422),
            (b'{"a":' * 190, 422),
            (b"null", 422),
            (b'{"request_id": "\\ud800", "model": "m"}', 400),
            (json.dumps(prompt(prompt_tokens=float("nan"))).encode(), 400),
        ],
    )
    def test_what_is_not_the_json_it_should_be(
        self, small: TestClient, content: bytes, status: int
    ) -> None:
        headers = {"content-type": "application/json; charset=utf-8"}
        response = small.post("/v1/schedule", content=content, headers=headers)
        assert response.status_code == status, response.text
        error_of(response)

    @pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
    def test_a_form_of_a_web_page_is_refused(self, small: TestClient, kind: str) -> None:
        response = small.post("/v1/schedule", content=b"{}", headers={"content-type": kind})
        assert response.status_code == 415

    def test_deeply_nested_settings_are_refused(self, http: TestClient) -> None:
        content = b'{"a":' * 100_000 + b"1" + b"}" * 100_000
        headers = {"content-type": "application/json"}
        assert http.patch("/v1/policy", content=content, headers=headers).status_code == 400

    def test_unknown_paths_and_methods_answer_in_the_same_shape(self, http: TestClient) -> None:
        assert error_of(http.get("/v2"))["code"] == "no_such_route"
        response = http.put("/v1/schedule", json={})
        assert error_of(response)["code"] == "method_not_allowed"
        assert response.headers["allow"] == "POST"

    def test_head_is_answered_as_get(self, http: TestClient) -> None:
        register(http)
        for path in ("/livez", "/v1/instances/i1", "/v1/policy"):
            assert http.head(path).status_code == http.get(path).status_code == 200
        assert error_of(http.put("/livez"))["code"] == "method_not_allowed"
        assert http.head("/v1/schedule").status_code == 405

    @pytest.mark.parametrize("value", ["maybe", "2", ""])
    def test_a_flag_is_true_or_false(self, http: TestClient, value: str) -> None:
        register(http)
        response = http.delete("/v1/instances/i1", params={"now": value})
        assert (response.status_code, error_of(response)["code"]) == (400, "invalid_request")
        assert http.get("/v1/instances/i1").json()["status"] == "ready"

    def test_a_defect_is_an_answer_too(self, core: Recorder) -> None:
        def broken(n: int, now: float) -> Any:
            raise ZeroDivisionError("a defect")

        core.finding_hot = broken  # type: ignore[method-assign]
        app = create_app(core)
        client = TestClient(app, base_url="http://localhost", raise_server_exceptions=False)
        response = client.get("/v1/blocks/hot")
        assert response.status_code == 500
        assert "a defect" not in response.text

    def test_also_of_a_route_that_is_served_ahead_of_the_framework(self, core: Recorder) -> None:
        def broken(request: Request, now: float) -> Any:
            raise ZeroDivisionError("a defect")

        core.schedule = broken  # type: ignore[method-assign]
        app = create_app(core)
        client = TestClient(app, base_url="http://localhost", raise_server_exceptions=False)
        body = {"request_id": "r", "model": MODEL, "prompt_tokens": 40}
        response = client.post("/v1/schedule", json=body)
        assert (response.status_code, error_of(response)["code"]) == (500, "internal_error")
        assert "a defect" not in response.text
        with pytest.raises(ZeroDivisionError):  # the server logs it
            TestClient(app, base_url="http://localhost").post("/v1/schedule", json=body)


class TestDoors:
    """Who is let in."""

    READ, SCHEDULE, OPERATE = "r" * 20, "s" * 20, "o" * 20

    @pytest.fixture
    def guarded(self, core: Recorder, tmp_path: Path) -> TestClient:
        path = tmp_path / "tokens"
        path.write_text(f"read {self.READ}\nschedule {self.SCHEDULE}\noperate {self.OPERATE}\n")
        path.chmod(0o600)
        return TestClient(create_app(core, auth=load_tokens(path)), base_url="http://conductor")

    def test_each_route_takes_its_right(self, guarded: TestClient) -> None:
        tokens = {"read": self.READ, "schedule": self.SCHEDULE, "operate": self.OPERATE}
        described = [
            (method, path, operation)
            for path, methods in document()["paths"].items()
            for method, operation in methods.items()
            if operation["operationId"] != "stream"
        ]
        assert len(described) == 27
        for method, template, operation in described:
            path = template.format(
                request_id="r", event="finished", instance="i", node="n", waiter="w"
            )
            if "security" not in operation:
                assert guarded.request(method, path).status_code in (200, 503)
                continue
            needed = operation["security"][0]["token"]
            response = guarded.request(method, path)
            assert (response.status_code, error_of(response)["code"]) == (401, "not_authorized")
            assert response.headers["www-authenticate"].startswith("Bearer")
            for right, token in tokens.items():
                headers = {"authorization": f"Bearer {token}"}
                status = guarded.request(method, path, headers=headers).status_code
                assert (status == 403) == ([right] != needed), (template, right, status)
                assert status != 401

    def test_without_tokens_only_names_of_this_machine_are_answered(self, core: Recorder) -> None:
        app = create_app(core)
        for name, status in {
            "localhost": 200,
            "localhost:7800": 200,
            "127.0.0.1:1": 200,
            "[::1]": 200,
            "[::1]:7800": 200,
            "evil.example": 421,
            "evil.example:7800": 421,
            "10.0.0.1": 421,
            "localhost.evil.example": 421,
        }.items():
            response = TestClient(app).get("/livez", headers={"host": name})
            assert response.status_code == status, name
