"""Makes the header of a block that a writer has written, with which readers verify the block."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tiffin.messenger.wire.framing import FRAME_BYTES_MAX

from ..errors import InvalidInput

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .keys import Prefix
    from .schema import KVSchema

    Bytes = NDArray[np.uint8]

# Room for a shard commit's bytes besides its headers: a few, and 1 to 9 for each slot skipped.
_OTHER_BYTES = 1 << 20


def seal(
    target: Bytes,
    prefix: Prefix,
    index: int,
    *,
    generation: int,
    offset: int,
    checksums: NDArray[np.uint64],
) -> None:
    """Write the header of block `index` of `prefix` into the first bytes of `target`.

    `offset` is where the block's extent begins in its tier; `checksums` is uint64 [segments], by
    the schema's algorithm.
    """
    key, parent = prefix.keys[index], prefix.keys[index - 1] if index else prefix.parent
    names = key + parent + prefix.schema_fingerprint + prefix.namespace_fingerprint
    tokens = prefix.token_bytes(index)
    prefix.schema.header.write(target, names, generation, offset, tokens, checksums)


def shard_header(
    prefix: Prefix,
    index: int,
    *,
    generation: int,
    offset: int,
    checksums: NDArray[np.uint64],
) -> bytes:
    """The header in one rank's commit: zeros for the segments of other ranks, and without the
    padding at its end. A rank never writes a header itself, because ranks share its page."""
    pages = np.zeros(prefix.schema.header_bytes, np.uint8)
    seal(pages, prefix, index, generation=generation, offset=offset, checksums=checksums)
    return pages[: prefix.schema.header.used_bytes].tobytes()


def shard_blocks_max(schema: KVSchema) -> int:
    """How many blocks one reservation of a rank may have: their headers must fit in one frame."""
    return (FRAME_BYTES_MAX - _OTHER_BYTES) // (schema.header.used_bytes + 8)


def check_shard_blocks(prefix: Prefix) -> None:
    """Raise InvalidInput for more blocks than fit, with their headers, in one commit of a rank."""
    if len(prefix) > (most := shard_blocks_max(prefix.schema)):
        raise InvalidInput(
            f"{len(prefix)} blocks in one reservation of a rank; their headers fit one commit up to"
            f" {most}: reserve slices of the prefix"
        )
