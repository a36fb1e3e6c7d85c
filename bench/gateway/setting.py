"""The setting of the gateway's measurements: the sizes of a run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..store.setting import silent

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much a run measures. The defaults are the run that `docs/benchmarks.md` shows."""

    at_once: tuple[int, ...] = (1, 8, 64, 256, 1024)
    # Turns of each side, and requests in a turn; at one at a time fewer.
    turns: int = 3
    requests: int = 2000
    alone: int = 400
    streams: tuple[int, ...] = (8, 64, 256, 1024)
    stream_tokens: int = 100
    gap_s: float = 0.02
    held: int = 1000

    @classmethod
    def quick(cls) -> Sizes:
        """Less of the same: a minute."""
        return cls(turns=1, requests=1000, alone=200, stream_tokens=50, held=300)


@dataclass(frozen=True, slots=True)
class Setting:
    """One run: its sizes, and a callback for progress."""

    sizes: Sizes
    tell: Callable[[str], None] = field(default=silent)
