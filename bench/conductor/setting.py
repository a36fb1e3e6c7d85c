"""What the conductor's measurements are given: how large the run is, and whom to compare with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..store.setting import silent

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

# Of the index's blocks and of all prompts here.
BLOCK_TOKENS = 512


class Missing(Exception):
    """A measurement needs a library or program that is not here; says how to get it."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much a run measures. The defaults are the run that `docs/benchmarks.md` shows: a cluster
    of a thousand instances, prompts of 131,072 tokens in blocks of 512."""

    instances: int = 1000
    prompt_blocks: int = 256
    # Of a prompt with a private tail: these all instances have, the others one.
    shared_blocks: int = 16
    # Decisions before those that are measured: with 10 ms between them, as many as are in flight
    # for good when each is answered after 3.5 s.
    warm_decisions: int = 400
    rounds: int = 400
    policy_rounds: int = 150
    index_blocks: int = 1_000_000
    index_rounds: int = 3
    folded_blocks: int = 20_000
    connections: int = 16
    # Different ones that are sent to the service, again and again.
    prompts: int = 64
    # Of one turn of the service.
    requests: int = 320
    turns: int = 12

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
        )


@dataclass(frozen=True, slots=True)
class Setting:
    """One run: its sizes, a Python that has Dynamo if there is one, and whom to tell what is going
    on."""

    sizes: Sizes
    dynamo: Path | None = None
    tell: Callable[[str], None] = field(default=silent)
