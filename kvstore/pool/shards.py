"""Where the ranks of one tensor-parallel writer meet."""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING

from ..errors import NoRoom

if TYPE_CHECKING:
    from ..directory.base import NodeRecord
    from ..keys import Prefix


def shard_node(nodes: dict[int, NodeRecord], prefix: Prefix) -> int:
    """The number of the node that every rank which knows the same nodes writes `prefix` to.

    The highest hash of (first key, address) wins: ranks need not talk, and a node that comes or
    goes moves only its own prefixes. A rank that sees other nodes than its fellows may write
    elsewhere; then neither block becomes visible, and both reservations expire. Raises NoRoom.
    """
    able = {number: record for number, record in nodes.items() if not record.draining}
    if not able:
        raise NoRoom("no node of the pool takes blocks; look at `tiffin status`")
    first = prefix.keys[0] if len(prefix) else prefix.parent

    def weight(number: int) -> bytes:
        return blake2b(first + able[number].address.encode(), digest_size=16).digest()

    return max(able, key=weight)
