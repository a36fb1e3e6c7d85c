"""The tables that the checksum kernels read: the pages that each launch hashes, and constants.

They are made on the host. Segments are hashed level by level (defined in page_hash.py). A launch
takes the pages of one level of all segments; a level has two launches if some segment begins or
ends at no multiple of 8 bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from .page_hash import HASH_BYTES, PAGE_BYTES

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Numbers = NDArray[np.int64]

# Pages of one program, by four threads each: 64 threads, so that a block of 64 MiB gives each of an
# H100's 132 SMs eight programs. Chosen by that arithmetic.
TILE_PAGES: Final = 16
TILE_BYTES: Final = TILE_PAGES * PAGE_BYTES

# XXH3's default secret: kSecret, xxhash.h of xxHash 0.8.3.
_SECRET: Final = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
    "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
    "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
    "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e"
    "2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_PRIME32: Final = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
_PRIME64: Final = (
    0x9E3779B185EBCA87,
    0xC2B2AE3D27D4EB4F,
    0x165667B19E3779F9,
    0x85EBCA77C2B2AE63,
    0x27D4EB2F165667C5,
)


class Tiles(NamedTuple):
    """The pages of one launch: `tiles` is int64 [3, count], see `checksum.kernel.hash_pages`."""

    tiles: Numbers
    align: int


class LaunchPlan(NamedTuple):
    """The launches, in order; and int64 [2, segments]: the index of the root hash, the length."""

    launches: list[Tiles]
    segments: Numbers


def hash_count(lengths: Numbers) -> int:
    """The number of hashes in all levels of segments of these lengths, in bytes."""
    total, counts = 0, _pages(lengths)
    while len(counts):
        total += int(counts.sum())
        counts = _pages(HASH_BYTES * counts[counts > 1])
    return total


def plan(addresses: Numbers, lengths: Numbers, hashes_address: int) -> LaunchPlan:
    """The launches for segments at `addresses`. The hashes of all levels are written from
    `hashes_address` on, level after level."""
    launches: list[Tiles] = []
    roots = np.zeros(len(lengths), np.int64)
    live = np.arange(len(lengths))  # segments that have this level
    # Nothing of an empty segment is read, so it is given an aligned address.
    sources, nbytes, begin = np.where(lengths > 0, addresses, hashes_address), lengths, 0
    while len(live):
        counts = _pages(nbytes)
        ends = begin + np.cumsum(counts)
        firsts = ends - counts
        launches += _launches(sources, nbytes, counts, firsts)
        roots[live] = firsts  # final for segments with one page on this level
        more = counts > 1
        live, begin = live[more], int(ends[-1])
        sources, nbytes = hashes_address + HASH_BYTES * firsts[more], HASH_BYTES * counts[more]
    return LaunchPlan(launches, np.stack([roots, lengths]))


def _pages(nbytes: Numbers) -> Numbers:
    """`page_hash.page_count` of each."""
    return np.maximum(1, -(-nbytes // PAGE_BYTES))


def _launches(sources: Numbers, nbytes: Numbers, counts: Numbers, firsts: Numbers) -> list[Tiles]:
    """The tiles of one level: those made of whole words of 8 bytes, and the rest."""
    per_segment = -(-counts // TILE_PAGES)
    segment = np.repeat(np.arange(len(counts)), per_segment)
    number = np.arange(len(segment)) - np.repeat(np.cumsum(per_segment) - per_segment, per_segment)
    skipped = number * TILE_BYTES
    tiles = np.stack(
        [
            sources[segment] + skipped,
            np.minimum(nbytes[segment] - skipped, TILE_BYTES),
            firsts[segment] + number * TILE_PAGES,
        ]
    )
    places = tiles[0] | tiles[1]
    in_words = places % 8 == 0
    launches = []
    if in_words.any():
        align = 8 if (places[in_words] % 16).any() else 16
        launches.append(Tiles(tiles[:, in_words], align))
    if not in_words.all():
        launches.append(Tiles(tiles[:, ~in_words], 1))
    return launches


def constants() -> NDArray[np.uint64]:
    """The table that the kernels read; its parts are named in `checksum/kernel.py`."""
    primes = (
        _PRIME32[2],
        *_PRIME64[:4],
        _PRIME32[1],
        _PRIME64[4],
        _PRIME32[0],
    )
    keys = np.frombuffer(_SECRET, "<u8")
    last, merge = (np.frombuffer(_SECRET, "<u8", 8, at) for at in (192 - 64 - 7, 11))
    page_sum = PAGE_BYTES * _PRIME64[0] % 2**64
    flips = keys[3] ^ keys[4], keys[5] ^ keys[6]
    rest = np.array([*primes, page_sum, *flips], np.uint64)
    return np.concatenate([keys, last, merge, rest])
