"""Views of engines' tensors, and where a block keeps each head."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from pagedsupport import ENGINES, Sizes

from tiffin.kernels.errors import LayoutError
from tiffin.kernels.layout.block_layout import (
    BlockLayout,
    BlockPart,
    BlockShape,
    PagedCache,
    rank_heads,
)
from tiffin.kernels.layout.engine_cache import row_bytes
from tiffin.kernels.layout.lanes import lanes
from tiffin.kvstore.format.schema import KVSchema, LayerSpec


def numbered(*shape: int) -> torch.Tensor:
    return torch.arange(int(np.prod(shape)), dtype=torch.float32).view(shape)


B, N, H, D, L = 5, 4, 3, 2, 2

# Each: a cache, and the index of (layer, part, page, slot, head) in the engine's own tensor.
NHD = [numbered(2, B, N, H, D) + 1000 * i for i in range(L)]
HND = [numbered(2, B, H, N, D) + 1000 * i for i in range(L)]
B2NHD = [numbered(B, 2, N, H, D) + 1000 * i for i in range(L)]
PACKED = [numbered(B, H, N, 2 * D) + 1000 * i for i in range(L)]
PACKED_NHD = [(numbered(B, N, H, 2 * D) + 1000 * i).transpose(1, 2) for i in range(L)]
UNEVEN = [numbered(B, H, N, 2 * D) + 1000 * i for i in range(L)]
KEYS = [numbered(B, N, H, D) + 1000 * i for i in range(L)]
VALUES = [numbered(B, N, H, D) - 1000 * (i + 1) for i in range(L)]
LATENT = [numbered(B, N, D) + 1000 * i for i in range(L)]
POOL = [numbered(B * N, 1, D) + 1000 * i for i in range(L)]
POOL_K = [numbered(B * N, H, D) + 1000 * i for i in range(L)]
POOL_V = [numbered(B * N, H, D + 1) - 1000 * (i + 1) for i in range(L)]
ROWS_K = [numbered(B, H, N, D) + 1000 * i for i in range(L)]
ROWS_V = [numbered(B, H, N, D) - 1000 * (i + 1) for i in range(L)]
CROSS = numbered(B, L, 2, N, H, D)
CROSS_HEADS = numbered(L, H, 2, B, N, D)
CROSS_LATENT = numbered(B, N, L, D)

CONSTRUCTED = {
    "vllm nhd": (PagedCache.vllm(NHD), lambda i, p, b, n, h: NHD[i][p, b, n, h]),
    "vllm hnd": (PagedCache.vllm(HND, "2BHND"), lambda i, p, b, n, h: HND[i][p, b, h, n]),
    "flashinfer": (PagedCache.vllm(B2NHD, "B2NHD"), lambda i, p, b, n, h: B2NHD[i][b, p, n, h]),
    "packed": (
        PagedCache.vllm_packed(PACKED),
        lambda i, p, b, n, h: PACKED[i][b, h, n, p * D : (p + 1) * D],
    ),
    "packed nhd": (
        PagedCache.vllm_packed(PACKED_NHD),
        lambda i, p, b, n, h: PACKED_NHD[i][b, h, n, p * D : (p + 1) * D],
    ),
    "packed by dims": (
        PagedCache.of(PACKED, "BHNC"),
        lambda i, p, b, n, h: PACKED[i][b, h, n, p * D : (p + 1) * D],
    ),
    "packed unevenly": (
        PagedCache.vllm_packed(UNEVEN, k_dim=3),
        lambda i, p, b, n, h: UNEVEN[i][b, h, n, 3:] if p else UNEVEN[i][b, h, n, :3],
    ),
    "separate": (
        PagedCache.separate(KEYS, VALUES),
        lambda i, p, b, n, h: (KEYS, VALUES)[p][i][b, n, h],
    ),
    "separate hnd": (
        PagedCache.separate(ROWS_K, ROWS_V, "BHND"),
        lambda i, p, b, n, h: (ROWS_K, ROWS_V)[p][i][b, h, n],
    ),
    "mla": (PagedCache.mla(LATENT), lambda i, p, b, n, h: LATENT[i][b, n]),
    "mla pool": (
        PagedCache.mla(POOL, "THD", page_tokens=N),
        lambda i, p, b, n, h: POOL[i][b * N + n, 0],
    ),
    "sglang": (
        PagedCache.sglang(POOL_K, POOL_V, page_tokens=N),
        lambda i, p, b, n, h: (POOL_K, POOL_V)[p][i][b * N + n, h],
    ),
    "contiguous": (
        PagedCache.contiguous(ROWS_K, ROWS_V),
        lambda i, p, b, n, h: (ROWS_K, ROWS_V)[p][i][b, h, n],
    ),
    "cross-layer": (PagedCache.cross_layer(CROSS), lambda i, p, b, n, h: CROSS[b, i, p, n, h]),
    "cross-layer, heads first": (
        PagedCache.cross_layer(CROSS_HEADS, "LH2BND"),
        lambda i, p, b, n, h: CROSS_HEADS[i, h, p, b, n],
    ),
    "cross-layer latents": (
        PagedCache.cross_layer(CROSS_LATENT, "BNLD"),
        lambda i, p, b, n, h: CROSS_LATENT[b, n, i],
    ),
}


@pytest.mark.parametrize("name", CONSTRUCTED)
def test_views_are_the_engines_rows(name: str) -> None:
    cache, engine = CONSTRUCTED[name]
    assert (len(cache.layers), cache.pages, cache.page_tokens) == (L, B, N)
    for i, parts in enumerate(cache.layers):
        for p, view in enumerate(parts):
            assert view.shape[2] == (1 if len(parts) == 1 else H)
            for b, n, h in np.ndindex(*view.shape[:3]):
                assert torch.equal(view[b, n, h], engine(i, p, b, n, h))
                assert view[b, n, h].data_ptr() == engine(i, p, b, n, h).data_ptr()


def test_caches_without_a_batch_and_one_token_pages() -> None:
    one = PagedCache.contiguous([ROWS_K[0][1]], [ROWS_V[0][1]])
    assert (one.pages, one.page_tokens) == (1, N)
    assert torch.equal(one.layers[0][1][0, 2, 1], ROWS_V[0][1, 1, 2])
    pool = PagedCache.sglang(POOL_K, POOL_V)
    assert (pool.pages, pool.page_tokens) == (B * N, 1)
    assert torch.equal(pool.layers[1][0][7, 0, 2], POOL_K[1][7, 2])


HALF = torch.zeros(B, N, H, D)
NOT_CACHES: dict[str, Any] = {
    "no layers": lambda: PagedCache([]),
    "a layer without parts": lambda: PagedCache([[HALF], []]),
    "three axes": lambda: PagedCache([[HALF[0]]]),
    "no tensor": lambda: PagedCache([[np.zeros((B, N, H, D))]]),
    "nothing in it": lambda: PagedCache([[HALF[:0]]]),
    "dims with gaps": lambda: PagedCache([[torch.zeros(B, N, H, 2 * D)[..., ::2]]]),
    "rows on each other": lambda: PagedCache([[HALF[:1].expand(B, N, H, D)]]),
    "overlapping pages": lambda: PagedCache([[HALF.as_strided((B, N, H, D), (1, 6, 2, 1))]]),
    "one tensor twice": lambda: PagedCache([[HALF], [HALF]]),
    "pages of two sizes": lambda: PagedCache([[HALF], [torch.zeros(B, N + 1, H, D)]]),
    "more ids than layers": lambda: PagedCache([[HALF]], layer_ids=[0, 1]),
    "ids that descend": lambda: PagedCache([[HALF], [HALF + 1]], layer_ids=[1, 0]),
    "a negative id": lambda: PagedCache([[HALF]], layer_ids=[-1]),
    "a negative head": lambda: PagedCache([[HALF]], first_head=-1),
    "an axis twice": lambda: PagedCache.vllm(NHD, "2BNHH"),
    "an unknown axis": lambda: PagedCache.vllm(NHD, "2BNHX"),
    "too few axes": lambda: PagedCache.vllm(NHD, "BNHD"),
    "no dim": lambda: PagedCache.of(KEYS, "BNH2"),
    "dim and content": lambda: PagedCache.of(KEYS, "BNDC"),
    "content and parts": lambda: PagedCache.of(NHD, "2BNHC"),
    "pages and pool": lambda: PagedCache.of(KEYS, "BTHD"),
    "three parts": lambda: PagedCache.vllm([torch.zeros(3, B, N, H, D)]),
    "content that is odd": lambda: PagedCache.vllm_packed([torch.zeros(B, H, N, 5)]),
    "no values": lambda: PagedCache.vllm_packed(PACKED, k_dim=2 * D),
    "content of three axes": lambda: PagedCache.vllm_packed([torch.zeros(B, H, N)]),
    "more keys": lambda: PagedCache.separate(KEYS, VALUES[:1]),
    "separate together": lambda: PagedCache.separate(NHD, NHD, "2BNHD"),
    "latents of two parts": lambda: PagedCache.mla(NHD, "2BNHD"),
    "pages that do not divide": lambda: PagedCache.sglang(POOL_K, POOL_V, page_tokens=3),
    "pages of no tokens": lambda: PagedCache.sglang(POOL_K, POOL_V, page_tokens=0),
    "a pool without a page size": lambda: PagedCache.of(POOL_K, "THD"),
    "another page size": lambda: PagedCache.separate(KEYS, VALUES, page_tokens=N + 1),
    "layers in no axis": lambda: PagedCache.cross_layer(CROSS, "B2NHD"),
}


@pytest.mark.parametrize("name", NOT_CACHES)
def test_what_is_no_cache_is_refused(name: str) -> None:
    with pytest.raises(LayoutError):
        NOT_CACHES[name]()


def gqa(kv_heads: int, head_dim: int, **options: Any) -> LayerSpec:
    return LayerSpec.gqa(kv_heads=kv_heads, head_dim=head_dim, dtype="bfloat16", **options)


SCHEMAS = [
    KVSchema.gqa(model="m", layers=3, kv_heads=4, head_dim=8, dtype="bfloat16", block_tokens=16),
    KVSchema.gqa(
        model="m", layers=2, kv_heads=3, head_dim=80, v_head_dim=64, dtype="int8", block_tokens=5
    ),
    KVSchema.mla(model="m", layers=3, latent_dim=16, rope_dim=4, dtype="float32", block_tokens=7),
    KVSchema.of(
        "mixed",
        [
            gqa(8, 16),
            LayerSpec.window(kv_heads=4, head_dim=8, dtype="bfloat16", window_tokens=3),
            LayerSpec.state(nbytes=100),
            LayerSpec.mla(latent_dim=6, dtype="float16"),
            LayerSpec.compressed(kv_heads=4, head_dim=8, dtype="float32", tokens_per_entry=4),
            LayerSpec.opaque(nbytes=33, format="odd"),
            gqa(4, 16, v_dtype="float32"),
        ],
        block_tokens=8,
    ),
]


@pytest.mark.parametrize("schema", SCHEMAS, ids=repr)
def test_the_canonical_layout_is_the_schemas(schema: KVSchema) -> None:
    layout = BlockLayout.canonical(BlockShape.of_schema(schema))
    assert (layout.nbytes, layout.tokens) == (schema.block_bytes, schema.block_tokens)
    runs = 0
    for index, layer in enumerate(schema.layers):
        for number, part in enumerate(layer.parts):
            for head in range(part.heads):
                one = (head, head + 1) if layer.has_heads else None
                span = schema.range(index, part.name, one)
                assert layout.offset(index, number, head) == span.offset
                assert layout.shape.layers[index][number].run_bytes == span.length
                runs += 1
    assert len(layout.runs) == runs


@pytest.mark.parametrize("schema", SCHEMAS, ids=repr)
@given(data=st.data())
def test_a_slice_is_the_schemas_ranges_packed(schema: KVSchema, data: Any) -> None:
    count = len(schema.layers)
    first = data.draw(st.integers(0, count - 1))
    layers = (first, data.draw(st.integers(first + 1, count)))
    heads = data.draw(st.sampled_from([None, (0, 1), (1, 3)]))
    shape = BlockShape.of_schema(schema)
    whole, part = BlockLayout.canonical(shape), BlockLayout.slice(shape, layers=layers, heads=heads)
    payload = np.random.default_rng(first).integers(0, 256, whole.nbytes, np.uint8)
    spans = schema.ranges(layers, heads)
    packed = np.concatenate([payload[span.offset : span.end] for span in spans])
    assert part.nbytes == len(packed)
    for layer, number, head, offset in part.runs.tolist():
        run_bytes = shape.layers[layer][number].run_bytes
        at = whole.offset(layer, number, head)
        assert (packed[offset : offset + run_bytes] == payload[at : at + run_bytes]).all()


def test_ranks_share_heads_as_engines_do() -> None:
    assert [rank_heads(8, rank, 4) for rank in range(4)] == [(0, 2), (2, 4), (4, 6), (6, 8)]
    assert [rank_heads(2, rank, 4) for rank in range(4)] == [(0, 1), (0, 1), (1, 2), (1, 2)]
    assert rank_heads(8, 0, 1) == (0, 8)
    for heads, rank, ranks in ((6, 0, 4), (4, 0, 6), (4, 4, 4), (4, -1, 4), (4, 0, 0)):
        with pytest.raises(LayoutError):
            rank_heads(heads, rank, ranks)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_rank_major_is_the_ranks_one_after_the_other(ranks: int) -> None:
    shape = BlockShape.of_schema(
        KVSchema.of("m", [gqa(4, 8), LayerSpec.mla(latent_dim=3, dtype="float16")], block_tokens=6)
    )
    whole = BlockLayout.rank_major(shape, ranks)
    begin = 0
    found = []
    for rank in range(ranks):
        share = BlockLayout.rank(shape, rank, ranks)
        first, end = rank_heads(4, rank, ranks)
        assert share.nbytes == (end - first) * 2 * 6 * 16 + 6 * 6
        assert sorted(set(share.runs[share.runs[:, 0] == 0, 2])) == list(range(first, end))
        found += [(*run[:3], run[3] + begin) for run in share.runs.tolist()]
        begin += share.nbytes
    assert whole.nbytes == begin
    assert [tuple(run) for run in whole.runs.tolist()] == found


def test_equal_layouts_are_equal() -> None:
    shape = BlockShape.gqa(layers=2, kv_heads=4, head_dim=8, itemsize=2, tokens=6)
    one, other = BlockLayout.canonical(shape), BlockLayout.slice(shape)
    assert one == other
    assert hash(one) == hash(other)
    assert one != BlockLayout.rank_major(shape, 2)
    assert BlockLayout.rank_major(shape, 1) == one
    assert one != "canonical"
    with pytest.raises(ValueError, match="read-only"):
        one.runs[0, 3] = 1
    with pytest.raises(LayoutError, match="no layer 2"):
        one.offset(2, 0, 0)


def test_a_tail_moves_what_follows() -> None:
    part = BlockPart(2, 8, 4, tail_bytes=6)
    layout = BlockLayout.canonical(BlockShape(8, ((part, part),)))
    assert layout.runs[:, 3].tolist() == [0, 38, 76, 114]
    assert layout.nbytes == 152


@pytest.mark.parametrize("engine", ENGINES)
def test_the_shape_of_a_cache_is_its_own_model(engine: str) -> None:
    cache = ENGINES[engine](Sizes(3, 4, 2, 3, 8))
    shape = BlockShape.of_cache(cache, 10)
    assert [[part.row_bytes for part in parts] for parts in shape.layers] == [
        [row_bytes(view) for view in parts] for parts in cache.layers
    ]
    assert sum(len(group) for group in lanes(cache, BlockLayout.canonical(shape))) == len(
        BlockLayout.canonical(shape).runs
    )
    with pytest.raises(LayoutError, match="part of a model"):
        BlockShape.of_cache(PagedCache(cache.layers, first_head=1), 10)


def test_a_cache_whose_numbers_are_not_its_memory_is_refused() -> None:
    plain = torch.zeros(2, 4, 1, 8)
    PagedCache([[plain]])
    for wrong in (torch._neg_view(plain), plain.to(torch.complex64).conj(), plain.to_sparse()):
        with pytest.raises(LayoutError, match="memory holds its numbers"):
            PagedCache([[wrong]])


def test_shapes_that_cannot_be_are_refused() -> None:
    part = BlockPart(1, 4, 8)
    for bad in (
        lambda: BlockPart(0, 4, 8),
        lambda: BlockPart(1, 0, 8),
        lambda: BlockPart(1, 4, 0),
        lambda: BlockPart(1, 4, 8, tail_bytes=-1),
        lambda: BlockShape(0, ((part,),)),
        lambda: BlockShape(3, ((part,),)),
        lambda: BlockShape(4, ()),
        lambda: BlockShape(4, ((),)),
        lambda: BlockLayout.slice(BlockShape(4, ((part,),)), layers=(0, 2)),
        lambda: BlockLayout.slice(BlockShape(4, ((part,),)), heads=(1, 1)),
        lambda: BlockLayout.rank_major(BlockShape(4, ((BlockPart(6, 4, 8),),)), 4),
    ):
        with pytest.raises(LayoutError):
            bad()
