"""How the parts of a block are quantised, and the lanes that one launch can convert.

`lanes` (lanes.py) joins a cache and a block; here its groups are split by scaling, that is by how
the bytes of the block encode the numbers of the cache.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np

from ..errors import LayoutError
from ..layout.access_width import alignment
from ..layout.block_layout import BlockLayout, BlockShape
from ..layout.lanes import LaneGroup, check_rows, lanes, together
from .reference import NUMBERS
from .scaling import SCALE_BYTES, Scaling

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..layout.block_layout import Selection
    from ..layout.engine_cache import PagedCache


class _Part(Protocol):
    @property
    def dtype(self) -> str: ...
    @property
    def scale_tokens(self) -> int: ...


@dataclass(frozen=True, slots=True, eq=False)
class QuantisedLayout:
    """Where each head is in a block, and how it is quantised: `scalings[layer][part]`, with the
    model's numbers, is None for a part that is not quantised.

    Make it once, as tables are cached by its identity. Raises LayoutError if the layout has too
    little or too much room for the scales.
    """

    layout: BlockLayout
    scalings: tuple[tuple[Scaling | None, ...], ...]

    def __post_init__(self) -> None:
        shape = self.layout.shape
        if [len(parts) for parts in shape.layers] != [len(parts) for parts in self.scalings]:
            raise LayoutError("a layout needs one scaling, or None, for each part of each layer")
        for layer, parts in enumerate(shape.layers):
            for part, scaling in zip(parts, self.scalings[layer], strict=True):
                tail_bytes = 0
                if scaling is not None:
                    groups, over = divmod(part.rows, scaling.scale_tokens)
                    tail_bytes = groups * SCALE_BYTES
                    if over or part.rows * part.row_bytes % SCALE_BYTES:
                        raise LayoutError(f"layer {layer}: {part} can't have {scaling}")
                if part.tail_bytes != tail_bytes:
                    raise LayoutError(
                        f"layer {layer}: {part.tail_bytes} bytes behind a head's rows;"
                        f" its scales are {tail_bytes}"
                    )

    @classmethod
    def of_schema(cls, schema: Any, layout: BlockLayout | None = None) -> Self:
        """The blocks of a KVSchema; in another order than the pool's if `layout` says so."""
        if layout is None:
            layout = BlockLayout.canonical(BlockShape.of_schema(schema))
        return cls(layout, tuple(tuple(map(_scaling, spec.parts)) for spec in schema.layers))

    @property
    def nbytes(self) -> int:
        """Bytes of a block."""
        return self.layout.nbytes


def _scaling(part: _Part) -> Scaling | None:
    return Scaling(part.dtype, part.scale_tokens) if part.scale_tokens else None


@dataclass(frozen=True, slots=True, eq=False)
class ScaledGroup:
    """Lanes of one launch: lanes of `lanes` with one scaling (None: copied) and one dtype."""

    lanes: LaneGroup
    scaling: Scaling | None
    dtype: Any
    cache_alignment: int
    run_alignment: int

    @property
    def dim(self) -> int:
        return self.lanes.run_row_bytes


def scaled_groups(
    cache: PagedCache,
    layout: QuantisedLayout,
    layers: Selection | None,
    heads: Selection | None,
    *,
    once: bool,
) -> tuple[ScaledGroup, ...]:
    """`lanes`, split by how they are quantised; kept with the cache. Raises LayoutError."""
    plain = lanes(cache, layout.layout, layers=layers, heads=heads, once=once, same_rows=False)
    return cache.kept(
        (layout, plain),
        lambda: tuple(part for group in plain for part in _parted(cache, layout, group)),
    )


def _parted(cache: PagedCache, layout: QuantisedLayout, group: LaneGroup) -> list[ScaledGroup]:
    """A group's lanes by scaling and dtype."""
    found: dict[tuple[Scaling | None, Any], list[int]] = {}
    for index, at in enumerate(group.stretches):
        scaling = layout.scalings[cache.layer_ids[at.layer]][at.part]
        dtype = cache.layers[at.layer][at.part].dtype
        found.setdefault((scaling, None if scaling is None else dtype), []).append(index)
    ends = np.cumsum([0, *(at.heads for at in group.stretches)])
    return [
        _scaled(group, scaling, dtype, chosen, ends) for (scaling, dtype), chosen in found.items()
    ]


def _scaled(
    group: LaneGroup,
    scaling: Scaling | None,
    dtype: Any,
    chosen: list[int],
    ends: NDArray[np.int64],
) -> ScaledGroup:
    stretches = tuple(group.stretches[index] for index in chosen)
    which = np.concatenate([np.arange(ends[index], ends[index + 1]) for index in chosen])
    addresses, offsets = group.addresses[which], group.offsets[which]
    strides = (group.page_stride_bytes, group.token_stride_bytes)
    cache_alignment = alignment(addresses, group.row_bytes, *strides)
    run_alignment = alignment(offsets, group.run_row_bytes)
    part = replace(
        group,
        addresses=addresses,
        offsets=offsets,
        together=together(stretches),
        alignment=min(cache_alignment, run_alignment),
        stretches=stretches,
        memo={},
    )
    if scaling is None:
        check_rows(part)
    else:
        _check_numbers(part, dtype)
    return ScaledGroup(part, scaling, dtype, cache_alignment, run_alignment)


def _check_numbers(group: LaneGroup, dtype: Any) -> None:
    """Raises LayoutError if the rows of a group can't be quantised to its runs."""
    at = group.stretches[0]
    where = f"layer {at.layer}, part {at.part} of the cache"
    if dtype not in NUMBERS:
        raise LayoutError(f"{where} is {dtype}; what is quantised is bfloat16, float16 or float32")
    if group.row_bytes != group.run_row_bytes * dtype.itemsize:
        raise LayoutError(
            f"{where}: rows of {group.row_bytes // dtype.itemsize} numbers, but the block's have"
            f" {group.run_row_bytes}"
        )
    if alignment(group.offsets) % SCALE_BYTES:
        raise LayoutError(f"{where}: a run begins where its scales are not at multiples of 4 bytes")
