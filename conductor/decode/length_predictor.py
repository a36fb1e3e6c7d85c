"""What predicts the length of an answer: settings, the interface, and the registry by name. Pure.

A predictor learns from answers that have ended, and says how long one will be that has not begun;
or that it does not know. `output_length.py` asks it, after the caller and before the default.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, NamedTuple, Protocol

import msgspec
from msgspec import Meta

from ..errors import InvalidRequest
from ..records import TOKENS_MAX

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..records import Request

Tokens = Annotated[int, Meta(ge=1, le=TOKENS_MAX)]


class LengthSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How lengths of answers are predicted."""

    predictor: Annotated[str, Meta(min_length=1, max_length=64)] = "buckets"
    """Who predicts an answer whose caller does not: `quantile` of earlier answers of its class, or
    `buckets`, the same by the length of the prompt as well: better where callers of several
    applications name no class, and as good elsewhere (docs/conductor/decode.md)."""

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
    """A predicted output length, and the source of the prediction: "caller", "class", "model",
    "default", or what a predictor calls its own."""

    tokens: int
    source: str


class LengthPredictor(Protocol):
    """Predicts lengths of answers. `len` is the number of classes that it remembers."""

    def __len__(self) -> int: ...

    def configure(self, settings: LengthSettings) -> None:
        """Take new settings; what was learned stays, as far as the new limits allow."""

    def observe(self, request: Request, tokens: int) -> None:
        """Learn from an answer of at least one token that has ended."""

    def predict(self, request: Request) -> Length | None:
        """The whole answer's length; None if nothing is known of its kind."""


_PREDICTORS: dict[str, Callable[[LengthSettings], LengthPredictor]] = {}


def register(
    name: str,
) -> Callable[
    [Callable[[LengthSettings], LengthPredictor]], Callable[[LengthSettings], LengthPredictor]
]:
    """A class decorator that registers a predictor under `name`."""

    def add(
        make: Callable[[LengthSettings], LengthPredictor],
    ) -> Callable[[LengthSettings], LengthPredictor]:
        _PREDICTORS[name] = make
        return make

    return add


def predictor(settings: LengthSettings) -> LengthPredictor:
    """A new predictor, by the settings' name. Raises InvalidRequest for an unknown one."""
    make = _PREDICTORS.get(settings.predictor)
    if make is None:
        raise InvalidRequest(
            f"lengths.predictor: no {settings.predictor!r}; there are {', '.join(names())}"
        )
    return make(settings)


def names() -> list[str]:
    """The names of all registered predictors, sorted."""
    return sorted(_PREDICTORS)
