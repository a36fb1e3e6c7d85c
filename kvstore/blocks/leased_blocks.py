"""Leased blocks in the node's memory region: checks headers and checksums, copies blocks out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tiffin.messenger.shm import host_copy

from ..errors import CorruptBlock, VersionMismatch
from ..format.expected_headers import ExpectedHeaders
from .block_views import Block
from .selection_copy import gather, gather_hashed

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from ..format.keys import Prefix
    from ..node.core import messages
    from .block_views import Selection

    Bytes = NDArray[np.uint8]


class LeasedExtents:
    """Blocks of `prefix` under one lease, at `offsets` of the region."""

    __slots__ = (
        "_expected",
        "_keys",
        "_used_bytes",
        "_view",
        "generations",
        "memory",
        "offsets",
        "prefix",
        "schema",
    )

    def __init__(self, prefix: Prefix, memory: Bytes, reply: messages.Leased) -> None:
        self.prefix = prefix
        self.schema = prefix.schema
        self.memory = memory
        self.offsets = reply.offsets
        self.generations = reply.generations
        self._keys = prefix.keys
        self._expected = ExpectedHeaders(prefix)
        self._used_bytes = prefix.schema.header.used_bytes
        self._view = memory.data

    def leading(self) -> int:
        """Count the leading blocks with the header that the prefix expects."""
        return self._expected.leading(self._view, self.offsets, self.generations)

    def identify(self, index: int) -> bytes:
        """Check the header of block `index` against the prefix, and return a copy of it without the
        zeros at its end. Raises CorruptBlock or VersionMismatch, which name the field that differs.
        """
        generation, offset = self.generations[index], self.offsets[index]
        raw = self._view[offset : offset + self._used_bytes].tobytes()
        if not self._expected.matches(index, raw, generation, offset):
            whole = self._view[offset : offset + self.schema.header_bytes]
            self._expected.complain(index, whole, generation, offset)
        return raw

    def payload(self, index: int) -> Bytes:
        """The payload of block `index`, read-only."""
        begin = self.offsets[index] + self.schema.header_bytes
        payload = self.memory[begin : begin + self.schema.block_bytes]
        payload.flags.writeable = False
        return payload

    def block(self, selection: Selection, index: int) -> Block:
        """A view of block `index` in place."""
        key, generation = self._keys[index], self.generations[index]
        return Block(self.payload(index), selection, key, generation, packed=False)


def check(
    leased: LeasedExtents,
    selection: Selection,
    targets: Sequence[Bytes],
    first: int,
    sample: Sequence[bool],
) -> int:
    """Check the blocks from `first` on, one for each of `sample`, and copy them if there are
    `targets`; `sample[i]` is whether to verify that block's payload. Returns the index after the
    last good block."""
    header = leased.schema.header
    for index, verifies in enumerate(sample, start=first):
        try:
            raw = leased.identify(index)
            wanted = header.checksums(raw) if verifies else None
            if targets:
                copy(targets[index], leased.payload(index), selection, wanted)
            elif wanted is not None:
                verify(leased.payload(index), selection, wanted)
        except (CorruptBlock, VersionMismatch):
            return index
    return first + len(sample)


def verify(payload: Bytes, selection: Selection, checksums: NDArray[np.uint64]) -> None:
    """Hash the touched segments in place and compare checksums. Raises CorruptBlock."""
    _compare(
        host_copy.hash_segments(payload, selection.spans, selection.schema.checksum),
        selection,
        checksums,
    )


def _compare(
    found: NDArray[np.uint64], selection: Selection, checksums: NDArray[np.uint64]
) -> None:
    if len(found) != len(checksums):  # the selection is a part of the block
        checksums = checksums[selection.segments]
    differs = found != checksums
    if differs.any():
        segment = int(selection.segments[int(differs.argmax())])
        raise CorruptBlock(f"checksum of layer {selection.schema.layer_of(segment)} differs")


def copy(
    target: Bytes, payload: Bytes, selection: Selection, checksums: NDArray[np.uint64] | None
) -> None:
    """Copy the selection; with `checksums`, verify the copied bytes. A checksum covers a whole
    segment, so a head range that cuts through segments is verified at the source, whole segments at
    a time. Raises CorruptBlock."""
    if checksums is not None and selection.aligned:
        _compare(gather_hashed(target, payload, selection), selection, checksums)
        return
    if checksums is not None:
        verify(payload, selection, checksums)
    gather(target, payload, selection)
