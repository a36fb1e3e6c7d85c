"""Converts a schema of the store into the layout tables of the kernels; the only module that does.

The store describes the content of a block (`KVSchema`), the kernels the offset of each head's run
(`BlockLayout`), and neither imports the other: kernels is the lower package. Connectors, users of
the HBM tier and the bench call this module.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from tiffin.kernels.layout.block_layout import BlockLayout, BlockShape
from tiffin.kernels.quant.quantised_layout import QuantisedLayout

if TYPE_CHECKING:
    from ..format.schema import KVSchema

# One process serves a model or two, each with a schema or two.
_SCHEMAS_MAX = 64


@lru_cache(maxsize=_SCHEMAS_MAX)
def layout_of(schema: KVSchema) -> BlockLayout:
    """The offset of each head's run in the schema's blocks, in the pool's canonical order."""
    return BlockLayout.canonical(BlockShape.of_schema(schema))


@lru_cache(maxsize=_SCHEMAS_MAX)
def quantised_layout_of(schema: KVSchema) -> QuantisedLayout | None:
    """`layout_of`, with the quantisation of each part, for `tiffin.kernels.quant.quantised_gather`;
    None if no layer is quantised."""
    if not any(layer.quantised for layer in schema.layers):
        return None
    return QuantisedLayout.of_schema(schema, layout_of(schema))
