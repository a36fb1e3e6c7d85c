"""Rows about checksums of segments in place, against reading the same bytes once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xxhash import xxh3_64_intdigest

from tiffin.kernels.checksum.segment_checksum import segment_checksums, segment_checksums_async

from ..store.rows import Row, Side, rates

if TYPE_CHECKING:
    from .setting import Setting


def checksum(setting: Setting) -> list[Row]:
    """`xxh3_64_pages` of every segment of some blocks: on a GPU by the kernel, against a sum of the
    same bytes; on a CPU in C, against XXH3-64 of the same segments."""
    sizes, where = setting.sizes, setting.machine
    segment_bytes = 2 * sizes.kv_heads * sizes.head_dim * 2 * sizes.block_tokens
    count = sizes.blocks * sizes.layers
    memory = where.bytes_of(count * segment_bytes)
    spans = [(number * segment_bytes, segment_bytes) for number in range(count)]

    def ours() -> None:
        segment_checksums_async(memory, spans)

    def read() -> None:
        memory.view(where.torch.int64).sum()

    def hashed() -> None:
        array = memory.numpy()
        for at, length in spans:
            xxh3_64_intdigest(array[at : at + length].data)

    _check(setting, memory, spans)
    limit = read if where.on_gpu else hashed
    limit_what = "a sum of the same bytes (tensor.sum)" if where.on_gpu else "XXH3-64 of the same"
    measured = where.turns([Side(ours), Side(limit)], rounds=sizes.rounds)
    value, beside = (rates(seconds, count * segment_bytes) for seconds in measured)
    what = f"xxh3_64_pages of {count} segments of {segment_bytes:,} bytes"
    return [Row("checksum", what, "GB/s", value, limit_what, beside)]


def _check(setting: Setting, memory: object, spans: list[tuple[int, int]]) -> None:
    """Raises ValueError unless the first segments' checksums are those of the reference."""
    first = spans[:2]
    found = segment_checksums(memory, first)
    expected = segment_checksums(memory, first, backend="reference")
    if found.tolist() != expected.tolist():
        raise ValueError("the device's checksums are not those of the reference")
