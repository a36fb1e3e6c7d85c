"""Blocks that several ranks write together: each rank's segments, and the ranks' commits so far.

A rank is one of the writers: its segments are of some heads, of some layers, or both. It has a
write lease of its own on the same extent as all, fills its segments, and commits with a header that
has their checksums and zeros elsewhere, because two processes must not write one page. The node
unites the headers. When the last rank has committed, and all segments have checksums with it, the
block becomes visible; until then a rank that gives up cancels the block for all ranks.

A shared write holds its extent itself, in addition to the ranks' leases: a rank's lease ends with
its commit, perhaps before another rank has reserved the block. Pure: no I/O and no clock.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tiffin.messenger.log_rate_limit import Ration

from ...errors import CorruptBlock, InvalidInput, VersionMismatch
from ...format.header import PAGE_BYTES, pack_header, read_header

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ...format.header import Header
    from .records import Replica

log = logging.getLogger(__name__)
log.addFilter(Ration())


class Share(NamedTuple):
    """One rank's part of a shared write; `owned` has a bit per segment, lowest first."""

    rank: int
    ranks: int
    owned: int


def share_of(rank: int, ranks: int, owned: bytes) -> Share | None:
    """The share of a reservation request, `owned` as its bits in bytes; None for a single writer.

    Raises InvalidInput.
    """
    if ranks == 1:
        return None
    bits = int.from_bytes(owned, "little")
    if rank >= ranks or not bits:
        raise InvalidInput(
            f"writer {rank} of {ranks} with {bits.bit_count()} segments: ranks count from 0, and "
            "each has segments of its own"
        )
    return Share(rank, ranks, bits)


class SharedWrite:
    """A block that several ranks write: the ranks that have reserved it, the ranks that have
    committed it, and their checksums."""

    __slots__ = ("_checksums", "_header", "_owned", "arrived", "expires_at", "joined", "ranks")

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.joined: dict[int, int] = {}  # by rank: bits of its segments
        self.arrived: set[int] = set()
        self.expires_at = 0.0
        self._owned = 0
        self._header: Header | None = None
        self._checksums: NDArray[np.uint64] | None = None

    def overlaps(self, share: Share) -> bool:
        """Whether another rank has claimed some of these segments."""
        return bool(self._owned & share.owned)

    def join(self, share: Share, expires_at: float) -> None:
        """Record a rank's reservation of the block; all ranks' deadline is now `expires_at`."""
        self.joined[share.rank] = share.owned
        self._owned |= share.owned
        self.expires_at = expires_at

    def unite(self, rank: int, raw: bytes, replica: Replica) -> bool:
        """Merge one rank's header. False if it is damaged, of another block, covers segments other
        than this rank's, or contradicts an earlier rank's header."""
        try:
            header = read_header(_whole_pages(raw), offset_expected=replica.offset)
        except (CorruptBlock, VersionMismatch) as error:
            log.warning("the commit of rank %d is refused: %s", rank, error)
            return False
        if not names(header, replica) or _bits(header.checksums) != self.joined[rank]:
            log.warning("the commit of rank %d is refused: not its block, or not its part", rank)
            return False
        if self._header is None or self._checksums is None:
            self._header, self._checksums = header, header.checksums.copy()
            return True
        if not _agree(header, self._header):
            log.warning("the commit of rank %d is refused: its header is another", rank)
            return False
        self._checksums += header.checksums  # of disjoint segments: elsewhere both have zeros
        return True

    def completes(self, rank: int) -> bool:
        """Whether a commit of this rank is the last one missing."""
        return len(self.arrived | {rank}) == self.ranks

    def header_pages(self) -> NDArray[np.uint8] | None:
        """The united header, or None while a segment has no checksum from any rank."""
        header, checksums = self._header, self._checksums
        if header is None or checksums is None or not checksums.all():
            return None
        pages = np.zeros(header.header_bytes, np.uint8)
        pack_header(
            pages,
            key=header.key,
            parent=header.parent,
            schema_fingerprint=header.schema_fingerprint,
            namespace_fingerprint=header.namespace_fingerprint,
            generation=header.generation,
            payload_bytes=header.payload_bytes,
            extent_offset=header.extent_offset,
            extent_bytes=header.extent_bytes,
            tokens=header.tokens,
            segment_bytes=header.segment_bytes,
            checksums=checksums,
            algorithm=header.algorithm,
        )
        return pages


class SharedWrites(dict["Replica", SharedWrite]):
    """All shared writes of a node, by replica."""

    def check(self, replicas: Sequence[Replica | None], share: Share, length: int) -> None:
        """Check a share before anything is granted. Raises InvalidInput if it claims segments of
        another rank, or another block size."""
        for replica in replicas:
            shared = self.get(replica) if replica is not None else None
            if shared is None or shared.ranks != share.ranks or share.rank in shared.joined:
                continue  # the reservation gets BUSY, or there is no shared write to compare with
            assert replica is not None
            if replica.length != length or shared.overlaps(share):
                raise InvalidInput(
                    f"rank {share.rank} of {share.ranks} claims segments of another rank, or "
                    "another block size: all ranks use one schema and the same stages, and each "
                    "its own number"
                )

    def begin(self, replica: Replica, share: Share, expires_at: float) -> None:
        """Start a shared write for the first rank's reservation. It holds the replica until it is
        popped."""
        replica.holds += 1
        self[replica] = shared = SharedWrite(share.ranks)
        shared.join(share, expires_at)

    def join(self, replica: Replica, share: Share, expires_at: float) -> bool:
        """Let a further rank join a shared write, with a hold of its own; False if it may not."""
        shared = self.get(replica)
        if shared is None or shared.ranks != share.ranks or share.rank in shared.joined:
            return False
        shared.join(share, expires_at)
        replica.holds += 1
        return True

    def arrive(self, replica: Replica, rank: int) -> bool:
        """Record a rank's commit; returns whether it was the last."""
        shared = self[replica]
        shared.arrived.add(rank)
        return len(shared.arrived) == shared.ranks

    def due(self, now: float) -> list[Replica]:
        """Blocks that some rank did not commit before the deadline."""
        return [replica for replica, shared in self.items() if shared.expires_at <= now]


def names(header: Header, replica: Replica) -> bool:
    """Whether a header, whose offset was checked, is for this block in this extent."""
    return (
        header.key == replica.key
        and header.generation == replica.generation
        and header.extent_bytes == replica.length
    )


def _whole_pages(raw: bytes) -> bytes:
    """A header padded with zeros to whole pages, as it is stored in an extent."""
    return raw.ljust(-(-len(raw) // PAGE_BYTES) * PAGE_BYTES, b"\0")


def _bits(checksums: NDArray[np.uint64]) -> int:
    return int.from_bytes(np.packbits(checksums != 0, bitorder="little").tobytes(), "little")


def _agree(one: Header, other: Header) -> bool:
    """Whether two headers differ in nothing but checksums."""
    return _identity(one) == _identity(other) and np.array_equal(
        one.segment_bytes, other.segment_bytes
    )


def _identity(header: Header) -> tuple[object, ...]:
    return (
        header.parent,
        header.schema_fingerprint,
        header.namespace_fingerprint,
        header.payload_bytes,
        header.tokens,
        header.algorithm,
    )
