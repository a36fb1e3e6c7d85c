"""The checksums of segments that a writer published before its commit.

The block's header gets these, and only what was not published is hashed at the commit: so each byte
is hashed once, and the header vouches for the bytes that followers verified.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tiffin.messenger.shm import host_copy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ...format.schema import KVSchema


class PublishedChecksums:
    """Of one block. `checksums`: uint64 [segments], zero for those that are not known."""

    __slots__ = ("_known", "_schema", "checksums")

    def __init__(self, schema: KVSchema) -> None:
        self._schema = schema
        count = len(schema.segments)
        self._known = np.zeros(count, np.bool_)
        self.checksums = np.zeros(count, np.uint64)

    def note(self, segments: Sequence[int], checksums: NDArray[np.uint64]) -> None:
        """Note the checksums of these segments."""
        self._known[segments] = True
        self.checksums[segments] = checksums

    def complete(self, payload: NDArray[np.uint8], segments: NDArray[np.intp]) -> list[int]:
        """Hash those of these segments of a whole payload that are not known; returns them."""
        missing: list[int] = segments[~self._known[segments]].tolist()
        if missing:
            chosen = [self._schema.segments[n] for n in missing]
            spans = [(segment.offset, segment.length) for segment in chosen]
            self.note(missing, host_copy.hash_segments(payload, spans, self._schema.checksum))
        return missing
