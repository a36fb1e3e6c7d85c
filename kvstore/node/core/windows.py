"""Which neighbours leave so that one run of free bytes appears: age first, bytes second. Pure.

Asked when enough bytes are free but no run is long enough. A window is searched among the oldest
eighth of the candidates (`SHARE`); only where these can't open a run are the oldest quarter, half
and all of them considered. Of the windows found together the one that costs the fewest bytes opens.

So no block leaves that is younger than an eighth of those that stay, unless eviction in order alone
would go at least half as far, whatever the sizes. The fewest bytes of all candidates would evict
what was just stored, where its size is the one that is needed again. Strictly the oldest would
leave holes that match nothing, and double what leaves while the mix of sizes changes
(`docs/decisions/allocator.md`).

A block leaves together with the blocks that descend from it, where these are candidates of the same
age: else a tier full of long chains could be opened only where their tails are neighbours.
"""

from __future__ import annotations

from itertools import islice
from operator import attrgetter
from typing import TYPE_CHECKING

from ...memory.arena import cheapest_window
from .records import PinLevel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from .records import BlockRecord, Replica
    from .tier_ledger import TierSpace

# The first search considers one candidate in this many.
SHARE = 8

# Candidates that one call considers, 1 to 1.5 us each: those of a tier of 1 TiB with blocks of
# 64 MiB. The first share is at most a quarter of them: 6 ms where these can open a run, as nearly
# always, and 40 ms where no candidate can.
LOOKS_MAX = 16_384

_DEPTH = attrgetter("block.depth")


def find_window(
    space: TierSpace, length: int, survives: Callable[[Replica], bool]
) -> list[Replica]:
    """The replicas whose eviction opens a run of `length` bytes, in the order in which they can be
    evicted. Empty if no eviction of the first LOOKS_MAX candidates opens one.

    `survives`: whether the block remains in the node without this replica.
    """
    total = min(space.candidate_count, LOOKS_MAX)
    looks = max(1, min(space.candidate_count // SHARE, LOOKS_MAX // 4))
    free_runs = list(space.arena.free_runs)
    order = space.candidates()
    oldest: list[Replica] = []
    while len(oldest) < total:
        oldest += islice(order, min(looks, total) - len(oldest))
        family_bytes = _leaving(oldest, survives)
        leaving = list(family_bytes)
        evictable = [(r.offset, r.length, nbytes) for r, nbytes in family_bytes.items()]
        if chosen := cheapest_window(free_runs, evictable, length):
            return _with_descendants({leaving[i] for i in chosen}, leaving, survives)
        looks *= 2
    return []


def _leaving(
    candidates: Iterable[Replica], survives: Callable[[Replica], bool]
) -> dict[Replica, int]:
    """Those of the candidates that can leave if all of them try, descendants first. Each with its
    bytes and those of its descendants, which leave with it."""
    leaving: dict[Replica, int] = {}
    children: dict[BlockRecord, tuple[int, int]] = {}  # that leave: how many, and their bytes
    for replica in sorted(candidates, key=_DEPTH, reverse=True):
        block = replica.block
        if replica.holds or block.pin is PinLevel.HARD:
            continue
        if survives(replica):
            leaving[replica] = replica.length
            continue
        count, nbytes = children.get(block, (0, 0))
        if block.children > count:
            continue
        leaving[replica] = nbytes = nbytes + replica.length
        if block.parent is not None:
            siblings, sibling_bytes = children.get(block.parent, (0, 0))
            children[block.parent] = siblings + 1, sibling_bytes + nbytes
    return leaving


def _with_descendants(
    chosen: set[Replica], leaving: list[Replica], survives: Callable[[Replica], bool]
) -> list[Replica]:
    """`chosen`, and those of `leaving` that descend from blocks that leave the node."""
    gone: set[BlockRecord | None] = set()
    found = []
    for replica in reversed(leaving):  # ancestors first
        if replica in chosen or replica.block.parent in gone:
            found.append(replica)
            if not survives(replica):
                gone.add(replica.block)
    return found[::-1]
