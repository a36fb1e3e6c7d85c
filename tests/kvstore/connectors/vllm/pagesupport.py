"""An engine's pages of random numbers, and the schema of blocks of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tiffin.kvstore.connectors.vllm.pages.page_copier import PageCopier
from tiffin.kvstore.connectors.vllm.pages.page_schema import CacheShape, page_schema

if TYPE_CHECKING:
    from tiffin.kvstore import KVSchema

LAYERS, PAGE_TOKENS, BLOCK_PAGES, ENGINE_PAGES = 3, 4, 4, 20
PAGE_SHAPE = (2, PAGE_TOKENS, 8)  # of one layer and rank, float16
PAGE_BYTES = 2 * PAGE_TOKENS * 8 * 2


def schema_of(ranks: int, block_pages: int = BLOCK_PAGES) -> KVSchema:
    shape = CacheShape(
        weights="w",
        config="{}",
        backend="cpu",
        dtype="float16",
        cache_dtype="auto",
        layout="NHD",
        layers=LAYERS,
        page_tokens=PAGE_TOKENS,
        page_bytes=PAGE_BYTES,
        ranks=ranks,
    )
    return page_schema(shape, block_pages * PAGE_TOKENS)


class Rank:
    """One rank's pages, random, and their copier."""

    def __init__(self, schema: KVSchema, rank: int = 0, ranks: int = 1) -> None:
        torch.manual_seed(rank + 1)
        self.layers = [
            torch.randint(0, 255, (ENGINE_PAGES, *PAGE_SHAPE)).to(torch.float16)
            for _ in range(LAYERS)
        ]
        self.copier = PageCopier(self.layers, schema, PAGE_TOKENS, rank, ranks)

    def page(self, layer: int, page: int) -> bytes:
        return bytes(self.layers[layer][page].contiguous().view(torch.uint8).numpy().tobytes())

    def clear(self) -> None:
        for layer in self.layers:
            layer.zero_()
