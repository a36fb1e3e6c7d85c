"""Gather and scatter without Triton: tests compare the kernel with it, and CPUs run it.

A row's place in memory becomes an index into one flat array of rows per tensor, and all rows of one
tensor in one block are moved by one indexed copy: numpy's `take` and indexed assignment on a CPU,
where their inner loop is a memcpy per row (docs/kernels.md measures the alternatives), torch's
`index_select` and `index_copy_` on a GPU. Loops are over tensors and blocks; pages and tokens are
indices. Large moves are spread over as many threads as torch has.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from math import gcd
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from ..layout.engine_cache import PagedCache
    from ..layout.lanes import HeadRun, LaneGroup
    from ..layout.transfer_plan import PageMap

_THREADED_BYTES: Final = 4 << 20  # below, starting threads (about 0.1 ms) costs more than it saves
# Indexed assignment releases the GIL only for more than 500 items:
# NPY_BEGIN_THREADS_THRESHOLDED, in numpy's lowlevel_strided_loops.c.src and ndarraytypes.h.
_FREEING_PIECES: Final = 501
# On a GPU bytes are copied as elements of these dtypes: the widest is the fastest.
_WORDS: Final = ((16, torch.complex128), (8, torch.int64), (4, torch.int32), (2, torch.int16))


def move(
    cache: PagedCache,
    groups: Sequence[LaneGroup],
    pages: PageMap,
    blocks: Sequence[Any],
    *,
    gather: bool,
) -> None:
    """Move what `groups` says between a cache's pages and blocks on the same device.

    `blocks`: uint8 tensors, one for each row of `pages`. The caller (gather_scatter.py) has checked
    everything. A gather writes zeros for the rows of tokens that a block does not have.
    """
    on_host = cache.device.type == "cpu"
    move_one = _move_on_host if on_host else _move_on_device
    memories = [block.numpy() for block in blocks] if on_host else blocks
    moved_bytes = sum(len(group) * group.run_bytes for group in groups) * len(pages)
    large = on_host and moved_bytes >= _THREADED_BYTES
    threads = torch.get_num_threads() if large else 1
    works = []
    for group in groups:
        fold = _fold(group, pages)
        offsets = [_row_offsets(group, pages, block, fold) for block in range(len(pages))]
        indices: dict[tuple[int, int, int], list[NDArray[np.int64]]] = {}
        for stretch in group.stretches:
            view = cache.layers[stretch.layer][stretch.part]
            rows = _Rows(view, group, stretch, fold, split=threads > 1 and not gather)
            key = (stretch.heads, rows.head_stride, rows.piece)
            if key not in indices:
                indices[key] = [rows.index(at) for at in offsets]
            works.append(partial(move_one, rows, indices[key], memories, gather))
    if threads == 1 or len(works) == 1:
        for work in works:
            work()
        return
    with ThreadPoolExecutor(threads, "tiffin-paged") as pool:
        for done in [pool.submit(work) for work in works]:
            done.result()


def _fold(group: LaneGroup, pages: PageMap) -> int:
    """How many tokens' rows are always contiguous, so that they can be moved as one."""
    if group.token_stride_bytes != group.row_bytes:
        return 1
    fold = int(np.gcd.reduce(np.concatenate((pages.tokens, pages.first_slots, (group.skip,)))))
    # If blocks have several pages, such a group of rows may not cross into the next page.
    return gcd(fold, pages.page_tokens) if pages.pages.shape[1] > 1 else fold


def _row_offsets(group: LaneGroup, pages: PageMap, block: int, fold: int) -> NDArray[np.int64]:
    """The offsets of a block's rows, in bytes from a lane's address: int64 [tokens from `skip` on],
    of every `fold`th token."""
    ids, slots = pages.places(block, group.skip, fold)
    return ids * group.page_stride_bytes + slots * group.token_stride_bytes


class _Rows:
    """A stretch's rows in the cache: its tensor as a flat array of pieces.

    A piece divides `fold` rows and every stride: it is all `fold` rows, except in odd layouts.
    `split`: into so many pieces that numpy releases the GIL.
    """

    def __init__(
        self, view: Any, group: LaneGroup, stretch: HeadRun, fold: int, *, split: bool
    ) -> None:
        heads = int(view.shape[2])
        self.view, self.group, self.stretch = view.detach(), group, stretch
        self.head_stride = int(view.stride(2)) * int(view.element_size()) if heads > 1 else 0
        strides = (group.page_stride_bytes, group.token_stride_bytes, self.head_stride)
        self.moved_bytes = group.row_bytes * fold
        self.piece = gcd(self.moved_bytes, *strides[::2])
        if fold == 1:
            self.piece = gcd(self.piece, group.token_stride_bytes)
        run_bytes, even = stretch.heads * group.run_bytes, 2 * int(view.element_size())
        while split and run_bytes < _FREEING_PIECES * self.piece and self.piece % even == 0:
            self.piece //= 2
        steps = (view.shape[0] - 1, view.shape[1] - 1, heads - 1 - stretch.head)
        reach = sum(step * stride for step, stride in zip(steps, strides, strict=True))
        elements = self.piece // int(view.element_size())
        self.flat = self.view.as_strided(
            ((reach + group.row_bytes) // self.piece, elements),
            (elements, 1),
            view.storage_offset() + stretch.head * view.stride(2),
        )

    def index(self, offsets: NDArray[np.int64]) -> NDArray[np.int64]:
        """[heads, pieces]: where the pieces of rows at `offsets` are."""
        heads = np.arange(self.stretch.heads)[:, None, None] * self.head_stride
        within = np.arange(0, self.moved_bytes, self.piece)
        places = (heads + offsets[:, None] + within) // self.piece
        index: NDArray[np.int64] = places.reshape(self.stretch.heads, -1)
        return index


def _runs(
    rows: _Rows, indices: list[NDArray[np.int64]], blocks: Sequence[Any], gather: bool
) -> Iterator[tuple[NDArray[np.int64], Any]]:
    """For each block, and each head of it that is not contiguous with the one before: the places of
    its pieces in the cache, and its bytes in the block; a gather zeroes the rest of the run. Blocks
    are arrays of numpy or tensors of torch."""
    stretch, run_bytes = rows.stretch, rows.group.run_bytes
    end = stretch.offset + stretch.heads * stretch.run_bytes
    for index, block in zip(indices, blocks, strict=True):
        runs = block[stretch.offset : end].reshape(stretch.heads, stretch.run_bytes)
        moved_bytes = index.shape[1] * rows.piece
        if gather and moved_bytes < run_bytes:
            runs[:, moved_bytes:run_bytes] = 0
        if moved_bytes == stretch.run_bytes:  # no gap between heads
            yield index.reshape(-1), runs.reshape(-1)
        elif moved_bytes:
            for places, run in zip(index, runs, strict=True):
                yield places, run[:moved_bytes]


def _move_on_host(
    rows: _Rows, indices: list[NDArray[np.int64]], blocks: Sequence[Any], gather: bool
) -> None:
    piece = np.dtype(f"V{rows.piece}")
    flat = rows.flat.view(torch.uint8).numpy().reshape(-1).view(piece)
    for places, run in _runs(rows, indices, blocks, gather):
        if gather:
            # No place is ever clipped; only in this mode does numpy copy directly into `out`.
            np.take(flat, places, out=run.view(piece), mode="clip")
        else:
            flat[places] = run.view(piece)


def _move_on_device(
    rows: _Rows, indices: list[NDArray[np.int64]], blocks: Sequence[Any], gather: bool
) -> None:
    for places, packed in _runs(rows, indices, blocks, gather):
        begins = (rows.flat.storage_offset() * rows.view.element_size(), packed.storage_offset())
        common = gcd(rows.piece, *begins)
        width, word = next((w for w in _WORDS if common % w[0] == 0), (1, torch.uint8))
        flat = rows.flat.view(word)
        run = packed.view(word).view(-1, rows.piece // width)
        index = torch.from_numpy(places).to(rows.view.device)
        if gather:
            torch.index_select(flat, 0, index, out=run)
        else:
            flat.index_copy_(0, index, run)
