"""Index updates: records of which holder has which blocks, as feeds send them. Pure.

A feed creates updates in its own thread and queues them (`update_inbox.py`); the thread that owns
the index applies them (`routed_blocks.py`). One update has at most KEYS_PER_UPDATE keys, so that it
is applied within about a millisecond, and placement decisions run between two updates.

Updates with `parts` are of part keys (state/part_keys.py), which have an index of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..state.prefix_index import TIERS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

# The tiers of a kvstore node, which its feed reports. The tier "hbm" is an instance's; an instance
# may have the same name as the node.
NODE_TIERS = ("dram", "nvme")

# The index takes some 600 us for so many.
KEYS_PER_UPDATE = 4096


@dataclass(frozen=True, slots=True)
class Added:
    """The holder has these blocks (again). `seq`: the number of the last event included."""

    name: str
    tier: str
    keys: Sequence[bytes]
    seq: int | None = None
    parts: bool = False


@dataclass(frozen=True, slots=True)
class Removed:
    """The holder no longer has these blocks."""

    name: str
    tier: str
    keys: Sequence[bytes]
    seq: int | None = None
    parts: bool = False


@dataclass(frozen=True, slots=True)
class HolderInventory:
    """One part of the holder's inventory; blocks in none of the parts, first to last, are gone."""

    name: str
    tier: str
    keys: Sequence[bytes]
    first: bool
    last: bool
    seq: int | None = None


@dataclass(frozen=True, slots=True)
class Cleared:
    """An instance or node no longer has any blocks in these tiers: the tiers that its feed
    reports."""

    name: str
    tiers: Sequence[str] = TIERS


@dataclass(frozen=True, slots=True)
class Doubted:
    """Events were lost: the holder had these blocks once, and may no longer have them."""

    name: str
    tier: str
    keys: Sequence[bytes]
    parts: bool = False


@dataclass(frozen=True, slots=True)
class Heard:
    """A sign of life without changes: the index is up to date for this holder."""

    name: str
    tier: str
    seq: int | None = None


@dataclass(frozen=True, slots=True)
class Gone:
    """An instance or node has left: no holder of its name has blocks in these tiers."""

    name: str
    tiers: Sequence[str] = TIERS


@dataclass(frozen=True, slots=True)
class Announced:
    """What the keys of the engines at a node are made of, by what they have announced there: all of
    them, each encoded (`KeySpace`). Nothing for the index."""

    name: str
    spaces: tuple[bytes, ...]


Update = Added | Removed | HolderInventory | Cleared | Doubted | Heard | Gone
# What the feed of nodes says.
NodeNews = Update | Announced


def slices(keys: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    """Slices of keys that fit in one update each; at least one slice, which may be empty."""
    for start in range(0, max(1, len(keys)), KEYS_PER_UPDATE):
        yield keys[start : start + KEYS_PER_UPDATE]
