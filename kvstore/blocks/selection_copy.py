"""Copies between a block's payload and the packed bytes of a selection, with checksums on the way.

Whole layers are copied by as many threads as are worth it; groups of heads by one thread, with
neighbouring segments in one copy.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from tiffin.messenger.shm import host_copy

from ..format.schema import KVSchema, Shard
from .payload_buffers import payload_views

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ..format.schema import AnyShard
    from .block_views import Piece, Selection

    Bytes = NDArray[np.uint8]
    Checksums = NDArray[np.uint64]


@lru_cache(maxsize=256)
def slice_schema(schema: KVSchema, shard: AnyShard) -> KVSchema:
    """The schema whose blocks are one writer's packed slices: of its stage's layers, its rank's
    heads of those that `schema` splits and, on rank 0, the others. Raises SchemaError."""
    mine = schema.check_shard(shard) or Shard(0, 1)
    layers = []
    for index, spec in enumerate(schema.layers):
        if not mine.holds(index):
            continue
        if schema.splits(index):
            parts = tuple(replace(part, heads=part.heads // mine.ranks) for part in spec.parts)
            layers.append(replace(spec, parts=parts))
        elif mine.rank == 0:
            layers.append(spec)
    return KVSchema.of(
        schema.model,
        layers,
        block_tokens=schema.block_tokens,
        hash=schema.hash,
        checksum=schema.checksum,
    )


def source_views(selection: Selection, payloads: Sequence[Any], count: int) -> list[Bytes]:
    """One flat uint8 view per payload of a put: whole blocks or, for one rank, packed slices; the
    size of the first payload decides which. Raises InvalidInput and SchemaError like
    `payload_views`."""
    schema = selection.schema
    if selection.shard is not None and count and _nbytes(payloads) != schema.block_bytes:
        schema = slice_schema(schema, selection.shard)
    return payload_views(schema, payloads, count)


def _nbytes(payloads: Sequence[Any]) -> int | None:
    """The size of the first payload; None if there is none or it has no size, which
    `payload_views` will refuse anyway."""
    try:
        first = payloads[0]
        return int(first.nbytes if hasattr(first, "nbytes") else len(first))
    except (TypeError, LookupError):
        return None


def gather(target: Bytes, payload: Bytes, selection: Selection) -> None:
    """Copy the selection out of a whole payload, packed."""
    at = 0
    for run in selection.ranges:
        host_copy.copy(target[at : at + run.length], payload[run.offset : run.end])
        at += run.length


def gather_hashed(target: Bytes, payload: Bytes, selection: Selection) -> Checksums:
    """`gather` of an aligned selection; returns its segments' checksums, of the copied bytes."""
    at, targets = 0, []
    for piece in selection.pieces:
        targets.append(at)
        at += piece.length
    return _copy_hashed(target, targets, payload, _offsets(selection), selection)


def scatter_hashed(payload: Bytes, source: Bytes, selection: Selection) -> Checksums:
    """Copy an aligned selection into a payload, and hash the copied bytes. `source` has the
    selection packed, or is a whole payload too."""
    offsets = _offsets(selection)
    if len(source) == len(payload):
        return _copy_hashed(payload, offsets, source, offsets, selection)
    at, sources = 0, []
    for piece in selection.pieces:
        sources.append(at)
        at += piece.length
    return _copy_hashed(payload, offsets, source, sources, selection)


def _copy_hashed(
    target: Bytes, targets: list[int], source: Bytes, sources: list[int], selection: Selection
) -> Checksums:
    """Copy each piece of a selection from its place in `source` to its place in `target`.

    Returns the checksums of the segments. A piece of several segments is copied at once: many short
    copies take twice as long as one (see `host_copy.py`), and a piece is still in the cache when
    its segments are hashed.
    """
    pieces = selection.pieces
    if len(pieces) == len(selection.spans) and selection.contiguous:
        spans = [(at - targets[0], piece.length) for at, piece in zip(targets, pieces, strict=True)]
        end = spans[-1][0] + spans[-1][1]
        return host_copy.copy_segments_hashed(
            target[targets[0] : targets[0] + end],
            source[sources[0] : sources[0] + end],
            spans,
            selection.schema.checksum,
        )
    checksums = np.empty(len(selection.spans), np.uint64)
    for to, at, piece in zip(targets, sources, pieces, strict=True):
        copied = target[to : to + piece.length]
        host_copy.copy(copied, source[at : at + piece.length])
        checksums[piece.first : piece.first + piece.count] = piece_checksums(
            copied, selection, piece
        )
    return checksums


def piece_checksums(copied: Bytes, selection: Selection, piece: Piece) -> Checksums:
    """The checksums of the segments of one piece, whose bytes are `copied`."""
    spans = selection.spans[piece.first : piece.first + piece.count]
    return host_copy.hash_segments(
        copied,
        [(at - piece.offset, length) for at, length in spans],
        selection.schema.checksum,
    )


def _offsets(selection: Selection) -> list[int]:
    return [piece.offset for piece in selection.pieces]


def checksums_of(source: Bytes, selection: Selection) -> Checksums:
    """The checksums of an aligned selection whose bytes are packed, or in a whole payload."""
    algorithm = selection.schema.checksum
    if len(source) == selection.schema.block_bytes:
        return host_copy.hash_segments(source, selection.spans, algorithm)
    spans = [(at, stop - at) for at, stop in _packed(selection)]
    return host_copy.hash_segments(source, spans, algorithm)


def runs_of(source: Bytes, selection: Selection) -> list[Bytes]:
    """Views of each of `selection.ranges` in a source that is packed, or a whole payload."""
    if len(source) == selection.schema.block_bytes:
        return [source[run.offset : run.end] for run in selection.ranges]
    runs, at = [], 0
    for run in selection.ranges:
        runs.append(source[at : at + run.length])
        at += run.length
    return runs


def cut(target: Bytes, spans: Bytes, selection: Selection) -> None:
    """Copy the selection into `target`, packed; `spans` has all segments it touches, packed."""
    at = 0
    for offset, length in selection.cuts():
        host_copy.copy(target[at : at + length], spans[offset : offset + length])
        at += length


def all_checksums(selection: Selection, found: Checksums) -> Checksums:
    """The checksums of a whole block, uint64 [segments]: `found` for the selection's segments, zero
    for the others."""
    if len(found) == len(selection.schema.segments):
        return found
    checksums = np.zeros(len(selection.schema.segments), np.uint64)
    checksums[selection.segments] = found
    return checksums


def _packed(selection: Selection) -> list[tuple[int, int]]:
    """(start, stop) of each segment in the packed selection."""
    ends = np.cumsum([0, *(length for _, length in selection.spans)]).tolist()
    return list(pairwise(ends))
