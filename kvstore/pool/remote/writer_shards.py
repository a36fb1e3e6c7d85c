"""The choice of the node that all ranks of one tensor-parallel writer write to."""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING

from ...errors import NoRoom

if TYPE_CHECKING:
    from ...directory.base import NodeRecord
    from ...format.keys import Prefix


def shard_node(nodes: dict[int, NodeRecord], prefix: Prefix) -> int:
    """The number of the node that every rank with the same list of nodes writes `prefix` to.

    The node with the highest hash of (first key, address) wins (rendezvous hashing): ranks need not
    communicate, and a node that joins or leaves moves only its own prefixes. A rank that sees other
    nodes than the other ranks may write to another node; then neither block becomes visible, and
    both reservations expire. Raises NoRoom.
    """
    able = {number: record for number, record in nodes.items() if not record.draining}
    if not able:
        raise NoRoom("no node of the pool takes blocks; look at `tiffin status`")
    first = prefix.keys[0] if len(prefix) else prefix.parent

    def weight(number: int) -> bytes:
        return blake2b(first + able[number].address.encode(), digest_size=16).digest()

    return max(able, key=weight)
