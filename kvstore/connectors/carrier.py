"""Blocks between an engine's cache and the pool, through a GPU's HBM tier if there is one.

What every connector does, whatever its engine: lease the longest stored prefix and scatter it,
reserve what is missing and gather into it. The engine says how its cache looks, as a `PagedCache`
and a `PageMap`.

With an HBM tier, a load takes what is there, brings up what the pool has, and takes the rest from
the pool's memory if HBM has no room for it. A save goes to HBM, and from there down to the pool in
the background, at once: until then other processes do not see it. What HBM has no room for is
written to the pool directly.
"""

from __future__ import annotations

import contextlib
import logging
import time
from typing import TYPE_CHECKING, Any

from ..errors import NoRoom, TiffinError
from ..pinned import PinnedPool
from .moving import BlockMover

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tiffin.kernels.cache import PagedCache
    from tiffin.kernels.plan import PageMap

    from ..client import Client
    from ..hbm.store import HbmStore
    from ..keys import Prefix
    from ..schema import KVSchema

    Cache = tuple[PagedCache, PageMap]

log = logging.getLogger(__name__)

# HBM's watermarks, of its bytes: a block that was saved is copied down at once, because sharing is
# what the pool is for. (Zero is no watermark.)
_COPY_DOWN_ABOVE = 1e-9
# What `close` grants to copies down.
CLOSE_TIMEOUT_S = 10.0


class Carrier:
    """Moves blocks of `schema` between caches on `device` and what `client` reaches.

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

        `room(blocks)` is asked once, if there is any: the cache, and a row of pages for each block.
        Returns how many blocks were loaded, and why not more (see `Missing` and `HbmBlocks`).
        Raises what the client, the kernels and the device meet; then nothing counts as loaded.
        """
        deadline = time.monotonic() + timeout_s
        self._pin()
        with contextlib.ExitStack() as leases:
            found: list[Any] = []
            reason: str | None = None
            if self.hbm is not None:
                near = leases.enter_context(self.hbm.promote(prefix, timeout_s=timeout_s))
                found += [block.tensor for block in near]
                reason = near.reason
            # For other reasons than HBM's own, the pool has no more either.
            if self.hbm is None or reason in ("no_room", "admission"):
                left_s = max(0.0, deadline - time.monotonic())
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
        """Gather the blocks of `prefix` that are missing, `blocks_at_once` at a time.

        `rows(positions)`: where in the cache these blocks are. Appends to `stored` the positions
        that were stored. Returns why there are not more, None if nothing is amiss. Raises as
        `load` does.
        """
        position, deadline = 0, time.monotonic() + timeout_s
        self._pin()
        in_hbm = self.hbm is not None
        while position < len(prefix):
            part = prefix[position : position + blocks_at_once]
            try:
                slots = self._reserve(part, deadline, in_hbm=in_hbm)
            except NoRoom:
                if not in_hbm:
                    return "no_room"
                in_hbm = False  # this part, and what comes after it, goes to the pool directly
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
        return self.client.reserve(part, timeout_s=max(0.0, deadline - time.monotonic()))

    def close(self) -> None:
        """Copy down what only HBM has, then let go of the device's memory. A second call does
        nothing."""
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
        if self._pinned is not None:
            self._pinned.follow()


def _open_hbm(client: Client, schema: KVSchema, nbytes: int, device: str) -> HbmStore:
    from ..hbm.core import HbmOptions
    from ..hbm.store import HbmStore

    options = HbmOptions(high_watermark=_COPY_DOWN_ABOVE, low_watermark=_COPY_DOWN_ABOVE)
    return HbmStore(client, schema, nbytes, device, options=options)


def _covered(slots: Any, blocks: int) -> int:
    """How many blocks of a reservation's prefix it said something about."""
    if not slots.reason:
        return blocks
    known = [slot.index for slot in slots] + [*slots.resident, *slots.busy]
    return max(known) + 1 if known else 0
