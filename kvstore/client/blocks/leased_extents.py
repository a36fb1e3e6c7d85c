"""Leased blocks in the node's memory region: checks headers and checksums, copies blocks out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tiffin.messenger.shm import host_copy

from ...format.expected_headers import ExpectedHeaders
from .block_views import Block
from .selection_copy import copy_hashed, first_differing, gather

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from ...format.keys import Prefix
    from ...node.core import messages
    from .block_views import Selection

    Bytes = NDArray[np.uint8]


class LeasedExtents:
    """Blocks of `prefix` under one lease, at `offsets` of the region."""

    __slots__ = (
        "_expected",
        "_keys",
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
        self._view = memory.data

    def headers(self, first: int, count: int) -> list[bytes]:
        """Copies of the headers of up to `count` blocks from `first` on, without the zeros at their
        end, as far as they are what the prefix expects."""
        offsets, size = self.offsets[first : first + count], self.schema.header.used_bytes
        raws = (self._view[at : at + size].tobytes() for at in offsets)
        generations = self.generations[first : first + count]
        return self._expected.leading(raws, offsets, generations, first)

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
    last good block.

    What is copied and verified is hashed as it was copied. But a checksum covers a whole segment:
    a head range that cuts through segments is verified in place, and copied then.
    """
    headers = leased.headers(first, len(sample))
    end = first + len(headers)
    verified = [i for i, verifies in zip(range(first, end), sample, strict=False) if verifies]
    hashes_copies = bool(targets) and selection.aligned
    if verified:
        payloads = [leased.payload(i) for i in verified]
        if hashes_copies:
            found = copy_hashed([targets[i] for i in verified], payloads, selection)
        else:
            algorithm = selection.schema.checksum
            found = host_copy.hash_blocks(payloads, selection.spans, algorithm)
        bad = first_differing(found, [headers[i - first] for i in verified], selection)
        if bad is not None:
            end = verified[bad]
    if targets:
        for i in range(first, end):
            if not (hashes_copies and sample[i - first]):
                gather(targets[i], leased.payload(i), selection)
    return end
