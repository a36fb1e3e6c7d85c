"""A case for the kernels: pages scattered in an engine's cache, and blocks.

The cache has only the pages that the blocks need, in one random order: the pages of a block are not
neighbours, as after hours of serving. Its bytes are random.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from tiffin.kernels.layout.block_layout import BlockLayout, BlockShape, PagedCache
from tiffin.kernels.layout.transfer_plan import PageMap
from tiffin.kernels.paged.gather_scatter import gather, scatter

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .device import Machine
    from .setting import Setting, Sizes

Order = Literal["nhd", "hnd"]

_ITEM_BYTES = 2  # bf16
# The limit's target begins at another offset in a memory page than its source: on some CPUs a copy
# between equal offsets is slower, and such a low limit would make Tiffin look better than it is.
_APART_BYTES = 1024


@dataclass(frozen=True, slots=True)
class Model:
    """The shape of a model's KV: `heads` of `kv_heads` are in this cache (a rank's share)."""

    name: str
    layers: int
    parts: int
    kv_heads: int
    heads: int
    dim: int


def llama(sizes: Sizes) -> Model:
    """A Llama with all heads, without tensor parallelism."""
    return Model("", sizes.layers, 2, sizes.kv_heads, sizes.kv_heads, sizes.head_dim)


def head_slice(sizes: Sizes) -> Model:
    """The heads of one rank of `ranks` of the same model."""
    heads = sizes.kv_heads // sizes.ranks
    return Model("slice", sizes.layers, 2, sizes.kv_heads, heads, sizes.head_dim)


def latents(sizes: Sizes) -> Model:
    """A model with one latent per token and layer."""
    return Model("mla", sizes.latent_layers, 1, 1, 1, sizes.latent_dim)


def small_pages(setting: Setting, model: Model, *, blocks: int) -> Case:
    """A case with the smallest pages of the run."""
    return Case(
        setting.machine,
        model,
        blocks=blocks,
        block_tokens=setting.sizes.block_tokens,
        page_tokens=setting.sizes.page_tokens[0],
    )


class Case:
    """A cache in an engine's order, blocks, and ways to move one into the other.

    `storage`: all layers, bf16 [layers, parts, pages, page_tokens, heads, dim], heads before tokens
    for "hnd". `blocks`: uint8 [blocks, block_bytes]. `nbytes`: bytes to move.
    """

    def __init__(
        self,
        where: Machine,
        model: Model,
        *,
        blocks: int,
        block_tokens: int,
        page_tokens: int,
        order: Order = "nhd",
    ) -> None:
        torch = where.torch
        self.where, self.model, self.order = where, model, order
        self.page_tokens, self.block_tokens = page_tokens, block_tokens
        self.count = blocks
        pages = blocks * block_tokens // page_tokens
        page = (page_tokens, model.heads) if order == "nhd" else (model.heads, page_tokens)
        shape = (model.layers, model.parts, pages, *page, model.dim)
        numbers = torch.empty(shape, dtype=torch.bfloat16, device=where.device)
        self.storage: Any = numbers.normal_(generator=torch.Generator(where.device).manual_seed(0))
        self.layout = _layout(model, block_tokens)
        self.nbytes = blocks * self.layout.nbytes
        assert self.nbytes == self.storage.numel() * _ITEM_BYTES
        self.blocks: Any = where.bytes_of(self.nbytes, seed=1).view(blocks, self.layout.nbytes)
        self.page_ids = np.random.default_rng(0).permutation(pages)
        self.ids: Any = torch.from_numpy(self.page_ids).to(where.device)
        self.cache = _cache(self.storage, order)
        self.pages = self.page_map()
        self._copied: Any = None

    def page_map(self) -> PageMap:
        """The page table of the one sequence that fills the cache."""
        return PageMap.of_sequence(
            self.page_ids,
            tokens=self.count * self.block_tokens,
            block_tokens=self.block_tokens,
            page_tokens=self.page_tokens,
        )

    def gather(self) -> None:
        """Gather pages into blocks, by the kernel on a GPU and by its reference on a CPU."""
        gather(self.cache, self.pages, self.blocks, self.layout)

    def scatter(self) -> None:
        """Scatter blocks into pages."""
        scatter(self.cache, self.pages, self.blocks, self.layout)

    def copy(self) -> None:
        """The limit: a plain copy of as many bytes on the device."""
        if self._copied is None:
            spare = self.where.bytes_of(self.nbytes + _APART_BYTES)
            self._copied = spare[_APART_BYTES:]
        self._copied.copy_(self.storage.view(self.where.torch.uint8).view(-1))

    def naive_gather(self) -> None:
        """`index_select` of the pages and a permutation, layer by layer and part by part."""
        torch, target = self.where.torch, self._block_view()
        for layer in range(self.model.layers):
            for part in range(self.model.parts):
                picked = torch.index_select(self.storage[layer, part], 0, self.ids)
                target[:, layer, part].copy_(self._heads_first(picked))

    def naive_scatter(self) -> None:
        """A permutation and `index_copy_`, layer by layer and part by part."""
        source = self._block_view()
        pages = self.storage.shape[2:]
        for layer in range(self.model.layers):
            for part in range(self.model.parts):
                paged = self._pages_first(source[:, layer, part]).reshape(pages)
                self.storage[layer, part].index_copy_(0, self.ids, paged)

    def check(self) -> None:
        """Raises ValueError unless both ways give the same bytes, in both directions."""
        torch = self.where.torch
        self.gather()
        ours = self.blocks.clone()
        self.blocks.zero_()
        self.naive_gather()
        if not torch.equal(ours, self.blocks):
            raise ValueError("gather and index_select give different blocks")
        before = self.storage.clone()
        self.storage.zero_()
        self.scatter()
        if not torch.equal(before, self.storage):
            raise ValueError("scatter does not give back the pages that were gathered")

    def _block_view(self) -> Any:
        """The blocks as bf16 [blocks, layers, parts, heads, tokens, dim]."""
        model = self.model
        shape = (self.count, model.layers, model.parts, model.heads, self.block_tokens, model.dim)
        return self.blocks.view(self.where.torch.bfloat16).view(shape)

    def _heads_first(self, picked: Any) -> Any:
        """Pages of one part, [blocks * pages, ...], as [blocks, heads, tokens, dim]."""
        by_block = picked.unflatten(0, (self.count, -1))
        heads_first = (0, 3, 1, 2, 4) if self.order == "nhd" else (0, 2, 1, 3, 4)
        return by_block.permute(heads_first).flatten(2, 3)

    def _pages_first(self, part: Any) -> Any:
        """The reverse: [blocks, pages, page_tokens, heads, dim], or heads before tokens."""
        by_page = part.unflatten(2, (-1, self.page_tokens))
        return by_page.permute((0, 2, 3, 1, 4) if self.order == "nhd" else (0, 2, 1, 3, 4))


def _layout(model: Model, block_tokens: int) -> BlockLayout:
    """The pool's order of the heads in this cache: a rank's share is a packed slice."""
    if model.parts == 1:
        shape = BlockShape.mla(
            layers=model.layers, dim=model.dim, itemsize=_ITEM_BYTES, tokens=block_tokens
        )
        return BlockLayout.canonical(shape)
    shape = BlockShape.gqa(
        layers=model.layers,
        kv_heads=model.kv_heads,
        head_dim=model.dim,
        itemsize=_ITEM_BYTES,
        tokens=block_tokens,
    )
    if model.heads == model.kv_heads:
        return BlockLayout.canonical(shape)
    return BlockLayout.rank(shape, 0, model.kv_heads // model.heads)


def _cache(storage: Any, order: Order) -> PagedCache:
    layers: Sequence[Any] = storage.unbind(0)
    if storage.shape[1] == 1:
        dims = "BNHD" if order == "nhd" else "BHND"
        return PagedCache.of([layer[0] for layer in layers], dims)
    return PagedCache.vllm(layers, "2BNHD" if order == "nhd" else "2BHND")
