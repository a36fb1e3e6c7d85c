"""The prefills in flight: which blocks are being computed, on which instance, until when. Pure.

When a prompt arrives whose prefix another request is just computing, no holder has these blocks
yet, but waiting for them can be cheaper than computing them a second time. If a hundred requests
with the same new system prompt arrive within a second, only one of them has to compute it. Blocks
that an instance fetches for a request count as well: when that request is ready, the instance has
them, and they need not be sent twice.

Keys are chained, so a key names a whole prefix: an instance that computes `keys[i]` has, when it is
ready, all blocks up to `i`. All of this is a hint: if the prefill that a request waits for fails,
only time is lost.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ..errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# Owners kept per block: requests that compute it at the same time. Requests beyond the limit are
# not found through that block, which costs nothing as long as one of the owners succeeds. The limit
# keeps a thundering herd of a thousand requests on one system prompt from costing a million
# entries.
OWNERS_MAX = 8

# Limit of keys in all; prefills beyond it are not tracked. Some 100 bytes each, 100 MB.
KEYS_MAX = 1 << 20

# A prefill that is late by more than its own estimate, and by at least this, is not waited for.
LATE_S_MIN = 1.0


class Computed(NamedTuple):
    """`request_id`, on the instance of `row`, is computing the first `blocks` blocks of a prompt;
    they should be ready at `ready_at` (never in the past)."""

    request_id: str
    row: int
    blocks: int
    ready_at: float


@dataclass(frozen=True, slots=True, eq=False)
class _Work:
    request_id: str
    row: int
    node: int
    keys: tuple[bytes, ...]  # the blocks that it computes
    queued_at: float
    ready_at: float
    believed_until: float


class Computing:
    """All prefills in flight, indexed by the blocks that they compute. Not thread-safe."""

    def __init__(self) -> None:
        self._works: dict[str, _Work] = {}
        self._owners: dict[bytes, tuple[_Work, ...]] = {}

    def __len__(self) -> int:
        return len(self._works)

    @property
    def blocks(self) -> int:
        """The number of distinct blocks that are being computed."""
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
        queued_at: float = 0.0,
    ) -> None:
        """Track a prefill: `request_id` will compute `keys[start_block:]` on the instance of `row`,
        whose node has the number `node`. It is queued there at `queued_at`, once the blocks that it
        fetches have come. Replaces the request's earlier entry. Raises
        InvalidRequest for a start beyond the keys."""
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
        work = _Work(request_id, row, node, computed, queued_at, ready_at, ready_at + late_s)
        self._works[request_id] = work
        alone = (work,)  # one tuple shared by all keys, so that most entries need none of their own
        for key in computed:
            others = self._owners.setdefault(key, alone)
            if others is not alone and len(others) < OWNERS_MAX:
                self._owners[key] = (*others, work)

    def end(self, request_id: str) -> None:
        """Drop a prefill that is done, was given up or moved. No effect on an unknown request."""
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
        """The prefill in flight that computes the longest prefix of this prompt; of several, the
        one ready first. `blocks` counts the whole prefix, including blocks that were cached before.
        None if there is none."""
        owners = self._owners
        if not owners or owners.keys().isdisjoint(keys):  # the usual case; 5 us for 256 keys, in C
            return None
        for index in range(len(keys) - 1, -1, -1):
            if keys[index] not in owners:
                continue
            believed = [work for work in owners[keys[index]] if now <= work.believed_until]
            if believed:
                first = min(believed, key=lambda work: work.ready_at)
                return Computed(first.request_id, first.row, index + 1, max(first.ready_at, now))
        return None

    def by_row(
        self, keys: Sequence[bytes], now: float, turn_at: Callable[[int], float]
    ) -> dict[int, int]:
        """The leading blocks of this prompt that each row will have computed by the prompt's turn
        there, at `turn_at(row)`; rows without any are left out. A prefill counts if it is in the
        queue by then, and so before this prompt."""
        owners, found = self._owners, dict[int, int]()
        if not owners or owners.keys().isdisjoint(keys):
            return found
        seen: tuple[_Work, ...] = ()
        for index in range(len(keys) - 1, -1, -1):
            works = owners.get(keys[index], ())
            if works is seen:  # neighbouring blocks mostly have the same owners
                continue
            for work in works:
                row = work.row
                if row in found or now > work.believed_until:
                    continue
                if work.queued_at <= turn_at(row):
                    found[row] = index + 1
            seen = works
        return found

    def expire(self, now: float) -> list[str]:
        """Drop prefills that are too late; returns the requests' ids."""
        late = [work.request_id for work in self._works.values() if now > work.believed_until]
        for request_id in late:
            self.end(request_id)
        return late

    def leave(self, row: int = -1, node: int = -1) -> list[str]:
        """Drop the prefills of an instance, or of all instances of a node, that was removed.
        Returns the requests' ids."""
        gone = [
            work.request_id
            for work in self._works.values()
            if (row >= 0 and work.row == row) or (node >= 0 and work.node == node)
        ]
        for request_id in gone:
            self.end(request_id)
        return gone
