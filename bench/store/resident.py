"""Memory of the node's bookkeeping, measured in a process of its own.

`python -m tiffin.bench.store.resident core 500000` prints one JSON object; `floor` instead of
`core` keeps the same keys in a bare dict, which is the minimum in Python.

The core needs no real tier: it allocates offsets in an arena without memory behind it.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
from typing import TYPE_CHECKING

from tiffin.kvstore.memory.arena import Arena
from tiffin.kvstore.memory.eviction import make_policy
from tiffin.kvstore.node.core.node_core import CoreOptions, NodeCore, split_keys
from tiffin.kvstore.node.core.tier_ledger import TierSpace
from tiffin.kvstore.tiers.base import TierName

if TYPE_CHECKING:
    from tiffin.kvstore.node.core.records import Session

EXTENT_BYTES = (64 << 20) + 4096
CHAIN_BLOCKS = 64
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def resident_bytes() -> int:
    """Resident memory of this process."""
    with open("/proc/self/statm", encoding="ascii") as numbers:
        return int(numbers.read().split()[1]) * _PAGE_BYTES


def measure_core(blocks: int) -> dict[str, float]:
    """Bytes per block after `blocks` commits, and the shares returned after their removal."""
    capacity_bytes = (blocks + CHAIN_BLOCKS) * EXTENT_BYTES
    space = TierSpace(TierName.DRAM, Arena(capacity_bytes), make_policy("lru"))
    core = NodeCore(space, None, CoreOptions())
    session = core.connect("bench", os.getpid())
    _fill(core, session, 2 * CHAIN_BLOCKS)
    _empty(core)
    gc.collect()
    before = resident_bytes()
    _fill(core, session, blocks)
    gc.collect()
    full = resident_bytes()
    assert len(core.index) >= blocks
    _empty(core)
    return {"per_block": (full - before) / blocks, **_returned(before, full)}


def _returned(before: int, full: int) -> dict[str, float]:
    """Shares of the growth that the process has returned: by itself, after a garbage collection,
    and after `malloc_trim` of the C library (the node calls neither)."""
    growth = max(1, full - before)
    shares = {"returned": (full - resident_bytes()) / growth}
    gc.collect()
    shares["returned_collected"] = (full - resident_bytes()) / growth
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
    if trim is not None:
        trim(0)
    shares["returned_trimmed"] = (full - resident_bytes()) / growth
    return shares


def _fill(core: NodeCore, session: Session, blocks: int) -> None:
    for _ in range(0, blocks, CHAIN_BLOCKS):
        keys = split_keys(os.urandom(16 * CHAIN_BLOCKS))
        made = core.reserve(session, keys, os.urandom(16), 0, EXTENT_BYTES, 0.0)
        assert made.lease is not None
        core.commit(made.lease, [True] * len(made.lease.replicas))
    core.tick(0.0)  # as a node does four times a second


def _empty(core: NodeCore) -> None:
    keys = list(core.index)
    for start in range(0, len(keys), CHAIN_BLOCKS):
        core.remove(keys[start : start + CHAIN_BLOCKS])
    core.tick(0.0)  # as a node does four times a second
    assert not core.index


def measure_floor(blocks: int) -> dict[str, float]:
    """Bytes per entry of a dict of as many keys."""
    gc.collect()
    before = resident_bytes()
    index: dict[bytes, None] = {}
    for _ in range(0, blocks, CHAIN_BLOCKS):
        index.update(dict.fromkeys(split_keys(os.urandom(16 * CHAIN_BLOCKS))))
    gc.collect()
    return {"per_block": (resident_bytes() - before) / len(index)}


def main() -> None:
    """Run the measurement named by the arguments, and print it."""
    measure = {"core": measure_core, "floor": measure_floor}[sys.argv[1]]
    print(json.dumps(measure(int(sys.argv[2]))))


if __name__ == "__main__":
    main()
