"""Writing blocks of a prefix to one peer: reserve, write in place over the network, commit.

`store` does it at once. `Early` is a reservation that is written layer by layer, each readable from
when it is published on: the write and the publication leave together, and the node takes them in
this order, so that what has an address at the node is there. A block is visible to others when it
is committed, and then it is whole.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from tiffin.messenger import local
from tiffin.messenger.errors import GrantError
from tiffin.messenger.frames import RANGES_MAX
from tiffin.messenger.transport import Range

from ..blocks import select
from ..errors import StaleLease
from ..link import raise_refusal
from ..node import messages
from ..node.core import Status
from ..node.records import Reason
from ..sealing import check_shard_blocks, seal, shard_blocks_max, shard_header
from ..slices import all_checksums, checksums_of, runs_of
from ..streaming import places_of, published_at_once
from ..verbs import PUT_SHARE, PutResult, note_outcome, reserve_request
from .peer import as_ours

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from tiffin.messenger.stream import Stream

    from ..blocks import Selection, Slot
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


# -- layer by layer --------------------------------------------------------------------------------


def reserve_early(
    peer: Peer, part: Prefix, slots: Sequence[Slot], selection: Selection, deadline: float
) -> tuple[messages.Reserved, Early | None]:
    """Reserve the blocks of `part`, whose bytes will be in `slots`. The node's answer, and what it
    granted. Raises NodeUnavailable, DeadlineExceeded, Draining, InvalidInput."""
    if selection.shard is not None:
        check_shard_blocks(part)
    reply = _reserve(peer, part, selection, deadline)
    return reply, Early(peer, part, slots, selection, reply) if reply.lease else None


class Early:
    """Slots that a node has granted. `slots` are those, in its order; `publish` and `commit` raise
    StaleLease, NodeUnavailable or DeadlineExceeded when the reservation is lost."""

    def __init__(
        self,
        peer: Peer,
        part: Prefix,
        slots: Sequence[Slot],
        selection: Selection,
        reply: messages.Reserved,
    ) -> None:
        granted = [i for i, status in enumerate(reply.statuses) if status == Status.GRANTED]
        self.slots = [slots[i] for i in granted]
        self._peer = peer
        self._part = part
        self._positions = granted  # in `part`
        self._schema = part.schema
        self._selection = selection
        self._lease = reply.lease
        self._places = list(zip(reply.offsets, reply.generations, strict=True))
        shape = len(granted), len(part.schema.segments)
        # By the checksums that were published: a header speaks of the bytes that were sent.
        self._checksums = np.zeros(shape, np.uint64)
        self._sent = np.zeros(shape, np.bool_)
        self._ended = False

    def publish(self, segments: Sequence[int], deadline: float) -> None:
        """Send these segments of all slots (but skipped ones), and tell the node that they are
        complete. After an error some may be readable: `abort`."""
        kept = [number for number, slot in enumerate(self.slots) if not slot.skipped]
        runs = self._runs(list(segments))
        at_once = max(1, min(published_at_once(segments), RANGES_MAX // len(runs)))
        for first in range(0, len(kept), at_once):
            self._publish(kept[first : first + at_once], list(segments), runs, deadline)

    def _publish(
        self, numbers: list[int], segments: list[int], runs: list[Range], deadline: float
    ) -> None:
        in_payload, spans = places_of(self._schema, segments)
        for number in numbers:
            found = local.hash_segments(self.slots[number].view, in_payload, self._schema.checksum)
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
        """Send what is missing, and the headers; a `Kept` per slot. Ends the reservation."""
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
        """Give the slots back; who follows them learns it. Does nothing after the end."""
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
        """Write, and then ask: one round trip. Raises StaleLease if not all could be written."""
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
            except GrantError as error:  # what was asked is refused as well, and says why
                refused = error
        answer = self._peer.receive(stream, request, deadline)
        if written < len(ranges):
            raise_refusal(answer)
            raise StaleLease(f"the node took {written} of {len(ranges)} ranges: {refused}")
        return answer

    def _missing(self, number: int) -> list[int]:
        """The segments of a slot that were not sent yet."""
        wanted = self._selection.segments
        missing: list[int] = wanted[~self._sent[number, wanted]].tolist()
        return missing

    def _header(self, number: int, missing: list[int]) -> Bytes | bytes:
        """The header of a slot, hashing what was not published; of a rank, as its commit has it."""
        if missing:
            in_payload, _ = places_of(self._schema, missing)
            found = local.hash_segments(self.slots[number].view, in_payload, self._schema.checksum)
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
        """Where segments lie in a payload, neighbours joined."""
        runs: list[Range] = []
        for index in segments:
            segment = self._schema.segments[index]
            if runs and sum(runs[-1]) == segment.offset:
                runs[-1] = Range(runs[-1].offset, runs[-1].length + segment.length)
            else:
                runs.append(Range(segment.offset, segment.length))
        return runs

    def _pieces(self, slots: list[tuple[int, list[Range]]]) -> tuple[list[Range], list[Bytes]]:
        """Where these runs of these slots go, in the extents end to end, and their bytes."""
        schema = self._schema
        ranges: list[Range] = []
        sources: list[Bytes] = []
        for number, runs in slots:
            base = number * schema.extent_bytes + schema.header_bytes
            view = self.slots[number].view
            ranges += [Range(base + offset, length) for offset, length in runs]
            sources += [view[offset : offset + length] for offset, length in runs]
        return ranges, sources
