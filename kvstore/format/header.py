"""The block header, and the states of a block in a node.

A header precedes the payload of every block in every tier. It fills whole 4 KiB pages, so that
the payload behind it stays aligned for O_DIRECT. Headers are the index that a restart reads: there
is no journal, and a slab's map (kvstore/tiers/slab.py) only tells where to look for headers. A
reader has to detect four kinds of damage; each has a field:

    torn or flipped bytes     checksum of the header, checksum per segment
    swapped or misdirected    extent_offset, the offset for which the block was written
    stale                     generation, which grows whenever an extent is rewritten
    another prompt, same key  the block's token ids, which a client compares with its own

A node has no schemas, but checks payloads segment by segment when it moves them between tiers: the
header contains the length of each segment beside its checksum.

Readers copy the header once and check the copy: in shared memory the original may change between
check and use. See `docs/block-format.md` for the layout in a table.
"""

import struct
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from tiffin.messenger.shm.host_copy import HASHES, XXH3_64, XXH3_64_PAGES, Algorithm

from ..errors import CorruptBlock, InvalidInput, VersionMismatch

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

Buffer: TypeAlias = bytes | bytearray | memoryview | NDArray[np.uint8]
WritableBuffer: TypeAlias = bytearray | memoryview | NDArray[np.uint8]

PAGE_BYTES = 4096  # the largest logical sector of common NVMe devices, and the CPU's page
MAGIC = b"TIFFINB1"
FORMAT_VERSION = 1
CHECKSUM_XXH3_64 = 1
CHECKSUM_XXH3_64_PAGES = 2
CHECKSUMS: dict[Algorithm, int] = {  # by the algorithm's name in a schema
    XXH3_64: CHECKSUM_XXH3_64,
    XXH3_64_PAGES: CHECKSUM_XXH3_64_PAGES,
}
KEY_BYTES = 16
TOKEN_BYTES = 4
CHECKSUM_BYTES = 8
LENGTH_BYTES = 8

# A segment is a layer, or one group of heads of a layer's part. The deepest published models have
# fewer than 200 layers.
MAX_SEGMENTS = 4096
MAX_BLOCK_TOKENS = 65536

#   magic, checksum | key, parent, schema, namespace | generation, payload_bytes, extent_offset |
#   token_count, segment_count, header_bytes | version, algorithm | extent_bytes
_FIXED = struct.Struct("<8sQ16s16s16s16sQQQIIIHHQ")
_FIXED_BYTES = 128
_CHECKSUM_OFFSET = 8
_SUMMED_FROM = 16  # the checksum covers [16, header_bytes); the magic before it is compared exactly
_GENERATION_OFFSET = 80
_IDENTITY_END = 88  # [16, 88) is key, parent, schema, namespace, generation: one comparison
_EXTENT_OFFSET = 96
_COUNTS_OFFSET = 104
_HEADER_BYTES_OFFSET = 112
_VERSION_OFFSET = 116
_VERSION_END = 120
_VERSIONS: dict[Algorithm, bytes] = {
    name: struct.pack("<HH", FORMAT_VERSION, number) for name, number in CHECKSUMS.items()
}
_ALGORITHMS = {version: name for name, version in _VERSIONS.items()}
_U64 = struct.Struct("<Q")
_U32 = struct.Struct("<I")
_COUNTS = struct.Struct("<III")
_PLACE = struct.Struct("<QQQ")  # generation, payload_bytes, extent_offset
#   key, parent, schema and namespace | generation, payload_bytes, extent_offset | the rest of fixed
_IDENTITY = struct.Struct("<16s16s32sQQQ24s")
_U64_MAX = 2**64 - 1
_U64_DTYPE = np.dtype("<u8")
_PER_SEGMENT_BYTES = CHECKSUM_BYTES + LENGTH_BYTES

assert _FIXED.size == _FIXED_BYTES


class BlockState(StrEnum):
    """The state of a block in one node. Readers see COMMITTED and EVICTING."""

    RESERVED = "reserved"  # an extent is allocated; a writer may be filling it
    COMMITTED = "committed"  # checksums are known; visible to readers
    EVICTING = "evicting"  # being demoted; still readable, and kept if a reader leases it
    QUARANTINED = "quarantined"  # its writer vanished and may still write; not reusable yet


@dataclass(frozen=True, slots=True, eq=False)
class Header:
    """The fields of a verified header.

    `segment_bytes` and `checksums` are uint64 [segments], read-only. The segments follow each other
    without gaps and form the payload: the lengths add up to `payload_bytes`.

    `tokens` is uint32 little-endian, four bytes per token. Compared by identity, because an array
    field has no single truth value.
    """

    key: bytes
    parent: bytes
    schema_fingerprint: bytes
    namespace_fingerprint: bytes
    generation: int
    payload_bytes: int
    extent_offset: int
    extent_bytes: int
    tokens: bytes
    segment_bytes: NDArray[np.uint64]
    checksums: NDArray[np.uint64]
    header_bytes: int
    algorithm: Algorithm  # of the segments' checksums

    @property
    def token_count(self) -> int:
        return len(self.tokens) // TOKEN_BYTES


def header_bytes(segment_count: int, token_count: int) -> int:
    """Size of a header in bytes, a multiple of PAGE_BYTES.

    Llama-3-8B: 128 fixed + 32 segments × 16 + 512 tokens × 4 = 2688, which is one page.
    """
    used_bytes = _FIXED_BYTES + segment_count * _PER_SEGMENT_BYTES + token_count * TOKEN_BYTES
    return -(-used_bytes // PAGE_BYTES) * PAGE_BYTES


MAX_HEADER_BYTES = header_bytes(MAX_SEGMENTS, MAX_BLOCK_TOKENS)


def segment_checksum(buffer: Buffer, algorithm: Algorithm = XXH3_64) -> int:
    """The checksum of one segment's contiguous bytes, as a header stores it."""
    return HASHES[algorithm](_bytes_of(buffer))


def pack_header(
    buffer: WritableBuffer,
    *,
    key: bytes,
    parent: bytes,
    schema_fingerprint: bytes,
    namespace_fingerprint: bytes,
    generation: int,
    payload_bytes: int,
    extent_offset: int,
    extent_bytes: int,
    tokens: bytes,
    segment_bytes: "Sequence[int] | NDArray[np.uint64]",
    checksums: "Sequence[int] | NDArray[np.uint64]",
    algorithm: Algorithm = XXH3_64,
) -> int:
    """Write a header into the first bytes of `buffer` and return its size in bytes.

    Bytes of `buffer` behind the header stay unchanged. The checksum is written last, so a partly
    written header never verifies. `segment_bytes` are the lengths of the segments, in payload
    order; `checksums` were made by `algorithm`. Raises InvalidInput for values that do not fit a
    header.
    """
    if algorithm not in CHECKSUMS:
        raise InvalidInput(f"unknown checksum {algorithm!r}; known: {', '.join(CHECKSUMS)}")
    sums = _u64_array("checksums", checksums)
    lengths = _u64_array("segment lengths", segment_bytes)
    token_count = len(tokens) // TOKEN_BYTES
    names = (key, parent, schema_fingerprint, namespace_fingerprint)
    numbers = (generation, payload_bytes, extent_offset, extent_bytes)
    _refuse_unpackable(names, numbers, tokens, len(sums))
    _refuse_lengths(lengths, len(sums), payload_bytes)
    shape = HeaderShape(
        segment_bytes=lengths,
        token_count=token_count,
        extent_bytes=extent_bytes,
        algorithm=algorithm,
    )
    if extent_bytes < shape.header_bytes + payload_bytes:
        raise InvalidInput(
            f"an extent of {extent_bytes} bytes cannot hold a header of {shape.header_bytes}"
            f" and a payload of {payload_bytes}"
        )
    shape.write(buffer, b"".join(names), generation, extent_offset, tokens, sums)
    return shape.header_bytes


def read_header(buffer: Buffer, *, offset_expected: int | None = None) -> Header:
    """Check a header and return its fields. `offset_expected` is where the caller read it from.

    `buffer` begins with the header and may be longer, shorter or garbage. Raises CorruptBlock,
    whose message names the check that failed, or VersionMismatch for an intact header of another
    version; nothing else, whatever the bytes are.
    """
    raw, fields = _consistent(buffer, offset_expected)
    key, parent, schema, namespace = fields[2:6]
    generation, payload_bytes, extent_offset = fields[6:9]
    token_count, segment_count, size_bytes = fields[9:12]
    tokens_offset = _FIXED_BYTES + segment_count * _PER_SEGMENT_BYTES
    tokens = raw[tokens_offset : tokens_offset + token_count * TOKEN_BYTES]
    return Header(
        key=key,
        parent=parent,
        schema_fingerprint=schema,
        namespace_fingerprint=namespace,
        generation=generation,
        payload_bytes=payload_bytes,
        extent_offset=extent_offset,
        extent_bytes=fields[14],
        tokens=tokens,
        segment_bytes=_segment_bytes(raw, segment_count),
        checksums=_checksums(raw, segment_count),
        header_bytes=size_bytes,
        algorithm=_ALGORITHMS[raw[_VERSION_OFFSET:_VERSION_END]],
    )


def is_header_of(
    buffer: Buffer, key: bytes, generation: int, extent_offset: int, extent_bytes: int
) -> bool:
    """Whether an intact header is of this block in this extent; for the node, which knows no more
    of it. Raises as `read_header`, which takes twice as long."""
    _, fields = _consistent(buffer, extent_offset)
    return (fields[2], fields[6], fields[14]) == (key, generation, extent_bytes)


def _consistent(buffer: Buffer, offset_expected: int | None) -> tuple[bytes, tuple[Any, ...]]:
    """A copy of a header and its fixed fields, after all checks that need nothing but the header
    and its place. Raises as `read_header`."""
    raw = _checked_copy(buffer)
    fields = _FIXED.unpack_from(raw)
    token_count, segment_count, size_bytes = fields[9:12]
    payload_bytes, extent_offset, extent_bytes = fields[7], fields[8], fields[14]
    _check_counts(segment_count, token_count, size_bytes)
    if extent_bytes < size_bytes + payload_bytes:
        raise CorruptBlock(f"extent of {extent_bytes} bytes is smaller than its content")
    if (sum_bytes := _sum(_segment_bytes(raw, segment_count))) != payload_bytes:
        raise CorruptBlock(f"segments of {sum_bytes} bytes in a payload of {payload_bytes}")
    _check_position(extent_offset, offset_expected)
    return raw, fields


def relocate_header(
    buffer: WritableBuffer, *, extent_offset: int, generation: int | None = None
) -> None:
    """Rewrite a header's extent offset, and its generation if given, and its checksum.

    The header is verified first: a new checksum over damaged bytes would hide the damage.
    Raises CorruptBlock and VersionMismatch like `read_header`, InvalidInput for numbers that do not
    fit.
    """
    if not 0 <= extent_offset <= _U64_MAX:
        raise InvalidInput(f"extent_offset {extent_offset} is not an unsigned 64-bit number")
    if generation is not None and not 0 <= generation <= _U64_MAX:
        raise InvalidInput(f"generation {generation} is not an unsigned 64-bit number")
    size_bytes = read_header(buffer).header_bytes
    view = _writable(buffer, size_bytes)
    _U64.pack_into(view, _EXTENT_OFFSET, extent_offset)
    if generation is not None:
        _U64.pack_into(view, _GENERATION_OFFSET, generation)
    _sign(view, size_bytes)


def verify_identity(
    buffer: Buffer,
    key: bytes,
    parent: bytes,
    schema_fingerprint: bytes,
    namespace_fingerprint: bytes,
    generation: int,
    tokens: bytes,
    *,
    offset_expected: int | None = None,
) -> NDArray[np.uint64]:
    """Check that this is the block a reader requested; return its segment checksums, uint64 [S].

    The header is copied once and the whole identity is one comparison of 72 bytes. `tokens` is
    uint32 little-endian and detects a collision of keys. Raises CorruptBlock, which names the field
    that differs, or VersionMismatch.
    """
    raw = _checked_copy(buffer)
    wanted = key + parent + schema_fingerprint + namespace_fingerprint + _U64.pack(generation)
    if raw[_SUMMED_FROM:_IDENTITY_END] != wanted:
        raise CorruptBlock(f"another block's header: {_differing(raw, wanted)} differs")
    token_count, segment_count, size_bytes = _COUNTS.unpack_from(raw, _COUNTS_OFFSET)
    _check_counts(segment_count, token_count, size_bytes)
    tokens_offset = _FIXED_BYTES + segment_count * _PER_SEGMENT_BYTES
    if raw[tokens_offset : tokens_offset + token_count * TOKEN_BYTES] != tokens:
        raise CorruptBlock("another block's header: token ids differ, the keys collide")
    if offset_expected is not None:
        _check_position(_U64.unpack_from(raw, _EXTENT_OFFSET)[0], offset_expected)
    return _checksums(raw, segment_count)


class HeaderShape:
    """The common parts of all block headers of one schema. `write` is the writers' part (7 us a
    block where `pack_header`, which checks every value, takes 20); `leading` is the readers' fast
    check.

    `verify_identity` takes 3 us a block, most of it Python; a reader that leases 16 blocks checks
    in 0.7 us each that these are the requested blocks, and needs the exact reason only when not.
    Every field except the checksums and segment lengths is compared with its expected value, so the
    header's own checksum need not be computed: the verification of a segment detects a flipped bit
    in its checksum, as a mismatch, and a reader takes lengths from its schema.
    """

    __slots__ = (
        "_constant",
        "_lengths",
        "_segment_count",
        "_tokens_offset",
        "header_bytes",
        "payload_bytes",
        "used_bytes",
    )

    def __init__(
        self,
        *,
        segment_bytes: "NDArray[np.uint64]",
        token_count: int,
        extent_bytes: int,
        algorithm: Algorithm = XXH3_64,
    ) -> None:
        self._segment_count = len(segment_bytes)
        self._lengths = segment_bytes.astype(_U64_DTYPE).tobytes()
        self.header_bytes = header_bytes(self._segment_count, token_count)
        self.payload_bytes = _sum(segment_bytes)
        counts = _COUNTS.pack(token_count, self._segment_count, self.header_bytes)
        self._constant = counts + _VERSIONS[algorithm] + _U64.pack(extent_bytes)
        self._tokens_offset = _FIXED_BYTES + self._segment_count * _PER_SEGMENT_BYTES
        # The bytes that a reader copies: without the zeros up to the end of the last page.
        self.used_bytes = self._tokens_offset + token_count * TOKEN_BYTES

    def write(
        self,
        buffer: WritableBuffer,
        names: bytes,
        generation: int,
        extent_offset: int,
        tokens: bytes,
        checksums: "NDArray[np.uint64]",
    ) -> None:
        """Write a header into the first bytes of `buffer`; those behind it stay unchanged. Its
        checksum is written last, so that a partly written header never verifies.

        `names` is key, parent, schema fingerprint and namespace fingerprint, joined (64 bytes);
        `checksums` is uint64 [segments]. Raises InvalidInput if `buffer` is too short or read-only.
        """
        view = _writable(buffer, self.header_bytes)
        place = _PLACE.pack(generation, self.payload_bytes, extent_offset)
        sums = checksums.astype(_U64_DTYPE, copy=False).tobytes()
        padding = bytes(self.header_bytes - self.used_bytes)
        parts = (names, place, self._constant, sums, self._lengths, tokens, padding)
        summed = b"".join(parts)
        view[_SUMMED_FROM : self.header_bytes] = summed
        view[:_SUMMED_FROM] = MAGIC + _U64.pack(xxh3_64_intdigest(summed))

    def leading(
        self,
        raws: "Iterable[bytes]",
        offsets: "Sequence[int]",
        generations: "Sequence[int]",
        keys: "Sequence[bytes]",
        parent: bytes,
        fingerprints: bytes,
        tokens: "Sequence[bytes]",
    ) -> list[bytes]:
        """Those of `raws`, copies of `used_bytes` of headers, that are of the leading blocks of a
        chain.

        `offsets` are where they lie. The other sequences have an entry per block, or more; `parent`
        is the key before the first block's, `fingerprints` the schema's and the namespace's,
        joined.
        """
        pack, tokens_offset = _IDENTITY.pack, self._tokens_offset
        payload_bytes, constant, good = self.payload_bytes, self._constant, list[bytes]()
        blocks = zip(raws, offsets, generations, keys, tokens, strict=False)
        for raw, offset, generation, key, chunk in blocks:
            identity = pack(key, parent, fingerprints, generation, payload_bytes, offset, constant)
            if not (
                raw.startswith(identity, _SUMMED_FROM)
                and raw[tokens_offset:] == chunk
                and raw.startswith(MAGIC)
            ):
                break
            parent = key
            good.append(raw)
        return good

    def checksums(self, raw: bytes) -> NDArray[np.uint64]:
        """The segments' checksums, uint64 [segments], in the copy of a header that matched."""
        return _checksums(raw, self._segment_count)

    def checksum_table(self, raws: "Sequence[bytes]") -> NDArray[np.uint64]:
        """`checksums` of several blocks: uint64 [blocks, segments]."""
        end = _FIXED_BYTES + self._segment_count * CHECKSUM_BYTES
        joined = b"".join([raw[_FIXED_BYTES:end] for raw in raws])
        return np.frombuffer(joined, _U64_DTYPE).reshape(len(raws), self._segment_count)


def _checked_copy(buffer: Buffer) -> bytes:
    """A copy of the header's bytes, after all checks that do not depend on the requested block.

    The checks run in the order of `docs/block-format.md`. The version is checked after the
    checksum, so a flipped bit in it is reported as damage and not as another version.
    """
    view = _bytes_of(buffer)
    if len(view) < PAGE_BYTES:
        raise CorruptBlock(f"{len(view)} bytes are less than a header's first page")
    size_bytes: int = _U32.unpack_from(view, _HEADER_BYTES_OFFSET)[0]
    if not PAGE_BYTES <= size_bytes <= min(len(view), MAX_HEADER_BYTES):
        size_bytes = PAGE_BYTES  # damaged or truncated; the checks below say which
    raw = view[:size_bytes].tobytes()
    if not raw.startswith(MAGIC):
        raise CorruptBlock("wrong magic: no block header here")
    claimed_bytes: int = _U32.unpack_from(raw, _HEADER_BYTES_OFFSET)[0]
    if claimed_bytes != len(raw) or claimed_bytes % PAGE_BYTES:
        raise CorruptBlock(f"header_bytes {claimed_bytes} does not fit {len(view)} bytes")
    (checksum,) = _U64.unpack_from(raw, _CHECKSUM_OFFSET)
    if checksum != xxh3_64_intdigest(raw[_SUMMED_FROM:]):
        raise CorruptBlock("header checksum differs")
    if raw[_VERSION_OFFSET:_VERSION_END] not in _ALGORITHMS:
        version, algorithm = struct.unpack_from("<HH", raw, _VERSION_OFFSET)
        known = " or ".join(map(str, CHECKSUMS.values()))
        raise VersionMismatch(
            f"block format {version} with checksum algorithm {algorithm};"
            f" this program reads format {FORMAT_VERSION} with algorithm {known}"
        )
    return raw


def _check_counts(segment_count: int, token_count: int, size_bytes: int) -> None:
    fits = segment_count <= MAX_SEGMENTS and token_count <= MAX_BLOCK_TOKENS
    if not fits or header_bytes(segment_count, token_count) != size_bytes:
        raise CorruptBlock(
            f"{segment_count} segments and {token_count} tokens do not make"
            f" a header of {size_bytes} bytes"
        )


def _check_position(extent_offset: int, offset_expected: int | None) -> None:
    if offset_expected is not None and extent_offset != offset_expected:
        raise CorruptBlock(
            f"misplaced: written for offset {extent_offset}, read at {offset_expected}"
        )


def _differing(raw: bytes, wanted: bytes) -> str:
    """Name of the first identity field in which a header differs from the wanted one."""
    fields = ("key", "parent key", "schema fingerprint", "namespace fingerprint")
    for index, name in enumerate(fields):
        first = index * KEY_BYTES
        last = first + KEY_BYTES
        if raw[_SUMMED_FROM + first : _SUMMED_FROM + last] != wanted[first:last]:
            return name
    return "generation"


def _refuse_unpackable(
    names: tuple[bytes, ...], numbers: tuple[int, ...], tokens: bytes, segment_count: int
) -> None:
    if any(len(name) != KEY_BYTES for name in names):
        raise InvalidInput(f"keys and fingerprints are {KEY_BYTES} bytes each")
    if not all(0 <= number <= _U64_MAX for number in numbers):
        raise InvalidInput("generation, sizes and offsets are unsigned 64-bit numbers")
    if len(tokens) % TOKEN_BYTES or len(tokens) > MAX_BLOCK_TOKENS * TOKEN_BYTES:
        raise InvalidInput(
            f"tokens are uint32, at most {MAX_BLOCK_TOKENS}; got {len(tokens)} bytes"
        )
    if segment_count > MAX_SEGMENTS:
        raise InvalidInput(f"{segment_count} segments; at most {MAX_SEGMENTS}")


def _refuse_lengths(lengths: NDArray[np.uint64], segment_count: int, payload_bytes: int) -> None:
    if len(lengths) != segment_count:
        raise InvalidInput(f"{len(lengths)} segment lengths for {segment_count} checksums")
    if (sum_bytes := _sum(lengths)) != payload_bytes:
        raise InvalidInput(f"segments of {sum_bytes} bytes in a payload of {payload_bytes}")


def _u64_array(name: str, values: "Sequence[int] | NDArray[np.uint64]") -> NDArray[np.uint64]:
    try:
        array = np.asarray(values, dtype=_U64_DTYPE)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidInput(f"{name} are unsigned 64-bit numbers: {error}") from error
    if array.ndim != 1:
        raise InvalidInput(f"{name} have one dimension, not {array.ndim}")
    return array


def _sum(lengths: NDArray[np.uint64]) -> int:
    return sum(lengths.tolist())  # Python's integers: in uint64 a malicious sum could overflow


def _checksums(raw: bytes, segment_count: int) -> NDArray[np.uint64]:
    return np.frombuffer(raw, _U64_DTYPE, segment_count, _FIXED_BYTES)


def _segment_bytes(raw: bytes, segment_count: int) -> NDArray[np.uint64]:
    offset = _FIXED_BYTES + segment_count * CHECKSUM_BYTES
    return np.frombuffer(raw, _U64_DTYPE, segment_count, offset)


def _bytes_of(buffer: Buffer) -> memoryview:
    view = buffer.data if isinstance(buffer, np.ndarray) else memoryview(buffer)
    # cast() also refuses non-contiguous views
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


def _writable(buffer: WritableBuffer, size_bytes: int) -> memoryview:
    view = _bytes_of(buffer)
    if view.readonly or len(view) < size_bytes:
        raise InvalidInput(f"a header needs {size_bytes} writable bytes, not {len(view)}")
    return view


def _sign(view: memoryview, size_bytes: int) -> None:
    _U64.pack_into(view, _CHECKSUM_OFFSET, xxh3_64_intdigest(view[_SUMMED_FROM:size_bytes]))
