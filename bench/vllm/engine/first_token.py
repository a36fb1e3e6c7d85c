"""Times to the first token of some prompts: computed, loaded, and from the engine's own cache."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .engine import Engine

# A prompt of which less was loaded is measured again, so many times in a row at most: a lookup that
# is not answered in time is a miss.
ATTEMPTS = 5
_BLOCK_TOKENS = 512
_SAVED_S = 60.0
_REST_S = 0.2


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
