"""Copies between the pages of an engine on a GPU and blocks of `token_schema` in host memory.

A load brings pieces of a block into a buffer on the device, and a kernel scatters each of them into
the pages; a save gathers into the buffer, and a copy takes it to the host. Two buffers take turns,
so that one is on the link while the other is scattered or gathered. What is ordered:

- A scatter waits, on the device, for all steps that the engine had launched when it ordered the
  load. With asynchronous scheduling such a step may still write to pages that it has given up.
- A call returns when the device has done all of it. So steps that are launched later see what was
  loaded, and pages that were saved may be overwritten.
- Loads that are copied layer after layer record an event behind each group of layers. The engine's
  stream waits for it before the first of these layers reads pages; its thread waits for no bytes.
- A save of whole blocks waits for no step: the tokens' outputs were processed, and they came after
  their K and V on the same stream. On other ranks too: no rank ends a step whose sums it does not
  have from all, and no pipeline stage begins one whose numbers it does not have from the stage
  before. A save by layer waits, on the device, for what was launched up to that layer.
"""

from __future__ import annotations

import functools
import threading
from contextlib import contextmanager
from functools import partial
from itertools import product
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tiffin.kernels.layout.transfer_plan import PageMap
from tiffin.kernels.paged.gather_scatter import gather, scatter

from ....errors import InvalidInput
from .block_pieces import block_pieces
from .device_stage import Stage
from .pool_pinning import PoolPinning

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from tiffin.kernels.layout.engine_cache import PagedCache
    from tiffin.messenger.gpu.copy_streams import Event

    from ....format.schema import KVSchema
    from ..pool_link import PoolLink
    from .block_pieces import BlockPiece
    from .copier import PageLoad
    from .device_queue import Device

    Bytes = NDArray[np.uint8]

# 16 MiB are on a PCIe Gen5 link for 0.3 ms (docs/device-copies.md): long beside the 0.1 ms that the
# host needs to queue a piece. Two buffers for each stage are 96 MiB of the device.
PIECE_BYTES = 16 << 20
# Two threads load and one saves; a synchronous load of the engine's thread waits for a free stage.
STAGES = 3
# From four pieces on, 1.3 ms of such a link, a load is copied beside the forward pass, which then
# starts a piece after the load. A piece takes longer on the link than the host takes to launch a
# layer; fewer pieces hide less than the 0.1 ms that the other thread costs. Arithmetic: not
# measured on a GPU.
LAYERWISE_BYTES = 4 * PIECE_BYTES
# Programs of a kernel: 64 move 750 GB/s, an estimate, and leave most of a GPU to the engine
# (docs/kernels.md).
_PROGRAMS = 64


class _Batch(NamedTuple):
    """Blocks that are moved together: their memories and pages, and how many tokens the first, and
    then only, block is without."""

    memories: Sequence[Any]
    table: PageMap
    skipped_tokens: int


class DevicePageCopier:
    """Copies pages of one rank; see `EngineCopier`.

    `cache`: the rank's pages, and which layers and heads they have. `page_tokens`: of the
    scheduler's pages, which may be several of the cache's. Allocates `STAGES` pairs of buffers of
    `piece_bytes`, or of a layer's share if that is more, on the device.

    Raises InvalidInput for a cache that does not fit the schema. Thread-safe.
    """

    layerwise_bytes = float(LAYERWISE_BYTES)

    def __init__(
        self,
        cache: PagedCache,
        schema: KVSchema,
        page_tokens: int,
        device: Device,
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        layers = (cache.layer_ids[0], cache.layer_ids[-1] + 1)
        if layers[1] > len(schema.layers):
            raise InvalidInput(f"layers to {layers[1]}; the blocks have {len(schema.layers)}")
        first_head = cache.first_head
        heads = (first_head, first_head + int(cache.layers[0][0].shape[2]))
        self._cache = cache
        self._device = device
        self._page_tokens = page_tokens
        self.where = str(cache.device)  # as torch names it
        self._whole_bytes = schema.block_bytes
        self._piece_bytes = piece_bytes
        self._first_layer = layers[0]
        self._cut = functools.cache(partial(block_pieces, schema, layers, heads))
        self._pieces = self._cut(piece_bytes)
        self._layers = self._cut(1)  # one piece each
        self.pages = schema.block_tokens // page_tokens
        self.block_bytes = sum(piece.nbytes for piece in self._pieces)
        (self._share,) = self._cut(self.block_bytes)
        self.device_block_bytes = self._share.room_bytes
        # Blocks that are smaller than a piece: each copy and launch costs the host some 0.1 ms.
        self._together = max(1, piece_bytes // self.block_bytes)
        room_bytes = max(piece.room_bytes for piece in self._pieces)
        self._room_bytes = room_bytes = max(room_bytes, self._together * self.block_bytes)
        self._stages: SimpleQueue[Stage] = SimpleQueue()
        for _ in range(STAGES):
            self._stages.put(Stage(device, room_bytes))
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
        """See `EngineCopier.close`."""
        pinning, self._pinning = self._pinning, None
        if pinning is not None:
            pinning.close()

    def step_begins(self) -> None:
        """See `EngineCopier.step_begins`."""
        self._steps = self._device.steps()

    def scatter(self, blocks: Sequence[Bytes], pages: Sequence[int], skipped: int = 0) -> None:
        """See `EngineCopier.scatter`. Raises PageError for pages that the engine does not have,
        RangeError for blocks of another size, CudaError."""
        with self._stage() as stage:
            stage.queue.wait(self._steps)
            for batch in self._batches(blocks, pages, skipped, self._together):
                for piece in self._pieces:
                    self._load(stage, batch, piece)

    def scatter_layers(self, loads: Sequence[PageLoad]) -> Iterator[tuple[int, Event]]:
        """See `EngineCopier.scatter_layers`. Raises as `scatter` does."""
        pieces = self._layer_pieces(sum(len(load.blocks) for load in loads))
        together = max(1, self._room_bytes // pieces[0].nbytes)
        with self._stage() as stage:
            stage.queue.wait(self._steps)
            batches = [batch for load in loads for batch in self._batches(*load, together)]
            for piece in pieces:
                for batch in batches:
                    self._load(stage, batch, piece)
                yield piece.layers[1] - self._first_layer, stage.queue.record()

    def scatter_layer(
        self, layer: int, blocks: Sequence[Bytes], pages: Sequence[int], skipped: int = 0
    ) -> None:
        """See `EngineCopier.scatter_layer`. Raises as `scatter` does."""
        with self._stage() as stage:
            stage.queue.wait(self._steps)
            for batch in self._batches(blocks, pages, skipped, self._together):
                self._load(stage, batch, self._layers[layer])

    def await_layers(self, event: Event) -> None:
        """See `EngineCopier.await_layers`."""
        self._device.await_in_steps(event)

    def gather(self, blocks: Sequence[Bytes], pages: Sequence[int]) -> None:
        """See `EngineCopier.gather`. Raises as `scatter` does."""
        with self._stage() as stage:
            for batch in self._batches(blocks, pages, 0, self._together):
                self._save(stage, batch, self._pieces)

    def mark(self) -> Event:
        """See `EngineCopier.mark`."""
        return self._device.steps()

    def gather_layer(
        self, layer: int, blocks: Sequence[Bytes], pages: Sequence[int], computed: Event
    ) -> None:
        """See `EngineCopier.gather_layer`. Raises as `scatter` does."""
        with self._stage() as stage:
            stage.queue.wait(computed)
            for batch in self._batches(blocks, pages, 0, self._together):
                self._save(stage, batch, self._layers[layer : layer + 1])

    def scatter_device(self, blocks: Sequence[Any], pages: Sequence[int], skipped: int = 0) -> None:
        """`scatter` from blocks in the device's memory, as `gather_device` filled them: tensors
        uint8 [device_block_bytes]. Nothing is copied over the bus."""
        self._move_device(scatter, blocks, pages, skipped, after=self._steps)

    def gather_device(self, blocks: Sequence[Any], pages: Sequence[int]) -> None:
        """`gather` to blocks in the device's memory: this rank's bytes, tensors uint8
        [device_block_bytes]."""
        self._move_device(gather, blocks, pages)

    def _move_device(
        self,
        move: Any,
        blocks: Sequence[Any],
        pages: Sequence[int],
        skipped: int = 0,
        after: Event | None = None,
    ) -> None:
        with self._stage() as stage:
            if after is not None:
                stage.queue.wait(after)
            for batch in self._batches(blocks, pages, skipped, len(blocks)):
                stage.queue.run(partial(self._move_share, move, batch))

    def _move_share(self, move: Any, batch: _Batch, stream: Any) -> None:
        layout = self._share.layout(batch.skipped_tokens)
        blocks = batch.memories
        move(self._cache, batch.table, blocks, layout, stream=stream, programs=_PROGRAMS)

    def warm_up_device(self, blocks: Sequence[Any]) -> None:
        """`warm_up` for blocks in the device's memory, of which it overwrites one or two."""
        held = self._cache.pages * self._cache.page_tokens // self._page_tokens
        most = max(1, min(2, len(blocks), held // self.pages))
        for count in {1, most}:
            pages = range(min(count * self.pages, held))
            for move in (gather, scatter):
                self._move_device(move, blocks[:count], pages, after=self._steps)

    def warm_up(self) -> None:
        """Compile the kernels, and have what the device needs: copies the first pages to a buffer
        and back. Call it before the engine's first step. Raises the kernels' errors."""
        held = self._cache.pages * self._cache.page_tokens // self._page_tokens
        most = max(1, min(self._together, held // self.pages))
        with self._stage() as stage:
            stage.queue.wait(self._steps)  # and for what clears a new cache
            buffer = stage.buffer()
            # One block and several: Triton compiles both.
            for count, piece in product({1, most}, self._pieces):
                table = self._map(range(min(count * self.pages, held)), count)
                for move in (gather, scatter):
                    batch = _Batch((), table, 0)
                    stage.queue.run(partial(self._move, move, batch, buffer.memory, piece))

    @contextmanager
    def _stage(self) -> Iterator[Stage]:
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

    def _layer_pieces(self, blocks: int) -> tuple[BlockPiece, ...]:
        """The pieces of so many blocks: of few layers, so that one piece of all blocks is about
        what a buffer has room for. Half as large for twice as many blocks, so that few are kept."""
        return self._cut(self._piece_bytes >> (blocks - 1).bit_length())

    def _batches(
        self, blocks: Sequence[Any], pages: Sequence[int], skipped: int, together: int
    ) -> Iterator[_Batch]:
        """The blocks that have pages, `together` at a time. A first block without its first pages
        comes alone: its rows lie elsewhere."""
        index = at = 0
        while index < len(blocks) and at < len(pages):
            first = skipped if index == 0 else 0
            count = 1 if first else together
            mine = pages[at : at + count * self.pages - first]
            count = -(-(len(mine) + first) // self.pages)
            memories = blocks[index : index + count]
            mine = mine[: len(memories) * self.pages - first]
            yield _Batch(memories, self._map(mine, len(memories)), first * self._page_tokens)
            index, at = index + len(memories), at + len(mine)

    def _load(self, stage: Stage, batch: _Batch, piece: BlockPiece) -> None:
        buffer = stage.buffer()
        copies = [
            piece.load(packed, memory, whole=self._is_whole(memory))
            for memory, packed in self._packed(batch, buffer.memory, piece)
        ]
        stage.queue.wait(stage.copy(copies))
        stage.queue.run(partial(self._move, scatter, batch, buffer.memory, piece))
        buffer.free = stage.queue.record()

    def _save(self, stage: Stage, batch: _Batch, pieces: Sequence[BlockPiece]) -> None:
        for piece in pieces:
            buffer = stage.buffer()
            stage.queue.run(partial(self._move, gather, batch, buffer.memory, piece))
            copies = [
                piece.save(memory, packed, whole=self._is_whole(memory))
                for memory, packed in self._packed(batch, buffer.memory, piece)
            ]
            buffer.free = stage.copy(copies, after=stage.queue.record())

    def _is_whole(self, memory: Bytes) -> bool:
        return len(memory) == self._whole_bytes

    def _packed(self, batch: _Batch, buffer: Any, piece: BlockPiece) -> Iterator[tuple[Bytes, Any]]:
        """The blocks' memories, and where a piece of each lies in a buffer."""
        for index, memory in enumerate(batch.memories):
            yield memory, buffer[index * piece.nbytes : (index + 1) * piece.nbytes]

    def _move(self, move: Any, batch: _Batch, buffer: Any, piece: BlockPiece, stream: Any) -> None:
        """Launch a gather or scatter of one piece of the blocks."""
        layout = piece.layout(batch.skipped_tokens)
        count = len(batch.table)
        blocks = buffer[: count * layout.nbytes].view(count, layout.nbytes)
        move(self._cache, batch.table, blocks, layout, stream=stream, programs=_PROGRAMS)

    def _map(self, pages: Sequence[int], blocks: int) -> PageMap:
        """The cache's pages of so many blocks, of which the last may have fewer."""
        tokens = self._cache.page_tokens
        split = self._page_tokens // tokens
        width = len(pages) if blocks == 1 else self.pages
        ids = np.zeros((blocks * width, split), np.int64)
        ids[: len(pages)] = np.asarray(pages, np.int64)[:, None] * split + np.arange(split)
        counts = np.full(blocks, width)
        counts[-1] = len(pages) - (blocks - 1) * width
        return PageMap(
            ids.reshape(blocks, -1), page_tokens=tokens, tokens=counts * self._page_tokens
        )
