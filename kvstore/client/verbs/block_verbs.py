"""The verbs of a client of one node: what is asked over a link, and what is done with the bytes.

A verb that an exception ends in the middle gives back its leases and reservations, which otherwise
also end when nobody refers to them any more (`lease_lifetime.py`).

Verification. Under every policy, a verb checks each block's header before it returns the block's
bytes: header checksum, key, parent, schema, namespace, generation, and the token ids, which are in
the prefix. That costs a few microseconds a block. `verify` decides about the payload: "always"
compares every touched segment's checksum, "sampled" those of one block in SAMPLE_BLOCKS, "off"
none.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

from ... import deadlines
from ...deadlines import GRACE_S, until_s
from ...errors import DeadlineExceeded, NoRoom
from ...format.header_writer import check_shard_blocks, seal, shard_blocks_max, shard_header
from ...node.core import messages
from ...node.core.node_core import ReserveStatus
from ...node.core.records import BEING_WRITTEN, IN_DRAM, Kept, Reason
from ...sizes import format_bytes
from ...tiers.base import TierName
from ..blocks.block_views import Block, Blocks, Selection, Slot, select_shard
from ..blocks.leased_extents import LeasedExtents, check
from ..blocks.selection_copy import all_checksums, checksums_of, copy_hashed, source_views
from .arguments import Verify, check_blocks, check_ttl

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from ...format.key_space import KeySpace
    from ...format.keys import Prefix
    from ...format.schema import AnyShard
    from ..connection.node_link import NodeLink

    Bytes = NDArray[np.uint8]

SAMPLE_BLOCKS = 16
# The longest time that a node parks one request of a reader that waits for a writer; after it the
# reader asks again: a remote node's thread notices a lost client only when it answers.
POLL_S = 2.0
DEFAULT_TIMEOUT_S = 5.0

# Blocks are checked and copied in batches, which share the cost of a step; a large batch is shared
# by two threads (`host_copy`). It takes some 2 ms.
WORK_BYTES = 32 << 20
WORK_BLOCKS_MAX = 64

# A put reserves at most 1/PUT_SHARE of the node's DRAM at a time, so that one long prompt does not
# crowd out other writers' blocks while it is being written.
PUT_SHARE = 4

T = TypeVar("T")


def work(link: NodeLink, action: Callable[[], T]) -> T:
    """Run `action`, which copies or hashes bytes of the region and may take milliseconds: the time
    is not the node's."""
    began = time.monotonic()
    outcome = link.gate.run(action)
    deadlines.worked(time.monotonic() - began)
    return outcome


@dataclass(frozen=True, slots=True)
class Hit:
    """How much of a prefix is resident: leading `blocks`, and the `tokens` they cover.

    `where` has one byte per block, a bit mask of its tiers (bit 0: DRAM, bit 1: NVMe). In a match
    of what is being `writing`, too, BEING_WRITTEN is set for blocks that are not stored yet.
    """

    blocks: int
    tokens: int
    where: bytes = b""

    @property
    def tiers(self) -> tuple[TierName, ...]:
        """The fastest tier of each block; blocks are written in DRAM."""
        in_dram = IN_DRAM | BEING_WRITTEN
        return tuple(TierName.DRAM if w & in_dram else TierName.NVME for w in self.where)

    @property
    def stored(self) -> int:
        """How many leading blocks are stored: `blocks`, up to the first that is being written."""
        written = (index for index, w in enumerate(self.where) if w & BEING_WRITTEN)
        return next(written, self.blocks)


@dataclass(frozen=True, slots=True)
class PutResult:
    """The outcome of a put for each block, as positions in the prefix.

    `stored`: written now. `resident`: in the pool already. `busy`: another writer has reserved it.
    `refused`: the node did not accept it, or another rank of a shared write aborted. `pending`:
    this rank's slice is written, other ranks' slices are not yet. `reason` is why the remaining
    blocks are not stored: "no_room", or "deadline": the deadline passed, or the node did not
    confirm the commit, in which case it may have stored them all the same.
    """

    stored: tuple[int, ...]
    resident: tuple[int, ...]
    busy: tuple[int, ...]
    refused: tuple[int, ...]
    reason: str | None
    pending: tuple[int, ...] = ()

    @property
    def complete(self) -> bool:
        """Whether every block of the prefix is in the pool now."""
        return self.reason is None and not (self.busy or self.refused or self.pending)


class Access(NamedTuple):
    """The verification policy of a read, and the random generator that it samples with."""

    verify: Verify
    dice: random.Random

    def checks_payload(self) -> bool:
        """Whether to verify the payload of the next block."""
        if self.verify == "sampled":
            return self.dice.randrange(SAMPLE_BLOCKS) == 0
        return self.verify == "always"


# -- looking ---------------------------------------------------------------------------------------


def match(
    link: NodeLink, prefix: Prefix, timeout_s: float, *, writing: bool = False, at_least: int = 0
) -> Hit:
    """Count the leading blocks that are resident, with `writing` also those that are being written.
    Waits for `at_least` so many."""
    if not len(prefix):
        return Hit(0, 0)
    deadline, at_least = time.monotonic() + timeout_s, min(at_least, len(prefix))
    while True:
        began, left_s = time.monotonic(), until_s(deadline)
        wait_s = min(left_s, POLL_S) if at_least else 0.0
        request = messages.Match(0, _keys(prefix), writing, at_least, wait_s)
        reply, _ = link.call(request, left_s)
        where, now = reply.flags, time.monotonic()
        # A node that does not wait must not be asked again and again.
        if len(where) >= at_least or now >= deadline or now - began < wait_s:
            return Hit(len(where), len(where) * prefix.schema.block_tokens, where)


def exists(link: NodeLink, prefix: Prefix, timeout_s: float) -> list[bool]:
    """Tell for each block whether it is resident, regardless of the blocks before it."""
    if not len(prefix):
        return []
    reply, _ = link.call(messages.Exists(0, _keys(prefix)), timeout_s)
    return [bool(flag) for flag in reply.flags]


def pin(link: NodeLink, prefix: Prefix, level: int, ttl_s: float | None, timeout_s: float) -> int:
    """Pin or unpin the resident blocks."""
    until_s = check_ttl(ttl_s)
    if not len(prefix):
        return 0
    request = messages.Pin(0, _keys(prefix), level, until_s)
    reply, _ = link.call(request, timeout_s)
    return int(reply.count)


def remove(link: NodeLink, prefix: Prefix, timeout_s: float) -> int:
    """Remove the resident blocks."""
    if not len(prefix):
        return 0
    reply, _ = link.call(messages.Remove(0, _keys(prefix), timeout_s), timeout_s)
    return int(reply.count)


def announce(link: NodeLink, space: KeySpace, timeout_s: float) -> None:
    """Say what the keys of this client's blocks are made of."""
    link.call(messages.Announce(0, space.encoded()), timeout_s)


def statistics(link: NodeLink, timeout_s: float) -> dict[str, Any]:
    """The node's tiers, counters and sessions."""
    reply, _ = link.call(messages.Statistics(0), timeout_s)
    return cast("dict[str, Any]", reply.numbers)


# -- reading ---------------------------------------------------------------------------------------


def get(
    link: NodeLink, prefix: Prefix, access: Access, selection: Selection, timeout_s: float
) -> tuple[Blocks, int]:
    """Lease the leading blocks and view them in place. Returns them and the lease's id."""
    if not len(prefix):
        return Blocks(prefix, 0, None, _no_block), 0
    reply, memory = link.call(messages.Lease(0, _keys(prefix), timeout_s), timeout_s)
    leased = LeasedExtents(prefix, memory, reply)
    try:
        good = _checked(link, leased, access, selection, [])
    except BaseException:
        link.post(messages.Release(0, reply.lease))
        raise
    reason = _why(reply.reason) if good == len(reply.offsets) else "corrupt"
    return Blocks(prefix, good, reason, partial(leased.block, selection)), reply.lease


def _no_block(index: int) -> Block:
    raise IndexError(index)


def get_into(
    link: NodeLink,
    prefix: Prefix,
    access: Access,
    selection: Selection,
    targets: Sequence[Bytes],
    timeout_s: float,
) -> Blocks:
    """Copy the leading blocks into their targets; leases as many at a time as fit in the DRAM."""
    deadline = time.monotonic() + timeout_s
    generations: list[int] = []
    reason: str | None = None
    while len(generations) < len(prefix):
        done = len(generations)
        if done and time.monotonic() >= deadline:
            reason = "deadline"
            break
        rest = prefix[done:]
        left_s = until_s(deadline)
        reply, memory = link.call(messages.Lease(0, _keys(rest), left_s), left_s)
        leased = LeasedExtents(rest, memory, reply)
        try:
            good = _checked(link, leased, access, selection, targets[done:])
        except BaseException:
            link.post(messages.Release(0, reply.lease))
            raise
        if reply.lease:
            link.post(messages.Release(0, reply.lease))
        generations += reply.generations[:good]
        reason = _why(reply.reason) if good == len(reply.offsets) else "corrupt"
        if not good or reason not in (None, "no_room"):
            break
    count = len(generations)

    def make(index: int) -> Block:
        target, key = targets[index], prefix.keys[index]
        return Block(target, selection, key, generations[index], packed=True)

    return Blocks(prefix, count, None if count == len(prefix) else reason, make)


def _checked(
    link: NodeLink,
    leased: LeasedExtents,
    access: Access,
    selection: Selection,
    targets: Sequence[Bytes],
) -> int:
    """Check the leased blocks, and copy them if there are `targets`. Returns how many leading
    blocks were good, and reports the first corrupt one to the node."""
    count, good = len(leased.offsets), 0
    touches_payloads = bool(targets) or access.verify != "off"
    at_once = blocks_at_once(selection.nbytes) if touches_payloads else WORK_BLOCKS_MAX
    while good < count:
        sample = [access.checks_payload() for _ in range(min(at_once, count - good))]
        action = partial(check, leased, selection, targets, good, sample)
        stop = good + len(sample)
        good = work(link, action)
        if good < stop:
            key, generation = leased.prefix.keys[good], leased.generations[good]
            link.post(messages.Report(0, key, generation))
            break
    return good


# -- writing ---------------------------------------------------------------------------------------


def put(
    link: NodeLink,
    prefix: Prefix,
    payloads: Sequence[Any],
    timeout_s: float,
    shard: AnyShard | None = None,
    *,
    until: float = math.inf,
    alone: bool = True,
) -> PutResult:
    """Copy payloads into the pool and checksum them on the way; resident blocks are skipped. Waits
    up to `timeout_s` for room; the put's own deadline may be later, `until`.

    If the node stops answering after it has granted a reservation, the result has the reason
    "deadline" and does not count the unconfirmed blocks, which the node may have stored all the
    same. Unless `alone` is false: then DeadlineExceeded is raised, as another node may take the
    blocks.
    """
    schema = prefix.schema
    selection = select_shard(schema, shard)
    views = source_views(selection, payloads, len(prefix))
    deadline = time.monotonic() + timeout_s
    until = deadline if until == math.inf else until
    at_once = max(1, link.mapping.memory.nbytes // PUT_SHARE // schema.extent_bytes)
    if selection.shard is not None:
        at_once = min(at_once, shard_blocks_max(schema))
    outcome = empty_outcome()
    position, reason = 0, None
    granted = False
    while position < len(prefix):
        if position and time.monotonic() >= until:
            reason = "deadline"  # start no further part
            break
        part = prefix[position : position + at_once]
        try:
            reply, slots = _reserve(link, part, selection, deadline)
            granted = True
            sources = [views[position + slot.index] for slot in slots]
            flags = _filled(link, part, reply.lease, slots, sources, until)
        except DeadlineExceeded:
            if not (alone and granted):
                raise
            reason = "deadline"
            break
        note_outcome(outcome, position, reply.statuses, flags)
        position += len(reply.statuses)
        if not reply.statuses:
            reason = _why(reply.reason)
            break
    return PutResult(**{k: tuple(v) for k, v in outcome.items()}, reason=reason)


def _filled(
    link: NodeLink,
    part: Prefix,
    lease: int,
    slots: list[Slot],
    sources: list[Bytes],
    deadline: float,
) -> bytes:
    """Fill and commit reserved slots; after any error, abort the reservation."""
    if not slots:
        return b""
    headers: list[bytes] = []
    try:
        at_once = blocks_at_once(part.schema.block_bytes)
        for i in range(0, len(slots), at_once):
            batch = slots[i : i + at_once], sources[i : i + at_once]
            headers += work(link, partial(_fill, part, *batch))
        # A node may be busy with other clients' commits at the deadline: twice the usual grace.
        left_s = until_s(deadline + GRACE_S)
        reply, _ = link.call(_commit(lease, slots, headers), left_s)
    except BaseException:
        link.post(messages.Abort(0, lease))  # as `commit` does
        raise
    return cast("bytes", reply.flags)


def _fill(prefix: Prefix, slots: Sequence[Slot], sources: Sequence[Bytes]) -> list[bytes]:
    selection = slots[0].selection
    found = copy_hashed([slot.view for slot in slots], sources, selection)
    checksums = all_checksums(selection, found)
    return [_seal(prefix, slot, sums) for slot, sums in zip(slots, checksums, strict=True)]


def empty_outcome() -> dict[str, list[int]]:
    """Empty lists for the fields of a `PutResult`, which `note_outcome` fills."""
    return {"stored": [], "resident": [], "busy": [], "refused": [], "pending": []}


def note_outcome(
    outcome: dict[str, list[int]], position: int, statuses: bytes, kept: bytes
) -> None:
    """Sort the blocks from `position` on into `outcome`, by the statuses of a reservation and the
    flags of its commit."""
    flags = iter(kept)
    for index, status in enumerate(statuses, start=position):
        if status == ReserveStatus.GRANTED:
            # A missing or unknown flag counts as not stored.
            outcome[_KEPT.get(next(flags, Kept.REFUSED), "refused")].append(index)
        else:
            outcome["resident" if status == ReserveStatus.RESIDENT else "busy"].append(index)


_KEPT: dict[int, str] = {Kept.STORED: "stored", Kept.PENDING: "pending"}


@dataclass(frozen=True, slots=True)
class ReservedSlots:
    """Slots for the blocks that were not resident, and positions of those that got none.

    `resident`: in the pool already. `busy`: another writer has reserved it. For the remaining
    blocks, at the end of the prefix, there was no room: `reason` is "no_room" then, else None.
    """

    slots: list[Slot]
    lease: int
    resident: tuple[int, ...] = ()
    busy: tuple[int, ...] = ()
    reason: str | None = None


def reserve(
    link: NodeLink,
    prefix: Prefix,
    timeout_s: float,
    shard: AnyShard | None = None,
    *,
    copy: bool = False,
) -> ReservedSlots:
    """Reserve slots for the blocks that are not resident. `copy`: their bytes come from other nodes
    (`messages.Reserve`). Raises NoRoom."""
    selection = select_shard(prefix.schema, shard)
    if not len(prefix):
        return ReservedSlots([], 0)
    if selection.shard is not None:
        check_shard_blocks(prefix)
    deadline = time.monotonic() + timeout_s
    reply, slots = _reserve(link, prefix, selection, deadline, copy=copy)
    if not reply.statuses and reply.reason == Reason.NO_ROOM:
        raise NoRoom(
            f"no room for a block of {format_bytes(prefix.schema.extent_bytes)} within "
            f"{timeout_s} s: everything else is leased, pinned, being written, "
            "or an ancestor of this block"
        )
    resident, busy = (
        tuple(i for i, status in enumerate(reply.statuses) if status == wanted)
        for wanted in (ReserveStatus.RESIDENT, ReserveStatus.BUSY)
    )
    return ReservedSlots(slots, reply.lease, resident, busy, _why(reply.reason))


def commit(
    link: NodeLink,
    prefix: Prefix,
    slots: Sequence[Slot],
    lease: int,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> bytes:
    """Make the blocks written in place visible, with checksums of what was not published before.
    Returns a `Kept` per slot."""
    if not slots:
        return b""
    headers: list[bytes] = []
    try:
        at_once = blocks_at_once(prefix.schema.block_bytes)
        for i in range(0, len(slots), at_once):
            headers += work(link, partial(_seal_in_place, prefix, slots[i : i + at_once]))
        reply, _ = link.call(_commit(lease, slots, headers), timeout_s)
    except BaseException:
        # Also if the commit was never sent. If it was, the abort has no effect.
        link.post(messages.Abort(0, lease))
        raise
    return cast("bytes", reply.flags)


def _commit(lease: int, slots: Sequence[Slot], headers: list[bytes]) -> messages.Commit:
    """The commit request; only ranks of a shared write send headers in it."""
    skip = [i for i, slot in enumerate(slots) if slot.skipped]
    shared = slots[0].selection.shard is not None
    return messages.Commit(0, lease, skip, headers if shared else [])


def reserve_request(prefix: Prefix, selection: Selection, timeout_s: float) -> messages.Reserve:
    """The request to reserve extents for the missing blocks of `prefix`, or for one rank's slice of
    each if `selection` is a shard."""
    request = messages.Reserve(
        0, _keys(prefix), prefix.parent, prefix.start, prefix.schema.extent_bytes, timeout_s
    )
    if selection.shard is not None:
        request.rank, request.ranks = selection.shard.writer, selection.shard.writers
        request.owned = selection.bitmap()
    return request


def _reserve(
    link: NodeLink, prefix: Prefix, selection: Selection, deadline: float, *, copy: bool = False
) -> tuple[messages.Reserved, list[Slot]]:
    """Reserve extents; returns the node's reply and the slots that it granted."""
    left_s = until_s(deadline)
    request = reserve_request(prefix, selection, left_s)
    request.copy = copy
    reply, memory = link.call(request, left_s)
    granted = [i for i, status in enumerate(reply.statuses) if status == ReserveStatus.GRANTED]
    size = prefix.schema.extent_bytes
    slots = [
        Slot(memory[offset : offset + size], selection, index, offset, generation)
        for index, offset, generation in zip(granted, reply.offsets, reply.generations, strict=True)
    ]
    return reply, slots


def _seal_in_place(prefix: Prefix, slots: Sequence[Slot]) -> list[bytes]:
    """What `_seal` returns for each slot; nothing for those that are skipped."""
    selection = slots[0].selection
    fresh = [slot.view for slot in slots if not slot.skipped and slot.published is None]
    found = iter(all_checksums(selection, checksums_of(fresh, selection)))
    headers = []
    for slot in slots:
        if slot.skipped:
            headers.append(b"")
        elif slot.published is None:
            headers.append(_seal(prefix, slot, next(found)))
        else:
            slot.published.complete(slot.view, selection.segments)
            headers.append(_seal(prefix, slot, slot.published.checksums))
    return headers


def _seal(prefix: Prefix, slot: Slot, checksums: NDArray[np.uint64]) -> bytes:
    """Write the block's header into the slot and return b""; one rank of a shared write returns
    its header for the commit request instead."""
    place = {"generation": slot.generation, "offset": slot.offset}
    if slot.selection.shard is not None:
        return shard_header(prefix, slot.index, checksums=checksums, **place)
    seal(slot.extent, prefix, slot.index, checksums=checksums, **place)
    return b""


# -- small -----------------------------------------------------------------------------------------


def blocks_at_once(nbytes: int) -> int:
    """How many blocks of `nbytes` to copy or hash in one step."""
    return max(1, min(WORK_BLOCKS_MAX, WORK_BYTES // nbytes))


def _keys(prefix: Prefix) -> bytes:
    return check_blocks(prefix).key_bytes


def _why(reason: int) -> str | None:
    return None if reason == Reason.NONE else Reason(reason).name.lower()
