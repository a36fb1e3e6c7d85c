"""Copies between an engine's pages and blocks, against the layout that `page_schema` describes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from pagesupport import (  # noqa: E402
    BLOCK_PAGES,
    ENGINE_PAGES,
    LAYERS,
    PAGE_BYTES,
    PAGE_SHAPE,
    PAGE_TOKENS,
    Rank,
    schema_of,
)

from tiffin.kvstore.connectors.vllm.pages.copier import PageLoad  # noqa: E402
from tiffin.kvstore.connectors.vllm.pages.page_copier import PageCopier  # noqa: E402
from tiffin.kvstore.errors import InvalidInput  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Sequence


def ranks_of(ranks: int, block_pages: int = BLOCK_PAGES) -> list[Rank]:
    schema = schema_of(ranks, block_pages)
    return [Rank(schema, rank, ranks) for rank in range(ranks)]


def expected(ranks: Sequence[Rank], pages: Sequence[int]) -> bytes:
    """A block by its definition: layer, half, rank, pages of that half."""
    middle = len(pages) // 2
    halves = (pages[:middle], pages[middle:])
    return b"".join(
        rank.page(layer, page)
        for layer in range(LAYERS)
        for half in halves
        for rank in ranks
        for page in half
    )


def empty_blocks(count: int, nbytes: int) -> list[Any]:
    return [np.full(nbytes, 0xEE, np.uint8) for _ in range(count)]


def gathered(ranks: Sequence[Rank], pages: Sequence[int]) -> list[Any]:
    count = -(-len(pages) // BLOCK_PAGES)
    blocks = empty_blocks(count, LAYERS * BLOCK_PAGES * PAGE_BYTES * len(ranks))
    for rank in ranks:
        rank.copier.gather(blocks, pages)
    return blocks


TABLES = {
    "consecutive": list(range(3, 11)),
    "scattered": [17, 2, 9, 4, 0, 13, 5, 11],
    "backwards": list(range(10, 2, -1)),
    "in runs": [1, 2, 3, 8, 9, 15, 16, 17],
}


@pytest.fixture(params=TABLES)
def pages(request: pytest.FixtureRequest) -> list[int]:
    return TABLES[request.param]


@pytest.mark.parametrize("count", [1, 2, 4])
def test_all_ranks_together_fill_a_block_as_it_is_defined(count: int, pages: list[int]) -> None:
    ranks = ranks_of(count)
    blocks = gathered(ranks, pages)
    for index, block in enumerate(blocks):
        mine = pages[index * BLOCK_PAGES : (index + 1) * BLOCK_PAGES]
        assert block.tobytes() == expected(ranks, mine)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_layer_after_layer_fills_the_same_blocks(count: int, pages: list[int]) -> None:
    ranks = ranks_of(count)
    right = gathered(ranks, pages)
    blocks = empty_blocks(len(right), len(right[0]))
    for layer in range(LAYERS):
        for rank in ranks:
            rank.copier.gather_layer(layer, blocks, pages, rank.copier.mark())
        end = len(right[0]) // LAYERS * (layer + 1)
        for block, whole in zip(blocks, right, strict=True):
            assert block[:end].tobytes() == whole[:end].tobytes()
            assert set(block[end:]) <= {0xEE}, "nothing of later layers"


def test_a_rank_alone_leaves_the_bytes_of_the_others(pages: list[int]) -> None:
    ranks = ranks_of(2)
    blocks = empty_blocks(2, LAYERS * BLOCK_PAGES * PAGE_BYTES * 2)
    ranks[1].copier.gather(blocks, pages)
    half = BLOCK_PAGES // 2 * PAGE_BYTES
    for block in blocks:
        parts = block.reshape(LAYERS, 2, 2, half)  # layer, half, rank
        assert (parts[:, :, 0] == 0xEE).all()
        ranks[0].copier.gather([block], pages[:BLOCK_PAGES])
        assert not (parts[:, :, 0] == 0xEE).all(axis=-1).any()


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("skipped", range(BLOCK_PAGES))
def test_blocks_come_back_into_other_pages(count: int, skipped: int, pages: list[int]) -> None:
    ranks = ranks_of(count)
    blocks = gathered(ranks, pages)
    for block in blocks:
        block.flags.writeable = False  # as leased ones are
    targets = [19, 18, 6, 7, 12, 10, 14, 1][skipped:]
    for rank in ranks:
        before = [[rank.page(layer, page) for page in pages] for layer in range(LAYERS)]
        rank.clear()
        rank.copier.scatter(blocks, targets, skipped)
        for layer in range(LAYERS):
            found = [rank.page(layer, page) for page in targets]
            assert found == before[layer][skipped:]


def test_only_the_target_pages_are_written() -> None:
    (rank,) = ranks_of(1)
    blocks = gathered([rank], TABLES["scattered"])
    rank.clear()
    rank.copier.scatter(blocks, [4, 5, 6, 7, 12, 13, 14, 15])
    for layer in rank.layers:
        written = {page for page in range(ENGINE_PAGES) if layer[page].any()}
        assert written == {4, 5, 6, 7, 12, 13, 14, 15}


def test_fewer_blocks_than_pages_fill_the_first_pages() -> None:
    (rank,) = ranks_of(1)
    blocks = gathered([rank], TABLES["scattered"])
    rank.clear()
    rank.copier.scatter(blocks[:1], [4, 5, 6, 7, 12, 13, 14, 15])
    assert {page for page in range(ENGINE_PAGES) if rank.layers[0][page].any()} == {4, 5, 6, 7}
    rank.copier.scatter([], [12, 13])
    assert not rank.layers[0][12].any()


def test_fewer_pages_than_the_blocks_have_take_the_first_of_them() -> None:
    """The last page of a prompt is computed, so the last block is not loaded to its end."""
    (rank,) = ranks_of(1)
    source = TABLES["scattered"]
    right = [rank.page(0, page) for page in source]
    blocks = gathered([rank], source)
    rank.clear()
    rank.copier.scatter(blocks, [4, 5, 6, 7, 12, 13], 1)
    assert [rank.page(0, page) for page in (4, 5, 6, 7, 12, 13)] == right[1:7]
    assert not rank.layers[0][14].any()


@pytest.mark.parametrize("count", [1, 2])
def test_layers_of_several_loads_come_one_after_the_other(count: int) -> None:
    ranks = ranks_of(count)
    blocks = gathered(ranks, TABLES["scattered"])
    loads = [PageLoad(blocks[:1], [19, 18, 6], 1), PageLoad(blocks[1:], [12, 10, 14, 1])]
    targets = [19, 18, 6, 12, 10, 14, 1]
    for rank in ranks:
        layers = range(LAYERS)
        before = [[rank.page(layer, page) for page in TABLES["scattered"]] for layer in layers]
        rank.clear()
        ends = []
        for end, _ in rank.copier.scatter_layers(loads):
            ends.append(end)
            for layer in layers:
                found = [rank.page(layer, page) for page in targets]
                empty = [bytes(PAGE_BYTES)] * len(targets)
                assert found == (before[layer][1:] if layer < end else empty)
        assert ends == [1, 2, 3]


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("skipped", range(BLOCK_PAGES))
def test_a_layer_comes_alone(count: int, skipped: int, pages: list[int]) -> None:
    """As a stream yields it."""
    ranks = ranks_of(count)
    blocks = gathered(ranks, pages)
    targets = [19, 18, 6, 7, 12, 10, 14, 1][skipped:]
    half = BLOCK_PAGES // 2 * PAGE_BYTES
    for number, rank in enumerate(ranks):
        parts = [block.reshape(LAYERS, 2, count, half)[1, :, number].ravel() for block in blocks]
        before = [rank.page(1, page) for page in pages]
        rank.clear()
        rank.copier.scatter_layer(1, parts, targets, skipped)
        assert [rank.page(1, page) for page in targets] == before[skipped:]
        assert not rank.layers[0].any()
        assert not rank.layers[2].any()


@pytest.mark.parametrize("count", [2, 4])
def test_a_rank_reads_a_block_of_its_own_bytes_only(count: int, pages: list[int]) -> None:
    """As a pool sends it from another host."""
    ranks = ranks_of(count)
    blocks = gathered(ranks, pages)
    for number, rank in enumerate(ranks):
        half = BLOCK_PAGES // 2 * PAGE_BYTES
        packed = [block.reshape(LAYERS, 2, count, half)[:, :, number].ravel() for block in blocks]
        before = [rank.page(1, page) for page in pages]
        rank.clear()
        rank.copier.scatter(packed, pages)
        assert [rank.page(1, page) for page in pages] == before


def test_the_schemas_ranges_are_the_ranks_bytes() -> None:
    """A pool sends a rank `heads=(rank, rank + 1)` of a block: exactly what the rank wrote."""
    schema = schema_of(2)
    ranks = [Rank(schema, rank, 2) for rank in range(2)]
    blocks = empty_blocks(1, schema.block_bytes)
    ranks[1].copier.gather(blocks, TABLES["scattered"][:BLOCK_PAGES])
    written = np.flatnonzero(blocks[0] != 0xEE)
    mine = np.concatenate(
        [np.arange(r.offset, r.offset + r.length) for r in schema.ranges(heads=(1, 2))]
    )
    assert np.isin(written, mine).all()
    assert len(mine) == schema.block_bytes // 2


def test_a_block_of_an_odd_number_of_pages_is_copied_by_one_rank() -> None:
    (rank,) = ranks_of(1, block_pages=3)
    blocks = empty_blocks(1, LAYERS * 3 * PAGE_BYTES)
    rank.copier.gather(blocks, [5, 6, 2])
    assert blocks[0].tobytes() == expected([rank], [5, 6, 2])


def test_layers_may_lie_interleaved_in_one_buffer() -> None:
    schema = schema_of(1)
    buffer = torch.arange(ENGINE_PAGES * LAYERS * PAGE_BYTES // 2, dtype=torch.int16)
    pages = buffer.view(torch.float16).view(ENGINE_PAGES, LAYERS, *PAGE_SHAPE)
    copier = PageCopier([pages[:, index] for index in range(LAYERS)], schema, PAGE_TOKENS, 0, 1)
    blocks = empty_blocks(1, schema.block_bytes)
    copier.gather(blocks, [3, 9, 10, 1])
    right = [pages[page, layer] for layer in range(LAYERS) for page in (3, 9, 10, 1)]
    assert blocks[0].tobytes() == torch.stack(right).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize(
    ("layers", "said"),
    [
        ([torch.zeros(4, *PAGE_SHAPE, dtype=torch.float16)] * 4, "4 layers from 0 on; .* have 3"),
        ([torch.zeros(4, *PAGE_SHAPE, dtype=torch.float32)] * LAYERS, "layer 0: pages of shape"),
        ([torch.zeros(4, 8, 4, 2, dtype=torch.float16).permute(0, 3, 2, 1)] * LAYERS, "steps"),
        ([torch.zeros(4, *PAGE_SHAPE, device="meta")] * LAYERS, "layer 0 is on meta"),
    ],
)
def test_other_tensors_are_refused(layers: list[Any], said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        PageCopier(layers, schema_of(1), PAGE_TOKENS, 0, 1)


@pytest.mark.parametrize("count", [1, 2])
def test_stages_fill_their_layers_of_a_block_and_read_them(count: int) -> None:
    """Layer 0 is one stage, layers 1 and 2 another."""
    ranks, schema = ranks_of(count), schema_of(count)
    right = gathered(ranks, TABLES["scattered"])
    blocks = empty_blocks(2, schema.block_bytes)
    for number, rank in enumerate(ranks):
        for first, end in ((1, 3), (0, 1)):
            mine = rank.layers[first:end]
            copier = PageCopier(mine, schema, PAGE_TOKENS, number, count, first)
            assert copier.block_bytes == schema.block_bytes // count * (end - first) // LAYERS
            copier.gather(blocks, TABLES["scattered"])
            before = [layer.clone() for layer in mine]
            spans = schema.ranges((first, end), (number, number + 1))
            packed = [
                np.concatenate([block[span.offset : span.end] for span in spans]) for block in right
            ]
            for source in (right, packed):
                for layer in mine:
                    layer.zero_()
                copier.scatter(source, TABLES["scattered"])
                for layer, was in zip(mine, before, strict=True):
                    assert (layer[TABLES["scattered"]] == was[TABLES["scattered"]]).all()
    assert [block.tobytes() for block in blocks] == [block.tobytes() for block in right]
