"""Headers: any damage to their bytes is noticed, and only typed errors are raised."""

import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from tiffin.kvstore.errors import CorruptBlock, InvalidInput, VersionMismatch
from tiffin.kvstore.format.header import (
    MAGIC,
    MAX_BLOCK_TOKENS,
    MAX_SEGMENTS,
    PAGE_BYTES,
    BlockState,
    Header,
    HeaderShape,
    header_bytes,
    pack_header,
    read_header,
    relocate_header,
    segment_checksum,
    verify_identity,
)
from tiffin.kvstore.format.schema import KVSchema

DOCS = Path(__file__).resolve().parents[3] / "docs"

TOKENS = np.arange(512, dtype="<u4").tobytes()
IDENTITY = {
    "key": b"k" * 16,
    "parent": b"p" * 16,
    "schema_fingerprint": b"s" * 16,
    "namespace_fingerprint": b"n" * 16,
    "generation": 7,
}
PLACE = {"payload_bytes": 1 << 20, "extent_offset": 8192, "extent_bytes": (1 << 20) + 8192}


def split(payload_bytes: int, count: int) -> list[int]:
    """Lengths of `count` segments; the last one has the rest."""
    even_bytes = payload_bytes // count
    return [even_bytes] * (count - 1) + [payload_bytes - even_bytes * (count - 1)]


def packed(
    checksums: Sequence[object] = range(32),
    tokens: bytes = TOKENS,
    size_bytes: int = 8192,
    **fields: object,
) -> bytearray:
    buffer = bytearray(b"\xa5" * size_bytes)
    chosen = {**IDENTITY, **PLACE, **fields}
    if "segment_bytes" not in chosen:
        chosen["segment_bytes"] = split(chosen["payload_bytes"], len(checksums))  # type: ignore[arg-type]
    pack_header(buffer, tokens=tokens, checksums=checksums, **chosen)  # type: ignore[arg-type]
    return buffer


def resign(buffer: bytearray) -> bytearray:
    """Make a manipulated header pass its checksum, to reach the checks that follow."""
    size_bytes = min(struct.unpack_from("<I", buffer, 112)[0], len(buffer))
    struct.pack_into("<Q", buffer, 8, xxh3_64_intdigest(buffer[16:size_bytes]))
    return buffer


def test_sizes() -> None:
    assert header_bytes(32, 512) == 4096
    assert header_bytes(0, 0) == 4096
    assert header_bytes(80, 512) == 4096
    assert header_bytes(120, 512) == 4096  # 128 + 1920 + 2048: full to the last byte
    assert header_bytes(121, 512) == 8192


def test_layout_is_as_documented() -> None:
    lengths = (*range(31), (1 << 20) - sum(range(31)))
    raw = bytes(packed(segment_bytes=lengths))
    assert raw[:8] == MAGIC == b"TIFFINB1"
    assert struct.unpack_from("<Q", raw, 8)[0] == xxh3_64_intdigest(raw[16:4096])
    assert raw[16:80] == b"k" * 16 + b"p" * 16 + b"s" * 16 + b"n" * 16
    assert struct.unpack_from("<QQQ", raw, 80) == (7, 1 << 20, 8192)
    assert struct.unpack_from("<III", raw, 104) == (512, 32, 4096)
    assert struct.unpack_from("<HHQ", raw, 116) == (1, 1, (1 << 20) + 8192)
    assert struct.unpack_from("<32Q", raw, 128) == tuple(range(32))
    assert struct.unpack_from("<32Q", raw, 384) == lengths
    assert raw[640 : 640 + 2048] == TOKENS
    assert raw[2688:4096] == bytes(4096 - 2688)
    assert raw[4096:] == b"\xa5" * 4096, "wrote behind the header"


def test_the_worked_example() -> None:
    text = (DOCS / "block-format.md").read_text().split("```hex\n")[1].split("```")[0]
    published = b"".join(bytes.fromhex(line[6:]) for line in text.splitlines())
    schema = KVSchema.gqa(
        model="tiny", layers=1, kv_heads=2, head_dim=4, dtype="bfloat16", block_tokens=4
    )
    prefix = schema.prefix([0, 1, 2, 4294967295, 151643, 8948, 198, 2610, 525])
    buffer = bytearray(schema.extent_bytes)
    pack_header(
        buffer,
        key=prefix.keys[1],
        parent=prefix[1].parent,
        schema_fingerprint=prefix.schema_fingerprint,
        namespace_fingerprint=prefix.namespace_fingerprint,
        generation=7,
        payload_bytes=schema.block_bytes,
        extent_offset=8192,
        extent_bytes=schema.extent_bytes,
        tokens=prefix.token_bytes(1),
        segment_bytes=[segment.length for segment in schema.segments],
        checksums=[segment_checksum(bytes(range(128)))],
    )
    assert bytes(buffer) == published.ljust(schema.extent_bytes, b"\0")


@given(
    segments=st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**20)), max_size=600),
    tokens=st.lists(st.integers(0, 2**32 - 1), max_size=1200),
    generation=st.integers(0, 2**64 - 1),
    extent_offset=st.integers(0, 2**64 - 1),
)
def test_round_trip(
    segments: list[tuple[int, int]], tokens: list[int], generation: int, extent_offset: int
) -> None:
    checksums = [checksum for checksum, _ in segments]
    lengths = [length for _, length in segments]
    size_bytes = header_bytes(len(checksums), len(tokens))
    token_bytes = np.array(tokens, dtype="<u4").tobytes()
    buffer = packed(
        checksums,
        token_bytes,
        size_bytes,
        generation=generation,
        payload_bytes=sum(lengths),
        extent_offset=extent_offset,
        extent_bytes=1 << 30,
        segment_bytes=lengths,
    )
    header = read_header(buffer, offset_expected=extent_offset)
    assert header.header_bytes == size_bytes
    assert header.tokens == token_bytes
    assert header.token_count == len(tokens)
    assert header.checksums.tolist() == checksums
    assert header.segment_bytes.tolist() == lengths
    assert (header.generation, header.extent_offset) == (generation, extent_offset)
    assert (header.key, header.parent) == (IDENTITY["key"], IDENTITY["parent"])
    assert header.schema_fingerprint == IDENTITY["schema_fingerprint"]
    assert header.namespace_fingerprint == IDENTITY["namespace_fingerprint"]
    assert (header.payload_bytes, header.extent_bytes) == (sum(lengths), 1 << 30)


@pytest.mark.parametrize("wrap", [bytes, bytearray, memoryview, lambda b: np.frombuffer(b, "u1")])
def test_every_kind_of_buffer_is_read(wrap: object) -> None:
    buffer = wrap(bytes(packed()))  # type: ignore[operator]
    assert read_header(buffer).generation == 7
    assert verify_identity(buffer, *IDENTITY.values(), TOKENS).tolist() == list(range(32))  # type: ignore[arg-type]


def test_writes_into_arrays_in_place() -> None:
    array = np.full(8192, 0xA5, np.uint8)
    sums = np.arange(32, dtype=np.uint64)
    lengths = np.array(split(1 << 20, 32), np.uint64)
    written = pack_header(
        array,
        tokens=TOKENS,
        segment_bytes=lengths,
        checksums=sums,
        **IDENTITY,  # type: ignore[arg-type]
        **PLACE,  # type: ignore[arg-type]
    )
    assert written == 4096
    assert array.tobytes() == bytes(packed())


def test_results_do_not_follow_the_buffer() -> None:
    buffer = packed()
    header = read_header(buffer)
    buffer[:] = bytes(len(buffer))
    assert header.tokens == TOKENS
    assert header.checksums.tolist() == list(range(32))
    assert header.segment_bytes.tolist() == split(1 << 20, 32)
    assert not header.checksums.flags.writeable
    assert not header.segment_bytes.flags.writeable


def test_flipping_any_bit_is_detected() -> None:
    buffer = packed(size_bytes=4096)
    for bit in range(4096 * 8):
        buffer[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptBlock):
            read_header(buffer)
        buffer[bit // 8] ^= 1 << bit % 8
    read_header(buffer)


@pytest.mark.parametrize("seed", range(4))
def test_flipping_bits_is_detected_by_the_fast_path_too(seed: int) -> None:
    buffer = packed(range(300), size_bytes=8192)
    for bit in np.random.default_rng(seed).integers(0, 8192 * 8, 500).tolist():
        buffer[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptBlock):
            verify_identity(buffer, *IDENTITY.values(), TOKENS)  # type: ignore[arg-type]
        buffer[bit // 8] ^= 1 << bit % 8


def lies_in_a_chain(memory: bytes | bytearray, offsets: list[int]) -> int:
    """How many of two blocks (key k, then K, whose parent is k) a reader recognises."""
    keys = [b"k" * 16, b"K" * 16]
    raws = [bytes(memory[at : at + SHAPE.used_bytes]) for at in offsets]
    found = SHAPE.leading(raws, offsets, [7, 8], keys, b"p" * 16, NAMES, [TOKENS] * 2)
    for raw, offset in zip(found, offsets, strict=False):
        assert raw == memory[offset : offset + SHAPE.used_bytes]
    return len(found)


LENGTHS = np.full(32, 1 << 15, np.uint64)
SHAPE = HeaderShape(segment_bytes=LENGTHS, token_count=512, extent_bytes=(1 << 20) + 8192)
NAMES = b"s" * 16 + b"n" * 16


def test_readers_recognise_a_chain_up_to_the_first_flipped_bit() -> None:
    first = packed(size_bytes=4096, extent_offset=0)
    second = packed(
        size_bytes=4096, extent_offset=4096, generation=8, key=b"K" * 16, parent=b"k" * 16
    )
    memory = first + second
    assert lies_in_a_chain(memory, [0, 4096]) == 2
    # Not compared: the header's checksum, and those of the segments, which their own use verifies,
    # with the lengths beside them; and the zeros at the end.
    uncompared = {*range(8, 16), *range(128, 128 + 32 * 16), *range(SHAPE.used_bytes, 4096)}
    for place in range(4096):
        second_at = 4096 + place
        memory[second_at] ^= 1 << place % 8
        recognised = lies_in_a_chain(memory, [0, 4096])
        assert recognised == (2 if place in uncompared else 1), place
        memory[second_at] ^= 1 << place % 8


def test_a_header_says_how_its_segments_were_hashed() -> None:
    for algorithm, number in (("xxh3_64", 1), ("xxh3_64_pages", 2)):
        buffer = packed(size_bytes=4096, extent_offset=0, algorithm=algorithm)
        assert struct.unpack_from("<HH", buffer, 116) == (1, number)
        assert read_header(buffer).algorithm == algorithm
        relocate_header(buffer, extent_offset=4096)
        assert read_header(buffer, offset_expected=4096).algorithm == algorithm
    with pytest.raises(InvalidInput, match="xxh3_64_pages"):
        packed(algorithm="crc32")


def test_readers_recognise_their_algorithm_alone() -> None:
    shapes = {
        algorithm: HeaderShape(
            segment_bytes=LENGTHS,
            token_count=512,
            extent_bytes=(1 << 20) + 8192,
            algorithm=algorithm,
        )
        for algorithm in ("xxh3_64", "xxh3_64_pages")
    }
    for written in shapes:
        memory = packed(size_bytes=4096, extent_offset=0, algorithm=written)
        for read, shape in shapes.items():
            good = shape.leading(
                [bytes(memory[: shape.used_bytes])],
                [0],
                [7],
                [b"k" * 16],
                b"p" * 16,
                NAMES,
                [TOKENS],
            )
            assert len(good) == int(read == written)


def test_readers_do_not_recognise_what_is_elsewhere_or_cut_off() -> None:
    memory = packed(size_bytes=4096, extent_offset=0)
    assert lies_in_a_chain(memory, [0]) == 1
    assert lies_in_a_chain(memory[: SHAPE.used_bytes], [0]) == 1
    assert lies_in_a_chain(memory[: SHAPE.used_bytes - 1], [0]) == 0
    assert lies_in_a_chain(bytes(4096) + memory, [4096]) == 0
    assert lies_in_a_chain(memory, [1 << 40]) == 0
    assert lies_in_a_chain(memory, []) == 0


def refuses(buffer: bytes) -> None:
    with pytest.raises((CorruptBlock, VersionMismatch)):
        read_header(buffer)
    with pytest.raises((CorruptBlock, VersionMismatch)):
        verify_identity(buffer, *IDENTITY.values(), TOKENS)  # type: ignore[arg-type]
    with pytest.raises((CorruptBlock, VersionMismatch)):
        relocate_header(bytearray(buffer), extent_offset=0)


@given(garbage=st.binary(max_size=300), repeat=st.integers(1, 60))
def test_garbage_of_any_length(garbage: bytes, repeat: int) -> None:
    refuses(garbage * repeat)
    refuses(MAGIC + garbage * repeat)


@given(
    counts=st.tuples(*[st.integers(0, 2**32 - 1)] * 3),
    size_bytes=st.sampled_from([128, 4095, 4096, 8192, 12288]),
)
def test_hostile_counts_under_a_valid_checksum(
    counts: tuple[int, int, int], size_bytes: int
) -> None:
    assume(counts != (512, 32, 4096))  # the true ones
    buffer = bytearray(12288)
    buffer[: len(packed())] = packed()
    struct.pack_into("<III", buffer, 104, *counts)
    refuses(bytes(resign(buffer)[:size_bytes]))


@pytest.mark.parametrize("counts", [(513, 32), (2**32 - 1, 32), (512, 2**32 - 1), (0, 4097)])
def test_counts_that_overrun_the_header(counts: tuple[int, int]) -> None:
    buffer = packed()
    struct.pack_into("<II", buffer, 104, *counts)
    resign(buffer)
    if header_bytes(counts[1], counts[0]) == 4096:
        assert len(read_header(buffer).tokens) == 4 * counts[0]  # it fits, so it is believed
    else:
        with pytest.raises(CorruptBlock, match="do not make"):
            read_header(buffer)


@pytest.mark.parametrize(
    "lengths",
    [
        (0, 0),
        (1 << 20, 1),
        (1 << 19, (1 << 19) - 1),
        (2**64 - 99, (1 << 20) + 99),  # added up in uint64, this would be the payload
        (2**64 - 1, 2**64 - 1),
    ],
)
def test_lengths_that_do_not_make_the_payload(lengths: tuple[int, int]) -> None:
    buffer = packed(range(2), segment_bytes=[1 << 20, 0])
    assert read_header(buffer).segment_bytes.tolist() == [1 << 20, 0]
    struct.pack_into("<2Q", buffer, 128 + 2 * 8, *lengths)
    with pytest.raises(CorruptBlock, match=f"segments of {sum(lengths)} bytes"):
        read_header(resign(buffer))


@pytest.mark.parametrize("length", [0, 1, 127, 128, 4095])
def test_truncation(length: int) -> None:
    with pytest.raises(CorruptBlock, match=f"{length} bytes are less"):
        read_header(packed()[:length])


def test_truncation_between_pages() -> None:
    buffer = packed(range(300))
    assert read_header(buffer).header_bytes == 8192
    with pytest.raises(CorruptBlock, match="header_bytes 8192 does not fit 4096"):
        read_header(buffer[:4096])


def test_a_torn_header_is_detected() -> None:
    old, new = packed(range(300)), packed(range(300), TOKENS[::-1], generation=8)
    with pytest.raises(CorruptBlock, match="checksum"):
        read_header(new[:PAGE_BYTES] + old[PAGE_BYTES:])


def test_a_misplaced_extent_is_detected() -> None:
    buffer = packed()
    assert read_header(buffer, offset_expected=8192).extent_offset == 8192
    with pytest.raises(CorruptBlock, match="written for offset 8192, read at 0"):
        read_header(buffer, offset_expected=0)
    with pytest.raises(CorruptBlock, match="misplaced"):
        verify_identity(buffer, *IDENTITY.values(), TOKENS, offset_expected=0)  # type: ignore[arg-type]


@pytest.mark.parametrize("offset", [116, 118])
def test_another_version_is_told_from_damage(offset: int) -> None:
    buffer = packed()
    struct.pack_into("<H", buffer, offset, 3)
    with pytest.raises(CorruptBlock, match="checksum"):
        read_header(buffer)
    with pytest.raises(VersionMismatch, match="3"):
        read_header(resign(buffer))


def test_an_extent_too_small_for_its_content() -> None:
    buffer = packed()
    struct.pack_into("<Q", buffer, 120, 4096)
    with pytest.raises(CorruptBlock, match="smaller than its content"):
        read_header(resign(buffer))


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("key", "key differs"),
        ("parent", "parent key differs"),
        ("schema_fingerprint", "schema fingerprint differs"),
        ("namespace_fingerprint", "namespace fingerprint differs"),
        ("generation", "generation differs"),
    ],
)
def test_another_block_is_refused(field: str, message: str) -> None:
    other = 8 if field == "generation" else b"x" * 16
    wanted = {**IDENTITY, field: other}
    with pytest.raises(CorruptBlock, match=message):
        verify_identity(packed(), *wanted.values(), TOKENS)  # type: ignore[arg-type]


@pytest.mark.parametrize("tokens", [b"", TOKENS[:-4], TOKENS + TOKENS[:4], TOKENS[::-1]])
def test_a_collision_of_keys_is_refused(tokens: bytes) -> None:
    with pytest.raises(CorruptBlock, match="collide"):
        verify_identity(packed(), *IDENTITY.values(), tokens)  # type: ignore[arg-type]


def test_relocation_keeps_everything_else() -> None:
    buffer = packed()
    relocate_header(buffer, extent_offset=1 << 40)
    moved = read_header(buffer, offset_expected=1 << 40)
    assert (moved.generation, moved.tokens) == (7, TOKENS)
    relocate_header(buffer, extent_offset=0, generation=9)
    assert bytes(buffer) == bytes(packed(extent_offset=0, generation=9))


def test_relocation_does_not_sign_damage() -> None:
    buffer = packed()
    buffer[500] ^= 1
    before = bytes(buffer)
    with pytest.raises(CorruptBlock):
        relocate_header(buffer, extent_offset=0)
    assert bytes(buffer) == before
    struct.pack_into("<II", buffer, 104, 0, 0)
    with pytest.raises(CorruptBlock, match="segments of 0 bytes"):
        relocate_header(resign(buffer), extent_offset=0)


@pytest.mark.parametrize("number", [-1, 2**64])
def test_relocation_refuses_numbers_that_do_not_fit(number: int) -> None:
    with pytest.raises(InvalidInput):
        relocate_header(packed(), extent_offset=number)
    with pytest.raises(InvalidInput):
        relocate_header(packed(), extent_offset=0, generation=number)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"key": b"short"}, "16 bytes each"),
        ({"parent": b""}, "16 bytes each"),
        ({"schema_fingerprint": b"x" * 17}, "16 bytes each"),
        ({"generation": -1}, "unsigned 64-bit"),
        ({"payload_bytes": 2**64}, "sizes and offsets are unsigned"),
        ({"extent_bytes": 1 << 20}, "cannot hold"),  # no room for the header
        ({"tokens": b"abc"}, "uint32"),
        ({"tokens": bytes(4 * (MAX_BLOCK_TOKENS + 1))}, "uint32"),
        ({"checksums": range(MAX_SEGMENTS + 1)}, "4097 segments"),
        ({"checksums": [-1]}, "checksums are unsigned"),
        ({"checksums": [2**64]}, "checksums are unsigned"),
        ({"checksums": [[1]]}, "one dimension"),
        ({"segment_bytes": split(1 << 20, 31)}, "31 segment lengths for 32 checksums"),
        ({"segment_bytes": []}, "0 segment lengths for 32 checksums"),
        ({"segment_bytes": [1] * 32}, "segments of 32 bytes in a payload of 1048576"),
        ({"segment_bytes": [2**64 - 1, (1 << 20) + 1] + [0] * 30}, "in a payload of 1048576"),
        ({"segment_bytes": [-1] * 32}, "segment lengths are unsigned"),
        ({"segment_bytes": [[1 << 20]]}, "one dimension"),
        ({"size_bytes": 4095}, "writable"),
    ],
    ids=str,
)
def test_headers_that_cannot_be(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        packed(**wrong)  # type: ignore[arg-type]


def test_a_read_only_buffer_is_refused() -> None:
    with pytest.raises(InvalidInput, match="writable"):
        relocate_header(memoryview(bytes(packed())), extent_offset=0)


def test_segment_checksums_are_xxh3_64() -> None:
    array = np.arange(1000, dtype=np.uint8)
    assert segment_checksum(array) == segment_checksum(array.tobytes())
    assert segment_checksum(b"") == 0x2D06800538D394C2  # the published value for no bytes


def test_states_read_well() -> None:
    assert [str(state) for state in BlockState] == [
        "reserved",
        "committed",
        "evicting",
        "quarantined",
    ]


def test_headers_compare_by_identity() -> None:
    first: Header = read_header(packed())
    assert first == first
    assert first != read_header(packed())
