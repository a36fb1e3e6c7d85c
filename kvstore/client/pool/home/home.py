"""The node on this host as a replica of the pool: its blocks are leased in place or copied out of
shared memory, and puts write into it.

Each verb runs over the patient or the impatient link (`home_link.py`): what only the home node can
serve waits for it, everything else goes to another node while it is silent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

from ....deadlines import until_s
from ....errors import DeadlineExceeded, NoRoom
from ...verbs import block_verbs
from ...verbs.leased_blocks import LeasedBlocks
from ..pool_verbs import ReadOutcome
from .home_link import HomeLink
from .read_through import HomeCopies

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ....format.keys import Prefix
    from ....format.schema import Shard
    from ....node.core import messages
    from ...connection.connection import NodeAnswer
    from ...connection.node_link import NodeLink
    from ...verbs.block_verbs import PutResult, ReservedSlots
    from ..peers import Peers
    from ..read_results import Reader, ReadFrom
    from ..remote.block_write import BlockSeals
    from ..replica_choice import ReplicaRun

T = TypeVar("T")
U = TypeVar("U")


class Home(HomeLink):
    """The node on this host; `HomeState` is what plans ask of it. Thread-safe."""

    def __init__(
        self,
        link: NodeLink,
        number: Callable[[], int | None],
        peers: Peers,
        admission: str = "second",
    ) -> None:
        """`number()` is its number in the directory; a restart changes it. `admission`: which
        blocks of other nodes are copied here (`HomeCopies`)."""
        super().__init__(link, number, peers)
        self._copies = HomeCopies(admission)
        self.wants, self.saw = self._copies.wants, self._copies.saw

    def ask(self, otherwise: U, verb: Callable[..., T], *args: Any, **options: Any) -> T | U:
        """The verb's result; `otherwise` if the node does not answer, so that the caller can ask
        other nodes."""
        try:
            return verb(self, *args, **options)
        except (ConnectionError, DeadlineExceeded):
            return otherwise

    def read(
        self, run: ReplicaRun, reader: Reader, deadline: float, stall_s: float | None
    ) -> ReadOutcome:
        """See `ReplicaNode.read`. The link has its own patience, whatever `stall_s` is."""
        prefix = reader.prefix[run.start : run.stop] if run.start else reader.prefix
        left_s = until_s(deadline)
        how = prefix, reader.access, reader.selection
        if reader.leases is not None:
            leased = self.ask(None, block_verbs.get, *how, left_s)
            if leased is None:
                return ReadOutcome(0, "lost")
            blocks, lease = leased
            reader.leases.append(LeasedBlocks(blocks, lease, self))
            return ReadOutcome(len(blocks), blocks.reason, answered=True)
        targets = [reader.memory(index) for index in range(run.start, run.stop)]
        copied = self.ask(None, block_verbs.get_into, *how, targets, left_s)
        if copied is None:
            return ReadOutcome(0, "lost")
        generations = [block.generation for block in copied]
        return ReadOutcome(len(copied), copied.reason, generations, answered=True)

    def copy_here(
        self,
        part: Prefix,
        located: Sequence[tuple[int, ...]],
        read: ReadFrom,
        deadline: float,
    ) -> int:
        """See `HomeNode.copy_here` and `HomeCopies.bring`."""
        return self._copies.bring(part, located, self, read, deadline)

    def reserve(
        self, prefix: Prefix, room_s: float, timeout_s: float, shard: Shard | None, *, patient: bool
    ) -> ReservedSlots | None:
        """`block_verbs.reserve` here. None if the node does not answer, or has no room within
        `room_s`, and another node could take the blocks. `patient`: the reservation can't go to
        another node. Raises the node's error if no other node could take them."""
        elsewhere = not patient and self._others(takes_room=True)
        link, room_s = self.patient if patient else self, min(room_s, timeout_s)
        try:
            return block_verbs.reserve(link, prefix, room_s if elsewhere else timeout_s, shard)
        except (ConnectionError, DeadlineExceeded, NoRoom):
            if patient or not self._others(takes_room=True):
                raise
            return None

    def put(
        self, seals: BlockSeals, room_s: float, deadline: float, *, patient: bool = False
    ) -> PutResult:
        """See `ReplicaNode.put`."""
        what, shard = (seals.prefix, seals.payloads), seals.selection.shard
        link = self.patient if patient else self
        return block_verbs.put(link, *what, room_s, shard, until=deadline, alone=patient)

    @property
    def patient(self) -> NodeLink:
        """The same link for requests that only the home node can serve, such as those for slots in
        its memory."""
        return cast("NodeLink", _Patient(self))


@dataclass(frozen=True, slots=True)
class _Patient:
    """A `NodeLink` whose calls wait for a silent home node."""

    home: Home

    def call(self, request: messages.Request, timeout_s: float) -> NodeAnswer:
        """See `NodeLink.call`."""
        return self.home.call(request, timeout_s, patient=True)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.home, name)
