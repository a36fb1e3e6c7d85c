"""How long an answer will be: what its caller says, else what those of its class were before. Pure.

Decode is chosen, and admitted, for context that does not exist yet. TetriInfer (arXiv 2401.11181)
asks a small model, which is right about the bucket of 200 tokens in three cases of four; Mooncake's
admission takes one length for all. Here a class of requests, named by the caller ("chat",
"summary", "agent-step"), remembers its last answers and offers a quantile of them: exact, a few
microseconds, and it forgets what an application did before its last release. A reservoir would
remember that for ever, a sketch (P², GK) saves memory that a few hundred numbers do not need.

Answers that were cut at their limit are remembered as they were, so a class whose answers are all
cut is predicted to reach its limit, and no further.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict, deque
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta

from .records import TOKENS_MAX

if TYPE_CHECKING:
    from .records import Request

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
    """A prediction, and whom it is from."""

    tokens: int
    source: Literal["caller", "class", "model", "default"]


class Lengths:
    """What is known of answers, per (model, output class) and per model."""

    def __init__(self, settings: LengthSettings | None = None) -> None:
        self._settings = settings or LengthSettings()
        self._windows: OrderedDict[tuple[str, str], _Window] = OrderedDict()

    def __len__(self) -> int:
        return len(self._windows)

    def configure(self, settings: LengthSettings) -> None:
        """Change the settings; what is remembered stays, as far as it fits."""
        self._settings = settings
        self._forget()
        for window in self._windows.values():
            window.shrink(settings.window)

    def observe(self, request: Request, tokens: int) -> None:
        """An answer of `tokens` has ended. One without any was cancelled, and says nothing."""
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
        """How many tokens the whole answer will have: at least one, at most its limit.

        By the caller, else the request's class, else all answers of the model, else the default.
        """
        if request.output_tokens is not None:
            return Length(_within(request, request.output_tokens), "caller")
        known = self._known(request, 0)
        if known is not None:
            return Length(_within(request, known.tokens), known.source)
        return Length(_within(request, self._settings.default_tokens), "default")

    def remaining(self, request: Request, answered_tokens: int) -> int:
        """How many more tokens will come after the first `answered_tokens`.

        While the prediction holds, what is left of it. Beyond it, the quantile of those answers
        that were longer than this one already is; and when none was, as much again: of lengths
        without a scale, that is the median of what is left.
        """
        expected = self.predict(request).tokens
        if expected <= answered_tokens:
            known = self._known(request, answered_tokens)
            expected = known.tokens if known is not None else 2 * answered_tokens
        return max(0, _within(request, expected) - answered_tokens)

    def heavy(self, tokens: int) -> bool:
        """Whether an answer of that many tokens is a heavy decode."""
        return tokens > self._settings.heavy_tokens

    def _known(self, request: Request, above: int) -> Length | None:
        """The quantile of the answers that had more than `above` tokens, if enough did."""
        settings = self._settings
        # Of the few that are longer than most, a single one says more than nobody.
        enough = settings.observations_min if above == 0 else 1
        sources: tuple[tuple[str, Literal["class", "model"]], ...] = (
            (request.output_class, "class"),
            ("", "model"),
        )
        for name, source in sources:
            window = self._windows.get((request.model, name))
            if (source == "class" and not name) or window is None:
                continue
            if window.above(above) >= enough:
                return Length(window.quantile(settings.quantile, above), source)
        return None

    def _forget(self) -> None:
        while len(self._windows) > self._settings.classes_max:
            self._windows.popitem(last=False)


class _Window:
    """The latest lengths of one class: in order of arrival, and in order of size."""

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

    def above(self, tokens: int) -> int:
        """How many are longer."""
        return len(self.ordered) - bisect_right(self.ordered, tokens)

    def quantile(self, share: float, above: int) -> int:
        """The smallest length that at least `share` of those longer than `above` do not exceed."""
        count = self.above(above)
        rank = min(max(math.ceil(share * count), 1), count)
        return self.ordered[len(self.ordered) - count + rank - 1]


def _within(request: Request, tokens: int) -> int:
    """Between one token and the request's limit."""
    limit = TOKENS_MAX if request.output_tokens_max is None else request.output_tokens_max
    return max(1, min(tokens, limit))
