"""Writes blocks of a prefix to one peer: reserve, write in place over the network, commit.

`store` writes whole blocks. `Early` is a reservation that is written layer by layer; followers can
read a layer once it is published. The write and the publication leave together, and the node takes
them in this order, so that the bytes of a published layer are at the node. A block is visible to
other readers when it is committed, and then it is complete.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from tiffin.messenger.errors import GrantError
from tiffin.messenger.shm import host_copy
from tiffin.messenger.transport import Range
from tiffin.messenger.wire.frames import RANGES_MAX

from ...blocks.block_views import select
from ...blocks.selection_copy import all_checksums, checksums_of, runs_of
from ...connection.connection import raise_refusal
from ...deadlines import until_s
from ...errors import StaleLease
from ...format.header_writer import check_shard_blocks, seal, shard_blocks_max, shard_header
from ...node.core import messages
from ...node.core.node_core import ReserveStatus
from ...node.core.records import Reason
from ...streaming.publish import segment_spans, slots_per_message
from ...verbs.block_verbs import PUT_SHARE, PutResult, note_outcome, reserve_request
from .peer import as_ours

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from tiffin.messenger.tcp.stream import Stream

    from ...blocks.block_views import Selection, Slot
    from ...format.keys import Prefix
    from .peer import Peer

    Bytes = NDArray[np.uint8]

# The most blocks of one reservation and its commit: small blocks are committed many at a time; a
# message lists one status per block.
AT_ONCE_MAX = 256
# A write to a node that takes no byte for this long is cut off: another node takes the blocks.
STALL_S = 2.0


@dataclass(slots=True)
class WriteOutcome:
    """The outcome of a put to one peer, as positions in its prefix. `decided`: the position up to
    which the node has decided; `reason`: why it did not decide on the rest."""

    stored: list[int] = field(default_factory=list)
    resident: list[int] = field(default_factory=list)
    busy: list[int] = field(default_factory=list)
    refused: list[int] = field(default_factory=list)
    pending: list[int] = field(default_factory=list)
    decided: int = 0
    reason: str | None = None

    def result(self) -> PutResult:
        """The same as the result of a put."""
        lists = (self.stored, self.resident, self.busy, self.refused)
        stored, resident, busy, refused = map(tuple, lists)
        return PutResult(stored, resident, busy, refused, self.reason, tuple(self.pending))


class BlockSeals:
    """The checksums of payloads, hashed once however many replicas the put writes.

    `selection` is the part of each block that is written: all of it (None), or one rank's slice;
    then the payloads are packed copies of the slice, or whole blocks (`select_shard`,
    `source_views`).
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
        """The header of one rank's slice of block `index`, as its commit carries it."""
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
    peer: Peer, seals: BlockSeals, begin: int, *, deadline: float, room_until: float | None = None
) -> WriteOutcome:
    """Write the blocks from `begin` on that `peer` lacks, a share of its DRAM at a time. Waits for
    room until `room_until`, by default the deadline. Raises NodeUnavailable, DeadlineExceeded,
    Draining, InvalidInput: blocks that were stored before stay, and a retry finds them resident."""
    patience = deadline if room_until is None else min(deadline, room_until)
    outcome = WriteOutcome(decided=begin)
    prefix = seals.prefix
    while outcome.decided < len(prefix):
        if not peer.region_bytes:
            peer.call(messages.Match(0, b""), until_s(patience))
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
    """How many blocks one reservation writes at most: for one rank's slices, as many as one WRITE
    has ranges for and one commit has headers for."""
    if selection.shard is None:
        return AT_ONCE_MAX
    most = min(RANGES_MAX // len(selection.ranges), shard_blocks_max(selection.schema))
    return min(AT_ONCE_MAX, most)


def _reserve(peer: Peer, part: Prefix, selection: Selection, deadline: float) -> messages.Reserved:
    left_s = until_s(deadline)
    reply: messages.Reserved = peer.call(reserve_request(part, selection, left_s), left_s)
    return reply


def _write(
    peer: Peer, seals: BlockSeals, begin: int, reply: messages.Reserved, deadline: float
) -> bytes:
    """Fill the granted extents and commit them: one round trip. A flag per extent."""
    granted = [i for i, status in enumerate(reply.statuses) if status == ReserveStatus.GRANTED]
    schema, selection = seals.prefix.schema, seals.selection
    ranges: list[Range] = []
    sources: list[Bytes] = []
    headers: list[bytes] = []
    slots = zip(granted, reply.offsets, reply.generations, strict=True)
    for slot, (index, offset, generation) in enumerate(slots):
        base = slot * schema.extent_bytes
        if selection.shard is not None:  # the node merges the ranks' headers
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


def _note(outcome: WriteOutcome, reply: messages.Reserved, flags: bytes) -> None:
    sorted_ = {
        "stored": outcome.stored,
        "resident": outcome.resident,
        "busy": outcome.busy,
        "refused": outcome.refused,
        "pending": outcome.pending,
    }
    note_outcome(sorted_, outcome.decided, reply.statuses, flags)
    outcome.decided += len(reply.statuses)


# -- layer by layer --------------------------------------------------------------------------------


def reserve_early(
    peer: Peer, part: Prefix, slots: Sequence[Slot], selection: Selection, deadline: float
) -> tuple[messages.Reserved, Early | None]:
    """Reserve the blocks of `part`, whose bytes will be in `slots`. Returns the node's reply, and
    the reservation if it granted any block. Raises NodeUnavailable, DeadlineExceeded, Draining,
    InvalidInput."""
    if selection.shard is not None:
        check_shard_blocks(part)
    reply = _reserve(peer, part, selection, deadline)
    return reply, Early(peer, part, slots, selection, reply) if reply.lease else None


class Early:
    """A reservation at a node, written layer by layer. `slots` are those that the node granted, in
    its order; `publish` and `commit` raise StaleLease, NodeUnavailable or DeadlineExceeded when the
    reservation is lost."""

    def __init__(
        self,
        peer: Peer,
        part: Prefix,
        slots: Sequence[Slot],
        selection: Selection,
        reply: messages.Reserved,
    ) -> None:
        granted = [i for i, status in enumerate(reply.statuses) if status == ReserveStatus.GRANTED]
        self.slots = [slots[i] for i in granted]
        self._peer = peer
        self._part = part
        self._positions = granted  # in `part`
        self._schema = part.schema
        self._selection = selection
        self._lease = reply.lease
        self._places = list(zip(reply.offsets, reply.generations, strict=True))
        shape = len(granted), len(part.schema.segments)
        # The published checksums go into the header: it has to match the bytes that were sent.
        self._checksums = np.zeros(shape, np.uint64)
        self._sent = np.zeros(shape, np.bool_)
        self._ended = False

    def publish(self, segments: Sequence[int], deadline: float) -> None:
        """Send these segments of all slots (but skipped ones), and publish them. After an error,
        followers may be able to read some of them: call `abort`."""
        kept = [number for number, slot in enumerate(self.slots) if not slot.skipped]
        runs = self._runs(list(segments))
        at_once = max(1, min(slots_per_message(segments), RANGES_MAX // len(runs)))
        for first in range(0, len(kept), at_once):
            self._publish(kept[first : first + at_once], list(segments), runs, deadline)

    def _publish(
        self, numbers: list[int], segments: list[int], runs: list[Range], deadline: float
    ) -> None:
        in_payload, spans = segment_spans(self._schema, segments)
        for number in numbers:
            found = host_copy.hash_segments(
                self.slots[number].view, in_payload, self._schema.checksum
            )
            self._checksums[number, segments] = found
        sums = self._checksums[np.ix_(numbers, segments)].astype("<u8").tobytes()
        request = messages.Publish(0, self._lease, numbers, segments, spans, sums)
        ranges, sources = self._pieces([(number, runs) for number in numbers])
        with as_ours(self._peer.label), self._peer.stream(deadline) as stream:
            answer = self._converse(stream, ranges, sources, request, deadline)
        raise_refusal(answer)
        for number in numbers:
            self._sent[number, segments] = True

    def commit(self, deadline: float) -> bytes:
        """Send the segments that were not published, and the headers, and commit; a `Kept` per
        slot. Ends the reservation."""
        skip = [number for number, slot in enumerate(self.slots) if slot.skipped]
        headers: list[bytes] = []
        ranges: list[Range] = []
        sources: list[Bytes] = []
        committed = False
        try:
            for number, slot in enumerate(self.slots):
                if slot.skipped:
                    headers.append(b"")
                    continue
                missing = self._missing(number)
                targets, views = self._pieces([(number, self._runs(missing))])
                ranges += targets
                sources += views
                header = self._header(number, missing)
                if isinstance(header, bytes):
                    headers.append(header)
                else:
                    base = number * self._schema.extent_bytes
                    ranges.append(Range(base, self._schema.header_bytes))
                    sources.append(header)
            united = headers if self._selection.shard is not None else []
            request = messages.Commit(0, self._lease, skip, united)
            with as_ours(self._peer.label), self._peer.stream(deadline) as stream:
                answer = self._converse(stream, ranges, sources, request, deadline)
            flags = raise_refusal(answer)
            committed = True
        finally:
            if not committed:
                self.abort()
        self._ended = True
        if not isinstance(flags, messages.Flags) or len(flags.flags) != len(self.slots):
            raise StaleLease("the node did not answer a commit with a flag for each block")
        return flags.flags

    def abort(self) -> None:
        """Give the slots back to the node, which tells their followers. Does nothing once the
        reservation has ended."""
        if not self._ended:
            self._ended = True
            self._peer.post(messages.Abort(0, self._lease))

    def _converse(
        self,
        stream: Stream,
        ranges: list[Range],
        sources: list[Bytes],
        request: messages.Request,
        deadline: float,
    ) -> messages.AnyReply:
        """Write the ranges and send the request: one round trip. Raises StaleLease if the node did
        not take all ranges."""
        starts = range(0, len(ranges), RANGES_MAX)
        for at in starts:
            part = ranges[at : at + RANGES_MAX], sources[at : at + RANGES_MAX]
            stream.ask_write(self._lease, *part)
        self._peer.queue(stream, request)
        stream.flush(deadline, STALL_S)
        written = 0
        refused: GrantError | None = None
        for _ in starts:
            try:
                written += stream.receive_written(deadline, STALL_S).ranges
            except GrantError as error:  # the node refuses the request too, with the reason
                refused = error
        answer = self._peer.receive(stream, request, deadline)
        if written < len(ranges):
            raise_refusal(answer)
            raise StaleLease(f"the node took {written} of {len(ranges)} ranges: {refused}")
        return answer

    def _missing(self, number: int) -> list[int]:
        """The segments of a slot that are not sent yet."""
        wanted = self._selection.segments
        missing: list[int] = wanted[~self._sent[number, wanted]].tolist()
        return missing

    def _header(self, number: int, missing: list[int]) -> Bytes | bytes:
        """The header of a slot, as pages or, for one rank's slice, as its commit carries it; hashes
        the `missing` segments, which were not published."""
        if missing:
            in_payload, _ = segment_spans(self._schema, missing)
            found = host_copy.hash_segments(
                self.slots[number].view, in_payload, self._schema.checksum
            )
            self._checksums[number, missing] = found
        offset, generation = self._places[number]
        index, checksums = self._positions[number], self._checksums[number]
        where = {"generation": generation, "offset": offset}
        if self._selection.shard is not None:
            return shard_header(self._part, index, checksums=checksums, **where)
        pages = np.zeros(self._schema.header_bytes, np.uint8)
        seal(pages, self._part, index, checksums=checksums, **where)
        return pages

    def _runs(self, segments: list[int]) -> list[Range]:
        """Where segments lie in a payload; adjacent ones are merged into one range."""
        runs: list[Range] = []
        for index in segments:
            segment = self._schema.segments[index]
            if runs and sum(runs[-1]) == segment.offset:
                runs[-1] = Range(runs[-1].offset, runs[-1].length + segment.length)
            else:
                runs.append(Range(segment.offset, segment.length))
        return runs

    def _pieces(self, slots: list[tuple[int, list[Range]]]) -> tuple[list[Range], list[Bytes]]:
        """The target ranges of these runs of these slots, counted over the reservation's extents
        end to end, and their bytes."""
        schema = self._schema
        ranges: list[Range] = []
        sources: list[Bytes] = []
        for number, runs in slots:
            base = number * schema.extent_bytes + schema.header_bytes
            view = self.slots[number].view
            ranges += [Range(base + offset, length) for offset, length in runs]
            sources += [view[offset : offset + length] for offset, length in runs]
        return ranges, sources
