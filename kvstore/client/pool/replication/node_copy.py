"""Copies blocks from another node into this one: extents as they are, header and payload.

A node knows no schemas. It reads whole extents, verifies each by the extent's own header, writes
the offset and the generation that the block has here into the header, and commits it like any
writer.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, NamedTuple

from tiffin.messenger.budget import SHARED, STREAM_BYTES, Priority
from tiffin.messenger.transport import Range

from ....deadlines import until_s
from ....errors import CorruptBlock, NoRoom, VersionMismatch
from ....format.header import relocate_header
from ....memory.arena import Extent
from ....node.core import messages
from ....node.core.node_core import KEY_BYTES, ReserveStatus, split_keys
from ....node.core.records import Reason
from ....node.mover import verify_extent
from ..remote.peer import as_ours

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tiffin.messenger.shm.host_copy import ByteArray as Bytes

    from ....node.node import Node
    from ...connection.node_link import LocalLink
    from ..remote.peer import Peer

log = logging.getLogger(__name__)

# Limits of the blocks that a copy leases from the source, and reserves here, at a time: it must not
# take the room that readers and writers of this node need, nor the whole in-flight budget.
AT_ONCE_BYTES = 64 << 20
AT_ONCE_BLOCKS = 64
# How long to wait for room here: another node may have some.
ROOM_WAIT_S = 1.0


class Copier:
    """Copies from `peer` into `node`, by reservations over its local link `home`."""

    def __init__(
        self, peer: Peer, node: Node, home: LocalLink, priority: Priority = Priority.BACKGROUND
    ) -> None:
        self._priority = priority
        self._peer = peer
        self._node = node
        self._home = home

    def copy(self, keys: bytes, parent: bytes, depth: int, deadline: float) -> int:
        """Copy those of `keys`, consecutive blocks of one prefix, that this node lacks.

        Returns how many leading blocks of them this node has afterwards. Raises NodeUnavailable and
        DeadlineExceeded when the source is lost, Draining when this node takes no blocks, and
        NoRoom when it has room for none of them.
        """
        done = 0
        total = len(keys) // KEY_BYTES
        while done < total:
            rest = keys[done * KEY_BYTES :]
            here = len(self._node.match(rest))
            if here:
                done += here
                parent = keys[(done - 1) * KEY_BYTES : done * KEY_BYTES]
                continue
            if time.monotonic() >= deadline:
                break
            part = _Part(rest[: AT_ONCE_BLOCKS * KEY_BYTES], parent, depth + done, deadline)
            try:
                copied = self._copy_part(part)
            except NoRoom:
                if not done:
                    raise
                break
            # Another writer may have stored the block meanwhile.
            if not copied and not self._node.match(part.keys[:KEY_BYTES]):
                break
        return done

    def _copy_part(self, part: _Part) -> int:
        """Lease from the source, reserve here, ask the source once more, read, verify, commit; how
        many were committed."""
        left_s = part.left_s()
        leased = self._peer.call(messages.Lease(0, part.keys, left_s), left_s)
        if not leased.lease:
            return 0
        try:
            return self._copy_leased(part, leased)
        finally:
            self._peer.post(messages.Release(0, leased.lease))

    def _copy_leased(self, part: _Part, leased: messages.Leased) -> int:
        keys = part.keys[: _alike(leased.lengths) * KEY_BYTES]
        length = leased.lengths[0]
        room_s = min(part.left_s(), ROOM_WAIT_S)
        request = messages.Reserve(0, keys, part.parent, part.depth, length, room_s, copy=True)
        reserved, _ = self._home.call(request, room_s)
        if reserved.reason == Reason.NO_ROOM and not reserved.statuses:
            raise NoRoom(f"node {self._node.name} has no room for a block of {length} bytes")
        if not reserved.lease:
            return 0
        try:
            skip = self._removed_meanwhile(part, reserved)
            skip += self._move(part, leased, reserved)
            commit = messages.Commit(0, reserved.lease, skip)
            answer, _ = self._home.call(commit, part.left_s())
        except BaseException:
            self._home.post(messages.Abort(0, reserved.lease))
            raise
        return sum(answer.flags)

    def _removed_meanwhile(self, part: _Part, reserved: messages.Reserved) -> list[int]:
        """The slots of blocks that the source had when they were leased and has no more. A removal
        that came to this node before the reservation is seen here; one that comes later ends the
        reservation."""
        left_s = part.left_s()
        there = self._peer.call(messages.Exists(0, part.keys), left_s).flags
        return [slot for slot, index in enumerate(_granted(reserved)) if not there[index]]

    def _move(self, part: _Part, leased: messages.Leased, reserved: messages.Reserved) -> list[int]:
        """Read the blocks whose slots were granted, and report corrupt ones to the source; returns
        the slots that the commit has to skip."""
        length = leased.lengths[0]
        granted = _granted(reserved)
        targets = [self._node.dram.view(Extent(offset, length)) for offset in reserved.offsets]
        ranges = [Range(index * length, length) for index in granted]
        nbytes = min(length * len(ranges), STREAM_BYTES)
        with (
            as_ours(self._peer.label),
            SHARED.hold(nbytes, self._priority, part.deadline),
        ):
            self._peer.transport.read(leased.lease, ranges, targets, deadline=part.deadline)
        names = split_keys(part.keys)
        skip = _prove(names, leased, granted, targets, reserved)
        for index in (granted[slot] for slot in skip):
            self._peer.post(messages.Report(0, names[index], leased.generations[index]))
        return skip


class _Part(NamedTuple):
    """Consecutive blocks that are copied at a time: joined keys, the key before them, the first
    one's depth."""

    keys: bytes
    parent: bytes
    depth: int
    deadline: float

    def left_s(self) -> float:
        return until_s(self.deadline)


def _granted(reserved: messages.Reserved) -> list[int]:
    """The positions of the blocks that got slots."""
    return [i for i, status in enumerate(reserved.statuses) if status == ReserveStatus.GRANTED]


def _alike(lengths: list[int]) -> int:
    """How many leading blocks have the same size, and together at most AT_ONCE_BYTES; at least
    one."""
    same = 0
    while same < len(lengths) and lengths[same] == lengths[0]:
        same += 1
    return min(same, max(1, AT_ONCE_BYTES // lengths[0]))


def _prove(
    names: Sequence[bytes],
    leased: messages.Leased,
    granted: list[int],
    targets: list[Bytes],
    reserved: messages.Reserved,
) -> list[int]:
    """Verify every block that arrived, and write its offset and generation here into its header;
    the slots that failed."""
    failed = []
    for slot, index in enumerate(granted):
        view = targets[slot]
        try:
            verify_extent(
                view, names[index], leased.generations[index], offset=leased.offsets[index]
            )
            relocate_header(
                view,
                extent_offset=reserved.offsets[slot],
                generation=reserved.generations[slot],
            )
        except (CorruptBlock, VersionMismatch) as error:
            log.warning("a copied block is not kept: %s", error)
            failed.append(slot)
    return failed


__all__ = ["Copier"]
