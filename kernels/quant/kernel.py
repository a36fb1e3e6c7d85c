"""The kernels of `quant`, in a module of their own: planning does not import Triton.

The arithmetic is that of scaling.py. Integer operations do the rounding, so that GPUs without
float8 (A100) or with another float8 (MI300) and Triton's interpreter give the same bytes; NATIVE
uses the conversions of NVIDIA GPUs from 8.9 on instead. No sum follows a product directly, so that
no compiler fuses the two into one rounding; launches disable fusion as well.
"""

# Triton compiles this from its source; Python's types say nothing about it.
# mypy: disable-error-code="untyped-decorator,no-untyped-def"
# ruff: noqa: N803

from __future__ import annotations

import triton
import triton.language as tl

_SIZES = [
    "items",
    "lane_count",
    "together",
    "block_count",
    "pages_per_block",
    "units",
    "page_stride",
    "token_stride",
    "skip",
]


@triton.jit(do_not_specialize=[*_SIZES, "groups", "scale_max"])
def quantise_pages(
    lanes,
    table,
    items,
    lane_count,
    together,
    block_count,
    pages_per_block,
    units,
    page_stride,
    token_stride,
    skip,
    groups,
    scale_max,
    PAGE_TOKENS: tl.constexpr,
    NUMBER: tl.constexpr,
    STORED: tl.constexpr,
    LIMIT: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    TOGETHER: tl.constexpr,
    STEP: tl.constexpr,
    CACHE_ALIGN: tl.constexpr,
    RUN_ALIGN: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Gather heads out of pages into runs of blocks: bytes, followed by their scales.

    An item is TOGETHER groups of GROUP rows of one lane of one block, in tiles of TOGETHER * STEP
    rows by WIDTH (DIM, rounded up to a power of two). If STEP covers a group, each number is read
    once; else a group (then just one) is read twice in steps: for its scale, then to convert.

    `lanes`, `table`, `together`, `skip` and the strides: see `move_lanes` (paged/kernel.py).
    `units`: items of one lane of one block; `items`: of all. A run has `groups` groups; rows beyond
    the tokens that a block has become zeros.
    """
    index = tl.arange(0, TOGETHER * STEP)
    place = index % STEP
    which = tl.arange(0, TOGETHER)
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        lane, block, unit = _place(item, together, units, block_count)
        source = tl.load(lanes + lane)
        run = tl.load(table + block) + tl.load(lanes + lane_count + lane)
        slot = tl.load(table + block_count + block).to(tl.int32) + skip
        tokens = tl.load(table + 2 * block_count + block).to(tl.int32) - skip
        ids = table + 3 * block_count + block * pages_per_block
        first = unit * TOGETHER
        if GROUP <= STEP:
            group = first + index // STEP
            here = (group < groups) & (place < GROUP)
            row = group * GROUP + place
            filled = here & (row < tokens)
            at = _cache_rows(
                source, ids, slot + row, filled, page_stride, token_stride, PAGE_TOKENS
            )
            numbers = _load_numbers(at, filled, NUMBER, DIM, WIDTH, CACHE_ALIGN)
            largest = tl.max(_magnitudes(numbers), axis=1)
        else:
            largest = tl.zeros((TOGETHER * STEP,), tl.int32)
            for begin in range(0, GROUP, STEP):
                row = first * GROUP + begin + place
                filled = (begin + place < GROUP) & (row < tokens)
                at = _cache_rows(
                    source, ids, slot + row, filled, page_stride, token_stride, PAGE_TOKENS
                )
                numbers = _load_numbers(at, filled, NUMBER, DIM, WIDTH, CACHE_ALIGN)
                largest = tl.maximum(largest, tl.max(_magnitudes(numbers), axis=1))
        largest = tl.max(tl.reshape(largest, (TOGETHER, STEP)), axis=1)
        scales, inverse = _scales(largest, LIMIT, scale_max)
        scales_at = (run + groups * (GROUP * DIM)).to(tl.pointer_type(tl.int32))
        tl.store(scales_at + first + which, scales, mask=first + which < groups)
        factor = _spread(inverse, TOGETHER, STEP)
        if GROUP <= STEP:
            stored = _convert(numbers, factor, STORED, LIMIT, NATIVE)
            _store(run + row * DIM, here, stored, tl.uint8, DIM, WIDTH, RUN_ALIGN)
        else:
            for begin in range(0, GROUP, STEP):
                row = first * GROUP + begin + place
                here = begin + place < GROUP
                filled = here & (row < tokens)
                at = _cache_rows(
                    source, ids, slot + row, filled, page_stride, token_stride, PAGE_TOKENS
                )
                numbers = _load_numbers(at, filled, NUMBER, DIM, WIDTH, CACHE_ALIGN)
                stored = _convert(numbers, factor, STORED, LIMIT, NATIVE)
                _store(run + row * DIM, here, stored, tl.uint8, DIM, WIDTH, RUN_ALIGN)


@triton.jit(do_not_specialize=[*_SIZES, "rows"])
def dequantise_pages(
    lanes,
    table,
    items,
    lane_count,
    together,
    block_count,
    pages_per_block,
    units,
    page_stride,
    token_stride,
    skip,
    rows,
    PAGE_TOKENS: tl.constexpr,
    NUMBER: tl.constexpr,
    STORED: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    STEP: tl.constexpr,
    CACHE_ALIGN: tl.constexpr,
    RUN_ALIGN: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Scatter runs of quantised blocks into pages, dequantised; the reverse of `quantise_pages`.

    An item is STEP rows of one lane of one block. GROUP rows share a scale. Rows beyond the tokens
    that a block has are left as they are.
    """
    place = tl.arange(0, STEP)
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        lane, block, unit = _place(item, together, units, block_count)
        target = tl.load(lanes + lane)
        run = tl.load(table + block) + tl.load(lanes + lane_count + lane)
        slot = tl.load(table + block_count + block).to(tl.int32) + skip
        tokens = tl.load(table + 2 * block_count + block).to(tl.int32) - skip
        ids = table + 3 * block_count + block * pages_per_block
        row = unit * STEP + place
        filled = (row < rows) & (row < tokens)
        stored = _load(run + row * DIM, filled, tl.uint8, DIM, WIDTH, RUN_ALIGN)
        scales_at = (run + rows * DIM).to(tl.pointer_type(tl.float32))
        scales = tl.load(scales_at + row // GROUP, mask=filled, other=0.0)
        if STORED == "int8":
            numbers = stored.to(tl.int8, bitcast=True).to(tl.float32)
        else:
            numbers = _from_e4m3(stored, NATIVE)
        numbers = _narrow(numbers * scales[:, None], NUMBER, NATIVE)
        at = _cache_rows(target, ids, slot + row, filled, page_stride, token_stride, PAGE_TOKENS)
        _store(at, filled, numbers, NUMBER, DIM, WIDTH, CACHE_ALIGN)


@triton.jit
def _place(item, together, units, block_count):
    """Lane, block and unit of an item: heads of one tensor first, as their rows are neighbours;
    then the rest of a run, then blocks; layers last, so that the first layer ends first."""
    rest = item // together
    block = rest // units % block_count
    lane = rest // units // block_count * together + item % together
    return lane, block, rest % units


@triton.jit
def _cache_rows(lane, pages, slot, here, page_stride, token_stride, PAGE_TOKENS: tl.constexpr):
    """The addresses of rows in the cache; int64."""
    page = tl.load(pages + slot // PAGE_TOKENS, mask=here, other=0)
    return lane + page * page_stride + (slot % PAGE_TOKENS).to(tl.int64) * token_stride


@triton.jit
def _load(
    rows, here, KIND: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, ALIGN: tl.constexpr
):
    """Rows at these addresses, [rows, WIDTH]; zeros where there is none."""
    dims = tl.arange(0, WIDTH)
    at = rows.to(tl.pointer_type(KIND))[:, None] + dims[None, :]
    at = tl.multiple_of(at, (1, ALIGN))
    return tl.load(at, mask=here[:, None] & (dims < DIM)[None, :], other=0)


@triton.jit
def _load_numbers(
    rows, here, NUMBER: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, ALIGN: tl.constexpr
):
    """Rows at these addresses as float32 [rows, WIDTH]; zeros where there is none."""
    if NUMBER.is_bf16():
        # The upper half of a float32. Triton's interpreter converts subnormal ones wrongly.
        bits = _load(rows, here, tl.uint16, DIM, WIDTH, ALIGN)
        return (bits.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return _load(rows, here, NUMBER, DIM, WIDTH, ALIGN).to(tl.float32)


@triton.jit
def _store(
    rows,
    here,
    content,
    KIND: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Write [rows, WIDTH] to these addresses, where `here`."""
    dims = tl.arange(0, WIDTH)
    at = rows.to(tl.pointer_type(KIND))[:, None] + dims[None, :]
    at = tl.multiple_of(at, (1, ALIGN))
    tl.store(at, content, mask=here[:, None] & (dims < DIM)[None, :])


@triton.jit
def _magnitudes(numbers):
    """The bits of |x|: their order is that of the magnitudes, with infinity and NaN at the end."""
    return numbers.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _scales(largest, LIMIT: tl.constexpr, scale_max):
    """The bits of each group's scale, and the factor of its numbers; from `_magnitudes`."""
    finite = largest < 0x7F800000
    amax = tl.where(finite, largest, 0).to(tl.float32, bitcast=True)
    scale = tl.div_rn(amax, LIMIT)
    scale = tl.minimum(tl.maximum(scale, 1.1754943508222875e-38), scale_max)  # 2**-126
    inverse = tl.where(largest > 0, tl.div_rn(1.0, scale), 0.0)
    bits = tl.where(largest > 0, scale.to(tl.int32, bitcast=True), 0)
    return tl.where(finite, bits, 0x7FC00000), tl.where(finite, inverse, float("nan"))


@triton.jit
def _spread(values, TOGETHER: tl.constexpr, STEP: tl.constexpr):
    """[TOGETHER] to [TOGETHER * STEP]: each for all rows of its group."""
    return tl.reshape(tl.broadcast_to(values[:, None], (TOGETHER, STEP)), (TOGETHER * STEP,))


@triton.jit
def _convert(numbers, factor, STORED: tl.constexpr, LIMIT: tl.constexpr, NATIVE: tl.constexpr):
    """The bytes of numbers [rows, WIDTH], each row times its factor, 0 where that is NaN; uint8."""
    scaled = numbers * factor[:, None]
    scaled = tl.where(scaled == scaled, scaled, 0.0)
    scaled = tl.minimum(tl.maximum(scaled, -LIMIT), LIMIT)
    if STORED == "int8":
        # 1.5 * 2**23: the sum has no bits for fractions, and the integer is in its lowest byte.
        whole = (scaled + 12582912.0).to(tl.int32, bitcast=True)
        return (whole & 0xFF).to(tl.uint8)
    return _to_e4m3(scaled, NATIVE)


@triton.jit
def _to_e4m3(numbers, NATIVE: tl.constexpr):
    """float8_e4m3fn, ties to even, of numbers in [-448, 448]; uint8."""
    if NATIVE:
        return numbers.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    bits = numbers.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    # From 2**-6 on: three bits of mantissa stay, and the exponent's bias becomes 7 from 127.
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    # Below, multiples of 2**-9, which is the value of the last bit of a sum with 2**14.
    small = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(size < 0x3C800000, small, normal)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def _from_e4m3(stored, NATIVE: tl.constexpr):
    """float32 of float8_e4m3fn in uint8."""
    if NATIVE:
        return stored.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    # The same bits are 2**-8 times the value in float16: one exponent bit more, a bias higher by 8.
    wide = stored.to(tl.uint16)
    half = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
    numbers = half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return tl.where((wide & 0x7F) == 0x7F, float("nan"), numbers)


@triton.jit
def _narrow(numbers, NUMBER: tl.constexpr, NATIVE: tl.constexpr):
    """float32 rounded to NUMBER, ties to even."""
    if NATIVE or not NUMBER.is_bf16():
        return numbers.to(NUMBER)
    # Triton's interpreter would truncate. 0x7FC0 is NaN, which the sum could turn into a number.
    bits = numbers.to(tl.uint32, bitcast=True)
    high = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    high = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, high)
    return high.to(tl.uint16).to(tl.bfloat16, bitcast=True)


# By torch's names.
NUMBER_TYPES = {"bfloat16": tl.bfloat16, "float16": tl.float16, "float32": tl.float32}
