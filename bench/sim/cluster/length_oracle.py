"""A predictor that knows the answers of a trace, and is wrong in a settable share of cases."""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING

from tiffin.conductor.decode.length_predictor import Length

if TYPE_CHECKING:
    from collections.abc import Callable

    from tiffin.conductor.decode.length_predictor import LengthSettings
    from tiffin.conductor.records import Request

# Of TetriInfer's classifier, in its buckets of 200 tokens (arXiv 2401.11181).
TETRIINFER_ACCURACY = 0.749


class LengthOracle:
    """`truth` gives the tokens of a request's answer. Without `bucket_tokens` the prediction is
    that; with them the end of the bucket that it is in, or, in all but an `accuracy` of cases, of
    one beside it."""

    def __init__(
        self,
        truth: Callable[[Request], int],
        seed: int,
        *,
        bucket_tokens: int = 0,
        accuracy: float = 1.0,
    ) -> None:
        self._truth, self._seed = truth, seed
        self._bucket_tokens, self._accuracy = bucket_tokens, accuracy

    def __len__(self) -> int:
        return 0

    def configure(self, settings: LengthSettings) -> None:
        """It has no settings."""

    def observe(self, request: Request, tokens: int) -> None:
        """It knows."""

    def predict(self, request: Request) -> Length:
        """The same for the same request, however often it is asked."""
        tokens, width = self._truth(request), self._bucket_tokens
        if not width:
            return Length(tokens, "oracle")
        bucket, dice = math.ceil(tokens / width), random.Random(f"{self._seed} {request.id}")
        if dice.random() >= self._accuracy:
            bucket += 1 if bucket == 1 else dice.choice((-1, 1))
        return Length(bucket * width, "oracle")
