"""Transfers blocks between an engine's cache and the pool, through a GPU's HBM tier if it exists.

This is the part of a connector that does not depend on the engine: lease the longest stored prefix
and scatter it, reserve the missing blocks and gather into them. The engine's connector describes
its cache as a `PagedCache` and a `PageMap`.

With an HBM tier, a load uses the blocks in HBM, promotes the pool's blocks into HBM, and reads the
rest from the pool's memory if HBM has no room for them. A save goes to HBM, and a background thread
copies it down to the pool at once: until then other processes do not see it. Blocks for which HBM
has no room are written to the pool directly.
"""

from __future__ import annotations

import contextlib
import logging
import time
from typing import TYPE_CHECKING, Any

from ..deadlines import until_s
from ..errors import NoRoom, TiffinError
from ..hbm.device.host_pinning import PinnedPool
from .block_copier import BlockMover

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tiffin.kernels.layout.engine_cache import PagedCache
    from tiffin.kernels.layout.transfer_plan import PageMap

    from ..client.client import Client
    from ..format.keys import Prefix
    from ..format.schema import KVSchema
    from ..hbm.store import HbmStore

    Cache = tuple[PagedCache, PageMap]

log = logging.getLogger(__name__)

# HBM's watermarks, as shares of its bytes: a saved block is copied down at once, because the pool
# exists for sharing. (Zero means no watermark.)
_COPY_DOWN_ABOVE = 1e-9
# Timeout of the copies down in `close`.
CLOSE_TIMEOUT_S = 10.0


class Carrier:
    """Moves blocks of `schema` between caches on `device` and the pool that `client` reaches.

    Not thread-safe; `close` it before the client. Raises InvalidInput and TierUnavailable as
    `HbmStore` does.
    """

    def __init__(
        self, client: Client, schema: KVSchema, device: Any, *, hbm_bytes: int = 0
    ) -> None:
        self.client = client
        self.schema = schema
        self._mover = BlockMover(schema, device)
        self._pinned: PinnedPool | None = None
        if self._mover.device.type == "cuda":
            self._pinned = PinnedPool(client, str(self._mover.device), self._mover.while_idle)
        self.hbm: HbmStore | None = None
        if hbm_bytes:
            self.hbm = _open_hbm(client, schema, hbm_bytes, str(device))

    def load(
        self, prefix: Prefix, room: Callable[[int], Cache], timeout_s: float
    ) -> tuple[int, str | None]:
        """Scatter the longest stored part of `prefix`.

        If any block was found, this calls the callback `room(blocks)` once: it returns the cache,
        and a row of pages for each block. Returns how many blocks were loaded, and the reason why
        not more (see `Missing` and `HbmBlocks`). Raises errors of the client, the kernels and the
        device; then no block counts as loaded.
        """
        self._pin()
        deadline = time.monotonic() + timeout_s
        with contextlib.ExitStack() as leases:
            found: list[Any] = []
            reason: str | None = None
            if self.hbm is not None:
                near = leases.enter_context(self.hbm.promote(prefix, timeout_s=timeout_s))
                found += [block.tensor for block in near]
                reason = near.reason
            # For any reason but these two of HBM, the pool has no more blocks either.
            if self.hbm is None or reason in ("no_room", "admission"):
                left_s = until_s(deadline)
                far = leases.enter_context(self.client.get(prefix[len(found) :], timeout_s=left_s))
                found += [block.memory for block in far]
                reason = far.reason
            if found:
                self._mover.scatter(*room(len(found)), found)
        return len(found), reason

    def save(
        self,
        cache: PagedCache,
        rows: Callable[[Sequence[int]], PageMap],
        prefix: Prefix,
        stored: list[int],
        *,
        blocks_at_once: int,
        timeout_s: float,
    ) -> str | None:
        """Store the missing blocks of `prefix`, `blocks_at_once` at a time: reserve, and gather.

        The callback `rows(positions)` returns where in the cache these blocks are. Appends to
        `stored` the positions of the stored blocks. Returns the reason why not more were stored,
        None if none failed. Raises as `load` does.
        """
        self._pin()
        position, deadline = 0, time.monotonic() + timeout_s
        in_hbm = self.hbm is not None
        while position < len(prefix):
            part = prefix[position : position + blocks_at_once]
            try:
                slots = self._reserve(part, deadline, in_hbm=in_hbm)
            except NoRoom:
                if not in_hbm:
                    return "no_room"
                in_hbm = False  # this part, and all later ones, go to the pool directly
                continue
            with slots:
                indices = [slot.index for slot in slots]
                covered = _covered(slots, len(part))
                if indices:
                    targets = [slot.tensor if in_hbm else slot.view for slot in slots]
                    self._mover.gather(cache, rows([position + i for i in indices]), targets)
            stored += [position + index for index in slots.stored]
            position += covered
            if not slots.reason:
                continue
            if not indices and not in_hbm:
                return str(slots.reason)
            in_hbm = False
        return None

    def _reserve(self, part: Prefix, deadline: float, *, in_hbm: bool) -> Any:
        if in_hbm:
            assert self.hbm is not None
            return self.hbm.reserve(part)
        return self.client.reserve(part, timeout_s=until_s(deadline))

    def close(self) -> None:
        """Copy the blocks that only HBM has down to the pool, then release the device's memory.
        Idempotent."""
        hbm, self.hbm = self.hbm, None
        if hbm is not None:
            try:
                hbm.demote(timeout_s=CLOSE_TIMEOUT_S)
            except TiffinError as error:
                log.warning("blocks that only HBM had are lost: %s", error)
            hbm.close()
        self._mover.close()
        if self._pinned is not None:
            self._pinned.close()

    def _pin(self) -> None:
        """Takes a second for some GiB the first time, which the pool's time to answer does not
        pay for."""
        if self._pinned is not None:
            self._pinned.follow()


def _open_hbm(client: Client, schema: KVSchema, nbytes: int, device: str) -> HbmStore:
    from ..hbm.core.hbm_core import HbmOptions
    from ..hbm.store import HbmStore

    options = HbmOptions(high_watermark=_COPY_DOWN_ABOVE, low_watermark=_COPY_DOWN_ABOVE)
    return HbmStore(client, schema, nbytes, device, options=options)


def _covered(slots: Any, blocks: int) -> int:
    """How many leading blocks of the prefix the reservation has an answer for."""
    if not slots.reason:
        return blocks
    known = [slot.index for slot in slots] + [*slots.resident, *slots.busy]
    return max(known) + 1 if known else 0
