"""Stores, blocks and pools for the tests of the HBM tier, on device `cpu` and, if there is one, on
a GPU."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch
from kvsupport import payload_of

from tiffin.kvstore import KVSchema

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tiffin.kvstore.hbm.store import HbmStore
    from tiffin.kvstore.keys import Prefix

DEVICES = ["cpu", *(["cuda:0"] if torch.cuda.is_available() else [])]

# One block fills whole pages, so that sizes in blocks are sizes in bytes.
SCHEMAS = {
    name: KVSchema.gqa(
        model=f"hbm-{name}",
        layers=2,
        kv_heads=2,
        head_dim=16,
        dtype="bfloat16",
        block_tokens=32,
        checksum=name,
    )
    for name in ("xxh3_64", "xxh3_64_pages")
}
SCHEMA = SCHEMAS["xxh3_64_pages"]
BLOCK = SCHEMA.block_bytes
assert BLOCK % 4096 == 0


def fill(slots: Any, prefix: Prefix) -> None:
    """The right bytes into every slot, by the device's own copy."""
    for slot in slots:
        right = torch.from_numpy(payload_of(prefix.keys[slot.index], prefix.schema))
        slot.tensor.copy_(right.to(slot.tensor.device))


def publish(store: HbmStore, prefix: Prefix) -> tuple[int, ...]:
    """Put the right bytes of a prefix into HBM; the positions that were stored."""
    with store.reserve(prefix) as slots:
        fill(slots, prefix)
    return slots.stored


def assert_right(blocks: Sequence[Any], prefix: Prefix) -> None:
    """Whatever was handed out is what belongs to its key."""
    for block, key in zip(blocks, prefix.keys, strict=False):
        right = torch.from_numpy(payload_of(key, prefix.schema))
        assert torch.equal(block.tensor.cpu(), right), key.hex()


def assert_conserved(numbers: dict[str, Any]) -> None:
    kinds = ("free", "reserved", "committed", "quarantined")
    total = sum(numbers[f"{kind}_bytes"] for kind in kinds)
    assert total == numbers["capacity_bytes"], numbers


def assert_quiet(store: HbmStore) -> None:
    """Nobody holds anything, and every byte is accounted for."""
    deadline = time.monotonic() + 8.0
    numbers = store.statistics()
    while numbers["uses"] or numbers["saving_blocks"]:
        assert time.monotonic() < deadline, numbers
        time.sleep(0.005)
        numbers = store.statistics()
    assert_conserved(numbers)
    assert numbers["reserved_bytes"] == numbers["quarantined_bytes"] == 0, numbers
    store.check()
