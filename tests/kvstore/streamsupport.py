"""Shared by the tests of streams between machines."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from kvsupport import assert_right, fresh_prefix
from poolsupport import LARGE, Cluster, Member
from streamworker import fill

from tiffin.kvstore import KVSchema

if TYPE_CHECKING:
    from tiffin.kvstore import Prefix

LAYERS = len(LARGE.layers)
LAYER_BYTES = LARGE.spans[0].length
SPLIT = KVSchema.gqa(
    model="split", layers=4, kv_heads=4, head_dim=64, dtype="bfloat16", block_tokens=64, shards=4
)
# What an exchange has besides block bytes: messages, frames, a checksum per segment.
SMALL_BYTES = 4096


def prompt(blocks: int = 2, schema: KVSchema = LARGE) -> Prefix:
    return fresh_prefix(blocks, schema)


def publish(slots: Any, *layers: int) -> None:
    for layer in layers:
        fill(slots, layer)
        slots.publish(layer)


def check(cluster: Cluster, prefix: Prefix) -> None:
    """All blocks of the prefix are there, and right."""
    cluster.settle()
    with cluster.open().get(prefix) as blocks:
        assert blocks.complete, blocks
        assert_right(blocks, prefix)


def ahead_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name == "tiffin-prefetch"]


class Counted:
    """Counts the bytes that pass a member's network, from and to the node."""

    def __init__(self, member: Member) -> None:
        assert member.network is not None
        self._left = member.network._left
        self.reset()

    def reset(self) -> None:
        self._left.update({"from": 1 << 40, "to": 1 << 40})

    def __call__(self, direction: str = "from") -> int:
        return int((1 << 40) - self._left[direction])
