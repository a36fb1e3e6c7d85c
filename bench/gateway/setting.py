"""The setting of the gateway's measurements: the sizes of a run."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ..peers.environments import python_of
from ..peers.routers import ROUTERS
from ..store.setting import silent
from ..suite import Missing

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
    # Beside the routers of others.
    beside_at_once: tuple[int, ...] = (1, 8, 64, 256)
    beside_streams: tuple[int, ...] = (64, 256)

    @classmethod
    def quick(cls) -> Sizes:
        """Less of the same: a minute."""
        return cls(
            at_once=(1, 64, 256), turns=1, requests=500, alone=100,
            streams=(64, 1024), stream_tokens=25, held=300,
            beside_at_once=(1, 64), beside_streams=(64,),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Setting:
    """One run: its sizes, a callback for progress, and the folder with the environments of other
    routers. `left_out` has those that a measurement went without, and why."""

    sizes: Sizes
    tell: Callable[[str], None] = field(default=silent)
    environments: Path = Path(".venv-peers")
    left_out: dict[str, str] = field(default_factory=dict)

    def routers(self) -> dict[str, Path]:
        """The Python of each router that is installed; the others are in `left_out` from then
        on."""
        found = {}
        for name in ROUTERS:
            try:
                found[name] = python_of(self.environments, name)
            except Missing as lack:
                self.left_out[name] = str(lack)
        return found
