"""Predictors that learn online: quantiles over the latest answers of a request's kind. Pure.

`quantile` knows a kind by (model, output class), and by model alone. `buckets` knows the power of
two of the prompt's length as well: TetriInfer's classifier (arXiv 2401.11181) reads the prompt, and
its length is what is known here without reading it.

The quantile is exact over a sliding window. It takes a few microseconds, and drops the answers from
before an application's last release. A reservoir sample would keep those for ever; a sketch (P²,
GK) saves memory that a few hundred numbers do not need.

Answers that were cut at their limit are recorded with the length they had, so a class whose answers
are all cut is predicted to reach its limit, and no further.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import OrderedDict, deque
from typing import TYPE_CHECKING

from ..records import TOKENS_MAX
from .length_predictor import Length, LengthSettings, register

if TYPE_CHECKING:
    from ..records import Request

    # Model, output class ("" for any), power of two of the prompt's length (-1 for any).
    Kind = tuple[str, str, int]

_ANY = -1


@register("quantile")
class QuantileLengths:
    """Sliding windows per (model, output class) and per model."""

    def __init__(self, settings: LengthSettings) -> None:
        self._settings = settings
        self._windows: OrderedDict[Kind, _Window] = OrderedDict()

    def __len__(self) -> int:
        return len(self._windows)

    def configure(self, settings: LengthSettings) -> None:
        """See `LengthPredictor`."""
        self._settings = settings
        self._forget()
        for window in self._windows.values():
            window.shrink(settings.window)

    def observe(self, request: Request, tokens: int) -> None:
        """See `LengthPredictor`."""
        for kind in self._kinds(request):
            window = self._windows.setdefault(kind, _Window())
            self._windows.move_to_end(kind)
            window.add(min(tokens, TOKENS_MAX))
            window.shrink(self._settings.window)
        self._forget()

    def predict(self, request: Request) -> Length | None:
        """The quantile over the answers of the closest kind that has enough of them."""
        for kind in self._kinds(request):
            window = self._windows.get(kind)
            if window is not None and len(window.ordered) >= self._settings.observations_min:
                source = "class" if kind[1] else "model"
                return Length(window.quantile(self._settings.quantile), source)
        return None

    def _kinds(self, request: Request) -> list[Kind]:
        """The kinds that a request is of, the closest first."""
        named = [(request.model, request.output_class, _ANY)] if request.output_class else []
        return [*named, (request.model, "", _ANY)]

    def _forget(self) -> None:
        while len(self._windows) > self._settings.classes_max:
            self._windows.popitem(last=False)


@register("buckets")
class BucketLengths(QuantileLengths):
    """Sliding windows per (model, output class, power of two of the prompt's length) as well."""

    def _kinds(self, request: Request) -> list[Kind]:
        size = request.prompt_tokens.bit_length()
        return [
            closer
            for model, name, _ in super()._kinds(request)
            for closer in ((model, name, size), (model, name, _ANY))
        ]


class _Window:
    """The latest lengths of one kind, both in order of arrival and sorted."""

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
