"""Fifty users talk with two real vLLMs, turn after turn. Behind the gateway the engines find nearly
all that any of them has computed; asked in turns, they do not. Times to first tokens are printed.

TIFFIN_VLLM=/path/to/venv/bin/python pytest -m slow -s tests/conductor/gateway/test_turns_vllm.py
"""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from kvsupport import wait_until
from vllmsupport import MARKS, MODEL, PATIENCE_S, Vllm, make_model, prompt, two_vllms, words

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

pytestmark = MARKS

USERS = 50
TURNS = 6
SYSTEMS = 5  # prompts that ten users each share, shorter than a block of the index
SYSTEM_TOKENS = (150, 400)
QUESTION_TOKENS = (100, 400)
ANSWER_TOKENS = 16
ARRIVAL_S, THINK_S = 0.2, 1.0  # between users; in the mean, before a question
ENGINE_BLOCK = 128
# One engine has room for all conversations of both loads: nothing is evicted.
ROOM = ("--num-gpu-blocks-override", "2000", "--max-num-seqs", "32")
PROFILE = "llama-3.1-8b.h100.tp1.vllm"


@dataclass(frozen=True)
class Turn:
    """What was asked and said, in token ids, and when: by the clock of this process."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    sent_s: float
    ttft_s: float


@dataclass
class World:
    """All running processes."""

    engines: list[Vllm]
    gateway: httpx.Client

    def cache(self) -> tuple[float, float]:
        """The tokens of prompts that both engines found in their caches, and looked for."""
        hits = sum(one.hit_tokens() for one in self.engines)
        return hits, sum(one.counter("prefix_cache_queries") for one in self.engines)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("turns")
    make_model(folder / "model", hidden=512)
    with contextlib.ExitStack() as stack:
        started = two_vllms(folder, 'keys = "conductor"', PROFILE, *ROOM)
        engines, door = stack.enter_context(started)
        limits = httpx.Limits(max_connections=None)
        http = httpx.Client(
            base_url=door.gateway_url, trust_env=False, timeout=PATIENCE_S, limits=limits
        )
        stack.callback(http.close)
        wait_until(lambda: http.get("/readyz").status_code == 200, "the gateway knows", PATIENCE_S)
        yield World(engines, http)


def ask(http: httpx.Client, messages: Sequence[dict[str, str]]) -> tuple[Turn, str]:
    """Stream an answer; returns its text as well."""
    body = {"model": MODEL, "messages": messages, "max_tokens": ANSWER_TOKENS, "stream": True}
    body |= {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
    asked: list[int] = []
    said: list[int] = []
    text, ttft_s, sent_s = "", 0.0, time.monotonic()
    with http.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            event: dict[str, Any] = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            asked = event.get("prompt_token_ids") or asked
            for choice in event["choices"]:
                if choice.get("token_ids") and not said:
                    ttft_s = time.monotonic() - sent_s
                said += choice.get("token_ids") or []
                text += choice["delta"].get("content") or ""
    assert len(said) == ANSWER_TOKENS
    return Turn(tuple(asked), tuple(said), sent_s, ttft_s), text


@dataclass
class Load:
    """All users' turns. Loads of several seeds have no prompt in common, and are else alike."""

    seed: int
    turns: list[Turn] = field(default_factory=list)

    def run(self, door: Callable[[], httpx.Client]) -> None:
        """Returns when all have left. `door`: whom to ask next."""
        with ThreadPoolExecutor(USERS) as pool:
            for turns in pool.map(lambda user: self._talk(user, door), range(USERS)):
                self.turns += turns

    def _talk(self, user: int, door: Callable[[], httpx.Client]) -> list[Turn]:
        dice = random.Random(user)
        system = user % SYSTEMS
        tokens = random.Random(system).randint(*SYSTEM_TOKENS)
        messages = [message("system", self._text(system, tokens))]
        time.sleep(user * ARRIVAL_S)
        turns: list[Turn] = []
        for number in range(1, 1 + TURNS):
            question = self._text(1000 * number + user, dice.randint(*QUESTION_TOKENS))
            messages.append(message("user", question))
            turn, text = ask(door(), messages)
            messages.append(message("assistant", text))
            turns.append(turn)
            time.sleep(dice.expovariate(1 / THINK_S))
        return turns

    def _text(self, number: int, tokens: int) -> str:
        return words(prompt(100_000 * self.seed + number, tokens))

    def prompt_tokens(self) -> int:
        return sum(len(one.prompt) for one in self.turns)

    def possible_tokens(self) -> int:
        """What one cache for all would find, with room for all, if each prompt were computed at the
        moment it is sent. A prompt's last token is always computed, an answer's never."""
        known: set[tuple[int, ...]] = set()
        found = 0
        for one in sorted(self.turns, key=lambda turn: turn.sent_s):
            chain = starts((*one.prompt, *one.answer[:-1]))
            usable = (len(one.prompt) - 1) // ENGINE_BLOCK
            hits = itertools.takewhile(known.__contains__, chain[:usable])
            found += ENGINE_BLOCK * len(list(hits))
            known.update(chain)
        return found

    def ttft_p50_s(self) -> float:
        return statistics.median(one.ttft_s for one in self.turns)


def message(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


def starts(ids: tuple[int, ...]) -> list[tuple[int, ...]]:
    """What the engine's blocks stand for: all tokens up to the end of each."""
    return [ids[:end] for end in range(ENGINE_BLOCK, len(ids) + 1, ENGINE_BLOCK)]


def measured(world: World, load: Load, door: Callable[[], httpx.Client]) -> float:
    """The share of all prompt tokens that the engines found in their caches."""
    before = world.cache()
    load.run(door)
    hits, queries = (now - then for now, then in zip(world.cache(), before, strict=True))
    assert queries == load.prompt_tokens(), "they were asked for something else as well"
    return hits / queries


def test_engines_find_what_any_of_them_has_computed(world: World) -> None:
    in_turns = itertools.cycle(one.http for one in world.engines)
    for one in world.engines:  # their first prompts take longer
        ask(one.http, [message("user", words(prompt(1, 300)))])
    rates, possible, ttft_s = {}, {}, {}
    doors = {"in turns": lambda: next(in_turns), "gateway": lambda: world.gateway}
    for seed, (name, door) in enumerate(doors.items(), start=2):
        load = Load(seed)
        rates[name] = measured(world, load, door)
        possible[name] = load.possible_tokens() / load.prompt_tokens()
        ttft_s[name] = load.ttft_p50_s()
        print(
            f"{name:8}: {rates[name]:.1%} of the prompts' tokens found, {possible[name]:.1%} is"
            f" possible; TTFT p50 {1e3 * ttft_s[name]:.0f} ms"
        )
    print(f"TTFT p50 of the gateway / in turns: {ttft_s['gateway'] / ttft_s['in turns']:.2f}")
    assert possible["gateway"] - rates["gateway"] < 0.03
    assert possible["in turns"] - rates["in turns"] > 0.1
