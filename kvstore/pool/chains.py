"""What a node hands over: its blocks as chains, heads first.

The index of a large node has half a million blocks. Nobody waits while they are sorted: what must
be known of each is read under the node's lock a page at a time, and the rest is done outside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ..node.core import KEY_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ..node.node import Node

# Blocks that are read at a time: 2 ms under the lock.
PAGE_BLOCKS = 4096

# What stands for the key before a block of which that is not known.
NO_PARENT = bytes(KEY_BYTES)

# One order: as many blocks as are copied at a time.
ORDER_BLOCKS = 64


@dataclass(frozen=True, slots=True)
class Chain:
    """Consecutive blocks of one prefix: joined keys, the key before them, the first one's depth."""

    keys: bytes
    parent: bytes
    depth: int
    nbytes: int

    def __len__(self) -> int:
        return len(self.keys) // KEY_BYTES

    def after(self, count: int) -> Chain:
        """The chain without its first `count` blocks."""
        if not count:
            return self
        at = count * KEY_BYTES
        parent = self.keys[at - KEY_BYTES : at]
        left = len(self) - count
        return Chain(self.keys[at:], parent, self.depth + count, self.nbytes * left // len(self))


class Member(NamedTuple):
    """What is to be known of one block; `parent` is the key before it, or NO_PARENT."""

    depth: int
    key: bytes
    parent: bytes
    nbytes: int


def resident_keys(node: Node) -> list[bytes]:
    """The keys of all blocks of this moment: 5 ms under the lock for 500,000 of them."""
    with node.held():
        return list(node.core.index)


def members_of(node: Node, keys: Sequence[bytes]) -> list[Member]:
    """Those of `keys` that are here when their page is read."""
    members = []
    for begin in range(0, len(keys), PAGE_BLOCKS):
        with node.held():
            found = map(node.core.index.get, keys[begin : begin + PAGE_BLOCKS])
            members += [
                Member(
                    block.depth,
                    block.key,
                    block.parent.key if block.parent is not None else NO_PARENT,
                    # None while its last one is on its way to the other tier.
                    sum(replica.length for replica in block.replicas()[:1]),
                )
                for block in found
                if block is not None
            ]
    return members


def chains_of(members: Iterable[Member]) -> list[Chain]:
    """Chains of at most ORDER_BLOCKS blocks, so that who copies them in this order has every
    block's ancestors before it. Pure."""
    chains: list[list[Member]] = []
    ends: dict[bytes, list[Member]] = {}
    for member in sorted(members, key=lambda member: member.depth):
        chain = ends.pop(member.parent, None) if member.parent != NO_PARENT else None
        if chain is None or len(chain) >= ORDER_BLOCKS:
            chain = []
            chains.append(chain)
        chain.append(member)
        ends[member.key] = chain
    return [
        Chain(
            b"".join(member.key for member in chain),
            chain[0].parent,
            chain[0].depth,
            sum(member.nbytes for member in chain),
        )
        for chain in chains
    ]
