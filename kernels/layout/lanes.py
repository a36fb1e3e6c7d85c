"""The lanes that a cache and a block share, that is which head goes where (a lane is defined in
block_layout.py).

Computed with numpy on the host, once per cache, layout and selection: neither addresses nor offsets
change.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..errors import LayoutError
from .access_width import alignment
from .block_layout import select
from .engine_cache import row_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from .block_layout import BlockLayout, BlockPart, BlockShape, Selection
    from .engine_cache import PagedCache


@dataclass(frozen=True, slots=True)
class HeadRun:
    """Neighbouring heads of one part of one layer, whose runs are `run_bytes` apart in a block.

    `layer`, `part` and `head` are indices of the cache's views, not of the model."""

    layer: int
    part: int
    head: int
    heads: int
    offset: int
    run_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class LaneGroup:
    """Lanes that one launch can move: they differ only in address and offset.

    `addresses`: int64 [lanes], of the row in slot 0 of page 0. `offsets`: int64 [lanes], of the run
    in a block. `row_bytes` in the cache, `run_row_bytes` in the block (the same, unless a kernel
    converts). A run has `rows` rows, of the block's tokens from `skip` on. Lanes are in the order
    of layer, part and head, `together` at a time from the same tensor, whose rows are close in
    memory. `alignment`: the largest power of two, at most 16, that divides every address, offset,
    stride and row.
    """

    addresses: NDArray[np.int64]
    offsets: NDArray[np.int64]
    row_bytes: int
    run_row_bytes: int
    rows: int
    skip: int
    page_stride_bytes: int
    token_stride_bytes: int
    together: int
    alignment: int
    stretches: tuple[HeadRun, ...]
    memo: dict[Any, Any] = field(default_factory=dict)  # this table on devices

    def __len__(self) -> int:
        return len(self.addresses)

    @property
    def run_bytes(self) -> int:
        """Bytes of one lane in one block, without the tail."""
        return self.rows * self.run_row_bytes


def lanes(
    cache: PagedCache,
    layout: BlockLayout,
    *,
    layers: Selection | None = None,
    heads: Selection | None = None,
    once: bool = False,
    same_rows: bool = True,
) -> tuple[LaneGroup, ...]:
    """The lanes that a cache and a block share, in as few groups as possible: usually one.

    `layers` and `heads` are ranges of the model's, which both must have. None is all that both
    have. `once`: one lane per head even if the block has copies (to read from it).
    `same_rows=False` is for kernels that convert: rows may differ in bytes. The result is kept with
    the cache. Raises LayoutError.
    """
    chosen = wanted(layout.shape, layers, heads)

    def plan() -> tuple[LaneGroup, ...]:
        groups = _plan(cache, layout, chosen, once)
        if same_rows:
            for group in groups:
                check_rows(group)
        return tuple(groups)

    return cache.kept((layout, chosen, once, same_rows), plan)


class WantedHeads(NamedTuple):
    """The layers and heads of the model that the caller asked for; None is all."""

    layers: range | None
    heads: range | None


def wanted(shape: BlockShape, layers: Selection | None, heads: Selection | None) -> WantedHeads:
    """Raises LayoutError for layers and heads that the shape does not have."""
    return WantedHeads(
        None if layers is None else select("layers", layers, len(shape.layers)),
        None if heads is None else select("heads", heads, shape.most_heads),
    )


def check_rows(group: LaneGroup) -> None:
    """Raises LayoutError if rows differ in bytes between the cache and the block."""
    if group.row_bytes != group.run_row_bytes:
        at = group.stretches[0]
        raise LayoutError(
            f"layer {at.layer}, part {at.part} of the cache: rows of {group.row_bytes} bytes,"
            f" but the block's have {group.run_row_bytes}"
        )


def together(stretches: Iterable[HeadRun]) -> int:
    """How many consecutive lanes are of the same tensor, everywhere in the table."""
    counts: dict[tuple[int, int], int] = {}
    for at in stretches:
        counts[at.layer, at.part] = counts.get((at.layer, at.part), 0) + at.heads
    return math.gcd(*counts.values())


def _plan(
    cache: PagedCache, layout: BlockLayout, chosen: WantedHeads, once: bool
) -> list[LaneGroup]:
    grouped: dict[_Alike, list[HeadRun]] = {}
    runs = layout.runs
    if once:
        _, first = np.unique(runs[:, :3], axis=0, return_index=True)
        runs = runs[np.sort(first)]
    tables, none = _by_part(runs), runs[:0]
    for index, layer in _layers(cache, layout, chosen.layers):
        parts = layout.shape.layers[layer]
        if len(parts) != len(cache.layers[index]):
            raise LayoutError(
                f"layer {layer} has {len(cache.layers[index])} parts in the cache, {len(parts)} in"
                " the block"
            )
        for number, part in enumerate(parts):
            view = cache.layers[index][number]
            heads, first_head = _heads(cache, view, layer, part, chosen.heads)
            table = tables.get((layer, number), none)
            if len(heads) < part.heads:
                table = table[(table[:, 2] >= heads.start) & (table[:, 2] < heads.stop)]
            if chosen.heads is not None and len(np.unique(table[:, 2])) < len(heads):
                raise LayoutError(f"heads {heads} of layer {layer} are not all in {layout!r}")
            stretches = _stretches(table, index, number, first_head, part.run_bytes)
            grouped.setdefault(_alike(view, part, layout.tokens), []).extend(stretches)
    if not any(grouped.values()):
        raise LayoutError(f"the cache and {layout!r} have no head in common")
    return [_group(cache, key, stretches) for key, stretches in grouped.items() if stretches]


def _layers(cache: PagedCache, layout: BlockLayout, chosen: range | None) -> list[tuple[int, int]]:
    """(index in the cache, layer of the model) of each layer to move."""
    count = len(layout.shape.layers)
    if cache.layer_ids[-1] >= count:
        raise LayoutError(f"the cache has layer {cache.layer_ids[-1]}; the block has {count}")
    held = set(layout.runs[:, 0].tolist())
    if chosen is not None and not set(chosen) <= held.intersection(cache.layer_ids):
        raise LayoutError(f"layers {chosen} are not all in the cache and in {layout!r}")
    return [
        (index, layer)
        for index, layer in enumerate(cache.layer_ids)
        if layer in (held if chosen is None else chosen)
    ]


def _heads(
    cache: PagedCache, view: Any, layer: int, part: BlockPart, asked: range | None
) -> tuple[range, int]:
    """The model's heads to move of one part, and the model's number of the view's first head."""
    if not part.per_token:
        raise LayoutError(f"layer {layer} has no rows per token, so no pages either")
    first_head = cache.first_head if part.sliced else 0
    held = range(first_head, first_head + int(view.shape[2]))
    if held.stop > part.heads:
        raise LayoutError(f"layer {layer} has {part.heads} heads; the cache has heads {held}")
    if asked is None or not part.sliced:
        return held, first_head
    chosen = select("heads", asked, part.heads)
    if chosen.start < held.start or chosen.stop > held.stop:
        raise LayoutError(
            f"heads {chosen} of layer {layer} are not all in the cache: it has {held}"
        )
    return chosen, first_head


def _by_part(runs: NDArray[np.int64]) -> dict[tuple[int, int], NDArray[np.int64]]:
    """The rows of a layout's table of each (layer, part)."""
    ordered = runs[np.lexsort((runs[:, 1], runs[:, 0]))]
    changes = np.flatnonzero((ordered[1:, :2] != ordered[:-1, :2]).any(axis=1)) + 1
    parts = np.split(ordered, changes)
    return {(int(rows[0, 0]), int(rows[0, 1])): rows for rows in parts if len(rows)}


def _stretches(
    table: NDArray[np.int64], layer: int, part: int, first_head: int, run_bytes: int
) -> list[HeadRun]:
    """Rows of a layout's table joined into runs of neighbours, in the order of their offsets."""
    table = table[np.argsort(table[:, 3])]
    goes_on = (table[1:, 2] - table[:-1, 2] == 1) & (table[1:, 3] - table[:-1, 3] == run_bytes)
    breaks = np.flatnonzero(~goes_on) + 1
    parts = np.split(table, breaks) if len(breaks) else [table]
    return [
        HeadRun(layer, part, int(rows[0, 2]) - first_head, len(rows), int(rows[0, 3]), run_bytes)
        for rows in parts
        if len(rows)
    ]


class _Alike(NamedTuple):
    """What lanes of one group have in common."""

    row_bytes: int
    run_row_bytes: int
    rows: int
    skip: int
    page_stride_bytes: int
    token_stride_bytes: int


def _alike(view: Any, part: BlockPart, tokens: int) -> _Alike:
    itemsize = int(view.element_size())
    return _Alike(
        row_bytes=row_bytes(view),
        run_row_bytes=part.row_bytes,
        rows=part.rows,
        skip=tokens - part.rows,
        page_stride_bytes=int(view.stride(0)) * itemsize if view.shape[0] > 1 else 0,
        token_stride_bytes=int(view.stride(1)) * itemsize if view.shape[1] > 1 else 0,
    )


def _group(cache: PagedCache, alike: _Alike, stretches: list[HeadRun]) -> LaneGroup:
    addresses, offsets = [], []
    for at in stretches:
        view = cache.layers[at.layer][at.part]
        heads = np.arange(at.heads)
        head_stride = int(view.stride(2)) * int(view.element_size())
        addresses.append(int(view.data_ptr()) + (at.head + heads) * head_stride)
        offsets.append(at.offset + heads * at.run_bytes)
    table = np.concatenate([*addresses, *offsets]).reshape(2, -1)
    strides = (alike.page_stride_bytes, alike.token_stride_bytes)
    return LaneGroup(
        addresses=table[0],
        offsets=table[1],
        **alike._asdict(),
        together=together(stretches),
        alignment=alignment(table, alike.row_bytes, alike.run_row_bytes, *strides),
        stretches=tuple(stretches),
    )
