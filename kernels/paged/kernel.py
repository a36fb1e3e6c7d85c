"""The kernel of `paged`, in a module of its own: the reference on a CPU needs no Triton."""

# Triton compiles this from its source; Python's types say nothing about it.
# mypy: disable-error-code="untyped-decorator,no-untyped-def"
# ruff: noqa: N803, N806

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(
    do_not_specialize=[
        "items",
        "lane_count",
        "together",
        "block_count",
        "pages_per_block",
        "tiles",
        "page_tokens",
        "page_stride",
        "token_stride",
        "rows",
        "skip",
    ]
)
def move_lanes(
    lanes,
    table,
    items,
    lane_count,
    together,
    block_count,
    pages_per_block,
    tiles,
    page_tokens,
    page_stride,
    token_stride,
    rows,
    skip,
    GATHER: tl.constexpr,
    WORD_TYPE: tl.constexpr,
    WORD_BYTES: tl.constexpr,
    UNIT_WORDS: tl.constexpr,
    ROW_UNITS: tl.constexpr,
    TILE_UNITS: tl.constexpr,
    PAGE_SHIFT: tl.constexpr,
):
    """Move rows between pages and runs, a tile of one lane of one block at a time.

    `lanes`: int64 [2, lane_count], address and offset of each lane. `table`: int64, for each block
    its address, then the slot of its first token, then its tokens, then [block_count,
    pages_per_block] page ids. `rows`, `skip`, `page_stride`, `token_stride` (bytes) and `together`
    as in LaneGroup; `tiles`: per run; `items` = lane_count * block_count * tiles.

    A run is a sequence of units, each UNIT_WORDS words of WORD_BYTES, ROW_UNITS to a row: a unit
    never crosses a row, so nothing is padded, whatever the row's length. A unit of 16 bytes is two
    words that the compiler loads as one, because of the hint that they are at a multiple of 16.
    With PAGE_SHIFT >= 0 pages have 2 ** PAGE_SHIFT tokens, and there are no divisions.

    For rows of tokens that a block does not have, a gather writes zeros and a scatter nothing.
    """
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        # Heads of one tensor first: their rows are neighbours. Layers last: they end in order.
        head = item % together
        rest = item // together
        tile = rest % tiles
        rest = rest // tiles
        block = rest % block_count
        lane = (rest // block_count) * together + head

        address = tl.load(lanes + lane)
        run = tl.load(table + block) + tl.load(lanes + lane_count + lane)
        first_slot = tl.load(table + block_count + block).to(tl.int32)
        tokens = tl.load(table + 2 * block_count + block).to(tl.int32)

        unit = tile * TILE_UNITS + tl.arange(0, TILE_UNITS)
        row = unit // ROW_UNITS
        token = row + skip
        inside = row < rows
        filled = inside & (token < tokens)
        position = first_slot + token
        if PAGE_SHIFT >= 0:
            column = position >> PAGE_SHIFT
            slot = position & ((1 << PAGE_SHIFT) - 1)
        else:
            column = position // page_tokens
            slot = position - column * page_tokens
        ids = table + 3 * block_count + block * pages_per_block
        page = tl.load(ids + column, mask=filled, other=0)

        UNIT_BYTES: tl.constexpr = UNIT_WORDS * WORD_BYTES
        in_row = (unit - row * ROW_UNITS) * UNIT_BYTES
        paged = address + page * page_stride + slot.to(tl.int64) * token_stride + in_row
        packed = run + unit.to(tl.int64) * UNIT_BYTES
        words = tl.arange(0, UNIT_WORDS)[None, :]
        paged_pointers = paged.to(tl.pointer_type(WORD_TYPE))[:, None] + words
        packed_pointers = packed.to(tl.pointer_type(WORD_TYPE))[:, None] + words
        # The alignment down a column is that of a word, along a row that of a unit.
        paged_pointers = tl.multiple_of(paged_pointers, (WORD_BYTES, UNIT_BYTES))
        packed_pointers = tl.multiple_of(packed_pointers, (WORD_BYTES, UNIT_BYTES))
        if GATHER:
            values = tl.load(paged_pointers, mask=filled[:, None], other=0)
            tl.store(packed_pointers, values, mask=inside[:, None])
        else:
            values = tl.load(packed_pointers, mask=filled[:, None], other=0)
            tl.store(paged_pointers, values, mask=filled[:, None])
