"""Reads the leading blocks of a prefix from one peer, and verifies them as they arrive."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tiffin.messenger.errors import GrantError, PeerLost
from tiffin.messenger.shm.host_copy import hash_blocks, hash_segments
from tiffin.messenger.transport import Range
from tiffin.messenger.wire.frames import RANGES_MAX

from .... import deadlines
from ....deadlines import GRACE_S, until_s
from ....errors import (
    CorruptBlock,
    DeadlineExceeded,
    NodeUnavailable,
    ProtocolError,
    VersionMismatch,
)
from ....format.expected_headers import ExpectedHeaders
from ....node.core import messages
from ....node.core.records import Reason
from ...blocks.selection_copy import first_differing
from ...connection.connection import raise_refusal
from ..pool_verbs import ReadOutcome
from .peer import CONNECT_TIMEOUT_S, as_ours

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ....format.keys import Prefix
    from ....format.schema import ByteRange
    from ...blocks.block_views import Piece, Selection
    from ...verbs.block_verbs import Access
    from .peer import Peer

    Bytes = NDArray[np.uint8]

log = logging.getLogger(__name__)

_no_lease = contextlib.suppress(GrantError)  # the reply has the reason
# Releases the latest lease of the same stream.
_RELEASE_LAST = messages.encoder.encode(messages.Release(messages.UNAWAITED, 0))
# Larger reads are leased first and then spread over several streams; smaller ones are one round
# trip on one stream. 8 MiB take about 2 ms on loopback, a hundred times what a round trip costs.
SPREAD_BYTES_MIN = 16 << 20
# Reads of at least this size go by NIXL: two more round trips (the lease, and the confirmation that
# the node still held it) are a small part of their time.
ONE_SIDED_BYTES_MIN = 1 << 20
# Blocks up to this size are moved in one range each, and hashed together when all have arrived: by
# two threads, and in one call. To hash each layer as it arrives took 160 us longer than not to
# verify a block of 64 KiB, and 7 ms of 22 longer than at the end for eight blocks of 4 MiB; at
# 64 MiB there is no difference.
_AT_END_BYTES_MAX = 8 << 20
# Of a read that is larger in all, each piece is hashed as it arrives: a read that is given up ends
# soon after its deadline. This takes 25 ms at most.
_AT_END_TOTAL_MAX = 64 << 20


class ArrivedSegments:
    """The ranges of one read, their targets, and which blocks have arrived and are verified.

    `ranges[i]` of the lease goes to `targets[i]`. Ranges may arrive in any order and from several
    threads.
    """

    def __init__(
        self,
        prefix: Prefix,
        selection: Selection,
        access: Access,
        targets: Sequence[Bytes],
    ) -> None:
        self._prefix = prefix
        self._schema = prefix.schema
        self._selection = selection
        self._memory = targets
        self._verified = [access.checks_payload() for _ in targets]
        # A checksum covers a whole segment: to verify a part of it, the read moves all of it.
        self._cut = not selection.aligned
        self._at_end = (
            not self._cut
            and selection.nbytes <= _AT_END_BYTES_MAX
            and selection.nbytes * len(targets) <= _AT_END_TOTAL_MAX
        )
        self.reply: messages.Leased | None = None
        self.corrupt: int | None = None  # the block that failed its verification
        self.targets: list[Bytes] = []
        self._scratch: dict[int, Bytes] = {}
        self._good: set[int] = set()
        self._lock = threading.Lock()
        # A piece is hashed as it arrives; a block that is not is one range.
        by_piece = tuple(checked and not self._at_end for checked in self._verified)
        lay_out = _layout_of_few if len(targets) <= _FEW else _layout
        self.ranges, self._where, missing, self.nbytes = lay_out(selection, by_piece)
        self._missing = list(missing)  # ranges of each block that have not arrived

    def finish(self) -> int:
        """How many leading blocks are complete and verified; called once, when nothing arrives any
        more. What is verified at the end is verified together."""
        count = 0
        while count in self._good:
            count += 1
        if self._at_end and count:
            began = time.monotonic()
            assert self.reply is not None
            size, verified = self._schema.header.used_bytes, self._verified[:count]
            raws = [self._headers[block, :size].tobytes() for block in range(count)]
            found = self._expected.leading(raws, self.reply.offsets, self.reply.generations)
            good = self._verify([block for block in range(len(found)) if verified[block]], raws)
            good = len(found) if good is None else good
            if good < count:
                self.corrupt = count = good
            deadlines.worked(time.monotonic() - began)
        return count

    def _verify(self, blocks: list[int], headers: list[bytes]) -> int | None:
        """The first of these blocks that has other bytes than its header says."""
        if not blocks:
            return None
        memory, selection = [self._memory[block] for block in blocks], self._selection
        hashes = hash_blocks(memory, selection.packed, self._schema.checksum)
        bad = first_differing(hashes, [headers[block] for block in blocks], selection)
        return None if bad is None else blocks[bad]

    def prepare(self) -> None:
        """Make `targets`, the memory of each range, and what else `arrived` needs. A step of its
        own, so that the node can work on the request meanwhile."""
        selection, blocks = self._selection, len(self._memory)
        self._expected = ExpectedHeaders(self._prefix)
        self._headers = np.empty((blocks, self._schema.header_bytes), np.uint8)
        if any(self._verified) and not self._at_end:
            self._hashes = np.zeros((blocks, len(selection.spans)), np.uint64)
        targets = self.targets
        memory, at = self._headers[:0], 0
        for (block, piece), (_, length) in zip(self._where, self.ranges, strict=True):
            if piece < 0:
                targets.append(self._headers[block])
                memory, at = self._memory[block], 0
                if self._verified[block] and self._cut:
                    memory = self._scratch[block] = np.empty(selection.spans_bytes, np.uint8)
            else:
                targets.append(memory[at : at + length])
                at += length

    def arrived(self, index: int) -> None:
        """Note that all bytes of range `index` are in their target; verify its block if that is
        complete, and large. Raises CorruptBlock."""
        block, piece = self._where[index]
        if piece >= 0 and self._verified[block] and not self._at_end:
            self._hash(block, piece, self.targets[index])
        with self._lock:
            self._missing[block] -= 1
            complete = not self._missing[block]
        if complete and not self._at_end:
            try:
                self._check(block)
            except CorruptBlock:
                self.corrupt = block
                raise
        if complete:
            self._good.add(block)

    def _hash(self, block: int, number: int, arrived: Bytes) -> None:
        """Note the checksums of a piece's segments while its bytes are in the cache."""
        piece = self._selection.pieces[number]
        found = hash_segments(arrived, piece.spans, self._schema.checksum)
        self._hashes[block, piece.first : piece.first + len(piece.spans)] = found

    def _check(self, block: int) -> None:
        """Verify a block's header and checksums. Raises CorruptBlock unless it is the block that
        the reader asked for."""
        assert self.reply is not None
        generation, offset = self.reply.generations[block], self.reply.offsets[block]
        raw = self._headers[block].tobytes()
        try:
            self._expected.check(block, raw, generation, offset)
        except VersionMismatch as error:
            raise CorruptBlock(f"a block of another format version: {error}") from error
        found = self._hashes[block : block + 1] if self._verified[block] else None
        if found is not None and first_differing(found, [raw], self._selection) is not None:
            raise CorruptBlock("its checksums differ from its header's")
        if block in self._scratch:
            self._cut_out(block)

    def _cut_out(self, block: int) -> None:
        """Copy the head range out of the whole segments that the read moved to verify it."""
        whole, target, at = self._scratch.pop(block), self._memory[block], 0
        for offset, length in self._selection.cuts():
            target[at : at + length] = whole[offset : offset + length]
            at += length


class _Layout(NamedTuple):
    """The ranges of a lease that one read moves."""

    ranges: tuple[Range, ...]
    where: tuple[tuple[int, int], ...]  # of each range: its block and piece, -1 for the header
    missing: tuple[int, ...]  # ranges of each block
    nbytes: int


def _layout(selection: Selection, by_piece: tuple[bool, ...]) -> _Layout:
    """The ranges of the headers and the selected bytes of blocks whose extents lie end to end: a
    block is cut into the selection's pieces or, if not `by_piece`, into its ranges."""
    schema = selection.schema
    ranges: list[Range] = []
    where: list[tuple[int, int]] = []
    missing = []
    for block, each in enumerate(by_piece):
        base, header_bytes = block * schema.extent_bytes, schema.header_bytes
        ranges.append(Range(base, header_bytes))
        where.append((block, -1))
        base += header_bytes
        pieces: Sequence[Piece | ByteRange] = selection.pieces if each else selection.ranges
        for number, piece in enumerate(pieces):
            ranges.append(Range(base + piece.offset, piece.length))
            where.append((block, number))
        missing.append(len(pieces) + 1)
    nbytes = sum(length for _, length in ranges)
    return _Layout(tuple(ranges), tuple(where), tuple(missing), nbytes)


# The layouts of reads of up to this many blocks are cached: small reads are alike, and to compute a
# layout takes longer than to look it up.
_FEW = 4
_layout_of_few = lru_cache(maxsize=64)(_layout)


def fetch(
    peer: Peer,
    prefix: Prefix,
    arrivals: ArrivedSegments,
    deadline: float,
    stall_s: float | None = None,
    streams: int = 1,
) -> ReadOutcome:
    """Read the ranges of `arrivals` from `peer`. When it returns, nothing touches their targets.

    Raises nothing for the failures that a pool has to tolerate: a lost peer, a stall, a miss, a
    corrupt block, another process at an address of the directory. Raises the errors of a wrong
    request (InvalidInput).
    """
    started = time.monotonic()
    nbytes = arrivals.nbytes
    reason: str | None = None
    try:
        with as_ours(peer.label):
            # One request has RANGES_MAX ranges at most; the transport splits larger reads.
            many = len(arrivals.ranges) > RANGES_MAX
            spread = streams > 1 and nbytes >= SPREAD_BYTES_MIN
            one_sided = peer.one_sided is not None and nbytes >= ONE_SIDED_BYTES_MIN
            if many or spread or one_sided:
                _spread(peer, prefix, arrivals, deadline, stall_s)
            else:
                _at_once(peer, prefix, arrivals, deadline, stall_s)
    except CorruptBlock:
        pass
    except DeadlineExceeded:
        reason = "deadline" if time.monotonic() >= deadline else "stalled"
    except (NodeUnavailable, ProtocolError) as error:
        if type(error) is not NodeUnavailable:
            log.warning("not read from %s: %s", peer.label, error)
        reason = "lost"
    good, reply = arrivals.finish(), arrivals.reply
    if arrivals.corrupt is not None:
        reason = reason or "corrupt"
        _report(peer, prefix, arrivals)
    if reason is None and good < len(prefix):
        code = reply.reason if reply is not None else Reason.MISS
        reason = Reason(code or Reason.MISS).name.lower()
    generations = reply.generations[:good] if reply is not None else []
    seconds = time.monotonic() - started
    arrived_bytes = nbytes * good // max(1, len(prefix))
    return ReadOutcome(
        good, reason, generations, arrived_bytes, seconds, answered=reply is not None
    )


def _at_once(
    peer: Peer, prefix: Prefix, arrivals: ArrivedSegments, deadline: float, stall_s: float | None
) -> None:
    """Lease, read and release in one round trip on one stream."""
    # At the deadline, the node answers with the blocks that it has then.
    late = deadline + GRACE_S
    connect_s = CONNECT_TIMEOUT_S if stall_s is None else stall_s
    with peer.stream(late, connect_s) as stream:
        left_s = until_s(deadline)
        lease = messages.Lease(0, prefix.key_bytes, left_s)
        # A healthy node answers in time even if it has to read its disk; where `stall_s` is set,
        # there is another replica.
        first = late if stall_s is None else min(late, time.monotonic() + stall_s)
        peer.queue(stream, lease)
        stream.ask_read(0, arrivals.ranges)
        stream.message(_RELEASE_LAST)
        stream.flush(first)
        arrivals.prepare()
        views = [target.data for target in arrivals.targets]
        reply = peer.receive(stream, lease, first)
        if isinstance(reply, messages.Leased):
            arrivals.reply = reply
        with _no_lease:
            stream.receive_data_views(views, late, arrivals.arrived, stall_s)
    raise_refusal(reply)


def _spread(
    peer: Peer, prefix: Prefix, arrivals: ArrivedSegments, deadline: float, stall_s: float | None
) -> None:
    """Lease, then read by NIXL or over several streams in parallel, then release."""
    left_s = until_s(deadline)
    wait_s = left_s if stall_s is None else min(left_s, max(0.0, stall_s - GRACE_S))
    reply = peer.call(messages.Lease(0, prefix.key_bytes, left_s), wait_s)
    arrivals.reply = reply
    if not reply.lease:
        return
    try:
        arrivals.prepare()
        _read_leased(peer, reply, arrivals, deadline, stall_s)
    finally:
        peer.post(messages.Release(0, reply.lease))


def _read_leased(
    peer: Peer,
    reply: messages.Leased,
    arrivals: ArrivedSegments,
    deadline: float,
    stall_s: float | None,
) -> None:
    ranges, targets, arrived = arrivals.ranges, arrivals.targets, arrivals.arrived
    one_sided = peer.one_sided
    messenger = one_sided.messenger(deadline) if one_sided is not None else None
    if one_sided is None or messenger is None:
        peer.transport.read(
            reply.lease, ranges, targets, deadline=deadline, arrived=arrived, stall_s=stall_s
        )
        return
    one_sided.hold(reply)
    try:
        messenger.read(reply.lease, ranges, targets, deadline=deadline, arrived=arrived)
    except PeerLost:
        one_sided.forget()
        raise
    finally:
        one_sided.let_go(reply.lease)


def _report(peer: Peer, prefix: Prefix, arrivals: ArrivedSegments) -> None:
    """Report the block that failed its verification to its node, which checks it itself. With
    several streams, blocks before it may not have arrived yet: they are no worse for that."""
    bad, reply = arrivals.corrupt, arrivals.reply
    if bad is not None and reply is not None:
        peer.post(messages.Report(0, prefix.keys[bad], reply.generations[bad]))


__all__ = ["ArrivedSegments", "ReadOutcome", "fetch"]
