"""Reading leading blocks of a prefix from one peer, into memory of ours, verified on arrival."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tiffin.messenger.errors import GrantError, PeerLost
from tiffin.messenger.frames import RANGES_MAX
from tiffin.messenger.transport import Range

from ..block import verify_identity
from ..errors import (
    CorruptBlock,
    DeadlineExceeded,
    NodeUnavailable,
    ProtocolError,
    VersionMismatch,
)
from ..link import GRACE_S, raise_refusal
from ..node import messages
from ..node.records import Reason
from ..slices import checksums_of, piece_checksums
from .peer import CONNECT_TIMEOUT_S, as_ours

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from ..blocks import Piece, Selection
    from ..keys import Prefix
    from ..schema import ByteRange
    from ..verbs import Access
    from .peer import Peer

    Bytes = NDArray[np.uint8]

log = logging.getLogger(__name__)

_no_lease = contextlib.suppress(GrantError)  # the reply says why
# Ends the lease that the same stream was granted last.
_RELEASE_LAST = messages.encoder.encode(messages.Release(messages.UNAWAITED, 0))
# Larger reads are leased first and then spread over several streams; smaller ones are one round
# trip on one stream. 8 MiB take about 2 ms on loopback, a hundred times what a round trip costs.
SPREAD_BYTES_MIN = 16 << 20
# By NIXL, from where two more round trips (the lease, and the question whether it was still held)
# are a small part.
ONE_SIDED_BYTES_MIN = 1 << 20
# Up to this size, what is read of a block is moved in one and hashed when it is complete: it is in
# the processor's cache then. To move and hash each of the 32 layers of a block of 64 KiB on its own
# took 160 us longer than not to verify it, this 50 us.
_AT_END_BYTES_MAX = 1 << 20


@dataclass(slots=True)
class Fetched:
    """Leading blocks that arrived whole and proved themselves; `reason` says why not more: a
    `Reason` in lower case, or "lost" (the node or the way to it), "stalled" (it sends nothing)."""

    blocks: int
    reason: str | None
    generations: list[int] = field(default_factory=list)
    nbytes: int = 0
    seconds: float = 0.0
    first_byte_s: float | None = None
    answered: bool = False  # whether the node said anything at all


class Arrivals:
    """What is to be read, where it goes, and what of it has arrived and proved itself.

    `ranges[i]` of the lease goes to `targets[i]`. Ranges may arrive in any order and from several
    threads. `piece(block, k)` is called for each piece of a block as it arrives, before the block
    has proved itself: the k-th of the selection's pieces (its layers, unless it is a head range),
    or, of an unaligned head range that is not verified, the k-th of its ranges.
    """

    def __init__(
        self,
        prefix: Prefix,
        selection: Selection,
        access: Access,
        targets: Sequence[Bytes],
        *,
        piece: Callable[[int, int], None] | None = None,
    ) -> None:
        self._prefix = prefix
        self._schema = prefix.schema
        self._selection = selection
        self._memory = targets
        self._piece = piece
        self._verified = [access.checks_payload() for _ in targets]
        # A checksum covers a whole segment: a part of it can only be checked by moving all.
        self._cut = not selection.aligned
        self._at_end = piece is None and not self._cut and selection.nbytes <= _AT_END_BYTES_MAX
        self.reply: messages.Leased | None = None
        self.first_at: float | None = None
        self.targets: list[Bytes] = []
        self._scratch: dict[int, Bytes] = {}
        self._good: set[int] = set()
        self._lock = threading.Lock()
        # Layers that follow each other are one range, unless somebody waits for each.
        waits = piece is not None and not self._cut
        by_piece = tuple((checked or waits) and not self._at_end for checked in self._verified)
        lay_out = _layout_of_few if len(targets) <= _FEW else _layout
        self.ranges, self._where, missing, self.nbytes = lay_out(selection, by_piece)
        self._missing = list(missing)  # ranges of each block that have not arrived

    @property
    def good(self) -> int:
        """Leading blocks that are complete and verified."""
        count = 0
        while count in self._good:
            count += 1
        return count

    def prepare(self) -> None:
        """Make `targets`, where each range goes, and what else is needed when the first arrives. On
        its own, so that the node can work on the request meanwhile."""
        selection, blocks = self._selection, len(self._memory)
        self._keys, self._tokens = self._prefix.keys, self._prefix.token_chunks()
        self._common = self._prefix.schema_fingerprint + self._prefix.namespace_fingerprint
        self._headers = np.empty((blocks, self._schema.header_bytes), np.uint8)
        if any(self._verified):
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
        """All bytes of range `index` are in their target. Raises CorruptBlock, VersionMismatch."""
        if self.first_at is None:
            self.first_at = time.monotonic()
        block, piece = self._where[index]
        if piece >= 0:
            if self._verified[block] and not self._at_end:
                self._hash(block, piece, self.targets[index])
            if self._piece is not None:
                self._piece(block, piece)
        with self._lock:
            self._missing[block] -= 1
            complete = not self._missing[block]
        if complete:
            self._check(block)
            self._good.add(block)

    def _hash(self, block: int, number: int, arrived: Bytes) -> None:
        """Note the checksums of a piece's segments while its bytes are in the cache."""
        piece = self._selection.pieces[number]
        found = piece_checksums(arrived, self._selection, piece)
        self._hashes[block, piece.first : piece.first + piece.count] = found

    def _check(self, block: int) -> None:
        """Raises CorruptBlock or VersionMismatch unless this is the block that was asked for."""
        assert self.reply is not None
        schema = self._schema
        generation, offset = self.reply.generations[block], self.reply.offsets[block]
        raw = self._headers[block].tobytes()
        key = self._keys[block]
        parent = self._keys[block - 1] if block else self._prefix.parent
        tokens = self._tokens[block]
        if not schema.header.matches(raw, key + parent + self._common, generation, offset, tokens):
            self._complain(raw, key, parent, generation, tokens, offset)
        if self._verified[block]:
            if self._at_end:
                self._hashes[block] = checksums_of(self._memory[block], self._selection)
            segments = self._selection.segments
            differs = self._hashes[block] != schema.header.checksums(raw)[segments]
            if differs.any():
                layer = schema.layer_of(int(segments[int(differs.argmax())]))
                raise CorruptBlock(f"checksum of layer {layer} differs")
        if block in self._scratch:
            self._cut_out(block)

    def _complain(
        self, raw: bytes, key: bytes, parent: bytes, generation: int, tokens: bytes, offset: int
    ) -> None:
        """Raise what is wrong with this header."""
        fingerprints = self._prefix.schema_fingerprint, self._prefix.namespace_fingerprint
        try:
            verify_identity(
                raw, key, parent, *fingerprints, generation, tokens, offset_expected=offset
            )
        except VersionMismatch as error:
            raise CorruptBlock(f"a block of another format version: {error}") from error
        raise CorruptBlock("another block's header: its sizes or its algorithm differ")

    def _cut_out(self, block: int) -> None:
        """Copy the head range out of the whole segments that were moved to verify it."""
        whole, target, at = self._scratch.pop(block), self._memory[block], 0
        for offset, length in self._selection.cuts():
            target[at : at + length] = whole[offset : offset + length]
            at += length


class _Layout(NamedTuple):
    """The ranges of a lease that one read wants."""

    ranges: tuple[Range, ...]
    where: tuple[tuple[int, int], ...]  # of each range: its block and piece, -1 for the header
    missing: tuple[int, ...]  # ranges of each block
    nbytes: int


def _layout(selection: Selection, by_piece: tuple[bool, ...]) -> _Layout:
    """Which ranges hold the header and the selected bytes of blocks whose extents lie end to end:
    each block's as the selection's pieces or, if not `by_piece`, as its ranges."""
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


# Small reads are alike, and to plan one takes longer than to find its plan.
_FEW = 4
_layout_of_few = lru_cache(maxsize=64)(_layout)


def fetch(
    peer: Peer,
    prefix: Prefix,
    arrivals: Arrivals,
    deadline: float,
    stall_s: float | None = None,
    streams: int = 1,
) -> Fetched:
    """Read what `arrivals` wants of `prefix`. When it returns, nothing touches its targets.

    Never raises for what a pool has to live with: a lost peer, a stall, a miss, damage, somebody
    else behind an address of the directory. Raises what a wrong request gets (InvalidInput).
    """
    started = time.monotonic()
    nbytes = arrivals.nbytes
    reason: str | None = None
    try:
        with as_ours(peer.label):
            # One request has so many ranges at most; the transport sends as many as it takes.
            many = len(arrivals.ranges) > RANGES_MAX
            spread = streams > 1 and nbytes >= SPREAD_BYTES_MIN
            one_sided = peer.one_sided is not None and nbytes >= ONE_SIDED_BYTES_MIN
            if many or spread or one_sided:
                _spread(peer, prefix, arrivals, deadline, stall_s)
            else:
                _at_once(peer, prefix, arrivals, deadline, stall_s)
    except CorruptBlock:
        reason = "corrupt"
        _report(peer, prefix, arrivals)
    except DeadlineExceeded:
        reason = "deadline" if time.monotonic() >= deadline else "stalled"
    except (NodeUnavailable, ProtocolError) as error:
        if type(error) is not NodeUnavailable:
            log.warning("not read from %s: %s", peer.label, error)
        reason = "lost"
    good, reply = arrivals.good, arrivals.reply
    if reason is None and good < len(prefix):
        code = reply.reason if reply is not None else Reason.MISS
        reason = Reason(code or Reason.MISS).name.lower()
    generations = reply.generations[:good] if reply is not None else []
    seconds = time.monotonic() - started
    arrived_bytes = nbytes * good // max(1, len(prefix))
    fetched = Fetched(good, reason, generations, arrived_bytes, seconds, answered=reply is not None)
    if arrivals.first_at is not None:
        fetched.first_byte_s = arrivals.first_at - started
    return fetched


def _at_once(
    peer: Peer, prefix: Prefix, arrivals: Arrivals, deadline: float, stall_s: float | None
) -> None:
    """Lease, read and release in one round trip on one stream."""
    # The node answers at the deadline with what it has then.
    late = deadline + GRACE_S
    connect_s = CONNECT_TIMEOUT_S if stall_s is None else stall_s
    with peer.stream(late, connect_s) as stream:
        left_s = max(0.0, deadline - time.monotonic())
        lease = messages.Lease(0, prefix.key_bytes, left_s)
        # A node that is well answers in time even if it has to read its disk; one that is not asked
        # patiently has another beside it.
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
    peer: Peer, prefix: Prefix, arrivals: Arrivals, deadline: float, stall_s: float | None
) -> None:
    """Lease, then read over several streams at a time."""
    left_s = max(0.0, deadline - time.monotonic())
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
    arrivals: Arrivals,
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


def _report(peer: Peer, prefix: Prefix, arrivals: Arrivals) -> None:
    """Tell the node which of its blocks failed our checks; it looks itself."""
    bad, reply = arrivals.good, arrivals.reply
    if reply is not None and bad < len(reply.generations):
        peer.post(messages.Report(0, prefix.keys[bad], reply.generations[bad]))


__all__ = ["Arrivals", "Fetched", "fetch"]
