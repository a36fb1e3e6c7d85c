"""Where leased blocks lie in the memory of a node on this host, told from process to process.

One process leases and verifies blocks, and sends their places to others, which read the bytes in
their own mapping of the same memory: without asking the node, and without verifying once more. The
node may be gone by then: a mapping keeps the memory, and nobody writes to it any more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ...errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy as np
    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]


class RegionId(NamedTuple):
    """Which memory of this host: the device and inode of its file. No other memory has the same as
    long as somebody has this one mapped."""

    device: int
    inode: int


@dataclass(frozen=True, slots=True)
class BlockPlaces:
    """The places of consecutive blocks, from `LeasedBlocks.places`; pickles. `offsets`: where each
    block's payload of `block_bytes` bytes begins in the region. They hold as long as the lease."""

    region: RegionId
    offsets: tuple[int, ...]
    block_bytes: int

    def __len__(self) -> int:
        return len(self.offsets)

    def part(self, first: int, stop: int) -> BlockPlaces:
        """The places of blocks `first` to `stop`, without that one."""
        return BlockPlaces(self.region, self.offsets[first:stop], self.block_bytes)


@dataclass(frozen=True, slots=True, eq=False)
class MappedRegion:
    """This process's read-only mapping of a node's memory, from `Client.region`. It outlives the
    client and the node, for as long as this object or a view of it is kept."""

    identity: RegionId
    memory: Bytes

    def has(self, offsets: Iterable[int], nbytes: int) -> bool:
        """Whether `nbytes` bytes from each of the offsets on all lie in the region."""
        return all(0 <= offset <= len(self.memory) - nbytes for offset in offsets)

    def views(self, places: BlockPlaces) -> list[Bytes]:
        """The payload of each block, read-only, without a copy; the bytes are those of the blocks
        while the lease lasts. Raises InvalidInput for places in other memory."""
        size = places.block_bytes
        if places.region != self.identity:
            raise InvalidInput(f"the blocks lie in {places.region}; this is {self.identity}")
        if not self.has(places.offsets, size):
            raise InvalidInput(f"a block lies outside the region of {len(self.memory)} bytes")
        return [self.memory[offset : offset + size] for offset in places.offsets]
