"""Recovery of the blocks on NVMe when a node restarts."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NamedTuple

from ..errors import TierUnavailable
from ..tiers.base import TierName
from .core.records import Erase

if TYPE_CHECKING:
    from ..memory.arena import Extent
    from ..tiers.nvme import NvmeTier
    from .core.placement import Residency

log = logging.getLogger(__name__)


class Survivors(NamedTuple):
    """What a tier still has: the newest extent by key, and its parent's key by key. `failed`: the
    disk failed during the scan, and what was not found by then is lost."""

    newest: dict[bytes, tuple[int, Extent]]
    parents: dict[bytes, bytes]
    failed: bool


def survivors(nvme: NvmeTier) -> Survivors:
    """Look for the blocks that survived; of two extents with one key, the newer generation. Call
    before the tier is written to."""
    parents = {}
    newest: dict[bytes, tuple[int, Extent]] = {}
    older: list[Extent] = []
    failed = False
    try:
        for extent, header in nvme.scan():
            known = newest.get(header.key)
            if known is not None and known[0] >= header.generation:
                older.append(extent)
                continue
            if known is not None:
                older.append(known[1])
            newest[header.key] = header.generation, extent
            parents[header.key] = header.parent
        for extent in older:
            nvme.erase(extent)
    except TierUnavailable as error:
        log.warning("NVMe fails at start, the tier takes no more blocks: %s", error)
        failed = True
    return Survivors(newest, parents, failed)


def adopt(residency: Residency, found: Survivors) -> list[bytes]:
    """Add the blocks that survived, but those that are there again, and let NVMe take blocks.
    Returns the keys of those that were added."""
    residency.space(TierName.NVME).writable = not found.failed
    added = {}
    for key, (generation, extent) in found.newest.items():
        if key in residency.index or key in residency.writing:
            residency.actions.append(Erase(extent.offset, extent.length))
            continue
        residency.adopt(key, extent.offset, extent.length, generation)
        added[key] = found.parents[key]
    residency.link(added)
    return list(added)
