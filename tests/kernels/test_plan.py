"""Page maps and lanes: how the host plans a launch, and which arguments it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from pagedsupport import ENGINES, Sizes, mla, nhd, odd_views, place

from tiffin.kernels.errors import DeviceError, LayoutError, PageError
from tiffin.kernels.layout.block_layout import BlockLayout, BlockPart, BlockShape, PagedCache
from tiffin.kernels.layout.lanes import lanes
from tiffin.kernels.layout.transfer_plan import PageMap


@st.composite
def sequences(draw: st.DrawFn) -> dict[str, Any]:
    page_tokens = draw(st.sampled_from([1, 2, 3, 16, 48, 128, 256]))
    first_token = draw(st.integers(0, 3 * page_tokens))
    tokens = draw(st.integers(1, 8 * page_tokens))
    needed = -(-(first_token + tokens) // page_tokens)
    spare = draw(st.integers(0, 2))
    ids = draw(st.permutations(range(needed + spare)))
    return {
        "page_ids": ids,
        "tokens": tokens,
        "block_tokens": draw(st.sampled_from([1, 5, 16, 64, 512])),
        "page_tokens": page_tokens,
        "first_token": first_token,
    }


@given(sequences())
def test_every_token_of_a_sequence_is_where_the_table_says(made: dict[str, Any]) -> None:
    pages = PageMap.of_sequence(**made)
    size, block_tokens = made["page_tokens"], made["block_tokens"]
    assert int(pages.tokens.sum()) == made["tokens"]
    assert (pages.tokens[:-1] == block_tokens).all()
    for token in {
        0,
        made["tokens"] - 1,
        made["tokens"] // 2,
        min(block_tokens, made["tokens"] - 1),
    }:
        at = made["first_token"] + token
        expected = (made["page_ids"][at // size], at % size)
        assert place(pages, token // block_tokens, token % block_tokens) == expected
    used = {
        made["page_ids"][at // size]
        for at in range(made["first_token"], made["first_token"] + made["tokens"])
    }
    assert pages.highest_page == max(used)
    assert pages.most_tokens == min(block_tokens, made["tokens"])


@given(sequences())
def test_slots_name_the_same_tokens(made: dict[str, Any]) -> None:
    size, ids = made["page_tokens"], made["page_ids"]
    tokens = range(made["first_token"], made["first_token"] + made["tokens"])
    slots = [ids[token // size] * size + token % size for token in tokens]
    one = PageMap.of_sequence(**made)
    other = PageMap.of_slots(slots, block_tokens=made["block_tokens"], page_tokens=size)
    assert (one.tokens == other.tokens).all()
    assert (one.first_slots == other.first_slots).all()
    for block in range(len(one)):
        for token in (0, int(one.tokens[block]) - 1):
            assert place(one, block, token) == place(other, block, token)


def test_maps_are_joined() -> None:
    one = PageMap.of_sequence([4, 2, 0], tokens=10, block_tokens=8, page_tokens=4, first_token=1)
    other = PageMap([[9]], page_tokens=4, tokens=2)
    both = PageMap.join([one, other])
    assert len(both) == 3
    for block in range(3):
        source, at = (one, block) if block < 2 else (other, 0)
        assert place(both, block, 1) == place(source, at, 1)
        assert both.tokens[block] == source.tokens[at]
    assert both.highest_page == 9
    with pytest.raises(PageError, match="named twice"):
        PageMap.join([one, one])
    for maps in ([], [one, PageMap([[7]], page_tokens=8)]):
        with pytest.raises(PageError, match="pages of one size"):
            PageMap.join(maps)


def test_page_ids_come_as_any_host_integers() -> None:
    for ids in ([[3, 1]], ((3, 1),), np.array([[3, 1]], np.uint8), torch.tensor([[3, 1]])):
        assert PageMap(ids, page_tokens=4).pages.tolist() == [[3, 1]]
    whole = PageMap([[3, 1], [0, 2]], page_tokens=4, first_slots=[1, 0])
    assert whole.tokens.tolist() == [7, 8]
    with pytest.raises(ValueError, match="read-only"):
        whole.pages[0, 0] = 2


def test_blocks_may_share_a_page_but_no_slot() -> None:
    meeting = PageMap([[1, 2], [2, 3]], page_tokens=4, tokens=[6, 6], first_slots=[0, 2])
    assert meeting.highest_page == 3
    with pytest.raises(PageError, match=r"page 2 is named twice, by block 0 and block 1"):
        PageMap([[1, 2], [2, 3]], page_tokens=4, tokens=[7, 6], first_slots=[0, 2])
    assert PageMap([[5, 5], [6, 7]], page_tokens=4, tokens=[3, 4]).highest_page == 6


MAP = {"pages": [[3, 1], [0, 2]], "page_tokens": 4}
SEQUENCE = {"page_ids": [3, 1, 0], "tokens": 9, "block_tokens": 4, "page_tokens": 4}
REFUSED: dict[str, Any] = {
    "negative": (PageMap, {**MAP, "pages": [[3, 1], [-1, 2]]}, "block 1 names page -1"),
    "twice in a block": (PageMap, {**MAP, "pages": [[3, 3], [0, 2]]}, "page 3 is named twice"),
    "twice": (PageMap, {**MAP, "pages": [[3, 1], [1, 2]]}, "page 1 is named twice"),
    "one axis": (PageMap, {**MAP, "pages": [3, 1]}, "not of shape"),
    "none": (PageMap, {**MAP, "pages": np.zeros((1, 0), int)}, "not of shape"),
    "ragged": (PageMap, {**MAP, "pages": [[3, 1], [0]]}, "pages"),
    "fractions": (PageMap, {**MAP, "pages": [[3.0, 1.0]]}, "integers"),
    "truths": (PageMap, {**MAP, "pages": [[True, False]]}, "integers"),
    "huge": (PageMap, {**MAP, "pages": np.array([[1 << 63]], np.uint64)}, "integers"),
    "no page size": (PageMap, {**MAP, "page_tokens": 0}, "page_tokens"),
    "no tokens": (PageMap, {**MAP, "tokens": [8, 0]}, "block 1 has 0 tokens"),
    "too many tokens": (PageMap, {**MAP, "tokens": [9, 1]}, "block 0: 9 tokens .* need 3 pages"),
    "too many in mid-page": (PageMap, {**MAP, "tokens": 8, "first_slots": 1}, "need 3 pages"),
    "slot beyond": (PageMap, {**MAP, "first_slots": 4}, "outside its page"),
    "slot before": (PageMap, {**MAP, "first_slots": -1}, "outside its page"),
    "tokens of others": (PageMap, {**MAP, "tokens": [1, 2, 3]}, "there are 2 blocks"),
    "short table": (PageMap.of_sequence, {**SEQUENCE, "tokens": 13}, "the table has 3"),
    "before the table": (PageMap.of_sequence, {**SEQUENCE, "first_token": -1}, "first_token"),
    "no sequence": (PageMap.of_sequence, {**SEQUENCE, "tokens": 0}, "tokens is 0"),
    "no blocks": (PageMap.of_sequence, {**SEQUENCE, "block_tokens": 0}, "block_tokens is 0"),
    "two tables": (PageMap.of_sequence, {**SEQUENCE, "page_ids": [[3, 1]]}, "not of shape"),
    "table twice": (PageMap.of_sequence, {**SEQUENCE, "page_ids": [3, 1, 3]}, "named twice"),
    "padding": (
        PageMap.of_slots,
        {"slot_mapping": [4, 5, -1], "block_tokens": 4, "page_tokens": 4},
        "token 2 has slot -1",
    ),
    "a gap": (
        PageMap.of_slots,
        {"slot_mapping": [4, 6], "block_tokens": 4, "page_tokens": 4},
        "token 1 has slot 6",
    ),
    "a page left early": (
        PageMap.of_slots,
        {"slot_mapping": [4, 5, 8], "block_tokens": 4, "page_tokens": 4},
        "token 2 has slot 8",
    ),
    "no slots": (
        PageMap.of_slots,
        {"slot_mapping": [], "block_tokens": 4, "page_tokens": 4},
        "one entry per token|integers",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_map_is_refused(name: str) -> None:
    make, arguments, message = REFUSED[name]
    with pytest.raises(PageError, match=message):
        make(**arguments)


class OnADevice:
    """The attributes of a CUDA tensor that the planning reads."""

    device = "cuda:0"


def test_ids_on_a_device_are_refused() -> None:
    with pytest.raises(DeviceError, match="stall the device"):
        PageMap(OnADevice(), page_tokens=4)
    with pytest.raises(DeviceError):
        PageMap(torch.zeros(1, 1, dtype=torch.int64, device="meta"), page_tokens=4)


@pytest.mark.parametrize("engine", ENGINES)
def test_lanes_are_addresses_of_rows(engine: str) -> None:
    cache = ENGINES[engine](Sizes(3, 4, 3, 2, 8))
    layout = BlockLayout.canonical(BlockShape.of_cache(cache, 5))
    groups = lanes(cache, layout)
    assert len(groups) == 1
    group = groups[0]
    assert group.offsets.tolist() == sorted(layout.runs[:, 3].tolist())
    for address, offset in zip(group.addresses, group.offsets, strict=True):
        layer, part, head, _ = layout.runs[layout.runs[:, 3] == offset][0]
        for page, slot in ((0, 0), (3, 2)):
            at = address + page * group.page_stride_bytes + slot * group.token_stride_bytes
            assert at == cache.layers[layer][part][page, slot, head].data_ptr()
    assert len(group) % group.together == 0
    every = [*group.addresses.tolist(), *group.offsets.tolist(), group.row_bytes]
    every += [group.page_stride_bytes, group.token_stride_bytes]
    assert all(number % group.alignment == 0 for number in every)
    assert group.alignment == 16 or any(number % (2 * group.alignment) for number in every)


def test_lanes_are_planned_once() -> None:
    cache = nhd(Sizes(2, 4, 3, 4, 8))
    shape = BlockShape.of_cache(cache, 5)
    one = lanes(cache, BlockLayout.canonical(shape), layers=(0, 1), heads=slice(2, None))
    other = lanes(cache, BlockLayout.canonical(shape), layers=range(1), heads=(2, 4))
    assert one is other
    for first in range(300):  # the cache of selections is bounded
        wide = BlockShape.gqa(layers=2, kv_heads=4, head_dim=8, itemsize=2, tokens=first + 1)
        lanes(cache, BlockLayout.canonical(wide))
    assert len(cache.memo) <= 256


def test_groups_are_what_differs() -> None:
    """Rows of two lengths are two groups, and so are rows of two strides."""
    keys, values = torch.zeros(2, 4, 3, 2, 8), torch.zeros(2, 4, 3, 2, 6)
    cache = PagedCache.separate(list(keys), list(values))
    groups = lanes(cache, BlockLayout.canonical(BlockShape.of_cache(cache, 5)))
    assert [group.row_bytes for group in groups] == [32, 24]
    assert [len(group) for group in groups] == [4, 4]


def test_a_scatter_reads_each_head_once() -> None:
    cache = nhd(Sizes(2, 4, 3, 2, 8))
    layout = BlockLayout.rank_major(BlockShape.of_cache(cache, 5), 4)
    assert len(lanes(cache, layout)[0]) == 16
    once = lanes(cache, layout, once=True)[0]
    assert len(once) == len(set(once.addresses.tolist())) == 8
    firsts = [layout.offset(layer, part, head) for layer, part, head in np.ndindex(2, 2, 2)]
    assert sorted(once.offsets.tolist()) == sorted(firsts)


SHAPE = BlockShape.gqa(layers=4, kv_heads=4, head_dim=8, itemsize=2, tokens=5)


def stage(layer_ids: list[int], heads: int = 2, first_head: int = 0, dim: int = 8) -> PagedCache:
    made = nhd(Sizes(len(layer_ids), 4, 3, heads, dim))
    return PagedCache(made.layers, layer_ids=layer_ids, first_head=first_head)


UNSHARED: dict[str, Any] = {
    "a layer beyond": (stage([0, 4]), BlockLayout.canonical(SHAPE), {}),
    "heads beyond": (stage([0], first_head=3), BlockLayout.canonical(SHAPE), {}),
    "other rows": (stage([0], dim=4), BlockLayout.canonical(SHAPE), {}),
    "other parts": (mla(Sizes(1, 4, 3, 1, 8)), BlockLayout.canonical(SHAPE), {}),
    "no layer in common": (stage([0]), BlockLayout.slice(SHAPE, layers=(1, 2)), {}),
    "no head in common": (stage([0]), BlockLayout.slice(SHAPE, heads=(2, 4)), {}),
    "layers of another stage": (stage([0, 1]), BlockLayout.canonical(SHAPE), {"layers": (1, 3)}),
    "layers of another slice": (
        stage([0, 1]),
        BlockLayout.slice(SHAPE, layers=(0, 1)),
        {"layers": (0, 2)},
    ),
    "heads of another rank": (stage([0]), BlockLayout.canonical(SHAPE), {"heads": (1, 3)}),
    "heads of another slice": (
        stage([0]),
        BlockLayout.slice(SHAPE, heads=(1, 2)),
        {"heads": (0, 2)},
    ),
    "a state": (
        mla(Sizes(1, 4, 3, 1, 8)),
        BlockLayout.canonical(
            BlockShape(5, ((BlockPart(1, 1, 16, sliced=False, per_token=False),),))
        ),
        {},
    ),
}


@pytest.mark.parametrize("name", UNSHARED)
def test_what_is_not_shared_is_refused(name: str) -> None:
    cache, layout, options = UNSHARED[name]
    with pytest.raises(LayoutError):
        lanes(cache, layout, **options)
    assert not cache.memo


def test_rows_may_differ_for_those_that_convert() -> None:
    cache = odd_views(Sizes(2, 4, 3, 2, 8, torch.bfloat16))
    part = BlockPart(2, 5, 8, tail_bytes=8)
    layout = BlockLayout.canonical(BlockShape(5, ((part, part),) * 2))
    with pytest.raises(LayoutError, match="rows of 16 bytes"):
        lanes(cache, layout)
    group = lanes(cache, layout, same_rows=False)[0]
    assert (group.row_bytes, group.run_row_bytes, group.run_bytes) == (16, 8, 40)
    assert group.offsets.tolist() == [48 * run for run in range(8)]
