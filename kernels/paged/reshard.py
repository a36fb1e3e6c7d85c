"""Resharding: payloads of p tensor-parallel ranks in the order of heads that d ranks need.

A head's run is the same bytes in every layout; only its place differs. So nothing is converted, and
no special kernel is needed: a block is a cache with one page, its runs are lanes of one row.

Fused with a gather or scatter it costs nothing at all: `gather(cache, pages, blocks,
BlockLayout.rank_major(shape, 8))` writes what eight ranks keep, and `scatter` with the same layout
reads it into an engine of any degree. `reshard` is for existing payloads, such as those that an
engine's own store wrote rank by rank.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from ..backend import uses_triton
from ..errors import LayoutError, RoomError
from ..launching import LaunchCall, on_stream
from ..layout.access_width import alignment
from ..layout.block_addresses import BlockMemory, block_memory, device_of
from ..layout.block_layout import select
from ..layout.lanes import LaneGroup, WantedHeads, wanted
from ..layout.transfer_plan import PageMap
from ..ranges.copy_ranges import copy_ranges_host
from .gather_scatter import launch, tile_work

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..backend import Backend
    from ..layout.block_layout import BlockLayout, BlockShape, Selection


def reshard(
    source: Any,
    source_layout: BlockLayout,
    target: Any,
    target_layout: BlockLayout,
    *,
    layers: Selection | None = None,
    heads: Selection | None = None,
    stream: Any = None,
    programs: int | None = None,
    backend: Backend | None = None,
) -> None:
    """Copy every run that both layouts have from the source blocks to the target blocks.

    `source`, `target`: blocks as `gather` takes them, the same number of each, and no block twice.
    Both layouts are of one shape. A head that the target has several times is written to each
    place; if the source has it several times, the first is read. Runs move whole, with their tails
    (scales of a quantised part); what the source does not have, or `layers` and `heads` leave out,
    is unchanged in the target.

    To make one share from p shares in p buffers, call it for each buffer: from
    `BlockLayout.rank(shape, r, p)` to `BlockLayout.rank(shape, q, d)` moves what the two share.
    `stream`, `programs` and `backend` as in `gather`. Raises LayoutError, RoomError and
    DeviceError, before anything is written.
    """
    device = _device(source, target)
    triton = uses_triton(device, backend)
    groups = _shared(source_layout, target_layout, wanted(source_layout.shape, layers, heads))
    count = len(target)
    into = block_memory(
        target, count=count, nbytes=target_layout.nbytes, device=device, written=True
    )
    out_of = block_memory(
        source, count=count, nbytes=source_layout.nbytes, device=device, written=False
    )
    _check_apart(out_of, source_layout.nbytes, into, target_layout.nbytes)
    if not triton:
        with on_stream(device, stream):
            for group in groups:
                _copy(group, out_of, into)
        return
    # Pages one byte apart: a page's number is its block's address.
    pages = PageMap(out_of.addresses[:, None], page_tokens=1)
    every = np.concatenate((into.addresses, out_of.addresses))
    works = [tile_work(group, every, count) for group in groups]
    with on_stream(device, stream):
        call = LaunchCall(pages, into.addresses, device, gather=True, programs=programs)
        for group, work in zip(groups, works, strict=True):
            launch(group, work, call)


def _device(source: Any, target: Any) -> Any:
    """The device that does the work: the GPU, if one side is on the host."""
    devices = [device_of(blocks[0]) for blocks in (target, source) if len(blocks)]
    if len(devices) < 2:
        raise RoomError("there are no blocks to read or to write")
    return next((device for device in devices if device.type != "cpu"), devices[0])


@lru_cache(maxsize=256)
def _shared(source: BlockLayout, target: BlockLayout, asked: WantedHeads) -> tuple[LaneGroup, ...]:
    """The runs that both have, by length: lanes from the source's offsets to the target's."""
    layers, heads = asked
    if source.shape != target.shape:
        raise LayoutError(f"{source!r} and {target!r} hold different parts")
    _, first = np.unique(source.runs[:, :3], axis=0, return_index=True)
    begins = {(layer, part, head): at for layer, part, head, at in source.runs[first].tolist()}
    moved = [
        (begins[layer, part, head], (layer, part, head, at))
        for layer, part, head, at in target.runs.tolist()
        if (layer, part, head) in begins
        and (layers is None or layer in layers)
        and (heads is None or head in heads or not target.shape.layers[layer][part].sliced)
    ]
    both = set(source.runs[:, 0].tolist()) & set(target.runs[:, 0].tolist())
    chosen = both if layers is None else set(layers)
    if not moved or not chosen <= both:
        raise LayoutError(f"{source!r} and {target!r} do not share layers {layers}, heads {heads}")
    if heads is not None:
        _check_heads(target.shape, chosen, heads, {run[:3] for _, run in moved})
    found = np.array([at for at, _ in moved], np.int64)
    runs = np.array([run for _, run in moved], np.int64)
    lengths = _run_bytes(runs, target.shape)
    return tuple(
        _group(found[lengths == length], runs[lengths == length, 3], int(length))
        for length in np.unique(lengths)
    )


def _check_heads(
    shape: BlockShape, layers: set[int], heads: range, moved: set[tuple[int, int, int]]
) -> None:
    """Raises LayoutError if heads that were asked for by number are not in both layouts."""
    for layer in layers:
        for number, part in enumerate(shape.layers[layer]):
            chosen = select("heads", heads, part.heads) if part.sliced else range(part.heads)
            if not all((layer, number, head) in moved for head in chosen):
                raise LayoutError(f"source and target do not share heads {heads} of layer {layer}")


def _run_bytes(runs: NDArray[np.int64], shape: BlockShape) -> NDArray[np.int64]:
    return np.array([shape.layers[at][part].run_bytes for at, part in runs[:, :2].tolist()])


def _group(sources: NDArray[np.int64], targets: NDArray[np.int64], length: int) -> LaneGroup:
    return LaneGroup(
        addresses=sources,
        offsets=targets,
        row_bytes=length,
        run_row_bytes=length,
        rows=1,
        skip=0,
        page_stride_bytes=1,
        token_stride_bytes=0,
        together=1,
        alignment=alignment(sources, targets, length),
        stretches=(),
    )


def _check_apart(source: BlockMemory, source_bytes: int, target: BlockMemory, nbytes: int) -> None:
    """Raises RoomError if a block is both read and written."""
    if len(np.unique(source.addresses)) < len(source.addresses):
        raise RoomError("a block is named twice as a source")
    begins = np.sort(target.addresses)
    last = np.searchsorted(begins, source.addresses + source_bytes) - 1
    if ((last >= 0) & (begins[last] + nbytes > source.addresses)).any():
        raise RoomError("source and target overlap")


def _copy(group: LaneGroup, source: BlockMemory, target: BlockMemory) -> None:
    """The reference: runs that are neighbours on both sides are copied as one range."""
    length = group.row_bytes
    steps = (np.diff(group.addresses) != length) | (np.diff(group.offsets) != length)
    firsts = np.concatenate(([0], np.flatnonzero(steps) + 1))
    sizes = np.diff(np.concatenate((firsts, [len(group)]))) * length
    begins, offsets = group.addresses[firsts], group.offsets[firsts]
    if all(block.device.type == "cpu" for block in (*source.tensors, *target.tensors)):
        copy_ranges_host(
            (target.addresses[:, None] + offsets).ravel(),
            (source.addresses[:, None] + begins).ravel(),
            np.tile(sizes, len(target.addresses)),
        )
        return
    for begin, offset, size in zip(begins.tolist(), offsets.tolist(), sizes.tolist(), strict=True):
        for read, written in zip(source.tensors, target.tensors, strict=True):
            written[offset : offset + size].copy_(read[begin : begin + size], non_blocking=True)
