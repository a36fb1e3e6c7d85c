"""What else of the OpenAI API and of vLLM's the gateway serves beside completions."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from apisupport import MODEL
from gatewaysupport import CONFIG, PROFILE, Cluster, Whole, cluster, run, until
from hypothesis import given
from hypothesis import strategies as st

from tiffin.conductor.gateway.config import ModelConfig
from tiffin.conductor.gateway.openai.form_fields import read_fields
from tiffin.conductor.gateway.openai.model_aliases import chosen
from tiffin.conductor.gateway.openai.openai_request import (
    LISTENING,
    POOLING,
    RESPONSES,
    SPEECH,
    Wishes,
    read_ask,
)
from tiffin.conductor.gateway.openai.response_ids import holder, new_id
from tiffin.conductor.gateway.openai.token_counter import Counter as TokenCounter
from tiffin.conductor.records import InstanceSpec, Load, Role
from tiffin.conductor.wire.answers import Refusal
from tiffin.kvstore import KVSchema

if TYPE_CHECKING:
    from pathlib import Path


async def said(it: Cluster, path: str, body: dict[str, Any], status: int = 200) -> Any:
    answer = await it.http.post(path, json={"model": MODEL, **body})
    assert answer.status_code == status, answer.text
    return answer.json()


@pytest.mark.parametrize("path", POOLING)
def test_texts_of_one_pass_are_placed_and_counted(path: str) -> None:
    async def scenario() -> None:
        async with cluster(Whole("m0"), config=CONFIG) as it:
            assert (await said(it, path, {"input": "a" * 400}))["path"] == path
            (asked,) = it.core.asked
            assert asked.output_tokens_max == 1
            assert asked.prompt_tokens > 100
            await it.idle()
            assert it.core.kinds[-1] == "finished"

    run(scenario)


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/embeddings", {"input": ["a" * 4096] * 1500}),
     ("/v1/completions", {"prompt": ["a" * 4096] * 1500, "max_tokens": 4})],
)  # fmt: skip
def test_a_batch_of_more_tokens_than_an_instance_has_room_for(
    path: str, body: dict[str, Any]
) -> None:
    """The engine computes its texts one after the other."""

    async def scenario() -> None:
        async with cluster(Whole("m0"), config=CONFIG) as it:
            room = it.core.cluster.kv_capacity_tokens[it.core.cluster.row("m0")]
            await said(it, path, body)
            (asked,) = it.core.asked
            assert room / 4 < asked.prompt_tokens < room
            assert it.number("prompt_tokens_total") > room

    run(scenario)


def test_speech_and_what_is_heard() -> None:
    async def scenario() -> None:
        engine = Whole("m0")
        async with cluster(engine, config=CONFIG) as it:
            spoken = await it.http.post(SPEECH, json={"model": MODEL, "input": "hello"})
            assert (spoken.content, spoken.headers["content-type"]) == (b"RIFF", "audio/wav")
            sound = bytes(range(256)) * 40
            for path in LISTENING:
                heard = await it.http.post(
                    path, data={"model": MODEL, "language": "en"}, files={"file": ("a.wav", sound)}
                )
                assert heard.status_code == 200, heard.text
                assert engine.calls[-1][1]["raw"].count(sound) == 1
                assert "boundary=" in engine.calls[-1][2]["content-type"]
                asked = it.core.asked[-1]
                assert (asked.prompt_tokens, asked.output_tokens_max) == (448, 1)
            minute = {"file": ("a.mp3", bytes(16_000 * 60))}
            await it.http.post(LISTENING[0], data={"model": MODEL}, files=minute)
            assert it.core.asked[-1].prompt_tokens == 896
            none = await it.http.post(LISTENING[0], data={"x": "y"}, files={"file": ("a", sound)})
            assert (none.status_code, none.json()["error"]["param"]) == (400, "model")
            assert (await it.http.post(LISTENING[0], json={})).status_code == 415

    run(scenario)


@given(
    fields=st.lists(st.tuples(st.sampled_from(["a", "file"]), st.binary(max_size=60)), max_size=4),
    at=st.integers(0, 4),
)
def test_the_fields_of_a_form_wherever_they_are(fields: list[tuple[str, bytes]], at: int) -> None:
    parts = [(name, value.replace(b"--mark", b"")) for name, value in fields]
    parts.insert(min(at, len(parts)), ("model", b"m"))
    form = b"".join(
        b'--mark\r\nContent-Disposition: form-data; name="%b"\r\n\r\n%b\r\n' % (n.encode(), v)
        for n, v in parts
    )
    kind = "multipart/form-data; boundary=mark"
    files = [len(value) for name, value in parts if name == "file"]
    found = read_fields(form + b"--mark--\r\n", kind)
    assert found == ("m", False, files[-1] if files else 0)
    streamed = b'--mark\r\nContent-Disposition: form-data; name="stream"\r\n\r\nTrue\r\n'
    assert read_fields(form + streamed + b"--mark--\r\n", kind).stream
    with pytest.raises(Refusal):
        read_fields(form.replace(b'"model"', b'"mode"'), kind)


def test_a_conversation_of_responses_stays_with_its_instance() -> None:
    engines = [Whole(f"m{n}") for n in range(3)]

    async def scenario() -> None:
        async with cluster(*engines, config=CONFIG) as it:
            for _ in range(6):
                first = await said(it, RESPONSES, {"input": "hello", "instructions": "be kind"})
                assert holder(first["id"], ["m0", "m1", "m2"]) == first["at"]
                for _ in range(3):
                    body = {"input": "more", "previous_response_id": first["id"]}
                    again = await said(it, RESPONSES, body)
                    assert again["at"] == first["at"]
                    assert again["id"] != first["id"]
                got = await it.http.get(f"{RESPONSES}/{first['id']}")
                assert got.json()["at"] == first["at"]
                ended = await it.http.post(f"{RESPONSES}/{first['id']}/cancel")
                assert ended.json()["path"] == f"{RESPONSES}/{first['id']}/cancel"
            gone = {"input": "more", "previous_response_id": new_id("m9")}
            assert (await said(it, RESPONSES, gone, 503))["error"]["code"] == "no_instance"
            unknown = await it.http.get(f"{RESPONSES}/{new_id('m9')}")
            assert unknown.json()["error"]["code"] == "unknown_response"

    run(scenario)


async def kept(it: Cluster, engine: Whole) -> str:
    """Where the gateway has the events of a response that the engine keeps."""
    first = await said(it, RESPONSES, {"input": "hello"})
    assert first["at"] == engine.name
    return f"{RESPONSES}/{first['id']}?stream=true&starting_after=3"


def test_the_events_of_a_response_are_passed_on_as_they_come() -> None:
    engine = Whole("m0", hold_at=2)

    async def scenario() -> None:
        async with cluster(engine, config=CONFIG) as it:
            path = await kept(it, engine)
            async with it.http.stream("GET", path) as answer:
                assert answer.headers["content-type"].startswith("text/event-stream")
                assert answer.headers["x-accel-buffering"] == "no"
                pieces = answer.aiter_bytes()
                got = await anext(pieces)
                assert it.gateway.gate.requests == 1
                engine.go.set()
                got += b"".join([piece async for piece in pieces])
            assert got == engine.sent == b"".join(engine.events(chat=False))
            await it.idle()

    run(scenario)


def test_who_leaves_the_events_of_a_response_ends_them() -> None:
    engine = Whole("m0", hold_at=2)

    async def scenario() -> None:
        async with cluster(engine, config=CONFIG) as it:
            async with it.http.stream("GET", await kept(it, engine)) as answer:
                await anext(answer.aiter_bytes())
            await until(lambda: engine.aborted == 1)
            await it.idle()

    run(scenario)


def test_events_of_a_response_that_break_off_end_with_an_error() -> None:
    engine = Whole("m0", die_at=2)

    async def scenario() -> None:
        async with cluster(engine, config=CONFIG) as it:
            answer = await it.http.get(await kept(it, engine))
            *_, last = answer.text.strip().split("\n\n")
            assert json.loads(last.removeprefix("data: "))["error"]["code"] == "engine_failed"
            assert answer.content.startswith(engine.sent)

    run(scenario)


def test_a_full_gateway_has_no_room_for_the_events_of_a_response() -> None:
    engine = Whole("m0", hold_at=2)
    limits = msgspec.structs.replace(CONFIG.limits, requests=1)

    async def scenario() -> None:
        async with cluster(engine, config=msgspec.structs.replace(CONFIG, limits=limits)) as it:
            path = await kept(it, engine)
            async with it.http.stream("GET", path) as answer:
                await anext(answer.aiter_bytes())
                refused = await it.http.get(path)
                assert refused.status_code == 503
                assert refused.json()["error"]["code"] == "gateway_busy"

    run(scenario)


def test_a_conversation_of_responses_with_a_name_that_stands_for_a_model() -> None:
    """What continues a response goes to where that is, whatever the name stands for by then."""
    config = msgspec.structs.replace(CONFIG, aliases={"gpt": {MODEL: 0.5, "sql": 0.5}})
    engines = [Whole(f"m{n}") for n in range(2)]

    async def scenario() -> None:
        async with cluster(*engines, config=config) as it:
            first = await said(it, RESPONSES, {"model": MODEL, "input": "hello"})
            for turn in range(8):
                body = {"input": f"{turn}", "previous_response_id": first["id"]}
                again = await said(it, RESPONSES, {"model": "gpt", **body})
                assert again["at"] == first["at"]
            (engine,) = (one for one in engines if one.name == first["at"])
            asked = {json.loads(body["raw"])["model"] for _, body, _ in engine.calls}
            assert asked == {MODEL}, "no instance has loaded the other one"

    run(scenario)


def test_a_streamed_response_is_counted() -> None:
    counter = TokenCounter()
    events: list[dict[str, Any]] = [
        {"type": "response.created", "response": {"id": "resp_1", "usage": None}},
        {"type": "response.output_text.delta", "delta": "a"},
        {"type": "response.output_text.delta", "delta": "b"},
        {"type": "response.completed", "response": {"usage": {"output_tokens": 3}}},
    ]
    tokens = []
    for event in events:
        counter.feed(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode())
        tokens.append(counter.tokens)
    assert (tokens, counter.ended, counter.failed) == ([0, 1, 2, 3], True, False)
    failed = TokenCounter()
    event = {"type": "response.failed", "response": {"error": {"message": "no"}}}
    failed.feed(f"data: {json.dumps(event)}\n\n".encode())
    assert failed.failed
    assert json.loads(failed.error) == {"message": "no"}


def test_tokens_of_a_text_by_any_instance() -> None:
    dead, alive = Whole("m0", status=503), Whole("m1")

    async def scenario() -> None:
        async with cluster(dead, alive, config=CONFIG) as it:
            for _ in range(4):
                assert (await said(it, "/tokenize", {"prompt": "ab"}))["tokens"] == [97, 98]
            assert (await said(it, "/detokenize", {"tokens": [1]}))["path"] == "/detokenize"
            answer = await it.http.post("/tokenize", json={"model": "x", "prompt": "a"})
            assert answer.status_code == 503

    run(scenario)


def test_models_and_what_stands_for_them() -> None:
    aliases = {"gpt": {MODEL: 1.0}, "gone": {"nobody-has-this": 1.0}}
    config = msgspec.structs.replace(CONFIG, aliases=aliases)

    async def scenario() -> None:
        engine = Whole("m0")
        async with cluster(engine, config=config) as it:
            listed = (await it.http.get("/v1/models")).json()["data"]
            assert [one["id"] for one in listed] == [MODEL, "gpt"]
            assert (await it.http.get("/v1/models/gpt")).json()["id"] == "gpt"
            assert (await it.http.get("/v1/models/gone")).status_code == 404
            await said(it, "/v1/completions", {"model": "gpt", "prompt": [1]})
            assert engine.completions[-1]["model"] == MODEL

    run(scenario)


def test_shares_of_a_canary_and_that_few_conversations_move() -> None:
    names = [f"conversation {n}".encode() for n in range(4000)]
    before = {name: chosen({"old": 0.9, "new": 0.1}, name) for name in names}
    assert Counter(before.values())["new"] == pytest.approx(400, abs=60)
    after = {name: chosen({"old": 0.8, "new": 0.2}, name) for name in names}
    moved = [name for name in names if before[name] != after[name]]
    assert all(after[name] == "new" for name in moved)
    assert len(moved) == pytest.approx(400, abs=80)


def test_an_adapter_goes_to_where_it_is_loaded() -> None:
    engines = [Whole(f"m{n}") for n in range(3)]

    async def scenario() -> None:
        async with cluster(*engines, config=CONFIG) as it:
            spec = InstanceSpec(
                "m2", MODEL, Role.MIXED, PROFILE, url=engines[2].url, labels={"adapters": "sql,fr"}
            )
            it.core.register(spec, it.gateway.clock())
            it.core.heartbeat("m2", Load(), it.gateway.clock())
            await it.gateway.refresh()
            listed = (await it.http.get("/v1/models")).json()["data"]
            assert [one["id"] for one in listed] == [MODEL, "sql", "fr"]
            for _ in range(6):
                await said(it, "/v1/completions", {"model": "sql", "prompt": [1]})
            assert [len(one.completions) for one in engines] == [0, 0, 6]
            assert engines[2].completions[-1]["model"] == "sql"
            assert it.core.asked[-1].model == MODEL
            for _ in range(6):
                await said(it, "/v1/completions", {"prompt": [1]})
            assert len(engines[2].completions) < 12

    run(scenario)


def test_blocks_of_an_adapter_are_its_own(tmp_path: Path) -> None:
    schema = KVSchema.gqa(
        model=MODEL, layers=1, kv_heads=1, head_dim=8, dtype="float16", block_tokens=4
    )
    (tmp_path / "schema").write_bytes(schema.canonical_bytes())
    config = msgspec.structs.replace(
        CONFIG, models={MODEL: ModelConfig(schema_file=str(tmp_path / "schema"))}
    )
    body = json.dumps({"model": "sql", "prompt": list(range(9))}).encode()

    async def scenario() -> None:
        async with cluster(Whole("m0"), config=config) as it:
            size = partial(it.gateway._tokenizing.size, base=MODEL, keyed=False)
            ask = read_ask("/v1/completions", body, Wishes("r"))
            adapter, base = await size(ask), await size(replace(ask, model=MODEL))
            assert adapter.keys == schema.prefix(range(9), namespace="lora:sql").keys
            assert base.keys == schema.prefix(range(9)).keys

    run(scenario)
