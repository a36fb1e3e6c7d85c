"""What a pool's verbs hand out: blocks of several places, slots that are sent when committed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..blocks import Block, Blocks, Slot, select_shard
from ..client import LeasedBlocks, Slots
from ..errors import InvalidInput
from ..verbs import DEFAULT_TIMEOUT_S, Reserved

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ..blocks import Selection
    from ..keys import Prefix
    from ..schema import Shard
    from . import verbs
    from .client import PoolClient

    Bytes = NDArray[np.uint8]


class MixedBlocks(LeasedBlocks):
    """Leading blocks at home, leased; the rest in memory of this process."""

    def __init__(
        self,
        prefix: Prefix,
        near: LeasedBlocks | None,
        far: dict[int, Bytes],
        outcome: verbs.Outcome,
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


class StagedSlots(Slots):
    """Slots of a client without a home: private memory, put when committed."""

    def __init__(
        self,
        prefix: Prefix,
        client: PoolClient,
        timeout_s: float,
        shard: Shard | None = None,
        node: int | None = None,
    ) -> None:
        selection, size = select_shard(prefix.schema, shard), prefix.schema.extent_bytes
        flags = client.exists(prefix, timeout_s=timeout_s)
        slots = [
            Slot(np.zeros(size, np.uint8), selection, index, 0, 0)
            for index, resident in enumerate(flags)
            if not resident
        ]
        resident = tuple(index for index, flag in enumerate(flags) if flag)
        super().__init__(prefix, Reserved(slots, 0, resident), None)  # type: ignore[arg-type]
        self._client = client
        self._timeout_s = timeout_s
        self._shard = selection.shard
        self._node = node

    def publish(self, layer: int, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Not of these slots: raises InvalidInput."""
        raise InvalidInput(
            f"layer {layer} can't be published: without a node on this host slots are memory of "
            "this process, sent when they are committed; run a node here, or only commit"
        )

    def commit(self) -> None:
        """Send what was written, of one rank its slice. Raises NoRoom, NodeUnavailable."""
        self._end()
        kept = [slot for slot in self._slots if not slot.skipped]
        try:
            stored: list[int] = []
            pending: list[int] = []
            for first, part in _consecutive(kept):
                piece = self.prefix[first : first + len(part)]
                result = self._client.put(
                    piece,
                    [slot.view for slot in part],
                    shard=self._shard,
                    node=self._node,
                    timeout_s=self._timeout_s,
                )
                stored += [first + index for index in result.stored]
                pending += [first + index for index in result.pending]
            self.stored, self.pending = tuple(stored), tuple(pending)
        finally:
            for slot in self._slots:
                slot.let_go()

    def abort(self) -> None:
        """Forget what was written."""
        self._end()
        for slot in self._slots:
            slot.let_go()


def _consecutive(slots: Sequence[Slot]) -> list[tuple[int, list[Slot]]]:
    runs: list[tuple[int, list[Slot]]] = []
    for slot in slots:
        if runs and runs[-1][0] + len(runs[-1][1]) == slot.index:
            runs[-1][1].append(slot)
        else:
            runs.append((slot.index, [slot]))
    return runs


def reason_of(outcome: verbs.Outcome, blocks: int, at_home: int, why: str | None) -> str | None:
    """Why there are not more blocks: home's own reason tells more than that nobody else has it."""
    if outcome.blocks == blocks:
        return None
    if outcome.blocks == at_home and why is not None and outcome.reason in ("miss", "directory"):
        return outcome.reason if why == "miss" else why
    return outcome.reason
