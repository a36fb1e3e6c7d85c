"""Writing blocks of a prefix to one peer: reserve, write in place over the network, commit."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from tiffin.messenger.frames import RANGES_MAX
from tiffin.messenger.transport import Range

from ..blocks import select
from ..errors import StaleLease
from ..link import raise_refusal
from ..node import messages
from ..node.core import Status
from ..node.records import Reason
from ..sealing import seal, shard_blocks_max, shard_header
from ..slices import all_checksums, checksums_of, runs_of
from ..verbs import PUT_SHARE, PutResult, note_outcome, reserve_request
from .peer import as_ours

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ..blocks import Selection
    from ..keys import Prefix
    from .peer import Peer

    Bytes = NDArray[np.uint8]

# Small blocks are committed many at a time; a message lists one status per block.
AT_ONCE_MAX = 256
# A node that takes no byte for so long is cut off: another one takes them.
STALL_S = 2.0


@dataclass(slots=True)
class Stored:
    """What became of the blocks of a put to one peer, as positions in its prefix. `reason` says why
    the rest was not decided on."""

    stored: list[int] = field(default_factory=list)
    resident: list[int] = field(default_factory=list)
    busy: list[int] = field(default_factory=list)
    refused: list[int] = field(default_factory=list)
    pending: list[int] = field(default_factory=list)
    decided: int = 0
    reason: str | None = None

    def result(self) -> PutResult:
        """The same for the caller of a put."""
        lists = (self.stored, self.resident, self.busy, self.refused)
        stored, resident, busy, refused = map(tuple, lists)
        return PutResult(stored, resident, busy, refused, self.reason, tuple(self.pending))


class Seals:
    """The checksums of payloads, hashed once however many replicas are written.

    `selection` is what of each block is written: all of it (None), or one rank's slice, of which
    the payloads are packed copies, or whole blocks (`select_shard`, `source_views`).
    """

    def __init__(
        self, prefix: Prefix, payloads: Sequence[Bytes], selection: Selection | None = None
    ) -> None:
        self.prefix = prefix
        self.payloads = payloads
        self.selection = select(prefix.schema) if selection is None else selection
        self._checksums: dict[int, NDArray[np.uint64]] = {}

    def header(self, index: int, offset: int, generation: int) -> Bytes:
        """The header pages of block `index` for the extent at `offset` of its node."""
        schema, checksums = self.prefix.schema, self._hashed(index)
        pages = np.zeros(schema.header_bytes, np.uint8)
        seal(pages, self.prefix, index, generation=generation, offset=offset, checksums=checksums)
        return pages

    def shard_header(self, index: int, offset: int, generation: int) -> bytes:
        """The same of one rank's slice, as its commit carries it."""
        checksums = self._hashed(index)
        return shard_header(
            self.prefix, index, generation=generation, offset=offset, checksums=checksums
        )

    def _hashed(self, index: int) -> NDArray[np.uint64]:
        checksums = self._checksums.get(index)
        if checksums is None:
            found = checksums_of(self.payloads[index], self.selection)
            checksums = self._checksums[index] = all_checksums(self.selection, found)
        return checksums


def store(
    peer: Peer, seals: Seals, begin: int, *, deadline: float, room_until: float | None = None
) -> Stored:
    """Write the blocks from `begin` on to `peer`, those that it lacks, a share of its DRAM at a
    time. Waits for room until `room_until`, by default the deadline. Raises NodeUnavailable,
    DeadlineExceeded, Draining, InvalidInput: what was stored before stays, and is found as
    resident by who tries again."""
    patience = deadline if room_until is None else min(deadline, room_until)
    outcome = Stored(decided=begin)
    prefix = seals.prefix
    while outcome.decided < len(prefix):
        if not peer.region_bytes:
            peer.call(messages.Match(0, b""), max(0.0, patience - time.monotonic()))
        share = peer.region_bytes // PUT_SHARE // prefix.schema.extent_bytes
        at_once = max(1, min(share, _at_once_max(seals.selection)))
        part = prefix[outcome.decided : outcome.decided + at_once]
        reply = _reserve(peer, part, seals.selection, patience)
        flags = _write(peer, seals, outcome.decided, reply, deadline) if reply.lease else b""
        _note(outcome, reply, flags)
        if not reply.statuses:
            outcome.reason = Reason(reply.reason).name.lower()
            break
    return outcome


def _at_once_max(selection: Selection) -> int:
    """How many blocks one WRITE has ranges for and, of one rank, one commit headers."""
    if selection.shard is None:
        return AT_ONCE_MAX
    most = min(RANGES_MAX // len(selection.ranges), shard_blocks_max(selection.schema))
    return min(AT_ONCE_MAX, most)


def _reserve(peer: Peer, part: Prefix, selection: Selection, deadline: float) -> messages.Reserved:
    left_s = max(0.0, deadline - time.monotonic())
    reply: messages.Reserved = peer.call(reserve_request(part, selection, left_s), left_s)
    return reply


def _write(
    peer: Peer, seals: Seals, begin: int, reply: messages.Reserved, deadline: float
) -> bytes:
    """Fill the granted extents and commit them: one round trip. A flag per extent."""
    granted = [i for i, status in enumerate(reply.statuses) if status == Status.GRANTED]
    schema, selection = seals.prefix.schema, seals.selection
    ranges: list[Range] = []
    sources: list[Bytes] = []
    headers: list[bytes] = []
    slots = zip(granted, reply.offsets, reply.generations, strict=True)
    for slot, (index, offset, generation) in enumerate(slots):
        base = slot * schema.extent_bytes
        if selection.shard is not None:  # the node unites the ranks' headers
            headers.append(seals.shard_header(begin + index, offset, generation))
        else:
            ranges.append(Range(base, schema.header_bytes))
            sources.append(seals.header(begin + index, offset, generation))
        base += schema.header_bytes
        ranges += [Range(base + run.offset, run.length) for run in selection.ranges]
        sources += runs_of(seals.payloads[begin + index], selection)
    commit = messages.Commit(0, reply.lease, [], headers)
    committed = False
    try:
        with as_ours(peer.label), peer.stream(deadline) as stream:
            stream.ask_write(reply.lease, ranges, sources)
            peer.queue(stream, commit)
            stream.flush(deadline, STALL_S)
            stream.receive_written(deadline, STALL_S)
            answer = peer.receive(stream, commit, deadline)
            committed = True
    finally:
        if not committed:
            peer.post(messages.Abort(0, reply.lease))
    flags = raise_refusal(answer)
    if not isinstance(flags, messages.Flags) or len(flags.flags) != len(granted):
        raise StaleLease("the node did not answer a commit with a flag for each block")
    return flags.flags


def _note(outcome: Stored, reply: messages.Reserved, flags: bytes) -> None:
    sorted_ = {
        "stored": outcome.stored,
        "resident": outcome.resident,
        "busy": outcome.busy,
        "refused": outcome.refused,
        "pending": outcome.pending,
    }
    note_outcome(sorted_, outcome.decided, reply.statuses, flags)
    outcome.decided += len(reply.statuses)
