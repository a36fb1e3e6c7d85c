"""Slots of a writer that has no node on its host: memory of this process, sent over the network.

Nobody is asked for room before the first layer is published, or the slots are committed. From the
first publication on there is a reservation at one node; every layer is written into it as it is
published, and the commit sends what is missing. If that node, or the reservation, is lost, the
slots still have every byte: who follows learns that it was given up, and the commit puts all of it
as if nothing had been published.
"""

from __future__ import annotations

import contextlib
import logging
import time
from typing import TYPE_CHECKING

import numpy as np

from ..blocks import Slot, select_shard
from ..client import Slots
from ..errors import (
    ClientClosed,
    DeadlineExceeded,
    InvalidInput,
    NodeUnavailable,
    NoRoom,
    ProtocolError,
    StaleLease,
    TiffinError,
)
from ..node import messages
from ..node.core import Status
from ..node.records import Kept
from ..streaming import segments_of
from ..verbs import DEFAULT_TIMEOUT_S, Reserved, check_blocks, check_timeout
from .peer import POST_TIMEOUT_S
from .placing import ROOM_WAIT_S, TRIES_MAX
from .plan import place
from .store import Early, reserve_early

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..keys import Prefix
    from ..schema import Shard
    from .client import PoolClient

log = logging.getLogger(__name__)


class StagedSlots(Slots):
    """Slots of a client without a home, or for another node than home. `node`: where they are
    published and committed; without one that was asked for, known after the first `publish`."""

    def __init__(
        self,
        prefix: Prefix,
        client: PoolClient,
        timeout_s: float,
        deadline: float,
        shard: Shard | None = None,
        node: int | None = None,
    ) -> None:
        """`timeout_s` is for the commit; what is resident is asked for until `deadline`: in the
        pool or, where others rely on it, at `node`. Raises what is met there."""
        selection, size = select_shard(prefix.schema, shard), prefix.schema.extent_bytes
        if node is None:
            flags = client.exists(prefix, timeout_s=_left_s(deadline))
        else:
            flags = _resident_at(client, node, prefix, _left_s(deadline))
        slots = [
            Slot(np.zeros(size, np.uint8), selection, index, 0, 0)
            for index, resident in enumerate(flags)
            if not resident
        ]
        resident = tuple(index for index, flag in enumerate(flags) if flag)
        super().__init__(prefix, Reserved(slots, 0, resident), None)  # type: ignore[arg-type]
        self.node = node
        self._client = client
        self._timeout_s = timeout_s
        self._selection = selection
        self._named = node
        self._published: set[int] = set()
        self._early: list[Early] = []
        self._asked = False  # whether a node has said which of the slots it grants
        self._lost: TiffinError | None = None

    # -- publishing ------------------------------------------------------------------------------

    def publish(self, layer: int, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Send this layer of all slots (but skipped ones) to the node, where `stream` may read it
        before the commit; what is changed here afterwards is not sent again.

        Raises StaleLease when the node or the reservation is lost, now or before: readers are told,
        and the commit still stores the blocks. SchemaError; InvalidInput for a layer that was
        published before; NoRoom, NodeUnavailable if no node takes the slots.
        """
        self._check_open()
        deadline = time.monotonic() + check_timeout(timeout_s)
        segments = segments_of(self._selection, layer)
        if layer in self._published:
            raise InvalidInput("published before: what is published must not change any more")
        if self._lost is not None:
            raise StaleLease(f"the reservation was lost, so nothing can be published: {self._lost}")
        wanted = [slot for slot in self._slots if not slot.skipped]
        if not segments or not wanted:
            return
        if not self._asked:  # not again: what would be granted then lacks the layers before
            self._reserve(wanted, deadline)
        try:
            for early in self._early:
                early.publish(segments, deadline)
        except BaseException as error:
            self._give_up(error)
            if isinstance(error, NodeUnavailable | DeadlineExceeded):
                raise StaleLease(f"layer {layer} was not published: {error}") from error
            raise
        self._published.add(layer)

    def _give_up(self, error: BaseException) -> None:
        """How much of a layer is there nobody knows: the reservation ends, and who follows it."""
        self._abort(self._early)
        self._early = []
        self._lost = error if isinstance(error, TiffinError) else StaleLease(repr(error))

    def _reserve(self, slots: list[Slot], deadline: float) -> None:
        """Reserve at the first node that has room. Raises NoRoom, or what the last one met."""
        nodes = self._candidates(slots[0].index)
        failure: TiffinError | None = None
        for number in nodes:
            left_s = _left_s(deadline)
            if not left_s and isinstance(failure, DeadlineExceeded):
                break  # each further one that is silent would cost its own grace
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
                    self._client._engine.links.failed(number, time.monotonic())
        if failure is not None:
            raise failure
        raise NoRoom(
            "no node has room to publish these blocks; they can still be committed, which waits"
        )

    def _candidates(self, first: int) -> list[int]:
        """Nodes to ask: the named one; else who has the block before, so that a reader finds all of
        the prompt there, and then whoever has room."""
        if self._named is not None:
            return [self._named]
        engine, schema = self._client._engine, self.prefix.schema
        nodes = engine.nodes()
        down = engine.links.down(time.monotonic())
        before = self._client._locate(self.prefix.keys[first - 1 : first])[0] if first else ()
        able = [n for n in before if n in nodes and n not in down and not nodes[n].draining]
        size = len(self._slots) * schema.extent_bytes
        others = place(nodes, TRIES_MAX, size, engine.dice, without={*able, *down})
        return [*able[:1], *others] or place(nodes, TRIES_MAX, size, engine.dice)

    def _reserve_at(self, number: int, slots: list[Slot], deadline: float) -> bool:
        """One reservation for each run of neighbours; whether any slot, or nothing, is left to be
        written there."""
        peer = self._client._engine.peer(number)
        made: list[Early] = []
        resident, busy = [], []
        try:
            for first, part in consecutive(slots):
                piece = self.prefix[first : first + len(part)]
                reply, early = reserve_early(peer, piece, part, self._selection, deadline)
                if early is not None:
                    made.append(early)
                for slot, status in zip(part, reply.statuses, strict=False):
                    if status == Status.RESIDENT:
                        resident.append(slot.index)
                    elif status == Status.BUSY:
                        busy.append(slot.index)
                if len(reply.statuses) < len(part):
                    break  # no room for the rest: the commit finds it elsewhere
        except BaseException:
            self._abort(made)
            raise
        if not (made or resident or busy):
            return False
        self._early = made
        self._asked = True
        self.resident = tuple(sorted({*self.resident, *resident}))
        self.busy = tuple(busy)
        return True

    # -- ending ----------------------------------------------------------------------------------

    def commit(self) -> None:
        """Send what was written and is not there yet, of one rank its slice. Raises NoRoom,
        NodeUnavailable; StaleLease for a rank whose reservation was lost: the others' is as well.
        """
        self._end()
        deadline = time.monotonic() + self._timeout_s
        try:
            stored, pending, done = self._commit_early(deadline)
            if self._lost is None:
                # Known to be there, or another writer is at it, since the first publication.
                done |= {*self.resident, *self.busy}
            left = [slot for slot in self._slots if not slot.skipped and slot.index not in done]
            for first, part in consecutive(left):
                piece = self.prefix[first : first + len(part)]
                result = self._client.put(
                    piece,
                    [slot.view for slot in part],
                    shard=self._selection.shard,
                    node=self._named,
                    timeout_s=_left_s(deadline),
                )
                stored += [first + index for index in result.stored]
                pending += [first + index for index in result.pending]
            self.stored, self.pending = tuple(sorted(stored)), tuple(sorted(pending))
        finally:
            for slot in self._slots:
                slot.let_go()

    def _commit_early(self, deadline: float) -> tuple[list[int], list[int], set[int]]:
        """Positions that are stored and pending now, and all that were decided on."""
        stored: list[int] = []
        pending: list[int] = []
        done: set[int] = set()
        while self._early:
            early = self._early.pop(0)
            try:
                kept = early.commit(deadline)
            except StaleLease as error:
                self._note_lost(error)
                continue
            except (NodeUnavailable, DeadlineExceeded, ProtocolError) as error:
                self._give_up(error)  # all are at this node, which would cost its time once more
                self._note_lost(error)
                if self.node is not None:
                    self._client._engine.links.failed(self.node, time.monotonic())
                continue
            except BaseException as error:
                self._give_up(error)
                raise
            for slot, flag in zip(early.slots, kept, strict=True):
                done.add(slot.index)
                if flag == Kept.STORED:
                    stored.append(slot.index)
                elif flag == Kept.PENDING:
                    pending.append(slot.index)
        if self._lost is not None and self._selection.shard is not None:
            raise StaleLease(f"the reservation of this rank was lost: {self._lost}")
        if stored and self.node is not None:
            keys = [self.prefix.keys[index] for index in stored]
            self._client._engine.placements.note(self.node, keys, time.monotonic())
        return stored, pending, done

    def _note_lost(self, error: TiffinError) -> None:
        self._lost = error
        log.info("what was published is put anew: %s", error)

    def abort(self) -> None:
        """Forget what was written; nothing of it is to be had any more."""
        self._end()
        self._abort(self._early)
        for slot in self._slots:
            slot.let_go()

    def _abort(self, reservations: Sequence[Early]) -> None:
        """Give them back: once the node took too long to be told of one, the rest are told in the
        background. With a client that closes first, they end with its session."""
        for index, early in enumerate(reservations):
            began = time.monotonic()
            early.abort()
            rest = reservations[index + 1 :]
            if rest and time.monotonic() - began >= POST_TIMEOUT_S:
                with contextlib.suppress(ClientClosed):
                    self._client._engine._submit(_abort_each, rest)
                return


def _abort_each(reservations: Sequence[Early]) -> None:
    for early in reservations:
        early.abort()


def _resident_at(client: PoolClient, node: int, prefix: Prefix, timeout_s: float) -> list[bool]:
    check_blocks(prefix)
    if not len(prefix):
        return []
    reply = client._engine.ask(node, messages.Exists(0, prefix.key_bytes), timeout_s)
    return [bool(flag) for flag in reply.flags]


def _left_s(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())


def consecutive(slots: Sequence[Slot]) -> list[tuple[int, list[Slot]]]:
    """Runs of neighbours in the prefix: the position of the first, and the slots."""
    runs: list[tuple[int, list[Slot]]] = []
    for slot in slots:
        if runs and runs[-1][0] + len(runs[-1][1]) == slot.index:
            runs[-1][1].append(slot)
        else:
            runs.append((slot.index, [slot]))
    return runs
