"""The checksums of segments that a writer published before its commit.

The block's header gets these, and only what was not published is hashed at the commit: so each byte
is hashed once, and the header vouches for the bytes that followers verified.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ...format.schema import KVSchema


class PublishedChecksums:
    """Of one block. `checksums`: uint64 [segments], zero for those that are not known."""

    __slots__ = ("_known", "checksums")

    def __init__(self, schema: KVSchema) -> None:
        count = len(schema.segments)
        self._known = np.zeros(count, np.bool_)
        self.checksums = np.zeros(count, np.uint64)

    def note(self, segments: Sequence[int], checksums: NDArray[np.uint64]) -> None:
        """Note the checksums of these segments."""
        self._known[segments] = True
        self.checksums[segments] = checksums

    def missing(self, segments: NDArray[np.intp]) -> list[int]:
        """Those of these segments whose checksums are not known."""
        missing: list[int] = segments[~self._known[segments]].tolist()
        return missing
