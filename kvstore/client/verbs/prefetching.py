"""Prefetching: brings leading blocks into the DRAM of the node on this host, ahead of their use.

The node moves the bytes. A look counts the leading blocks in its DRAM and leases the next ones,
which makes the node promote them from NVMe; the lease is given back at once, and the promotion goes
on without it. Nothing is evicted for a prefetch that a read could not have evicted.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

from ...deadlines import until_s
from ...node.core import messages
from ...node.core.records import IN_DRAM, Reason
from .block_verbs import match

if TYPE_CHECKING:
    from ...format.keys import Prefix
    from ..connection.node_link import NodeLink

# How long a look waits for the node's answer.
LOOK_S = 1.0
# How often blocks that still are on NVMe are asked for again: DRAM had no room for them before.
AGAIN_S = 0.05


class PrefetchState:
    """How far one prefetch is. Its verbs return whether it has ended; afterwards they ask nobody.

    `blocks`: how many leading blocks were in DRAM at the last look; `resident`: how many were
    there or on NVMe. `absence`: the reason why blocks that are not resident will not come; None
    while they may.
    """

    def __init__(self, prefix: Prefix, deadline: float) -> None:
        self.prefix = prefix[: len(prefix)]  # the caller may extend its own meanwhile
        self.deadline = deadline
        self.blocks = self.resident = 0
        self.reason: str | None = None
        self.ended = False
        self.absence: str | None = "miss"
        self._again_at = -math.inf
        self._blocked = False  # DRAM had no room when blocks were asked for last

    def look(self, link: NodeLink) -> bool:
        """Count the blocks, and ask for those on NVMe."""
        if self.ended:
            return True
        where = match(link, self.prefix, LOOK_S).where
        here = next((i for i, flag in enumerate(where) if not flag & IN_DRAM), len(where))
        self.resident = len(where)
        now = time.monotonic()
        if here < self.resident and self._again_at <= now < self.deadline:
            self._again_at = now + AGAIN_S
            more, reason = promote(link, self.prefix[here : self.resident], 0.0)
            here += more
            self._blocked = reason == Reason.NO_ROOM
        return self._note(here, self.absence if here == self.resident else None)

    def wait(self, link: NodeLink, timeout_s: float) -> bool:
        """Wait until the blocks are in DRAM, no more of them can be, or the time is up."""
        if self.ended:
            return True
        left_s = min(timeout_s, until_s(self.deadline))
        here, reason = promote(link, self.prefix, left_s)
        if reason in (Reason.MISS, Reason.BUSY):
            return self._note(here, self.absence)
        self._blocked = reason == Reason.NO_ROOM
        under_way = reason in (Reason.NONE, Reason.DEADLINE)
        return self._note(here, None if under_way else Reason(reason).name.lower())

    def end(self, reason: str | None) -> bool:
        """Note why it has ended; None: all blocks are there."""
        self.reason, self.ended = reason, True
        return True

    def unanswered(self) -> bool:
        """The node did not answer in time: it has ended if its own time is up."""
        return self._note(self.blocks, None)

    def _note(self, blocks: int, reason: str | None) -> bool:
        self.blocks = blocks
        if blocks == len(self.prefix):
            return self.end(None)
        if reason is None and time.monotonic() >= self.deadline:
            reason = "no_room" if self._blocked else "deadline"
        return reason is not None and self.end(reason)


def promote(link: NodeLink, prefix: Prefix, timeout_s: float) -> tuple[int, int]:
    """Have the node promote the blocks from NVMe. Returns how many leading ones are in DRAM within
    `timeout_s`, and the `Reason` why not more; without time, the others are on their way then."""
    if not len(prefix):
        return 0, Reason.NONE
    request = messages.Lease(0, prefix.key_bytes, timeout_s)
    reply, memory = link.call(request, timeout_s)
    if reply.lease:
        link.post(messages.Release(0, reply.lease))
    del memory  # not before: what nobody refers to is given back by another way
    return len(reply.offsets), reply.reason
