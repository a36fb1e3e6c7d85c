"""The setting of the conductor's measurements: sizes of the run, and a Dynamo to compare with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..store.setting import silent

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

# Tokens per block, of the index's blocks and of all prompts here.
BLOCK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much a run measures. The defaults are the run that `docs/benchmarks.md` shows: a cluster
    of a thousand instances, prompts of 131,072 tokens in blocks of 512."""

    instances: int = 1000
    prompt_blocks: int = 256
    # Of a prompt with a private tail: all instances have these blocks, one instance has the others.
    shared_blocks: int = 16
    # Unmeasured decisions at the start: with 10 ms between requests, enough for a constant number
    # in flight if each is answered after 3.5 s.
    warm_decisions: int = 400
    rounds: int = 400
    policy_rounds: int = 150
    index_blocks: int = 1_000_000
    index_rounds: int = 3
    folded_blocks: int = 20_000
    connections: int = 16
    # Different prompts, which are sent to the service in rotation.
    prompts: int = 64
    # Requests per turn of the service.
    requests: int = 320
    turns: int = 12
    # Answers at a time, of which everything is told: full batches of a thousand events.
    answers: int = 1024
    # Requests per turn beside a disturbance: three seconds of them, since some disturbances come
    # once a second.
    stall_requests: int = 450
    stall_turns: int = 5
    # Seconds of requests per turn beside all else: 1,800 of them.
    busy_s: float = 12.0

    @classmethod
    def quick(cls) -> Sizes:
        """Less of the same: half a minute instead of two."""
        return cls(
            rounds=100,
            policy_rounds=40,
            index_rounds=1,
            folded_blocks=5000,
            requests=160,
            turns=5,
            stall_requests=300,
            stall_turns=2,
            busy_s=6.0,
        )


@dataclass(frozen=True, slots=True)
class Setting:
    """One run: its sizes, a Python interpreter with Dynamo, if given, and a callback for
    progress."""

    sizes: Sizes
    dynamo: Path | None = None
    tell: Callable[[str], None] = field(default=silent)
