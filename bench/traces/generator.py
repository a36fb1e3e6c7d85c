"""Traces from parameters and a seed.

Sessions begin as a Poisson process. A session starts with the system prompt that all share, then a
prefix from a stock (of tools, of documents; some are more popular than others), then what only it
has. Each further turn repeats the prompt and its answer and adds to them. The kinds differ in
numbers only; where these come from stands beside them.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from math import exp, log
from random import Random
from typing import TYPE_CHECKING

from tiffin.kvstore.errors import InvalidInput

from .trace import BLOCK_TOKENS, Trace, TraceRequest

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, slots=True)
class LogNormal:
    """A quantity that is above 0: its median, and the standard deviation of its logarithm."""

    median: float
    sigma: float

    def draw(self, chance: Random) -> float:
        """A value."""
        return chance.lognormvariate(log(self.median), self.sigma)

    def tokens(self, chance: Random) -> int:
        """A value as a number of tokens, at least 1."""
        return max(1, round(self.draw(chance)))

    @property
    def mean(self) -> float:
        """The expected value."""
        return self.median * exp(self.sigma**2 / 2)


@dataclass(frozen=True, slots=True)
class WorkloadParameters:
    """What a kind of trace is made of. Lengths are tokens, times seconds."""

    rate: float  # requests per second, once as many sessions end as begin
    prefixes: int  # in the stock
    prefix: LogNormal  # length of each
    popularity: float  # exponent of Zipf's law over the stock: 0 is equal
    turns: float  # per session, on average; geometric
    opening: LogNormal  # what the first turn adds to its prefix
    addition: LogNormal  # what each later turn adds to the prompt and answer before it
    answer: LogNormal
    pause: LogNormal  # from one turn of a session to the next
    system_blocks: int = 1
    longest: int = 131_072  # a session ends before a prompt of more tokens


KINDS = {
    # A chat service. Rate, lengths and turns are near those of Mooncake's conversation trace, most
    # of whose prompts are one-off documents.
    "multi-turn": WorkloadParameters(
        rate=3.4,
        prefixes=1,
        prefix=LogNormal(BLOCK_TOKENS, 0),
        popularity=0,
        turns=1.6,
        opening=LogNormal(5_000, 1.2),
        addition=LogNormal(600, 1.3),
        answer=LogNormal(250, 0.8),
        pause=LogNormal(90, 1.0),
    ),
    # Agents that call tools. Table 1 of Mooncake's FAST '25 paper: prompts of 8,596 tokens and
    # answers of 182, 59% from a cache.
    "tool-agent": WorkloadParameters(
        rate=6.5,
        prefixes=8,
        prefix=LogNormal(2_500, 0.6),
        popularity=1.0,
        turns=1.7,
        opening=LogNormal(2_200, 1.1),
        addition=LogNormal(900, 1.2),
        answer=LogNormal(90, 1.2),
        pause=LogNormal(8, 0.8),
    ),
    # Questions over documents that several users share, as in L-Eval and LooGLE: some of ten to
    # thirty thousand tokens each, and short questions and answers.
    "long-document": WorkloadParameters(
        rate=1.0,
        prefixes=200,
        prefix=LogNormal(16_000, 0.6),
        popularity=0.8,
        turns=1.5,
        opening=LogNormal(60, 0.7),
        addition=LogNormal(60, 0.7),
        answer=LogNormal(120, 0.8),
        pause=LogNormal(40, 0.8),
    ),
}


def generate(kind: str, requests: int, seed: int) -> Trace:
    """So many requests of a kind (`KINDS`); the same for the same seed. Raises InvalidInput."""
    if kind not in KINDS:
        raise InvalidInput(f"no kind of trace {kind!r}; there are: {', '.join(KINDS)}")
    return generate_from(KINDS[kind], requests, seed, name=kind)


def generate_from(
    parameters: WorkloadParameters, requests: int, seed: int, *, name: str = "generated"
) -> Trace:
    """So many requests; the same for the same parameters and seed."""
    if requests < 1:
        raise InvalidInput(f"a trace has at least one request, not {requests}")
    source = Sessions(parameters, Random(seed)).requests()
    return Trace(name, tuple(next(source) for _ in range(requests)))


@dataclass(slots=True)
class Session:
    """Where a session stands: its next prompt has `shared` blocks that exist already."""

    shared: tuple[int, ...]
    prompt_tokens: int


class Sessions:
    """Sessions that run at once, and their requests in order of arrival."""

    def __init__(self, parameters: WorkloadParameters, chance: Random) -> None:
        self._parameters = parameters
        self._chance = chance
        self._fresh = count()  # block ids, numbered in order of appearance
        system = self._new_blocks(parameters.system_blocks)
        lengths = [parameters.prefix.tokens(chance) for _ in range(parameters.prefixes)]
        self._stock = [system + self._new_blocks(length // BLOCK_TOKENS) for length in lengths]
        self._weights = [rank**-parameters.popularity for rank in range(1, len(self._stock) + 1)]

    def requests(self) -> Iterator[TraceRequest]:
        """All requests; there is no last one."""
        # By arrival; the number breaks ties. None is the next session's start.
        agenda: list[tuple[float, int, Session | None]] = [(0.0, 0, None)]
        for number in count(1):
            now_s, _, session = heappop(agenda)
            if session is None:
                gap_s = self._chance.expovariate(self._parameters.rate / self._parameters.turns)
                heappush(agenda, (now_s + gap_s, number, None))
                session = self._opened()
            request = self._request(session, now_s)
            yield request
            if self._goes_on(session, request):
                pause_s = self._parameters.pause.draw(self._chance)
                heappush(agenda, (now_s + pause_s, -number, session))

    def _opened(self) -> Session:
        (prefix,) = self._chance.choices(self._stock, self._weights)
        length = len(prefix) * BLOCK_TOKENS + self._parameters.opening.tokens(self._chance)
        return Session(prefix, min(length, self._parameters.longest))

    def _request(self, session: Session, now_s: float) -> TraceRequest:
        tokens = session.prompt_tokens
        fresh = self._new_blocks(-(-tokens // BLOCK_TOKENS) - len(session.shared))
        answer = self._parameters.answer.tokens(self._chance)
        return TraceRequest(round(now_s, 6), tokens, answer, session.shared + fresh)

    def _goes_on(self, session: Session, request: TraceRequest) -> bool:
        """Prepare the session's next turn. False if this was its last."""
        session.shared = request.blocks[: request.full_blocks()]
        session.prompt_tokens = (
            request.prompt_tokens
            + request.output_tokens
            + self._parameters.addition.tokens(self._chance)
        )
        more = self._chance.random() < 1 - 1 / self._parameters.turns
        return more and session.prompt_tokens <= self._parameters.longest

    def _new_blocks(self, number: int) -> tuple[int, ...]:
        return tuple(next(self._fresh) for _ in range(number))
