"""`xxh3_64_pages`: the checksum of a segment, made of many small hashes instead of one long one.

XXH3-64 of a long input is one chain of steps from its first 64 bytes to its last, with 8 lanes of
64 bits in each: a GPU cannot run it in parallel. Here each page is hashed on its own, which gives
thousands of independent chains:

    page hash   XXH3-64 (seed 0, default secret) of 4096 bytes; the last page of a segment is
                padded with zeros, and an empty segment has one page of zeros
    level       the hashes of the pages of the level below, 8 bytes each, little-endian; cut into
                pages, padded and hashed in turn, until there is one hash: the root
    checksum    XXH3-64 of 16 bytes: the root, and the length of the segment, both little-endian

Padding is unambiguous because the length is hashed. A segment of up to 4 KiB has one level, up to
2 MiB two, up to 1 GiB three. `docs/block-format.md` has test vectors; `segment_checksum.py`
computes the same on a GPU.

Speed, one core of an AMD EPYC (Zen 5), 64 MiB in segments of 2 MiB: 22 to 23 GB/s, where XXH3-64
of whole segments takes 33 to 35 GB/s and a copy 19 to 20. The loop over pages runs in C (`map` over
the rows of an array; slices of a memoryview, cut in Python, give 14 GB/s), but xxhash keeps the GIL
for an input as short as a page: two threads are no faster than one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
from xxhash import xxh3_64_digest, xxh3_64_intdigest

from ..errors import LayoutError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from numpy.typing import NDArray

    Bytes: TypeAlias = memoryview | NDArray[np.uint8]

# A page of the hash; it has nothing to do with pages of memory or of a disk. A larger page would be
# a little faster on a CPU (8 KiB: 26 GB/s, 16 KiB: 29) and give a GPU proportionally fewer lanes:
# at 4 KiB, a block of 64 MiB has 16,384 pages of 8 lanes each, which an H100 can hold at once.
PAGE_BYTES: Final = 4096
HASH_BYTES: Final = 8

_digest: Callable[[Any], bytes] = xxh3_64_digest  # seed 0


def checksum(data: Bytes) -> int:
    """The checksum of contiguous bytes: uint8, one-dimensional."""
    nbytes = data.nbytes
    if nbytes <= PAGE_BYTES:  # the same result as below, in a third of the time
        root = _digest(data.tobytes().ljust(PAGE_BYTES, b"\0"))[::-1]
        return xxh3_64_intdigest(root + nbytes.to_bytes(8, "little"))
    return fold(page_hashes(data), nbytes)


def checksums(data: Bytes, spans: Iterable[tuple[int, int]]) -> NDArray[np.uint64]:
    """The checksum of each (offset, length) of contiguous bytes; uint64 [spans].

    The spans must be inside `data`; this is not checked.
    """
    view = data.data if isinstance(data, np.ndarray) else data
    return np.array([checksum(view[at : at + length]) for at, length in spans], np.uint64)


def page_hashes(data: Bytes) -> NDArray[np.uint64]:
    """The hash of each page, uint64 [pages]; an empty segment has one.

    The hashes of a segment are those of its pieces, one after the other, if each piece but the last
    is a whole number of pages.
    """
    array = np.frombuffer(data, np.uint8) if isinstance(data, memoryview) else data
    whole_bytes = len(array) // PAGE_BYTES * PAGE_BYTES
    digests = b"".join(map(_digest, array[:whole_bytes].reshape(-1, PAGE_BYTES)))
    if whole_bytes < len(array) or not digests:
        digests += _digest(array[whole_bytes:].tobytes().ljust(PAGE_BYTES, b"\0"))
    return np.frombuffer(digests, ">u8").astype("<u8")  # digests are big-endian


def page_count(nbytes: int) -> int:
    """The number of pages, and of page hashes, of `nbytes` bytes: at least one."""
    return max(1, -(-nbytes // PAGE_BYTES))


def fold(hashes: NDArray[np.uint64], nbytes: int) -> int:
    """The checksum of a segment of `nbytes`, from the hashes of all its pages, uint64 [pages].

    Raises LayoutError if a segment of `nbytes` has another number of pages.
    """
    if len(hashes) != page_count(nbytes):
        raise LayoutError(f"{len(hashes)} page hashes for a segment of {nbytes} bytes")
    level = np.ascontiguousarray(hashes, "<u8")
    while len(level) > 1:
        level = page_hashes(level.view(np.uint8))
    return xxh3_64_intdigest(level.tobytes() + nbytes.to_bytes(8, "little"))


__all__ = ["HASH_BYTES", "PAGE_BYTES", "checksum", "checksums", "fold", "page_count", "page_hashes"]
