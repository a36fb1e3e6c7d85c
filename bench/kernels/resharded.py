"""Rows about resharding: payloads of two tensor-parallel ranks in the order of four ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tiffin.kernels.layout.block_layout import BlockLayout, BlockShape
from tiffin.kernels.paged.reshard import reshard as move

from ..store.rows import Row, Side, rates

if TYPE_CHECKING:
    from .setting import Setting

_FROM, _TO = 2, 4
_ITEM_BYTES = 2  # bf16


def reshard(setting: Setting) -> list[Row]:
    """Rank-major blocks into rank-major blocks of another degree, against a plain copy."""
    sizes, where = setting.sizes, setting.machine
    shape = BlockShape.gqa(
        layers=sizes.layers,
        kv_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        itemsize=_ITEM_BYTES,
        tokens=sizes.block_tokens,
    )
    before, after = (BlockLayout.rank_major(shape, ranks) for ranks in (_FROM, _TO))
    nbytes = sizes.blocks * before.nbytes
    source = where.bytes_of(nbytes).view(sizes.blocks, before.nbytes)
    target = where.bytes_of(nbytes, seed=1).view(sizes.blocks, after.nbytes)

    def there() -> None:
        move(source, before, target, after)

    def copy() -> None:
        target.copy_(source)

    there()
    returned = where.torch.zeros_like(source)
    move(target, after, returned, before)
    if not where.torch.equal(source, returned):
        raise ValueError("resharding there and back does not give the same blocks")
    measured = where.turns([Side(there), Side(copy)], rounds=sizes.rounds)
    value, copied = (rates(seconds, nbytes) for seconds in measured)
    what = f"{sizes.blocks} blocks of {before.nbytes:,} bytes from TP {_FROM} to TP {_TO}"
    name = f"reshard-{_FROM}-{_TO}"
    return [Row(name, f"{what}, rank-major", "GB/s", value, where.copy_text, copied)]
