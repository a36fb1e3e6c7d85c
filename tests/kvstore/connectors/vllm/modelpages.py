"""The model engine's pages and requests: a prefix cache in vLLM's order of eviction."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING

from fakepool import PAGE, content_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tiffin.kvstore.connectors.vllm.orders import StepOrders, StepReport


class Status(Enum):
    WAITING = auto()
    LOADING = auto()  # vLLM: WAITING_FOR_REMOTE_KVS
    RUNNING = auto()
    FINISHED = auto()


@dataclass(eq=False)
class ModelRequest:
    """`tokens`: those that the scheduler knows. `sampled`: with those that only the worker knows.
    `epoch` counts how often a failed load took tokens back: older outputs are dropped."""

    name: str
    tokens: list[int]
    tokens_max: int
    status: Status = Status.WAITING
    sampled: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    cached_pages: int = 0
    computed: int = 0
    in_flight: int = 0
    placeholders: int = 0
    last_step: int = 0
    epoch: int = 0
    aborted: bool = False
    loaded_pages: frozenset[int] = frozenset()
    offer_limit: float = math.inf  # tokens that may still be offered, after a failed load

    def __post_init__(self) -> None:
        self.sampled = list(self.tokens)


@dataclass(eq=False)
class ModelStep:
    """One step: (first token, how many) by request, and what belongs to that."""

    number: int
    budget: int
    scheduled: dict[str, tuple[int, int]] = field(default_factory=dict)
    requests: dict[str, ModelRequest] = field(default_factory=dict)
    pages: dict[str, list[int]] = field(default_factory=dict)
    epochs: dict[str, int] = field(default_factory=dict)
    samples: set[str] = field(default_factory=set)
    preempted: list[str] = field(default_factory=list)
    taken: list[int] = field(default_factory=list)  # pages that get another content
    orders: StepOrders | None = None
    output: StepOutput | None = None


@dataclass(eq=False)
class StepOutput:
    """What the workers say together at the end of a step."""

    saved: list[str]
    loaded: list[str]
    bad_pages: set[int]
    report: StepReport


class PageCache:
    """Pages with reference counts; free ones keep their hash until they are taken."""

    def __init__(self, count: int) -> None:
        self.references = [0] * count
        self.free = list(range(count))  # the first is taken first
        self._hashes: list[int | None] = [None] * count
        self._by_hash: dict[int, dict[int, None]] = {}

    def hits(self, tokens: Sequence[int]) -> list[int]:
        """The cached pages of these tokens; the last token is left to compute."""
        content, found = content_of(tokens), []
        for end in range(PAGE, len(tokens), PAGE):
            pages = self._by_hash.get(content[end - 1])
            if not pages:
                break
            found.append(next(iter(pages)))
        return found

    def room_for(self, count: int, hits: Iterable[int] = ()) -> bool:
        """Whether `count` pages can be taken when `hits` are in use."""
        return count <= len(self.free) - sum(not self.references[page] for page in hits)

    def touch(self, pages: Iterable[int]) -> None:
        for page in pages:
            if not self.references[page]:
                self.free.remove(page)
            self.references[page] += 1

    def take(self, count: int) -> list[int]:
        taken, self.free = self.free[:count], self.free[count:]
        for page in taken:
            self._forget(page)
            self.references[page] = 1
        return taken

    def release(self, pages: Sequence[int]) -> None:
        """Free a request's pages: its last ones are taken first."""
        first, last = [], []
        for page in reversed(pages):
            self.references[page] -= 1
            assert self.references[page] >= 0, "a page was freed twice"
            if not self.references[page]:
                (first if self._hashes[page] is None else last).append(page)
        self.free = first + self.free + last

    def cache(self, request: ModelRequest, tokens: int) -> None:
        """The full pages among the request's first `tokens` tokens can be hit from now on."""
        end = min(tokens, len(request.tokens)) // PAGE
        if end <= request.cached_pages:
            return
        content = content_of(request.tokens[: end * PAGE])
        for index in range(request.cached_pages, end):
            page, value = request.pages[index], content[(index + 1) * PAGE - 1]
            if self._hashes[page] is None:
                self._hashes[page] = value
                self._by_hash.setdefault(value, {})[page] = None
        request.cached_pages = end

    def evict(self, pages: Iterable[int]) -> None:
        """These pages can't be hit any more; requests that have them keep them."""
        for page in pages:
            self._forget(page)

    def _forget(self, page: int) -> None:
        value, self._hashes[page] = self._hashes[page], None
        if value is not None:
            del self._by_hash[value][page]
