"""OpenAI's own client asks two real vLLMs through the gateway, and one of them directly: it gets
the same answers, and the same exceptions.

TIFFIN_VLLM=/path/to/venv/bin/python pytest -m slow \\
    tests/conductor/gateway/test_openai_client_vllm.py
"""

from __future__ import annotations

import contextlib
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import openai
import pytest
from kvsupport import wait_until
from vllmsupport import (
    MARKS,
    MODEL,
    PATIENCE_S,
    FrontDoor,
    Vllm,
    make_model,
    openai_client,
    two_vllms,
)

from tiffin.conductor.client import ConductorClient

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = MARKS

PROFILE = "llama-3.1-8b.h100.tp1.vllm"
TOOLS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
CITIES = ["Oslo", "Rome", "Lima"]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": CITIES}},
    "required": ["city"],
    "additionalProperties": False,
}
# With `strict` vLLM holds the model to the schema.
WEATHER = {"name": "weather", "description": "Now", "parameters": SCHEMA, "strict": True}
FORMAT = {"name": "place", "schema": SCHEMA, "strict": True}
MESSAGES = [
    {"role": "system", "content": "You are kind."},
    {"role": "user", "content": [{"type": "text", "text": "Where is it warm?"}]},
]
# What differs between two answers to one request.
PASSING = ("id", "created", "created_at", "completed_at", "item_id", "call_id")


@dataclass
class World:
    """All running processes, and a client of the gateway and of each engine."""

    engines: dict[str, Vllm]
    door: FrontDoor
    conductor: ConductorClient
    client: openai.OpenAI
    direct: dict[str, openai.OpenAI]

    def running(self) -> float:
        """Requests that the engines compute or keep waiting."""
        names = ("num_requests_running", "num_requests_waiting")
        return sum(one.gauge(name) for one in self.engines.values() for name in names)

    def await_idle(self) -> None:
        """Wait until no engine computes, and the conductor knows of no request."""
        wait_until(lambda: not self.running(), "no engine computes", PATIENCE_S)

        def idle() -> bool:
            return not any(one.load["batch"] for one in self.conductor.instances())

        wait_until(idle, "the conductor counts none", PATIENCE_S)

    def number(self, name: str) -> float:
        """One of the gateway's metrics, over all labels."""
        text = self.client.with_options(base_url=self.door.gateway_url).get("/metrics", cast_to=str)
        lines = [one for one in text.splitlines() if one.startswith(f"tiffin_gateway_{name}")]
        assert lines, name
        return sum(float(one.rpartition(" ")[2]) for one in lines)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("openai")
    make_model(folder / "model", every_text=True)
    with contextlib.ExitStack() as stack:
        environment = stack.enter_context(pytest.MonkeyPatch.context())
        environment.setenv("VLLM_ENABLE_RESPONSES_API_STORE", "1")
        started = two_vllms(folder, 'keys = "conductor"', PROFILE, *TOOLS)
        engines, door = stack.enter_context(started)

        def client(url: str) -> openai.OpenAI:
            return stack.enter_context(openai_client(url))

        it = World(
            {one.name: one for one in engines},
            door,
            stack.enter_context(ConductorClient(door.conductor_url)),
            client(door.gateway_url),
            {one.name: client(one.url) for one in engines},
        )

        def listed() -> bool:
            return [one.id for one in it.client.models.list()] == [MODEL]

        wait_until(listed, "the gateway knows the engines", PATIENCE_S)
        yield it


def lasting(value: Any) -> Any:
    """A part of an answer, without what is another one each time."""
    if isinstance(value, dict):
        return {name: lasting(one) for name, one in value.items() if name not in PASSING}
    return [lasting(one) for one in value] if isinstance(value, list) else value


def plain(answer: Any) -> Any:
    """An answer of the client as JSON has it."""
    return lasting(answer.model_dump(mode="json"))


def completion(client: openai.OpenAI, **more: Any) -> Any:
    body = {"prompt": "It is warm in", "max_tokens": 12, "temperature": 0, **more}
    return client.completions.create(model=MODEL, **body)


def chat(client: openai.OpenAI, **more: Any) -> Any:
    body = {"messages": MESSAGES, "max_completion_tokens": 12, "temperature": 0, **more}
    return client.chat.completions.create(model=MODEL, **body)


def streamed(ask: Callable[..., Any]) -> Callable[..., Any]:
    """The whole of a streamed answer. How many tokens an event has depends on the moment."""

    def collect(client: openai.OpenAI, **more: Any) -> Any:
        options = {"include_usage": True}
        with ask(client, stream=True, stream_options=options, **more) as events:
            found = list(events)
        texts: dict[int, str] = {}
        calls: dict[tuple[int, int], str] = {}
        ends: dict[int, str] = {}
        probabilities: dict[int, list[Any]] = {}
        for event in found:
            for one in event.choices:
                delta = getattr(one, "delta", None)
                text = one.text if delta is None else delta.content
                texts[one.index] = texts.get(one.index, "") + (text or "")
                for call in (delta and delta.tool_calls) or ():
                    at = (one.index, call.index)
                    said = (call.function.name or "") + (call.function.arguments or "")
                    calls[at] = calls.get(at, "") + said
                if one.finish_reason:
                    ends[one.index] = one.finish_reason
                if one.logprobs:
                    told = plain(one.logprobs)
                    probabilities.setdefault(one.index, []).extend(
                        told.get("content") or told["token_logprobs"]
                    )
        assert len({event.id for event in found}) == 1
        assert found[-1].usage is not None
        return texts, calls, ends, probabilities, plain(found[-1].usage)

    return collect


def whole(ask: Callable[..., Any]) -> Callable[..., Any]:
    return lambda client, **more: plain(ask(client, **more))


TOOL: dict[str, Any] = {"tools": [{"type": "function", "function": WEATHER}]}
NAMED = {"type": "function", "function": {"name": "weather"}}
CALL = {"name": "weather", "arguments": '{"city": "Oslo"}'}
TOLD: list[Any] = [
    *MESSAGES,
    {"role": "assistant", "tool_calls": [{"id": "call-1", "type": "function", "function": CALL}]},
    {"role": "tool", "tool_call_id": "call-1", "content": "rain"},
]
ASKED: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "completion": (completion, {}),
    "token ids": (completion, {"prompt": list(range(40, 90))}),
    "several prompts": (completion, {"prompt": ["one", "two", "three"]}),
    "echo": (completion, {"echo": True}),
    "stop": (completion, {"max_tokens": 200, "stop": ["a", "e"]}),
    "several": (completion, {"n": 3, "temperature": 1, "seed": 5}),
    "log probabilities": (completion, {"logprobs": 3}),
    "vLLM's own": (completion, {"extra_body": {"top_k": 3, "min_tokens": 2, "seed": 1}}),
    "chat": (chat, {}),
    "several of a chat": (chat, {"n": 3, "temperature": 1, "seed": 5}),
    "log probabilities of a chat": (chat, {"logprobs": True, "top_logprobs": 2}),
    "tool": (chat, {**TOOL, "tool_choice": NAMED, "max_completion_tokens": 200}),
    "required tool": (chat, {**TOOL, "tool_choice": "required", "max_completion_tokens": 150}),
    "what a tool said": (chat, {**TOOL, "tool_choice": "none", "messages": TOLD}),
    "no tool": (chat, {**TOOL, "tool_choice": "none"}),
    "format": (
        chat,
        {
            "response_format": {"type": "json_schema", "json_schema": FORMAT},
            "max_completion_tokens": 200,
        },
    ),
    "max_tokens": (chat, {"max_completion_tokens": openai.omit, "max_tokens": 5}),
}


@pytest.mark.parametrize("how", [whole, streamed])
@pytest.mark.parametrize("name", ASKED)
def test_answers_are_those_of_vllm(world: World, name: str, how: Any) -> None:
    ask, body = ASKED[name]
    expected = how(ask)(world.direct["a"], **body)
    assert expected == how(ask)(world.direct["b"], **body), "vLLM itself says something else"
    assert how(ask)(world.client, **body) == expected


def test_tools_and_formats_are_what_the_model_was_made_to_say(world: World) -> None:
    """That the comparison above compares something."""
    (choice,) = chat(world.client, **ASKED["tool"][1]).choices
    (call,) = choice.message.tool_calls
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments)["city"] in CITIES
    (choice,) = chat(world.client, **ASKED["format"][1]).choices
    assert json.loads(choice.message.content)["city"] in CITIES
    assert len({one.text for one in completion(world.client, **ASKED["several"][1]).choices}) > 1


def test_the_id_of_an_answer_explains_it(world: World) -> None:
    raw = world.client.completions.with_raw_response.create(model=MODEL, prompt="why", max_tokens=2)
    entry = world.conductor.why(str(raw.headers["x-tiffin-request-id"]))
    assert entry.prefill == raw.headers["x-tiffin-prefill"]
    assert raw.parse().id == raw.headers["x-request-id"]


def test_models(world: World) -> None:
    assert world.client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        world.client.models.retrieve("gpt/none")


def read(answer: Any) -> None:
    """Read all of a stream: vLLM finds some errors when it has begun."""
    if isinstance(answer, openai.Stream):
        with answer as events:
            list(events)


@pytest.mark.parametrize("stream", [False, True])
def test_errors_are_the_clients_exceptions(world: World, stream: bool) -> None:
    """Those of vLLM are passed on as they are, those of the gateway have the same form."""
    cases: list[dict[str, Any]] = [
        {"temperature": -1}, {"max_tokens": 99_999}, {"prompt": [99_999]}, {"logprobs": 1000},
        {"n": 0}, {"extra_body": {"structured_outputs": {"json": 5}}},
    ]  # fmt: skip
    for body in cases:
        with pytest.raises(openai.APIError) as direct:
            read(completion(world.direct["a"], stream=stream, **body))
        with pytest.raises(openai.APIError) as through:
            read(completion(world.client, stream=stream, **body))
        assert type(through.value) is type(direct.value)
        assert stream or isinstance(direct.value, openai.BadRequestError)
        assert through.value.body == direct.value.body
    with pytest.raises(openai.BadRequestError) as refused:
        completion(world.client, stream=stream, extra_body={"kv_transfer_params": {}})
    assert refused.value.code == "not_allowed"
    assert refused.value.param == "kv_transfer_params"
    with pytest.raises(openai.NotFoundError) as unknown:
        world.client.completions.create(model="none", prompt="a", stream=stream)
    assert unknown.value.type == "invalid_request_error"
    with pytest.raises(openai.NotFoundError):
        world.client.images.generate(prompt="a")


def test_a_client_that_leaves_ends_its_answer(world: World) -> None:
    before = world.number("cancelled_total")
    body: dict[str, Any] = {"max_tokens": 3000, "extra_body": {"ignore_eos": True}}
    with completion(world.client, stream=True, **body) as events:
        for number, _ in enumerate(events):
            if number == 5:
                break
        assert world.running() == 1
    world.await_idle()
    with pytest.raises(openai.APITimeoutError):
        completion(world.client.with_options(timeout=0.3), **body)
    world.await_idle()
    assert world.number("cancelled_total") - before == 2


def conversation(world: World, number: int) -> str:
    """Three turns; returns where they were computed."""
    home, said = "", list[Any]()
    for turn in range(3):
        raw = world.client.responses.with_raw_response.create(
            model=MODEL,
            input=f"Question {turn} of {number}",
            instructions="Be kind.",
            max_output_tokens=20,
            temperature=0,
            previous_response_id=said[-1].id if said else openai.omit,
        )
        said.append(raw.parse())
        assert home in ("", raw.headers["x-tiffin-decode"])
        home = str(raw.headers["x-tiffin-decode"])
    assert [one.previous_response_id for one in said[1:]] == [one.id for one in said[:-1]]
    assert said[-1].usage.input_tokens > said[0].usage.input_tokens + 20, "it knows the turns"
    assert world.client.responses.retrieve(said[0].id).output_text == said[0].output_text
    (other,) = world.engines.keys() - {home}
    with pytest.raises(openai.NotFoundError):
        world.direct[other].responses.retrieve(said[0].id)
    return home


def test_a_conversation_of_responses_stays_where_it_is_kept(world: World) -> None:
    """Each engine knows its own responses alone; asked at the other one, it would be a 404."""
    with ThreadPoolExecutor(6) as pool:  # at once, so that both have some
        homes = set(pool.map(lambda number: conversation(world, number), range(6)))
    assert homes == set(world.engines)
    with pytest.raises(openai.NotFoundError) as unknown:
        world.client.responses.retrieve("resp_none")
    assert unknown.value.code == "unknown_response"
    with pytest.raises(openai.InternalServerError) as gone:
        world.client.responses.create(
            model=MODEL, input="more", previous_response_id="resp_0123456789abcdef"
        )
    assert (gone.value.status_code, gone.value.code) == (503, "no_instance")


def test_a_response_is_that_of_vllm(world: World) -> None:
    body: dict[str, Any] = {
        "model": MODEL,
        "input": "Where is it warm?",
        "max_output_tokens": 200,
        "temperature": 0,
        "text": {"format": {"type": "json_schema", **FORMAT}},
    }
    expected = world.direct["a"].responses.create(**body)
    assert json.loads(expected.output_text)["city"] in CITIES
    assert plain(world.client.responses.create(**body)) == plain(expected)
    with world.client.responses.create(**body, stream=True) as events:
        found = list(events)
    assert [found[0].type, found[-1].type] == ["response.created", "response.completed"]
    text = "".join(one.delta for one in found if one.type == "response.output_text.delta")
    assert text == expected.output_text
    last = found[-1]
    assert last.type == "response.completed"
    assert last.response.output_text == expected.output_text
    again = world.client.responses.retrieve(last.response.id)
    assert again.output_text == expected.output_text


def test_the_events_of_a_response_in_the_background_once_more(world: World) -> None:
    """A client that has lost its stream gets the rest of it by another one."""
    body: dict[str, Any] = {"model": MODEL, "input": "Say all.", "max_output_tokens": 12}
    with world.client.responses.create(**body, background=True, stream=True) as events:
        first = next(iter(events))
    assert first.type == "response.created"
    again = world.client.responses.retrieve(
        first.response.id, stream=True, starting_after=first.sequence_number
    )
    rest = list(again)
    numbers = [one.sequence_number for one in rest]
    assert numbers == list(range(first.sequence_number + 1, numbers[-1] + 1))
    assert rest[-1].type == "response.completed"
    text = "".join(one.delta for one in rest if one.type == "response.output_text.delta")
    assert text == rest[-1].response.output_text
    world.await_idle()


def test_a_response_in_the_background(world: World) -> None:
    body: dict[str, Any] = {"model": MODEL, "input": "Say all.", "background": True}
    short = world.client.responses.create(**body, max_output_tokens=5)
    assert short.status in ("queued", "in_progress", "completed")
    wait_until(
        lambda: world.client.responses.retrieve(short.id).status in ("completed", "incomplete"),
        "it is computed",
        PATIENCE_S,
    )
    more = {"extra_body": {"ignore_eos": True}}
    long = world.client.responses.create(**body, max_output_tokens=3000, **more)
    assert world.client.responses.cancel(long.id).status == "cancelled"
    world.await_idle()
