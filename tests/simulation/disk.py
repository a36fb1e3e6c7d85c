"""A simulated NVMe tier: slow, sometimes very slow; its contents outlive the node.

The product's `Tier` checks the arguments of calls; `Mover` and `Node` use it unchanged. A write
reaches the disk piece by piece, so that a crash may leave half of it; a restart finds only extents
that were marked after all of their bytes were written, damaged ones included.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tiffin.kvstore.errors import CorruptBlock, TierUnavailable, VersionMismatch
from tiffin.kvstore.format.header import read_header
from tiffin.kvstore.memory.arena import Extent
from tiffin.kvstore.tiers.base import Tier, TierName

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator

    from tiffin.kvstore.format.header import Header
    from tiffin.messenger.shm.host_copy import ByteArray

    from .world import World

PIECE_BYTES = 4096
PIECE_S = (0.00005, 0.001)
SLOW_PIECE_S = (0.05, 0.4)


class Disk:
    """The contents of the disk, which outlive the process that uses it."""

    def __init__(self, world: World, nbytes: int) -> None:
        self.world = world
        self.bytes = np.zeros(nbytes, np.uint8)
        self.identity = world.random.randbytes(16)
        self.marks: dict[int, int] = {}  # offset -> length of extents that a restart finds
        self.slow = False
        self.failing = False

    def wait(self) -> None:
        """Sleep for the time of one piece."""
        self.world.sleep(self.world.random.uniform(*(SLOW_PIECE_S if self.slow else PIECE_S)))
        if self.failing:
            raise TierUnavailable("the simulated disk refuses")

    def rot(self, dice: random.Random) -> None:
        """Flip one bit of one extent."""
        if self.marks:
            offset = dice.choice(sorted(self.marks))
            place = offset + dice.randrange(self.marks[offset])
            self.bytes[place] ^= np.uint8(1 << dice.randrange(8))


class SimulatedNvme(Tier):
    """The tier of one life of a node, on the node's disk."""

    def __init__(self, disk: Disk) -> None:
        super().__init__(TierName.NVME, len(disk.bytes))
        self._disk = disk
        self.identity = disk.identity

    def scan(self) -> Iterator[tuple[Extent, Header]]:
        """See `Tier.scan`."""
        for offset, length in sorted(self._disk.marks.items()):
            try:
                header = read_header(
                    self._disk.bytes[offset : offset + length], offset_expected=offset
                )
            except (CorruptBlock, VersionMismatch):
                del self._disk.marks[offset]
            else:
                yield Extent(offset, length), header

    def close(self) -> None:
        """See `Tier.close`."""

    def _write(self, start: int, data: ByteArray) -> None:
        for at in range(0, len(data), PIECE_BYTES):
            self._disk.wait()
            piece = data[at : at + PIECE_BYTES]
            self._disk.bytes[start + at : start + at + len(piece)] = piece

    def _read(self, start: int, data: ByteArray) -> None:
        for at in range(0, len(data), PIECE_BYTES):
            self._disk.wait()
            piece = data[at : at + PIECE_BYTES]
            piece[:] = self._disk.bytes[start + at : start + at + len(piece)]

    def _mark(self, extent: Extent, generation: int) -> None:
        # As in a slab's map: one entry per offset; overlaps are not checked.
        self._disk.marks[extent.offset] = extent.length

    def _unmark(self, extent: Extent) -> None:
        self._disk.marks.pop(extent.offset, None)
