"""Copies between a block's payload and a selection's packed bytes, with checksums on the way."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from tiffin.messenger.shm import host_copy

from ...format.schema import KVSchema, Shard
from .payload_buffers import payload_views

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ...format.schema import AnyShard
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


def copy_hashed(
    targets: Sequence[Bytes], sources: Sequence[Bytes], selection: Selection
) -> Checksums:
    """Copy an aligned selection of several blocks; returns the checksums of its segments, of the
    copied bytes, uint64 [blocks, segments]. All targets, and all sources, have the selection
    packed, or are whole payloads."""
    at, found = 0, []
    for run in selection.runs:
        found.append(
            host_copy.copy_blocks_hashed(
                _cut(targets, run, at, selection),
                _cut(sources, run, at, selection),
                run.spans,
                selection.schema.checksum,
            )
        )
        at += run.length
    return found[0] if len(found) == 1 else np.concatenate(found, axis=1)


def _cut(memory: Sequence[Bytes], run: Piece, at: int, selection: Selection) -> list[Bytes]:
    """The bytes of a run, which begins at `at` of a packed selection."""
    whole_bytes = selection.schema.block_bytes
    starts = [run.offset if len(one) == whole_bytes else at for one in memory]
    return [one[start : start + run.length] for one, start in zip(memory, starts, strict=True)]


def first_differing(found: Checksums, headers: Sequence[bytes], selection: Selection) -> int | None:
    """The first of several blocks whose selected segments do not have the checksums of its header.
    `found`: uint64 [blocks, segments of the selection]."""
    wanted = selection.schema.header.checksum_table(headers)
    if found.shape != wanted.shape:  # the selection is a part of the block
        wanted = wanted[:, selection.segments]
    differs = (found != wanted).any(axis=1)
    return int(differs.argmax()) if differs.any() else None


def checksums_of(sources: Sequence[Bytes], selection: Selection) -> Checksums:
    """The checksums of an aligned selection of several blocks, uint64 [blocks, segments]. All
    sources have the selection packed, or are whole payloads."""
    are_whole = bool(sources) and len(sources[0]) == selection.schema.block_bytes
    spans = selection.spans if are_whole else selection.packed
    return host_copy.hash_blocks(sources, spans, selection.schema.checksum)


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
    """The checksums of whole blocks, uint64 [..., segments]: `found` for the selection's segments,
    zero for the others."""
    if found.shape[-1] == len(selection.schema.segments):
        return found
    checksums = np.zeros((*found.shape[:-1], len(selection.schema.segments)), np.uint64)
    checksums[..., selection.segments] = found
    return checksums
