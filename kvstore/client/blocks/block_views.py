"""Typed views of a prefix's blocks for readers and writers, by layer, part and head range.

A `Payload` computes the place of each (layer, part) in its bytes, and returns typed arrays over
them without a copy. Its memory has one of two shapes: a whole block in the pool, of which the
caller selected a range (`offset` positions), or caller memory with only that range, packed.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from ...errors import ClientClosed, InvalidInput, SchemaError
from ...format.layer_spec import SCALE
from .published_checksums import PublishedChecksums

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from ...format.keys import Prefix
    from ...format.layer_spec import Part
    from ...format.schema import AnyShard, ByteRange, HeadRange, KVSchema, LayerRange, Shard

    Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Piece:
    """Neighbouring segments, moved as one range: a selection's segments from the `first` on, in
    `length` bytes of the payload from `offset` on. `spans` are their (offset, length) inside the
    piece."""

    offset: int
    length: int
    first: int
    spans: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Selection:
    """A choice of layers and heads of a schema: the byte ranges of one block that it needs.

    `ranges` are positions in the whole payload, ascending and coalesced; `nbytes` is their sum, and
    the size of a buffer for `get(into=...)`. `segments` are the indices of the segments that they
    touch, `spans` the (offset, length) of each whole touched segment: a checksum covers one span;
    `packed` are their places in memory that has all of them, packed. `pieces` are neighbours of one
    layer, `runs` all neighbours. `aligned` if the selection has whole segments only, so that its
    own bytes suffice to verify it. `shard` is set for the slice of one of several writers
    (`select_shard`).
    """

    schema: KVSchema
    layers: tuple[int, ...]
    heads: HeadRange | None
    ranges: tuple[ByteRange, ...]
    nbytes: int
    segments: NDArray[np.intp]
    spans: tuple[tuple[int, int], ...]
    packed: tuple[tuple[int, int], ...]
    aligned: bool
    pieces: tuple[Piece, ...]
    runs: tuple[Piece, ...]
    shard: Shard | None = None

    @property
    def spans_bytes(self) -> int:
        """Bytes of all touched segments; more than `nbytes` if the selection is not aligned."""
        return sum(length for _, length in self.spans)

    def bitmap(self) -> bytes:
        """The touched segments as bits: bit 0 of byte 0 is the first segment of the block."""
        flags = np.zeros(len(self.schema.segments), np.uint8)
        flags[self.segments] = 1
        return np.packbits(flags, bitorder="little").tobytes()

    def where(self, layer: int, part: str) -> ByteRange:
        """The byte range in the payload of one part's selected heads. Raises SchemaError."""
        if self.shard is not None:
            return self.schema.shard_range(layer, part, self.shard)
        return self.schema.range(layer, part, heads=self.heads)

    def packed_offset(self, wanted: ByteRange) -> int:
        """The offset of `wanted` in the packed selection. Raises InvalidInput if the selection does
        not cover it."""
        before = 0
        for held in self.ranges:
            if held.offset <= wanted.offset and wanted.end <= held.end:
                return before + wanted.offset - held.offset
            before += held.length
        raise InvalidInput(f"bytes [{wanted.offset}, {wanted.end}) were not asked for")

    def cuts(self) -> Iterator[tuple[int, int]]:
        """(offset, length) of each of `ranges` in memory that has all of `spans`, packed.

        A range's segments are adjacent in the payload, and therefore in that memory too.
        """
        begins = [begin for begin, _ in self.spans]
        for wanted in self.ranges:
            first = bisect_right(begins, wanted.offset) - 1
            yield self.packed[first][0] + wanted.offset - begins[first], wanted.length


def select(
    schema: KVSchema, layers: LayerRange | None = None, heads: HeadRange | None = None
) -> Selection:
    """The selection of `layers` (an index, (a, b), slice or range) and `heads` (half-open).

    Raises SchemaError for layers or heads that the schema does not have.
    """
    if layers is None and heads is None:  # the usual case
        return _select(schema, None, None)
    return _select(schema, _hashable(layers), _hashable(heads))


def select_shard(schema: KVSchema, shard: AnyShard | None) -> Selection:
    """The slice of a block that one of several writers writes: of its stage's layers, its rank's
    heads of every layer that the schema splits and, on rank 0, all of the others. None selects the
    whole block.

    Raises SchemaError for ranks that the schema's `shards` do not allow, and for stages that do not
    have the schema's layers.
    """
    checked = schema.check_shard(shard)
    return select(schema) if checked is None else _select_shard(schema, checked)


def _hashable(chosen: LayerRange | HeadRange | None) -> Any:
    if isinstance(chosen, slice | range):
        return ("step", chosen.start, chosen.stop, chosen.step)
    try:
        hash(chosen)
    except TypeError as error:
        raise SchemaError(f"{chosen!r} selects no layers or heads") from error
    return chosen


def _original(chosen: Any) -> Any:
    if isinstance(chosen, tuple) and chosen and chosen[0] == "step":
        return slice(*chosen[1:])
    return chosen


@lru_cache(maxsize=256)
def _select(schema: KVSchema, layers: Any, heads: Any) -> Selection:
    layers, heads = _original(layers), _original(heads)
    ranges = schema.ranges(layers=layers, heads=heads)
    begins = [segment.offset for segment in schema.segments]
    touched: dict[int, None] = {}  # ordered; two ranges may touch one segment
    for wanted in ranges:
        first, stop = bisect_right(begins, wanted.offset) - 1, bisect_left(begins, wanted.end)
        touched.update(dict.fromkeys(range(first, stop)))
    return _selection(schema, list(touched), ranges, heads, None)


@lru_cache(maxsize=256)
def _select_shard(schema: KVSchema, shard: Shard) -> Selection:
    chosen = [
        segment
        for layer in range(len(schema.layers))
        for segment in schema.shard_segments(layer, shard)
    ]
    ranges: list[ByteRange] = []
    for segment in chosen:
        span = schema.segments[segment]
        if ranges and ranges[-1].end == span.offset:
            ranges[-1] = replace(ranges[-1], length=ranges[-1].length + span.length)
        else:
            ranges.append(span)
    return _selection(schema, chosen, tuple(ranges), None, shard)


def _selection(
    schema: KVSchema,
    segments: list[int],
    ranges: tuple[ByteRange, ...],
    heads: HeadRange | None,
    shard: Shard | None,
) -> Selection:
    nbytes = sum(r.length for r in ranges)
    spans = tuple((schema.segments[i].offset, schema.segments[i].length) for i in segments)
    lengths = [length for _, length in spans]
    starts = accumulate(lengths[:-1], initial=0)
    layers = [schema.layer_of(i) for i in segments]
    return Selection(
        schema,
        tuple(dict.fromkeys(layers)),
        heads,
        ranges,
        nbytes,
        np.array(segments, np.intp),
        spans,
        tuple(zip(starts, lengths, strict=True)),
        sum(lengths) == nbytes,
        _pieces(spans, layers),
        _pieces(spans, [0] * len(layers)),
        shard,
    )


def _pieces(spans: Sequence[tuple[int, int]], kinds: Sequence[int]) -> tuple[Piece, ...]:
    """Neighbours of one kind as one piece each."""
    firsts = [
        n
        for n, (offset, _) in enumerate(spans)
        if not n or sum(spans[n - 1]) != offset or kinds[n] != kinds[n - 1]
    ]
    pieces = []
    for first, end in pairwise([*firsts, len(spans)]):
        base = spans[first][0]
        inside = tuple((offset - base, length) for offset, length in spans[first:end])
        pieces.append(Piece(base, sum(inside[-1]), first, inside))
    return tuple(pieces)


class Layer:
    """One layer of one block. Arrays are [heads, tokens, dim] views of the schema's dtype
    (ml_dtypes for bfloat16 and float8), writable only in a reserved slot.

    For a quantised part the arrays are the quantised values, and `scales` are their factors;
    `dequantised` multiplies the two (docs/quantisation.md).
    """

    __slots__ = ("_payload", "index")

    def __init__(self, payload: Payload, index: int) -> None:
        self._payload = payload
        self.index = index

    @property
    def bytes(self) -> Bytes:
        """The layer's bytes, uint8, with only the selected heads: a view where these are
        contiguous, as all heads are. Raises InvalidInput if other layers were selected too."""
        if len(self._payload.selection.layers) != 1:
            raise InvalidInput("several layers were selected: take the bytes of the block")
        return self._payload.bytes

    @property
    def k(self) -> NDArray[Any]:
        """Keys; [heads, tokens, dim]."""
        return self.part("k")

    @property
    def v(self) -> NDArray[Any]:
        """Values; [heads, tokens, dim]."""
        return self.part("v")

    @property
    def latent(self) -> NDArray[Any]:
        """MLA's shared latent vectors; [1, tokens, dim]."""
        return self.part("latent")

    def part(self, name: str) -> NDArray[Any]:
        """The part `name` ("k", "v", "latent", "state", "data"); raises SchemaError for another."""
        return self._payload.array(self.index, name)

    def scales(self, name: str) -> NDArray[np.float32]:
        """The scales (factors) of a quantised part's values; [heads, groups of tokens].

        Raises SchemaError if there is no such part, or if it is not quantised.
        """
        return self._payload.scales(self.index, name)

    def dequantised(self, name: str) -> NDArray[np.float32]:
        """A quantised part dequantised: values times scales, a copy; [heads, tokens, dim].

        NaN where a group of tokens had a number that was not finite. Raises SchemaError as `scales`
        does.
        """
        scales, values = self.scales(name), self.part(name)
        heads, groups = scales.shape
        numbers = np.empty(values.shape, np.float32)
        grouped = numbers.reshape(heads, groups, -1)
        np.multiply(
            values.astype(np.float32).reshape(grouped.shape), scales[:, :, None], out=grouped
        )
        return numbers


class Payload:
    """Typed access to one block's bytes."""

    __slots__ = ("_memory", "_packed", "selection")

    def __init__(self, memory: Bytes, selection: Selection, *, packed: bool) -> None:
        self._memory: Bytes | None = memory
        self._packed = packed
        self.selection = selection

    @property
    def memory(self) -> Bytes:
        """The memory under this payload; raises ClientClosed once the lease has ended."""
        if self._memory is None:
            raise ClientClosed("this block's lease has ended; use it inside the `with` block")
        return self._memory

    def let_go(self) -> None:
        """Drop the memory at the end of the lease: no more views can be made."""
        self._memory = None

    @property
    def bytes(self) -> Bytes:
        """The selected bytes, uint8. A view if they are contiguous, else a packed copy."""
        memory, ranges = self.memory, self.selection.ranges
        if self._packed:
            return memory
        if len(ranges) == 1:
            return memory[ranges[0].offset : ranges[0].end]
        return np.concatenate([memory[r.offset : r.end] for r in ranges])

    def layer(self, index: int) -> Layer:
        """Layer `index` of the schema; raises SchemaError if the selection does not have it."""
        layers = self.selection.layers
        if index not in layers:
            if self.selection.shard is not None and layers[0] <= index <= layers[-1]:
                raise SchemaError(f"layer {index} is not split over ranks: rank 0 writes it")
            raise SchemaError(
                f"layer {index} is not among the layers of this result "
                f"({layers[0]} to {layers[-1]})"
            )
        return Layer(self, index)

    def array(self, layer: int, name: str) -> NDArray[Any]:
        """[heads, entries, dim] of one part, only the selected heads."""
        part, entries, runs = self._runs(layer, name)
        values = runs[:, : entries * part.row_bytes].view(part.numpy_dtype)
        return values.reshape(-1, entries, part.dim)

    def scales(self, layer: int, name: str) -> NDArray[np.float32]:
        """[heads, groups] of one quantised part, only the selected heads."""
        part, entries, runs = self._runs(layer, name)
        if not part.scale_tokens:
            raise SchemaError(f"{name} of layer {layer} is not quantised, it has no scales")
        return runs[:, entries * part.row_bytes :].view(SCALE)

    def _runs(self, layer: int, name: str) -> tuple[Part, int, Bytes]:
        """A part, its number of entries, and the bytes of its selected heads, one row a head."""
        selection = self.selection
        where = selection.where(layer, name)
        spec = selection.schema.layers[layer]
        part = next(part for part in spec.parts if part.name == name)
        entries = spec.entries(selection.schema.block_tokens)
        offset = selection.packed_offset(where) if self._packed else where.offset
        flat = self.memory[offset : offset + where.length]
        return part, entries, flat.reshape(-1, part.head_bytes(entries))


class Block(Payload):
    """One block of a `Blocks` result."""

    __slots__ = ("generation", "key")

    def __init__(
        self, memory: Bytes, selection: Selection, key: bytes, generation: int, *, packed: bool
    ) -> None:
        super().__init__(memory, selection, packed=packed)
        self.key = key
        self.generation = generation


@dataclass(frozen=True, slots=True)
class Missing:
    """A block that a get could not serve: its position in the prefix, and why.

    Reasons: "miss", "busy" (being written), "no_room" (no room to promote it to DRAM), "deadline",
    "corrupt" (damaged, and dropped), "medium" (the disk failed to read it), "behind" (an earlier
    block is missing, so this one could not be used).
    """

    index: int
    reason: str


class Blocks(Sequence[Block]):
    """The leading blocks of a prefix that a get could serve, in order; a context manager.

    `tokens` counts the tokens they cover. `missing` lists the other blocks with the reason of each;
    `complete` is True when none is missing. Views are valid until `release()` or the end of the
    `with` block.

    `make(index)` makes a block at its first access: a caller that gets 16 blocks only to know that
    they are there, or to pass their addresses to a kernel, does not pay for 16 objects.
    """

    def __init__(
        self, prefix: Prefix, count: int, reason: str | None, make: Callable[[int], Block]
    ) -> None:
        self.prefix = prefix
        self.reason = reason
        self._count = count
        self._make = make
        self._made: dict[int, Block] = {}

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Block: ...
    @overload
    def __getitem__(self, index: slice) -> list[Block]: ...
    def __getitem__(self, index: int | slice) -> Block | list[Block]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._count))]
        position = index + self._count if index < 0 else index
        if not 0 <= position < self._count:
            raise IndexError(f"block {index} of {self._count}")
        block = self._made.get(position)
        if block is None:
            block = self._made[position] = self._make(position)
        return block

    @property
    def tokens(self) -> int:
        """How many tokens these blocks cover."""
        return self._count * self.prefix.schema.block_tokens

    @property
    def complete(self) -> bool:
        """Whether this result has every block of the prefix."""
        return self._count == len(self.prefix)

    @property
    def missing(self) -> tuple[Missing, ...]:
        """The blocks of the prefix that the get could not serve."""
        return tuple(
            Missing(i, (self.reason or "miss") if i == self._count else "behind")
            for i in range(self._count, len(self.prefix))
        )

    def __repr__(self) -> str:
        why = "" if self.complete else f", then {self.reason}"
        return f"<Blocks {self._count} of {len(self.prefix)}, {self.tokens} tokens{why}>"


class Slot(Payload):
    """One reserved block to be written in place: `view` is its uint8 payload in the pool.

    `index` is its position in the prefix, `skip()` leaves it out of the commit. In a shard's slot,
    `layer(i)` returns this rank's heads; `view` is the whole block, and the rank may write only its
    own heads in it.
    """

    __slots__ = ("extent", "generation", "index", "offset", "published", "skipped")

    def __init__(
        self, extent: Bytes, selection: Selection, index: int, offset: int, generation: int
    ) -> None:
        begin = selection.schema.header_bytes
        super().__init__(
            extent[begin : begin + selection.schema.block_bytes], selection, packed=False
        )
        self.extent = extent
        self.index = index
        self.offset = offset
        self.generation = generation
        self.skipped = False
        # Set once a layer was published in place; what is published must not change any more.
        self.published: PublishedChecksums | None = None

    @property
    def view(self) -> Bytes:
        """The block's whole payload, uint8 [block_bytes], writable."""
        return self.memory

    def note_published(self, segments: Sequence[int], checksums: NDArray[np.uint64]) -> None:
        """Keep the checksums of published segments for the commit."""
        if self.published is None:
            self.published = PublishedChecksums(self.selection.schema)
        self.published.note(segments, checksums)

    def skip(self) -> None:
        """Do not commit this slot."""
        self.skipped = True
