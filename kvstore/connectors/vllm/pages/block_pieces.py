"""How a rank's share of a block is cut for a buffer on the device: by layers, packed."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from tiffin.kernels.layout.block_layout import BlockLayout, BlockShape
from tiffin.messenger.gpu.copier import Copies

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ....format.schema import KVSchema

    Numbers = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class BlockPiece:
    """Some layers of a rank's share.

    `whole_offsets`, `lengths`: int64 [n], its ranges in a block's whole payload. `share_offset`:
    where it begins in a block of the rank's bytes only. `nbytes`: of the piece, packed.
    """

    shape: BlockShape
    layers: tuple[int, int]
    heads: tuple[int, int]
    whole_offsets: Numbers
    lengths: Numbers
    share_offset: int
    nbytes: int
    _layouts: dict[int, BlockLayout] = field(default_factory=dict)

    @property
    def room_bytes(self) -> int:
        """What a buffer needs for the piece in any of its layouts."""
        longest = max(part.run_bytes for parts in self.shape.layers for part in parts)
        return self.nbytes + longest

    def layout(self, skipped_tokens: int = 0) -> BlockLayout:
        """The packed piece, without the rows of the block's first `skipped_tokens` tokens. Kept:
        what kernels plan is kept with it."""
        found = self._layouts.get(skipped_tokens)
        if found is None:
            found = _layout(self.shape, self.layers, self.heads, skipped_tokens)
            self._layouts[skipped_tokens] = found
        return found

    def load(self, buffer: Any, memory: NDArray[np.uint8], *, whole: bool) -> Copies:
        """The copies from a block's memory, its whole payload, the rank's share of it or this piece
        of that, to a buffer."""
        offsets, lengths, packed = self._ranges(whole, len(memory))
        return Copies(buffer, memory, packed, offsets, lengths)

    def save(self, memory: NDArray[np.uint8], buffer: Any, *, whole: bool) -> Copies:
        """The copies from a buffer to a block's memory."""
        offsets, lengths, packed = self._ranges(whole, len(memory))
        return Copies(memory, buffer, offsets, packed, lengths)

    def _ranges(self, whole: bool, nbytes: int) -> tuple[Numbers, Numbers, Numbers]:
        """Offsets in a block's memory of `nbytes`, lengths, offsets in the packed piece."""
        if whole:
            packed = np.cumsum(self.lengths) - self.lengths
            return self.whole_offsets, self.lengths, packed
        one = np.zeros(1, np.int64)
        alone = nbytes == self.nbytes  # the memory has only this piece
        return one + (0 if alone else self.share_offset), one + self.nbytes, one


def block_pieces(
    schema: KVSchema, layers: tuple[int, int], heads: tuple[int, int], piece_bytes: int
) -> tuple[BlockPiece, ...]:
    """The share of `heads` in `layers` in pieces of about `piece_bytes`, of a layer at least, in
    payload order. Raises SchemaError for layers and heads that the schema does not have."""
    shape = BlockShape.of_schema(schema)
    begin, end = layers
    share_bytes = sum(span.length for span in schema.ranges(layers, heads))
    each = max(1, (end - begin) * piece_bytes // share_bytes)
    pieces, share_offset = [], 0
    for first in range(begin, end, each):
        chosen = (first, min(end, first + each))
        spans = schema.ranges(chosen, heads)
        lengths = np.array([span.length for span in spans], np.int64)
        nbytes = int(lengths.sum())
        offsets = np.array([span.offset for span in spans], np.int64)
        pieces.append(BlockPiece(shape, chosen, heads, offsets, lengths, share_offset, nbytes))
        share_offset += nbytes
    return tuple(pieces)


def _layout(
    shape: BlockShape, layers: tuple[int, int], heads: tuple[int, int], skipped_tokens: int
) -> BlockLayout:
    whole = BlockLayout.slice(shape, layers=layers, heads=heads)
    if not skipped_tokens:
        return whole
    # Runs begin later, and what is before counts as the gap to the next run; a gap behind the last
    # run is room that is neither read nor written.
    shorter = BlockShape(
        shape.tokens - skipped_tokens,
        tuple(
            tuple(
                replace(
                    part,
                    rows=part.rows - skipped_tokens,
                    tail_bytes=part.tail_bytes + skipped_tokens * part.row_bytes,
                )
                for part in parts
            )
            for parts in shape.layers
        ),
    )
    runs = whole.runs.copy()
    later = [skipped_tokens * shape.layers[layer][part].row_bytes for layer, part in runs[:, :2]]
    runs[:, 3] += later
    return BlockLayout(shorter, runs, whole.nbytes + later[-1], f"without {skipped_tokens} tokens")
