"""What feeds have to say about who holds what, as plain records. Pure.

A feed makes them in its own thread and hands them on (`inbox.py`); whoever owns the index takes
them in (`routed.py`). One record has at most KEYS_PER_UPDATE keys, so that taking one in is a
matter of a millisecond and decisions come in between.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..index import TIERS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

# What a node of the pool has, and its feed speaks of. "hbm" is of an instance, which may have the
# node's name.
NODE_TIERS = ("dram", "nvme")

# Some 600 us of the index.
KEYS_PER_UPDATE = 4096


@dataclass(frozen=True, slots=True)
class Added:
    """The holder has these blocks (again). `seq`: the number of the last event that is in."""

    name: str
    tier: str
    keys: Sequence[bytes]
    seq: int | None = None


@dataclass(frozen=True, slots=True)
class Removed:
    """The holder has these blocks no more."""

    name: str
    tier: str
    keys: Sequence[bytes]
    seq: int | None = None


@dataclass(frozen=True, slots=True)
class Inventory:
    """A part of all that the holder has; after the last one, it has nothing else."""

    name: str
    tier: str
    keys: Sequence[bytes]
    first: bool
    last: bool
    seq: int | None = None


@dataclass(frozen=True, slots=True)
class Cleared:
    """An instance or node has nothing any more in these tiers, which are those that its feed speaks
    of."""

    name: str
    tiers: Sequence[str] = TIERS


@dataclass(frozen=True, slots=True)
class Doubted:
    """Events were lost: the holder had these blocks once, and may have them no more."""

    name: str
    tier: str
    keys: Sequence[bytes]


@dataclass(frozen=True, slots=True)
class Heard:
    """Nothing is new, and what is known is true."""

    name: str
    tier: str
    seq: int | None = None


@dataclass(frozen=True, slots=True)
class Gone:
    """An instance or node has left: in these tiers, nobody of its name has anything."""

    name: str
    tiers: Sequence[str] = TIERS


Update = Added | Removed | Inventory | Cleared | Doubted | Heard | Gone


def slices(keys: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    """Keys in pieces that fit in one update; at least one, maybe empty, piece."""
    for start in range(0, max(1, len(keys)), KEYS_PER_UPDATE):
        yield keys[start : start + KEYS_PER_UPDATE]
