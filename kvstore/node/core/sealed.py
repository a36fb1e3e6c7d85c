"""The segments of a block: where they lie in its extent, and their checksums."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ...errors import InvalidInput

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ...format.header import Header


class SegmentPart(NamedTuple):
    """One segment: its byte range in the block's extent, and the checksum from its writer."""

    offset: int
    length: int
    checksum: int


class Sealed:
    """Byte ranges of a committed block's segments in its extent, and their checksums, by index."""

    __slots__ = ("_checksums", "_lengths", "_offsets")

    def __init__(self, header: Header) -> None:
        self._lengths = header.segment_bytes.astype(np.int64)
        self._offsets = header.header_bytes + np.cumsum(self._lengths) - self._lengths
        self._checksums = header.checksums

    def parts(self, segments: NDArray[np.intp]) -> list[SegmentPart]:
        """These segments. Raises InvalidInput for an index beyond the block's segments."""
        if len(segments) and int(segments.max()) >= len(self._lengths):
            raise InvalidInput(
                f"segment {int(segments.max())} of a block of {len(self._lengths)} segments: "
                "followers and writers use one schema"
            )
        chosen = (self._offsets[segments], self._lengths[segments], self._checksums[segments])
        return [
            SegmentPart(*part) for part in zip(*(array.tolist() for array in chosen), strict=True)
        ]
