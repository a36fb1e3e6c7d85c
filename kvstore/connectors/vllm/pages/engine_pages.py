"""The KV cache of a CUDA engine, as vLLM hands it over: views of its tensors, checked.

Since 0.26, vLLM's tensor of a layer has the logical shape [pages, heads, tokens of a page, K | V],
whatever lies where: the six members of its `KVCacheLayout` (LBHNC, LBNHC, LHBNC, BLHNC, BLNHC and
BHLNC; of these, FlashInfer calls those with N before H NHD, the others HND) are six orders of
strides. Backends with separate planes of K and V (B12X) have [pages, 2, tokens, heads x dim]. Pages
of the scheduler may be several of the tensor's, where a backend has smaller ones: then page p is
pages p x n to p x n + n - 1 of the tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tiffin.kernels.errors import KernelError
from tiffin.kernels.layout.engine_cache import PagedCache

from ....errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class PageFormat:
    """A rank's pages in one layer's tensor.

    `page_tokens`: of the scheduler's pages. `heads`: KV heads of the rank. `head_dim`,
    `v_head_dim`: elements of a row of K and of V, of `itemsize` bytes each. `planes`: whether a
    page has all of K before all of V; otherwise each row of K has its row of V behind it.
    """

    page_tokens: int
    heads: int
    head_dim: int
    v_head_dim: int
    itemsize: int
    planes: bool = False


def paged_cache(
    layers: Mapping[str, Any], form: PageFormat, first_head: int, first_layer: int = 0
) -> PagedCache:
    """The cache of a worker whose first head is the model's `first_head`, and whose first layer is
    its `first_layer`. `layers`: tensors by name, in the order of the model's layers. Raises
    InvalidInput that names the layer."""
    for name, tensor in layers.items():
        _check(name, tensor, form)
    parts = []
    for name, tensor in layers.items():
        try:
            views = _planes(tensor, form) if form.planes else _rows(tensor, form)
            PagedCache([views])
        except KernelError as error:
            raise InvalidInput(f"layer {name}: {error}") from error
        parts.append(views)
    try:
        layer_ids = range(first_layer, first_layer + len(parts))
        return PagedCache(parts, layer_ids=layer_ids, first_head=first_head)
    except KernelError as error:
        raise InvalidInput(f"the layers {', '.join(layers)} are not one cache: {error}") from error


def _check(name: str, tensor: Any, form: PageFormat) -> None:
    """Raise InvalidInput unless the tensor's shape is the format's."""
    shape = tuple(tensor.shape)
    if form.planes:
        expected = (2, form.heads * form.head_dim)
    else:
        expected = (form.heads, form.head_dim + form.v_head_dim)
    if (
        len(shape) != 4
        or (shape[1], shape[3]) != expected
        or tensor.element_size() != form.itemsize
        or not shape[2]
        or form.page_tokens % shape[2]
    ):
        raise InvalidInput(
            f"layer {name}: a cache of shape {shape} and {tensor.dtype}; the connector knows "
            f"[pages, {expected[0]}, {form.page_tokens} tokens or a divisor, {expected[1]}] of "
            f"{form.itemsize} bytes each"
        )


def _rows(tensor: Any, form: PageFormat) -> tuple[Any, Any]:
    tokens_first = tensor.transpose(1, 2)
    return tokens_first[..., : form.head_dim], tokens_first[..., form.head_dim :]


def _planes(tensor: Any, form: PageFormat) -> tuple[Any, Any]:
    k, v = tensor.unbind(1)
    heads = (form.heads, form.head_dim)
    return k.unflatten(-1, heads), v.unflatten(-1, heads)
