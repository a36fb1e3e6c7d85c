"""What a reader or writer holds: blocks of a prefix as views, by layer, part and head range.

A `Payload` knows where each (layer, part) lies in the bytes it stands for, and hands out typed
arrays over them, never copies. Two shapes of bytes occur: a whole block in the pool, of which a
range was asked for (`offset` positions), and caller memory into which only the range was packed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from .errors import ClientClosed, InvalidInput, SchemaError

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from .keys import Prefix
    from .schema import ByteRange, HeadRange, KVSchema, LayerRange

    Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Selection:
    """A choice of layers and heads of a schema: the byte ranges of one block that it needs.

    `ranges` are positions in the whole payload, ascending and coalesced; `nbytes` is their sum, and
    the size of a buffer for `get(into=...)`. `spans` are (offset, length) of each chosen layer's
    whole segment: what a checksum covers.
    """

    schema: KVSchema
    layers: tuple[int, ...]
    heads: HeadRange | None
    ranges: tuple[ByteRange, ...]
    nbytes: int
    spans: tuple[tuple[int, int], ...]

    @property
    def contiguous(self) -> bool:
        """Whether the selection is one run of bytes of a block."""
        return len(self.ranges) == 1

    def packed_offset(self, wanted: ByteRange) -> int:
        """Where a range that lies in the selection begins when the selection is packed."""
        before = 0
        for held in self.ranges:
            if held.offset <= wanted.offset and wanted.end <= held.end:
                return before + wanted.offset - held.offset
            before += held.length
        raise InvalidInput(f"bytes [{wanted.offset}, {wanted.end}) were not asked for")


def select(
    schema: KVSchema, layers: LayerRange | None = None, heads: HeadRange | None = None
) -> Selection:
    """The selection of `layers` (an index, (a, b), slice or range) and `heads` (half-open).

    Raises SchemaError for what the schema does not have.
    """
    return _select(schema, _hashable(layers), _hashable(heads))


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
    chosen = tuple(
        index
        for index, segment in enumerate(schema.segments)
        if any(r.offset < segment.end and segment.offset < r.end for r in ranges)
    )
    spans = tuple((schema.segments[i].offset, schema.segments[i].length) for i in chosen)
    return Selection(schema, chosen, heads, ranges, sum(r.length for r in ranges), spans)


class Layer:
    """One layer of one block. Arrays are [heads, tokens, dim] views of the schema's dtype
    (ml_dtypes for bfloat16 and float8), writable only in a reserved slot."""

    __slots__ = ("_payload", "index")

    def __init__(self, payload: Payload, index: int) -> None:
        self._payload = payload
        self.index = index

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
        """The part called `name` ("k", "v", "latent", "state", "data"); SchemaError if none is."""
        return self._payload.array(self.index, name)


class Payload:
    """Typed access to one block's bytes."""

    __slots__ = ("_memory", "_packed", "selection")

    def __init__(self, memory: Bytes, selection: Selection, *, packed: bool) -> None:
        self._memory: Bytes | None = memory
        self._packed = packed
        self.selection = selection

    @property
    def memory(self) -> Bytes:
        """All bytes this payload stands on; raises ClientClosed once they were let go."""
        if self._memory is None:
            raise ClientClosed("this block's lease has ended; use it inside the `with` block")
        return self._memory

    def let_go(self) -> None:
        """The lease ended: no more views."""
        self._memory = None

    @property
    def bytes(self) -> Bytes:
        """The selected bytes, uint8. A view where they are one run, else a packed copy."""
        memory, ranges = self.memory, self.selection.ranges
        if self._packed:
            return memory
        if len(ranges) == 1:
            return memory[ranges[0].offset : ranges[0].end]
        return np.concatenate([memory[r.offset : r.end] for r in ranges])

    def layer(self, index: int) -> Layer:
        """Layer `index` of the schema; SchemaError if it was not asked for."""
        if index not in self.selection.layers:
            raise SchemaError(
                f"layer {index} is not among the layers of this result "
                f"({self.selection.layers[0]} to {self.selection.layers[-1]})"
            )
        return Layer(self, index)

    def array(self, layer: int, name: str) -> NDArray[Any]:
        """[heads, entries, dim] of one part, only the selected heads."""
        selection = self.selection
        schema = selection.schema
        where = schema.range(layer, name, heads=selection.heads)
        part = next(part for part in schema.layers[layer].parts if part.name == name)
        offset = selection.packed_offset(where) if self._packed else where.offset
        flat = self.memory[offset : offset + where.length].view(part.numpy_dtype)
        return flat.reshape(-1, schema.layers[layer].entries(schema.block_tokens), part.dim)


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

    Reasons: "miss", "busy" (being written), "no_room" (could not be brought into DRAM), "deadline",
    "corrupt" (was damaged, and was dropped), "medium" (the disk refused), "behind" (an earlier
    block is missing, so this one could not be used).
    """

    index: int
    reason: str


class Blocks(Sequence[Block]):
    """The leading blocks of a prefix that a get could serve, in order; a context manager.

    `tokens` counts the tokens they cover. `missing` says what is not here and why; `complete` is
    True when nothing is missing. Views are valid until `release()` or the end of the `with` block.

    Blocks are made when they are looked at, by `make(index)`: whoever gets 16 blocks to know that
    they are there, or to hand their addresses to a kernel, does not pay for 16 objects.
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
        """Tokens covered by the blocks that are here."""
        return self._count * self.prefix.schema.block_tokens

    @property
    def complete(self) -> bool:
        """Whether every block that was asked for is here."""
        return self._count == len(self.prefix)

    @property
    def missing(self) -> tuple[Missing, ...]:
        """The blocks that are not here."""
        return tuple(
            Missing(i, (self.reason or "miss") if i == self._count else "behind")
            for i in range(self._count, len(self.prefix))
        )

    def __repr__(self) -> str:
        why = "" if self.complete else f", then {self.reason}"
        return f"<Blocks {self._count} of {len(self.prefix)}, {self.tokens} tokens{why}>"


class Slot(Payload):
    """One reserved block to be written in place: `view` is its uint8 payload in the pool.

    `index` is its position in the prefix, `skip()` leaves it out of the commit.
    """

    __slots__ = ("extent", "generation", "index", "offset", "skipped")

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

    @property
    def view(self) -> Bytes:
        """The block's whole payload, uint8 [block_bytes], writable."""
        return self.memory

    def skip(self) -> None:
        """Do not commit this slot."""
        self.skipped = True
