"""Slots of a writer that has no node on its host: memory of this process, sent over the network.

The writer reserves no room before it publishes the first layer, or commits the slots. The first
publication makes a reservation at one node; each further publication writes its layer into it, and
the commit sends what is missing. If that node, or the reservation, is lost, the slots still have
every byte: followers learn that the reservation was given up, and the commit puts all blocks as if
nothing had been published.
"""

from __future__ import annotations

import contextlib
import logging
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from tiffin.messenger.signal_safe import Forsaken

from ... import deadlines
from ...deadlines import until_s
from ...errors import (
    ClientClosed,
    DeadlineExceeded,
    InvalidInput,
    NodeUnavailable,
    NoRoom,
    ProtocolError,
    StaleLease,
    TiffinError,
)
from ...node.core import messages
from ...node.core.node_core import ReserveStatus
from ...node.core.records import Kept
from ..blocks.block_views import Slot, select_shard
from ..verbs.arguments import check_blocks, verb
from ..verbs.block_verbs import DEFAULT_TIMEOUT_S, ReservedSlots
from ..verbs.publish import published_segments
from ..verbs.slots import Slots
from .put_placement import ROOM_WAIT_S, TRIES_MAX
from .remote.block_write import BlockSeals, RemoteReservation, reserve
from .remote.peer import POST_TIMEOUT_S
from .replica_choice import place
from .signal_safe_verbs import in_one_piece

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...format.keys import Prefix
    from ...format.schema import AnyShard
    from ..verbs.block_verbs import PutResult
    from .verb_driver import VerbDriver

log = logging.getLogger(__name__)


class StagingNodes(Protocol):
    """What slots need of the pool: see `ManyNodes`."""

    driver: VerbDriver

    def exists(self, prefix: Prefix, timeout_s: float) -> list[bool]:
        """Whether any node has each block."""

    def put(
        self,
        prefix: Prefix,
        payloads: Sequence[Any],
        shard: AnyShard | None,
        timeout_s: float,
        *,
        node: int | None,
    ) -> PutResult:
        """Put blocks to one node, `node` if that is named."""

    def locate(self, keys: Sequence[bytes]) -> list[tuple[int, ...]]:
        """The nodes that may have each block."""


class StagedSlots(Slots):
    """Slots of a client without a home node or with a silent one, or for another node than home.
    `node`: the node where they are published and committed; if the caller named none, known after
    the first `publish`."""

    def __init__(
        self,
        prefix: Prefix,
        nodes: StagingNodes,
        timeout_s: float,
        deadline: float,
        shard: AnyShard | None = None,
        node: int | None = None,
    ) -> None:
        """`timeout_s` is for the commit. Until `deadline`, the constructor asks which blocks are
        resident: in the whole pool or, if the caller named one, at `node`. Raises the node's error.
        """
        selection, size = select_shard(prefix.schema, shard), prefix.schema.extent_bytes
        if node is None:
            flags = nodes.exists(prefix, until_s(deadline))
        else:
            flags = _resident_at(nodes, node, prefix, until_s(deadline))
        slots = [
            Slot(np.zeros(size, np.uint8), selection, index, 0, 0)
            for index, resident in enumerate(flags)
            if not resident
        ]
        resident = tuple(index for index, flag in enumerate(flags) if flag)
        super().__init__(prefix, ReservedSlots(slots, 0, resident), None)  # type: ignore[arg-type]
        self.node = node
        self._nodes = nodes
        self._timeout_s = timeout_s
        self._selection = selection
        self._named = node
        self._published: set[int] = set()
        # Never replaced: `Forsaken` refers to this list.
        self._reservations: list[RemoteReservation] = []
        Forsaken.when(self, partial(_abort_each, self._reservations))
        self._asked = False  # whether a node has answered the reservation
        self._lost: TiffinError | None = None

    # -- publishing ------------------------------------------------------------------------------

    @verb
    @in_one_piece
    def publish(self, layer: int, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Send this layer of all slots (but skipped ones) to the node, where `stream` may read it
        before the commit; later changes of the layer in the slots are not sent.

        Raises StaleLease when the node or the reservation is lost, now or before: readers learn it,
        and the commit still stores the blocks. SchemaError; InvalidInput for a layer that was
        published before; NoRoom, NodeUnavailable if no node takes the slots.
        """
        deadline = time.monotonic() + timeout_s
        segments = published_segments(self._selection, layer)
        if layer in self._published:
            raise InvalidInput("published before: what is published must not change any more")
        if self._lost is not None:
            raise StaleLease(f"the reservation was lost, so nothing can be published: {self._lost}")
        wanted = [slot for slot in self._slots if not slot.skipped]
        if not segments or not wanted:
            return
        if not self._asked:  # only once: a second reservation would lack the layers before
            self._reserve(wanted, deadline)
        try:
            for reservation in self._reservations:
                reservation.publish(segments, deadline, self._skipped())
        except BaseException as error:
            self._give_up(error)
            if isinstance(error, NodeUnavailable | DeadlineExceeded):
                raise StaleLease(f"layer {layer} was not published: {error}") from error
            raise
        self._published.add(layer)
        self._unpublished.discard(layer)

    def _give_up(self, error: BaseException) -> None:
        """Abort the reservation, and with it its followers' streams: it is unknown how much of the
        layer the node has."""
        self._abort(self._reservations)
        self._reservations.clear()
        self._lost = error if isinstance(error, TiffinError) else StaleLease(repr(error))

    def _reserve(self, slots: list[Slot], deadline: float) -> None:
        """Reserve at the first candidate that has room. Raises NoRoom, or the last node's error."""
        nodes = self._candidates(slots[0].index)
        failure: TiffinError | None = None
        for number in nodes:
            left_s = until_s(deadline)
            if not left_s and isinstance(failure, DeadlineExceeded):
                break  # each further silent node would cost another GRACE_S
            room_s = left_s if len(nodes) == 1 else min(left_s, ROOM_WAIT_S)
            try:
                if self._reserve_at(number, slots, time.monotonic() + room_s):
                    self.node = number
                    return
            except (ClientClosed, InvalidInput):
                raise
            except TiffinError as error:
                log.info("not reserved at node %d: %s", number, error)
                failure = error
                if isinstance(error, NodeUnavailable | DeadlineExceeded):
                    self._nodes.driver.links.failed(number, time.monotonic())
        if failure is not None:
            raise failure
        raise NoRoom(
            "no node has room to publish these blocks; they can still be committed, which waits"
        )

    def _candidates(self, first: int) -> list[int]:
        """The candidates: only the node that the caller named; else a holder of the block before
        `first`, so that a reader finds the whole prompt there, and then nodes that may have room.
        """
        if self._named is not None:
            return [self._named]
        driver, schema = self._nodes.driver, self.prefix.schema
        nodes = driver.nodes()
        down = driver.links.down(time.monotonic())
        before = self._nodes.locate(self.prefix.keys[first - 1 : first])[0] if first else ()
        able = [n for n in before if n in nodes and n not in down and not nodes[n].draining]
        size = len(self._slots) * schema.extent_bytes
        others = place(nodes, TRIES_MAX, size, driver.dice, without={*able, *down})
        return [*able[:1], *others] or place(nodes, TRIES_MAX, size, driver.dice)

    def _reserve_at(self, number: int, slots: list[Slot], deadline: float) -> bool:
        """Make one reservation per run of consecutive slots. False if the node granted nothing and
        knows none of the blocks (no room): then another node may take them."""
        peer = self._nodes.driver.peer(number)
        made: list[RemoteReservation] = []
        resident, busy = [], []
        seals = self._seals()
        try:
            for first, part in consecutive(slots):
                reply, reservation = reserve(peer, seals, first, len(part), deadline)
                if reservation is not None:
                    made.append(reservation)
                for slot, status in zip(part, reply.statuses, strict=False):
                    if status == ReserveStatus.RESIDENT:
                        resident.append(slot.index)
                    elif status == ReserveStatus.BUSY:
                        busy.append(slot.index)
                if len(reply.statuses) < len(part):
                    break  # no room for the rest: the commit puts it to other nodes
        except BaseException:
            self._abort(made)
            raise
        if not (made or resident or busy):
            return False
        self._reservations[:] = made
        self._asked = True
        self.resident = tuple(sorted({*self.resident, *resident}))
        self.busy = tuple(busy)
        return True

    def _seals(self) -> BlockSeals:
        views = {slot.index: slot.view for slot in self._slots}
        nothing = np.zeros(0, np.uint8)  # of a block without a slot, which is never reserved
        payloads = [views.get(index, nothing) for index in range(len(self.prefix))]
        return BlockSeals(self.prefix, payloads, self._selection)

    def _skipped(self) -> set[int]:
        return {slot.index for slot in self._slots if slot.skipped}

    # -- ending ----------------------------------------------------------------------------------

    @in_one_piece
    def commit(self) -> None:
        """Send the written bytes that the node does not have yet (for a rank, of its slice), and
        commit. Raises NoRoom, NodeUnavailable; StaleLease for a rank whose reservation was lost:
        then the other ranks' reservations are lost as well."""
        self._check_published()
        self._end()
        try:
            deadline = time.monotonic() + self._timeout_s
            deadlines.Within(self._timeout_s).run(lambda: self._commit(deadline))
        finally:
            for slot in self._slots:
                slot.let_go()

    def _commit(self, deadline: float) -> None:
        stored, pending, done = self._commit_reserved(deadline)
        if self._lost is None:
            # The first publication found these resident, or reserved by other writers.
            done |= {*self.resident, *self.busy}
        left = [slot for slot in self._slots if not slot.skipped and slot.index not in done]
        for first, part in consecutive(left):
            piece = self.prefix[first : first + len(part)]
            views, shard = [slot.view for slot in part], self._selection.shard
            result = self._nodes.put(piece, views, shard, until_s(deadline), node=self._named)
            stored += [first + index for index in result.stored]
            pending += [first + index for index in result.pending]
        self.stored, self.pending = tuple(sorted(stored)), tuple(sorted(pending))

    def _commit_reserved(self, deadline: float) -> tuple[list[int], list[int], set[int]]:
        """Commit the reservations: the positions that are stored and pending now, and all that the
        node has decided on."""
        stored: list[int] = []
        pending: list[int] = []
        done: set[int] = set()
        while self._reservations:
            reservation = self._reservations.pop(0)
            try:
                kept = reservation.commit(deadline, self._skipped())
            except StaleLease as error:
                self._note_lost(error)
                continue
            except (NodeUnavailable, DeadlineExceeded, ProtocolError) as error:
                # All reservations are at this node: each further commit would time out again.
                self._give_up(error)
                self._note_lost(error)
                if self.node is not None:
                    self._nodes.driver.links.failed(self.node, time.monotonic())
                continue
            except BaseException as error:
                self._give_up(error)
                raise
            for index, flag in zip(reservation.indices, kept, strict=True):
                done.add(index)
                if flag == Kept.STORED:
                    stored.append(index)
                elif flag == Kept.PENDING:
                    pending.append(index)
        if self._lost is not None and self._selection.shard is not None:
            raise StaleLease(f"the reservation of this rank was lost: {self._lost}")
        if stored and self.node is not None:
            keys = [self.prefix.keys[index] for index in stored]
            self._nodes.driver.placements.note(self.node, keys, time.monotonic())
        return stored, pending, done

    def _note_lost(self, error: TiffinError) -> None:
        self._lost = error
        log.info("what was published is put anew: %s", error)

    @in_one_piece
    def abort(self) -> None:
        """Abort the reservation and release the slots; readers can't read any of it any more."""
        if self._inherited:
            return
        self._end()
        self._abort(self._reservations)
        for slot in self._slots:
            slot.let_go()

    def _abort(self, reservations: Sequence[RemoteReservation]) -> None:
        """Abort reservations: once the post for one has timed out, the rest are aborted in the
        background. If the client closes first, they end with its session."""
        for index, reservation in enumerate(reservations):
            began = time.monotonic()
            reservation.abort()
            rest = reservations[index + 1 :]
            if rest and time.monotonic() - began >= POST_TIMEOUT_S:
                with contextlib.suppress(ClientClosed):
                    self._nodes.driver._submit(_abort_each, rest)
                return


def _abort_each(reservations: Sequence[RemoteReservation]) -> None:
    for reservation in reservations:
        reservation.abort()


def _resident_at(nodes: StagingNodes, node: int, prefix: Prefix, timeout_s: float) -> list[bool]:
    check_blocks(prefix)
    if not len(prefix):
        return []
    reply = nodes.driver.ask(node, messages.Exists(0, prefix.key_bytes), timeout_s)
    return [bool(flag) for flag in reply.flags]


def consecutive(slots: Sequence[Slot]) -> list[tuple[int, list[Slot]]]:
    """Runs of slots that are consecutive in the prefix: the first one's position, and the slots."""
    runs: list[tuple[int, list[Slot]]] = []
    for slot in slots:
        if runs and runs[-1][0] + len(runs[-1][1]) == slot.index:
            runs[-1][1].append(slot)
        else:
            runs.append((slot.index, [slot]))
    return runs
