"""Output length prediction: by the client, else by a predictor, else a default. Pure.

Decode instances are chosen, and requests admitted, for context that does not exist yet. TetriInfer
(arXiv 2401.11181) uses a small model, which predicts the right bucket of 200 tokens in three cases
of four; Mooncake's admission assumes one length for all. Here the caller names a class of requests
("chat", "summary", "agent-step"), and a predictor learns from the latest answers of the class.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..records import TOKENS_MAX
from .length_predictor import Length, LengthSettings, predictor

if TYPE_CHECKING:
    from ..records import Request
    from .length_predictor import LengthPredictor


class Lengths:
    """Predicted lengths, by the predictor that the settings name."""

    def __init__(self, settings: LengthSettings | None = None) -> None:
        self._settings = settings or LengthSettings()
        self._predictor = predictor(self._settings)

    def __len__(self) -> int:
        return len(self._predictor)

    def configure(self, settings: LengthSettings) -> None:
        """Change the settings; recorded lengths stay, as far as the new limits allow, unless
        another predictor is named."""
        if settings.predictor != self._settings.predictor:
            self._predictor = predictor(settings)
        self._settings = settings
        self._predictor.configure(settings)

    def use(self, other: LengthPredictor) -> None:
        """Let another predictor predict, that no setting names: a model of one's own, or one that
        knows the answers, in a simulation."""
        self._predictor = other

    def observe(self, request: Request, tokens: int) -> None:
        """Record the length of a finished answer; one without tokens was cancelled: ignored."""
        if tokens > 0:
            self._predictor.observe(request, tokens)

    def predict(self, request: Request) -> Length:
        """The predicted length of the whole answer in tokens: at least one, at most its limit.

        Given by the caller, else by the predictor, else the default.
        """
        if request.output_tokens is not None:
            return Length(_within(request, request.output_tokens), "caller")
        known = self._predictor.predict(request)
        if known is not None:
            return Length(_within(request, known.tokens), known.source)
        return Length(_within(request, self._settings.default_tokens), "default")

    def heavy(self, tokens: int) -> bool:
        """Whether an answer of `tokens` is a heavy decode."""
        return tokens > self._settings.heavy_tokens


def _within(request: Request, tokens: int) -> int:
    """Clamp a length to between one token and the request's limit."""
    limit = TOKENS_MAX if request.output_tokens_max is None else request.output_tokens_max
    return max(1, min(tokens, limit))
