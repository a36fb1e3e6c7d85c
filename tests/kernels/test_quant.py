"""Quantised blocks out of pages and back: the kernels, their reference, and a slow walk agree."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from pagedsupport import heads_of, held_rows

from tiffin.kernels.errors import DeviceError, LayoutError, PageError, RoomError
from tiffin.kernels.layout.block_layout import BlockLayout, BlockPart, BlockShape
from tiffin.kernels.layout.engine_cache import PagedCache
from tiffin.kernels.layout.transfer_plan import PageMap
from tiffin.kernels.quant import quantised_gather
from tiffin.kernels.quant.quantised_gather import (
    QuantisedLayout,
    gather_quantised,
    scatter_dequantised,
)
from tiffin.kernels.quant.reference import dequantise, quantise
from tiffin.kernels.quant.scaling import FLOAT32_MAX, FORMATS, Scaling
from tiffin.kvstore.format.schema import KVSchema, LayerSpec

if TYPE_CHECKING:
    from collections.abc import Callable

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.float32
UNTOUCHED = 0x5A


def numbers(*shape: int, dtype: Any = torch.bfloat16, seed: int = 0) -> Any:
    """Normal numbers of sizes that differ from token to token, a few of them special."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(*shape, generator=generator)
    drawn *= torch.exp2(torch.randint(-9, 9, (*shape[:-1], 1), generator=generator))
    flat = drawn.view(-1)
    flat[::37], flat[5::41], flat[11::43] = 0, -0.0, 1e-7
    return drawn.to(dtype).to(DEVICE)


def blank(count: int, nbytes: int) -> Any:
    return torch.full((count, nbytes), UNTOUCHED, dtype=torch.uint8, device=DEVICE)


def same(one: Any, other: Any) -> bool:
    """Whether two caches' tensors have the same numbers; a NaN is a NaN."""
    return torch.equal(one.float().nan_to_num(7e7), other.float().nan_to_num(7e7))


def walk(cache: PagedCache, pages: PageMap, layout: QuantisedLayout) -> Any:
    """What blocks have to have where the layout has a run, head by head and token by token."""
    shape = layout.layout.shape
    blocks = blank(len(pages), layout.nbytes)
    for layer, part, offset, view in heads_of(cache, layout.layout):
        spec, scaling = shape.layers[layer][part], layout.scalings[layer][part]
        for block in range(len(pages)):
            rows = view.new_zeros(spec.rows, view.shape[2])
            for at, where in held_rows(pages, block, spec, shape.tokens):
                rows[at] = view[where]
            blocks[block, offset : offset + spec.run_bytes] = run_of(rows, scaling)
    return blocks


def run_of(rows: Any, scaling: Scaling | None) -> Any:
    if scaling is None:
        return rows.contiguous().view(torch.uint8).flatten()
    groups = [quantise(group, scaling) for group in rows.split(scaling.scale_tokens)]
    pieces = [values.view(torch.uint8).flatten() for values, _ in groups]
    return torch.cat([*pieces, *(scale.view(torch.uint8) for _, scale in groups)])


def threes(cache: PagedCache) -> PagedCache:
    """A cache of the same shapes, filled with 3."""
    views = [[torch.full_like(part, 3) for part in parts] for parts in cache.layers]
    return PagedCache(views, layer_ids=cache.layer_ids, first_head=cache.first_head)


def walk_back(
    cache: PagedCache, pages: PageMap, layout: QuantisedLayout, blocks: Any
) -> PagedCache:
    """What a cache filled with 3 has to have after the blocks were written to it."""
    shape, target = layout.layout.shape, threes(cache)
    for layer, part, offset, view in reversed(heads_of(target, layout.layout)):  # the first counts
        spec, scaling = shape.layers[layer][part], layout.scalings[layer][part]
        for block in range(len(pages)):
            rows = rows_of(blocks[block, offset : offset + spec.run_bytes], spec, scaling, view)
            for at, where in held_rows(pages, block, spec, shape.tokens):
                view[where] = rows[at]
    return target


def rows_of(run: Any, spec: BlockPart, scaling: Scaling | None, view: Any) -> Any:
    if scaling is None:
        return run.clone().view(view.dtype).view(spec.rows, -1)
    kind = torch.int8 if scaling.format == "int8" else torch.float8_e4m3fn
    values = run[: spec.rows * spec.row_bytes].view(kind).view(spec.rows, -1)
    scales = run[spec.rows * spec.row_bytes :].clone().view(torch.float32)
    rows = [values[r].float() * scales[r // scaling.scale_tokens] for r in range(spec.rows)]
    return torch.stack(rows).to(view.dtype)


def check_both_ways(cache: PagedCache, pages: PageMap, layout: QuantisedLayout) -> None:
    """The kernel and the reference give the walk's bytes, and write back its numbers, and nothing
    beside them."""
    blocks = walk(cache, pages, layout)
    numbers = walk_back(cache, pages, layout, blocks)
    for backend in ("reference", "triton"):
        target = blank(len(pages), layout.nbytes)
        gather_quantised(cache, pages, target, layout, backend=backend)
        assert torch.equal(target, blocks), backend
        other = threes(cache)
        scatter_dequantised(other, pages, blocks, layout, backend=backend)
        for ours, theirs in zip(numbers.layers, other.layers, strict=True):
            assert all(same(one, two) for one, two in zip(ours, theirs, strict=True)), backend


def gqa(**fields: Any) -> KVSchema:
    chosen = {"layers": 2, "kv_heads": 2, "head_dim": 8, "dtype": "int8", "block_tokens": 16}
    return KVSchema.gqa(model="m", **{**chosen, "scale_tokens": 16, **fields})


def sequence(tokens: int = 27, first_token: int = 0, page_tokens: int = 4) -> PageMap:
    return PageMap.of_sequence(
        [3, 1, 8, 0, 5, 7, 2, 6, 4],
        tokens=tokens,
        block_tokens=16,
        page_tokens=page_tokens,
        first_token=first_token,
    )


CACHES: dict[str, Callable[[], PagedCache]] = {
    "vllm NHD": lambda: PagedCache.vllm([numbers(2, 9, 4, 2, 8, seed=s) for s in (1, 2)]),
    "vllm HND": lambda: PagedCache.vllm([numbers(2, 9, 2, 4, 8, seed=s) for s in (1, 2)], "2BHND"),
    "vllm packed": lambda: PagedCache.vllm_packed(
        [numbers(9, 4, 2, 16, seed=s).transpose(1, 2) for s in (1, 2)]
    ),
    "cross-layer": lambda: PagedCache.cross_layer(numbers(9, 2, 2, 4, 2, 8)),
    "sglang": lambda: PagedCache.sglang(
        [numbers(36, 2, 8, seed=s) for s in (1, 2)],
        [numbers(36, 2, 8, seed=s) for s in (3, 4)],
        page_tokens=4,
    ),
}


@pytest.mark.parametrize("name", CACHES)
@pytest.mark.parametrize(("form", "scale_tokens"), [("float8_e4m3", 16), ("int8", 4)])
def test_engines_layouts(name: str, form: str, scale_tokens: int) -> None:
    layout = QuantisedLayout.of_schema(gqa(dtype=form, scale_tokens=scale_tokens))
    check_both_ways(CACHES[name](), sequence(first_token=3), layout)


@st.composite
def cases(draw: st.DrawFn) -> tuple[PagedCache, PageMap, QuantisedLayout]:
    """A cache of any shape and dtype, a sequence in it, and how its blocks are quantised."""
    page_tokens = draw(st.sampled_from([1, 2, 3, 16, 48, 256]))
    scale_tokens, groups = draw(st.tuples(st.integers(1, 6), st.integers(1, 4)))
    heads, dim = draw(st.integers(1, 3)), draw(st.sampled_from([1, 3, 8, 20]))
    block_tokens = scale_tokens * groups * (1 if scale_tokens * groups * dim % 4 == 0 else 4)
    tokens = draw(st.integers(1, 2 * block_tokens))
    first_token = draw(st.integers(0, page_tokens))
    needed = -(-(first_token + tokens) // page_tokens)
    ids = draw(st.permutations(range(needed + 1)))
    dtype = draw(st.sampled_from([torch.bfloat16, torch.float16, torch.float32]))
    source = numbers(2, needed + 1, page_tokens, heads, dim + 1, dtype=dtype)[..., 1:]
    schema = gqa(
        layers=1,
        kv_heads=heads,
        head_dim=dim,
        dtype=draw(st.sampled_from(list(FORMATS))),
        block_tokens=block_tokens,
        scale_tokens=scale_tokens,
    )
    pages = PageMap.of_sequence(
        ids,
        tokens=tokens,
        block_tokens=block_tokens,
        page_tokens=page_tokens,
        first_token=first_token,
    )
    return PagedCache.vllm([source]), pages, QuantisedLayout.of_schema(schema)


Case = tuple[PagedCache, PageMap, QuantisedLayout]
TILES = st.sampled_from([16, 64, 8192])


def check_any_shape(case: Case, tile: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            quantised_gather, "TILE_NUMBERS", tile
        )  # groups of one tile, of several, and of a part
        check_both_ways(*case)


@given(case=cases(), tile=TILES)
@settings(max_examples=10)
def test_any_shape(case: Case, tile: int) -> None:
    check_any_shape(case, tile)


@pytest.mark.slow
@given(case=cases(), tile=TILES)
@settings(max_examples=30)
def test_any_shape_at_length(case: Case, tile: int) -> None:
    check_any_shape(case, tile)


def test_a_latent() -> None:
    schema = KVSchema.mla(
        model="m",
        layers=2,
        latent_dim=12,
        rope_dim=8,
        dtype="int8",
        block_tokens=16,
        scale_tokens=2,
    )
    cache = PagedCache.mla([numbers(9, 4, 20, seed=s) for s in (1, 2)])
    check_both_ways(cache, sequence(), QuantisedLayout.of_schema(schema))


def test_a_window_of_a_block() -> None:
    spec = LayerSpec.window(
        kv_heads=2, head_dim=4, dtype="float8_e4m3", window_tokens=6, scale_tokens=3
    )
    layout = QuantisedLayout.of_schema(KVSchema.of("m", [spec], block_tokens=16))
    cache = PagedCache.vllm([numbers(2, 9, 4, 2, 4)])
    for tokens in (8, 12, 32):  # the last block ends before its window, in it, and after it
        check_both_ways(cache, sequence(tokens), layout)


def test_parts_that_stay_as_they_are_are_copied_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = QuantisedLayout.of_schema(gqa(dtype="bfloat16", v_dtype="int8", scale_tokens=8))
    cache = CACHES["vllm NHD"]()
    check_both_ways(cache, sequence(), layout)
    assert count_launches(monkeypatch, cache, sequence(), layout) == 2


def test_all_layers_and_blocks_are_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = QuantisedLayout.of_schema(gqa())
    assert count_launches(monkeypatch, CACHES["vllm NHD"](), sequence(), layout) == 1


def count_launches(
    monkeypatch: pytest.MonkeyPatch, cache: PagedCache, pages: PageMap, layout: QuantisedLayout
) -> int:
    launches = []
    for name in ("_launch", "launch"):
        whole = getattr(quantised_gather, name)

        def counted(*args: Any, whole: Any = whole) -> None:
            launches.append(args)
            whole(*args)

        monkeypatch.setattr(quantised_gather, name, counted)
    gather_quantised(cache, pages, blank(2, layout.nbytes), layout, backend="triton")
    return len(launches)


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_layers_and_heads_of_a_block(backend: str) -> None:
    layout = QuantisedLayout.of_schema(gqa(scale_tokens=4, kv_heads=4, layers=3))
    cache = PagedCache.vllm([numbers(2, 9, 4, 4, 8, seed=s) for s in range(3)])
    whole, pages = walk(cache, sequence(), layout), sequence()
    blocks = blank(2, layout.nbytes)
    gather_quantised(cache, pages, blocks, layout, layers=(1, 2), heads=(1, 3), backend=backend)
    schema = gqa(scale_tokens=4, kv_heads=4, layers=3)
    expected = blank(2, layout.nbytes)
    for span in schema.ranges(layers=(1, 2), heads=(1, 3)):
        expected[:, span.offset : span.end] = whole[:, span.offset : span.end]
    assert torch.equal(blocks, expected)


@pytest.mark.slow
def test_ranks_slices_and_rank_major_blocks() -> None:
    schema = gqa(scale_tokens=4, kv_heads=4)
    shape = BlockShape.of_schema(schema)
    whole = PagedCache.vllm([numbers(2, 9, 4, 4, 8, seed=s) for s in (1, 2)])
    share = PagedCache.vllm(
        [torch.stack(parts)[..., 2:, :] for parts in whole.layers], first_head=2
    )
    for cache, layout in (
        (whole, BlockLayout.slice(shape, layers=(1, 2), heads=(1, 4))),
        (whole, BlockLayout.rank_major(shape, 8)),  # every head twice
        (share, BlockLayout.rank(shape, 1, 2)),
        (share, BlockLayout.canonical(shape)),
    ):
        layout_of = QuantisedLayout.of_schema(schema, layout)
        check_both_ways(cache, sequence(), layout_of)


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_spoils_its_group_alone(bad: float, form: str, backend: str) -> None:
    layout = QuantisedLayout.of_schema(gqa(layers=1, dtype=form, scale_tokens=4))
    source = -numbers(2, 9, 4, 2, 8).abs()
    source[0, 8, 1, 1, 3] = (
        bad  # K of head 1, the second token of the third page: block 0's group 2
    )
    pages = sequence(16)
    blocks = blank(1, layout.nbytes)
    gather_quantised(PagedCache.vllm([source]), pages, blocks, layout, backend=backend)
    assert not blocks[0, 16 * 8 + 16 :][2 * 32 : 3 * 32].any(), "bytes of a spoilt group are zeros"
    target = torch.zeros_like(source)
    scatter_dequantised(PagedCache.vllm([target]), pages, blocks, layout, backend=backend)
    spoilt = target.isnan()
    assert spoilt[0, 8, :, 1].all()
    assert int(spoilt.sum()) == 4 * 8


def patterns(one_in_eight: bool) -> Any:
    """All of 16 bits, int16; or four of each 32 neighbours, which have sign and exponent in common:
    the first two (a mantissa of 0 is among them), the last, and one of the others."""
    every = torch.arange(1 << 16, dtype=torch.int32)
    if one_in_eight:
        strata = every.view(-1, 32)
        other = torch.randint(2, 31, (len(strata), 1), generator=torch.Generator().manual_seed(4))
        chosen = torch.tensor([0, 1, 31]).expand(len(strata), 3)
        every = strata.gather(1, torch.cat([chosen, other], dim=1)).flatten()
    return every.to(torch.int16)


# NumPy, which the interpreter uses, warns of signalling NaN.
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("one_in_eight", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_every_number_of_16_bits(form: str, dtype: Any, one_in_eight: bool) -> None:
    """Each pattern in a group with 1, 1/500 and 0: this gives all bytes and most scales."""
    every = patterns(one_in_eight).view(dtype)
    count = 3 * len(every)
    beside = torch.tensor([1.0, 0.002, 0.0]).to(dtype)
    source = torch.stack([every.repeat(3), beside.repeat_interleave(len(every))], dim=1)
    source = torch.cat([source, -source], dim=1).to(DEVICE)
    shape = BlockShape(4096, ((BlockPart(1, 4096, 4, 4096 * 4, sliced=False),),))
    layout = QuantisedLayout(BlockLayout.canonical(shape), ((Scaling(form, 1),),))
    cache = PagedCache.mla([source.view(-1, 256, 4)])
    pages = PageMap.of_sequence(
        list(range(count // 256)), tokens=count, block_tokens=4096, page_tokens=256
    )
    blocks = blank(count // 4096, layout.nbytes)
    gather_quantised(cache, pages, blocks, layout, backend="triton", programs=1)
    values, scales = quantise(source.view(-1, 4096, 4), Scaling(form, 1))
    assert torch.equal(blocks[:, : 4096 * 4], values.view(torch.uint8).flatten(1))
    assert torch.equal(blocks[:, 4096 * 4 :], scales.view(torch.uint8))
    backs = []
    for backend in ("reference", "triton"):
        back = torch.zeros_like(source)
        target = PagedCache.mla([back.view(-1, 256, 4)])
        scatter_dequantised(target, pages, blocks, layout, backend=backend)
        backs.append(back)
    assert same(*backs)
    assert int(backs[0].isnan().sum()) == 4 * int((~source.isfinite()).any(dim=1).sum())


@pytest.mark.parametrize("form", FORMATS)
def test_the_ends_of_float32(form: str) -> None:
    """Scales at both of their limits, and around them."""
    sizes = torch.tensor([2.0**-149, 2.0**-126, 2.0**-118, 1.0, 1e30, 2.0**127, FLOAT32_MAX, 0.0])
    pairs = torch.cartesian_prod(sizes, torch.tensor([1.0, 0.5, -0.75]))
    source = torch.stack([pairs[:, 0], pairs.prod(dim=1), -pairs[:, 0] / 3, pairs[:, 0] / 500])
    source = source.T.contiguous().view(1, 24, 4).to(DEVICE)
    shape = BlockShape(24, ((BlockPart(1, 24, 4, 24 * 4, sliced=False),),))
    layout = QuantisedLayout(BlockLayout.canonical(shape), ((Scaling(form, 1),),))
    check_both_ways(PagedCache.mla([source]), PageMap([[0]], page_tokens=24), layout)


@pytest.mark.parametrize("native", [False, True])
def test_every_byte_restored(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with the native conversions of GPUs, which the interpreter has except for NaN."""
    monkeypatch.setattr(quantised_gather, "_native", lambda _device: native)
    shape = BlockShape(64, ((BlockPart(1, 64, 4, 4, sliced=False),),))
    layout = QuantisedLayout(BlockLayout.canonical(shape), ((Scaling("float8_e4m3", 64),),))
    every = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    scale = torch.tensor([0.25]).view(torch.uint8)
    block = torch.cat([every, scale])[None].to(DEVICE)
    restored = torch.zeros(1, 64, 4, dtype=torch.float32, device=DEVICE)
    pages = PageMap([[0]], page_tokens=64)
    cache = PagedCache.mla([restored])
    scatter_dequantised(cache, pages, block, layout, backend="triton")
    expected = dequantise(every.view(torch.float8_e4m3fn).view(64, 4), torch.tensor([0.25]), DTYPE)
    if native and DEVICE.type == "cpu":
        restored[0, 31, 3] = restored[0, 63, 3] = torch.nan
    assert same(restored[0].cpu(), expected)
    kept = restored.nan_to_num(0)
    gathered = blank(1, layout.nbytes)
    gather_quantised(PagedCache.mla([kept]), pages, gathered, layout, backend="triton")
    whole = torch.where((every & 0x7F) == 0x7F, 0, every)
    assert torch.equal(gathered.cpu()[0], torch.cat([whole, scale]))


REFUSED = {
    "too few blocks": ({"blocks": 1}, RoomError, "1 blocks for a map of 2"),
    "too small": ({"nbytes": -4}, RoomError, "room"),
    "odd address": ({"shift": 1}, LayoutError, "multiples of 4 bytes"),
    "other pages": ({"mapped": 8}, PageError, "pages of 8 tokens"),
    "no such page": ({"shape": (2, 8, 4, 2, 8)}, PageError, "page 8 of a cache of 8"),
    "double": ({"dtype": torch.float64}, LayoutError, "is torch.float64; what is quantised"),
    "bytes": ({"dtype": torch.int8}, LayoutError, "is torch.int8; what is quantised"),
    "dim": ({"shape": (2, 9, 4, 2, 12)}, LayoutError, "rows of 12 numbers, but the block's have 8"),
    "heads": ({"shape": (2, 9, 4, 3, 8)}, LayoutError, "the cache has heads"),
    "tokens": ({"schema": gqa(block_tokens=8, scale_tokens=8)}, PageError, "16 tokens"),
    "kept": ({"schema": gqa(v_dtype="float16", v_head_dim=4)}, LayoutError, "rows of 16 bytes"),
    "backend": ({"backend": "numpy"}, DeviceError, "unknown backend"),
}


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("call", [gather_quantised, scatter_dequantised])
@pytest.mark.parametrize("name", REFUSED)
def test_nothing_is_written_when_something_does_not_fit(
    name: str, call: Callable[..., None], backend: str
) -> None:
    case, error, why = REFUSED[name]
    source = torch.full(case.get("shape", (2, 9, 4, 2, 8)), 3, device=DEVICE)
    source = source.to(case.get("dtype", torch.bfloat16))
    layout = QuantisedLayout.of_schema(case.get("schema", gqa()))
    nbytes, count = layout.nbytes + case.get("nbytes", 0), case.get("blocks", 2)
    room = blank(1, 2 * nbytes + 64).flatten()
    begins = [i * nbytes + case.get("shift", 0) for i in range(count)]
    blocks = [room[begin : begin + nbytes] for begin in begins]
    pages = sequence(page_tokens=case.get("mapped", 4))
    cache = PagedCache.vllm([source, source.clone()])
    with pytest.raises(error, match=why):
        call(cache, pages, blocks, layout, backend=case.get("backend", backend))
    assert (room == UNTOUCHED).all()
    assert all((part == 3).all() for parts in cache.layers for part in parts)


def test_parts_that_cannot_be_copied_are_refused_before_others_are_quantised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def too_long(*_arguments: Any) -> None:
        raise LayoutError("a run is too long")

    monkeypatch.setattr(quantised_gather, "tile_work", too_long)
    layout = QuantisedLayout.of_schema(gqa(v_dtype="bfloat16"))
    blocks = blank(2, layout.nbytes)
    with pytest.raises(LayoutError, match="too long"):
        gather_quantised(CACHES["vllm NHD"](), sequence(), blocks, layout, backend="triton")
    assert (blocks == UNTOUCHED).all()


def test_layouts_without_room_for_the_scales() -> None:
    plain, scaling = BlockLayout.canonical(BlockShape.of_schema(gqa())), Scaling("int8", 16)
    with pytest.raises(LayoutError, match="one scaling, or None"):
        QuantisedLayout(plain, ())
    with pytest.raises(LayoutError, match="its scales are 0"):
        QuantisedLayout(plain, ((scaling, None),) * 2)
    with pytest.raises(LayoutError, match="its scales are 8"):
        QuantisedLayout(plain, ((Scaling("int8", 8), scaling),) * 2)
    with pytest.raises(LayoutError, match="can't have"):
        QuantisedLayout(plain, ((Scaling("int8", 3), scaling),) * 2)
