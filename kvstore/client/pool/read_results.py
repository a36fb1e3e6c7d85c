"""One read of a pool: what it wants and where its blocks go, what one node gave, and the blocks
that the caller gets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

import numpy as np

from tiffin.messenger.budget import Priority

from ..blocks.block_views import Block, Blocks
from ..verbs.leased_blocks import LeasedBlocks
from .pool_verbs import HomeState

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from ...format.keys import Prefix
    from ..blocks.block_views import Selection
    from ..verbs.block_verbs import Access, PutResult
    from .pool_verbs import Outcome, ReadOutcome
    from .remote.block_write import BlockSeals
    from .replica_choice import ReplicaRun

    Bytes = NDArray[np.uint8]


class ReplicaNode(Protocol):
    """One node of a plan, over shared memory (`Home`) or the network (`RemoteNode`)."""

    def read(
        self, run: ReplicaRun, reader: Reader, deadline: float, stall_s: float | None
    ) -> ReadOutcome:
        """Read the run's leading blocks into the reader's memory; at home, lease them in place if
        the reader takes leases. Gives up when nothing arrives for `stall_s`, or at the deadline.
        Raises no failure of the node."""

    def put(
        self, seals: BlockSeals, room_s: float, deadline: float, *, patient: bool = False
    ) -> PutResult:
        """Write the blocks that the node lacks; waits up to `room_s` for room. `patient`: no other
        node can take them. Raises NodeUnavailable, DeadlineExceeded, Draining, InvalidInput."""


# Reads what a reader wants by a deadline from the holders of each block: `VerbDriver.read`.
ReadFrom: TypeAlias = "Callable[[Reader, float, Sequence[tuple[int, ...]]], Outcome]"


class HomeNode(ReplicaNode, HomeState, Protocol):
    """The home node as a replica: see `Home`."""

    def copy_here(
        self,
        part: Prefix,
        located: Sequence[tuple[int, ...]],
        read: ReadFrom,
        deadline: float,
    ) -> int:
        """Copy blocks into the home node from their holders, which `read` reads; how many leading
        blocks are there then."""


@dataclass(slots=True)
class Reader:
    """What one read wants, and where its blocks go: `memory(i)` is the target of block i, packed.
    Blocks at `home` are leased in place, and the leases appended to `leases`, unless that is None.
    Large reads wait for room in the process's in-flight budget, in the order of their `priority`.
    """

    prefix: Prefix
    access: Access
    selection: Selection
    memory: Callable[[int], Bytes]
    home: HomeNode | None = None
    leases: list[LeasedBlocks] | None = None
    priority: Priority = Priority.PREFILL


class OwnMemory(dict[int, "Bytes"]):
    """Memory of this process for the blocks of one read, made when it is first asked for."""

    def __init__(self, block_bytes: int) -> None:
        super().__init__()
        self._block_bytes = block_bytes

    def __missing__(self, index: int) -> Bytes:
        memory = self[index] = np.empty(self._block_bytes, np.uint8)
        return memory


class MixedBlocks(LeasedBlocks):
    """Leading blocks at home, under one lease or two, and the rest in memory of this process."""

    def __init__(self, reader: Reader, copied: OwnMemory, outcome: Outcome) -> None:
        self._leases = reader.leases or []
        prefix, selection = reader.prefix, reader.selection

        def make(index: int) -> Block:
            at = index
            for leased in self._leases:
                if at < len(leased):
                    return leased[at]
                at -= len(leased)
            generation = outcome.generations[index]
            return Block(copied[index], selection, prefix.keys[index], generation, packed=True)

        super().__init__(Blocks(prefix, outcome.blocks, outcome.reason, make), 0, None)

    def release(self) -> None:
        """See `LeasedBlocks.release`."""
        super().release()
        release_all(self._leases)


def release_all(leases: list[LeasedBlocks]) -> None:
    """Release these leases, but those that were released before."""
    for leased in leases:
        if not leased.released:
            leased.release()


def copied_blocks(reader: Reader, outcome: Outcome) -> LeasedBlocks:
    """The blocks of a read that were all copied into the caller's memory."""

    def make(index: int) -> Block:
        target, key = reader.memory(index), reader.prefix.keys[index]
        return Block(target, reader.selection, key, outcome.generations[index], packed=True)

    return LeasedBlocks(Blocks(reader.prefix, outcome.blocks, outcome.reason, make), 0, None)
