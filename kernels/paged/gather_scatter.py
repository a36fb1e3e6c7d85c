"""Gather pages into blocks, and scatter blocks back into pages.

All layers and all blocks of a call are one launch (one per group of lanes, see lanes.py: usually
one). On CUDA the Triton kernel of paged/kernel.py runs; on a CPU the torch reference.

Tiling. A tile is 8 KiB of one run: 128 threads, four loads of 16 bytes each before
the first store. 16 such programs fill an SM (2048 threads) and keep 128 KiB in flight on it; to
keep 3.35 TB/s of HBM busy at about 700 ns per load takes 2.3 MB on the whole GPU, 18 KiB on each of
132 SMs. So a launch has at most 16 programs per SM, each of which takes tile after tile. Fewer
(`programs=`) leave SMs to an engine's kernels: 64 of them keep 512 KiB in flight, which is 750 GB/s
at 700 ns and more than PCIe moves. These figures are arithmetic, not measurements.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypedDict, Unpack

from ..backend import uses_triton
from ..errors import LayoutError
from ..launching import LaunchCall, on_stream
from ..layout.access_width import alignment, word_type
from ..layout.block_addresses import block_memory
from ..layout.lanes import lanes
from . import reference

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ..backend import Backend
    from ..layout.block_addresses import BlockMemory
    from ..layout.block_layout import BlockLayout, Selection
    from ..layout.engine_cache import PagedCache
    from ..layout.lanes import LaneGroup
    from ..layout.transfer_plan import PageMap

TILE_BYTES: Final = 8192
WARPS: Final = 4
PROGRAMS_PER_SM: Final = 16  # of 4 warps: 2048 threads, all that an SM of an A100 or H100 holds
_MOST_UNITS: Final = 2048  # in a tile of narrow words: 16 for each of 128 threads
_MOST_ITEMS: Final = 1 << 30


class How(TypedDict, total=False):
    """The keyword arguments of every move.

    `layers`, `heads`: half-open ranges of the model's, by default all that both sides share.
    On CUDA the work is queued on `stream` (default: the current one) and the call returns; memory
    must not be freed before the stream has passed it. `programs` limits the programs, and so the
    SMs, that a kernel uses. `backend`: "triton", "reference", or None for the device's default.
    """

    layers: Selection | None
    heads: Selection | None
    stream: Any
    programs: int | None
    backend: Backend | None


def gather(
    cache: PagedCache, pages: PageMap, blocks: Any, layout: BlockLayout, **how: Unpack[How]
) -> None:
    """Copy the tokens that `pages` names from the cache into blocks.

    `blocks`: one uint8 tensor [n, layout.nbytes or more], or n 1-D uint8 tensors or NumPy arrays
    that may lie anywhere, also in pinned host memory. Runs of layers and heads that are not moved
    are left unchanged (`how`: see `How`). If a block has fewer tokens than the layout, its further
    rows become zeros, so that data of a previous user of that memory is never published.

    Raises PageError, LayoutError, RoomError and DeviceError, before anything is written.
    """
    _move(cache, pages, blocks, layout, True, **how)


def scatter(
    cache: PagedCache, pages: PageMap, blocks: Any, layout: BlockLayout, **how: Unpack[How]
) -> None:
    """Copy blocks into the pages that `pages` names: the reverse of `gather`, with its parameters.
    Arrays may be read-only, as leased blocks are.

    Only the named tokens' rows are written; the rest of their pages is unchanged, and rows of a
    block beyond its tokens are ignored. If a layout has a head several times, the first is read.
    """
    _move(cache, pages, blocks, layout, False, **how)


def _move(
    cache: PagedCache,
    pages: PageMap,
    blocks: Any,
    layout: BlockLayout,
    gather: bool,
    *,
    layers: Selection | None = None,
    heads: Selection | None = None,
    stream: Any = None,
    programs: int | None = None,
    backend: Backend | None = None,
) -> None:
    device = cache.device
    triton = uses_triton(device, backend)
    groups = lanes(cache, layout, layers=layers, heads=heads, once=not gather)
    memory = checked_blocks(cache, pages, blocks, layout, gather, triton)
    if not triton:
        with on_stream(device, stream):
            reference.move(cache, groups, pages, memory.tensors, gather=gather)
        return
    works = [tile_work(group, memory.addresses, len(pages)) for group in groups]
    with on_stream(device, stream):
        call = LaunchCall(pages, memory.addresses, device, gather, programs)
        for group, work in zip(groups, works, strict=True):
            launch(group, work, call)


def checked_blocks(
    cache: PagedCache,
    pages: PageMap,
    blocks: Any,
    layout: BlockLayout,
    gather: bool,
    triton: bool,
) -> BlockMemory:
    """The blocks of a move, after checking that they and the pages fit the cache and the layout.

    Raises PageError, LayoutError, RoomError and DeviceError.
    """
    pages.check_fits(cache, layout.tokens)
    return block_memory(
        blocks,
        count=len(pages),
        nbytes=layout.nbytes,
        device=cache.device,
        written=gather,
        pinned=triton,
    )


@dataclass(frozen=True, slots=True)
class TileWork:
    """The tiling of a launch; constants of the kernel, except for the counts."""

    word_bytes: int
    unit_words: int
    row_units: int
    tile_units: int
    tiles: int  # per run
    items: int  # lanes × blocks × tiles


def tile_work(group: LaneGroup, addresses: NDArray[np.int64], blocks: int) -> TileWork:
    """Cut the runs of a group into tiles. A unit is the widest word, up to 16 bytes, that divides
    all addresses, strides and rows. Raises LayoutError for more than 2**30 tiles, and for runs of
    2 GiB and more: the kernel counts both in 32 bits."""
    unit_bytes = min(alignment(addresses), group.alignment)
    row_units = group.row_bytes // unit_bytes
    units = group.rows * row_units
    tile_units = min(TILE_BYTES // unit_bytes, _MOST_UNITS, 1 << (units - 1).bit_length())
    tiles = -(-units // tile_units)
    items = len(group) * blocks * tiles
    # The kernel's loop counter passes the last item by up to the number of programs.
    if items > _MOST_ITEMS:
        raise LayoutError(f"{items} tiles are too many for a launch: move fewer blocks at a time")
    if units * unit_bytes >= 1 << 31:
        raise LayoutError(f"a run of {units * unit_bytes} bytes is too long for the kernel")
    word_bytes = min(unit_bytes, 8)
    return TileWork(word_bytes, unit_bytes // word_bytes, row_units, tile_units, tiles, items)


def launch(group: LaneGroup, work: TileWork, call: LaunchCall) -> None:
    """One launch of the kernel over one group of lanes."""
    from .kernel import move_lanes

    page_tokens = call.pages.page_tokens
    move_lanes[call.grid(work.items, lambda multiprocessors: PROGRAMS_PER_SM * multiprocessors)](
        *call.arguments(group, work.items, work.tiles),
        page_tokens,
        group.page_stride_bytes,
        group.token_stride_bytes,
        group.rows,
        group.skip,
        GATHER=call.gather,
        WORD_TYPE=word_type(work.word_bytes),
        WORD_BYTES=work.word_bytes,
        UNIT_WORDS=work.unit_words,
        ROW_UNITS=work.row_units,
        TILE_UNITS=work.tile_units,
        PAGE_SHIFT=-1 if page_tokens & (page_tokens - 1) else page_tokens.bit_length() - 1,
        num_warps=WARPS,
        enable_fp_fusion=False,  # there is nothing to fuse; without it Triton warns of its default
    )
