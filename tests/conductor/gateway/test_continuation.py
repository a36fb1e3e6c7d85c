"""A stream that breaks off goes on at another instance, and no character is lost or different."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from gatewaysupport import CONFIG, Cluster, Died, Engine, cluster, run
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse

from tiffin.conductor.gateway.config import BreakerSettings
from tiffin.conductor.gateway.openai.openai_request import (
    CHAT,
    COMPLETIONS,
    ClientRequest,
    Wishes,
    read_ask,
)
from tiffin.conductor.gateway.requests.continuation import (
    Continuation,
    continuable,
    with_ids,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

PROMPT = [11, 12, 13]
# What the engine says after any prompt: characters of one to four bytes, a token each.
ANSWER = "Dabba\u00e9 \U0001f371wal\u0101s \u4e2d\u6587 deliver."


def ask(path: str = COMPLETIONS, **fields: Any) -> ClientRequest:
    prompt = {"prompt": PROMPT} if path == COMPLETIONS else {"messages": [{"content": "hi"}]}
    body = {"model": "m", "stream": True, "temperature": 0, "max_tokens": 60, **prompt, **fields}
    return read_ask(path, json.dumps(body).encode(), Wishes("r"))


def detokenize(ids: Sequence[int]) -> str:
    return bytes(ids).decode("utf-8", "ignore")


def answer(prompt: list[int], limit: int, sizes: Iterator[int], *, chat: bool) -> Iterator[bytes]:
    """The events of an engine: some tokens at a time, the text of whole characters alone."""
    whole = ANSWER.encode()
    said = len(prompt) - len(PROMPT)
    ids, shown = list(whole[said : said + limit]), 0
    at, first = 0, True
    while at < len(ids):
        step = ids[at : at + next(sizes)]
        at += len(step)
        text = detokenize(whole[: said + at])
        new = text[len(detokenize(whole[: said + shown])) :] if text else ""
        # From a prompt that ends within a character an engine shows all of that.
        shown = at
        choice: dict[str, Any] = {"index": 0, "token_ids": step, "finish_reason": None}
        choice |= {"delta": {"content": new}} if chat else {"text": new}
        event: dict[str, Any] = {"id": f"id-{said}", "created": said, "choices": [choice]}
        if first:
            where = event if chat else choice
            where["prompt_token_ids"], first = prompt, False
        yield f"data: {json.dumps(event)}\n\n".encode()
    usage = {"prompt_tokens": len(prompt), "completion_tokens": len(ids)}
    last = {"id": f"id-{said}", "created": said, "choices": [], "usage": usage}
    yield f"data: {json.dumps(last)}\n\ndata: [DONE]\n\n".encode()


def heard(events: bytes) -> tuple[str, set[str], dict[str, int] | None]:
    """The text, the ids and the usage that a client hears."""
    text, names, usage = "", set(), None
    for line in events.split(b"\n"):
        if line.startswith(b"data: {"):
            event = json.loads(line[6:])
            names.add(event["id"])
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                text += choice["text"] if "text" in choice else choice["delta"]["content"]
    return text, names, usage


@given(
    data=st.data(),
    chat=st.booleans(),
    limit=st.integers(1, 60),
    breaks=st.lists(st.integers(0, 12), max_size=4),
)
def test_however_often_it_breaks_the_client_hears_the_same(
    data: st.DataObject, chat: bool, limit: int, breaks: list[int]
) -> None:
    def sizes() -> Iterator[int]:
        while True:
            yield data.draw(st.integers(1, 3))

    said = min(limit, len(ANSWER.encode()))
    one = with_ids(ask(CHAT if chat else COMPLETIONS, max_tokens=limit))
    rest = Continuation(one)
    sent, prompt, left, in_chat = b"", PROMPT, limit, chat
    for keep in [*breaks, 99]:
        for number, events in enumerate(answer(prompt, left, sizes(), chat=in_chat)):
            if number == keep:
                break
            events = events if prompt is PROMPT else rest.rewritten(events)
            sent += rest.seen(events)
        else:
            break
        if not rest.possible:
            return  # nothing was seen yet: the request is tried again from its start
        ids = next(
            one
            for one, _ in rest.candidates()
            if rest.matches(bytes(one).decode("utf-8", "replace"))
        )
        go_on = rest.rest(ids)
        if go_on is None:
            return
        body = json.loads(go_on.raw)
        assert body["prompt"][: len(PROMPT)] == PROMPT
        assert "messages" not in body
        prompt, left, in_chat = body["prompt"], body["max_tokens"], False
    assert b"prompt_token_ids" not in sent
    text, names, usage = heard(sent)
    assert text == detokenize(ANSWER.encode()[:said])
    assert names == {"id-0"}
    assert usage == {"prompt_tokens": len(PROMPT), "completion_tokens": said}


def test_the_prompt_of_a_chat_is_what_the_engine_made_of_it() -> None:
    rest = Continuation(ask(CHAT))
    event = {"id": "a", "prompt_token_ids": [7, 8], "choices": [{"delta": {"role": "assistant"}}]}
    rest.seen(b"data: " + json.dumps(event).encode() + b"\n\n")
    assert rest.possible
    again = rest.rest([])
    assert again is not None
    assert (again.path, json.loads(again.raw)["prompt"]) == (COMPLETIONS, [7, 8])


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 1},
        {"temperature": None},
        {"stop": ["x"]},
        {"logprobs": 2},
        {"n": 2},
        {"presence_penalty": 0.5},
        {"response_format": {"type": "json_object"}},
        {"stream": False},
    ],
)
def test_what_could_differ_is_not_continued(fields: dict[str, Any]) -> None:
    assert continuable(ask(), "greedy")
    assert not continuable(ask(), "off")
    assert not continuable(ask(**fields), "greedy")
    assert continuable(ask(temperature=1), "always")


@pytest.mark.parametrize(
    "choice", [{"text": "a"}, {"delta": {"reasoning": "hm"}, "token_ids": [1]}]
)
def test_nothing_is_guessed(choice: dict[str, Any]) -> None:
    """Text without token ids, and what is no text."""
    rest = Continuation(ask())
    event = {"id": "a", "choices": [{"token_ids": [65], "text": "A", "prompt_token_ids": PROMPT}]}
    rest.seen(f"data: {json.dumps(event)}\n\n".encode())
    assert rest.possible
    assert rest.matches("A")
    assert not rest.matches("B")
    rest.seen(f"data: {json.dumps({'id': 'a', 'choices': [choice]})}\n\n".encode())
    assert not rest.possible


def test_special_tokens_have_no_text_in_a_stream() -> None:
    """And `/detokenize` shows them. The last one may be half a character: it is computed again."""
    rest = Continuation(ask())
    for number, text in ((65, "A"), (3, ""), (66, "B"), (200, "")):
        choice = {"token_ids": [number], "text": text, "prompt_token_ids": PROMPT}
        rest.seen(f"data: {json.dumps({'id': 'a', 'choices': [choice]})}\n\n".encode())
    shown = {3: "<eos>", 200: "\ufffd"}
    matching = [
        ids
        for ids, loud in rest.candidates()
        if rest.matches("".join(shown.get(one, chr(one)) for one in loud))
    ]
    assert matching == [[65, 3, 66]]


def test_limits() -> None:
    rest = Continuation(ask(max_tokens=3))
    assert rest.rest([1, 2, 3]) is None
    one = read_ask(COMPLETIONS, b'{"model":"m","prompt":[1],"stream":true}', Wishes("r"))
    more = Continuation(one).rest([1] * 10)
    assert more is not None
    assert json.loads(more.raw)["max_tokens"] == 6, "of the 16 that are the default"
    chat = read_ask(CHAT, b'{"model":"m","messages":[],"stream":true}', Wishes("r"))
    more = Continuation(chat).rest([1] * 100)
    assert more is not None
    assert json.loads(more.raw)["max_tokens"] is None


# -- the gateway -----------------------------------------------------------------------------------


@dataclass
class Greedy(Engine):
    """An engine that says `ANSWER` after any prompt of three tokens, a character per token, and
    goes on with it after more."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/detokenize":
            http = HttpRequest(scope, receive)
            ids = (await http.json())["tokens"]
            await JSONResponse({"prompt": "".join(map(chr, ids))})(scope, receive, send)
            return
        await super().__call__(scope, receive, send)

    async def _stream(self, body: dict[str, Any], send: Any) -> None:
        chat = "messages" in body
        prompt = PROMPT if chat else body["prompt"]
        said = len(prompt) - len(PROMPT)
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for number, character in enumerate(ANSWER[said : said + body["max_tokens"]]):
            if number == self.die_at:
                raise Died
            choice: dict[str, Any] = {"index": 0, "finish_reason": None}
            choice |= {"delta": {"content": character}} if chat else {"text": character}
            if body.get("return_token_ids"):
                choice["token_ids"] = [ord(character)]
                choice["prompt_token_ids"] = prompt
            event = {"id": self.name, "created": 1, "choices": [choice]}
            data = f"data: {json.dumps(event)}\n\n".encode()
            await send({"type": "http.response.body", "body": data, "more_body": True})
        last = {"id": self.name, "created": 1, "choices": [{"text": "", "finish_reason": "stop"}]}
        data = f"data: {json.dumps(last)}\n\ndata: [DONE]\n\n".encode()
        await send({"type": "http.response.body", "body": data, "more_body": False})


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_streams_of_engines_that_die_go_on(path: str) -> None:
    engines = [Greedy("m0", die_at=5), Greedy("m1", die_at=9), Greedy("m2")]
    prompt = {"prompt": PROMPT} if path == "completions" else {"messages": [{"content": "hi"}]}

    config = msgspec.structs.replace(CONFIG, breakers=BreakerSettings(failures=1000))

    async def stream(it: Cluster, temperature: float) -> bytes:
        body = {**prompt, "temperature": temperature, "max_tokens": 60}
        async with it.stream(body, path) as response:
            return await response.aread()

    async def scenario() -> None:
        async with cluster(*engines, config=config) as it:
            answers = await asyncio.gather(*(stream(it, 0) for _ in range(20)))
            for sent in answers:
                text, names, _ = heard(sent)
                assert text == ANSWER
                assert len(names) == 1
                assert sent.endswith(b"data: [DONE]\n\n")
            assert it.number("continued_streams_total") >= 10
            assert it.number("broken_streams_total") == 0
            await it.idle()
            sampled = [await stream(it, 1) for _ in range(6)]
            assert any(b"engine_failed" in sent for sent in sampled)
            assert all(b"token_ids" not in sent for sent in sampled)

    run(scenario)


def test_another_model_does_not_go_on_with_an_answer() -> None:
    """What a degraded placement would say next is not the rest of this answer."""
    engines = [Greedy("m0", die_at=5), Greedy("m1", die_at=5)]

    async def scenario() -> None:
        async with cluster(*engines) as it:
            place, placings = it.gateway.placing.place, 0

            async def degraded(*args: Any, **named: Any) -> Any:
                nonlocal placings
                placings += 1
                placed = await place(*args, **named)
                return dataclasses.replace(placed, model="smaller" if placings > 1 else "")

            it.gateway.placing.place = degraded  # type: ignore[method-assign]
            async with it.stream({"prompt": PROMPT, "temperature": 0, "max_tokens": 60}) as got:
                *said, last = [one for one in (await got.aread()).split(b"\n\n") if one]
            assert b"engine_failed" in last
            text = "".join(json.loads(one[6:])["choices"][0]["text"] for one in said)
            assert text == ANSWER[:5]
            assert placings == 2
            assert it.number("continued_streams_total") == 0

    run(scenario)
