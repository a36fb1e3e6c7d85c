"""A process with a vLLM engine, which does what it is told, one line of JSON after the other.

python -m tiffin.bench.vllm.engine.commands '{"model": "FOLDER", ...}'

It prints `"ready"`, then reads lines `[NAME, ARGUMENTS]` and answers each with a line of JSON. What
else the libraries print goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import TYPE_CHECKING, Any

from .engine import Engine, EngineOptions
from .measurements import DecodeGaps, FirstTokens

if TYPE_CHECKING:
    from collections.abc import Callable


class Commands:
    """What an engine can be told."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._measured: Any = None

    def first_tokens(self, **arguments: int) -> None:
        """Prepare `compute` and `turn`; see `FirstTokens`."""
        self._measured = FirstTokens(self._engine, **arguments)

    def compute(self) -> dict[str, Any]:
        """See `FirstTokens.compute`."""
        found: dict[str, Any] = self._measured.compute()
        return found

    def turn(self) -> dict[str, Any]:
        """See `FirstTokens.turn`."""
        found: dict[str, Any] = self._measured.turn()
        return found

    def decode_gaps(self, **arguments: int) -> None:
        """Prepare `gaps`; see `DecodeGaps`."""
        self._measured = DecodeGaps(self._engine, **arguments)

    def gaps(self, beside: str) -> dict[str, Any]:
        """See `DecodeGaps.gaps`."""
        found: dict[str, Any] = self._measured.gaps(beside)
        return found

    def serve(self, requests: int, tokens: int, answer: int) -> list[float]:
        """Answer that many new, random prompts; returns when it began and when it ended, by the
        machine's monotonic clock."""
        prompts = [{"prompt_token_ids": self._engine.prompt(tokens)} for _ in range(requests)]
        began = time.monotonic()
        self._engine.generate(prompts, answer)
        return [began, time.monotonic()]


def main() -> None:
    """See the top of this file."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    engine = Engine(EngineOptions(**json.loads(sys.argv[1])))
    commands = Commands(engine)
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        name, arguments = json.loads(line)
        command: Callable[..., Any] = getattr(commands, name)
        print(json.dumps(command(**arguments)), file=answers, flush=True)
    engine.close()


if __name__ == "__main__":
    main()
