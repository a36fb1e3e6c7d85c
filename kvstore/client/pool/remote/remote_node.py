"""A node on another host as a replica of the pool, over TCP or NIXL: reads and puts, and what they
say of its health."""

from __future__ import annotations

import logging
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tiffin.messenger.budget import SHARED, STREAM_BYTES, Priority
from tiffin.messenger.errors import TransferTimeout

from .... import deadlines
from ....deadlines import GRACE_S
from ....errors import DeadlineExceeded, NodeUnavailable, ProtocolError
from ...connection.connection import raise_refusal
from ..pool_verbs import ReadOutcome
from .block_read import ArrivedSegments, fetch
from .block_write import store

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ....directory.base import NodeRecord
    from ....node.core import messages
    from ...verbs.block_verbs import PutResult
    from ..peers import Peers
    from ..read_results import Reader
    from ..replica_choice import ReplicaRun
    from .block_write import BlockSeals
    from .peer import Peer

log = logging.getLogger(__name__)

# Smaller reads end too soon to delay others: they do not wait for room in the in-flight budget.
_BUDGETED_BYTES_MIN = 1 << 20


class RemoteNode:
    """The node with this number in the directory, or of this `record`; connects when it is first
    used. Thread-safe."""

    __slots__ = ("_number", "_peers", "_record")

    def __init__(self, number: int, peers: Peers, record: NodeRecord | None = None) -> None:
        self._number = number
        self._peers = peers
        self._record = record

    def _peer(self) -> Peer:
        if self._record is not None:
            return self._peers.peer_at(self._record)
        return self._peers.peer(self._number)

    def ask(self, request: messages.Request, timeout_s: float) -> Any:
        """Send one request. A reply, a lost connection and a protocol error count for the node's
        health; a timeout does not. Raises the node's refusal, NodeUnavailable, DeadlineExceeded."""
        links = self._peers.links
        try:
            reply = self._peer().exchange(request, timeout_s)
        except (NodeUnavailable, ProtocolError):
            links.failed(self._number, time.monotonic())
            raise
        links.answered(self._number)
        return raise_refusal(reply)

    def read(
        self, run: ReplicaRun, reader: Reader, deadline: float, stall_s: float | None
    ) -> ReadOutcome:
        """See `ReplicaNode.read`."""
        try:
            peer = self._peers.peer(self._number)
        except NodeUnavailable as error:
            log.debug("not read from: %s", error)
            return ReadOutcome(0, "lost")
        part = reader.prefix  # its joined keys are cached; a slice would have to join them again
        if run.start or run.stop != len(part):
            part = part[run.start : run.stop]
        targets = [reader.memory(index) for index in range(run.start, run.stop)]
        arrivals = ArrivedSegments(part, reader.selection, reader.access, targets)
        how = peer, part, arrivals, deadline, stall_s, self._peers.options.streams
        try:
            if arrivals.nbytes < _BUDGETED_BYTES_MIN:
                fetched = fetch(*how)
            else:
                # The wait for other reads of this process does not count as the node's time.
                with _turn(peer, arrivals.nbytes, reader.priority, deadline):
                    fetched = fetch(*how)
        except TransferTimeout:
            return ReadOutcome(0, "deadline")
        self._note(fetched)
        return fetched

    def put(
        self, seals: BlockSeals, room_s: float, deadline: float, *, patient: bool = False
    ) -> PutResult:
        """See `ReplicaNode.put`."""
        peers, number, now = self._peers, self._number, time.monotonic()
        late = min(max(deadline, now) + GRACE_S, deadlines.end())
        try:
            outcome = store(peers.peer(number), seals, 0, deadline=late, room_until=now + room_s)
        except (NodeUnavailable, DeadlineExceeded) as error:
            hasty = not patient and isinstance(error, DeadlineExceeded)
            peers.links.failed(number, time.monotonic(), late=hasty)
            raise
        there = [seals.prefix.keys[i] for i in (*outcome.stored, *outcome.resident)]
        peers.placements.note(number, there, time.monotonic())
        return outcome.result()

    def _note(self, fetched: ReadOutcome) -> None:
        links, node = self._peers.links, self._number
        # A node that sent no reply by the deadline is taken for dead, if it had `hedge_s` at least.
        silent = not fetched.answered and fetched.seconds >= self._peers.options.hedge_s
        if fetched.reason == "stalled":
            links.failed(node, time.monotonic(), late=True)
            links.hedged()
        elif fetched.reason == "lost" or (fetched.reason == "deadline" and silent):
            links.failed(node, time.monotonic())
        elif fetched.blocks:
            links.moved(node, fetched.nbytes, fetched.seconds)
        else:
            links.answered(node)


@contextmanager
def _turn(peer: Peer, nbytes: int, priority: Priority, deadline: float) -> Iterator[None]:
    """Hold room for so many bytes in flight, in the peer's budget and in the process's shared one.
    Raises TransferTimeout if there is none by the deadline."""
    claim = min(nbytes, STREAM_BYTES)
    with peer.budget.hold(claim, priority, deadline), SHARED.hold(claim, priority, deadline):
        yield
