"""Copying blocks from another node into this one: extents as they are, header and payload.

A node knows no schemas. It reads whole extents, proves each by its own header, gives the header the
place and generation that it has here, and commits it like any writer.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from tiffin.messenger.transport import Range

from ..arena import Extent
from ..block import relocate_header
from ..errors import CorruptBlock, VersionMismatch
from ..node import messages
from ..node.core import KEY_BYTES, Status, split_keys
from ..node.mover import verify_extent
from .peer import as_ours

if TYPE_CHECKING:
    from tiffin.messenger.local import ByteArray as Bytes

    from ..link import LocalLink
    from ..node.node import Node
    from .peer import Peer

log = logging.getLogger(__name__)

# Blocks that are leased from the source, and reserved here, at a time: a copy must not take the
# room that readers and writers of this node need.
AT_ONCE_BYTES = 256 << 20
AT_ONCE_BLOCKS = 64
# For room here: another node may have some.
ROOM_WAIT_S = 1.0


def copy_from(
    peer: Peer,
    node: Node,
    home: LocalLink,
    keys: bytes,
    parent: bytes,
    depth: int,
    deadline: float,
) -> int:
    """Copy those of `keys`, consecutive blocks of one prefix, that are not here.

    Returns how many leading ones of them are here afterwards. Raises NodeUnavailable and
    DeadlineExceeded when the source is lost, Draining when this node takes nothing.
    """
    done = 0
    total = len(keys) // KEY_BYTES
    while done < total and time.monotonic() < deadline:
        rest = keys[done * KEY_BYTES :]
        here = len(node.match(rest))
        done += here
        if here or done == total:
            parent = keys[(done - 1) * KEY_BYTES : done * KEY_BYTES] if done else parent
            continue
        part = rest[: AT_ONCE_BLOCKS * KEY_BYTES]
        copied = _copy_part(peer, node, home, part, parent, depth + done, deadline)
        if not copied and not node.match(part[:KEY_BYTES]):  # another writer may have brought it
            break
    return done


def _copy_part(
    peer: Peer,
    node: Node,
    home: LocalLink,
    keys: bytes,
    parent: bytes,
    depth: int,
    deadline: float,
) -> int:
    """Lease from the source, reserve here, move, prove, commit; how many blocks were committed."""
    left_s = max(0.0, deadline - time.monotonic())
    leased = peer.call(messages.Lease(0, keys, left_s), left_s)
    if not leased.lease:
        return 0
    try:
        count = _alike(leased.lengths)
        return _copy_leased(peer, node, home, keys, parent, depth, leased, count, deadline)
    finally:
        peer.post(messages.Release(0, leased.lease))


def _alike(lengths: list[int]) -> int:
    """How many leading blocks have one size, and fit what is copied at a time."""
    same = 0
    while same < len(lengths) and lengths[same] == lengths[0]:
        same += 1
    return min(same, max(1, AT_ONCE_BYTES // lengths[0]))


def _copy_leased(
    peer: Peer,
    node: Node,
    home: LocalLink,
    keys: bytes,
    parent: bytes,
    depth: int,
    leased: messages.Leased,
    count: int,
    deadline: float,
) -> int:
    left_s = max(0.0, deadline - time.monotonic())
    length = leased.lengths[0]
    room_s = min(left_s, ROOM_WAIT_S)
    request = messages.Reserve(0, keys[: count * KEY_BYTES], parent, depth, length, room_s)
    reserved, _ = home.call(request, room_s)
    if not reserved.lease:
        return 0
    granted = [i for i, status in enumerate(reserved.statuses) if status == Status.GRANTED]
    targets = [node.dram.view(Extent(offset, length)) for offset in reserved.offsets]
    try:
        with as_ours(peer.label):
            peer.transport.read(
                leased.lease,
                [Range(index * length, length) for index in granted],
                targets,
                deadline=deadline,
            )
        skip = _prove(keys, leased, granted, targets, reserved)
        names = split_keys(keys)
        for index in (granted[slot] for slot in skip):
            peer.post(messages.Report(0, names[index], leased.generations[index]))
        answer, _ = home.call(messages.Commit(0, reserved.lease, skip), left_s)
    except BaseException:
        home.post(messages.Abort(0, reserved.lease))
        raise
    return sum(answer.flags)


def _prove(
    keys: bytes,
    leased: messages.Leased,
    granted: list[int],
    targets: list[Bytes],
    reserved: messages.Reserved,
) -> list[int]:
    """Check every block that arrived and give its header its place here; the slots that failed."""
    names = split_keys(keys)
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


__all__ = ["copy_from"]
