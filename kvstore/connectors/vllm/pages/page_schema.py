"""The schema of blocks that consist of an engine's pages.

Engines on a CPU pack their pages for the instructions that they have, so that a page's bytes mean
nothing to anybody else: a block is the pages of its tokens, as they are. Per layer it has the bytes
of all ranks, each rank's first half in the part `k` and its second half in the part `v`:

    layer → half → rank → pages of that half, in order

so that each tensor-parallel rank writes and reads its own bytes, and the block can be read once all
ranks have written theirs.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from hashlib import blake2b
from typing import Any

from ....errors import InvalidInput
from ....format.schema import KVSchema


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What decides the bytes of an engine's pages. All of it is in the blocks' keys.

    `weights`: the model's fingerprint. `config`: the model's configuration as JSON. `backend`: what
    packs the pages, with its version. `page_bytes`: of one layer and one rank.
    """

    weights: str
    config: str
    backend: str
    dtype: str
    cache_dtype: str
    layout: str
    layers: int
    page_tokens: int
    page_bytes: int
    ranks: int

    def fingerprint(self) -> str:
        """32 hexadecimal digits over all fields."""
        return shape_fingerprint(self)


def page_schema(shape: CacheShape, block_tokens: int) -> KVSchema:
    """The schema of blocks of `block_tokens` tokens. Raises InvalidInput for pages that do not fill
    a block, or whose bytes can't be divided among the ranks."""
    check_pages(shape.page_tokens, block_tokens)
    pages = block_tokens // shape.page_tokens
    if shape.ranks > 1 and pages % 2:
        raise InvalidInput(
            f"blocks of {pages} pages can't be halved, as tensor parallelism asks; choose a "
            "smaller --block-size"
        )
    layer_bytes = pages * shape.page_bytes
    if layer_bytes % (2 * block_tokens):
        raise InvalidInput(f"a layer's {layer_bytes} bytes per block are not two bytes per token")
    return KVSchema.gqa(
        model=f"vllm:{shape.fingerprint()}",
        layers=shape.layers,
        kv_heads=shape.ranks,
        head_dim=layer_bytes // (2 * block_tokens),
        dtype="uint8",
        block_tokens=block_tokens,
        shards=shape.ranks,
    )


def check_pages(page_tokens: int, block_tokens: int) -> None:
    """Raise InvalidInput for pages that do not fill a block."""
    if block_tokens % page_tokens:
        raise InvalidInput(
            f"pages of {page_tokens} tokens do not fill blocks of {block_tokens}; choose another "
            "--block-size"
        )


def shape_fingerprint(shape: Any) -> str:
    """32 hexadecimal digits over all fields of a dataclass."""
    content = json.dumps(asdict(shape), sort_keys=True).encode()
    return blake2b(content, digest_size=16).hexdigest()
