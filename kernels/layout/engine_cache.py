"""An engine's KV cache as views of its tensors, whatever the order of their axes.

Nothing here imports torch: only the shape, strides and address of tensors are used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Self, TypedDict, TypeVar, Unpack

from ..errors import DeviceError, LayoutError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

Made = TypeVar("Made")

_MOST_KEPT: Final = 256  # plans; a rank uses a handful, so more can only be random selections
_AXES: Final = frozenset("L2BNTHDC")  # see `PagedCache.of`


class Where(TypedDict, total=False):
    """Which part of the model a cache is: arguments of `PagedCache`."""

    layer_ids: Iterable[int] | None
    first_head: int


class PagedCache:
    """An engine's cache as views: for every layer and part one [pages, page_tokens, heads, dim].

    Any strides are allowed if the last axis is contiguous and no two elements share memory. All
    layers have the same pages. Layers whose pages are numbered separately (vLLM's groups of a
    hybrid model) are separate caches. The named constructors make the views; this one takes them.

    `layer_ids`: which layers of the model these are, ascending (default: from 0 on). `first_head`:
    which head of the model is head 0 here (a rank's share). The cache keeps a reference to the
    tensors, so that their addresses stay valid; it compares and hashes by identity.

    Raises LayoutError, and DeviceError for tensors on different devices.
    """

    __slots__ = (
        "__weakref__",
        "device",
        "first_head",
        "layer_ids",
        "layers",
        "memo",
        "page_tokens",
        "pages",
    )

    def __init__(
        self,
        layers: Iterable[Iterable[Any]],
        *,
        layer_ids: Iterable[int] | None = None,
        first_head: int = 0,
    ) -> None:
        self.layers: tuple[tuple[Any, ...], ...] = tuple(tuple(parts) for parts in layers)
        ids = range(len(self.layers)) if layer_ids is None else layer_ids
        self.layer_ids: tuple[int, ...] = tuple(int(index) for index in ids)
        self.first_head = int(first_head)
        self._check_names()
        views = [view for parts in self.layers for view in parts]
        for view in views:
            _check_view(view)
        self.pages, self.page_tokens = (int(size) for size in views[0].shape[:2])
        self.device: Any = views[0].device
        self._check_together(views)
        self.memo: dict[Any, Any] = {}

    def kept(self, key: Any, make: Callable[[], Made]) -> Made:
        """The result of `make`, made once for this key: addresses never change."""
        found: Made | None = self.memo.get(key)
        if found is None:
            found = make()
            if len(self.memo) >= _MOST_KEPT:
                self.memo.clear()
            self.memo[key] = found
        return found

    def _check_names(self) -> None:
        if not self.layers or not all(self.layers):
            raise LayoutError("a cache has at least one layer, and a layer at least one part")
        if len(self.layer_ids) != len(self.layers):
            raise LayoutError(f"{len(self.layer_ids)} layer_ids for {len(self.layers)} layers")
        if self.layer_ids[0] < 0 or any(
            after <= before
            for before, after in zip(self.layer_ids, self.layer_ids[1:], strict=False)
        ):
            raise LayoutError(f"layer_ids ascend from 0 or more, unlike {self.layer_ids}")
        if self.first_head < 0:
            raise LayoutError(f"first_head is {self.first_head}; it is 0 or more")

    def _check_together(self, views: Sequence[Any]) -> None:
        for view in views:
            if tuple(view.shape[:2]) != (self.pages, self.page_tokens):
                raise LayoutError(
                    f"layers with {tuple(view.shape[:2])} and ({self.pages}, {self.page_tokens})"
                    " pages and tokens per page are different caches"
                )
            if view.device != self.device:
                raise DeviceError(f"one cache on two devices: {view.device} and {self.device}")
        if len({view.data_ptr() for view in views}) < len(views):
            raise LayoutError("two parts of the cache begin at the same address")

    @classmethod
    def of(
        cls, tensors: Any, dims: str, *, page_tokens: int | None = None, **where: Unpack[Where]
    ) -> Self:
        """Views of tensors whose axes are named by `dims`, one letter each, in the tensor's order.

        `L` layers, `2` K then V, `B` pages, `N` tokens of a page, `T` tokens of all pages (cut into
        pages of `page_tokens`), `H` heads, `D` dim, `C` K and V side by side. With `L`, `tensors`
        is one tensor, else one per layer. Without `2` and `C` a layer has one part (a latent);
        without `H`, one head; without `B` and `T`, one page. Raises LayoutError.
        """
        if "L" in dims:
            axis = dims.index("L")
            _check_dims(tensors, dims)
            tensors = tensors.unbind(axis)
            dims = dims.replace("L", "", 1)
        layers = [_parts(tensor, dims, page_tokens) for tensor in tensors]
        return cls(layers, **where)

    @classmethod
    def vllm(cls, tensors: Sequence[Any], dims: str = "2BNHD", **where: Unpack[Where]) -> Self:
        """vLLM to 0.21: per layer `[2, pages, page, heads, dim]` (NHD), or "2BHND" for HND.

        FlashInfer's `[pages, 2, page, heads, dim]` is "B2NHD".
        """
        return cls.of(tensors, dims, **where)

    @classmethod
    def vllm_packed(
        cls, tensors: Sequence[Any], *, k_dim: int | None = None, **where: Unpack[Where]
    ) -> Self:
        """vLLM from 0.26 on GPUs: per layer a logical `[pages, heads, page, K | V]`, any strides.

        The engine's `kv_cache_layout` (LBHNC, LBNHC, BLHNC, ...) is in the strides alone. `k_dim`:
        where K ends and V begins on the last axis, in the middle by default. Not for vLLM's CPU
        backend, which stores a K slab and a V slab in the same shape: no other backend reads them.
        """
        layers = []
        for tensor in tensors:
            _check_dims(tensor, "BHNC")
            layers.append(_split_content(tensor.transpose(1, 2), k_dim))
        return cls(layers, **where)

    @classmethod
    def separate(
        cls,
        keys: Sequence[Any],
        values: Sequence[Any],
        dims: str = "BNHD",
        *,
        page_tokens: int | None = None,
        **where: Unpack[Where],
    ) -> Self:
        """K and V in tensors of their own, one of each per layer; their dims may differ."""
        if len(keys) != len(values):
            raise LayoutError(f"{len(keys)} tensors of K and {len(values)} of V")
        if set(dims) & set("L2C"):
            raise LayoutError(f"separate tensors have no L, 2 or C axis, unlike {dims!r}")
        layers = [
            (*_parts(k, dims, page_tokens), *_parts(v, dims, page_tokens))
            for k, v in zip(keys, values, strict=True)
        ]
        return cls(layers, **where)

    @classmethod
    def mla(
        cls,
        tensors: Sequence[Any],
        dims: str = "BND",
        *,
        page_tokens: int | None = None,
        **where: Unpack[Where],
    ) -> Self:
        """One latent per token: per layer `[pages, page, dim]`. SGLang's pools are "THD"."""
        if set(dims) & set("L2C"):
            raise LayoutError(f"latents have no L, 2 or C axis, unlike {dims!r}")
        return cls.of(tensors, dims, page_tokens=page_tokens, **where)

    @classmethod
    def cross_layer(cls, tensor: Any, dims: str = "BL2NHD", **where: Unpack[Where]) -> Self:
        """All layers in one tensor, `[pages, layers, 2, page, heads, dim]` or as `dims` says."""
        if "L" not in dims:
            raise LayoutError(f"{dims!r} has no L axis")
        return cls.of(tensor, dims, **where)

    @classmethod
    def sglang(
        cls,
        keys: Sequence[Any],
        values: Sequence[Any],
        *,
        page_tokens: int = 1,
        **where: Unpack[Where],
    ) -> Self:
        """SGLang's token pools: per layer K and V as `[tokens, heads, dim]`.

        `page_tokens` may be any number that divides the pool: with SGLang's own page size page
        tables are short, with 1 each token may lie anywhere.
        """
        return cls.separate(keys, values, "THD", page_tokens=page_tokens, **where)

    @classmethod
    def contiguous(cls, keys: Sequence[Any], values: Sequence[Any], **where: Unpack[Where]) -> Self:
        """Caches without pages (transformers): K and V as `[batch, heads, tokens, dim]`, or without
        the batch axis. Each row of the batch is one page that holds all its tokens."""
        if len(keys) and keys[0].dim() == 3:
            return cls.separate(keys, values, "HND", **where)
        return cls.separate(keys, values, "BHND", **where)


def _parts(tensor: Any, dims: str, page_tokens: int | None) -> tuple[Any, ...]:
    """One layer's parts as [pages, page_tokens, heads, dim]."""
    _check_dims(tensor, dims)
    if "T" in dims:
        axis = dims.index("T")
        if not page_tokens or page_tokens < 1 or tensor.shape[axis] % page_tokens:
            raise LayoutError(
                f"page_tokens is {page_tokens}; it has to divide the pool's {tensor.shape[axis]}"
            )
        tensor = tensor.unflatten(axis, (-1, page_tokens))
        dims = dims.replace("T", "BN")
    elif page_tokens is not None and tensor.shape[dims.index("N")] != page_tokens:
        raise LayoutError(f"pages have {tensor.shape[dims.index('N')]} tokens, not {page_tokens}")
    for letter in "BH":
        if letter not in dims:
            tensor, dims = tensor.unsqueeze(0), letter + dims
    if "2" in dims and tensor.shape[dims.index("2")] != 2:
        raise LayoutError(f"the axis of K and V has {tensor.shape[dims.index('2')]} entries, not 2")
    content = "C" if "C" in dims else "D"
    order = [letter for letter in ("2BNH" + content) if letter in dims]
    view = tensor.permute(*(dims.index(letter) for letter in order))
    if "2" in dims:
        return (view[0], view[1])
    return _split_content(view, None) if content == "C" else (view,)


def _split_content(view: Any, k_dim: int | None) -> tuple[Any, Any]:
    """K and V of a view whose last axis has both."""
    both = int(view.shape[-1])
    if k_dim is None and both % 2:
        raise LayoutError(f"K and V share {both} elements: say k_dim")
    split = both // 2 if k_dim is None else k_dim
    if not 0 < split < both:
        raise LayoutError(f"k_dim is {split} of {both}")
    return view[..., :split], view[..., split:]


def _check_dims(tensor: Any, dims: str) -> None:
    if len(set(dims)) < len(dims) or not set(dims) <= _AXES:
        raise LayoutError(f"{dims!r} names axes twice, or others than L 2 B N T H D C")
    if ("D" in dims) == ("C" in dims) or ("N" in dims) == ("T" in dims):
        raise LayoutError(f"{dims!r} has one of D and C, and one of N and T")
    if set("2C") <= set(dims) or set("BT") <= set(dims):
        raise LayoutError(f"{dims!r} has both 2 and C, or both B and T")
    if not hasattr(tensor, "data_ptr") or tensor.dim() != len(dims):
        shape = tuple(getattr(tensor, "shape", ()))
        raise LayoutError(f"{dims!r} is no name for the axes of {type(tensor).__name__}{shape}")


def _check_view(view: Any) -> None:
    if not hasattr(view, "data_ptr") or view.dim() != 4:
        raise LayoutError("a part is a tensor [pages, page_tokens, heads, dim]")
    if str(view.layout) != "torch.strided" or view.is_conj() or view.is_neg():
        raise LayoutError(
            "a part is a dense tensor whose memory holds its numbers: no sparse one, none with its "
            "conjugate or negative bit set (call resolve_conj, resolve_neg)"
        )
    if 0 in view.shape:
        raise LayoutError(f"a part of shape {tuple(view.shape)} is empty")
    if view.shape[3] > 1 and view.stride(3) != 1:
        raise LayoutError(f"the last axis is not contiguous: strides {tuple(view.stride())}")
    # No two elements share memory if each stride is longer than all that smaller ones can reach.
    reach = 0
    for stride, size in sorted(zip(view.stride(), view.shape, strict=True)):
        if size == 1:
            continue
        if stride <= reach:
            raise LayoutError(
                f"shape {tuple(view.shape)} with strides {tuple(view.stride())} overlaps itself"
            )
        reach += stride * (size - 1)


def row_bytes(view: Any) -> int:
    """Bytes of one token of one head of a cache's view."""
    return int(view.shape[3]) * int(view.element_size())
