"""Reads a schema from its canonical text (docs/schema.md)."""

from __future__ import annotations

from typing import Any

import msgspec

from tiffin.kvstore.errors import InvalidInput
from tiffin.kvstore.format.schema import SCHEMA_FORMAT, KVSchema, LayerKind, LayerSpec, Part
from tiffin.messenger.shm.host_copy import XXH3_64

from ..errors import InvalidRequest

# Part, heads, dim and dtype, and for a quantised part scale_tokens: `Part` validates them.
_PartRow = list[Any]
_LayerRow = tuple[str, list[_PartRow], int, int, list[int], str]
_canonical = msgspec.json.Decoder(list[Any])
_layers = list[_LayerRow]


def parse_schema(canonical: str) -> KVSchema:
    """Parse a schema from its `canonical_bytes()`. Raises InvalidRequest."""
    try:
        name, model, digest, block_tokens, rows, *rest = _canonical.decode(canonical)
        checksum: Any = rest.pop() if rest and isinstance(rest[-1], str) else XXH3_64
        if name != SCHEMA_FORMAT or len(rest) > 1:
            raise InvalidInput(f"it is not of the format {SCHEMA_FORMAT}")
        layers = [_layer(row) for row in msgspec.convert(rows, _layers)]
        schema = KVSchema.of(
            model,
            layers,
            block_tokens=block_tokens,
            hash=digest,
            shards=rest[0] if rest else 1,
            checksum=checksum,
        )
    except (InvalidInput, ValueError, TypeError, RecursionError) as error:
        # ValueError covers msgspec's errors, too few fields, and an unknown kind of layer.
        raise InvalidRequest(f"schema.canonical describes no schema: {error}") from error
    if schema.canonical_bytes() != canonical.encode():
        raise InvalidRequest(
            "schema.canonical is not what KVSchema.canonical_bytes() gives: its keys would differ"
        )
    return schema


def _layer(row: _LayerRow) -> LayerSpec:
    kind, parts, window_tokens, tokens_per_entry, shape, packing = row
    return LayerSpec(
        LayerKind(kind),
        tuple(Part(*part) for part in parts),
        window_tokens,
        tokens_per_entry,
        tuple(shape),
        packing,
    )
