"""Blocks that several ranks write together: who may write which segments, and what is in already.

Every rank has a write lease of its own on the same extent. It fills its own segments and commits
with a header that has their checksums and zeros elsewhere, because two processes must not write one
page. The node unites the headers. When the last rank is in, and every segment with it, the block
becomes visible; until then any rank that gives up takes the block with it.

A shared write holds its extent itself, beside the ranks' leases: those end with each rank's commit,
and perhaps before another rank has come. Pure: no I/O and no clock.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tiffin.messenger.ration import Ration

from ..block import PAGE_BYTES, pack_header, read_header
from ..errors import CorruptBlock, InvalidInput, VersionMismatch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ..block import Header
    from .records import Replica

log = logging.getLogger(__name__)
log.addFilter(Ration())


class Share(NamedTuple):
    """What one writer of several says of itself; `owned` has a bit per segment, lowest first."""

    rank: int
    ranks: int
    owned: int


def share_of(rank: int, ranks: int, owned: bytes) -> Share | None:
    """The share that a reservation names, `owned` as its bits in bytes; None for a lone writer.

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
    """One block on its way: which ranks have reserved it, which are in, and their checksums."""

    __slots__ = ("_checksums", "_header", "_owned", "arrived", "expires_at", "joined", "ranks")

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.joined: dict[int, int] = {}  # which segments are whose
        self.arrived: set[int] = set()
        self.expires_at = 0.0
        self._owned = 0
        self._header: Header | None = None
        self._checksums: NDArray[np.uint64] | None = None

    def overlaps(self, share: Share) -> bool:
        """Whether some of these segments are another rank's."""
        return bool(self._owned & share.owned)

    def join(self, share: Share, expires_at: float) -> None:
        """One more rank has reserved the block; they all have until `expires_at` now."""
        self.joined[share.rank] = share.owned
        self._owned |= share.owned
        self.expires_at = expires_at

    def unite(self, rank: int, raw: bytes, replica: Replica) -> bool:
        """Take one rank's header. False if it is not what this rank may say of this block."""
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
        self._checksums += header.checksums  # of other segments: elsewhere both have zeros
        return True

    def completes(self, rank: int) -> bool:
        """Whether this rank is the last one."""
        return len(self.arrived | {rank}) == self.ranks

    def header_pages(self) -> NDArray[np.uint8] | None:
        """The united header, or None while some segment is nobody's."""
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
    """All shared writes of a node."""

    def check(self, replicas: Sequence[Replica | None], share: Share, length: int) -> None:
        """Raises InvalidInput, before anything is granted, for a part that can't be `share`'s."""
        for replica in replicas:
            shared = self.get(replica) if replica is not None else None
            if shared is None or shared.ranks != share.ranks or share.rank in shared.joined:
                continue  # busy, or nothing to compare with
            assert replica is not None
            if replica.length != length or shared.overlaps(share):
                raise InvalidInput(
                    f"rank {share.rank} of {share.ranks} claims segments of another rank, or "
                    "another block size: all ranks use one schema, and each its own number"
                )

    def begin(self, replica: Replica, share: Share, expires_at: float) -> None:
        """A first rank has reserved a block. Holds the replica until it is popped."""
        replica.holds += 1
        self[replica] = shared = SharedWrite(share.ranks)
        shared.join(share, expires_at)

    def join(self, replica: Replica, share: Share, expires_at: float) -> bool:
        """One more rank wants to write this block and, if it may, holds it too."""
        shared = self.get(replica)
        if shared is None or shared.ranks != share.ranks or share.rank in shared.joined:
            return False
        shared.join(share, expires_at)
        replica.holds += 1
        return True

    def arrive(self, replica: Replica, rank: int) -> bool:
        """A rank has committed its part; whether it was the last."""
        shared = self[replica]
        shared.arrived.add(rank)
        return len(shared.arrived) == shared.ranks

    def due(self, now: float) -> list[Replica]:
        """Blocks that some rank did not come for in time."""
        return [replica for replica, shared in self.items() if shared.expires_at <= now]


def names(header: Header, replica: Replica) -> bool:
    """Whether a header, whose place was checked, is for this block in this extent."""
    return (
        header.key == replica.key
        and header.generation == replica.generation
        and header.extent_bytes == replica.length
    )


def _whole_pages(raw: bytes) -> bytes:
    """A header as it lies in an extent: with the zeros at its end."""
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
