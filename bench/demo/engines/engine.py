"""An engine over transformers: fills a cache with a prompt, generates tokens, and measures both.

One sequence at a time, greedy, on one core.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch
from transformers import DynamicCache

from tiffin.kvstore.connectors.transformers.cache_argument import with_cache

from .model import NEW_TOKENS, build

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .model import ModelSize

# If part of the prompt is in the cache, transformers' attention on CPUs also computes the masked
# half, for all new tokens at once; in chunks it computes little of it. Without anything in the
# cache a prompt is faster in one piece. So each prefill runs in the way that is faster for it.
CHUNK_TOKENS = 512

# Points to which a profile is fitted: (prompt, cached) tokens, and (requests, context of each).
PREFILL_POINTS = (
    (128, 0), (512, 0), (1024, 0), (2048, 0), (3072, 0),
    (1024, 512), (2048, 1536), (3072, 2048), (4096, 3584),
)  # fmt: skip
DECODE_POINTS = ((1, 256), (1, 3072), (2, 1024), (4, 256), (4, 3072))
_STEPS = 3  # per decode point


class FirstTokenClock:
    """A streamer for `generate` that only records the time of the first new token."""

    def __init__(self) -> None:
        self.first_token_s = 0.0
        self._prompt_seen = False

    def put(self, _: Any) -> None:
        """Called once with the prompt and then for every token."""
        if self._prompt_seen and not self.first_token_s:
            self.first_token_s = time.perf_counter()
        self._prompt_seen = True

    def end(self) -> None:
        """Part of the interface."""


class TransformersEngine:
    """A model, warmed up. Not thread-safe."""

    def __init__(self, size: ModelSize, seed: int) -> None:
        torch.set_num_threads(1)
        self.model = build(size, seed)
        self.answer([0] * 64)

    def answer(self, tokens: Sequence[int]) -> tuple[float, list[int]]:
        """Answer a prompt in this process by the library's own `generate`: seconds to the first
        token, and all new tokens."""
        ids = as_ids(tokens)
        clock, started_s = FirstTokenClock(), time.perf_counter()
        output = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            pad_token_id=0,
            streamer=clock,
        )
        return clock.first_token_s - started_s, output[0, ids.shape[1] :].tolist()

    def extend(self, cache: Any, ids: Any) -> int:
        """Compute the part of `ids` [1, n] that `cache` lacks, into it; returns the next token."""
        held = cache.get_seq_length()
        with torch.no_grad():
            for start in range(held, ids.shape[1], CHUNK_TOKENS):
                output = self.model(
                    ids[:, start : start + CHUNK_TOKENS],
                    use_cache=True,
                    logits_to_keep=1,
                    **with_cache(self.model, cache),
                )
        return int(output.logits[0, -1].argmax())

    def measure_prefill(self) -> list[tuple[int, int, float]]:
        """Rows of (prompt tokens, cached tokens, seconds)."""
        rows = []
        for tokens, cached in PREFILL_POINTS:
            cache, ids = self._filled(cached), as_ids([1] * tokens)
            started_s = time.perf_counter()
            self.extend(cache, ids)
            rows.append((tokens, cached, time.perf_counter() - started_s))
        return rows

    def measure_decode(self) -> list[tuple[int, int, float]]:
        """Rows of (requests, their context tokens together, seconds of one token for each)."""
        rows = []
        for batch, context in DECODE_POINTS:
            caches = [self._filled(context) for _ in range(batch)]
            started_s = time.perf_counter()
            for step in range(1, _STEPS + 1):
                for cache in caches:
                    self.extend(cache, as_ids([1] * (context + step)))
            rows.append((batch, batch * context, (time.perf_counter() - started_s) / _STEPS))
        return rows

    def _filled(self, tokens: int) -> Any:
        """A cache of `tokens` tokens; which ones does not change the times."""
        config, cache = self.model.config, DynamicCache(config=self.model.config)
        width = config.hidden_size // config.num_attention_heads
        shape = (1, config.num_key_value_heads, tokens, width)
        for layer in range(config.num_hidden_layers if tokens else 0):
            cache.update(torch.randn(shape), torch.randn(shape), layer)
        return cache


def as_ids(tokens: Sequence[int]) -> Any:
    """The tokens as the model's input, [1, n]."""
    return torch.tensor([list(tokens)], dtype=torch.long)
