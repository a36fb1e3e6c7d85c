"""The gateway between clients, a real conductor and stub engines: what each of them receives."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from gatewaysupport import MODEL, Engine, Heard, changed, cluster, run, skip, until
from latencysupport import total

from tiffin.conductor.gateway import gateway
from tiffin.conductor.gateway.config import GatewayLimits, ModelConfig
from tiffin.conductor.records import Role
from tiffin.conductor.web.auth import load_tokens
from tiffin.kvstore import KVSchema
from tiffin.kvstore.format.media import Media, media_extras

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

SPLIT = {"disaggregation": {"form": "remote"}}
SCHEMA = KVSchema.gqa(
    model=MODEL, layers=2, kv_heads=2, head_dim=8, dtype="float16", block_tokens=16
)
PROMPT = "Where does the lunch of Mumbai come from, and who carries it?"


def pair(**decode: Any) -> tuple[Engine, Engine]:
    return Engine("p0", Role.PREFILL), Engine("d0", Role.DECODE, **decode)


class TestPassingThrough:
    def test_a_stream_byte_by_byte(self) -> None:
        async def scenario() -> None:
            engine = Engine("m0")
            async with cluster(engine) as it:
                async with it.stream({"prompt": PROMPT}) as response:
                    body = await response.aread()
                assert response.status_code == 200
                assert response.headers["content-type"].startswith("text/event-stream")
                assert body == engine.sent
                assert response.headers["x-tiffin-prefill"] == "m0"
                assert response.headers["x-tiffin-decode"] == "m0"
                assert response.headers["x-tiffin-cached-tokens"] == "0"
                assert "x-tiffin-fallback" not in response.headers
                await it.idle()
                assert it.core.kinds[0] == "first_token"
                assert it.core.kinds[-1] == "finished"
                assert it.core.tokens == len(engine.answer)
                assert it.core.statistics()["in_flight"] == 0

        run(scenario)

    def test_a_chat_is_sent_as_it_came(self) -> None:
        """Fields that the gateway does not know are passed on to the engine."""

        async def scenario() -> None:
            engine = Engine("m0")
            async with cluster(engine) as it:
                asked = {"messages": [{"role": "user", "content": PROMPT}], "top_k": 5}
                async with it.stream(asked, "chat/completions") as response:
                    assert await response.aread() == engine.sent
                (sent,) = engine.completions
                assert sent.pop("stream_options") == {"include_usage": True}  # which is not told
                assert sent == {"model": MODEL, "stream": True, **asked}

        run(scenario)

    def test_an_answer_in_one_piece(self) -> None:
        async def scenario() -> None:
            async with cluster(Engine("m0")) as it:
                response = await it.post({"prompt": PROMPT})
                assert response.status_code == 200
                assert response.json()["choices"][0]["text"] == "Dabbawallas deliver."
                await it.idle()
                told = [(e.kind, e.tokens) for e in it.core.events]
                why = "nobody saw the first token, so nothing is said of when it came"
                assert told == [("finished", 5)], why

        run(scenario)

    def test_an_engines_refusal_is_passed_on(self) -> None:
        async def scenario() -> None:
            async with cluster(Engine("m0", status=400)) as it:
                for stream in (False, True):
                    response = await it.post({"prompt": PROMPT, "stream": stream})
                    assert response.status_code == 400
                    assert response.json()["error"]["type"] == "BadRequestError"
                await it.idle()
                assert it.core.kinds == ["cancelled", "cancelled"]

        run(scenario)

    @pytest.mark.parametrize(
        ("path", "kind"), [("completions", "cmpl-"), ("chat/completions", "chatcmpl-")]
    )
    def test_the_answer_of_vllm_has_the_id_of_the_request(self, path: str, kind: str) -> None:
        """vLLM puts the kind before the id that it receives."""

        async def scenario() -> None:
            engine = Engine("m0")
            async with cluster(engine) as it:
                asked = {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}
                response = await it.post(asked, path)
                given = [headers.get("x-request-id") for where, _, headers in engine.calls]
                assert response.headers["x-request-id"] == f"{kind}{given[-1]}"
                assert response.headers["x-tiffin-request-id"] == f"{kind}{given[-1]}"

        run(scenario)

    def test_tokens_are_reported_in_batches(self) -> None:
        async def scenario() -> None:
            engine = Engine("m0", answer=["x"] * 100)
            async with cluster(engine, config=changed(report_s=60.0)) as it:
                async with it.stream({"prompt": PROMPT}) as response:
                    await response.aread()
                await it.idle()
                told = [e.tokens for e in it.core.events if e.kind in ("tokens", "finished")]
                assert sum(told) == 99
                assert len(told) <= 4, "32 at a time, or more"

        run(scenario)

    def test_the_clients_key_stays_here(self, tmp_path: Path) -> None:
        """Engines get the gateway's key for engines, not the client's key for the gateway."""
        keys, engine_key = tmp_path / "keys", tmp_path / "engine"
        for path, text in ((keys, "client-key-0123456789"), (engine_key, "engine-key-0123456789")):
            path.write_text(text)
            path.chmod(0o600)

        async def scenario() -> None:
            engine = Engine("m0")
            config = changed(engine_token_file=str(engine_key))
            async with cluster(engine, config=config, auth=load_tokens(keys)) as it:
                it.http.headers["authorization"] = "Bearer client-key-0123456789"
                trace = {"traceparent": "00-ab-cd-01"}
                assert (await it.post({"prompt": PROMPT}, headers=trace)).status_code == 200
                for _, _, headers in engine.calls:
                    assert headers["authorization"] == "Bearer engine-key-0123456789"
                assert engine.calls[-1][2]["traceparent"] == "00-ab-cd-01"

        run(scenario)


class TestWhatWasFound:
    """The conductor hears how much of a prompt an engine had, beside what it counted on."""

    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize("asks", [False, True])
    def test_where_one_instance_does_all(self, stream: bool, asks: bool) -> None:
        async def scenario() -> None:
            engine = Engine("m0", cached=96)
            async with cluster(engine) as it:
                asked: dict[str, Any] = {"prompt": PROMPT, "stream": stream}
                if asks:
                    asked["stream_options"] = {"include_usage": True}
                response = await it.post(asked)
                assert (b'"cached_tokens"' in response.content) == (asks or not stream)
                assert await found(it, response) == 96

        run(scenario)

    def test_where_the_prompt_is_computed(self) -> None:
        async def scenario() -> None:
            prefill, decode = pair()
            prefill.cached, decode.cached = 64, 128
            async with cluster(prefill, decode, settings=SPLIT) as it:
                assert await found(it, await it.post({"prompt": PROMPT, "stream": True})) == 64

        run(scenario)

    def test_an_engine_that_does_not_say(self) -> None:
        async def scenario() -> None:
            async with cluster(Engine("m0")) as it:
                assert await found(it, await it.post({"prompt": PROMPT, "stream": True})) is None

        run(scenario)


async def found(it: Any, response: Any) -> int | None:
    """What the conductor has heard of an answered request."""
    name = response.headers["x-tiffin-request-id"]
    while True:
        outcome = it.core.log.get(name)
        became = None if outcome is None else it.core.log.became(outcome)
        if became is not None and became.end:
            assert became.end == "finished"
            return became.found_tokens
        await asyncio.sleep(0.01)


class TestDisaggregated:
    @pytest.mark.parametrize("stream", [False, True])
    def test_prefill_hands_over_to_decode(self, stream: bool) -> None:
        async def scenario() -> None:
            prefill, decode = pair()
            async with cluster(prefill, decode, settings=SPLIT) as it:
                asked = {
                    "prompt": PROMPT,
                    "stream": stream,
                    "max_tokens": 64,
                    "min_tokens": 2,
                    "stream_options": {"include_usage": True},
                }
                response = await it.post(asked, headers={"x-request-id": "lunch-1"})
                assert response.status_code == 200
                assert response.headers["x-request-id"] == "lunch-1"
                own = response.headers["x-tiffin-request-id"]
                assert response.headers["x-tiffin-prefill"] == "p0"
                assert response.headers["x-tiffin-decode"] == "d0"
                (first,) = prefill.completions
                assert (first["max_tokens"], first["stream"]) == (1, False)
                assert "min_tokens" not in first
                assert "stream_options" not in first
                assert first["kv_transfer_params"]["do_remote_decode"] is True
                (second,) = decode.completions
                assert second["max_tokens"] == 64
                told = second.pop("kv_transfer_params")
                assert told["remote_block_ids"] == [7, 8]
                assert second == {"model": MODEL, **asked}
                for path, _, headers in prefill.calls + decode.calls:
                    named = own.removeprefix("cmpl-")
                    assert path == "/tokenize" or headers["x-request-id"] == named
                await it.idle()
                assert it.core.kinds[0] == "prefill_done"
                assert it.core.kinds[-1] == "finished"
                assert it.core.events[0].request_id == own

        run(scenario)

    def test_over_the_pool_the_number_of_stored_blocks_travels_alone(self) -> None:
        async def scenario() -> None:
            prefill, decode = pair()
            config = changed(models={MODEL: ModelConfig(handoff="pool")})
            async with cluster(prefill, decode, settings=SPLIT, config=config) as it:
                assert (await it.post({"prompt": PROMPT})).status_code == 200
                assert prefill.completions[0]["kv_transfer_params"] == {"tiffin": {}}
                assert decode.completions[0]["kv_transfer_params"] == {"tiffin": {"blocks": 1}}

        run(scenario)

    @pytest.mark.parametrize("handoff", ["pool", "stream", "vllm"])
    @pytest.mark.parametrize(("tokens", "stored"), [(600, 512), (1024, 1024), (100, 0)])
    def test_a_pool_hands_over_whole_blocks(self, handoff: Any, tokens: int, stored: int) -> None:
        """The rest is computed where it is decoded, and nowhere else."""
        ids = list(range(tokens))

        async def scenario() -> None:
            prefill, decode = pair()
            config = changed(models={MODEL: ModelConfig(handoff=handoff)})
            async with cluster(prefill, decode, settings=SPLIT, config=config) as it:
                if handoff == "stream":
                    decode.hold_at = 0
                answer = asyncio.create_task(it.post({"prompt": ids, "max_tokens": 9}))
                await until(lambda: "prefill_done" in it.core.kinds)
                decode.go.set()
                assert (await answer).status_code == 200
                count = tokens if handoff == "vllm" else stored
                asked = [body["prompt"] for body in prefill.completions]
                assert asked == ([ids[:count]] if count else [])
                (body,) = decode.completions
                assert body["prompt"] == ids
                assert ("kv_transfer_params" in body) == bool(count)

        run(scenario)

    def test_a_prompt_that_the_engine_cuts_is_left_as_it_is(self) -> None:
        async def scenario() -> None:
            prefill, decode = pair()
            config = changed(models={MODEL: ModelConfig(handoff="pool")})
            async with cluster(prefill, decode, settings=SPLIT, config=config) as it:
                asked = {"prompt": list(range(600)), "truncate_prompt_tokens": 550}
                assert (await it.post(asked)).status_code == 200
                assert prefill.completions[0]["prompt"] == asked["prompt"]

        run(scenario)

    def test_what_must_be_computed_in_one_place_is(self) -> None:
        """vLLM has one set of transfer parameters per request, and so one prompt."""

        async def scenario() -> None:
            prefill, decode = pair()
            async with cluster(prefill, decode, settings=SPLIT) as it:
                for asked in ({"prompt": ["a", "b"]}, {"prompt": "a", "n": 2}):
                    response = await it.post(asked)
                    assert response.status_code == 200
                    assert response.headers["x-tiffin-prefill"] == "d0"
                assert prefill.completions == []
                assert len(decode.completions) == 2

        run(scenario)

    def test_a_refusal_of_the_prefill_is_the_answer(self) -> None:
        async def scenario() -> None:
            prefill, decode = pair()
            prefill.status = 400
            async with cluster(prefill, decode, settings=SPLIT) as it:
                response = await it.post({"prompt": PROMPT, "stream": True})
                assert response.status_code == 400
                assert decode.completions == []

        run(scenario)

    def test_the_conductor_may_refuse_after_the_prefill(self) -> None:
        """Admission in the mode "baseline" checks decode only then."""

        async def scenario() -> None:
            prefill, decode = pair()
            settings = {**SPLIT, "admission": {"mode": "baseline"}}
            async with cluster(prefill, decode, settings=settings) as it:
                headers = {"x-tiffin-tbt-ms": "0.001"}
                response = await it.post({"prompt": PROMPT}, headers=headers)
                assert response.status_code == 429
                assert int(response.headers["retry-after"]) >= 1
                assert response.json()["error"]["code"] == "rejected_tbt"
                assert len(prefill.completions) == 1
                assert decode.completions == []
                await it.idle()
                assert it.core.kinds == ["prefill_done"]

        run(scenario)


class TestWhatTheConductorIsAsked:
    def test_headers_become_wishes(self) -> None:
        async def scenario() -> None:
            async with cluster(Engine("m0")) as it:
                headers = {
                    "x-request-id": "r-1",
                    "x-tiffin-priority": "high",
                    "x-tiffin-tenant": "acme",
                    "x-tiffin-ttft-ms": "2500",
                    "x-tiffin-tbt-ms": "50",
                    "x-tiffin-urgent": "true",
                }
                asked = {"prompt": PROMPT, "max_completion_tokens": 9, "stream": True}
                response = await it.post(asked, headers=headers)
                assert response.headers["x-request-id"] == "r-1"
                (request,) = it.core.asked
                assert (request.priority, request.tenant) == ("high", "acme")
                assert (request.objectives.ttft_s, request.objectives.tbt_s) == (2.5, 0.05)
                assert (request.output_tokens_max, request.urgent) == (9, True)

        run(scenario)

    def test_one_label_of_several_requests_is_in_the_way_of_none(self) -> None:
        """Agents and meshes give all requests of a task the same one."""

        async def scenario() -> None:
            engine = Engine("m0", hold_at=1)
            async with cluster(engine) as it:
                label, prompts = {"x-request-id": "trace-7"}, ("a lunch", "a dinner", "a lunch")
                async with AsyncExitStack() as stack:
                    answers = [
                        await stack.enter_async_context(it.stream({"prompt": one}, headers=label))
                        for one in prompts
                    ]
                    assert [one.status_code for one in answers] == [200] * 3
                    assert {one.headers["x-request-id"] for one in answers} == {"trace-7"}
                    own = {one.headers["x-tiffin-request-id"] for one in answers}
                    assert len(own) == 3
                    engine.go.set()
                    for one in answers:
                        await one.aread()
                await it.idle()
                assert {event.request_id for event in it.core.events} == own
                assert len({headers["x-request-id"] for path, _, headers in engine.calls
                            if path != "/tokenize"}) == 3  # fmt: skip

        run(scenario)

    @pytest.mark.parametrize(
        "label", ["..", ".", "a/b", "r" * 2000, "n\u00e4her", "a\tb", '"; x', "%00"]
    )
    def test_a_label_of_any_form_is_given_back(self, label: str) -> None:
        async def scenario() -> None:
            async with cluster(Engine("m0")) as it:
                headers = {"x-request-id": label.encode("latin-1")}
                response = await it.post({"prompt": PROMPT}, headers=headers)
                assert response.status_code == 200
                given = dict(response.headers.raw)[b"x-request-id"]
                assert given == label.encode("latin-1")

        run(scenario)

    def test_what_is_known_of_the_answers_length(self) -> None:
        """The client's class and estimate; or its tenant, whose answers are alike, as the class."""

        async def scenario() -> None:
            async with cluster(Engine("m0")) as it:
                told = {"x-tiffin-output-class": "summary", "x-tiffin-output-tokens": "40"}
                await it.post({"prompt": PROMPT, "max_tokens": 100}, headers=told)
                await it.post({"prompt": PROMPT}, headers={"x-tiffin-tenant": "acme"})
                first, second = it.core.asked
                assert (first.output_class, first.output_tokens) == ("summary", 40)
                assert first.output_tokens_max == 100
                assert (second.output_class, second.output_tokens) == ("acme", None)

        run(scenario)

    def test_headers_that_do_not_count(self, tmp_path: Path) -> None:
        keys = tmp_path / "keys"
        keys.write_text("client-key-0123456789")
        keys.chmod(0o600)

        async def scenario() -> None:
            config = changed(honour=())
            async with cluster(Engine("m0"), config=config, auth=load_tokens(keys)) as it:
                it.http.headers["authorization"] = "Bearer client-key-0123456789"
                headers = {"x-tiffin-priority": "high", "x-tiffin-tenant": "acme"}
                assert (await it.post({"prompt": PROMPT}, headers=headers)).status_code == 200
                (request,) = it.core.asked
                assert request.priority == "normal"
                assert request.tenant.startswith("key-"), "the key's digest, never the key"
                assert "client" not in request.tenant

        run(scenario)

    @pytest.mark.parametrize(
        ("headers", "param"),
        [
            ({"x-tiffin-ttft-ms": "soon"}, "x-tiffin-ttft-ms"),
            ({"x-tiffin-tbt-ms": "-1"}, "x-tiffin-tbt-ms"),
            ({"x-tiffin-ttft-ms": "nan"}, "x-tiffin-ttft-ms"),
            ({"x-tiffin-urgent": "yes"}, "x-tiffin-urgent"),
            ({"x-tiffin-output-tokens": "0"}, "x-tiffin-output-tokens"),
            ({"x-tiffin-output-tokens": "1e3"}, "x-tiffin-output-tokens"),
        ],
    )
    def test_headers_that_make_no_sense(self, headers: dict[str, str], param: str) -> None:
        async def scenario() -> None:
            async with cluster(Engine("m0")) as it:
                response = await it.post({"prompt": PROMPT}, headers=headers)
                assert response.status_code == 400
                assert response.json()["error"]["param"] == param
                assert it.core.asked == []

        run(scenario)

    def test_keys_by_the_engines_tokens_and_our_schema(self, tmp_path: Path) -> None:
        schema = tmp_path / "schema.json"
        schema.write_bytes(SCHEMA.canonical_bytes())

        async def scenario() -> None:
            model = ModelConfig(schema_file=str(schema), namespace="acme")
            async with cluster(Engine("m0"), config=changed(models={MODEL: model})) as it:
                response = await it.post({"prompt": PROMPT})
                assert response.headers["x-tiffin-tokens"] == "engine"
                (request,) = it.core.asked
                tokens = [ord(c) for c in PROMPT]
                assert request.prompt_tokens == len(tokens)
                assert request.keys == SCHEMA.prefix(tokens, "acme").keys
                assert len(request.keys) == 3

        run(scenario)

    def test_a_chat_with_images_has_the_keys_that_its_engine_makes(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        """The engine names the images; where it does not, the chat has a length alone."""
        ids, media = list(range(70)), [Media("cat", 20, 30), Media("dog", 50, 3)]
        features = {
            "mm_hashes": {"image": ["dog", "cat"]},
            "mm_placeholders": {
                "image": [{"offset": 50, "length": 3}, {"offset": 20, "length": 30}]
            },
        }
        odd = {**features, "mm_hashes": {"image": ["dog"]}}
        beyond = {"token_ids": ids[:40], "features": features}
        part = {"type": "image_url", "image_url": {"url": "x"}}
        chat = {"messages": [{"role": "user", "content": [part]}], "temperature": 0.5}
        extras = media_extras(media, SCHEMA.block_tokens)
        expected = SCHEMA.prefix(ids, extras=extras).keys

        async def scenario() -> None:
            engine = Engine("m0")
            async with cluster(engine) as it:
                it.service.models.learn(MODEL, SCHEMA, set)
                await it.gateway.refresh()
                engine.rendered = 200, {"token_ids": ids, "features": features, "more": 1}
                await it.post(chat, "chat/completions")
                path, body, _ = engine.calls[0]
                assert path == "/v1/chat/completions/render"
                assert body == {"model": MODEL, **chat, "mm_payload": "none"}
                assert [path for path, *_ in engine.calls].count("/tokenize") == 0
                (request,) = it.core.asked
                assert (request.prompt_tokens, request.keys) == (70, expected)
                for rendered in (
                    (200, {"token_ids": ids, "features": odd}),
                    (200, beyond),
                    (200, {}),
                    (400, {}),
                    (500, {}),
                    (403, {}),
                ):
                    engine.calls.clear()
                    it.gateway._engines._renders_again.clear()
                    engine.rendered = rendered
                    assert (await it.post(chat, "chat/completions")).status_code == 200
                    assert [path for path, *_ in engine.calls][:2] == [
                        "/v1/chat/completions/render",
                        "/tokenize",
                    ]
                    request = it.core.asked[-1]
                    assert (request.prompt_tokens, request.keys) == (len(str([part])), ())
                engine.calls.clear()
                await it.post(chat, "chat/completions")
                assert engine.calls[0][0] == "/tokenize", "who does not render is not asked again"
                assert "refuses the gateway's key" not in caplog.text

        run(scenario)

    def test_the_second_time_the_prompt_is_cached(self, tmp_path: Path) -> None:
        schema = tmp_path / "schema.json"
        schema.write_bytes(SCHEMA.canonical_bytes())

        async def scenario() -> None:
            model = ModelConfig(schema_file=str(schema))
            engine = Engine("m0")
            async with cluster(engine, config=changed(models={MODEL: model})) as it:
                spec = dataclasses.replace(it.core.cluster.spec("m0"), block_tokens=16)
                it.core.register(spec, asyncio.get_running_loop().time())
                prompt = np.arange(70).tolist()
                for cached in ("0", "64"):
                    response = await it.post({"prompt": prompt, "stream": True})
                    assert response.headers["x-tiffin-tokens"] == "client"
                    await it.idle()
                    assert response.headers["x-tiffin-cached-tokens"] == cached

        run(scenario)

    def test_without_a_tokenizer_lengths_are_estimated(self) -> None:
        async def scenario() -> None:
            async with cluster(Engine("m0", tokenizes=False)) as it:
                response = await it.post({"prompt": PROMPT})
                assert response.headers["x-tiffin-tokens"] == "estimated"
                (request,) = it.core.asked
                assert request.prompt_tokens == round(len(PROMPT) / 4)
                assert request.keys == ()

        run(scenario)

    def test_a_rejection_is_passed_on(self) -> None:
        async def scenario() -> None:
            engine = Engine("m0")
            async with cluster(engine) as it:
                headers = {"x-tiffin-ttft-ms": "0.001"}
                response = await it.post({"prompt": PROMPT}, headers=headers)
                assert response.status_code == 429
                assert int(response.headers["retry-after"]) >= 1
                error = response.json()["error"]
                assert (error["type"], error["code"]) == ("rate_limit_error", "rejected_ttft")
                assert error["tiffin"]["predicted_ttft_s"] > 0
                assert response.headers["x-request-id"].startswith("cmpl-")
                assert engine.completions == []
                await it.idle()
                assert it.core.events == [], "what was never placed is not cancelled"

        run(scenario)

    def test_an_unknown_model(self) -> None:
        async def scenario() -> None:
            async with cluster(Engine("m0")) as it:
                response = await it.http.post("/v1/completions", json={"model": "x", "prompt": "a"})
                assert response.status_code == 404
                assert response.json()["error"]["code"] == "unknown_model"

        run(scenario)

    def test_without_any_instance_no_model_is_called_unknown(self) -> None:
        async def scenario() -> None:
            async with cluster() as it:
                response = await it.post({"prompt": "a"})
                assert response.status_code == 503
                assert response.json()["error"]["code"] == "no_instance"
                assert "retry-after" in response.headers

        run(scenario)

    @pytest.mark.parametrize(
        ("field", "twice"),
        [
            ("kv_transfer_params", b'"kv_transfer_params": {"a": 1}, "kv_transfer_params": null'),
            ("kv_transfer_params", rb'"\u006bv_transfer_params": {}, "kv_transfer_params": null'),
            ("model", b'"model": "m"'),
            ("a", b'"vllm_xargs": {"a": 1, "a": 2}'),
        ],
    )
    def test_a_field_that_stands_twice_is_refused(self, field: str, twice: bytes) -> None:
        """The engine may take the one that was not checked."""

        async def scenario() -> None:
            engine = Engine("m0")
            async with cluster(engine) as it:
                body = b'{"model": "%s", "prompt": "a", %s}' % (MODEL.encode(), twice)
                headers = {"content-type": "application/json"}
                response = await it.http.post("/v1/completions", content=body, headers=headers)
                assert response.status_code == 400, response.text
                assert response.json()["error"]["param"] == field
                assert engine.completions == []

        run(scenario)

    @pytest.mark.parametrize(
        ("body", "status"),
        [
            ({"max_tokens": 5.0}, 200),
            ({"n": 1.0}, 200),
            ({"stream": 0}, 200),
            ({"max_tokens": 5.5}, 400),
            ({"n": "many"}, 400),
            ({"stream": 2}, 400),
        ],
    )
    def test_numbers_are_those_of_engines(self, body: dict[str, Any], status: int) -> None:
        async def scenario() -> None:
            async with cluster(Engine("m0")) as it:
                response = await it.post({"prompt": "a", **body})
                assert response.status_code in (status, 422 if status == 400 else status)

        run(scenario)

    @pytest.mark.parametrize(
        ("sent", "tenant"),
        [
            ("Müller".encode(), "Müller"),
            ("日本".encode(), "日本"),
            ("Müller".encode("latin-1"), "Müller"),
        ],
    )
    def test_tenants_are_named_in_any_script(self, sent: bytes, tenant: str) -> None:
        async def scenario() -> None:
            async with cluster(Engine("m0")) as it:
                headers = {"x-tiffin-tenant": sent}
                response = await it.post({"prompt": PROMPT}, headers=headers)
                assert response.status_code == 200, response.text
                (request,) = it.core.asked
                assert request.tenant == tenant

        run(scenario)

    def test_text_that_was_cut_within_a_character_is_said(self) -> None:
        async def scenario() -> None:
            async with cluster(Engine("m0")) as it:
                body = rb'{"model": "m", "prompt": "\ud83d\u0041"}'
                headers = {"content-type": "application/json"}
                response = await it.http.post("/v1/completions", content=body, headers=headers)
                assert response.status_code == 400
                assert "half a character" in response.json()["error"]["message"]

        run(scenario)

    def test_an_answer_that_the_conductor_cuts(self) -> None:
        """Admission may shorten answers before it rejects; the engine gets the new limit."""

        class Cutting(Heard):
            def schedule(self, request: Any, now: float) -> Any:
                decided = super().schedule(request, now)
                return dataclasses.replace(decided, output_tokens_max=3)

        async def scenario(monkeypatch: pytest.MonkeyPatch) -> None:
            monkeypatch.setattr("gatewaysupport.Heard", Cutting)
            engine = Engine("m0")
            async with cluster(engine) as it:
                await it.post({"prompt": PROMPT, "max_tokens": 100, "seed": 7})
                await it.post({"prompt": PROMPT, "max_tokens": 2})
                sent = engine.completions
                assert (sent[0]["max_tokens"], sent[0]["seed"]) == (3, 7)
                assert sent[1]["max_tokens"] == 2

        with pytest.MonkeyPatch.context() as monkeypatch:
            asyncio.run(scenario(monkeypatch))

    @pytest.mark.parametrize("split", [False, True])
    def test_a_smaller_model_is_asked_in_place_of_the_one_that_was(self, split: bool) -> None:
        """And the answer's headers say so, with whatever else was given up."""

        class Smaller(Heard):
            def schedule(self, request: Any, now: float) -> Any:
                decided = super().schedule(request, now)
                degraded = ("smaller_model:tiny", "best_effort")
                return dataclasses.replace(decided, model="tiny", degraded=degraded)

        async def scenario(monkeypatch: pytest.MonkeyPatch) -> None:
            monkeypatch.setattr("gatewaysupport.Heard", Smaller)
            both = [Engine("p0", Role.PREFILL), Engine("d0", Role.DECODE)]
            engines = both if split else [Engine("m0")]
            settings = {"disaggregation": {"form": "remote"}}
            async with cluster(*engines, settings=settings) as it:
                response = await it.post({"prompt": PROMPT, "seed": 7})
                sent = [body for engine in engines for body in engine.completions]
                assert [(body["model"], body["seed"]) for body in sent] == [("tiny", 7)] * len(
                    engines
                )
                assert response.headers["x-tiffin-degraded"] == "smaller_model:tiny, best_effort"

        with pytest.MonkeyPatch.context() as monkeypatch:
            asyncio.run(scenario(monkeypatch))

    @pytest.mark.parametrize("chat", [False, True])
    def test_a_running_answer_ends_at_the_cap_of_its_class(self, chat: bool) -> None:
        """The stream ends as at a limit, and says why; the instance's connection is closed, and the
        conductor hears that the answer has ended."""

        async def scenario() -> None:
            engine = Engine("m0", hold_at=4)
            async with cluster(engine) as it:
                row = it.core.cluster.row("m0")
                it.core.patch({"admission": {"cap_classes": ["low"]}}, 0.0)
                it.core.output_caps._caps[row] = 3
                await it.gateway.refresh()
                said = [{"role": "user", "content": "Hi"}]
                body: dict[str, Any] = {"messages": said} if chat else {"prompt": "Hi"}
                path = "/v1/chat/completions" if chat else "/v1/completions"
                for priority in ("low", "high"):
                    asked = {**body, "model": MODEL, "stream": True}
                    headers = {"x-tiffin-priority": priority}
                    response = await it.http.post(path, json=asked, headers=headers)
                    events = [
                        json.loads(line[6:]) for line in response.text.splitlines()
                        if line.startswith("data: {")
                    ]  # fmt: skip
                    assert response.text.endswith("data: [DONE]\n\n")
                    assert response.text.count("[DONE]") == 1
                    last = events[-1]["choices"][0]
                    cut = events[-1].get("tiffin", {}).get("degraded")
                    assert cut == (["cut_answer:3"] if priority == "low" else None)
                    if cut:
                        assert last["finish_reason"] == "length"
                    engine.go.set()
                await it.idle()
                assert it.core.kinds.count("finished") == 2
                assert it.number("cut_answers_total") == 1

        run(scenario)

    @pytest.mark.parametrize("asked", [{"stream": True, "n": 2}, {"stream": False}])
    def test_answers_in_one_piece_or_with_several_choices_are_not_cut(
        self, asked: dict[str, Any]
    ) -> None:
        async def scenario() -> None:
            async with cluster(Engine("m0")) as it:
                it.core.patch({"admission": {"cap_classes": ["low"]}}, 0.0)
                it.core.output_caps._caps[it.core.cluster.row("m0")] = 1
                await it.gateway.refresh()
                headers = {"x-tiffin-priority": "low"}
                response = await it.post({"prompt": PROMPT, **asked}, headers=headers)
                assert response.status_code == 200
                assert "cut_answer" not in response.text
                assert it.number("cut_answers_total") == 0

        run(scenario)


class TestTheDoor:
    def test_bodies_that_are_refused(self) -> None:
        async def scenario() -> None:
            limits = GatewayLimits(body_bytes=1024)
            async with cluster(Engine("m0"), config=changed(limits=limits)) as it:
                post = it.http.post
                for content, status in (
                    (b"{", 400),
                    (b"[]", 400),
                    (b'{"prompt": "a"}', 400),
                    (b'{"model": 7}', 400),
                    (b'{"model": "\xff"}', 400),
                    (b"x" * 2000, 413),
                    (b"[" * 1000, 400),
                ):
                    headers = {"content-type": "application/json"}
                    response = await post("/v1/completions", content=content, headers=headers)
                    assert response.status_code == status, content[:20]
                    assert response.json()["error"]["message"]
                assert (await post("/v1/completions", content=b"a=1")).status_code == 415
                assert it.core.asked == []

        run(scenario)

    @pytest.mark.parametrize(
        "smuggled",
        [
            {"kv_transfer_params": {"remote_host": "10.0.0.66", "do_remote_prefill": True}},
            {"vllm_xargs": {"kv_transfer_params": {"remote_host": "10.0.0.66"}}},
        ],
    )
    def test_clients_do_not_say_where_blocks_come_from(self, smuggled: dict[str, Any]) -> None:
        """Otherwise an engine would connect to any address that a client names."""

        async def scenario() -> None:
            engine = Engine("m0")
            async with cluster(engine) as it:
                response = await it.post({"prompt": PROMPT, **smuggled})
                assert response.status_code == 400
                assert response.json()["error"]["param"] == "kv_transfer_params"
                assert engine.calls == []

        run(scenario)

    def test_keys_and_rights(self, tmp_path: Path) -> None:
        keys = tmp_path / "keys"
        keys.write_text("schedule writer-0123456789abc\nread reader-0123456789abc\n")
        keys.chmod(0o600)

        async def scenario() -> None:
            async with cluster(Engine("m0"), auth=load_tokens(keys)) as it:
                reader = {"authorization": "Bearer reader-0123456789abc"}
                writer = {"authorization": "Bearer writer-0123456789abc"}
                assert (await it.post({"prompt": "a"})).status_code == 401
                assert (await it.post({"prompt": "a"}, headers=reader)).status_code == 403
                assert (await it.post({"prompt": "a"}, headers=writer)).status_code == 200
                get = it.http.get
                assert (await get("/v1/models", headers=reader)).status_code == 200
                assert (await get("/metrics")).status_code == 401
                assert (await get("/livez")).status_code == 200

        run(scenario)

    def test_web_pages_of_allowed_origins(self) -> None:
        async def scenario() -> None:
            page, other = "https://chat.example.com", "https://evil.example"
            ask = {"access-control-request-method": "POST"}
            ask["access-control-request-headers"] = "authorization, content-type"
            allow, path = "access-control-allow-origin", "/v1/completions"
            async with cluster(Engine("m0")) as it:
                for headers in ({"origin": page, **ask}, {"origin": page}):
                    response = await it.http.options(path, headers=headers)
                    assert response.status_code == 405
                    assert allow not in response.headers
            async with cluster(Engine("m0"), config=changed(allowed_origins=(page,))) as it:
                response = await it.http.options(path, headers={"origin": page, **ask})
                assert (response.status_code, response.headers[allow]) == (200, page)
                assert "authorization" in response.headers["access-control-allow-headers"]
                for stream in (True, False):
                    body = {"prompt": PROMPT, "stream": stream}
                    response = await it.post(body, headers={"origin": page})
                    assert (response.status_code, response.headers[allow]) == (200, page)
                response = await it.post({"model": 7}, headers={"origin": page})
                assert (response.status_code, response.headers[allow]) == (400, page)
                response = await it.http.options(path, headers={"origin": other, **ask})
                assert response.status_code == 400
                assert allow not in (await it.post(body, headers={"origin": other})).headers
                assert allow not in (await it.post(body)).headers

        run(scenario)

    def test_without_keys_only_this_machine(self) -> None:
        async def scenario() -> None:
            async with cluster(Engine("m0")) as it:
                headers = {"host": "evil.example:7900"}
                assert (await it.post({"prompt": "a"}, headers=headers)).status_code == 421

        run(scenario)

    def test_too_many_at_a_time(self) -> None:
        async def scenario() -> None:
            engine = Engine("m0", hold_at=1)
            limits = GatewayLimits(requests=1)
            async with cluster(engine, config=changed(limits=limits)) as it:
                async with it.stream({"prompt": PROMPT}) as response:
                    busy = await it.post({"prompt": PROMPT})
                    assert busy.status_code == 503
                    assert busy.headers["retry-after"] == "1"
                    assert busy.json()["error"]["code"] == "gateway_busy"
                    engine.go.set()
                    await response.aread()
                await it.idle()
                assert (await it.post({"prompt": PROMPT})).status_code == 200

        run(scenario)

    def test_a_class_that_leaves_room_for_others(self) -> None:
        async def scenario() -> None:
            engine = Engine("m0", hold_at=1)
            limits = GatewayLimits(requests=2, class_shares={"low": 0.5})
            low = {"x-tiffin-priority": "low"}
            async with cluster(engine, config=changed(limits=limits)) as it:
                async with it.stream({"prompt": PROMPT}) as response:
                    busy = await it.post({"prompt": PROMPT}, headers=low)
                    assert busy.status_code == 503
                    assert "what is left is not for 'low'" in busy.json()["error"]["message"]
                    engine.go.set()
                    assert (await it.post({"prompt": PROMPT})).status_code == 200
                    await response.aread()
                await it.idle()
                assert (await it.post({"prompt": PROMPT}, headers=low)).status_code == 200

        run(scenario)

    def test_too_much_at_a_time(self) -> None:
        async def scenario() -> None:
            engine = Engine("m0", hold_at=1)
            limits = GatewayLimits(held_bytes=1024)
            async with (
                cluster(engine, config=changed(limits=limits)) as it,
                it.stream({"prompt": "a" * 700}) as response,
            ):
                assert (await it.post({"prompt": "a" * 700})).status_code == 503
                engine.go.set()
                await response.aread()

        run(scenario)

    def test_models_health_and_metrics(self) -> None:
        async def scenario() -> None:
            async with cluster(Engine("m0"), Engine("m1")) as it:
                models = (await it.http.get("/v1/models")).json()
                assert models["object"] == "list"
                assert [one["id"] for one in models["data"]] == [MODEL]
                assert (await it.http.get("/livez")).json()["status"] == "ok"
                for path in ("/readyz", "/health", "/ping"):
                    assert (await it.http.get(path)).status_code == 200
                answer = await it.post({"prompt": PROMPT, "stream": True})
                text = (await it.http.get("/metrics")).content
                answers = {"route": "/v1/completions", "status": "200"}
                assert total(text, "tiffin_gateway_requests_total", **answers) == 1
                instance = answer.headers["x-tiffin-decode"]
                labels = {"instance": instance, "model": MODEL, "role": "mixed"}
                assert total(text, "tiffin_gateway_ttft_seconds_count", **labels) == 1
                assert total(text, "tiffin_gateway_itl_seconds_count", **labels) == 4, "of 5 tokens"
                assert total(text, "tiffin_gateway_conductor_up") == 1
                assert (await it.http.get("/v1/nothing")).json()["error"]["code"] == "no_such_route"
                assert (await it.http.get("/v1/completions")).status_code == 405

        run(scenario)

    def test_ttft_begins_at_the_head_as_clients_see_it(self) -> None:
        async def scenario() -> None:
            async with cluster(Engine("m0")) as it:

                async def slowly() -> AsyncIterator[bytes]:
                    yield f'{{"model": "{MODEL}", "stream": true, '.encode()
                    await until(lambda: it.gateway.gate.requests == 1)
                    skip(3.0)
                    yield b'"prompt": "a"}'

                headers = {"content-type": "application/json"}
                answer = await it.http.post("/v1/completions", content=slowly(), headers=headers)
                assert answer.status_code == 200
                await it.idle()
                assert it.number("ttft_seconds_sum") >= 3.0
                assert it.number("request_duration_seconds_sum") >= 3.0

        run(scenario)

    def test_not_ready_without_instances(self) -> None:
        async def scenario() -> None:
            async with cluster() as it:
                for path in ("/health", "/ping"):
                    assert (await it.http.get(path)).status_code == 503
                response = await it.http.get("/readyz")
                assert response.status_code == 503
                assert response.json()["reasons"] == ["no instance is known"]

        run(scenario)


def test_a_long_answer_in_one_piece_keeps_its_place() -> None:
    """The conductor forgets requests without events, and an answer that is not streamed makes
    none by itself."""

    async def scenario() -> None:
        engine = Engine("m0", hold_at=0)
        settings = {"core": {"decision_ttl_s": 4.5}}
        async with cluster(engine, settings=settings) as it:
            asked = asyncio.create_task(it.post({"prompt": PROMPT}))
            await until(lambda: bool(engine.completions))
            for told in range(1, 5):  # every 1.5 s
                skip(1.5)
                await until(lambda told=told: it.core.kinds.count("tokens") >= told)
            it.core.tick(asyncio.get_running_loop().time())
            assert it.core.statistics()["in_flight"] == 1
            engine.go.set()
            assert (await asked).status_code == 200

    run(scenario)


def test_twenty_clients_at_once() -> None:
    async def scenario() -> None:
        engines = [Engine(f"m{i}") for i in range(3)]
        async with cluster(*engines) as it:

            async def one(number: int) -> None:
                async with it.stream({"prompt": f"{number} {PROMPT}"}) as response:
                    body = await response.aread()
                assert body == b"".join(engines[0].events(chat=False))

            await asyncio.gather(*(one(number) for number in range(20)))
            await it.idle()
            assert it.core.kinds.count("finished") == 20
            assert it.core.statistics()["in_flight"] == 0
            assert all(engine.completions for engine in engines), "the conductor spreads them"

    run(scenario)


def test_memory_that_peaks_have_left_goes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    given = list[None]()
    monkeypatch.setattr(gateway, "_GIVE_BACK_S", 0.001)
    monkeypatch.setattr(gateway, "give_back", lambda: given.append(None))

    async def scenario() -> None:
        async with cluster(Engine("m0")):
            await until(lambda: len(given) > 1)

    run(scenario)
