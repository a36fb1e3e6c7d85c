"""Caches as engines make them, and a slow, plain reference of gather and scatter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from hypothesis import strategies as st

from tiffin.kernels.layout.block_layout import BlockLayout, BlockPart, PagedCache
from tiffin.kernels.layout.transfer_plan import PageMap

if TYPE_CHECKING:
    from collections.abc import Callable

# Not both: either Triton is its interpreter, or it has no kernels for a CPU.
DEVICES = ["cuda"] if torch.cuda.is_available() else ["cpu"]
BACKENDS = ["reference", "triton"]
DTYPES = [torch.int8, torch.float8_e4m3fn, torch.bfloat16, torch.float32]


@dataclass(frozen=True)
class Sizes:
    """The sizes of a cache."""

    layers: int
    pages: int
    page_tokens: int
    heads: int
    dim: int
    dtype: torch.dtype = torch.bfloat16
    device: str = "cpu"
    v_dim: int | None = None

    def random(self, *shape: int, dim: int | None = None) -> torch.Tensor:
        """A tensor of random bytes, NaNs included, whose last axis is `dim`."""
        full = (*shape, self.dim if dim is None else dim)
        width = self.dtype.itemsize
        numbers = torch.randint(0, 256, (*full[:-1], full[-1] * width), dtype=torch.uint8)
        return numbers.view(self.dtype).to(self.device)


def nhd(s: Sizes) -> PagedCache:
    return PagedCache.vllm([s.random(2, s.pages, s.page_tokens, s.heads) for _ in range(s.layers)])


def hnd(s: Sizes) -> PagedCache:
    tensors = [s.random(2, s.pages, s.heads, s.page_tokens) for _ in range(s.layers)]
    return PagedCache.vllm(tensors, "2BHND")


def flashinfer(s: Sizes) -> PagedCache:
    tensors = [s.random(s.pages, 2, s.page_tokens, s.heads) for _ in range(s.layers)]
    return PagedCache.vllm(tensors, "B2NHD")


def packed_nhd(s: Sizes) -> PagedCache:
    tensors = [
        s.random(s.pages, s.page_tokens, s.heads, dim=2 * s.dim).transpose(1, 2)
        for _ in range(s.layers)
    ]
    return PagedCache.vllm_packed(tensors)


def packed_cross_layer(s: Sizes) -> PagedCache:
    whole = s.random(s.pages, s.layers, s.heads, s.page_tokens, dim=2 * s.dim)
    return PagedCache.vllm_packed(whole.unbind(1))


def separate(s: Sizes) -> PagedCache:
    """K and V of different dims, where there is a second."""
    keys = [s.random(s.pages, s.page_tokens, s.heads) for _ in range(s.layers)]
    dim = s.v_dim or s.dim
    values = [s.random(s.pages, s.page_tokens, s.heads, dim=dim) for _ in range(s.layers)]
    return PagedCache.separate(keys, values)


def mla(s: Sizes) -> PagedCache:
    return PagedCache.mla([s.random(s.pages, s.page_tokens) for _ in range(s.layers)])


def cross_layer(s: Sizes) -> PagedCache:
    return PagedCache.cross_layer(s.random(s.pages, s.layers, 2, s.page_tokens, s.heads))


def cross_layer_heads_first(s: Sizes) -> PagedCache:
    whole = s.random(s.pages, s.heads, s.layers, 2, s.page_tokens)
    return PagedCache.cross_layer(whole, "BHL2ND")


def sglang(s: Sizes) -> PagedCache:
    tokens = s.pages * s.page_tokens
    keys = [s.random(tokens, s.heads) for _ in range(s.layers)]
    values = [s.random(tokens, s.heads) for _ in range(s.layers)]
    return PagedCache.sglang(keys, values, page_tokens=s.page_tokens)


def contiguous(s: Sizes) -> PagedCache:
    keys = [s.random(s.pages, s.heads, s.page_tokens) for _ in range(s.layers)]
    values = [s.random(s.pages, s.heads, s.page_tokens) for _ in range(s.layers)]
    return PagedCache.contiguous(keys, values)


def odd_views(s: Sizes) -> PagedCache:
    """Parts of larger tensors, at odd offsets and with gaps between tokens."""
    layers = []
    for _ in range(s.layers):
        shape = (s.pages + 2, s.page_tokens + 1, s.heads + 1)
        parts = [s.random(*shape, dim=s.dim + 3)[1:-1, 1:, 1:, 2:-1] for _ in range(2)]
        layers.append(parts)
    return PagedCache(layers)


ENGINES: dict[str, Callable[[Sizes], PagedCache]] = {
    made.__name__: made
    for made in (
        nhd,
        hnd,
        flashinfer,
        packed_nhd,
        packed_cross_layer,
        separate,
        mla,
        cross_layer,
        cross_layer_heads_first,
        sglang,
        contiguous,
        odd_views,
    )
}


@st.composite
def sizes(draw: st.DrawFn) -> Sizes:
    """Caches of few bytes and odd shapes; pages of 1 to 256 tokens."""
    return Sizes(
        layers=draw(st.integers(1, 3)),
        pages=draw(st.integers(3, 9)),
        page_tokens=draw(st.sampled_from([1, 2, 3, 4, 6, 16, 48, 256])),
        heads=draw(st.sampled_from([1, 2, 3, 8])),
        dim=draw(st.sampled_from([1, 3, 8, 16, 80])),
        dtype=draw(st.sampled_from(DTYPES)),
        v_dim=draw(st.sampled_from([None, 5])),
    )


@st.composite
def page_maps(draw: st.DrawFn, cache: PagedCache, block_tokens: int) -> PageMap:
    """Blocks of a sequence whose pages lie anywhere, from any token on."""
    room = cache.pages * cache.page_tokens
    first = draw(st.integers(0, min(room - 1, 2 * cache.page_tokens)))
    tokens = draw(st.integers(1, min(room - first, 3 * block_tokens)))
    order = draw(st.permutations(range(cache.pages)))
    return PageMap.of_sequence(
        order,
        tokens=tokens,
        block_tokens=block_tokens,
        page_tokens=cache.page_tokens,
        first_token=first,
    )


def place(pages: PageMap, block: int, token: int) -> tuple[int, int]:
    """Page and slot of a block's token."""
    position = int(pages.first_slots[block]) + token
    return int(pages.pages[block, position // pages.page_tokens]), position % pages.page_tokens


def heads_of(cache: PagedCache, layout: BlockLayout) -> list[tuple[int, int, int, torch.Tensor]]:
    """Every run of the layout that the cache has: layer, part, where it begins in a block, and the
    head's rows in the cache, [pages, page_tokens, dim]."""
    found = []
    for layer, part, head, offset in layout.runs.tolist():
        if layer not in cache.layer_ids:
            continue
        view = cache.layers[cache.layer_ids.index(layer)][part]
        local = head - (cache.first_head if layout.shape.layers[layer][part].sliced else 0)
        if 0 <= local < view.shape[2]:
            found.append((layer, part, offset, view[:, :, local]))
    return found


def held_rows(
    pages: PageMap, block: int, part: BlockPart, block_tokens: int
) -> list[tuple[int, tuple[int, int]]]:
    """Which rows of a run a block has tokens for, and the page and slot of each."""
    skip = block_tokens - part.rows
    held = range(max(0, int(pages.tokens[block]) - skip))
    return [(at, place(pages, block, at + skip)) for at in held]


def slow_gather(
    cache: PagedCache, pages: PageMap, blocks: list[torch.Tensor], layout: BlockLayout
) -> None:
    """Row by row, in the model's terms, for every run of the layout that the cache has."""
    for layer, part, offset, view in heads_of(cache, layout):
        spec = layout.shape.layers[layer][part]
        for number, block in enumerate(blocks):
            run = block[offset : offset + spec.rows * spec.row_bytes].view(spec.rows, -1)
            run[:] = 0
            for at, where in held_rows(pages, number, spec, layout.tokens):
                run[at] = view[where].view(torch.uint8)


def slow_scatter(
    cache: PagedCache, pages: PageMap, blocks: list[torch.Tensor], layout: BlockLayout
) -> None:
    """Row by row. Of a head's several runs the first is written last, so that it stays."""
    for layer, part, offset, view in reversed(heads_of(cache, layout)):
        spec = layout.shape.layers[layer][part]
        for number, block in enumerate(blocks):
            run = block[offset : offset + spec.rows * spec.row_bytes].view(spec.rows, -1)
            for at, where in held_rows(pages, number, spec, layout.tokens):
                view[where].view(torch.uint8)[:] = run[at]


def whole_tensors(cache: PagedCache) -> list[torch.Tensor]:
    """All bytes of the tensors that the cache's views lie in; not a copy."""
    views = [view for parts in cache.layers for view in parts]
    storages = {view.untyped_storage().data_ptr(): view.untyped_storage() for view in views}
    return [
        torch.empty(0, dtype=torch.uint8, device=cache.device).set_(storage)
        for storage in storages.values()
    ]


def snapshot(cache: PagedCache) -> list[torch.Tensor]:
    return [memory.clone() for memory in whole_tensors(cache)]


def restore(cache: PagedCache, saved: list[torch.Tensor]) -> None:
    for memory, before in zip(whole_tensors(cache), saved, strict=True):
        memory.copy_(before)


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(left, right, strict=True))


def filled(count: int, nbytes: int, value: int = 0xA5, device: str = "cpu") -> torch.Tensor:
    """Blocks filled with a value that must be overwritten."""
    return torch.full((count, nbytes), value, dtype=torch.uint8, device=device)
