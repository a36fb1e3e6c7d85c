"""Gather pages into quantised blocks, and scatter quantised blocks back into pages as numbers.

A part of a block that is quantised has one byte per number and float32 scales behind each head's
rows (docs/quantisation.md; scaling.py has the arithmetic). `gather_quantised` reads an engine's
bfloat16, float16 or float32 pages and writes the smaller blocks, all layers in one launch;
`scatter_dequantised` goes the other way. Parts that are not quantised are copied by another launch.

How the work is cut. A tile is 8192 numbers: 256 threads, 32 numbers each, 16 KiB of bfloat16 in
flight. Groups that fit into a tile are read once. Larger ones (512 tokens of 128 numbers: 128 KiB)
are read twice, and the second time should find them in the L2 cache: so no more programs run at a
time than have 32 MiB of groups between them (an H100 has 50 MiB, an A100 40). Here that is two on
each of 132 SMs, with 32 KiB in flight, where 18 KiB keep 3.35 TB/s busy (paged.py). These figures
are arithmetic, not measurements.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Unpack

import numpy as np
import torch

from . import reference
from .errors import DeviceError, LayoutError
from .lanes import alignment
from .memory import block_memory
from .paged import (
    How,
    device_table,
    grid_programs,
    lane_table,
    launch,
    on_stream,
    tile_work,
    uses_triton,
)
from .quant_layout import QuantisedLayout, ScaledGroup, scaled_groups
from .quant_reference import dequantise, pack, quantise, unpack
from .scaling import SCALE_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .lanes import LaneGroup
    from .layout import PagedCache, Selection
    from .plan import PageMap
    from .scaling import Scaling

__all__ = ["QuantisedLayout", "gather_quantised", "scatter_dequantised"]

TILE_NUMBERS: Final = 8192
WARPS: Final = 8
PROGRAMS_PER_SM: Final = (
    4  # of 8 warps at 64 registers, which is what compilers for sm_90 give them
)
READ_TWICE_BYTES: Final = 32 << 20  # of groups that are being read, to be found in the L2 again
_MOST_NUMBERS: Final = 1 << 20  # of a tile, in Triton
_MOST_RUN_BYTES: Final = (1 << 31) - 1
_MOST_ITEMS: Final = 1 << 30  # the kernels' loops count beyond it, by the number of programs


def gather_quantised(
    cache: PagedCache, pages: PageMap, blocks: Any, layout: QuantisedLayout, **how: Unpack[How]
) -> None:
    """Quantise the tokens that `pages` names from the cache into blocks.

    As `paged.gather`, but for what the layout says of its parts. Blocks begin at multiples of 4
    bytes. Where a block has fewer tokens than the layout, the rest are zeros and do not count for
    the scales. What the bytes stand for is at most so far from what was read as scaling.py says; a
    group with a number that is not finite reads as NaN.

    Raises PageError, LayoutError, RoomError and DeviceError, before anything is written.
    """
    _move(cache, pages, blocks, layout, True, **how)


def scatter_dequantised(
    cache: PagedCache, pages: PageMap, blocks: Any, layout: QuantisedLayout, **how: Unpack[How]
) -> None:
    """Write the numbers of quantised blocks into the pages that `pages` names.

    `gather_quantised` the other way. A float32 product is rounded to the cache's dtype, to the
    nearest, ties to even; beyond float16's range that is an infinity.
    """
    _move(cache, pages, blocks, layout, False, **how)


def _move(
    cache: PagedCache,
    pages: PageMap,
    blocks: Any,
    layout: QuantisedLayout,
    gather: bool,
    *,
    layers: Selection | None = None,
    heads: Selection | None = None,
    stream: Any = None,
    programs: int | None = None,
    backend: str | None = None,
) -> None:
    device = cache.device
    triton = uses_triton(device, backend)
    groups = scaled_groups(cache, layout, layers, heads, once=not gather)
    pages.check_fits(cache, layout.layout.tokens)
    memory = block_memory(
        blocks, count=len(pages), nbytes=layout.nbytes, device=device, written=gather
    )
    begins = int(np.bitwise_or.reduce(memory.addresses))
    if begins % SCALE_BYTES:
        raise LayoutError(f"quantised blocks begin at multiples of {SCALE_BYTES} bytes")
    if not triton:
        if any(tensor.device != device for tensor in memory.tensors):
            raise DeviceError("the reference does not reach pinned memory from a device")
        with on_stream(device, stream):
            _refer(cache, groups, pages, memory.tensors, gather)
        return
    works = [_work(group, len(pages), gather) for group in groups]
    with on_stream(device, stream):
        table = device_table(np.concatenate((memory.addresses, pages.table)), device)
        for group, work in zip(groups, works, strict=True):
            if work is not None:
                _launch(group, work, table, pages, device, programs, gather, begins)
            else:
                tiles = tile_work(group.lanes, memory.addresses, len(pages))
                launch(group.lanes, tiles, table, pages, device, programs, gather)


# -- in torch --------------------------------------------------------------------------------------


def _refer(
    cache: PagedCache,
    groups: Sequence[ScaledGroup],
    pages: PageMap,
    blocks: Sequence[Any],
    gather: bool,
) -> None:
    """What the kernels do, in torch: loops over tensors and blocks, not over pages or tokens."""
    for group in groups:
        if group.scaling is None:
            reference.move(cache, (group.lanes,), pages, blocks, gather=gather)
            continue
        for block in range(len(pages)):
            at = _slots(group.lanes, pages, block, cache.device)
            for stretch in group.lanes.stretches:
                view = cache.layers[stretch.layer][stretch.part]
                end = stretch.offset + stretch.heads * stretch.run_bytes
                runs = blocks[block][stretch.offset : end].view(stretch.heads, stretch.run_bytes)
                held = slice(stretch.head, stretch.head + stretch.heads)
                if gather:
                    _refer_gather(group, group.scaling, view, at, held, runs)
                else:
                    _refer_scatter(group, group.scaling, view, at, held, runs)


def _slots(group: LaneGroup, pages: PageMap, block: int, device: Any) -> tuple[Any, Any]:
    """Page and slot of each row that the block has tokens for."""
    tokens = np.arange(group.skip, max(group.skip, int(pages.tokens[block])))
    columns, slots = np.divmod(pages.first_slots[block] + tokens, pages.page_tokens)
    ids = pages.pages[block, columns]
    return torch.from_numpy(ids).to(device), torch.from_numpy(slots).to(device)


def _refer_gather(
    group: ScaledGroup, scaling: Scaling, view: Any, at: tuple[Any, Any], heads: slice, runs: Any
) -> None:
    numbers = view.new_zeros(len(runs), group.lanes.rows, group.dim)
    numbers[:, : len(at[0])] = view[:, :, heads][at].transpose(0, 1)
    pack(*quantise(numbers, scaling), runs)


def _refer_scatter(
    group: ScaledGroup, scaling: Scaling, view: Any, at: tuple[Any, Any], heads: slice, runs: Any
) -> None:
    numbers = dequantise(*unpack(runs, group.dim, scaling), view.dtype)
    view[:, :, heads][at] = numbers[:, : len(at[0])].transpose(0, 1)


# -- the kernels -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Work:
    """How a launch cuts its work. `read_twice_bytes`: of a group that is larger than a tile."""

    width: int
    step: int
    together: int
    units: int
    items: int
    read_twice_bytes: int


def _work(group: ScaledGroup, blocks: int, gather: bool) -> _Work | None:
    """Raises LayoutError for what the kernels can't count. None for what is copied."""
    if group.scaling is None:
        return None
    rows, width = group.lanes.rows, _power(group.dim)
    if width > _MOST_NUMBERS or rows * group.dim > _MOST_RUN_BYTES:
        raise LayoutError(f"{rows} rows of {group.dim} numbers are too many for a kernel")
    most_rows = max(1, TILE_NUMBERS // width)
    tokens = group.scaling.scale_tokens
    read_twice_bytes = 0
    if not gather:
        step, together = min(most_rows, _power(rows)), 1
        units = -(-rows // step)
    else:
        groups = rows // tokens
        step = min(most_rows, _power(tokens))
        together = max(1, min(most_rows // step, _power(groups))) if step >= tokens else 1
        units = -(-groups // together)
        if step < tokens:
            read_twice_bytes = tokens * group.lanes.row_bytes
    items = len(group.lanes) * blocks * units
    if items > _MOST_ITEMS:
        raise LayoutError(f"{items} tiles are too many for a launch: move fewer blocks at a time")
    return _Work(width, step, together, units, items, read_twice_bytes)


def _power(number: int) -> int:
    """The smallest power of two that is not less."""
    return 1 << (number - 1).bit_length()


def _launch(
    group: ScaledGroup,
    work: _Work,
    table: Any,
    pages: PageMap,
    device: Any,
    programs: int | None,
    gather: bool,
    begins: int,
) -> None:
    """One launch over one group of lanes; `begins`: the blocks' addresses, or-ed."""
    from .quant_kernel import NUMBER_TYPES, dequantise_pages, quantise_pages

    assert group.scaling is not None
    if programs is None and device.type == "cuda":
        programs = _programs(work, device)
    form, held = group.scaling.byte_format, group.lanes
    kernel = quantise_pages if gather else dequantise_pages
    sizes = (held.rows // group.scaling.scale_tokens, form.scale_max) if gather else (held.rows,)
    only = {"LIMIT": form.limit, "TOGETHER": work.together} if gather else {}
    kernel[(grid_programs(work.items, device, programs),)](
        lane_table(held, device),
        table,
        work.items,
        len(held),
        held.together,
        len(pages),
        pages.pages.shape[1],
        work.units,
        held.page_stride_bytes,
        held.token_stride_bytes,
        held.skip,
        *sizes,
        PAGE_TOKENS=pages.page_tokens,
        NUMBER=NUMBER_TYPES[str(group.dtype).removeprefix("torch.")],
        STORED=form.name,
        DIM=group.dim,
        WIDTH=work.width,
        GROUP=group.scaling.scale_tokens,
        STEP=work.step,
        CACHE_ALIGN=group.cache_alignment,
        RUN_ALIGN=alignment(begins | group.run_alignment),
        NATIVE=_native(device),
        **only,
        num_warps=WARPS,
        enable_fp_fusion=False,
    )


def _programs(work: _Work, device: Any) -> int:
    """What fills the device, or as many as find what they read twice in its L2 cache."""
    count = int(torch.cuda.get_device_properties(device).multi_processor_count)
    if not work.read_twice_bytes:
        return PROGRAMS_PER_SM * count
    return max(count, min(PROGRAMS_PER_SM * count, READ_TWICE_BYTES // work.read_twice_bytes))


def _native(device: Any) -> bool:
    """Whether the GPU converts to and from float8_e4m3fn itself, rounding as it should: NVIDIA's do
    from compute capability 8.9 (L4, H100) on."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    capability: tuple[int, int] = torch.cuda.get_device_capability(device)
    return capability >= (8, 9)
