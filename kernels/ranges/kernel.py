"""The kernel of `ranges`, in a module of its own: planning copies does not import Triton."""

# Triton compiles this from its source; Python's types say nothing about it.
# mypy: disable-error-code="untyped-decorator,no-untyped-def"
# ruff: noqa: N803

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows"])  # it differs from call to call
def copy_rows(
    table,
    rows,
    WORD_TYPE: tl.constexpr,
    WORD_BYTES: tl.constexpr,
    ALIGN: tl.constexpr,
    CHUNK_BYTES: tl.constexpr,
):
    """Copy `rows` rows of `table` (int64 [3, rows]: target, source, bytes up to CHUNK_BYTES).

    ALIGN (1 to 16) divides every number in the table. Words have up to 8 bytes; with ALIGN 16 the
    compiler has the hint that it may load two at once.
    """
    lanes = tl.arange(0, CHUNK_BYTES // WORD_BYTES)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        target_address = tl.load(table + row)
        source_address = tl.load(table + rows + row)
        words = tl.load(table + 2 * rows + row) // WORD_BYTES
        target = target_address.to(tl.pointer_type(WORD_TYPE))
        source = source_address.to(tl.pointer_type(WORD_TYPE))
        target = tl.multiple_of(target, ALIGN)
        source = tl.multiple_of(source, ALIGN)
        words = tl.multiple_of(words, ALIGN // WORD_BYTES)
        mask = lanes < words
        # Each byte is read once: it should not evict an engine's data from the cache.
        values = tl.load(source + lanes, mask=mask, eviction_policy="evict_first")
        tl.store(target + lanes, values, mask=mask, eviction_policy="evict_first")
