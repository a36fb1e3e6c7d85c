"""What a restarted node finds on its NVMe tier."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from ..errors import TierUnavailable
from ..tiers.base import TierName

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..arena import Extent
    from ..block import Header
    from ..tiers.nvme import NvmeTier
    from .residency import Residency

log = logging.getLogger(__name__)


def adopt(residency: Residency, nvme: NvmeTier) -> None:
    """Take over what the tier still holds from before; of two extents with one key, the newer."""
    parents = {}
    newest: dict[bytes, tuple[int, Extent]] = {}
    for extent, header in _scan(residency, nvme):
        known = newest.get(header.key)
        if known is not None and known[0] >= header.generation:
            nvme.erase(extent)
            continue
        if known is not None:
            nvme.erase(known[1])
        newest[header.key] = header.generation, extent
        parents[header.key] = header.parent
    for key, (generation, extent) in newest.items():
        residency.adopt(key, extent.offset, extent.length, generation)
    residency.link(parents)


def _scan(residency: Residency, nvme: NvmeTier) -> Iterator[tuple[Extent, Header]]:
    """What the tier finds; a disk that fails under the scan costs the rest, not the node."""
    try:
        yield from nvme.scan()
    except TierUnavailable as error:
        log.warning("NVMe scan failed, the tier takes no more blocks: %s", error)
        residency.space(TierName.NVME).writable = False
