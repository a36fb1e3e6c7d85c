"""Writes blocks of a prefix to one peer: reserve, write in place over the network, commit.

A write and its commit leave together: one round trip. So do the write of a layer and its
publication, after which followers can read the layer; the node takes them in this order, so that
the bytes of a published layer are at the node. A block is visible to other readers when it is
committed, and then it is complete.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from tiffin.messenger.errors import GrantError
from tiffin.messenger.shm import host_copy
from tiffin.messenger.transport import Range
from tiffin.messenger.wire.frames import RANGES_MAX

from ....deadlines import until_s
from ....errors import StaleLease
from ....format.header_writer import check_shard_blocks, seal, shard_blocks_max, shard_header
from ....node.core import messages
from ....node.core.node_core import ReserveStatus
from ....node.core.records import Reason
from ...blocks.block_views import select
from ...blocks.published_checksums import PublishedChecksums
from ...blocks.selection_copy import all_checksums, checksums_of, runs_of
from ...connection.connection import raise_refusal
from ...verbs.block_verbs import PUT_SHARE, PutResult, note_outcome, reserve_request
from ...verbs.publish import segment_spans, slots_per_message
from .peer import as_ours

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from numpy.typing import NDArray

    from ....format.keys import Prefix
    from ...blocks.block_views import Selection
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

    def header(
        self, index: int, offset: int, generation: int, checksums: NDArray[np.uint64]
    ) -> Bytes:
        """The header pages of block `index` for the extent at `offset` of its node."""
        pages = np.zeros(self.prefix.schema.header_bytes, np.uint8)
        where = {"generation": generation, "offset": offset}
        seal(pages, self.prefix, index, checksums=checksums, **where)
        return pages

    def shard_header(
        self, index: int, offset: int, generation: int, checksums: NDArray[np.uint64]
    ) -> bytes:
        """The header of one rank's slice of block `index`, as its commit carries it."""
        where = {"generation": generation, "offset": offset}
        return shard_header(self.prefix, index, checksums=checksums, **where)

    def hash(self, indices: Sequence[int]) -> None:
        """Hash the payloads of these blocks in one call, but those that have been hashed."""
        fresh = [index for index in indices if index not in self._checksums]
        if fresh:
            found = checksums_of([self.payloads[index] for index in fresh], self.selection)
            self._checksums |= zip(fresh, all_checksums(self.selection, found), strict=True)

    def checksums(self, index: int) -> NDArray[np.uint64]:
        """Of all segments of block `index`; zero for those that are not selected."""
        self.hash([index])
        return self._checksums[index]


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
        reply, reservation = reserve(peer, seals, outcome.decided, at_once, patience)
        _note(outcome, reply, reservation.commit(deadline) if reservation is not None else b"")
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


def reserve(
    peer: Peer, seals: BlockSeals, begin: int, count: int, deadline: float
) -> tuple[messages.Reserved, RemoteReservation | None]:
    """Reserve `count` blocks from `begin` on. Returns the node's reply, and the reservation if it
    granted any block. Raises NodeUnavailable, DeadlineExceeded, Draining, InvalidInput."""
    part = seals.prefix[begin : begin + count]
    if seals.selection.shard is not None:
        check_shard_blocks(part)
    left_s = until_s(deadline)
    reply: messages.Reserved = peer.call(reserve_request(part, seals.selection, left_s), left_s)
    return reply, RemoteReservation(peer, seals, begin, reply) if reply.lease else None


class RemoteReservation:
    """Blocks reserved at a node: filled and committed in one round trip, or published layer by
    layer before. `indices` are those that the node granted, as positions in the prefix.

    `publish` and `commit` raise StaleLease, NodeUnavailable or DeadlineExceeded when the
    reservation is lost.
    """

    def __init__(self, peer: Peer, seals: BlockSeals, begin: int, reply: messages.Reserved) -> None:
        statuses = enumerate(reply.statuses, begin)
        self.indices = [i for i, status in statuses if status == ReserveStatus.GRANTED]
        self._peer = peer
        self._seals = seals
        self._schema = seals.prefix.schema
        self._lease = reply.lease
        self._places = list(zip(reply.offsets, reply.generations, strict=True))
        self._published: dict[int, PublishedChecksums] = {}  # by block
        self._ended = False

    def publish(
        self, segments: Sequence[int], deadline: float, skipped: Collection[int] = ()
    ) -> None:
        """Send these segments of all blocks but `skipped`, and publish them. After an error,
        followers may be able to read some of them: call `abort`."""
        kept = [n for n, index in enumerate(self.indices) if index not in skipped]
        runs = self._runs(segments)
        at_once = max(1, min(slots_per_message(segments), RANGES_MAX // len(runs)))
        for first in range(0, len(kept), at_once):
            self._publish(kept[first : first + at_once], list(segments), runs, deadline)

    def _publish(
        self, numbers: list[int], segments: list[int], runs: list[Range], deadline: float
    ) -> None:
        in_payload, spans = segment_spans(self._schema, segments)
        payloads = [self._seals.payloads[self.indices[number]] for number in numbers]
        found = host_copy.hash_blocks(payloads, in_payload, self._schema.checksum)
        sums = found.astype("<u8").tobytes()
        request = messages.Publish(0, self._lease, numbers, segments, spans, sums)
        ranges: list[Range] = []
        sources: list[Bytes] = []
        for number in numbers:
            self._add(number, runs, ranges, sources)
        raise_refusal(self._exchange(request, ranges, sources, deadline))
        for number, checksums in zip(numbers, found, strict=True):
            published = self._published.get(self.indices[number])
            if published is None:
                published = PublishedChecksums(self._schema)
                self._published[self.indices[number]] = published
            published.note(segments, checksums)

    def commit(self, deadline: float, skipped: Collection[int] = ()) -> bytes:
        """Send what was not published, and the headers, and commit all blocks but `skipped`; a
        `Kept` per index. Ends the reservation."""
        headers: list[bytes] = []
        ranges: list[Range] = []
        sources: list[Bytes] = []
        skip: list[int] = []
        committed = False
        try:
            hashed = {*skipped, *self._published}
            self._seals.hash([index for index in self.indices if index not in hashed])
            for number, index in enumerate(self.indices):
                if index in skipped:
                    skip.append(number)
                    headers.append(b"")
                else:
                    headers.append(self._fill(number, ranges, sources))
            united = headers if self._seals.selection.shard is not None else []
            request = messages.Commit(0, self._lease, skip, united)
            flags = raise_refusal(self._exchange(request, ranges, sources, deadline))
            committed = True
        finally:
            if not committed:
                self.abort()
        self._ended = True
        if not isinstance(flags, messages.Flags) or len(flags.flags) != len(self.indices):
            raise StaleLease("the node did not answer a commit with a flag for each block")
        return flags.flags

    def abort(self) -> None:
        """Give the slots back to the node, which tells their followers. Does nothing once the
        reservation has ended."""
        if not self._ended:
            self._ended = True
            self._peer.post(messages.Abort(0, self._lease))

    def _fill(self, number: int, ranges: list[Range], sources: list[Bytes]) -> bytes:
        """Add what a block's commit sends to `ranges` and `sources`: its header's pages, and its
        segments that were not published. Returns the header as the commit carries it for one rank's
        slice, which the node merges with the other ranks' headers; else nothing."""
        index, (offset, generation) = self.indices[number], self._places[number]
        selection, published = self._seals.selection, self._published.get(index)
        header = b""
        if published is None:
            checksums = self._seals.checksums(index)
        else:
            # The published checksums go into the header: it has to match the bytes that were sent.
            missing = published.complete(self._seals.payloads[index], selection.segments)
            checksums = published.checksums
        if selection.shard is not None:
            header = self._seals.shard_header(index, offset, generation, checksums)
        else:
            ranges.append(Range(number * self._schema.extent_bytes, self._schema.header_bytes))
            sources.append(self._seals.header(index, offset, generation, checksums))
        if published is None:
            base = number * self._schema.extent_bytes + self._schema.header_bytes
            ranges += [Range(base + run.offset, run.length) for run in selection.ranges]
            sources += runs_of(self._seals.payloads[index], selection)
        else:
            self._add(number, self._runs(missing), ranges, sources)
        return header

    def _exchange(
        self,
        request: messages.Request,
        ranges: list[Range],
        sources: list[Bytes],
        deadline: float,
    ) -> messages.AnyReply:
        """Write the ranges and send the request: one round trip. Raises StaleLease if the node did
        not take all ranges."""
        with as_ours(self._peer.label), self._peer.stream(deadline) as stream:
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

    def _runs(self, segments: Sequence[int]) -> list[Range]:
        """Where segments lie in a payload; adjacent ones are merged into one range."""
        runs: list[Range] = []
        for index in segments:
            segment = self._schema.segments[index]
            if runs and sum(runs[-1]) == segment.offset:
                runs[-1] = Range(runs[-1].offset, runs[-1].length + segment.length)
            else:
                runs.append(Range(segment.offset, segment.length))
        return runs

    def _add(
        self, number: int, runs: Sequence[Range], ranges: list[Range], sources: list[Bytes]
    ) -> None:
        """Add the target ranges of these runs of a whole payload, counted over the reservation's
        extents end to end, and their bytes."""
        base = number * self._schema.extent_bytes + self._schema.header_bytes
        payload = self._seals.payloads[self.indices[number]]
        ranges += [Range(base + offset, length) for offset, length in runs]
        sources += [payload[offset : offset + length] for offset, length in runs]
