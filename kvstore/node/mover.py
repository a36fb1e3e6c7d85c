"""Carries out the promotions, demotions and write-backs between DRAM and NVMe that the core
ordered, highest priority first.

Every move verifies the checksum of each segment, so that damage does not spread to another tier.
A move copies whole extents. The header is copied with its payload and rewritten for its new offset;
a demotion does that in a separate buffer, because readers may be reading the original.
"""

from __future__ import annotations

import heapq
import logging
import mmap
import threading
from itertools import count
from typing import TYPE_CHECKING

import numpy as np

from tiffin.messenger.shm.host_copy import hash_segments

from ..errors import CorruptBlock, InvalidInput, TierUnavailable, VersionMismatch
from ..format.header import MAX_HEADER_BYTES, Header, read_header, relocate_header
from ..memory.arena import Extent
from ..tiers.base import TierName
from .core.records import Move, MoveOutcome, Replica

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from ..tiers.dram import DramTier
    from ..tiers.nvme import NvmeTier

log = logging.getLogger(__name__)


def extent_of(replica: Replica) -> Extent:
    """The replica's extent in its tier."""
    return Extent(replica.offset, replica.length)


def verify_block(view: NDArray[np.uint8], replica: Replica) -> Header:
    """Check header, identity and every segment of a block in memory; `view` is its whole extent.

    Raises CorruptBlock or VersionMismatch. Costs one pass over the payload at hashing speed.
    """
    return verify_extent(view, replica.key, replica.generation, offset=replica.offset)


def verify_extent(view: NDArray[np.uint8], key: bytes, generation: int, *, offset: int) -> Header:
    """`verify_block` for an extent whose header must name `offset` as its place in the tier."""
    name = f"block {key.hex()[:8]} at {offset}"
    header = read_header(view, offset_expected=offset)
    if header.key != key or header.generation != generation:
        raise CorruptBlock(f"{name}: header of another block, {header.key.hex()}")
    if header.extent_bytes != len(view):
        raise CorruptBlock(f"{name}: header of an extent of {header.extent_bytes} bytes")
    ends = header.header_bytes + np.cumsum(header.segment_bytes).astype(np.int64)
    lengths = header.segment_bytes.astype(np.int64)
    spans = zip((ends - lengths).tolist(), lengths.tolist(), strict=True)
    differs = hash_segments(view, spans, header.algorithm) != header.checksums
    if differs.any():
        raise CorruptBlock(f"{name}: checksum of segment {int(differs.argmax())} differs")
    return header


class Mover:
    """Worker threads over one priority queue.

    A worker thread calls `finished(move, outcome)` once per submitted move, unless the mover is
    closed first.
    """

    def __init__(
        self,
        dram: DramTier,
        nvme: NvmeTier,
        finished: Callable[[Move, MoveOutcome], None],
        *,
        workers: int = 2,
    ) -> None:
        self._dram = dram
        self._nvme = nvme
        self._finished = finished
        self._queue: list[tuple[int, int, Move]] = []
        self._order = count()
        self._wake = threading.Condition()
        self._closed = False
        self._threads = [
            threading.Thread(target=self._run, name=f"tiffin-mover-{i}", daemon=True)
            for i in range(workers)
        ]
        try:
            for thread in self._threads:
                thread.start()
        except BaseException:  # the system has no more threads
            self.close()
            raise

    def submit(self, move: Move) -> None:
        """Queue a move; FIFO among equal priorities. A move that is in the queue already also gets
        a place at its present priority; a move that has started continues."""
        with self._wake:
            heapq.heappush(self._queue, (move.priority, next(self._order), move))
            self._wake.notify()

    @property
    def queued(self) -> int:
        """Length of the queue; a move that was submitted twice may count twice."""
        return len(self._queue)

    def close(self) -> None:
        """Wait for running moves; drop the queued ones."""
        with self._wake:
            self._closed = True
            self._queue.clear()
            self._wake.notify_all()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    def _run(self) -> None:
        # The buffer for rewritten headers must be page-aligned for O_DIRECT.
        scratch = np.frombuffer(mmap.mmap(-1, MAX_HEADER_BYTES), dtype=np.uint8)
        while (move := self._next()) is not None:
            try:
                outcome = self._carry_out(move, scratch)
            except Exception:
                log.exception("a move failed unexpectedly; its block is dropped")
                outcome = MoveOutcome.READ_FAILED
            self._finished(move, outcome)

    def _next(self) -> Move | None:
        with self._wake:
            while True:
                self._wake.wait_for(lambda: self._queue or self._closed)
                if self._closed:
                    return None
                move = heapq.heappop(self._queue)[2]
                if not move.started:
                    move.started = True
                    return move

    def _carry_out(self, move: Move, scratch: NDArray[np.uint8]) -> MoveOutcome:
        if move.cancelled:
            return MoveOutcome.DONE
        try:
            if move.target.tier is TierName.DRAM:
                return self._promote(move)
            return self._demote(move, scratch)
        except (CorruptBlock, VersionMismatch, InvalidInput) as error:
            log.warning("block refused while moving it to %s: %s", move.target.tier, error)
            return MoveOutcome.CORRUPT

    def _promote(self, move: Move) -> MoveOutcome:
        target = self._dram.view(extent_of(move.target))
        try:
            self._nvme.read(extent_of(move.source), 0, target)
        except TierUnavailable as error:
            log.warning("NVMe read failed: %s", error)
            return MoveOutcome.READ_FAILED
        verify_block(target, move.source)
        relocate_header(target, extent_offset=move.target.offset)
        return MoveOutcome.DONE

    def _demote(self, move: Move, scratch: NDArray[np.uint8]) -> MoveOutcome:
        source = self._dram.view(extent_of(move.source))
        header = verify_block(source, move.source)
        pages = scratch[: header.header_bytes]
        pages[:] = source[: header.header_bytes]
        relocate_header(pages, extent_offset=move.target.offset)
        extent = extent_of(move.target)
        try:
            self._nvme.write(extent, header.header_bytes, source[header.header_bytes :])
            self._nvme.commit(extent, pages)
        except TierUnavailable as error:
            log.warning("NVMe write failed, the tier takes no more blocks: %s", error)
            return MoveOutcome.WRITE_FAILED
        return MoveOutcome.DONE
