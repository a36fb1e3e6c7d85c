"""Two real vLLMs whose model embeds texts, behind the gateway: embeddings, scores, ranks and tokens
are those of vLLM itself, by OpenAI's own client where it has a call for them.

TIFFIN_VLLM=/path/to/venv/bin/python pytest -m slow tests/conductor/gateway/test_pooling_vllm.py
"""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import openai
import pytest
from latencysupport import total
from vllmsupport import (
    ENGINE_BLOCKS,
    MARKS,
    MODEL,
    Vllm,
    clients_of,
    make_model,
    prompt,
    two_vllms,
    words,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    import httpx

pytestmark = MARKS

PROFILE = "llama-3.1-8b.h100.tp1.vllm"
OPTIONS = ("--runner", "pooling", "--convert", "embed")
TEXTS = [words(prompt(number, 5 + 30 * number)) for number in range(5)]


@dataclass
class World:
    """All running processes."""

    engines: list[Vllm]
    http: httpx.Client
    client: openai.OpenAI
    direct: openai.OpenAI

    def both(self, path: str, body: dict[str, Any]) -> tuple[httpx.Response, httpx.Response]:
        """The gateway's answer, and that of vLLM."""
        asked = {"model": MODEL, **body}
        return self.http.post(path, json=asked), self.engines[0].http.post(path, json=asked)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("pooling")
    make_model(folder / "model")
    with contextlib.ExitStack() as stack:
        started = two_vllms(folder, 'keys = "conductor"', PROFILE, *OPTIONS)
        engines, door = stack.enter_context(started)
        http, *clients = stack.enter_context(clients_of(engines, door))
        yield World(engines, http, *clients)


@pytest.mark.parametrize("form", ["float", openai.omit])
def test_embeddings(world: World, form: Any) -> None:
    """Without a form the client asks for base64, and decodes it."""
    before = world.http.get("/metrics").content
    asked = [TEXTS, TEXTS[0], prompt(9, 12), [prompt(9, 12), prompt(8, 20)]]
    for texts in asked:
        body: dict[str, Any] = {"model": MODEL, "input": texts, "encoding_format": form}
        found, expected = (one.embeddings.create(**body) for one in (world.client, world.direct))
        assert found.model_dump()["usage"] == expected.model_dump()["usage"]
        for mine, its in zip(found.data, expected.data, strict=True):
            assert mine.embedding == pytest.approx(its.embedding, abs=1e-5)
    route = "/v1/embeddings"
    after = world.http.get("/metrics").content
    name = "tiffin_gateway_requests_total"
    counted = [total(one, name, route=route, status="200") for one in (after, before)]
    assert counted[0] - counted[1] == len(asked)
    with pytest.raises(openai.BadRequestError) as through:
        world.client.embeddings.create(model=MODEL, input=[99_999])
    with pytest.raises(openai.BadRequestError) as direct:
        world.direct.embeddings.create(model=MODEL, input=[99_999])
    assert through.value.body == direct.value.body


def test_more_texts_than_an_engine_has_room_for(world: World) -> None:
    """It computes them one after the other, and so do both of two such batches at once."""
    texts = TEXTS[4:] * 80
    (expected,) = world.direct.embeddings.create(model=MODEL, input=TEXTS[4]).data

    def embedded(_: int) -> Any:
        return world.client.embeddings.create(model=MODEL, input=texts)

    with ThreadPoolExecutor(2) as pool:
        for found in pool.map(embedded, range(2)):
            assert found.usage.prompt_tokens > ENGINE_BLOCKS * 128, (
                "that is all that one has room for"
            )
            assert [one.embedding for one in found.data] == [
                pytest.approx(expected.embedding, abs=1e-5)
            ] * len(texts)


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/score", {"queries": TEXTS[0], "documents": TEXTS}, "score"),
        ("/v1/rerank", {"query": TEXTS[0], "documents": TEXTS}, "relevance_score"),
        ("/v2/rerank", {"query": TEXTS[0], "documents": TEXTS}, "relevance_score"),
        ("/pooling", {"input": TEXTS, "task": "embed"}, "data"),
    ],
)
def test_scores_and_ranks(world: World, path: str, body: dict[str, Any], field: str) -> None:
    found, expected = world.both(path, body)
    assert (found.status_code, expected.status_code) == (200, 200), found.text

    def scores(answer: httpx.Response) -> list[tuple[int, Any]]:
        said = answer.json()
        rows = said.get("data") or said["results"]
        return [(one["index"], pytest.approx(one[field], abs=1e-5)) for one in rows]

    def plain(answer: httpx.Response) -> list[tuple[int, float]]:
        return [(index, one.expected) for index, one in scores(answer)]

    assert plain(found) == scores(expected)
    assert len(plain(found)) == len(TEXTS)


def test_tokens_and_texts(world: World) -> None:
    asked: list[tuple[str, dict[str, Any]]] = [
        ("/tokenize", {"prompt": TEXTS[1]}),
        ("/tokenize", {"messages": [{"role": "user", "content": TEXTS[1]}]}),
        ("/detokenize", {"tokens": prompt(3, 9)}),
        ("/tokenize", {}),
    ]
    for path, body in asked:
        found, expected = world.both(path, body)
        assert (found.status_code, found.json()) == (expected.status_code, expected.json())


def test_both_engines_get_some(world: World) -> None:
    def home(number: int) -> str:
        body: dict[str, Any] = {"model": MODEL, "input": TEXTS}
        raw = world.client.embeddings.with_raw_response.create(**body)
        return str(raw.headers["x-tiffin-decode"])

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(home, range(40))) == {"a", "b"}
