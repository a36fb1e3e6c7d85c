"""Publishing layers: a writer makes a layer of reserved slots readable before the commit."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from tiffin.messenger.shm import host_copy

from ...node.core import messages
from ..blocks.block_views import select
from .block_verbs import work

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...format.schema import KVSchema
    from ..blocks.block_views import Selection, Slot
    from ..connection.node_link import NodeLink


def publish(
    link: NodeLink, slots: Sequence[Slot], lease: int, layer: int, timeout_s: float
) -> None:
    """Publish `layer` of these slots with its checksums, so that streams can read it before the
    commit, which takes the same checksums. Raises SchemaError for a layer that the schema does not
    have, InvalidInput for a layer that was published before, StaleLease."""
    kept = [(number, slot) for number, slot in enumerate(slots) if not slot.skipped]
    if not kept:
        return
    selection = kept[0][1].selection
    segments = published_segments(selection, layer)
    if not segments:
        return
    in_payload, spans = segment_spans(selection.schema, segments)
    algorithm = selection.schema.checksum
    at_once = slots_per_message(segments)
    for first in range(0, len(kept), at_once):
        part = kept[first : first + at_once]
        views = [slot.view for _, slot in part]
        found = work(link, partial(host_copy.hash_blocks, views, in_payload, algorithm))
        sums = found.astype("<u8").tobytes()
        numbers = [number for number, _ in part]
        link.call(messages.Publish(0, lease, numbers, segments, spans, sums), timeout_s)
        for (_, slot), checksums in zip(part, found, strict=True):
            slot.note_published(segments, checksums)


def published_segments(selection: Selection, layer: int) -> list[int]:
    """The segments of `layer` that a writer of `selection` publishes: none if the layer is not
    split and the rank is not 0. Raises SchemaError for a layer that the schema does not have."""
    schema = selection.schema
    select(schema, layers=layer)  # raises SchemaError
    if selection.shard is None:
        return list(schema.layer_segments(layer))
    return schema.shard_segments(layer, selection.shard)


def segment_spans(
    schema: KVSchema, segments: Sequence[int]
) -> tuple[list[tuple[int, int]], list[int]]:
    """(offset, length) of each segment in a payload; and `Publish.spans`, whose offsets count from
    the start of the extent."""
    chosen = [schema.segments[index] for index in segments]
    in_payload = [(segment.offset, segment.length) for segment in chosen]
    return in_payload, [n for at, size in in_payload for n in (schema.header_bytes + at, size)]


def slots_per_message(segments: Sequence[int]) -> int:
    """How many slots one `Publish` message covers, for these segments of each."""
    return max(1, messages.PUBLISHED_BYTES_MAX // (8 * len(segments)))
