"""A model that is arithmetic: what stands in its cache can be computed without an engine.

Each token's entry is one word per layer, made of the token and of all words before it in the
request's pages, and the next token is made of all words. So one wrong byte anywhere changes all
that is computed behind it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Words = NDArray[np.uint64]

LAYERS = 2
VOCABULARY = 1000
WORD_BYTES = 8
_MASK = (1 << 64) - 1
_FACTORS = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F)


def word(layer: int, token: int, total: int) -> int:
    """A token's word in a layer; `total`: the sum of all words before the token."""
    return ((token + 1) * _FACTORS[layer] + total * _FACTORS[1 - layer] + layer) & _MASK


def extend(total: int, tokens: Sequence[int]) -> tuple[int, Words]:
    """The words of tokens that come after words of this sum: the new sum, [layers, tokens]."""
    words = np.empty((LAYERS, len(tokens)), np.uint64)
    for index, token in enumerate(tokens):
        mine = [word(layer, token, total) for layer in range(LAYERS)]
        words[:, index] = mine
        total = (total + sum(mine)) & _MASK
    return total, words


def next_token(total: int) -> int:
    """The token that follows words of this sum."""
    return int((total >> 13) % VOCABULARY)


@lru_cache(maxsize=4096)
def answer(prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    """The `count` tokens that the model says to a prompt."""
    total, _ = extend(0, prompt)
    said = [next_token(total)]
    while len(said) < count:
        total, _ = extend(total, said[-1:])
        said.append(next_token(total))
    return tuple(said)


class Pages:
    """The cache: `layers[i]` is layer i's tensor, as an engine registers it."""

    def __init__(self, pages: int, page_tokens: int) -> None:
        import torch

        self._page_tokens = page_tokens
        # An engine's pages are not cleared; words that are nobody's must not look right.
        garbage = np.random.default_rng(1).integers(0, 2**63, (LAYERS, pages, page_tokens))
        self._words = garbage.astype(np.uint64)
        self.layers: list[Any] = [
            torch.from_numpy(self._words[layer].view(np.int64).reshape(pages, 1, page_tokens, 1))
            for layer in range(LAYERS)
        ]

    def total(self, pages: Sequence[int], tokens: int) -> int:
        """The sum of the words of the first `tokens` tokens in these pages."""
        words = self._words[:, list(pages)].reshape(LAYERS, -1)[:, :tokens]
        return int(words.sum(dtype=np.uint64))

    def write(self, pages: Sequence[int], begin: int, words: Words) -> None:
        """Write words of tokens from position `begin` on."""
        for index in range(words.shape[1]):
            page, offset = divmod(begin + index, self._page_tokens)
            self._words[:, pages[page], offset] = words[:, index]

    def spoil(self, pages: Sequence[int]) -> None:
        """Fill pages with what is wrong for every request."""
        self._words[:, list(pages)] += np.uint64(0x5DEECE66D)
