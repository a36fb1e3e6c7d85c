"""Gather pages into quantised blocks, and scatter quantised blocks back into pages, dequantised.

A part of a block that is quantised has one byte per number and float32 scales after each head's
rows (docs/quantisation.md; scaling.py has the arithmetic). `gather_quantised` reads an engine's
bfloat16, float16 or float32 pages and writes the smaller blocks, all layers in one launch;
`scatter_dequantised` is the reverse. Parts that are not quantised are copied by another launch.

Tiling. A tile is 8192 numbers: 256 threads, 32 numbers each, 16 KiB of bfloat16 in flight. Groups
that fit into a tile are read once. Larger ones (512 tokens of 128 numbers: 128 KiB) are read twice,
the second time from the L2 cache: so the programs that run at a time have at most 32 MiB of groups
(the L2 of an H100 has 50 MiB, of an A100 40). Here that is two programs on each of 132 SMs, with
32 KiB in flight; 18 KiB are enough for 3.35 TB/s (paged/gather_scatter.py). These figures are
arithmetic, not measurements.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Unpack

import torch

from ..backend import uses_triton
from ..errors import LayoutError
from ..launching import LaunchCall, on_stream
from ..layout.access_width import alignment
from ..paged import reference
from ..paged.gather_scatter import How, TileWork, checked_blocks, launch, tile_work
from .quantised_layout import QuantisedLayout, ScaledGroup, scaled_groups
from .reference import dequantise, pack, quantise, unpack
from .scaling import SCALE_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..backend import Backend
    from ..layout.block_layout import Selection
    from ..layout.engine_cache import PagedCache
    from ..layout.transfer_plan import PageMap
    from .scaling import Scaling

__all__ = ["QuantisedLayout", "gather_quantised", "scatter_dequantised"]

TILE_NUMBERS: Final = 8192
WARPS: Final = 8
PROGRAMS_PER_SM: Final = 4  # of 8 warps at 64 registers, as compiled for sm_90
READ_TWICE_BYTES: Final = 32 << 20  # groups being read: few enough to be still in the L2 cache
_MOST_NUMBERS: Final = 1 << 20  # Triton's limit for a tile
_MOST_RUN_BYTES: Final = (1 << 31) - 1
_MOST_ITEMS: Final = 1 << 30  # the kernels' loop counters pass it by up to the number of programs


def gather_quantised(
    cache: PagedCache, pages: PageMap, blocks: Any, layout: QuantisedLayout, **how: Unpack[How]
) -> None:
    """Quantise the tokens that `pages` names from the cache into blocks.

    Like `paged.gather`, except for parts that the layout quantises. Blocks begin at multiples of 4
    bytes. If a block has fewer tokens than the layout, its further rows are zeros and do not count
    for the scales. scaling.py gives the largest error; a group with a number that is not finite
    reads as NaN.

    Raises PageError, LayoutError, RoomError and DeviceError, before anything is written.
    """
    _move(cache, pages, blocks, layout, True, **how)


def scatter_dequantised(
    cache: PagedCache, pages: PageMap, blocks: Any, layout: QuantisedLayout, **how: Unpack[How]
) -> None:
    """Write the numbers of quantised blocks into the pages that `pages` names.

    The reverse of `gather_quantised`. A float32 product is rounded to the cache's dtype, to the
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
    backend: Backend | None = None,
) -> None:
    device = cache.device
    triton = uses_triton(device, backend)
    groups = scaled_groups(cache, layout, layers, heads, once=not gather)
    memory = checked_blocks(cache, pages, blocks, layout.layout, gather, triton)
    if alignment(memory.addresses) % SCALE_BYTES:
        raise LayoutError(f"quantised blocks begin at multiples of {SCALE_BYTES} bytes")
    if not triton:
        with on_stream(device, stream):
            _refer(cache, groups, pages, memory.tensors, gather)
        return
    works = [
        tile_work(group.lanes, memory.addresses, len(pages))
        if group.scaling is None
        else _work(group, group.scaling.scale_tokens, len(pages), gather)
        for group in groups
    ]
    with on_stream(device, stream):
        call = LaunchCall(pages, memory.addresses, device, gather, programs)
        for group, work in zip(groups, works, strict=True):
            if isinstance(work, TileWork):
                launch(group.lanes, work, call)
            else:
                _launch(group, work, call)


# -- in torch --------------------------------------------------------------------------------------


def _refer(
    cache: PagedCache,
    groups: Sequence[ScaledGroup],
    pages: PageMap,
    blocks: Sequence[Any],
    gather: bool,
) -> None:
    """The reference in torch: loops over tensors and blocks, not over pages or tokens."""
    for group in groups:
        if group.scaling is None:
            reference.move(cache, (group.lanes,), pages, blocks, gather=gather)
            continue
        for block in range(len(pages)):
            places = pages.places(block, group.lanes.skip)
            at = tuple(torch.from_numpy(place).to(cache.device) for place in places)
            for stretch in group.lanes.stretches:
                view = cache.layers[stretch.layer][stretch.part]
                end = stretch.offset + stretch.heads * stretch.run_bytes
                runs = blocks[block][stretch.offset : end].view(stretch.heads, stretch.run_bytes)
                held = slice(stretch.head, stretch.head + stretch.heads)
                if gather:
                    _refer_gather(group, group.scaling, view, at, held, runs)
                else:
                    _refer_scatter(group, group.scaling, view, at, held, runs)


def _refer_gather(
    group: ScaledGroup, scaling: Scaling, view: Any, at: tuple[Any, ...], heads: slice, runs: Any
) -> None:
    numbers = view.new_zeros(len(runs), group.lanes.rows, group.dim)
    numbers[:, : len(at[0])] = view[:, :, heads][at].transpose(0, 1)
    pack(*quantise(numbers, scaling), runs)


def _refer_scatter(
    group: ScaledGroup, scaling: Scaling, view: Any, at: tuple[Any, ...], heads: slice, runs: Any
) -> None:
    numbers = dequantise(*unpack(runs, group.dim, scaling), view.dtype)
    view[:, :, heads][at] = numbers[:, : len(at[0])].transpose(0, 1)


# -- the kernels -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Work:
    """The tiling of a launch. `read_twice_bytes`: of a group that is larger than a tile."""

    width: int
    step: int
    together: int
    units: int
    items: int
    read_twice_bytes: int

    def programs(self, multiprocessors: int) -> int:
        """As many programs as fill these SMs; fewer, but at least one per SM, if otherwise groups
        that are read twice would not stay in the L2 cache."""
        most = PROGRAMS_PER_SM * multiprocessors
        if not self.read_twice_bytes:
            return most
        return max(multiprocessors, min(most, READ_TWICE_BYTES // self.read_twice_bytes))


def _work(group: ScaledGroup, tokens: int, blocks: int, gather: bool) -> _Work:
    """`tokens`: how many share a scale. Raises LayoutError for more than the kernels can count."""
    rows, width = group.lanes.rows, _power(group.dim)
    if width > _MOST_NUMBERS or rows * group.dim > _MOST_RUN_BYTES:
        raise LayoutError(f"{rows} rows of {group.dim} numbers are too many for a kernel")
    most_rows = max(1, TILE_NUMBERS // width)
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
    """The smallest power of two that is not less than `number`."""
    return 1 << (number - 1).bit_length()


def _launch(group: ScaledGroup, work: _Work, call: LaunchCall) -> None:
    """One launch over one group of lanes."""
    from .kernel import NUMBER_TYPES, dequantise_pages, quantise_pages

    assert group.scaling is not None
    form, held = group.scaling.byte_format, group.lanes
    tokens = group.scaling.scale_tokens
    kernel = quantise_pages if call.gather else dequantise_pages
    sizes = (held.rows // tokens, form.scale_max) if call.gather else (held.rows,)
    only = {"LIMIT": form.limit, "TOGETHER": work.together} if call.gather else {}
    kernel[call.grid(work.items, work.programs)](
        *call.arguments(held, work.items, work.units),
        held.page_stride_bytes,
        held.token_stride_bytes,
        held.skip,
        *sizes,
        PAGE_TOKENS=call.pages.page_tokens,
        NUMBER=NUMBER_TYPES[str(group.dtype).removeprefix("torch.")],
        STORED=form.name,
        DIM=group.dim,
        WIDTH=work.width,
        GROUP=tokens,
        STEP=work.step,
        CACHE_ALIGN=group.cache_alignment,
        RUN_ALIGN=min(alignment(call.addresses), group.run_alignment),
        NATIVE=_native(call.device),
        **only,
        num_warps=WARPS,
        enable_fp_fusion=False,
    )


def _native(device: Any) -> bool:
    """Whether the GPU converts to and from float8_e4m3fn in hardware, with the right rounding:
    NVIDIA's do from compute capability 8.9 (L4, H100) on."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    capability: tuple[int, int] = torch.cuda.get_device_capability(device)
    return capability >= (8, 9)
