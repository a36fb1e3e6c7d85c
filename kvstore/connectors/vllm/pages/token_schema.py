"""The schema of blocks that any engine with the same model can read, whatever its pages are.

Engines on a GPU keep K and V of a token and a head as plain rows. Blocks have these rows in the
pool's own order, layer → K, V → head → token, so that page size, layout, attention backend and
number of ranks are no part of a block: an engine with pages of 16 tokens on two ranks writes what
another with pages of 64 on four reads, each rank its own heads.
"""

from __future__ import annotations

from dataclasses import dataclass

from ....errors import InvalidInput
from ....format.header import MAX_SEGMENTS
from ....format.schema import KVSchema
from .page_schema import check_pages, shape_fingerprint

_PARTS = 2  # K and V


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What decides the numbers in an engine's cache. All of it is in the blocks' keys.

    `weights`: the model's fingerprint. `config`: the model's configuration as JSON. `dtype`: what
    the model computes in. `cache_dtype`: of the rows, as schemas name it. `kv_heads`: of the whole
    model, not of a rank. `head_dim`, `v_head_dim`: elements of a row of K and of V.
    """

    weights: str
    config: str
    dtype: str
    cache_dtype: str
    layers: int
    kv_heads: int
    head_dim: int
    v_head_dim: int

    def fingerprint(self) -> str:
        """32 hexadecimal digits over all fields."""
        return shape_fingerprint(self)


def token_schema(shape: ModelShape, block_tokens: int, page_tokens: int) -> KVSchema:
    """The schema of blocks of `block_tokens` tokens, the same for every number of ranks. Raises
    InvalidInput for pages that do not fill a block, SchemaError for blocks that are too large."""
    check_pages(page_tokens, block_tokens)
    return KVSchema.gqa(
        model=f"vllm:{shape.fingerprint()}",
        layers=shape.layers,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        v_head_dim=shape.v_head_dim,
        dtype=shape.cache_dtype,
        block_tokens=block_tokens,
        shards=head_groups(shape.layers, shape.kv_heads),
    )


def head_groups(layers: int, kv_heads: int) -> int:
    """How many groups of heads have checksums of their own: what ranks can write apart.

    It depends on the model only, as it is part of the schema. Each head is a group, so that any
    number of ranks can write; a block with too many segments for its header (beyond 4096: 80 layers
    of 64 heads) has a power of two of groups, as numbers of ranks are.
    """
    if _PARTS * layers * kv_heads <= MAX_SEGMENTS:
        return kv_heads
    groups = kv_heads & -kv_heads  # the largest power of two that divides it
    while groups > 1 and _PARTS * layers * groups > MAX_SEGMENTS:
        groups //= 2
    return groups


def check_ranks(schema: KVSchema, writers: int) -> None:
    """Raise InvalidInput for a number of ranks that can't write the schema's blocks together."""
    if schema.shards % writers:
        raise InvalidInput(
            f"tensor_parallel_size: blocks of this model have {schema.shards} groups of KV heads, "
            f"which {writers} ranks can't divide among them; choose a number of ranks that divides "
            f"{schema.shards}"
        )
