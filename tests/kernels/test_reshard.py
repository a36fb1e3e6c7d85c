"""From p ranks to d ranks: every head lands where the layouts say, and nothing else changes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from pagedsupport import BACKENDS, DEVICES, Sizes, filled, nhd

from tiffin.kernels.errors import DeviceError, KernelError, LayoutError, RoomError
from tiffin.kernels.layout.block_layout import BlockLayout, BlockPart, BlockShape, PagedCache
from tiffin.kernels.layout.transfer_plan import PageMap
from tiffin.kernels.paged.gather_scatter import gather, scatter
from tiffin.kernels.paged.reshard import reshard

pytestmark = pytest.mark.parametrize("device", DEVICES)

# K and V of other dims, with scales behind them; a latent; a state without rows.
MIXED = BlockShape(
    6,
    (
        (BlockPart(4, 6, 16, tail_bytes=4), BlockPart(4, 6, 10)),
        (BlockPart(1, 6, 12, sliced=False),),
        (BlockPart(1, 1, 7, sliced=False, per_token=False),),
        (BlockPart(4, 6, 16, tail_bytes=4), BlockPart(4, 6, 10)),
    ),
)
MORE_RANKS = [(4, 1), (2, 4), (8, 2)]


def slow_reshard(
    source: torch.Tensor, source_layout: BlockLayout, target: torch.Tensor, layout: BlockLayout
) -> None:
    for layer, part, head, offset in layout.runs.tolist():
        try:
            begin = source_layout.offset(layer, part, head)
        except LayoutError:
            continue
        for at in range(layout.shape.layers[layer][part].run_bytes):
            target[:, offset + at] = source[:, begin + at]


def layouts(shape: BlockShape) -> st.SearchStrategy[BlockLayout]:
    return st.one_of(
        st.just(BlockLayout.canonical(shape)),
        st.sampled_from([1, 2, 4, 8]).map(lambda ranks: BlockLayout.rank_major(shape, ranks)),
        st.integers(0, 3).map(lambda rank: BlockLayout.rank(shape, rank, 4)),
        st.integers(0, 7).map(lambda rank: BlockLayout.rank(shape, rank, 8)),
        st.just(BlockLayout.slice(shape, layers=(0, 2), heads=(1, 3))),
    )


def random_blocks(count: int, layout: BlockLayout, device: str) -> torch.Tensor:
    return torch.randint(0, 256, (count, layout.nbytes), dtype=torch.uint8).to(device)


def check_heads_land(device: str, backend: str, data: Any) -> None:
    source_layout, target_layout = data.draw(layouts(MIXED)), data.draw(layouts(MIXED))
    count = data.draw(st.integers(1, 3))
    source = random_blocks(count, source_layout, device)
    kept = source.clone()
    expected = filled(count, target_layout.nbytes, device=device)
    slow_reshard(source, source_layout, expected, target_layout)
    target = filled(count, target_layout.nbytes, device=device)
    reshard(source, source_layout, target, target_layout, backend=backend)
    assert torch.equal(target, expected)
    assert torch.equal(source, kept)


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=8)
@given(data=st.data())
def test_heads_land_where_the_layouts_say(device: str, backend: str, data: Any) -> None:
    check_heads_land(device, backend, data)


@pytest.mark.slow
@settings(max_examples=40)
@given(data=st.data())
def test_heads_land_where_the_layouts_say_at_length(device: str, data: Any) -> None:
    check_heads_land(device, "triton", data)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("p", "d"),
    [(1, 4), (4, 2), (2, 8), *(pytest.param(*pair, marks=pytest.mark.slow) for pair in MORE_RANKS)],
)
def test_from_p_ranks_to_d_and_back(device: str, backend: str, p: int, d: int) -> None:
    canonical = BlockLayout.canonical(MIXED)
    before, after = BlockLayout.rank_major(MIXED, p), BlockLayout.rank_major(MIXED, d)
    payload = random_blocks(2, canonical, device)
    from_p = filled(2, before.nbytes, device=device)
    reshard(payload, canonical, from_p, before, backend=backend)
    to_d = filled(2, after.nbytes, device=device)
    reshard(from_p, before, to_d, after, backend=backend)
    back = filled(2, canonical.nbytes, device=device)
    reshard(to_d, after, back, canonical, backend=backend)
    assert torch.equal(back, payload)
    direct = filled(2, after.nbytes, device=device)
    reshard(payload, canonical, direct, after, backend=backend)
    assert torch.equal(direct, to_d)


@pytest.mark.parametrize("backend", BACKENDS)
def test_shares_in_buffers_of_their_own(device: str, backend: str) -> None:
    """Each decode rank takes from each prefill rank what the two share."""
    canonical = BlockLayout.canonical(MIXED)
    payload = random_blocks(1, canonical, device)
    held = []
    for rank in range(2):
        share = BlockLayout.rank(MIXED, rank, 2)
        held.append(filled(1, share.nbytes, device=device))
        reshard(payload, canonical, held[-1], share, backend=backend)
    for rank in range(4):
        wanted = BlockLayout.rank(MIXED, rank, 4)
        expected = filled(1, wanted.nbytes, device=device)
        slow_reshard(payload, canonical, expected, wanted)
        target = filled(1, wanted.nbytes, device=device)
        for source, one in enumerate(held):
            reshard(one, BlockLayout.rank(MIXED, source, 2), target, wanted, backend=backend)
        assert torch.equal(target, expected)


def test_arrays_are_blocks_of_the_host(device: str) -> None:
    """Source blocks may be read-only, as leased blocks are; targets may not."""
    if device != "cpu":
        pytest.skip("arrays that are not pinned are reached by a CPU alone")
    whole, share = BlockLayout.canonical(MIXED), BlockLayout.rank(MIXED, 1, 4)
    source = random_blocks(2, whole, device)
    expected = torch.zeros((2, share.nbytes), dtype=torch.uint8)
    reshard(source, whole, expected, share)
    leased = list(source.numpy())
    for block in leased:
        block.flags.writeable = False
    target = [np.zeros(share.nbytes, np.uint8) for _ in leased]
    reshard(leased, whole, target, share)
    assert np.array_equal(target, expected.numpy())
    with pytest.raises(LayoutError, match="can't be written"):
        reshard(target, share, leased, whole)
    for wrong in (np.int8, slice(None, None, -1)):
        odd = [block.view(wrong) if wrong is np.int8 else block[wrong] for block in leased]
        with pytest.raises(LayoutError, match="contiguous uint8"):
            reshard(odd, whole, target, share)


@pytest.mark.parametrize("backend", BACKENDS)
def test_fused_with_gather_and_scatter(device: str, backend: str) -> None:
    """A rank-major gather equals a gather and a reshard; scatter undoes both."""
    cache = nhd(Sizes(2, 6, 3, 4, 8, device=device))
    shape = BlockShape.of_cache(cache, 7)
    canonical = BlockLayout.canonical(shape)
    pages = PageMap.of_sequence([5, 0, 3, 1, 2], tokens=12, block_tokens=7, page_tokens=3)
    blocks = filled(2, canonical.nbytes, device=device)
    gather(cache, pages, blocks, canonical, backend=backend)
    for ranks in (2, 8):
        layout = BlockLayout.rank_major(shape, ranks)
        fused, stepwise = (filled(2, layout.nbytes, device=device) for _ in range(2))
        gather(cache, pages, fused, layout, backend=backend)
        reshard(blocks, canonical, stepwise, layout, backend=backend)
        assert torch.equal(fused, stepwise)
        other = nhd(Sizes(2, 6, 3, 4, 8, device=device))
        scatter(other, pages, fused, layout, backend=backend)
        whole = filled(2, canonical.nbytes, device=device)
        gather(other, pages, whole, canonical, backend=backend)
        assert torch.equal(whole, blocks)
        # One rank of four reads its head of it.
        one = nhd(Sizes(2, 6, 3, 1, 8, device=device))
        rank = PagedCache(one.layers, first_head=1)
        scatter(rank, pages, fused, layout, backend=backend)
        share, expected = BlockLayout.rank(shape, 1, 4), BlockLayout.slice(shape, heads=(1, 2))
        assert share == expected
        mine, right = (filled(2, share.nbytes, device=device) for _ in range(2))
        gather(rank, pages, mine, share, backend=backend)
        reshard(blocks, canonical, right, share, backend=backend)
        assert torch.equal(mine, right)


@pytest.mark.parametrize("odd", ["source", "target", "neither"])
def test_words_divide_every_address(device: str, odd: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU traps on a misaligned load; the interpreter and x86 do not, so words are checked."""
    shape = BlockShape.gqa(layers=2, kv_heads=2, head_dim=8, itemsize=2, tokens=4)
    canonical, ranks = BlockLayout.canonical(shape), BlockLayout.rank_major(shape, 2)
    launched = []
    monkeypatch.setattr("tiffin.kernels.paged.reshard.launch", lambda *args: launched.append(args))
    arenas = [filled(1, 1024, device=device)[0] for _ in range(2)]
    source = [arenas[0][4 * (odd == "source") :]]
    target = [arenas[1][2 * (odd == "target") :]]
    reshard(source, canonical, target, ranks, backend="triton")
    ((_, work, _),) = launched
    assert work.word_bytes * work.unit_words == {"source": 4, "target": 2, "neither": 16}[odd]


@pytest.mark.parametrize("backend", BACKENDS)
def test_selections(device: str, backend: str) -> None:
    canonical, ranks = BlockLayout.canonical(MIXED), BlockLayout.rank_major(MIXED, 2)
    source = random_blocks(2, canonical, device)
    target = filled(2, ranks.nbytes, device=device)
    reshard(source, canonical, target, ranks, layers=(3, 4), heads=(1, 3), backend=backend)
    expected = filled(2, ranks.nbytes, device=device)
    for layer, part, head, offset in ranks.runs.tolist():
        if layer == 3 and head in (1, 2):
            size = MIXED.layers[layer][part].run_bytes
            begin = canonical.offset(layer, part, head)
            expected[:, offset : offset + size] = source[:, begin : begin + size]
    assert torch.equal(target, expected)


def test_bad_input_is_refused_before_anything_is_written(device: str) -> None:
    canonical, ranks = BlockLayout.canonical(MIXED), BlockLayout.rank_major(MIXED, 2)
    other = BlockLayout.canonical(BlockShape(6, MIXED.layers[:1]))
    first, last = (BlockLayout.rank(MIXED, rank, 4) for rank in (0, 3))
    no_latents = BlockShape(6, MIXED.layers[:1])
    one, two = (BlockLayout.slice(no_latents, heads=heads) for heads in ((0, 2), (2, 4)))
    source, target = random_blocks(2, canonical, device), filled(2, ranks.nbytes, device=device)
    kept, arena = target.clone(), filled(1, 4 * ranks.nbytes, device=device)[0]
    bad: list[tuple[type[KernelError], tuple[Any, ...], dict[str, Any]]] = [
        (LayoutError, (source, other, target, ranks), {}),
        (LayoutError, (source, one, target, two), {}),
        (LayoutError, (source, canonical, target, ranks), {"layers": (3, 5)}),
        (LayoutError, (source, canonical, target, ranks), {"heads": (3, 5)}),
        (LayoutError, (source, first, target, last), {"heads": (0, 1)}),
        (LayoutError, (source, canonical, target.view(2, -1, 2), ranks), {}),
        (RoomError, (source[:, 1:], canonical, target, ranks), {}),
        (RoomError, (source, canonical, target[:, 1:], ranks), {}),
        (RoomError, (source[:1], canonical, target, ranks), {}),
        (RoomError, (source, canonical, target[:1], ranks), {}),
        (RoomError, ([], canonical, [], ranks), {}),
        (RoomError, ([source[0], source[0]], canonical, target, ranks), {}),
        (RoomError, (source, canonical, [target[0], target[0]], ranks), {}),
        (RoomError, ([arena[: ranks.nbytes]], canonical, [arena[5:]], ranks), {}),
        (DeviceError, (source.to("meta"), canonical, target, ranks), {}),
        (DeviceError, (source, canonical, target, ranks), {"backend": "numpy"}),
    ]
    for error, arguments, options in bad:
        for backend in BACKENDS:
            with pytest.raises(error):
                reshard(*arguments, **{"backend": backend, **options})
    assert torch.equal(target, kept)
    assert (arena == 0xA5).all()
