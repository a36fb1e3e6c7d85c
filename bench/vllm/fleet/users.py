"""Users who talk: each of their prompts is the one before, an answer to it, and a question."""

from __future__ import annotations

import math
import random
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...serving.completions import Refused, ask
from ...serving.servers import SCHEMA
from ...traces.ideal_cache import IdealCache
from ..engine.model import VOCABULARY

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ...serving.servers import Server

ANSWER_TOKENS = 8
_TALKING = 16
_OPENING_TOKENS, _ADDED_TOKENS = (520, 1100), (150, 700)


@dataclass(frozen=True, slots=True)
class Prompt:
    """One turn of a user."""

    user: int
    turn: int
    tokens: list[int]

    @property
    def chain(self) -> tuple[int, ...]:
        """A number for each whole block."""
        return tuple(hash(key) for key in SCHEMA.prefix(self.tokens).keys)


@dataclass(frozen=True, slots=True)
class Served:
    """What came of a prompt: by which instance, seconds to the first token since it was due, cached
    tokens that the conductor counted on and the engine found."""

    prompt: Prompt
    request_id: str
    instance: str
    ttft_s: float
    expected_tokens: int
    found_tokens: int
    answer: tuple[int, ...]
    refused: bool = False

    @property
    def found_in_blocks(self) -> int:
        """Found tokens, of whole blocks."""
        return self.found_tokens // SCHEMA.block_tokens * SCHEMA.block_tokens


def conversations(users: int, turns: int, seed: int) -> list[Prompt]:
    """All users' prompts. So many talk at a time, in random order, and who has said all is followed
    by the next user. Lengths are uniform."""
    dice = random.Random(seed)

    def text(least: int, most: int) -> list[int]:
        return dice.choices(range(VOCABULARY), k=dice.randint(least, most))

    waiting = list(range(users))
    talking = [(user, 0, text(*_OPENING_TOKENS)) for user in waiting[:_TALKING]]
    del waiting[:_TALKING]
    found = []
    while talking:
        user, turn, said = talking.pop(dice.randrange(len(talking)))
        found.append(Prompt(user, turn, said))
        if turn + 1 < turns:
            talking.append((user, turn + 1, said + text(*_ADDED_TOKENS)))
        elif waiting:
            talking.append((waiting.pop(0), 0, text(*_OPENING_TOKENS)))
    return found


def last_of_each(prompts: Iterable[Prompt]) -> list[Prompt]:
    """Every user's last prompt, in the order of users."""
    return [one for _, one in sorted({one.user: one for one in prompts}.items())]


def ideal_tokens(prompts: Iterable[Prompt], capacity_blocks: int) -> int:
    """Tokens that one LRU cache of so many blocks would have, each once."""
    cache = IdealCache(capacity_blocks)
    return sum(cache.serve(one.chain) for one in prompts) * SCHEMA.block_tokens


def send(
    gateway: Server,
    prompt: Prompt,
    name: str,
    *,
    due_at: float | None = None,
    ttft_s: float | None = None,
) -> Served:
    """Send one prompt. `due_at`: when it should have been sent, by the clock of performance;
    `ttft_s`: its objective. Raises ProcessFailed."""
    late_s = 0.0 if due_at is None else max(0.0, time.perf_counter() - due_at)
    usage = {"include_usage": True}
    try:
        answer = ask(gateway, prompt.tokens, ANSWER_TOKENS, name, ttft_s, stream_options=usage)
    except Refused:
        return Served(prompt, "", "", math.inf, 0, 0, (), refused=True)
    return Served(
        prompt,
        answer.request_id,
        answer.decode,
        late_s + answer.arrivals_s[0],
        answer.cached_tokens,
        answer.found_tokens,
        tuple(answer.tokens),
    )


def one_by_one(gateway: Server, prompts: Sequence[Prompt], name: str) -> list[Served]:
    """Each prompt when the one before is answered."""
    return [send(gateway, one, f"{name}-{number}") for number, one in enumerate(prompts)]


def at_most(gateway: Server, prompts: Sequence[Prompt], name: str) -> float:
    """Requests per second when _TALKING users talk at a time, each as soon as he is answered."""
    said: dict[int, list[Prompt]] = {}
    for one in prompts:
        said.setdefault(one.user, []).append(one)
    began = time.perf_counter()
    with ThreadPoolExecutor(_TALKING) as threads:
        for _ in threads.map(
            lambda own: one_by_one(gateway, own, f"{name}-{own[0].user}"), said.values()
        ):
            pass
    return len(prompts) / (time.perf_counter() - began)


def arriving(
    gateway: Server, prompts: Sequence[Prompt], name: str, rate_s: float, seed: int
) -> list[Served]:
    """The prompts as they come, `rate_s` per second, whoever is answered."""
    dice, now = random.Random(seed), time.perf_counter()
    with ThreadPoolExecutor(len(prompts)) as threads:
        pending = []
        for number, one in enumerate(prompts):
            now += dice.expovariate(rate_s)
            time.sleep(max(0.0, now - time.perf_counter()))
            pending.append(threads.submit(send, gateway, one, f"{name}-{number}", due_at=now))
        return [one.result() for one in pending]
