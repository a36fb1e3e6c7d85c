"""Writing blocks of a prefix to one peer: reserve, write in place over the network, commit."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from tiffin.messenger.local import hash_segments
from tiffin.messenger.transport import Range

from ..block import pack_header
from ..errors import StaleLease
from ..link import raise_refusal
from ..node import messages
from ..node.core import Status
from ..node.records import Reason
from ..verbs import PUT_SHARE
from .peer import as_ours

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ..keys import Prefix
    from .peer import Peer

    Bytes = NDArray[np.uint8]

# Small blocks are committed many at a time; a message lists one status per block.
AT_ONCE_MAX = 256


@dataclass(slots=True)
class Stored:
    """What became of the blocks of a put to one peer, as positions in its prefix. `reason` says why
    the rest was not decided on."""

    stored: list[int] = field(default_factory=list)
    resident: list[int] = field(default_factory=list)
    busy: list[int] = field(default_factory=list)
    refused: list[int] = field(default_factory=list)
    decided: int = 0
    reason: str | None = None


class Seals:
    """The checksums of payloads, hashed once however many replicas are written."""

    def __init__(self, prefix: Prefix, payloads: Sequence[Bytes]) -> None:
        self.prefix = prefix
        self.payloads = payloads
        self._spans = [(s.offset, s.length) for s in prefix.schema.segments]
        self._checksums: dict[int, NDArray[np.uint64]] = {}

    def header(self, index: int, offset: int, generation: int) -> Bytes:
        """The header pages of block `index` for the extent at `offset` of its node."""
        checksums = self._checksums.get(index)
        if checksums is None:
            checksums = hash_segments(self.payloads[index], self._spans)
            self._checksums[index] = checksums
        prefix, schema = self.prefix, self.prefix.schema
        pages = np.zeros(schema.header_bytes, np.uint8)
        pack_header(
            pages,
            key=prefix.keys[index],
            parent=prefix.keys[index - 1] if index else prefix.parent,
            schema_fingerprint=prefix.schema_fingerprint,
            namespace_fingerprint=prefix.namespace_fingerprint,
            generation=generation,
            payload_bytes=schema.block_bytes,
            extent_offset=offset,
            extent_bytes=schema.extent_bytes,
            tokens=prefix.token_bytes(index),
            segment_bytes=[segment.length for segment in schema.segments],
            checksums=checksums,
        )
        return pages


def store(peer: Peer, seals: Seals, begin: int, *, deadline: float) -> Stored:
    """Write the blocks from `begin` on to `peer`, those that it lacks, a share of its DRAM at a
    time. Raises NodeUnavailable, DeadlineExceeded, Draining, InvalidInput: what was stored before
    stays, and is found as resident by who tries again."""
    outcome = Stored(decided=begin)
    prefix = seals.prefix
    while outcome.decided < len(prefix):
        if not peer.region_bytes:
            peer.call(messages.Match(0, b""), max(0.0, deadline - time.monotonic()))
        share = peer.region_bytes // PUT_SHARE // prefix.schema.extent_bytes
        at_once = min(AT_ONCE_MAX, max(1, share))
        part = prefix[outcome.decided : outcome.decided + at_once]
        reply = _reserve(peer, part, deadline)
        flags = _write(peer, seals, outcome.decided, reply, deadline) if reply.lease else b""
        _note(outcome, reply, flags)
        if not reply.statuses:
            outcome.reason = Reason(reply.reason).name.lower()
            break
    return outcome


def _reserve(peer: Peer, part: Prefix, deadline: float) -> messages.Reserved:
    left_s = max(0.0, deadline - time.monotonic())
    request = messages.Reserve(
        0, part.key_bytes, part.parent, part.start, part.schema.extent_bytes, left_s
    )
    reply: messages.Reserved = peer.call(request, left_s)
    return reply


def _write(
    peer: Peer, seals: Seals, begin: int, reply: messages.Reserved, deadline: float
) -> bytes:
    """Fill the granted extents and commit them: one round trip. A flag per extent."""
    granted = [i for i, status in enumerate(reply.statuses) if status == Status.GRANTED]
    schema = seals.prefix.schema
    ranges: list[Range] = []
    sources: list[Bytes] = []
    slots = zip(granted, reply.offsets, reply.generations, strict=True)
    for slot, (index, offset, generation) in enumerate(slots):
        base = slot * schema.extent_bytes
        ranges.append(Range(base, schema.header_bytes))
        sources.append(seals.header(begin + index, offset, generation))
        ranges.append(Range(base + schema.header_bytes, schema.block_bytes))
        sources.append(seals.payloads[begin + index])
    commit = messages.Commit(0, reply.lease)
    committed = False
    try:
        with as_ours(peer.label), peer.transport.stream(deadline) as stream:
            stream.ask_write(reply.lease, ranges, sources)
            peer.queue(stream, commit)
            stream.flush(deadline)
            stream.receive_written(deadline)
            answer = peer.receive(stream, commit, deadline)
            committed = True
    finally:
        if not committed:
            peer.post(messages.Abort(0, reply.lease))
    flags = raise_refusal(answer)
    if not isinstance(flags, messages.Flags):
        raise StaleLease("the node did not answer a commit with flags")
    return flags.flags


def _note(outcome: Stored, reply: messages.Reserved, flags: bytes) -> None:
    stored = iter(flags)
    for index, status in enumerate(reply.statuses, start=outcome.decided):
        if status == Status.GRANTED:
            (outcome.stored if next(stored) else outcome.refused).append(index)
        elif status == Status.RESIDENT:
            outcome.resident.append(index)
        else:
            outcome.busy.append(index)
    outcome.decided += len(reply.statuses)
