"""How an engine that prefills and decodes on the same GPUs schedules: vLLM's modes and limits."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal


class EngineMode(StrEnum):
    """How an engine schedules what it computes."""

    PLAIN = "plain"
    PREFIX = "prefix"
    CHUNKED = "chunked"


# Tokens of a step, by default. In vLLM 0.5.1 that is the longest context (the longest prompt of the
# public traces has 191,378 tokens), and 512 for chunked prefill.
_BATCHED_TOKENS = {EngineMode.PLAIN: 196_608, EngineMode.PREFIX: 196_608, EngineMode.CHUNKED: 512}
# Share of the memory that is left free when a prompt is admitted.
_WATERMARK = 0.01


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """vLLM's, with its defaults. `batched_tokens` is `max_num_batched_tokens`, None: the default of
    the mode. `swap_bytes_s`: from and to the host's memory, of all GPUs together (FAST '25, table
    1). `chunk_fixed_s`: seconds of a step that goes on with a prompt, beside its tokens; None: d0.
    """

    mode: EngineMode = EngineMode.PLAIN
    batched_tokens: int | None = None
    sequences_max: int = 256
    kv_capacity_tokens: int = 1_000_000
    preemption: Literal["recompute", "swap"] = "recompute"
    token_bytes: int = 327_680
    swap_bytes_s: float = 128e9
    chunk_fixed_s: float | None = None

    @property
    def step_tokens(self) -> int:
        """The budget of a step."""
        return self.batched_tokens or _BATCHED_TOKENS[self.mode]

    @property
    def admissible_tokens(self) -> int:
        """Up to so many may be held when a prompt is admitted."""
        return int(self.kv_capacity_tokens * (1 - _WATERMARK))

    @property
    def longest(self) -> int:
        """A prompt and its answer have at most so many tokens: whole prompts fit in a step."""
        if self.mode is EngineMode.CHUNKED:
            return self.admissible_tokens - 1
        return min(self.admissible_tokens - 1, self.step_tokens)
