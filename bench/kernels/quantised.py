"""Rows about quantised blocks: the cost of rounding to bytes, in addition to moving the numbers."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from tiffin.kernels.layout.block_layout import BlockLayout, BlockPart, BlockShape
from tiffin.kernels.quant.quantised_gather import (
    QuantisedLayout,
    gather_quantised,
    scatter_dequantised,
)
from tiffin.kernels.quant.scaling import SCALE_BYTES, Scaling

from ..store.rows import Row, Side, Target, rates
from .case import llama, small_pages

if TYPE_CHECKING:
    from .case import Case
    from .setting import Setting, Sizes

# The target, as a share of the rate of a gather without conversion, both in bytes of bf16 read.
_BOUND_GPU = 0.8
_BLOCK_ALIGN = 16


def quantise(setting: Setting) -> list[Row]:
    """Pages of bf16 into blocks of fp8 and int8 and back; a scale per head and per token group."""
    sizes = setting.sizes
    blocks = sizes.quantised_blocks if setting.machine.on_gpu else 1
    case = small_pages(setting, llama(sizes), blocks=blocks)
    rows = []
    for form in ("float8_e4m3", "int8"):
        for scale_tokens in (sizes.block_tokens, sizes.scale_tokens):
            rows += _rows(setting, case, Scaling(form, scale_tokens))
    return rows


def _rows(setting: Setting, case: Case, scaling: Scaling) -> list[Row]:
    setting.tell(f"{scaling.format}, a scale for {scaling.scale_tokens} tokens")
    layout = _layout(setting.sizes, scaling)
    stride_bytes = -(-layout.nbytes // _BLOCK_ALIGN) * _BLOCK_ALIGN
    blocks = setting.machine.bytes_of(case.count * stride_bytes).view(case.count, stride_bytes)
    there = partial(gather_quantised, case.cache, case.pages, blocks, layout)
    back = partial(scatter_dequantised, case.cache, case.pages, blocks, layout)
    there()  # the blocks must have numbers before they are read
    sides = [Side(there), Side(case.gather), Side(back), Side(case.scatter)]
    # A CPU takes a second for a block.
    rounds = setting.sizes.rounds if setting.machine.on_gpu else max(3, setting.sizes.rounds // 5)
    measured = setting.machine.turns(sides, rounds=rounds)
    quantised, gathered, dequantised, scattered = (rates(s, case.nbytes) for s in measured)
    short = scaling.format.partition("_")[0]
    whole = scaling.scale_tokens == setting.sizes.block_tokens
    name = f"{short}-head" if whole else f"{short}-{scaling.scale_tokens}"
    what = f"{case.count} blocks of {layout.nbytes:,} bytes, pages of {case.page_tokens} NHD"
    bound = (Target("ratio", ">=", _BOUND_GPU),)
    # Only the gather to fp8 on a GPU has a target: on a CPU arithmetic is the limit.
    targets = bound if short == "float8" and setting.machine.on_gpu else ()
    return [
        Row(
            f"quantise-{name}",
            f"gather and quantise into {what}; in bytes of bf16 read",
            "GB/s",
            quantised,
            "the gather of the same pages, not converted",
            gathered,
            targets,
        ),
        Row(
            f"dequantise-{name}",
            f"dequantise and scatter from {what}; in bytes of bf16 written",
            "GB/s",
            dequantised,
            "the scatter of as many numbers in bf16",
            scattered,
        ),
    ]


def _layout(sizes: Sizes, scaling: Scaling) -> QuantisedLayout:
    """A layout with one scaling for all parts: a byte per number, then each head's scales."""
    tail_bytes = sizes.block_tokens // scaling.scale_tokens * SCALE_BYTES
    part = BlockPart(sizes.kv_heads, sizes.block_tokens, sizes.head_dim, tail_bytes)
    shape = BlockShape(sizes.block_tokens, ((part, part),) * sizes.layers)
    scalings = ((scaling, scaling),) * sizes.layers
    return QuantisedLayout(BlockLayout.canonical(shape), scalings)
