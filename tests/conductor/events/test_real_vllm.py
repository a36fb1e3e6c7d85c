"""Two real vLLMs behind a real gateway and a real conductor, each in a process of its own. The
conductor asks them what they are and how busy they are, and follows their events: nothing runs
beside them.

TIFFIN_VLLM=/path/to/venv/bin/python pytest -m slow tests/conductor/events/test_real_vllm.py
"""

from __future__ import annotations

import contextlib
import json
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from kvsupport import wait_until
from vllmsupport import (
    MARKS,
    MODEL,
    PATIENCE_S,
    Vllm,
    front_door,
    make_model,
    prompt,
    words,
)

from tiffin.conductor.client import ConductorClient
from tiffin.conductor.discovery.engine_facts import own_schema
from tiffin.conductor.state.part_keys import part_keys

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

pytestmark = MARKS

PROFILE = "llama-3.1-8b.h100.tp1.vllm"
BLOCK = 512
SCHEMA = own_schema(MODEL, BLOCK)  # there is no pool: the conductor makes one for the keys
KINDS = ("ids", "text", "chat")


@dataclass
class Answer:
    """The answer that a client got. `tokens` are ids; `error` is a stream's last event, if that is
    an error."""

    status: int
    headers: httpx.Headers
    tokens: list[int]
    error: dict[str, Any] | None = None
    done: bool = False

    @property
    def instance(self) -> str:
        return str(self.headers["x-tiffin-decode"])

    @property
    def cached_tokens(self) -> int:
        return int(self.headers["x-tiffin-cached-tokens"])


@dataclass
class World:
    """All running processes."""

    engines: dict[str, Vllm]
    conductor: ConductorClient
    http: httpx.Client

    def ask(
        self,
        kind: str,
        ids: Sequence[int],
        *,
        stream: bool = False,
        seen: Callable[[str], None] | None = None,
        **more: Any,
    ) -> Answer:
        """Ask through the gateway. `seen` is called once, with the instance, when a stream has
        begun."""
        body = body_of(kind, ids, **more)
        if not stream:
            response = self.http.post(path_of(kind), json=body)
            found = response.json()["choices"][0]["token_ids"] if response.is_success else []
            return Answer(response.status_code, response.headers, list(found))
        with self.http.stream("POST", path_of(kind), json={**body, "stream": True}) as response:
            answer = Answer(response.status_code, response.headers, [])
            for line in response.iter_lines():
                self._read(line, answer)
                if seen is not None and len(answer.tokens) > 4:
                    seen(answer.instance)
                    seen = None
        return answer

    @staticmethod
    def _read(line: str, answer: Answer) -> None:
        data = line.removeprefix("data: ")
        if data == "[DONE]":
            answer.done = True
        elif data:
            event = json.loads(data)
            answer.error = event.get("error")
            for choice in event.get("choices", ()):
                answer.tokens += choice.get("token_ids") or []

    def held(self, ids: Sequence[int]) -> dict[str, int]:
        """The number of blocks of a prompt, per instance that has any."""
        holders = self.conductor.match(SCHEMA.prefix(ids).keys).holders
        return {one.holder.removesuffix("/hbm"): one.blocks for one in holders}

    def held_tokens(self, ids: Sequence[int]) -> dict[str, int]:
        """The number of a prompt's first tokens below a block, per instance that has any."""
        prefix = SCHEMA.prefix(ids)
        holders = self.conductor.match(prefix.keys, part_keys=part_keys(prefix)).holders
        return {one.holder.removesuffix("/hbm"): one.part_tokens for one in holders}

    def await_held(self, ids: Sequence[int], name: str, blocks: int) -> None:
        wait_until(
            lambda: self.held(ids).get(name, 0) == blocks,
            f"{name} holds {blocks} of a prompt",
            PATIENCE_S,
        )

    def await_ready(self) -> None:
        def ready() -> bool:
            return [one.status for one in self.conductor.instances()] == ["ready"] * 2

        wait_until(ready, "both are ready", PATIENCE_S)

    def revive(self, name: str) -> None:
        self.engines[name].start()
        self.engines[name].wait()
        self.await_ready()

    def other(self, name: str) -> str:
        (found,) = self.engines.keys() - {name}
        return found


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("vllm")
    make_model(folder / "model")
    with contextlib.ExitStack() as stack:
        engines = {name: Vllm(name, folder / "model") for name in ("vllm-0", "vllm-1")}
        for engine in engines.values():
            stack.callback(engine.close)
            engine.start()
        # There is no pool: no instance fetches another's blocks.
        door = stack.enter_context(front_door(folder, 'keys = "conductor"'))
        client = stack.enter_context(ConductorClient(door.conductor_url))
        for engine in engines.values():
            engine.wait()
            engine.add_to(client, PROFILE)
        http = httpx.Client(base_url=door.gateway_url, trust_env=False, timeout=PATIENCE_S)
        it = World(engines, client, stack.enter_context(http))
        it.await_ready()
        wait_until(
            lambda: http.get("/readyz").status_code == 200, "the gateway knows them", PATIENCE_S
        )
        yield it


def path_of(kind: str) -> str:
    return "/v1/chat/completions" if kind == "chat" else "/v1/completions"


def body_of(kind: str, ids: Sequence[int], **more: Any) -> dict[str, Any]:
    body = {"model": MODEL, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    body |= {"return_token_ids": True, **more}
    if kind == "chat":
        return {**body, "messages": [{"role": "user", "content": words(ids)}]}
    return {**body, "prompt": words(ids) if kind == "text" else list(ids)}


def test_system_prompts_shorter_than_a_block_are_found_by_events(world: World) -> None:
    """Six of 300 tokens, of which vLLM caches two blocks of 128, three of them on each vLLM, which
    were asked directly: the conductor knows of them by events alone. Then five questions each. The
    first test: nothing else is evicted."""
    systems = {number: prompt(300 + number, 300) for number in range(6)}
    homes = {number: f"vllm-{number % 2}" for number in systems}
    for number, system in systems.items():
        world.engines[homes[number]].answer(path_of("ids"), body_of("ids", system))
    for number, system in systems.items():
        wait_until(
            lambda: world.held_tokens(system) == {homes[number]: 256},  # noqa: B023
            f"one holds system prompt {number}",
            PATIENCE_S,
        )
    before = sum(engine.hit_tokens() for engine in world.engines.values())
    predicted = 0
    # The default compares seconds, and one of two vLLMs on one machine may be the faster one.
    world.conductor.patch({"policy": {"name": "prefix_aware"}})
    for number in range(30):
        ids = [*systems[number % 6], *prompt(400 + number, 20)]
        answer = world.ask(KINDS[number % 3], ids, stream=number % 2 == 0)
        assert (answer.status, answer.instance) == (200, homes[number % 6])
        predicted += answer.cached_tokens
    world.conductor.patch({"policy": {"name": "kvcache_centric"}})
    after = sum(engine.hit_tokens() for engine in world.engines.values())
    assert (after - before, predicted) == (30 * 256, 30 * 256)
    assert world.held(systems[0]) == {}, "there are no blocks"
    terms = {
        one.instance: one.terms["cached_part_tokens"]
        for one in world.conductor.why(answer.headers["x-tiffin-request-id"]).candidates
    }
    assert terms == {answer.instance: 256.0, world.other(answer.instance): 0.0}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_prompts_with_one_beginning_go_to_one_instance(
    world: World, kind: str, stream: bool
) -> None:
    """The answers and the blocks are those of vLLM asked directly."""
    seed = 10 * KINDS.index(kind) + stream
    start = prompt(seed, 2 * BLOCK + 6)
    first = world.ask(kind, [*start, *prompt(seed + 100, 60)], stream=stream)
    assert (first.status, first.cached_tokens) == (200, 0)
    world.await_held(start, first.instance, 2)
    assert world.held(start) == {first.instance: 2}
    engine = world.engines[first.instance]
    before = engine.hit_tokens()
    again = [*start, *prompt(seed + 200, 60)]
    second = world.ask(kind, again, stream=stream)
    assert (second.instance, second.cached_tokens) == (first.instance, 2 * BLOCK)
    assert engine.hit_tokens() - before == 2 * BLOCK, "it had what it was believed to have"
    elsewhere = world.engines[world.other(first.instance)]
    assert second.tokens == elsewhere.answer(path_of(kind), body_of(kind, again))
    assert len(second.tokens) == 12
    entry = world.conductor.why(second.headers["x-tiffin-request-id"])
    assert (entry.prefill, entry.cached_tokens) == (first.instance, 2 * BLOCK)


def test_what_depends_on_a_salt_is_nobodys(world: World) -> None:
    salted = prompt(40, 600)
    assert world.ask("ids", salted, cache_salt="pepper").status == 200
    later = prompt(41, 600)
    world.await_held(later, world.ask("ids", later).instance, 1)
    assert world.held(salted) == {}


def test_what_the_engine_refuses_is_its_own_answer(world: World) -> None:
    response = world.http.post(path_of("ids"), json=body_of("ids", [99_999]))
    assert response.status_code == 400
    assert "out of vocabulary" in response.json()["error"]["message"]


def test_after_evictions_and_clients_that_left_the_index_is_what_vllm_has(world: World) -> None:
    starts = [prompt(50 + i, 3 * BLOCK) for i in range(8)]

    def one(seed: int) -> int:
        dice = random.Random(seed)
        ids = starts[int(dice.paretovariate(0.7)) % 8][: dice.choice([600, 1024, 1536])]
        body = body_of("ids", [*ids, *prompt(seed, dice.randrange(1, 900))])
        body |= {"max_tokens": dice.randrange(5, 40), "stream": True}
        while True:
            with world.http.stream("POST", path_of("ids"), json=body) as response:
                for number, _ in enumerate(response.iter_lines()):
                    if seed % 4 == 0 and number > 6:
                        break
            if response.status_code != 429:
                return response.status_code
            time.sleep(0.1)  # their KV caches hold twelve blocks each, and have no room for more

    with ThreadPoolExecutor(6) as pool:
        assert set(pool.map(one, range(100, 130))) == {200}
    for start in starts:
        for name, engine in world.engines.items():
            # A batch of events comes after the answer; these prompts evict other blocks.
            wait_until(lambda: _quiet(world), "nothing runs", PATIENCE_S)
            believed, before = world.held(start).get(name, 0), engine.hit_tokens()
            engine.answer(path_of("ids"), body_of("ids", [*start, 7], max_tokens=1))
            assert (engine.hit_tokens() - before) // BLOCK == believed, name
            world.await_held(start, name, 3)


def _quiet(world: World) -> bool:
    return all(not one.load["batch"] for one in world.conductor.instances())


def test_an_engine_that_dies_before_the_first_token(world: World) -> None:
    """The client does not notice; after its restart the engine counts as empty."""
    ids = prompt(60, 1100)
    for engine in world.engines.values():
        engine.pause()
    found: list[Answer] = []
    asked = threading.Thread(target=lambda: found.append(world.ask("ids", ids, stream=True)))
    asked.start()
    wait_until(lambda: bool(_placed(world)), "it is placed", PATIENCE_S)
    dying = _placed(world)
    alive = world.other(dying)
    world.engines[alive].go_on()
    for seed in range(50, 58):  # of the test before; their blocks have to be evicted
        if dying in world.held(prompt(seed, BLOCK)):
            break
    else:
        pytest.fail("it holds nothing that it could be believed to have")
    world.engines[dying].engine().kill()
    asked.join()
    (answer,) = found
    assert (answer.status, answer.error, answer.done) == (200, None, True)
    assert answer.instance == alive
    assert len(answer.tokens) == 12
    world.engines[dying].end()
    assert world.ask("ids", prompt(61, 600)).instance == alive
    world.revive(dying)
    world.await_held(prompt(seed, BLOCK), dying, 0)


def _placed(world: World) -> str:
    """The instance of the running request; "" if none runs."""
    return next((one.id for one in world.conductor.instances() if one.load["queued"]), "")


@pytest.mark.parametrize(
    ("what", "temperature"), [("engine", 0), ("engine", 1), ("server", 0), ("server", 1)]
)
def test_one_that_dies_in_the_middle_of_a_stream(world: World, what: str, temperature: int) -> None:
    """A greedy one goes on at the other, one that is drawn does not."""
    ids = prompt(70, 1100)

    def kill(name: str) -> None:
        engine = world.engines[name]
        engine.engine().kill() if what == "engine" else engine.kill()

    tokens = 1000
    answer = world.ask(
        "ids", ids, stream=True, max_tokens=tokens, temperature=temperature, seen=kill
    )
    again = world.ask("ids", ids, max_tokens=tokens)
    assert (again.status, again.instance) == (200, world.other(answer.instance))
    if temperature == 0:
        assert (answer.error, answer.done, answer.tokens) == (None, True, again.tokens)
        assert len(again.tokens) == tokens
    else:
        assert answer.error is not None
        # If its HTTP server lives, vLLM itself reports that its engine has died.
        assert answer.error["code"] == (500 if what == "engine" else "engine_failed")
        assert answer.done == (what == "engine")
        assert 0 < len(answer.tokens) < tokens
    world.engines[answer.instance].end()
    world.revive(answer.instance)
