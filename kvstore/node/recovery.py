"""Recovery of the blocks on NVMe when a node restarts."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from ..errors import TierUnavailable
from ..tiers.base import TierName

if TYPE_CHECKING:
    from ..memory.arena import Extent
    from ..tiers.nvme import NvmeTier
    from .core.placement import Residency

log = logging.getLogger(__name__)


def adopt(residency: Residency, nvme: NvmeTier) -> None:
    """Add the blocks that survived on the tier; of two extents with one key, the newer generation.

    If the disk fails during the scan, the blocks not found by then are lost, and the tier takes no
    more blocks.
    """
    parents = {}
    newest: dict[bytes, tuple[int, Extent]] = {}
    older: list[Extent] = []
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
        residency.space(TierName.NVME).writable = False
    for key, (generation, extent) in newest.items():
        residency.adopt(key, extent.offset, extent.length, generation)
    residency.link(parents)
