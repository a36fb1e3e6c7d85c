"""Copies between an engine's pages in host memory and blocks of `page_schema`.

All copies of a call are one call of torch, which releases the GIL once: a thread that copies page
by page would queue for it, some 0.6 ms each time, while the engine computes.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from tiffin.kernels.layout.block_addresses import host_tensor

from ....errors import InvalidInput
from .copier import PageLoad

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from ....format.schema import KVSchema

    Bytes = NDArray[np.uint8]


class PageCopier:
    """Copies pages of one rank; see `EngineCopier`. `layers`: the engine's tensors, [pages, ...]
    each, whose pages are contiguous, of the model's layers from `first_layer` on; `rank` of `ranks`
    tensor-parallel ones. Thread-safe.

    Raises InvalidInput for tensors that are not what the schema says.
    """

    # Never: the copy takes cores from the forward pass (docs/decisions/vllm-connector.md).
    layerwise_bytes = math.inf

    def __init__(
        self,
        layers: Sequence[Any],
        schema: KVSchema,
        page_tokens: int,
        rank: int,
        ranks: int,
        first_layer: int = 0,
    ) -> None:
        self.pages = schema.block_tokens // page_tokens  # of a block
        self._layer_bytes = schema.block_bytes // len(schema.layers) // ranks  # of one rank
        self._page_bytes = self._layer_bytes // self.pages
        self._schema = schema
        self._rank, self._ranks, self._first_layer = rank, ranks, first_layer
        self.block_bytes = self._layer_bytes * len(layers)  # of this rank
        if first_layer + len(layers) > len(schema.layers):
            raise InvalidInput(
                f"{len(layers)} layers from {first_layer} on; the blocks have {len(schema.layers)}"
            )
        self._rows = [self._rows_of(index, layer) for index, layer in enumerate(layers)]

    def _rows_of(self, index: int, layer: Any) -> Any:
        """The layer as uint8 [pages, page_bytes]."""
        if layer.device.type != "cpu":
            raise InvalidInput(f"layer {index} is on {layer.device}, not in host memory")
        page = layer[0]
        if not page.is_contiguous() or page.numel() * page.element_size() != self._page_bytes:
            raise InvalidInput(
                f"layer {index}: pages of shape {tuple(page.shape)} and {page.dtype}, steps "
                f"{page.stride()}; the blocks have {self._page_bytes} contiguous bytes"
            )
        flat = torch.as_strided(
            layer, (layer.shape[0], page.numel()), (layer.stride(0), 1), layer.storage_offset()
        )
        return flat.view(torch.uint8)

    def step_begins(self) -> None:
        """See `EngineCopier.step_begins`: on a CPU a step has ended before the next is ordered."""

    def close(self) -> None:
        """See `EngineCopier.close`: nothing is to be given back."""

    def scatter(self, blocks: Sequence[Bytes], pages: Sequence[int], skipped: int = 0) -> None:
        """Fill `pages`, in order, from the blocks without their first `skipped` pages. A block is
        its whole payload, or only this rank's bytes."""
        self._scatter([PageLoad(blocks, pages, skipped)], slice(None))

    def scatter_layers(self, loads: Sequence[PageLoad]) -> Iterator[tuple[int, None]]:
        """See `EngineCopier.scatter_layers`: what is yielded has been copied."""
        for layer in range(len(self._rows)):
            self._scatter(loads, slice(layer, layer + 1))
            yield layer + 1, None

    def scatter_layer(
        self, layer: int, blocks: Sequence[Bytes], pages: Sequence[int], skipped: int = 0
    ) -> None:
        """See `EngineCopier.scatter_layer`."""
        self._scatter([PageLoad(blocks, pages, skipped)], slice(layer, layer + 1))

    def await_layers(self, event: None) -> None:
        """See `EngineCopier.await_layers`."""

    def _scatter(self, loads: Sequence[PageLoad], layers: slice) -> None:
        targets: list[Any] = []
        sources: list[Any] = []
        for blocks, pages, skipped in loads:
            for block, memory in enumerate(blocks):
                first = skipped if block == 0 else 0
                at = block * self.pages + first - skipped
                mine = pages[at : at + self.pages - first]
                self._pair(memory, mine, first, layers, engine=targets, pool=sources)
        if targets:
            torch._foreach_copy_(targets, sources)

    def mark(self) -> None:
        """See `EngineCopier.mark`: on a CPU a layer is computed when its hook is called."""

    def gather(self, blocks: Sequence[Bytes], pages: Sequence[int]) -> None:
        """Fill this rank's bytes of the blocks' whole payloads from `pages`, in order."""
        self._gather(blocks, pages, slice(None))

    def gather_layer(
        self, layer: int, blocks: Sequence[Bytes], pages: Sequence[int], computed: None = None
    ) -> None:
        """See `EngineCopier.gather_layer`."""
        self._gather(blocks, pages, slice(layer, layer + 1))

    def _gather(self, blocks: Sequence[Bytes], pages: Sequence[int], layers: slice) -> None:
        targets: list[Any] = []
        sources: list[Any] = []
        for block, memory in enumerate(blocks):
            mine = pages[block * self.pages : (block + 1) * self.pages]
            self._pair(memory, mine, 0, layers, engine=sources, pool=targets)
        if targets:
            torch._foreach_copy_(targets, sources)

    def _pair(
        self,
        memory: Bytes,
        pages: Sequence[int],
        first: int,
        layers: slice,
        *,
        engine: list[Any],
        pool: list[Any],
    ) -> None:
        """Add the views of some layers of a block's pages from `first` on, in the engine and in the
        pool."""
        tensor = host_tensor(memory)
        runs = list(self._runs(pages, first))
        offsets = self._offsets(len(memory), layers)
        for rows, (low, high) in zip(self._rows[layers], offsets, strict=True):
            for page, position, count in runs:
                begin = self._begin(position, low, high)
                piece = tensor[begin : begin + count * self._page_bytes]
                engine.append(rows[page : page + count])
                pool.append(piece.view(count, self._page_bytes))

    def _begin(self, position: int, low: int, high: int) -> int:
        """Where a page begins in a block's memory, for a layer whose halves begin at these."""
        if self._ranks == 1:
            return low + position * self._page_bytes
        half, within = divmod(position, self.pages // 2)
        return (high if half else low) + within * self._page_bytes

    def _runs(self, pages: Sequence[int], first: int) -> Iterator[tuple[int, int, int]]:
        """Runs of consecutive pages: (page, its position in the block, how many). With ranks, none
        crosses the middle of the block."""
        middle = self.pages // 2 if self._ranks > 1 else -1
        cuts = [
            index
            for index, (page, after) in enumerate(pairwise(pages), start=1)
            if after != page + 1 or first + index == middle
        ]
        for begin, end in pairwise([0, *cuts, len(pages)]):
            if end > begin:
                yield pages[begin], first + begin, end - begin

    def _offsets(self, nbytes: int, layers: slice) -> Iterator[tuple[int, int]]:
        """Where each of these layers' two halves begin in a block of so many bytes."""
        half = self._layer_bytes // 2
        if nbytes == self._layer_bytes:  # only this layer's, and this rank's
            yield 0, half
            return
        ranks, rank, first = self._ranks, self._rank, self._first_layer
        if nbytes != self._schema.block_bytes:  # only this rank's bytes
            ranks, rank, first = 1, 0, 0
        for index in range(first, first + len(self._rows))[layers]:
            base = index * ranks * self._layer_bytes
            yield base + rank * half, base + (ranks + rank) * half
