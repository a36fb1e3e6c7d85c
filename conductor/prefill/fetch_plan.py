"""The cheapest plan to load or fetch a prompt's blocks for each candidate, range by range. Pure.

A plan goes through the prompt from the front. Each range of blocks is loaded from one source: the
candidate's own HBM (free), its node's DRAM or NVMe, or another place. At some block the plan stops,
and the candidate computes the rest. Engines load a leading part of a prompt and compute the
remainder, so a plan has no gaps; otherwise it is free to change sources from range to range.

    bring(x)  = least seconds to load the first x blocks: per source a fixed start time (latency,
                and the transfers it has in flight), and a time per block
    TTFT      = min over x of  max(queue, bring(x)) + compute(x)

bring(x) does not depend on where the plan stops, so it is computed range by range, as a shortest
path: either continue with the source of the range before, or start another one.

Within a range, bring(x) is linear for one source, and compute(x) is concave: a token costs more,
the later it is. The sum is concave too, with its minimum at an end. The maximum has one corner,
where loading takes as long as the queue: blocks up to there cost nothing. So besides the ends, the
last block before that corner and the first one after it are tried, and no others can be better,
with one exception: if the prompt ends with its last block, that block saves one token less than it
has, as an engine computes at least one token. Stopping before it can be better by the time of one
token. This is not tried.

Arrays are [sources, candidates], with the candidate itself as source 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from .local_cost import Compute
    from .policy_registry import Blocks, Floats

# Seconds for a block that a source does not have. Finite, so that it can be added and multiplied.
NEVER_S = 1e15
_TINY_S = 1e-15  # lower bound of a block's seconds where it is a divisor (an own HBM block takes 0)


@dataclass(slots=True)
class SourceRange:
    """Blocks [start, stop), of which each source has all or none. `block_s` [sources, candidates]
    is the seconds per block from each source; `tiers` [sources] is the source's tier with them."""

    start: int
    stop: int
    block_s: Floats
    tiers: list[int]


@dataclass(frozen=True, slots=True)
class FetchPiece:
    """Blocks [start, stop) from a source's tier, in `seconds`."""

    start: int
    stop: int
    source: int
    tier: int
    seconds: float


class Plans:
    """The best plan of each candidate. `fixed_s` [sources, candidates] is the start time of each
    source in seconds."""

    def __init__(
        self,
        stretches: list[SourceRange],
        fixed_s: Floats,
        queue_s: Floats,
        compute: Compute,
    ) -> None:
        self._stretches, self._fixed_s = stretches, fixed_s
        self._before = [(np.full_like(fixed_s, NEVER_S), np.zeros(len(queue_s)))]
        starts, prefills, cuts = [], [], []
        for stretch in stretches:
            enter_s = self._enter_s(stretch)
            blocks = _stops(stretch, enter_s, queue_s)
            bring_s = enter_s + stretch.block_s * blocks
            starts.append(np.maximum(queue_s, bring_s))
            cuts.append(stretch.start + blocks)
            prefills.append(compute.seconds(cuts[-1]))
        self._choose(starts, prefills, cuts)

    ttft_s: Floats
    """[candidates]"""

    start_s: Floats
    """[candidates] When prefill starts."""

    blocks: Blocks
    """[candidates] How many blocks are brought."""

    def pieces(self, candidate: int) -> list[FetchPiece]:
        """The plan of one candidate, in order."""
        at, source = self._stretch[candidate], int(self._source[candidate])
        stop = int(self.blocks[candidate])
        found: list[FetchPiece] = []
        for index in range(int(at), -1, -1):
            stretch = self._stretches[index]
            came = self._came_from(index, source, candidate)
            fixed_s = 0.0 if came == source else float(self._fixed_s[source, candidate])
            if stop > stretch.start:
                block_s = float(stretch.block_s[source, candidate])
                seconds = fixed_s + (stop - stretch.start) * block_s
                tier = stretch.tiers[source]
                found.append(FetchPiece(stretch.start, stop, source, tier, seconds))
            source, stop = came, stretch.start
        return _joined(found[::-1])

    def _enter_s(self, stretch: SourceRange) -> Floats:
        """The seconds after which each source starts on the range; also records, for the next
        range, when each source would be done with this one."""
        via_s, best_s = self._before[-1]
        enter_s: Floats = np.minimum(via_s, best_s + self._fixed_s)
        left_s = enter_s + stretch.block_s * (stretch.stop - stretch.start)
        self._before.append((left_s, left_s.min(axis=0)))
        return enter_s

    def _choose(self, starts: list[Floats], prefills: list[Floats], cuts: list[Floats]) -> None:
        """Choose for each candidate the best range, stop and source."""
        shape = starts[0].shape  # [stops, sources, candidates], the same for all stretches
        flat = (-1, shape[-1])
        started, prefill = np.concatenate(starts).reshape(flat), np.concatenate(prefills)
        total = started + prefill.reshape(flat)
        best, each = total.argmin(axis=0), np.arange(shape[-1])
        self.ttft_s, self.start_s = total[best, each], started[best, each]
        self.blocks = np.concatenate(cuts).reshape(flat)[best, each].astype(np.int64)
        self._stretch = best // (shape[0] * shape[1])
        self._source = best % shape[1]

    def _came_from(self, index: int, source: int, candidate: int) -> int:
        """The source of the previous range on the best path that loads this range from `source`."""
        via_s, best_s = self._before[index]
        if via_s[source, candidate] <= best_s[candidate] + self._fixed_s[source, candidate]:
            return source
        return int(via_s[:, candidate].argmin()) if index else -1


def _stops(stretch: SourceRange, enter_s: Floats, queue_s: Floats) -> Floats:
    """The block counts within a range that are tried as stops, [stops, sources, candidates]."""
    size = float(stretch.stop - stretch.start)
    stops = np.empty((3, *enter_s.shape))
    free = np.floor((queue_s - enter_s) / np.maximum(stretch.block_s, _TINY_S))
    np.clip(free, 0.0, size, out=stops[0])
    np.minimum(stops[0] + 1.0, size, out=stops[1])
    stops[2] = size
    return stops


def _joined(pieces: list[FetchPiece]) -> list[FetchPiece]:
    """Merge neighbouring pieces from the same tier of the same source."""
    joined: list[FetchPiece] = []
    for piece in pieces:
        last = joined[-1] if joined else None
        if last and (last.source, last.tier) == (piece.source, piece.tier):
            seconds = last.seconds + piece.seconds
            joined[-1] = FetchPiece(last.start, piece.stop, piece.source, piece.tier, seconds)
        else:
            joined.append(piece)
    return joined
