"""Headers for what a writer has written: from its header on, a block proves itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tiffin.messenger.wire import FRAME_BYTES_MAX

from .block import pack_header
from .errors import InvalidInput

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .keys import Prefix
    from .schema import KVSchema

    Bytes = NDArray[np.uint8]

# What a commit of shards has besides its headers: a few bytes, and 1 to 9 for each slot skipped.
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
    schema = prefix.schema
    pack_header(
        target,
        key=prefix.keys[index],
        parent=prefix.keys[index - 1] if index else prefix.parent,
        schema_fingerprint=prefix.schema_fingerprint,
        namespace_fingerprint=prefix.namespace_fingerprint,
        generation=generation,
        payload_bytes=schema.block_bytes,
        extent_offset=offset,
        extent_bytes=schema.extent_bytes,
        tokens=prefix.token_bytes(index),
        segment_bytes=schema.segment_bytes,
        checksums=checksums,
        algorithm=schema.checksum,
    )


def shard_header(
    prefix: Prefix,
    index: int,
    *,
    generation: int,
    offset: int,
    checksums: NDArray[np.uint64],
) -> bytes:
    """The header that one rank's commit carries: zeros for the segments of other ranks, and
    without the zeros at its end. Ranks never write a header themselves: they share its page."""
    pages = np.zeros(prefix.schema.header_bytes, np.uint8)
    seal(pages, prefix, index, generation=generation, offset=offset, checksums=checksums)
    return pages[: prefix.schema.header.used_bytes].tobytes()


def shard_blocks_max(schema: KVSchema) -> int:
    """How many blocks one reservation of a rank may have: their headers go in one frame."""
    return (FRAME_BYTES_MAX - _OTHER_BYTES) // (schema.header.used_bytes + 8)


def check_shard_blocks(prefix: Prefix) -> None:
    """Raises InvalidInput for more blocks than one commit of a rank can carry the headers of."""
    if len(prefix) > (most := shard_blocks_max(prefix.schema)):
        raise InvalidInput(
            f"{len(prefix)} blocks in one reservation of a rank; their headers fit one commit up to"
            f" {most}: reserve slices of the prefix"
        )
