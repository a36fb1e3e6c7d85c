"""Blocks under a lease, where they lie in the region: recognised, verified, copied out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tiffin.messenger import local

from .block import verify_identity
from .blocks import Block
from .errors import CorruptBlock, VersionMismatch
from .slices import gather, gather_hashed

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from .blocks import Selection
    from .keys import Prefix
    from .node import messages

    Bytes = NDArray[np.uint8]


class Leased:
    """Blocks of `prefix` that lie at `offsets` of the region, under one lease."""

    __slots__ = (
        "_fingerprints",
        "_keys",
        "_tokens",
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
        self._tokens = prefix.token_chunks()
        self._fingerprints = prefix.schema_fingerprint + prefix.namespace_fingerprint
        self._used_bytes = prefix.schema.header.used_bytes
        self._view = memory.data

    def leading(self) -> int:
        """How many leading blocks have the header that the prefix expects."""
        return self.schema.header.leading(
            self._view,
            self.offsets,
            self.generations,
            self._keys,
            self.prefix.parent,
            self._fingerprints,
            self._tokens,
        )

    def identify(self, index: int) -> bytes:
        """A copy of the header of block `index`, checked against all that the prefix knows.

        Without the zeros at its end. Raises CorruptBlock or VersionMismatch, which name what
        differs.
        """
        offset, shape = self.offsets[index], self.schema.header
        raw = self._view[offset : offset + self._used_bytes].tobytes()
        key = self._keys[index]
        parent = self._keys[index - 1] if index else self.prefix.parent
        generation, tokens = self.generations[index], self._tokens[index]
        if not shape.matches(raw, key + parent + self._fingerprints, generation, offset, tokens):
            fingerprints = self.prefix.schema_fingerprint, self.prefix.namespace_fingerprint
            whole = self._view[offset : offset + shape.header_bytes]
            verify_identity(
                whole, key, parent, *fingerprints, generation, tokens, offset_expected=offset
            )
            raise CorruptBlock("another block's header: its sizes or its algorithm differ")
        return raw

    def payload(self, index: int) -> Bytes:
        """The payload of block `index`, read-only."""
        begin = self.offsets[index] + self.schema.header_bytes
        payload = self.memory[begin : begin + self.schema.block_bytes]
        payload.flags.writeable = False
        return payload

    def block(self, selection: Selection, index: int) -> Block:
        """A view of block `index` where it lies."""
        key, generation = self._keys[index], self.generations[index]
        return Block(self.payload(index), selection, key, generation, packed=False)


def check(
    leased: Leased,
    selection: Selection,
    targets: Sequence[Bytes],
    first: int,
    sample: Sequence[bool],
) -> int:
    """Check, and copy if there are `targets`, the blocks from `first` on, one for each of `sample`,
    which tells whether to verify its payload. Returns the index after the last good one."""
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
    """Hash the segments that the selection touches, where they lie. Raises CorruptBlock."""
    _compare(
        local.hash_segments(payload, selection.spans, selection.schema.checksum),
        selection,
        checksums,
    )


def _compare(
    found: NDArray[np.uint64], selection: Selection, checksums: NDArray[np.uint64]
) -> None:
    if len(found) != len(checksums):  # not all of the block was asked for
        checksums = checksums[selection.segments]
    differs = found != checksums
    if differs.any():
        segment = int(selection.segments[int(differs.argmax())])
        raise CorruptBlock(f"checksum of layer {selection.schema.layer_of(segment)} differs")


def copy(
    target: Bytes, payload: Bytes, selection: Selection, checksums: NDArray[np.uint64] | None
) -> None:
    """Copy the selection; with `checksums`, verify what arrived. A checksum covers a whole segment,
    so a head range that cuts through segments is verified at its source, by hashing them whole.
    Raises CorruptBlock."""
    if checksums is not None and selection.aligned:
        _compare(gather_hashed(target, payload, selection), selection, checksums)
        return
    if checksums is not None:
        verify(payload, selection, checksums)
    gather(target, payload, selection)
