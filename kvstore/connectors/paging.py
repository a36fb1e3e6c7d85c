"""The one place where a schema of the store meets the tables of the kernels.

The store says what a block holds (`KVSchema`), the kernels where each head's run begins
(`BlockLayout`), and neither knows of the other: kernels is the lower package. Connectors, the HBM
tier's users and the bench ask here.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tiffin.kernels.layout import BlockLayout, BlockShape
from tiffin.kernels.quant_layout import QuantisedLayout

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..schema import KVSchema

    Bytes = NDArray[np.uint8]

# One process serves a model or two, each with a schema or two.
_SCHEMAS_MAX = 64


@lru_cache(maxsize=_SCHEMAS_MAX)
def layout_of(schema: KVSchema) -> BlockLayout:
    """Where each head's run begins in the schema's blocks: the pool's own order."""
    return BlockLayout.canonical(BlockShape.of_schema(schema))


@lru_cache(maxsize=_SCHEMAS_MAX)
def quantised_layout_of(schema: KVSchema) -> QuantisedLayout | None:
    """The same with how each part is quantised, for `tiffin.kernels.quant`; None if none is."""
    if not any(layer.quantised for layer in schema.layers):
        return None
    return QuantisedLayout.of_schema(schema, layout_of(schema))


class _Memory:
    """Memory as NumPy asks for it; keeps the array alive that it belongs to."""

    def __init__(self, array: Bytes) -> None:
        self._array = array
        address = array.__array_interface__["data"][0]
        self.__array_interface__ = {
            "data": (address, False),
            "shape": array.shape,
            "typestr": "|u1",
            "version": 3,
        }


def host_tensor(array: Bytes) -> Any:
    """A tensor over the array's own memory, uint8 [n], not copied.

    Leased blocks are read-only arrays, for which torch has no word: it warns, and takes them as
    writable. Who calls this with one must only read the tensor, and only until the lease ends.
    """
    if array.flags.writeable:
        return torch.from_numpy(array)
    return torch.from_numpy(np.asarray(_Memory(array)))
