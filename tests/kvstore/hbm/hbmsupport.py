"""Stores and blocks for the tests of the HBM tier, on device `cpu` and, if there is one, on a GPU.

torch is imported where it is used, so that these tests can be collected without it.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

from kvsupport import payload_of

from tiffin.kvstore import KVSchema
from tiffin.kvstore.hbm import HbmOptions, HbmStore
from tiffin.messenger.gpu.pinning import registration

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import pytest

    from tiffin.kvstore import Client
    from tiffin.kvstore.format.keys import Prefix

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

HBM_BLOCKS = 8
POOL_BYTES = 32 * SCHEMA.extent_bytes
QUIET = HbmOptions(write_back=False)


def devices() -> list[str]:
    """The devices of this machine that a store can use."""
    import torch

    return ["cpu", *(["cuda:0"] if torch.cuda.is_available() else [])]


def hbm_store(
    client: Client, device: str, schema: KVSchema = SCHEMA, options: HbmOptions = QUIET
) -> HbmStore:
    """A store of HBM_BLOCKS blocks."""
    return HbmStore(client, schema, HBM_BLOCKS * BLOCK, device, options=options)


def fill(slots: Any, prefix: Prefix) -> None:
    """Copy the right bytes into every slot on the device."""
    import torch

    for slot in slots:
        right = torch.from_numpy(payload_of(prefix.keys[slot.index], prefix.schema))
        slot.tensor.copy_(right.to(slot.tensor.device))


def publish(store: HbmStore, prefix: Prefix) -> tuple[int, ...]:
    """Put the right bytes of a prefix into HBM; returns the positions that were stored."""
    with store.reserve(prefix) as slots:
        fill(slots, prefix)
    return slots.stored


def assert_right(blocks: Sequence[Any], prefix: Prefix) -> None:
    """Every returned block has the bytes of its key."""
    import torch

    for block, key in zip(blocks, prefix.keys, strict=False):
        right = torch.from_numpy(payload_of(key, prefix.schema))
        assert torch.equal(block.tensor.cpu(), right), key.hex()


def assert_conserved(numbers: dict[str, Any]) -> None:
    kinds = ("free", "reserved", "committed", "quarantined")
    total = sum(numbers[f"{kind}_bytes"] for kind in kinds)
    assert total == numbers["capacity_bytes"], numbers


def assert_quiet(store: HbmStore) -> None:
    """Nothing is held, and every byte is accounted for."""
    deadline = time.monotonic() + 8.0
    numbers = store.statistics()
    while numbers["uses"] or numbers["saving_blocks"]:
        assert time.monotonic() < deadline, numbers
        time.sleep(0.005)
        numbers = store.statistics()
    assert_conserved(numbers)
    assert numbers["reserved_bytes"] == numbers["quarantined_bytes"] == 0, numbers
    store.check()


def is_pinned(memory: Any, device: str) -> bool:
    """Whether host memory is registered for copies to and from the device."""
    address = int(memory.__array_interface__["data"][0])
    return registration(address, len(memory), device.partition(":")[0]) is not None


# -- time, and copies that are late ----------------------------------------------------------------


class Clock:
    """A replacement for the module `time` in a module of the store."""

    sleep = staticmethod(time.sleep)

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self.monotonic = monotonic

    @classmethod
    def ahead(cls, seconds: float) -> Clock:
        """A clock that is so many seconds ahead."""
        return cls(lambda: time.monotonic() + seconds)


class Later:
    """A use of memory that ends when a test sets it."""

    def __init__(self) -> None:
        self.over = False

    def done(self) -> bool:
        return self.over


def before_copies(
    store: HbmStore, monkeypatch: pytest.MonkeyPatch, action: Callable[[Any], object]
) -> None:
    """Before each of its copies the store does `action(pairs)`."""
    copy = store._memory.copy

    def copy_late(pairs: Any, deadline: float) -> None:
        action(pairs)
        copy(pairs, deadline)

    monkeypatch.setattr(store._memory, "copy", copy_late)


class Halfway:
    """Copies that wait for `go` before their bytes move."""

    def __init__(self, store: HbmStore, monkeypatch: pytest.MonkeyPatch) -> None:
        self.there, self.go = threading.Event(), threading.Event()
        before_copies(store, monkeypatch, self._wait)

    def _wait(self, pairs: Any) -> None:
        self.there.set()
        assert self.go.wait(8)
