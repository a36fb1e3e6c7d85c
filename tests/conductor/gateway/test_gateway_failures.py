"""What a client sees, and what the conductor hears, when an engine, the conductor or a client
disappears."""

from __future__ import annotations

import asyncio
import dataclasses
import gzip
import json
import re
import zlib
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from gatewaysupport import (
    MODEL,
    TIMES,
    Engine,
    changed,
    cluster,
    only_the_first_dies,
    run,
    skip,
    until,
)

from tiffin.conductor.client.http_session import NotConnected
from tiffin.conductor.errors import ConductorUnavailable, UnknownModel
from tiffin.conductor.gateway.config import GatewayLimits
from tiffin.conductor.records import Decision, Role
from tiffin.conductor.web.auth import load_tokens

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from gatewaysupport import Cluster

    from tiffin.conductor.gateway.config import GatewayTimeouts

SPLIT = {"disaggregation": {"form": "remote"}}
PROMPT = "Where does the lunch of Mumbai come from, and who carries it?"
CHAT = [{"role": "user", "content": PROMPT}]
# What vLLM 0.32 sends after the 200 when its engine process is killed.
VLLM_DIED = (
    b'data: {"error": {"message": "EngineCore encountered an issue. See stack trace (above) for '
    b'the root cause.", "type": "InternalServerError", "param": null, "code": 500}}\n\n'
    b"data: [DONE]\n\n"
)
# Nothing listens at the discard port.
NOWHERE = "http://127.0.0.1:9"


def times(**changes: float) -> GatewayTimeouts:
    return msgspec.structs.replace(TIMES, **changes)


def move(it: Cluster, name: str, url: str) -> None:
    """Register the instance with another URL at the conductor."""
    spec = dataclasses.replace(it.core.cluster.spec(name), url=url)
    it.core.register(spec, asyncio.get_running_loop().time())


def lose_answers(it: Cluster) -> None:
    """The conductor decides, but its answers are lost."""
    client = it.gateway._client
    schedule = client.schedule

    async def lost(*arguments: Any, **named: Any) -> Any:
        await schedule(*arguments, **named)
        raise ConductorUnavailable("no answer came in time")

    client.schedule = lost  # type: ignore[method-assign]


def events_of(body: bytes) -> list[Any]:
    """The events of a stream, each decoded; [DONE] as it is."""
    texts = [part.removeprefix(b"data: ") for part in body.split(b"\n\n") if part]
    return [text if text == b"[DONE]" else json.loads(text) for text in texts]


async def answers_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """An instance that answers the first request of a connection and hangs up at the second."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", head.lower())
    assert length is not None
    await reader.readexactly(int(length[1]))
    answer = b'{"choices": [{"index": 0, "text": "on its way"}]}'
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n")
    writer.write(b"content-length: %d\r\n\r\n%b" % (len(answer), answer))
    await reader.read(1)
    writer.close()


class TestAnInstanceIsGone:
    def test_not_if_it_hangs_up_on_an_idle_connection_as_a_request_is_sent(self) -> None:
        async def scenario() -> None:
            server = await asyncio.start_server(answers_once, "127.0.0.1", 0)
            port = server.sockets[0].getsockname()[1]
            async with server, cluster(Engine("m0")) as it:
                move(it, "m0", f"http://127.0.0.1:{port}")
                for _ in range(4):
                    response = await it.post({"prompt": PROMPT})
                    assert response.status_code == 200, response.text
                await it.idle()

        run(scenario)

    def test_not_if_a_busy_gateway_was_late_to_connect(self) -> None:
        async def scenario() -> None:
            async with cluster(Engine("m0")) as it:
                http, late = it.gateway._engines._http, iter([True])
                send = http.send

                async def once_late(*arguments: Any) -> Any:
                    if next(late, False):
                        raise NotConnected("in 2 s", late=True)
                    return await send(*arguments)

                http.send = once_late  # type: ignore[method-assign]
                assert (await it.post({"prompt": [1, 2, 3]})).status_code == 200
                assert it.number("rescheduled_total") == 0

        run(scenario)

    def test_before_it_has_begun_another_one_does_it(self) -> None:
        async def scenario() -> None:
            engines = Engine("m0"), Engine("m1")
            async with cluster(*engines) as it:
                move(it, "m0", NOWHERE)
                for _ in range(4):
                    response = await it.post({"prompt": PROMPT, "stream": True})
                    assert response.status_code == 200
                    assert response.headers["x-tiffin-decode"] == "m1"
                    assert "x-tiffin-fallback" not in response.headers
                assert it.number("rescheduled_total") >= 1
                assert {request.exclude for request in it.core.asked} == {(), ("m0",)}
                await it.idle()
                assert it.core.statistics()["in_flight"] == 0

        run(scenario)

    def test_the_conductor_that_noticed_decides_anew(self) -> None:
        """It has removed the instance, so the same id gets another decision."""

        async def scenario() -> None:
            prefills = Engine("p0", Role.PREFILL), Engine("p1", Role.PREFILL)
            decode = Engine("d0", Role.DECODE)
            async with cluster(*prefills, decode, settings=SPLIT) as it:
                for engine in prefills:
                    engine.compute.clear()
                asked = asyncio.create_task(it.post({"prompt": PROMPT, "stream": True}))
                await until(lambda: any(engine.completions for engine in prefills))
                dead, alive = sorted(prefills, key=lambda engine: not engine.completions)
                it.core.remove(dead.name, asyncio.get_running_loop().time())
                dead.die_at = -1
                dead.compute.set()
                alive.compute.set()
                response = await asked
                assert response.status_code == 200
                assert response.headers["x-tiffin-prefill"] == alive.name
                assert "x-tiffin-fallback" not in response.headers
                assert it.core.statistics()["rescheduled"] == 1
                await it.idle()
                assert it.core.kinds[-1] == "finished"

        run(scenario)

    def test_one_that_nobody_can_replace(self) -> None:
        async def scenario() -> None:
            async with cluster(Engine("m0")) as it:
                move(it, "m0", NOWHERE)
                response = await it.post({"prompt": PROMPT})
                assert response.status_code == 503
                assert response.json()["error"]["code"] == "no_instance"
                await it.idle()
                assert it.core.statistics()["in_flight"] == 0

        run(scenario)

    def test_it_is_not_tried_forever(self) -> None:
        async def scenario() -> None:
            engines = [Engine(f"m{i}", status=503) for i in range(6)]
            async with cluster(*engines) as it:
                response = await it.post({"prompt": PROMPT})
                assert response.status_code == 502
                assert response.json()["error"]["code"] == "engine_failed"
                assert sum(len(engine.completions) for engine in engines) == 3
                await it.idle()
                assert it.core.statistics()["in_flight"] == 0

        run(scenario)

    def test_before_the_first_token_of_a_stream(self) -> None:
        """The client has got nothing yet, so it does not notice the failure."""

        async def scenario() -> None:
            engines = only_the_first_dies(Engine("m0", die_at=0), Engine("m1", die_at=0))
            async with cluster(*engines) as it:
                response = await it.post({"prompt": PROMPT, "stream": True})
                assert response.status_code == 200
                assert events_of(response.content)[-1] == b"[DONE]"

        run(scenario)

    def test_in_the_middle_of_a_stream(self) -> None:
        """Sent tokens can't be taken back: the stream ends with an error, after whole events."""

        async def scenario() -> None:
            async with cluster(Engine("m0", die_at=3), Engine("m1", die_at=3)) as it:
                response = await it.post({"prompt": PROMPT, "stream": True})
                assert response.status_code == 200
                *tokens, last = events_of(response.content)
                assert [one["choices"][0]["text"] for one in tokens] == ["Dabba", "wal", "las"]
                assert last["error"]["code"] == "engine_failed"
                assert it.number("broken_streams_total") == 1
                await it.idle()
                assert it.core.kinds[-1] == "cancelled"
                assert it.core.tokens == 3

        run(scenario)

    @pytest.mark.parametrize("status", [500, 502, 503, 504])
    @pytest.mark.parametrize("stream", [True, False])
    def test_an_instance_that_says_so(self, stream: bool, status: int) -> None:
        async def scenario() -> None:
            engines = Engine("m0", status=status), Engine("m1")
            async with cluster(*engines) as it:
                for _ in range(3):
                    response = await it.post({"prompt": PROMPT, "stream": stream})
                    assert response.status_code == 200
                    assert response.headers["x-tiffin-decode"] == "m1"
                    assert "x-tiffin-fallback" not in response.headers
                assert engines[0].completions, "it was tried"

        run(scenario)

    def test_decode_is_gone_after_the_prefill(self) -> None:
        """The prompt is prefilled again, for another decode instance."""

        async def scenario() -> None:
            prefill = Engine("p0", Role.PREFILL)
            decodes = only_the_first_dies(
                Engine("d0", Role.DECODE, die_at=-1), Engine("d1", Role.DECODE, die_at=-1)
            )
            async with cluster(prefill, *decodes, settings=SPLIT) as it:
                response = await it.post({"prompt": PROMPT, "stream": True})
                assert response.status_code == 200
                assert len(prefill.completions) == 2
                ids = [headers["x-request-id"] for path, _, headers in prefill.calls if "c" in path]
                assert len(set(ids)) == 2, "an engine refuses an id that it has seen"

        run(scenario)


class TestAnInstanceIsSlow:
    def test_no_first_token(self) -> None:
        async def scenario() -> None:
            engine = Engine("m0", hold_at=0)
            config = changed(timeouts=times(first_token_s=4.0))
            async with cluster(engine, config=config) as it:
                asked = asyncio.create_task(it.post({"prompt": PROMPT, "stream": True}))
                await until(lambda: bool(engine.completions))
                skip(4.0)
                response = await asked
                assert response.status_code == 504
                assert response.json()["error"]["code"] == "engine_timeout"
                await until(lambda: engine.aborted == 1)
                assert len(engine.completions) == 1, "another one would take as long again"
                await it.idle()
                assert it.core.kinds == ["cancelled"]

        run(scenario)

    def test_a_stream_that_falls_silent(self) -> None:
        async def scenario() -> None:
            engine = Engine("m0", hold_at=2)
            config = changed(timeouts=times(idle_s=4.0))
            async with cluster(engine, config=config) as it:
                async with it.stream({"prompt": PROMPT}) as response:
                    body, chunks = b"", response.aiter_raw()
                    while body.count(b"\n\n") < 2:
                        body += await anext(chunks)
                    skip(4.0)
                    body += b"".join([chunk async for chunk in chunks])
                *tokens, last = events_of(body)
                assert len(tokens) == 2
                assert last["error"]["code"] == "engine_failed"
                await until(lambda: engine.aborted == 1)

        run(scenario)

    def test_a_stream_that_is_too_long(self) -> None:
        async def scenario() -> None:
            engine = Engine("m0", hold_at=2)
            config = changed(timeouts=times(total_s=4.0))
            async with cluster(engine, config=config) as it:
                async with it.stream({"prompt": PROMPT}) as response:
                    chunks = response.aiter_raw()
                    body = await anext(chunks)
                    skip(4.0)
                    body += b"".join([chunk async for chunk in chunks])
                assert events_of(body)[-1]["error"]["code"] == "timeout"
                await until(lambda: engine.aborted == 1)
                late = asyncio.create_task(it.post({"prompt": PROMPT}))
                await until(lambda: len(engine.completions) == 2)
                skip(4.0)
                assert (await late).status_code == 504
                await until(lambda: engine.aborted == 2)

        run(scenario)


class TestAnInstanceIsOdd:
    def test_a_prefill_that_is_no_json(self) -> None:
        async def scenario() -> None:
            prefill = Engine("p0", Role.PREFILL, odd=("text/html", b"<p>welcome</p>"))
            async with cluster(prefill, Engine("d0", Role.DECODE), settings=SPLIT) as it:
                response = await it.post({"prompt": PROMPT})
                assert response.status_code == 502
                assert response.json()["error"]["code"] == "engine_failed"

        run(scenario)

    def test_one_piece_where_a_stream_was_asked_for(self) -> None:
        async def scenario() -> None:
            async with cluster(Engine("m0", odd=("application/json", b'{"choices": []}'))) as it:
                response = await it.post({"prompt": PROMPT, "stream": True})
                assert response.headers["content-type"] == "application/json"
                assert response.content == b'{"choices": []}'

        run(scenario)

    def test_a_stream_that_ends_before_it_has_begun(self) -> None:
        async def scenario() -> None:
            engines = Engine("m0", odd=("text/event-stream", b": hello\n\n")), Engine("m1")
            async with cluster(*engines) as it:
                for _ in range(2):
                    response = await it.post({"prompt": PROMPT, "stream": True})
                    assert response.headers["x-tiffin-decode"] == "m1"

        run(scenario)

    def test_a_stream_that_stops_without_an_end(self) -> None:
        async def scenario() -> None:
            token = b'data: {"choices": [{"text": "a"}]}\n\n'
            engine = Engine("m0", odd=("text/event-stream", token + b"data: {"))
            async with cluster(engine) as it:
                response = await it.post({"prompt": PROMPT, "stream": True})
                assert response.content.startswith(token), "half an event is not passed on"
                assert len(events_of(response.content)) == 2
                assert events_of(response.content)[1]["error"]["code"] == "engine_failed"

        run(scenario)

    @pytest.mark.parametrize("path", ["completions", "chat/completions"])
    def test_an_engine_that_dies_before_its_first_token_and_says_so(self, path: str) -> None:
        """vLLM answers 200 at once, and its HTTP server outlives its engine for a moment."""

        async def scenario() -> None:
            head = b'data: {"choices": [{"delta": {"role": "assistant", "content": ""}}]}\n\n'
            died = (head if path != "completions" else b"") + VLLM_DIED
            engines = Engine("m0", odd=("text/event-stream", died)), Engine("m1")
            async with cluster(*engines) as it:
                for _ in range(2):
                    body = {"prompt": PROMPT} if path == "completions" else {"messages": CHAT}
                    response = await it.post({**body, "stream": True}, path)
                    assert response.headers["x-tiffin-decode"] == "m1"
                    assert b"error" not in response.content
                assert engines[0].completions, "it was asked, and another one in its place"
                assert it.number("broken_streams_total") == 0

        run(scenario)

    def test_an_engine_that_dies_after_its_first_token_and_says_so(self) -> None:
        async def scenario() -> None:
            content = b'data: {"choices": [{"text": "a"}]}\n\n' + VLLM_DIED
            async with cluster(Engine("m0", odd=("text/event-stream", content))) as it:
                response = await it.post({"prompt": PROMPT, "stream": True})
                assert response.content == content
                assert it.number("broken_streams_total") == 1

        run(scenario)

    def test_an_error_in_a_stream_is_passed_on(self) -> None:
        async def scenario() -> None:
            content = b'data: {"error": {"message": "no"}}\n\ndata: [DONE]\n\n'
            async with cluster(Engine("m0", odd=("text/event-stream", content))) as it:
                response = await it.post({"prompt": PROMPT, "stream": True})
                assert response.content == content
                await it.idle()
                assert it.core.kinds[-1] == "cancelled"

        run(scenario)

    @pytest.mark.parametrize("stream", [True, False])
    def test_an_answer_that_does_not_end(self, stream: bool) -> None:
        async def scenario() -> None:
            kind = "text/event-stream" if stream else "application/json"
            limits = GatewayLimits(answer_bytes=1024)
            engine = Engine("m0", odd=(kind, b"x" * (5 << 20)))
            async with cluster(engine, config=changed(limits=limits)) as it:
                for _ in range(4):
                    response = await it.post({"prompt": PROMPT, "stream": stream})
                    assert response.status_code == 502
                    error = response.json()["error"]
                    assert error["code"] == "answer_too_large"
                    limit = "4194304 bytes in an" if stream else "1024 bytes, which is limits.answ"
                    assert limit in error["message"]
                    assert response.headers["x-should-retry"] == "false"
                assert len(engine.completions) == 4
                assert it.gateway.breakers.open(it.gateway.clock()) == []

        run(scenario)

    def test_an_event_that_does_not_end_behind_others(self) -> None:
        async def scenario() -> None:
            content = b'data: {"choices": [{"index": 0, "text": "a"}]}\n\n' + b"x" * (5 << 20)
            engines = [Engine(name, odd=("text/event-stream", content)) for name in ("m0", "m1")]
            async with cluster(*engines) as it:
                for number in range(1, 5):
                    response = await it.post({"prompt": PROMPT, "stream": True})
                    first, last = response.content.split(b"\n\n")[:2]
                    assert b'"text": "a"' in first
                    assert b"answer_too_large" in last
                    assert len(engines[0].completions + engines[1].completions) == number
                assert it.gateway.breakers.open(it.gateway.clock()) == []

        run(scenario)

    @pytest.mark.parametrize("encoding", ["gzip", "deflate", "identity", "br"])
    def test_a_stream_that_comes_compressed_or_ends_lines_with_cr(self, encoding: str) -> None:
        async def scenario() -> None:
            pack = {"gzip": gzip.compress, "deflate": zlib.compress}.get(encoding, bytes)
            events = b"".join(Engine("").events(chat=True)).replace(b"\n", b"\r")
            engines = [
                Engine(name, odd=("text/event-stream", pack(events)), encoding=encoding)
                for name in ("m0", "m1")
            ]
            async with cluster(*engines) as it:
                for _ in range(4):
                    response = await it.post({"messages": CHAT, "stream": True}, "chat/completions")
                    if encoding == "br":
                        assert response.status_code == 502
                        assert "compressed as 'br'" in response.json()["error"]["message"]
                        assert response.headers["x-should-retry"] == "false"
                    else:
                        assert response.content == events
                        assert "content-encoding" not in response.headers
                asked = {headers["accept-encoding"] for _, _, headers in engines[0].calls}
                assert asked <= {"identity"}
                assert it.gateway.breakers.open(it.gateway.clock()) == []

        run(scenario)

    @pytest.mark.parametrize(("mib", "status"), [(3, 200), (5, 502)])
    def test_a_few_bytes_that_become_many(self, mib: int, status: int) -> None:
        async def scenario() -> None:
            text = "a" * (mib << 20)
            event = (
                f'data: {{"choices": [{{"text": "{text}", "finish_reason": "stop"}}]}}\n\n'.encode()
            )
            engine = Engine("m0", odd=("text/event-stream", gzip.compress(event)), encoding="gzip")
            async with cluster(engine) as it:
                response = await it.post({"prompt": PROMPT, "stream": True})
                assert response.status_code == status
                assert (response.content == event) == (status == 200)

        run(scenario)

    @pytest.mark.parametrize("right", [True, False])
    def test_an_answer_in_one_piece_that_comes_compressed(self, right: bool) -> None:
        async def scenario() -> None:
            said = b'{"usage": {"completion_tokens": 7}}'
            body = gzip.compress(said) if right else said
            engine = Engine("m0", odd=("application/json", body), encoding="gzip")
            async with cluster(engine) as it:
                async with it.http.stream(
                    "POST", "/v1/completions", json={"model": MODEL, "prompt": PROMPT}
                ) as response:
                    assert response.headers["content-encoding"] == "gzip"
                    assert b"".join([piece async for piece in response.aiter_raw()]) == body
                assert it.number("answered_tokens_total") == 7

        run(scenario)

    def test_a_stream_that_is_not_compressed_as_it_says(self) -> None:
        async def scenario() -> None:
            odd = ("text/event-stream", b"data: {}\n\n")
            async with cluster(Engine("m0", odd=odd, encoding="gzip")) as it:
                response = await it.post({"prompt": PROMPT, "stream": True})
                assert response.status_code in (502, 503)

        run(scenario)

    def test_a_redirect_is_not_followed_nor_asked_for_again(self) -> None:
        async def scenario() -> None:
            async with cluster(Engine("m0", status=307)) as it:
                response = await it.post({"prompt": PROMPT})
                assert response.status_code == 502
                assert "redirect (307)" in response.json()["error"]["message"]
                assert response.headers["x-should-retry"] == "false"

        run(scenario)

    @pytest.mark.parametrize("status", [401, 403])
    def test_an_instance_that_has_another_key(
        self, status: int, caplog: pytest.LogCaptureFixture
    ) -> None:
        async def scenario() -> None:
            odd, right = Engine("m0", status=status), Engine("m1")
            async with cluster(odd, right) as it:
                for _ in range(8):
                    assert (await it.post({"prompt": PROMPT})).status_code == 200
                right.status = status
                response = await it.post({"prompt": PROMPT})
                assert response.status_code == 502
                assert response.json()["error"]["code"] == "misconfigured"
                assert response.headers["x-should-retry"] == "false"
            assert odd.completions
            assert f"m0 refuses the gateway's key: {status}" in caplog.text

        run(scenario)

    @pytest.mark.parametrize("url", ["", "http://[", "ftp://there"])
    def test_where_nobody_can_be(self, url: str) -> None:
        async def scenario() -> None:
            async with cluster(Engine("m0")) as it:
                move(it, "m0", url)
                await it.gateway.refresh()
                response = await it.post({"prompt": PROMPT})
                assert response.status_code == 503
                assert response.json()["error"]["code"] == "no_instance"

        run(scenario)


class TestTheClientHangsUp:
    def test_in_the_middle_of_a_stream(self) -> None:
        async def scenario() -> None:
            engine = Engine("m0", hold_at=2)
            async with cluster(engine) as it:
                async with it.stream({"prompt": PROMPT}) as response:
                    await anext(response.aiter_raw())
                await until(lambda: engine.aborted == 1)
                await it.idle()
                assert it.core.kinds[-1] == "cancelled"
                assert it.core.statistics()["in_flight"] == 0
                assert it.number("cancelled_total") == 1

        run(scenario)

    @pytest.mark.parametrize("stream", [True, False])
    def test_before_there_is_an_answer(self, stream: bool) -> None:
        async def scenario() -> None:
            engine = Engine("m0", hold_at=0)
            async with cluster(engine) as it:
                asked = asyncio.create_task(it.post({"prompt": PROMPT, "stream": stream}))
                await until(lambda: bool(engine.completions))
                asked.cancel()
                await until(lambda: engine.aborted == 1)
                await it.idle()
                assert it.core.kinds[-1] == "cancelled"
                assert it.core.statistics()["in_flight"] == 0

        run(scenario)

    def test_during_the_prefill(self) -> None:
        async def scenario() -> None:
            prefill, decode = Engine("p0", Role.PREFILL), Engine("d0", Role.DECODE)
            prefill.compute.clear()
            async with cluster(prefill, decode, settings=SPLIT) as it:
                asked = asyncio.create_task(it.post({"prompt": PROMPT, "stream": True}))
                await until(lambda: bool(prefill.completions))
                asked.cancel()
                await until(lambda: prefill.aborted == 1)
                await it.idle()
                assert decode.completions == []
                assert it.core.kinds == ["cancelled"]

        run(scenario)


class TestTheConductorIsGone:
    def test_instances_take_turns(self) -> None:
        async def scenario() -> None:
            engines = Engine("m0"), Engine("m1")
            async with cluster(*engines) as it:
                await it.stop_conductor()
                used = []
                for _ in range(4):
                    response = await it.post({"prompt": PROMPT, "stream": True})
                    assert response.status_code == 200
                    assert response.headers["x-tiffin-fallback"] == "conductor_down"
                    used.append(response.headers["x-tiffin-decode"])
                assert sorted(used) == ["m0", "m0", "m1", "m1"]
                assert it.number("fallbacks_total") == 4
                ready = await it.http.get("/readyz")
                assert ready.status_code == 200
                assert it.core.events == []

        run(scenario)

    def test_one_of_each_kind_takes_its_turn(self) -> None:
        async def scenario() -> None:
            prefill, decode = Engine("p0", Role.PREFILL), Engine("d0", Role.DECODE)
            async with cluster(prefill, decode) as it:
                await it.stop_conductor()
                assert (await it.post({"prompt": PROMPT})).status_code == 200
                assert len(prefill.completions) == len(decode.completions) == 1

        run(scenario)

    def test_and_one_instance_too(self) -> None:
        async def scenario() -> None:
            engines = Engine("m0", die_at=-1), Engine("m1")
            async with cluster(*engines) as it:
                await it.stop_conductor()
                for _ in range(2):
                    response = await it.post({"prompt": PROMPT})
                    assert response.headers["x-tiffin-decode"] == "m1"

        run(scenario)

    def test_without_fallback(self) -> None:
        async def scenario() -> None:
            async with cluster(Engine("m0"), config=changed(fallback=False)) as it:
                await it.stop_conductor()
                for _ in range(2):  # the first one notices the failure, the second one knows of it
                    response = await it.post({"prompt": PROMPT})
                    assert response.status_code == 503
                    assert int(response.headers["retry-after"]) >= 1
                    assert "127.0.0.1" not in response.text, "where it is, is not theirs to know"
                assert (await it.http.get("/readyz")).status_code == 503

        run(scenario)

    @pytest.mark.parametrize("fallback", [True, False])
    def test_after_it_had_decided_it_hears_of_the_end(self, fallback: bool) -> None:
        """Its answer was late: it keeps the reservation until the gateway reports the end."""

        async def scenario() -> None:
            async with cluster(Engine("m0"), config=changed(fallback=fallback)) as it:
                lose_answers(it)
                response = await it.post({"prompt": PROMPT})
                assert response.status_code == (200 if fallback else 503)
                await it.idle()
                assert it.core.kinds == ["cancelled"]
                assert it.core.statistics()["in_flight"] == 0

        run(scenario)

    @pytest.mark.parametrize("asked", [True, False])
    def test_after_the_first_of_two_places(self, asked: bool) -> None:
        """The second one is chosen round-robin, whether the conductor was asked or not."""

        async def scenario() -> None:
            first, second = Engine("m0", die_at=-1), Engine("m1")
            async with cluster(first, second) as it:
                it.core.drain("m1", asyncio.get_running_loop().time())
                place = it.gateway.placing.place

                async def then_lost(*arguments: Any) -> Any:
                    placed = await place(*arguments)
                    if asked:
                        it.core.cluster.assign("m1", on=True)
                        lose_answers(it)
                    else:
                        now = asyncio.get_running_loop().time()
                        it.gateway.health.failed(now, ConductorUnavailable("gone"))
                    return placed

                it.gateway.placing.place = then_lost  # type: ignore[method-assign]
                response = await it.post({"prompt": PROMPT})
                assert response.headers["x-tiffin-fallback"] == "conductor_down"
                await it.idle()
                assert it.core.statistics()["in_flight"] == 0

        run(scenario)

    def test_it_was_restarted_and_knows_nobody_yet(self) -> None:
        async def scenario() -> None:
            async with cluster(Engine("m0")) as it:

                def schedule(request: Any, now: float) -> Any:
                    raise UnknownModel(f"no instance has registered {request.model!r}")

                it.core.schedule = schedule  # type: ignore[method-assign]
                response = await it.post({"prompt": PROMPT})
                assert response.status_code == 200
                assert response.headers["x-tiffin-fallback"] == "model_unknown"

        run(scenario)

    @pytest.mark.parametrize("stale", [True, False])
    @pytest.mark.parametrize("forgotten", ["p0", "d0"])
    def test_it_was_restarted_and_knows_one_of_two_yet(self, forgotten: str, stale: bool) -> None:
        """`stale`: the gateway has not heard of that before the request."""

        async def scenario() -> None:
            prefill, decode = Engine("p0", Role.PREFILL), Engine("d0", Role.DECODE)
            async with cluster(prefill, decode) as it:
                it.core.remove(forgotten, asyncio.get_running_loop().time())
                if not stale:
                    await it.gateway.refresh()
                response = await it.post({"prompt": PROMPT})
                assert response.status_code == 200, response.text
                assert response.headers["x-tiffin-fallback"] == "model_unknown"
                assert response.headers["x-tiffin-decode"] == "d0"

        run(scenario)

    def test_it_was_restarted_and_the_second_of_two_comes_back_as_it_is_asked(self) -> None:
        async def scenario() -> None:
            prefill, decode = Engine("p0", Role.PREFILL), Engine("d0", Role.DECODE)
            async with cluster(prefill, decode) as it:
                now, spec = asyncio.get_running_loop().time, it.core.cluster.spec("d0")
                it.core.remove("d0", now())
                listed = it.gateway._client.instances

                async def then_registered() -> Any:
                    it.core.register(spec, now())
                    return await listed()

                it.gateway._client.instances = then_registered  # type: ignore[method-assign]
                response = await it.post({"prompt": PROMPT})
                assert response.status_code == 200, response.text
                assert response.headers["x-tiffin-decode"] == "d0"
                assert "x-tiffin-fallback" not in response.headers, "the conductor placed it"

        run(scenario)

    @pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
    def test_it_has_no_instance_to_give_and_forgot_none(self, role: Role) -> None:
        """An instance that drains gets nothing, also if the gateway does not know that yet."""

        async def scenario() -> None:
            prefill, decode = Engine("p0", Role.PREFILL), Engine("d0", Role.DECODE)
            async with cluster(prefill, decode) as it:
                drained = "p0" if role is Role.PREFILL else "d0"
                it.core.drain(drained, asyncio.get_running_loop().time())
                response = await it.post({"prompt": PROMPT})
                if role is Role.PREFILL:  # who decodes computes, too
                    assert response.status_code == 200
                    assert response.headers["x-tiffin-prefill"] == "d0"
                    assert prefill.completions == []
                    return
                assert response.status_code == 503
                assert response.json()["error"]["code"] == "rejected_no_decode"

        run(scenario)

    def test_in_the_middle_of_a_stream_nobody_notices(self) -> None:
        async def scenario() -> None:
            engine = Engine("m0", hold_at=2)
            async with cluster(engine) as it:
                async with it.stream({"prompt": PROMPT}) as response:
                    chunks = response.aiter_raw()
                    body = await anext(chunks)
                    await it.stop_conductor()
                    engine.go.set()
                    body += b"".join([chunk async for chunk in chunks])
                assert body == engine.sent

        run(scenario)

    def test_it_does_not_let_the_gateway_in(self, tmp_path: Path) -> None:
        """A wrong configuration, which no client can mend."""
        known, ours = tmp_path / "known", tmp_path / "ours"
        for path, text in ((known, "conductors-0123456789"), (ours, "gateways-0123456789")):
            path.write_text(text)
            path.chmod(0o600)

        async def scenario() -> None:
            auth = load_tokens(known)
            async with cluster(Engine("m0"), conductor_auth=auth, conductor_token=ours) as it:
                response = await it.post({"prompt": PROMPT})
                assert response.status_code == 503
                assert response.json()["error"]["code"] == "misconfigured"

        run(scenario)


URGENT = {"x-tiffin-urgent": "true"}


class TestRaces:
    """Two routes: over either prefill instance to the same decode instance."""

    SETTINGS: dict[str, Any] = {  # noqa: RUF012 # read only
        **SPLIT,
        "racing": {"enabled": True, "share": 1.0},
    }

    @asynccontextmanager
    async def course(self) -> AsyncIterator[tuple[Cluster, Engine, Engine, Engine]]:
        """Both prefills wait for their `compute`."""
        one, other = Engine("p0", Role.PREFILL), Engine("p1", Role.PREFILL)
        decode = Engine("d0", Role.DECODE)
        for engine in (one, other):
            engine.compute.clear()
        async with cluster(one, other, decode, settings=self.SETTINGS) as it:
            yield it, one, other, decode

    def ask(self, it: Cluster) -> asyncio.Task[Any]:
        return asyncio.create_task(it.post({"prompt": PROMPT, "stream": True}, headers=URGENT))

    @pytest.mark.parametrize("favourite", [True, False])
    def test_the_first_token_wins(self, favourite: bool) -> None:
        async def scenario() -> None:
            async with self.course() as (it, one, other, decode):
                asked = self.ask(it)
                await until(lambda: bool(one.completions and other.completions))
                decided = it.core.decision(it.core.asked[0].id)
                assert isinstance(decided, Decision)
                engines = sorted((one, other), key=lambda e: e.name != decided.prefill)
                winner, loser = engines if favourite else reversed(engines)
                winner.compute.set()
                response = await asked
                assert response.content == decode.sent
                assert response.headers["x-tiffin-prefill"] == winner.name
                await until(lambda: loser.aborted == 1)
                assert winner.aborted == decode.aborted == 0
                ids = [engine.calls[-1][2]["x-request-id"] for engine in engines]
                assert ids[1] == f"{ids[0]}-0-1", "an engine that serves both sees two requests"
                assert it.number("races_total") == 1
                await it.idle()
                route = winner.name, decode.name
                for kind in ("prefill_done", "first_token"):
                    assert [e.route for e in it.core.events if e.kind == kind] == [route]
                assert it.core.races.statistics().won_by_second == (not favourite)
                assert it.core.tokens == len(decode.answer)
                assert it.core.kinds[-1] == "finished"

        run(scenario)

    @pytest.mark.parametrize("fails", ["dies", "refuses"])
    def test_one_that_fails_loses(self, fails: str) -> None:
        async def scenario() -> None:
            async with self.course() as (it, bad, good, _):
                if fails == "dies":
                    bad.die_at = -1
                    bad.compute.set()
                else:
                    bad.status = 400
                asked = self.ask(it)
                await until(lambda: bool(bad.completions and good.completions))
                good.compute.set()
                response = await asked
                assert response.status_code == 200
                assert response.headers["x-tiffin-prefill"] == good.name

        run(scenario)

    def test_the_conductor_may_end_it_after_the_prefill(self) -> None:
        async def scenario() -> None:
            async with self.course() as (it, one, other, decode):
                it.core.patch({"admission": {"mode": "baseline"}}, 0.0)
                headers = {**URGENT, "x-tiffin-tbt-ms": "0.001"}
                asked = asyncio.create_task(
                    it.post({"prompt": PROMPT, "stream": True}, headers=headers)
                )
                await until(lambda: bool(one.completions and other.completions))
                one.compute.set()
                assert (await asked).status_code == 429
                await until(lambda: other.aborted == 1)
                assert decode.completions == []

        run(scenario)

    def test_if_all_fail_it_is_placed_again_on_none_of_them(self) -> None:
        async def scenario() -> None:
            async with self.course() as (it, one, other, _):
                one.die_at = other.die_at = -1
                one.compute.set()
                other.compute.set()
                response = await self.ask(it)
                assert response.status_code == 503
                assert response.json()["error"]["code"] == "no_instance"
                assert len(one.completions) == len(other.completions) == 1
                assert it.core.asked[-1].exclude == ("p0", "p1")

        run(scenario)

    def test_if_all_refuse_the_refusal_is_the_answer(self) -> None:
        async def scenario() -> None:
            async with self.course() as (it, one, other, _):
                one.status = other.status = 400
                assert (await self.ask(it)).status_code == 400

        run(scenario)

    def test_a_client_that_hangs_up_ends_both(self) -> None:
        async def scenario() -> None:
            async with self.course() as (it, one, other, _):
                asked = self.ask(it)
                await until(lambda: bool(one.completions and other.completions))
                asked.cancel()
                await until(lambda: one.aborted == other.aborted == 1)

        run(scenario)

    def test_answers_in_one_piece_are_not_raced(self) -> None:
        async def scenario() -> None:
            async with self.course() as (it, one, other, _):
                one.compute.set()
                other.compute.set()
                assert (await it.post({"prompt": PROMPT}, headers=URGENT)).status_code == 200
                assert len(one.completions) + len(other.completions) == 1

        run(scenario)
