"""Caches as engines make them, and gather and scatter written as slowly and plainly as can be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from hypothesis import strategies as st

from tiffin.kernels.layout import BlockLayout, BlockShape, PagedCache
from tiffin.kernels.plan import PageMap

if TYPE_CHECKING:
    from collections.abc import Callable

# Not both: either Triton is its interpreter, or it has no kernels for a CPU.
DEVICES = ["cuda"] if torch.cuda.is_available() else ["cpu"]
BACKENDS = ["reference", "triton"]
DTYPES = [torch.int8, torch.float8_e4m3fn, torch.bfloat16, torch.float32]


@dataclass(frozen=True)
class Sizes:
    """What a cache is made of."""

    layers: int
    pages: int
    page_tokens: int
    heads: int
    dim: int
    dtype: torch.dtype = torch.bfloat16
    device: str = "cpu"
    v_dim: int | None = None

    def random(self, *shape: int, dim: int | None = None) -> torch.Tensor:
        """A tensor of random bytes, NaNs and all, whose last axis is `dim`."""
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


def row(cache: PagedCache, layer: int, part: int, head: int, page: int, slot: int) -> torch.Tensor:
    """One token of one head, as a view of bytes in the cache."""
    return cache.layers[layer][part][page, slot, head].view(torch.uint8)


def place(pages: PageMap, block: int, token: int) -> tuple[int, int]:
    """Page and slot of a block's token."""
    position = int(pages.first_slots[block]) + token
    return int(pages.pages[block, position // pages.page_tokens]), position % pages.page_tokens


def slow_gather(
    cache: PagedCache, pages: PageMap, blocks: list[torch.Tensor], layout: BlockLayout
) -> None:
    """Row by row, in the model's terms, for every run of the layout that the cache has."""
    for layer, part, head, offset in layout.runs.tolist():
        found = _in_cache(cache, layout.shape, layer, part, head)
        if found is None:
            continue
        index, local = found
        spec = layout.shape.layers[layer][part]
        skip = layout.tokens - spec.rows
        for number, block in enumerate(blocks):
            for at in range(spec.rows):
                begin = offset + at * spec.row_bytes
                target = block[begin : begin + spec.row_bytes]
                if at + skip < int(pages.tokens[number]):
                    target[:] = row(cache, index, part, local, *place(pages, number, at + skip))
                else:
                    target[:] = 0


def slow_scatter(
    cache: PagedCache, pages: PageMap, blocks: list[torch.Tensor], layout: BlockLayout
) -> None:
    """Row by row. Of a head's several runs the first is written last, so that it stays."""
    for layer, part, head, offset in reversed(layout.runs.tolist()):
        found = _in_cache(cache, layout.shape, layer, part, head)
        if found is None:
            continue
        index, local = found
        spec = layout.shape.layers[layer][part]
        skip = layout.tokens - spec.rows
        for number, block in enumerate(blocks):
            for at in range(max(0, int(pages.tokens[number]) - skip)):
                begin = offset + at * spec.row_bytes
                source = block[begin : begin + spec.row_bytes]
                row(cache, index, part, local, *place(pages, number, at + skip))[:] = source


def _in_cache(
    cache: PagedCache, shape: BlockShape, layer: int, part: int, head: int
) -> tuple[int, int] | None:
    """The cache's own numbers of a layer and head of the model."""
    if layer not in cache.layer_ids:
        return None
    index = cache.layer_ids.index(layer)
    local = head - (cache.first_head if shape.layers[layer][part].sliced else 0)
    if not 0 <= local < cache.layers[index][part].shape[2]:
        return None
    return index, local


def snapshot(cache: PagedCache) -> list[torch.Tensor]:
    """All bytes of the tensors that the cache's views lie in."""
    storages = {view.untyped_storage().data_ptr(): view for parts in cache.layers for view in parts}
    return [
        torch.tensor([], dtype=torch.uint8, device=view.device).set_(view.untyped_storage()).clone()
        for view in storages.values()
    ]


def restore(cache: PagedCache, bytes_of: list[torch.Tensor]) -> None:
    storages = {view.untyped_storage().data_ptr(): view for parts in cache.layers for view in parts}
    for view, saved in zip(storages.values(), bytes_of, strict=True):
        torch.tensor([], dtype=torch.uint8, device=view.device).set_(view.untyped_storage()).copy_(
            saved
        )


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(left, right, strict=True))


def filled(count: int, nbytes: int, value: int = 0xA5, device: str = "cpu") -> torch.Tensor:
    """Blocks with something in them that nobody may find in the result."""
    return torch.full((count, nbytes), value, dtype=torch.uint8, device=device)


def bytes_at(memory: torch.Tensor, offset: int, nbytes: int) -> Any:
    """A stretch of a block as Python bytes."""
    return bytes(memory[offset : offset + nbytes].cpu().numpy())
