"""The HBM tier of a worker: blocks that were loaded or saved stay in a part of its GPU's memory, so
that the next load of them is a copy on the device and none over PCIe.

It holds this rank's bytes of blocks, gathered from the engine's pages: after a load, of bytes that
were verified on their way, or from pages whose tokens are confirmed, as a save reads them. So a
block here is what the pool has under its key, and an order to load it may be carried out from
here. Nobody else needs to know: each rank decides by itself. Every block is clean, as it came from
the pool or goes there, and eviction only drops it. Which ones, `HbmCore` decides.
"""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from ...after_fork import OfOneProcess
from ...errors import InvalidInput, NoRoom, StaleLease, TierUnavailable
from ...hbm.core.hbm_core import HbmCore, HbmEntry, positions
from ...hbm.device.device_memory import Never
from ...hbm.locked_core import LockedCore
from ...node.core.node_core import ReserveStatus
from ...sizes import format_bytes
from ...tiers.base import GRANULE_BYTES, whole_granules
from ...tiers.hbm import HbmTier

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...format.keys import Prefix
    from ...node.core.records import Replica
    from .pages.copier import EngineCopier
    from .pages.device_page_copier import DevicePageCopier

# Bytes here are trusted as those in the engine's pages are: nobody compares them.
_NO_CHECKSUMS = np.empty(0, np.uint64)


def open_front(copier: EngineCopier, nbytes: int) -> HbmFront | None:
    """A tier of `nbytes` beside the pages of a GPU; None for 0. Raises as `HbmFront` does."""
    if not nbytes:
        return None
    from .pages.device_page_copier import DevicePageCopier  # here, as it needs torch

    assert isinstance(copier, DevicePageCopier)  # `engine_blocks` refuses a tier of a CPU
    return HbmFront(copier, nbytes)


class HbmFront(OfOneProcess):
    """Blocks in `nbytes` of the memory of the device that has the copier's pages. Thread-safe.

    Raises InvalidInput for a size that holds no block, TierUnavailable when the device does not
    have that much memory; both name the setting `hbm_bytes`.
    """

    def __init__(self, copier: DevicePageCopier, nbytes: int) -> None:
        block_bytes = whole_granules(copier.device_block_bytes + GRANULE_BYTES - 1)
        if nbytes < block_bytes:
            raise InvalidInput(
                f"hbm_bytes={nbytes} hold no block; one takes {block_bytes} of each GPU"
            )
        try:
            self._tier = HbmTier(nbytes, copier.where)
        except TierUnavailable as error:
            raise TierUnavailable(
                f"hbm_bytes: {format_bytes(nbytes)} beside vLLM's memory: {error}. Lower "
                "--gpu-memory-utilization or hbm_bytes"
            ) from error
        self._copier = copier
        self._block_bytes = block_bytes
        core = HbmCore(self._tier.arena, first_generation=time.time_ns(), block_bytes=block_bytes)
        self._core = LockedCore(core, lambda: None, lambda: None)
        room = nbytes // block_bytes
        copier.warm_up_device([self._view(index * block_bytes) for index in range(min(2, room))])

    def load(self, prefix: Prefix, pages: Sequence[int], skipped: int = 0) -> int:
        """Fill the pages of the leading blocks that are here, the first without its first `skipped`
        pages. Returns how many blocks these are. Raises as `DevicePageCopier.scatter` does."""
        self._check_process()
        held = self._core.hold(prefix)
        if held.use is None:
            return 0
        try:
            blocks = self._views(held.replicas)
            mine = pages[: len(blocks) * self._copier.pages - skipped]
            self._copier.scatter_device(blocks, mine, skipped)
        except BaseException:
            self._core.end(held.use, Never())
            raise
        self._core.end(held.use)
        return len(blocks)

    def keep(self, prefix: Prefix, pages: Sequence[int], skipped: int = 0) -> None:
        """Keep the blocks of `prefix` whose tokens are all in `pages`, of which the first block
        lacks its first `skipped`, as far as there is room. Raises as `DevicePageCopier.gather`
        does."""
        self._check_process()
        each, first = self._copier.pages, int(skipped > 0)
        whole = prefix[first : (len(pages) + skipped) // each]
        if not len(whole):
            return
        try:
            use, made = self._core.reserve(whole, 0.0, stop_at_busy=True)
        except NoRoom:
            return
        if made.lease is None:
            return
        chosen = positions(made, ReserveStatus.GRANTED)
        try:
            starts = [(first + index) * each - skipped for index in chosen]
            mine = [page for start in starts for page in pages[start : start + each]]
            self._copier.gather_device(self._views(made.lease.replicas), mine)
        except BaseException:
            self._core.end(use, Never())
            raise
        entries = [HbmEntry(whole, index, _NO_CHECKSUMS, dirty=False) for index in chosen]
        with suppress(StaleLease):  # it took a minute, and other threads may keep these blocks
            self._core.publish(use, made.lease.id, entries)

    def statistics(self) -> dict[str, Any]:
        """Bytes by state and blocks; see docs/hbm.md."""
        return self._core.statistics()

    def close(self) -> None:
        """Give the memory back. No call follows, and none is in progress."""
        self._tier.close()

    def _views(self, replicas: Sequence[Replica]) -> list[Any]:
        return [self._view(replica.offset) for replica in replicas]

    def _view(self, offset: int) -> Any:
        return self._tier.view_all()[offset : offset + self._block_bytes]
