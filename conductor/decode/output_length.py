"""Output length prediction: by the client, else from earlier answers of the same class. Pure.

Decode instances are chosen, and requests admitted, for context that does not exist yet. TetriInfer
(arXiv 2401.11181) uses a small model, which predicts the right bucket of 200 tokens in three cases
of four; Mooncake's admission assumes one length for all. Here the caller names a class of requests
("chat", "summary", "agent-step"), and the prediction is a quantile over a sliding window of the
class's latest answers. It is exact, takes a few microseconds, and drops the answers from before an
application's last release. A reservoir sample would keep those for ever; a sketch (P², GK) saves
memory that a few hundred numbers do not need.

Answers that were cut at their limit are recorded with the length they had, so a class whose answers
are all cut is predicted to reach its limit, and no further.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import OrderedDict, deque
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta

from ..records import TOKENS_MAX

if TYPE_CHECKING:
    from ..records import Request

Tokens = Annotated[int, Meta(ge=1, le=TOKENS_MAX)]


class LengthSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How lengths of answers are predicted."""

    quantile: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.7
    """Which part of a class's answers shall be no longer than predicted. Higher is safer for KV
    room, lower uses it better."""

    default_tokens: Tokens = 256
    """Of an answer nobody knows anything about."""

    heavy_tokens: Tokens = 128
    """An answer predicted to be longer is a heavy decode. TetriInfer's bound."""

    observations_min: Annotated[int, Meta(ge=1, le=1024)] = 16
    """Answers that a class must have had before it is believed."""

    window: Annotated[int, Meta(ge=1, le=4096)] = 256
    """Answers that a class remembers, the latest. 256 give the 70 % quantile to 3 % of rank."""

    classes_max: Annotated[int, Meta(ge=1, le=65_536)] = 1024
    """Classes that are remembered; the one unused for longest is forgotten. Names come from
    callers, so there could be any number: 1,024 of 256 answers are at most some 10 MB."""


class Length(NamedTuple):
    """A predicted output length, and the source of the prediction."""

    tokens: int
    source: Literal["caller", "class", "model", "default"]


class Lengths:
    """Sliding windows of output lengths, per (model, output class) and per model."""

    def __init__(self, settings: LengthSettings | None = None) -> None:
        self._settings = settings or LengthSettings()
        self._windows: OrderedDict[tuple[str, str], _Window] = OrderedDict()

    def __len__(self) -> int:
        return len(self._windows)

    def configure(self, settings: LengthSettings) -> None:
        """Change the settings; recorded lengths stay, as far as the new limits allow."""
        self._settings = settings
        self._forget()
        for window in self._windows.values():
            window.shrink(settings.window)

    def observe(self, request: Request, tokens: int) -> None:
        """Record the length of a finished answer; one without tokens was cancelled: ignored."""
        if tokens < 1:
            return
        for name in {request.output_class, ""}:
            key = (request.model, name)
            window = self._windows.setdefault(key, _Window())
            self._windows.move_to_end(key)
            window.add(min(tokens, TOKENS_MAX))
            window.shrink(self._settings.window)
        self._forget()

    def predict(self, request: Request) -> Length:
        """The predicted length of the whole answer in tokens: at least one, at most its limit.

        Given by the caller, else from the request's class, else from all answers of the model, else
        the default.
        """
        if request.output_tokens is not None:
            return Length(_within(request, request.output_tokens), "caller")
        known = self._known(request)
        if known is not None:
            return Length(_within(request, known.tokens), known.source)
        return Length(_within(request, self._settings.default_tokens), "default")

    def heavy(self, tokens: int) -> bool:
        """Whether an answer of `tokens` is a heavy decode."""
        return tokens > self._settings.heavy_tokens

    def _known(self, request: Request) -> Length | None:
        """The quantile over the recorded answers, if there are enough."""
        settings = self._settings
        sources: tuple[tuple[str, Literal["class", "model"]], ...] = (
            (request.output_class, "class"),
            ("", "model"),
        )
        for name, source in sources:
            window = self._windows.get((request.model, name))
            if (source == "class" and not name) or window is None:
                continue
            if len(window.ordered) >= settings.observations_min:
                return Length(window.quantile(settings.quantile), source)
        return None

    def _forget(self) -> None:
        while len(self._windows) > self._settings.classes_max:
            self._windows.popitem(last=False)


class _Window:
    """The latest lengths of one class, both in order of arrival and sorted."""

    __slots__ = ("latest", "ordered")

    def __init__(self) -> None:
        self.latest: deque[int] = deque()
        self.ordered: list[int] = []

    def add(self, tokens: int) -> None:
        self.latest.append(tokens)
        insort(self.ordered, tokens)

    def shrink(self, size: int) -> None:
        while len(self.latest) > size:
            del self.ordered[bisect_left(self.ordered, self.latest.popleft())]

    def quantile(self, share: float) -> int:
        """The `share` quantile: the smallest length that at least this share of them does not
        exceed."""
        count = len(self.ordered)
        rank = min(max(math.ceil(share * count), 1), count)
        return self.ordered[rank - 1]


def _within(request: Request, tokens: int) -> int:
    """Clamp a length to between one token and the request's limit."""
    limit = TOKENS_MAX if request.output_tokens_max is None else request.output_tokens_max
    return max(1, min(tokens, limit))
