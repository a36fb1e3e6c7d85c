"""Random pages in the layouts of vLLM on CUDA, in host memory, and what blocks of them are.

The bytes of a block are put together here row by row, without the kernels.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tiffin.kvstore.connectors.vllm.pages.device_page_copier import DevicePageCopier
from tiffin.kvstore.connectors.vllm.pages.device_queue import Device, device_of
from tiffin.kvstore.connectors.vllm.pages.engine_pages import PageFormat, paged_cache
from tiffin.kvstore.connectors.vllm.pages.rank_share import rank_share
from tiffin.kvstore.connectors.vllm.pages.token_schema import ModelShape, token_schema

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from tiffin.kvstore import KVSchema

# vLLM's KVCacheLayout: the axes L(ayer), B (page), H(ead), N (token), C (K | V) in memory's order.
LAYOUTS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
LAYERS, KV_HEADS, HEAD_DIM, BLOCK_TOKENS = 3, 4, 8, 16
ITEM_BYTES = 2  # of bfloat16
ROW_BYTES = HEAD_DIM * ITEM_BYTES
ENGINE_TOKENS = 160  # in all pages of an engine


def shape_of(**changes: Any) -> ModelShape:
    fields: dict[str, Any] = {
        "weights": "w",
        "config": "{}",
        "dtype": "torch.bfloat16",
        "cache_dtype": "bfloat16",
        "layers": LAYERS,
        "kv_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "v_head_dim": HEAD_DIM,
    }
    return ModelShape(**{**fields, **changes})


SCHEMA = token_schema(shape_of(), BLOCK_TOKENS, 1)


def tensors(
    layout: str, form: PageFormat, pages: int, split: int = 1, where: str = "cpu"
) -> list[Any]:
    """Random bfloat16 [pages x split, heads, tokens, K | V] per layer, in this order in memory."""
    content = form.head_dim + form.v_head_dim
    size = {
        "L": LAYERS,
        "B": pages * split,
        "H": form.heads,
        "N": form.page_tokens // split,
        "C": content,
    }
    physical = _random(*(size[axis] for axis in layout)).to(where)
    logical = physical.permute(*(layout.index(axis) for axis in "LBHNC"))
    return list(logical.unbind(0))


def planes(form: PageFormat, pages: int, where: str = "cpu") -> list[Any]:
    """Random bfloat16 [pages, 2, tokens, heads x dim] per layer, as of the backend B12X."""
    shape = (pages, 2, form.page_tokens, form.heads * form.head_dim)
    return [_random(*shape).to(where) for _ in range(LAYERS)]


def padded(form: PageFormat, pages: int, where: str = "cpu", padding: int = 24) -> list[Any]:
    """As LBHNC, with unused elements behind each page."""
    page = (form.heads, form.page_tokens, form.head_dim + form.v_head_dim)
    rows = _random(LAYERS, pages, math.prod(page) + padding).to(where)
    return [layer[:, : math.prod(page)].unflatten(1, page) for layer in rows.unbind(0)]


def _random(*shape: int) -> Any:
    return torch.randint(0, 256, (*shape, ITEM_BYTES), dtype=torch.uint8).view(torch.bfloat16)[
        ..., 0
    ]


class GpuRank:
    """One rank's pages and their copier. `layout`: one of LAYOUTS, "planes" or "padded". `where`:
    torch's name of the device. `layers`: of its pipeline stage, (first, end)."""

    def __init__(
        self,
        layout: str = "LBNHC",
        page_tokens: int = 4,
        rank: int = 0,
        ranks: int = 1,
        *,
        split: int = 1,
        schema: KVSchema = SCHEMA,
        device: Device | None = None,
        where: str = "cpu",
        piece_bytes: int = 1 << 20,
        layers: tuple[int, int] = (0, LAYERS),
    ) -> None:
        first, end = rank_share(KV_HEADS, rank, ranks).heads
        self.heads = range(first, end)
        self.pages = ENGINE_TOKENS // page_tokens
        form = PageFormat(
            page_tokens, end - first, HEAD_DIM, HEAD_DIM, ITEM_BYTES, layout == "planes"
        )
        self.form = form
        if layout == "planes":
            self.layers = planes(form, self.pages, where)
        elif layout == "padded":
            self.layers = padded(form, self.pages, where)
        else:
            self.layers = tensors(layout, form, self.pages, split, where)
        self.layers = self.layers[slice(*layers)]
        named = {f"layers.{index}": layer for index, layer in enumerate(self.layers, layers[0])}
        cache = paged_cache(named, form, first, layers[0])
        device = device or device_of(cache.device)
        self.copier = DevicePageCopier(cache, schema, page_tokens, device, piece_bytes)

    def row(self, layer: int, part: int, head: int, page: int, slot: int) -> bytes:
        """K or V of one token, `slot` of `page`, and one of the rank's heads."""
        tensor = self.layers[layer]
        if self.form.planes:
            row = tensor[page, part, slot].unflatten(0, (self.form.heads, HEAD_DIM))[head]
        else:
            page, slot = divmod(page * self.form.page_tokens + slot, tensor.shape[2])
            row = tensor[page, head, slot].unflatten(0, (2, HEAD_DIM))[part]
        return bytes(row.contiguous().view(torch.uint8).cpu().numpy().tobytes())

    def alone(self, layer: int, blocks: Sequence[NDArray[np.uint8]]) -> list[NDArray[np.uint8]]:
        """The bytes of this rank's heads in one layer of each block, as a stream yields them."""
        ranges = SCHEMA.ranges((layer, layer + 1), (self.heads.start, self.heads.stop))
        return [np.concatenate([block[r.offset : r.end] for r in ranges]) for block in blocks]

    def share(self, pages: Sequence[int]) -> bytes:
        """This rank's bytes of the block of the tokens in `pages`: layer, part, head, token."""
        return b"".join(
            self.row(layer, part, head, page, slot)
            for layer in range(len(self.layers))
            for part in range(2)
            for head in range(len(self.heads))
            for page in pages
            for slot in range(self.form.page_tokens)
        )

    def rows(self, pages: Sequence[int]) -> list[bytes]:
        """All rows of each page."""
        return [self.share([page]) for page in pages]

    def clear(self) -> None:
        for layer in self.layers:
            layer.zero_()


def united(ranks: Sequence[GpuRank], pages: Sequence[int]) -> bytes:
    """All of the ranks' layers of the block of the tokens in `pages`; the ranks have all heads,
    each once."""
    shares = [
        np.frombuffer(rank.share(pages), np.uint8).reshape(len(rank.layers), 2, len(rank.heads), -1)
        for rank in ranks
    ]
    return np.concatenate(shares, axis=2).tobytes()


def blocks(count: int, nbytes: int = SCHEMA.block_bytes) -> list[NDArray[np.uint8]]:
    return [np.full(nbytes, 0xEE, np.uint8) for _ in range(count)]
