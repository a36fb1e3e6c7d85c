"""`xxh3_64_pages` against a plain form of its definition, and against the published vectors."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from tiffin.kernels.checksum import page_hash
from tiffin.kernels.errors import LayoutError

DOCS = Path(__file__).parents[2] / "docs"
PAGE = page_hash.PAGE_BYTES
TWO_LEVELS = PAGE * PAGE // 8  # bytes whose hashes fill a page: a byte more makes a third level
LENGTHS = [0, 1, 7, 8, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE - 8, TWO_LEVELS, TWO_LEVELS + 1]


def pattern(nbytes: int) -> bytes:
    """The input of the published vectors: byte i is i modulo 251."""
    return bytes(range(251)) * (nbytes // 251 + 1)


def slowly(data: bytes) -> int:
    """The definition in `docs/block-format.md`, line by line."""
    level = data
    while True:
        pages = max(1, -(-len(level) // PAGE))
        level = level.ljust(pages * PAGE, b"\0")
        level = b"".join(
            xxhash.xxh3_64(level[at : at + PAGE]).intdigest().to_bytes(8, "little")
            for at in range(0, len(level), PAGE)
        )
        if pages == 1:
            break
    return xxhash.xxh3_64(level + len(data).to_bytes(8, "little")).intdigest()


@pytest.mark.parametrize("nbytes", LENGTHS)
def test_it_is_the_definition(nbytes: int) -> None:
    data = np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)
    expected = slowly(data.tobytes())
    assert page_hash.checksum(data) == page_hash.checksum(data.data) == expected
    assert page_hash.fold(page_hash.page_hashes(data), nbytes) == expected


def test_the_published_vectors() -> None:
    text = (DOCS / "block-format.md").read_text().split("```json\n")[1].split("```")[0]
    vectors = json.loads(text)
    assert len(vectors) >= 6
    for nbytes, plain, pages in vectors:
        data = pattern(nbytes)[:nbytes]
        assert f"{xxhash.xxh3_64_intdigest(data):016x}" == plain, nbytes
        assert f"{slowly(data):016x}" == f"{page_hash.checksum(memoryview(data)):016x}" == pages


@given(data=st.binary(max_size=3 * PAGE), cut=st.integers(0, 3))
def test_pieces_of_whole_pages_have_the_hashes_of_the_whole(data: bytes, cut: int) -> None:
    array = np.frombuffer(data, np.uint8)
    first, rest = array[: cut * PAGE], array[cut * PAGE :]
    pieces = [page_hash.page_hashes(piece) for piece in (first, rest) if len(piece)]
    whole = page_hash.page_hashes(array)
    assert np.concatenate(pieces or [whole]).tolist() == whole.tolist()
    assert len(whole) == page_hash.page_count(len(data))


def test_spans_are_hashed_each_on_its_own() -> None:
    data = np.random.default_rng(2).integers(0, 256, 5 * PAGE, np.uint8)
    spans = [(0, 0), (3, PAGE + 5), (PAGE, 2 * PAGE), (5 * PAGE, 0)]
    found = page_hash.checksums(data, spans)
    assert found.dtype == np.uint64
    assert found.tolist() == [slowly(data[at : at + n].tobytes()) for at, n in spans]


@pytest.mark.parametrize("nbytes", [1, 100, PAGE, 2 * PAGE + 13, 6 * PAGE])
def test_damage_changes_it(nbytes: int) -> None:
    dice = np.random.default_rng(nbytes)
    data = dice.integers(0, 256, nbytes, np.uint8)
    right = page_hash.checksum(data)
    places = {0, nbytes - 1, *dice.integers(0, nbytes, 20).tolist()}
    for place in places:
        for bit in range(8):
            data[place] ^= 1 << bit
            assert page_hash.checksum(data) != right, (place, bit)
            data[place] ^= 1 << bit
    longer = np.concatenate([data, np.zeros(2 * PAGE, np.uint8)])
    others = {page_hash.checksum(longer[:n]) for n in range(max(0, nbytes - 9), len(longer), 7)}
    lengths = len(range(max(0, nbytes - 9), len(longer), 7))
    assert len(others) == lengths, "a truncation, or zeros behind the end, are not seen"
    if nbytes >= 2 * PAGE:
        swapped = data.copy()
        swapped[:PAGE], swapped[PAGE : 2 * PAGE] = data[PAGE : 2 * PAGE], data[:PAGE]
        assert page_hash.checksum(swapped) != right


def test_hashes_of_another_number_of_pages_are_refused() -> None:
    hashes = page_hash.page_hashes(np.zeros(2 * PAGE, np.uint8))
    for nbytes in (0, PAGE, 2 * PAGE + 1):
        with pytest.raises(LayoutError, match="2 page hashes"):
            page_hash.fold(hashes, nbytes)
    with pytest.raises(LayoutError, match="0 page hashes"):
        page_hash.fold(hashes[:0], 0)
