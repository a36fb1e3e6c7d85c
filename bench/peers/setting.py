"""The sizes of a run, and what all measurements of peers share."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ..store.setting import KIB, MIB, silent
from .environments import python_of

if TYPE_CHECKING:
    from collections.abc import Callable

PROCESSES = Path(__file__).with_name("processes")
BLOCK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much a run measures. The defaults are the run that `docs/peers.md` shows."""

    # Turns of each side. A ratio belongs to a turn; the table has their median and their range.
    rounds: int = 9
    # Of a put or a get, and how many of them go into one call.
    blocks: tuple[tuple[int, int], ...] = ((64 * KIB, 16), (4 * MIB, 8), (64 * MIB, 2))
    # Calls per turn: fewer of large batches, so that a turn takes some tenths of a second at most.
    calls: int = 20
    turn_bytes: int = 512 * MIB
    workers: int = 1000
    prompt_blocks: int = 256
    shared_blocks: int = 16
    event_blocks: int = 16
    events: int = 4000
    decisions: int = 20
    resident_blocks: int = 500_000
    hashes: int = 3
    # Of the router: workers behind it, conversations, requests per turn.
    backends: int = 8
    conversations: int = 64
    requests: int = 150

    @classmethod
    def quick(cls) -> Sizes:
        """Less of the same: four minutes instead of ten."""
        return cls(rounds=5, calls=10, turn_bytes=256 * MIB, events=2000, requests=60)

    def calls_of(self, batch_bytes: int) -> int:
        """Calls per turn with batches of so many bytes."""
        return max(1, min(self.calls, self.turn_bytes // batch_bytes))


@dataclass(frozen=True, slots=True)
class Setting:
    """One run: its sizes, the folder with the peers' environments, a callback for progress."""

    sizes: Sizes
    folder: Path
    tell: Callable[[str], None] = field(default=silent)

    def python(self, name: str) -> Path:
        """The Python of a peer. Raises Missing."""
        return python_of(self.folder, name)

    def command(self, name: str, script: str, *arguments: object) -> list[str]:
        """The command line of a process of a peer. Raises Missing."""
        return [str(self.python(name)), str(PROCESSES / script), *map(str, arguments)]
