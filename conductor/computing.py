"""Which blocks are being computed right now, by whom, and until when. Pure.

When a prompt arrives whose beginning another request is just computing, no holder has these blocks
yet, but it can be cheaper to wait for them than to compute them a second time. A hundred requests
with the same new system prompt arrive within a second; one of them has to compute it. What an
instance fetches for a request counts as well: when that request is ready, it is there, and need not
be sent twice.

Keys are chained, so a key names a whole prefix: whoever computes `keys[i]` has, when it is ready,
all blocks up to `i`. What it says is a hint: nothing is lost if the one that is waited for fails,
but time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from .errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

# Requests that compute the same block at the same time and are remembered for it. Those beyond are
# not found through that block, which costs nothing as long as one of these ends well; it keeps a
# herd of a thousand on one system prompt from costing a million entries.
OWNERS_MAX = 8

# Keys in all. Beyond it, new work is not remembered: some 100 bytes each, 100 MB.
KEYS_MAX = 1 << 20

# A request that is late by more than its own estimate, and by this at least, is not waited for.
LATE_S_MIN = 1.0


class Computed(NamedTuple):
    """`request_id`, on `row`, is computing the first `blocks` blocks of a prompt; they should be
    there at `ready_at` (never in the past)."""

    request_id: str
    row: int
    blocks: int
    ready_at: float


@dataclass(frozen=True, slots=True, eq=False)
class _Work:
    request_id: str
    row: int
    node: int
    keys: tuple[bytes, ...]  # those that it computes
    ready_at: float
    believed_until: float


class Computing:
    """All prefills in flight, by the blocks that they compute. Not thread-safe."""

    def __init__(self) -> None:
        self._works: dict[str, _Work] = {}
        self._owners: dict[bytes, tuple[_Work, ...]] = {}

    def __len__(self) -> int:
        return len(self._works)

    @property
    def blocks(self) -> int:
        """Distinct blocks that are being computed."""
        return len(self._owners)

    def begin(
        self,
        request_id: str,
        row: int,
        node: int,
        keys: Sequence[bytes],
        start_block: int,
        ready_at: float,
        now: float,
    ) -> None:
        """`request_id` will compute `keys[start_block:]` on the instance of `row`, whose node has
        this number. Replaces what was known of the request. Raises InvalidRequest for a start
        beyond the keys."""
        if not 0 <= start_block <= len(keys):
            raise InvalidRequest(
                f"request {request_id!r} starts at block {start_block} of {len(keys)}: "
                "give an index of its keys"
            )
        self.end(request_id)
        computed = tuple(keys[start_block:])
        if not computed or len(self._owners) + len(computed) > KEYS_MAX:
            return
        late_s = max(LATE_S_MIN, ready_at - now)
        work = _Work(request_id, row, node, computed, ready_at, ready_at + late_s)
        self._works[request_id] = work
        alone = (work,)  # shared by all keys, so that most entries cost no tuple
        for key in computed:
            others = self._owners.setdefault(key, alone)
            if others is not alone and len(others) < OWNERS_MAX:
                self._owners[key] = (*others, work)

    def end(self, request_id: str) -> None:
        """Its prefill is done, was given up or went elsewhere. Nothing happens if it is unknown."""
        work = self._works.pop(request_id, None)
        if work is None:
            return
        for key in work.keys:
            others = tuple(other for other in self._owners.get(key, ()) if other is not work)
            if others:
                self._owners[key] = others
            else:
                self._owners.pop(key, None)

    def match(self, keys: Sequence[bytes], now: float) -> Computed | None:
        """Who is computing the longest prefix of this prompt; of several, who is ready first. The
        whole prefix counts, also blocks that were there before. None if nobody is."""
        owners = self._owners
        if not owners or owners.keys().isdisjoint(keys):  # most often; in C, 5 us for 256 keys
            return None
        for index in range(len(keys) - 1, -1, -1):
            if keys[index] not in owners:
                continue
            believed = [work for work in owners[keys[index]] if now <= work.believed_until]
            if believed:
                first = min(believed, key=lambda work: work.ready_at)
                return Computed(first.request_id, first.row, index + 1, max(first.ready_at, now))
        return None

    def expire(self, now: float) -> list[str]:
        """Forget what is not believed any more; returns the requests' ids."""
        late = [work.request_id for work in self._works.values() if now > work.believed_until]
        for request_id in late:
            self.end(request_id)
        return late

    def leave(self, row: int = -1, node: int = -1) -> list[str]:
        """An instance, or a node with all of its instances, is gone: forget what it computes.
        Returns the requests' ids."""
        gone = [
            work.request_id
            for work in self._works.values()
            if (row >= 0 and work.row == row) or (node >= 0 and work.node == node)
        ]
        for request_id in gone:
            self.end(request_id)
        return gone
