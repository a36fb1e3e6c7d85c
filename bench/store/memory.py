"""Rows about the memory of a node's bookkeeping, and about fragmentation in its allocator."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

from ...bench import fragmentation
from .rows import Row, Target, single

if TYPE_CHECKING:
    from .setting import Setting

_FILL = 0.95


def memory(setting: Setting) -> list[Row]:
    """Memory growth of a fresh process per block that its core holds."""
    blocks = setting.sizes.resident_blocks
    setting.tell(f"{blocks} blocks")
    core, floor = _resident("core", blocks), _resident("floor", blocks)
    note = (
        f"after removing all: {core['returned']:.0%} of it back, {core['returned_collected']:.0%} "
        f"after gc.collect(), {core['returned_trimmed']:.0%} after malloc_trim(0) "
        "(the node calls neither)"
    )
    return [
        Row(
            name="memory",
            what=f"memory of the node's core per resident block, at {blocks} blocks",
            unit="B",
            value=single(core["per_block"]),
            limit_what="a bare dict of as many 16-byte keys",
            limit=single(floor["per_block"]),
            targets=(Target("p50", "<=", 700),),
            note=note,
        )
    ]


def _resident(what: str, blocks: int) -> dict[str, float]:
    command = [sys.executable, "-m", "tiffin.bench.store.resident", what, str(blocks)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    numbers: dict[str, float] = json.loads(done.stdout)
    return numbers


def allocator(setting: Setting) -> list[Row]:
    """Allocations that succeed while enough bytes are free, in a tier that stays almost full."""
    operations = setting.sizes.operations
    setting.tell(f"{operations} operations")
    found = fragmentation.run(operations=operations, fill=_FILL, seed=0)
    longest = found["largest_free_share"]
    return [
        Row(
            name="allocator",
            what=f"allocations that find room while their bytes are free, {_FILL:.0%} full, "
            f"{operations} operations on blocks of three sizes",
            unit="%",
            value=single(100 * (1 - found["failed_share"])),
            limit_what="all of them: an allocator that never fragments",
            limit=single(100.0),
            targets=(Target("ratio", ">=", 0.999),),
            note=f"longest free run / free bytes: median {longest['median']:.2f}, "
            f"{found['us_per_operation']:.1f} us per operation",
        )
    ]
