"""The DRAM tier: one region of shared memory, which clients on this host map and read in place."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tiffin.messenger.errors import RegionError
from tiffin.messenger.shm.region import Region

from ..errors import TierUnavailable
from .base import Tier, TierName, whole_granules

if TYPE_CHECKING:
    from tiffin.messenger.shm.host_copy import ByteArray

    from ..memory.arena import Extent


class DramTier(Tier):
    """`nbytes` of host memory, rounded down to whole pages.

    Clients attach to `region`; an extent's offset is its offset in the region. With `prefault` the
    constructor takes about 0.5 s per GiB; without it that cost is paid by the first write to every
    page instead.

    Raises TierUnavailable when this machine does not have enough memory.
    """

    def __init__(self, nbytes: int, *, hugepages: bool = False, prefault: bool = True) -> None:
        super().__init__(TierName.DRAM, nbytes)
        try:
            self.region = Region.create(whole_granules(nbytes), hugepages=hugepages)
            if prefault:
                self._prefault()
        except RegionError as error:
            raise TierUnavailable(f"no DRAM tier: {error}") from error

    def _prefault(self) -> None:
        try:
            self.region.prefault()
        except BaseException:
            self.region.close()
            raise

    def view(self, extent: Extent) -> ByteArray:
        """The extent's bytes in place, not copied; valid until the extent is released."""
        self._locate(extent, 0, extent.length)
        return self._array()[extent.offset : extent.offset + extent.length]

    def close(self) -> None:
        self.region.close()

    def _write(self, start: int, data: ByteArray) -> None:
        np.copyto(self._array()[start : start + len(data)], data)

    def _read(self, start: int, data: ByteArray) -> None:
        np.copyto(data, self._array()[start : start + len(data)])

    def _array(self) -> ByteArray:
        try:
            return self.region.array
        except RegionError as error:
            raise TierUnavailable(f"the DRAM tier is not usable: {error}") from error
