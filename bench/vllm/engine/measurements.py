"""What an engine is measured by: times to the first token of some prompts, computed, loaded, and
from the engine's own cache; and gaps between the tokens of an answer, alone and beside requests
that load their prompts."""

from __future__ import annotations

import time
from collections import deque
from itertools import cycle, pairwise, repeat
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .engine import Engine

_BLOCK_TOKENS = 512
_SAVED_S = 60.0
# A prompt of which less was loaded is measured again, so many times in a row at most: a lookup that
# is not answered in time is a miss.
ATTEMPTS = 5
_REST_S = 0.2
# Tokens of an answer that are not measured: its prompt is computed, and the requests beside it
# begin.
_WARM_TOKENS = 10
_DECODED_PROMPT_TOKENS = 100
_EXTERNAL_HITS = "vllm:external_prefix_cache_hits"


class FirstTokens:
    """Measures the same prompts, which follow from the engine's seed, again and again."""

    def __init__(self, engine: Engine, tokens: int, prompts: int) -> None:
        self._engine = engine
        self._prompts = [engine.prompt(tokens) for _ in range(prompts)]
        self._loadable = tokens // _BLOCK_TOKENS * _BLOCK_TOKENS
        engine.first_token(engine.prompt(tokens))  # warms up

    def compute(self) -> dict[str, Any]:
        """Compute each prompt once; returns when all of them can be loaded."""
        taken = [self._engine.first_token(prompt) for prompt in self._prompts]
        until = time.monotonic() + _SAVED_S
        for prompt in self._prompts:
            while self._load(prompt)[2] < self._loadable:
                if time.monotonic() > until:
                    raise AssertionError(f"a prompt was not saved within {_SAVED_S:g} s")
                time.sleep(_REST_S)
        return {"cold": [ms for ms, _, _ in taken], "tokens": [token for _, token, _ in taken]}

    def turn(self) -> dict[str, Any]:
        """Each prompt once loaded and once from the engine's own cache, in turns. `repeated`: how
        often a prompt was measured again because not all of it had been loaded."""
        found: dict[str, Any] = {"loaded": [], "own": [], "cached": [], "tokens": [], "repeated": 0}
        self._load(self._prompts[0])  # warms up: the engine may have been stopped
        for prompt in self._prompts:
            for _ in range(ATTEMPTS):
                taken_ms, token, cached = self._load(prompt)
                if cached >= self._loadable:
                    break
                found["repeated"] += 1
            else:
                raise AssertionError(
                    f"not all was loaded, {ATTEMPTS} times in a row: {cached} of {self._loadable} "
                    "tokens"
                )
            found["loaded"].append(taken_ms)
            found["cached"].append(cached)
            found["tokens"].append(token)
            found["own"].append(self._engine.first_token(prompt)[0])
        return found

    def _load(self, prompt: list[int]) -> tuple[float, int, int]:
        self._engine.forget()
        return self._engine.first_token(prompt)


class DecodeGaps:
    """One request decodes `gaps` tokens and some. Beside it, `beside` requests are always under way
    that ask for `prompts` prompts of `tokens` tokens in turn, each for one token."""

    def __init__(self, engine: Engine, gaps: int, tokens: int, prompts: int, beside: int) -> None:
        self._engine = engine
        self._core = engine.llm.llm_engine
        self._gaps, self._beside = gaps, beside
        self._number = 0
        self._cached: list[int] = []
        # More than the engine's own cache has room for: none of them is there when it is asked for
        # again.
        self._prompts = [engine.prompt(tokens) for _ in range(prompts)]
        self._pool = cycle(self._prompts)
        self._own = engine.prompt(tokens)
        self._loadable = tokens // _BLOCK_TOKENS * _BLOCK_TOKENS
        self._settle()

    def _settle(self) -> None:
        """Compute the prompts, and return when all of them can be loaded."""
        until = time.monotonic() + _SAVED_S
        for prompt in self._prompts:
            self._engine.first_token(prompt)
        while min(self._engine.first_token(prompt)[2] for prompt in self._prompts) < self._loadable:
            if time.monotonic() > until:
                raise AssertionError(f"the prompts were not saved within {_SAVED_S:g} s")

    def gaps(self, beside: str) -> dict[str, Any]:
        """Milliseconds between the tokens of an answer, beside "nothing", requests that load from
        the "pool", or requests whose prompt is in the engine's "own" cache. `requests`: how many of
        them ended meanwhile; `computed`: of these, whose prompt was not in a cache; `loaded`:
        tokens that came from the pool."""
        chosen = {"nothing": None, "own": repeat(self._own), "pool": self._pool}[beside]
        if beside == "own":
            self._engine.first_token(self._own)
        self._cached = []
        before = self._loaded_tokens()
        decoded = self._add(self._engine.prompt(_DECODED_PROMPT_TOKENS), self._gaps + _WARM_TOKENS)
        times_ms = self._decode(decoded, chosen)
        short = sum(cached < self._loadable for cached in self._cached)
        return {
            "gaps": [b - a for a, b in pairwise(times_ms)][-self._gaps :],
            "requests": len(self._cached),
            "computed": short,
            "loaded": self._loaded_tokens() - before,
        }

    def _decode(self, decoded: str, prompts: Iterator[list[int]] | None) -> list[float]:
        """When each token of the request came, in milliseconds."""
        times_ms: list[float] = []
        beside: deque[str] = deque()
        while self._core.has_unfinished_requests():
            while prompts is not None and len(beside) < self._beside:
                beside.append(self._add(next(prompts), 1))
            outputs = self._core.step()
            now_ms = time.perf_counter() * 1e3
            for output in outputs:
                if output.request_id == decoded:
                    times_ms.append(now_ms)
                elif output.finished:
                    beside.remove(output.request_id)
                    self._cached.append(output.num_cached_tokens or 0)
            if len(times_ms) >= self._gaps + _WARM_TOKENS:
                prompts = None
        return times_ms

    def _add(self, prompt: list[int], tokens: int) -> str:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self._number += 1
        sampling = SamplingParams(
            temperature=0,
            max_tokens=tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        name = f"gaps-{self._number}"
        self._core.add_request(name, {"prompt_token_ids": prompt}, sampling)
        return name

    def _loaded_tokens(self) -> int:
        metrics = self._engine.llm.get_metrics()
        return int(sum(m.value for m in metrics if m.name == _EXTERNAL_HITS))
