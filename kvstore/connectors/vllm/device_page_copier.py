"""Copies between the pages of an engine on a GPU and blocks of `token_schema` in host memory.

A load brings pieces of a block into a buffer on the device, and a kernel scatters each of them into
the pages; a save gathers into the buffer, and a copy takes it to the host. Two buffers take turns,
so that one is on the link while the other is scattered or gathered. What is ordered:

- A scatter waits, on the device, for all steps that the engine had launched when it ordered the
  load. With asynchronous scheduling such a step may still write to pages that it has given up.
- A call returns when the device has done all of it. So steps that are launched later see what was
  loaded, and pages that were saved may be overwritten.
- A save waits for no step: the tokens' outputs were processed, and they came after their K and V on
  the same stream. On other ranks too: no rank ends a step whose sums it does not have from all.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import numpy as np

from tiffin.kernels.layout.transfer_plan import PageMap
from tiffin.kernels.paged.gather_scatter import gather, scatter
from tiffin.messenger.gpu.copier import StillCopying
from tiffin.messenger.gpu.pipeline import until

from ...errors import InvalidInput
from .block_pieces import block_pieces
from .pool_pinning import PoolPinning

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from tiffin.kernels.layout.engine_cache import PagedCache
    from tiffin.messenger.gpu.copier import Copies, DeviceTransfer
    from tiffin.messenger.gpu.copy_streams import Event

    from ...format.schema import KVSchema
    from .block_pieces import BlockPiece
    from .device_queue import Device, Queue
    from .pool_link import PoolLink

    Bytes = NDArray[np.uint8]

# 16 MiB are on a PCIe Gen5 link for 0.3 ms (docs/device-copies.md): long beside the 0.1 ms that the
# host needs to queue a piece. Two buffers for each stage are 96 MiB of the device.
PIECE_BYTES = 16 << 20
# Two threads load and one saves; a synchronous load of the engine's thread waits for a free stage.
STAGES = 3
# Programs of a kernel: 64 move 750 GB/s, an estimate, and leave most of a GPU to the engine
# (docs/kernels.md).
_PROGRAMS = 64
# How long a copy may be queued. The copies before it wait for no step, so that takes milliseconds;
# a device that needs longer has hung, and the engine with it.
_QUEUE_TIMEOUT_S = 60.0


class _Buffer:
    """Memory on the device for one piece, and the event after which it is free."""

    def __init__(self, memory: Any) -> None:
        self.memory = memory
        self.free: Event | None = None


class _Stage:
    """What one call uses at a time: a queue, two buffers, and the transfers that it began."""

    def __init__(self, device: Device, nbytes: int) -> None:
        self.queue: Queue = device.queue()
        self._copier = device.copier
        self._buffers = deque(_Buffer(device.buffer(nbytes)) for _ in range(2))
        self._begun: list[DeviceTransfer] = []

    def buffer(self) -> _Buffer:
        """The buffer that was used longest ago, once it is free."""
        buffer = self._buffers[0]
        self._buffers.rotate(-1)
        if buffer.free is not None:
            until(buffer.free.query, math.inf)
            buffer.free = None
        return buffer

    def copy(self, copies: Copies, after: Event | None = None) -> Event:
        """Queue copies between a buffer and the host; returns their end."""
        try:
            transfer = self._copier.submit([[copies]], after=after, timeout_s=_QUEUE_TIMEOUT_S)
        except StillCopying as error:
            self._begun.append(error.transfer)
            raise
        self._begun.append(transfer)
        assert transfer.event is not None  # it was queued
        return transfer.event

    def settle(self) -> None:
        """Return when the device uses neither pages nor blocks nor buffers any more. There is no
        deadline: what it does can't be taken back, and would go to memory of others."""
        until(self.queue.record().query, math.inf)
        begun, self._begun = self._begun, []
        for transfer in begun:
            transfer.wait(math.inf)


class DevicePageCopier:
    """Copies pages of one rank; see `copier.Copier`.

    `cache`: the rank's pages, and which heads they have. `page_tokens`: of the scheduler's pages,
    which may be several of the cache's. Allocates `STAGES` pairs of buffers of `piece_bytes`, or of
    a layer's share if that is more, on the device.

    Raises InvalidInput for a cache that does not fit the schema. Thread-safe.
    """

    def __init__(
        self,
        cache: PagedCache,
        schema: KVSchema,
        page_tokens: int,
        device: Device,
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        if len(cache.layers) != len(schema.layers):
            raise InvalidInput(f"{len(cache.layers)} layers; the blocks have {len(schema.layers)}")
        first_head = cache.first_head
        heads = (first_head, first_head + int(cache.layers[0][0].shape[2]))
        self._cache = cache
        self._device = device
        self._page_tokens = page_tokens
        self._whole_bytes = schema.block_bytes
        self._pieces = block_pieces(schema, heads, piece_bytes)
        self.pages = schema.block_tokens // page_tokens
        self.block_bytes = sum(piece.nbytes for piece in self._pieces)
        room_bytes = max(piece.room_bytes for piece in self._pieces)
        self._stages: SimpleQueue[_Stage] = SimpleQueue()
        for _ in range(STAGES):
            self._stages.put(_Stage(device, room_bytes))
        self._steps = device.steps()
        self._pinning: PoolPinning | None = None
        self._lock = threading.Lock()
        self._calls = 0  # in progress; protected by _lock

    def pin(self, link: PoolLink) -> None:
        """Pin the pool's memory from the first copy on, until `close`."""
        self._pinning = PoolPinning(link, str(self._cache.device), self.while_idle)

    def while_idle(self, action: Callable[[], None]) -> bool:
        """Run `action` if no copy is in progress, and let none begin meanwhile. Returns whether it
        ran."""
        with self._lock:
            if self._calls:
                return False
            action()
            return True

    def close(self) -> None:
        """See `Copier.close`."""
        pinning, self._pinning = self._pinning, None
        if pinning is not None:
            pinning.close()

    def step_begins(self) -> None:
        """See `Copier.step_begins`."""
        self._steps = self._device.steps()

    def scatter(self, blocks: Sequence[Bytes], pages: Sequence[int], skipped: int = 0) -> None:
        """See `Copier.scatter`. Raises PageError for pages that the engine does not have,
        RangeError for blocks of another size, CudaError."""
        with self._stage() as stage:
            stage.queue.wait(self._steps)
            for index, memory in enumerate(blocks):
                first = skipped if index == 0 else 0
                at = index * self.pages + first - skipped
                mine = pages[at : at + self.pages - first]
                if mine:
                    self._load(stage, memory, self._map(mine), first * self._page_tokens)

    def gather(self, blocks: Sequence[Bytes], pages: Sequence[int]) -> None:
        """See `Copier.gather`. Raises as `scatter` does."""
        with self._stage() as stage:
            for index, memory in enumerate(blocks):
                mine = pages[index * self.pages : (index + 1) * self.pages]
                self._save(stage, memory, self._map(mine))

    def warm_up(self) -> None:
        """Compile the kernels, and have what the device needs: copies the first pages to a buffer
        and back. Call it before the engine's first step. Raises the kernels' errors."""
        tokens = self._cache.pages * self._cache.page_tokens
        table = self._map(range(min(self.pages, tokens // self._page_tokens)))
        with self._stage() as stage:
            stage.queue.wait(self._steps)  # and for what clears a new cache
            buffer = stage.buffer()
            for piece in self._pieces:
                for move in (gather, scatter):
                    stage.queue.run(partial(self._move, move, table, buffer.memory, piece, 0))

    @contextmanager
    def _stage(self) -> Iterator[_Stage]:
        pinning = self._pinning
        if pinning is not None:
            pinning.follow_soon()
        stage = self._stages.get()
        with self._lock:
            self._calls += 1
        try:
            try:
                yield stage
            finally:
                stage.settle()
        finally:
            with self._lock:
                self._calls -= 1
            self._stages.put(stage)

    def _load(self, stage: _Stage, memory: Bytes, table: PageMap, skipped_tokens: int) -> None:
        whole = len(memory) == self._whole_bytes
        for piece in self._pieces:
            buffer = stage.buffer()
            packed = buffer.memory[: piece.nbytes]
            stage.queue.wait(stage.copy(piece.load(packed, memory, whole=whole)))
            move = partial(self._move, scatter, table, buffer.memory, piece, skipped_tokens)
            stage.queue.run(move)
            buffer.free = stage.queue.record()

    def _save(self, stage: _Stage, memory: Bytes, table: PageMap) -> None:
        whole = len(memory) == self._whole_bytes
        for piece in self._pieces:
            buffer = stage.buffer()
            packed = buffer.memory[: piece.nbytes]
            stage.queue.run(partial(self._move, gather, table, buffer.memory, piece, 0))
            copies = piece.save(memory, packed, whole=whole)
            buffer.free = stage.copy(copies, after=stage.queue.record())

    def _move(
        self,
        move: Any,
        table: PageMap,
        buffer: Any,
        piece: BlockPiece,
        skipped_tokens: int,
        stream: Any,
    ) -> None:
        """Launch a gather or scatter of one piece of one block."""
        layout = piece.layout(skipped_tokens)
        block = buffer[: layout.nbytes].unsqueeze(0)
        move(self._cache, table, block, layout, stream=stream, programs=_PROGRAMS)

    def _map(self, pages: Sequence[int]) -> PageMap:
        """The cache's pages of one block."""
        tokens = self._cache.page_tokens
        split = self._page_tokens // tokens
        ids = np.asarray(pages, np.int64)[:, None] * split + np.arange(split)
        return PageMap(ids.reshape(1, -1), page_tokens=tokens)
