"""Gather and scatter against loops over rows: every layout, every odd shape, both backends."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from pagedsupport import (
    BACKENDS,
    DEVICES,
    ENGINES,
    Sizes,
    filled,
    mla,
    nhd,
    odd_views,
    page_maps,
    restore,
    same,
    separate,
    sizes,
    slow_gather,
    slow_scatter,
    snapshot,
)

from tiffin.kernels.backend import uses_triton
from tiffin.kernels.errors import DeviceError, KernelError, LayoutError, PageError, RoomError
from tiffin.kernels.layout.block_layout import BlockLayout, BlockPart, BlockShape, PagedCache
from tiffin.kernels.layout.lanes import lanes
from tiffin.kernels.layout.transfer_plan import PageMap
from tiffin.kernels.paged import gather_scatter
from tiffin.kernels.paged.gather_scatter import gather, scatter

pytestmark = pytest.mark.parametrize("device", DEVICES)


def check_both_ways(cache: PagedCache, pages: PageMap, layout: BlockLayout, **options: Any) -> None:
    """Gather and scatter do what the loops do, to every byte of blocks and cache."""
    count, device = len(pages), str(cache.device)
    expected = filled(count, layout.nbytes, device=device)
    slow_gather(cache, pages, list(expected), layout)
    found = filled(count, layout.nbytes, device=device)
    before = snapshot(cache)
    gather(cache, pages, found, layout, **options)
    assert torch.equal(found, expected)
    assert same(snapshot(cache), before), "a gather wrote to the cache"

    blocks = torch.randint(0, 256, expected.shape, dtype=torch.uint8).to(device)
    kept = blocks.clone()
    slow_scatter(cache, pages, list(blocks), layout)
    wanted = snapshot(cache)
    restore(cache, before)
    scatter(cache, pages, blocks, layout, **options)
    assert same(snapshot(cache), wanted)
    assert torch.equal(blocks, kept), "a scatter wrote to a block"


def check_moves(device: str, backend: str, engine: str, data: Any) -> None:
    made = data.draw(sizes())
    cache = ENGINES[engine](Sizes(**{**made.__dict__, "device": device}))
    tokens = data.draw(st.integers(1, 20))
    layout = BlockLayout.canonical(BlockShape.of_cache(cache, tokens))
    pages = data.draw(page_maps(cache, tokens))
    check_both_ways(cache, pages, layout, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("engine", ENGINES)
@settings(max_examples=4)
@given(data=st.data())
def test_moves_what_the_loops_move(device: str, backend: str, engine: str, data: Any) -> None:
    check_moves(device, backend, engine, data)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
@settings(max_examples=6)
@given(data=st.data())
def test_moves_what_the_loops_move_at_length(device: str, engine: str, data: Any) -> None:
    check_moves(device, "triton", engine, data)


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=10)
@given(data=st.data())
def test_a_part_of_a_model_moves_its_layers_and_heads(device: str, backend: str, data: Any) -> None:
    """A pipeline stage's rank: some layers, some heads, into any order of the whole model's."""
    model_layers = data.draw(st.integers(2, 4))
    heads = data.draw(st.sampled_from([2, 4, 6]))
    share = data.draw(st.integers(1, heads))
    first_head = data.draw(st.integers(0, heads - share))
    ids = sorted(data.draw(st.sets(st.integers(0, model_layers - 1), min_size=1)))
    one = Sizes(len(ids), 5, data.draw(st.sampled_from([1, 3, 8])), share, 4, device=device)
    cache = PagedCache(nhd(one).layers, layer_ids=ids, first_head=first_head)
    shape = BlockShape.gqa(layers=model_layers, kv_heads=heads, head_dim=4, itemsize=2, tokens=5)
    layout = data.draw(
        st.sampled_from(
            [
                BlockLayout.canonical(shape),
                BlockLayout.rank_major(shape, 2),
                BlockLayout.rank_major(shape, 2 * heads),
                BlockLayout.slice(shape, heads=(first_head, first_head + share)),
                BlockLayout.slice(shape, layers=(ids[0], ids[0] + 1)),
            ]
        )
    )
    check_both_ways(cache, data.draw(page_maps(cache, 5)), layout, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("engine", ["hnd", "mla", "contiguous", "nhd"])
def test_blocks_of_whole_pages(device: str, backend: str, engine: str) -> None:
    """Adjacent rows of one page may be moved together, but never rows of two pages."""
    cache = ENGINES[engine](Sizes(2, 7, 4, 2, 8, device=device))
    layout = BlockLayout.canonical(BlockShape.of_cache(cache, 8))
    pages = PageMap.of_sequence([6, 1, 5, 0], tokens=16, block_tokens=8, page_tokens=4)
    check_both_ways(cache, pages, layout, backend=backend)
    half = PageMap([[3], [2]], page_tokens=4, tokens=2, first_slots=[2, 1])
    check_both_ways(cache, half, layout, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_parts_without_heads_are_whole_on_every_rank(device: str, backend: str) -> None:
    made = Sizes(1, 5, 4, 2, 8, device=device)
    cache = PagedCache([*nhd(made).layers, *mla(made).layers], first_head=2)
    shape = BlockShape(6, ((BlockPart(4, 6, 16),) * 2, (BlockPart(1, 6, 16, sliced=False),)))
    pages = PageMap.of_sequence([4, 0, 3], tokens=9, block_tokens=6, page_tokens=4)
    for layout in (BlockLayout.canonical(shape), BlockLayout.rank_major(shape, 2)):
        check_both_ways(cache, pages, layout, backend=backend)
        check_both_ways(cache, pages, layout, backend=backend, heads=(2, 4))


@pytest.mark.parametrize("backend", BACKENDS)
def test_selections_leave_the_rest_alone(device: str, backend: str) -> None:
    cache = nhd(Sizes(4, 6, 4, 4, 8, device=device))
    shape = BlockShape.of_cache(cache, 8)
    layout, part = (
        BlockLayout.canonical(shape),
        BlockLayout.slice(shape, layers=(1, 3), heads=(2, 4)),
    )
    pages = PageMap.of_sequence([5, 0, 3, 1], tokens=13, block_tokens=8, page_tokens=4)
    whole, packed = filled(2, layout.nbytes, device=device), filled(2, part.nbytes, device=device)
    gather(cache, pages, whole, layout, layers=(1, 3), heads=slice(2, 4), backend=backend)
    gather(cache, pages, packed, part, backend=backend)
    touched = np.zeros(layout.nbytes, bool)
    run = 8 * 16
    for layer, number, head, offset in part.runs.tolist():
        at = layout.offset(layer, number, head)
        assert torch.equal(whole[:, at : at + run], packed[:, offset : offset + run])
        touched[at : at + run] = True
    assert (whole.cpu().numpy()[:, ~touched] == 0xA5).all()

    before = snapshot(cache)
    whole.fill_(1)
    scatter(cache, pages, whole, layout, layers=range(1, 3), heads=(2, 4), backend=backend)
    for layer, parts in enumerate(cache.layers):
        for view in parts:
            changed = (view.view(torch.int16) == 0x0101).all(-1)
            assert changed[..., 2:].any() == (layer in (1, 2))
            assert not changed[..., :2].any()
    restore(cache, before)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_window_is_the_last_tokens_of_a_block(device: str, backend: str) -> None:
    cache = nhd(Sizes(2, 5, 3, 2, 8, device=device))
    full = tuple(BlockPart(2, 6, 16) for _ in "kv")
    near = tuple(BlockPart(2, 4, 16) for _ in "kv")
    layout = BlockLayout.canonical(BlockShape(6, (full, near)))
    assert [(g.rows, g.skip) for g in lanes(cache, layout)] == [(6, 0), (4, 2)]
    for tokens in (12, 11, 7):  # the last block has 6, 5 and 1: none of them in the window
        pages = PageMap.of_sequence([4, 1, 0, 2], tokens=tokens, block_tokens=6, page_tokens=3)
        check_both_ways(cache, pages, layout, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_lies_beside_a_heads_rows_is_left_alone(device: str, backend: str) -> None:
    """A format's tail (scales) is neither read nor written; the next run begins after it."""
    cache = nhd(Sizes(2, 4, 4, 3, 8, device=device))
    part = BlockPart(3, 8, 16, tail_bytes=12)
    layout = BlockLayout.canonical(BlockShape(8, ((part, part),) * 2))
    pages = PageMap.of_sequence([3, 1, 2], tokens=10, block_tokens=8, page_tokens=4)
    check_both_ways(cache, pages, layout, backend=backend)
    blocks = filled(2, layout.nbytes, device=device)
    gather(cache, pages, blocks, layout, backend=backend)
    for _, _, _, offset in layout.runs.tolist():
        assert (blocks[:, offset + 128 : offset + 140] == 0xA5).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_blocks_may_lie_anywhere(device: str, backend: str) -> None:
    """Extents of an arena, at odd offsets and in any order, with room to spare."""
    cache = nhd(Sizes(2, 8, 4, 2, 16, device=device))
    layout = BlockLayout.canonical(BlockShape.of_cache(cache, 8))
    pages = PageMap.of_sequence([7, 0, 2, 5, 1], tokens=19, block_tokens=8, page_tokens=4)
    expected = filled(3, layout.nbytes, device=device)
    slow_gather(cache, pages, list(expected), layout)
    for step in (0, 1, 2, 4, 8):
        arena = filled(1, 4 * layout.nbytes + 64, device=device)[0]
        begins = [2 * layout.nbytes + 3 * step, step, layout.nbytes + 2 * step]
        blocks = [arena[at : at + layout.nbytes + step] for at in begins]
        gather(cache, pages, blocks, layout, backend=backend)
        for block, right in zip(blocks, expected, strict=True):
            assert torch.equal(block[: layout.nbytes], right)
            assert (block[layout.nbytes :] == 0xA5).all()
        before = snapshot(cache)
        scatter(cache, pages, blocks, layout, backend=backend)
        assert same(snapshot(cache), before)
    rows = filled(5, layout.nbytes + 40, device=device)[1:4]
    gather(cache, pages, rows, layout, backend=backend)
    assert torch.equal(rows[:, : layout.nbytes], expected)


def test_any_number_of_programs_moves_the_same(device: str) -> None:
    cache = nhd(Sizes(3, 6, 4, 2, 24, device=device))
    layout = BlockLayout.canonical(BlockShape.of_cache(cache, 12))
    pages = PageMap.of_sequence([5, 2, 0, 4], tokens=16, block_tokens=12, page_tokens=4)
    expected = filled(2, layout.nbytes, device=device)
    slow_gather(cache, pages, list(expected), layout)
    for programs in (1, 2, 7, 10_000):
        found = filled(2, layout.nbytes, device=device)
        gather(cache, pages, found, layout, programs=programs, backend="triton")
        assert torch.equal(found, expected)


def test_tiles_cut_long_runs(device: str) -> None:
    """Runs longer than a tile, and rows longer than one."""
    for tokens, dim in ((70, 80), (3, 5000)):
        cache = mla(Sizes(1, 4, 24, 1, dim, device=device))
        layout = BlockLayout.canonical(BlockShape.of_cache(cache, tokens))
        group = lanes(cache, layout)[0]
        work = gather_scatter.tile_work(group, np.zeros(1, np.int64), 1)
        assert work.tiles > 1
        assert work.tile_units * work.unit_words * work.word_bytes <= gather_scatter.TILE_BYTES
        pages = PageMap.of_sequence(
            [2, 0, 3, 1], tokens=tokens, block_tokens=tokens, page_tokens=24
        )
        check_both_ways(cache, pages, layout, backend="triton")


def test_one_launch_moves_all_layers_and_blocks(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = []
    launch = gather_scatter.launch

    def counted(*arguments: Any) -> None:
        launched.append(arguments[0])
        launch(*arguments)

    monkeypatch.setattr(gather_scatter, "launch", counted)
    for made, expected in (
        (nhd(Sizes(3, 4, 4, 2, 8, device=device)), 1),
        (mla(Sizes(5, 4, 4, 1, 8, device=device)), 1),
        (separate(Sizes(2, 4, 4, 2, 8, device=device, v_dim=12)), 2),
    ):
        layout = BlockLayout.canonical(BlockShape.of_cache(made, 4))
        pages = PageMap.of_sequence(range(4), tokens=16, block_tokens=4, page_tokens=4)
        blocks = filled(4, layout.nbytes, device=device)
        for move in (gather, scatter):
            launched.clear()
            move(made, pages, blocks, layout, backend="triton")
            assert len(launched) == expected


def test_the_backend_follows_the_device(device: str) -> None:
    chosen = uses_triton(torch.device(device), None)
    assert chosen == (device == "cuda")
    with pytest.raises(DeviceError, match="unknown backend"):
        uses_triton(torch.device(device), "numpy")


def bad_calls(cache: PagedCache, layout: BlockLayout) -> dict[str, tuple[type[KernelError], Any]]:
    """What must be refused: the error, and the arguments that replace good ones."""
    good = filled(2, layout.nbytes, device=str(cache.device))
    block = layout.nbytes
    arena = good.reshape(-1)
    pages = PageMap([[3, 1], [0, 2]], page_tokens=4)
    return {
        "page beyond the cache": (PageError, {"pages": PageMap([[3, 6], [0, 2]], page_tokens=4)}),
        "other page size": (PageError, {"pages": PageMap([[3], [0]], page_tokens=8)}),
        "too many tokens": (PageError, {"pages": PageMap([[3, 1, 4], [0, 2, 5]], page_tokens=4)}),
        "too few blocks": (RoomError, {"blocks": good[:1]}),
        "too many blocks": (RoomError, {"blocks": [good[0], good[1], good[0]]}),
        "no blocks": (RoomError, {"blocks": []}),
        "small blocks": (RoomError, {"blocks": good[:, 1:]}),
        "one small block": (RoomError, {"blocks": [good[0], good[1, 1:]]}),
        "blocks of words": (LayoutError, {"blocks": good.view(torch.int32)}),
        "blocks with gaps": (LayoutError, {"blocks": good.t().contiguous().t()}),
        "a block of two axes": (LayoutError, {"blocks": [good[:1], good[1:]]}),
        "layers that are not": (LayoutError, {"layers": (1, 3)}),
        "no layers": (LayoutError, {"layers": (1, 1)}),
        "heads backwards": (LayoutError, {"heads": slice(2, 0, -1)}),
        "heads that are not": (LayoutError, {"heads": (0, 3)}),
        "elsewhere": (DeviceError, {"blocks": good.to("meta")}),
        "overlapping": (RoomError, {"blocks": [arena[:block], arena[block - 1 : -1]]}),
        "unknown backend": (DeviceError, {"backend": "cuda"}),
        "other model": (
            LayoutError,
            {
                "layout": BlockLayout.canonical(
                    BlockShape.gqa(layers=2, kv_heads=2, head_dim=9, itemsize=2, tokens=8)
                )
            },
        ),
        "good": (KernelError, {"pages": pages, "blocks": good}),
    }


BAD = [
    "page beyond the cache", "other page size", "too many tokens", "too few blocks",
    "too many blocks", "no blocks", "small blocks", "one small block", "blocks of words",
    "blocks with gaps", "a block of two axes", "layers that are not", "no layers",
    "heads backwards", "heads that are not", "elsewhere", "overlapping", "unknown backend",
    "other model",
]  # fmt: skip


@pytest.mark.parametrize("move", [gather, scatter])
@pytest.mark.parametrize("bad", BAD)
def test_bad_input_is_refused_before_anything_is_written(device: str, bad: str, move: Any) -> None:
    cache = nhd(Sizes(2, 6, 4, 2, 8, device=device))
    layout = BlockLayout.canonical(BlockShape.of_cache(cache, 8))
    calls = bad_calls(cache, layout)
    assert set(calls) == {*BAD, "good"}
    good = calls["good"][1]
    error, replaced = calls[bad]
    before, blocks = snapshot(cache), good["blocks"].clone()
    arguments = {"layout": layout, **good, **replaced}
    if bad == "overlapping" and move is scatter:
        scatter(cache, **arguments)  # blocks that are only read may overlap
        assert not same(snapshot(cache), before)
        return
    for backend in BACKENDS:
        with pytest.raises(error):
            move(cache, **{"backend": backend, **arguments})
    assert same(snapshot(cache), before)
    assert torch.equal(good["blocks"], blocks)


def test_words_divide_every_address(device: str) -> None:
    """A GPU traps on a misaligned load; the interpreter and x86 do not, so words are checked."""
    cache = nhd(Sizes(2, 6, 4, 2, 8, device=device))
    group = lanes(cache, BlockLayout.canonical(BlockShape.of_cache(cache, 8)))[0]
    assert group.alignment == 16
    for address, unit in ((64, 16), (72, 8), (4, 4), (6, 2), (9, 1)):
        work = gather_scatter.tile_work(group, np.array([4096, address]), 2)
        assert work.word_bytes * work.unit_words == unit
        assert work.row_units * unit == group.row_bytes
        assert work.tiles * work.tile_units >= group.run_bytes // unit
    narrow = odd_views(Sizes(2, 6, 4, 2, 3, device=device))  # rows of 6 bytes
    group = lanes(narrow, BlockLayout.canonical(BlockShape.of_cache(narrow, 8)))[0]
    assert gather_scatter.tile_work(group, np.array([4096]), 1).word_bytes == 2


def test_too_many_tiles_for_a_launch_are_refused(device: str) -> None:
    cache = nhd(Sizes(2, 6, 4, 2, 8, device=device))
    group = lanes(cache, BlockLayout.canonical(BlockShape.of_cache(cache, 8)))[0]
    with pytest.raises(LayoutError, match="fewer blocks"):
        gather_scatter.tile_work(group, np.zeros(1, np.int64), 1 << 28)
