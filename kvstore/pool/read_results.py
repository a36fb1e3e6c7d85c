"""The request and the result of a pool's get: blocks at home and in memory of this process, and why
there are not more."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..blocks.block_views import Block, Blocks
from ..client.client import LeasedBlocks

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ..blocks.block_views import Selection
    from ..format.keys import Prefix
    from ..format.schema import HeadRange, LayerRange
    from ..verbs.block_verbs import Access
    from . import pool_verbs

    Bytes = NDArray[np.uint8]


@dataclass(slots=True)
class WantedBlocks:
    """The request of one get. `home_away`: the home node was known to be silent when it began."""

    prefix: Prefix
    access: Access
    selection: Selection
    part: tuple[LayerRange | None, HeadRange | None]
    deadline: float
    home_away: bool

    @property
    def left_s(self) -> float:
        """The time that is left until the deadline."""
        return max(0.0, self.deadline - time.monotonic())


class MixedBlocks(LeasedBlocks):
    """Leading blocks at home, leased; the rest in memory of this process."""

    def __init__(
        self,
        prefix: Prefix,
        near: LeasedBlocks | None,
        far: dict[int, Bytes],
        outcome: pool_verbs.Outcome,
        selection: Selection,
    ) -> None:
        count = len(near) if near is not None else 0

        def make(index: int) -> Block:
            if near is not None and index < count:
                return near[index]
            generation = outcome.generations[index]
            return Block(far[index], selection, prefix.keys[index], generation, packed=True)

        reason = None if outcome.blocks == len(prefix) else outcome.reason
        super().__init__(Blocks(prefix, outcome.blocks, reason, make), 0, None)
        self._near = near

    def release(self) -> None:
        """See `LeasedBlocks.release`."""
        super().release()
        if self._near is not None:
            self._near.release()


def reason_of(
    outcome: pool_verbs.Outcome, blocks: int, at_home: int, why: str | None
) -> str | None:
    """Why there are not more blocks. The home node's own reason `why` tells more than a miss at the
    other nodes, or a directory that does not answer, and replaces it."""
    if outcome.blocks == blocks:
        return None
    if outcome.blocks == at_home and why is not None and outcome.reason in ("miss", "directory"):
        return outcome.reason if why == "miss" else why
    return outcome.reason


def joined(first: pool_verbs.Outcome, rest: pool_verbs.Outcome) -> pool_verbs.Outcome:
    """The combined outcome of two reads, of which the second began where the first had ended."""
    rest.generations = {**first.generations, **rest.generations}
    rest.sources = {**first.sources, **rest.sources}
    rest.stale = first.stale + rest.stale
    rest.retries += first.retries
    return rest
