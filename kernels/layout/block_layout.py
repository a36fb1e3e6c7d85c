"""Where a block stores each head of each part of each layer; the terms that all kernels share.

Both sides of a move come down to *lanes*. A lane is one head of one part (K, V or a latent) of one
layer. In the engine's cache the row of token t lies at

    address + page(t) * page_stride + slot(t) * token_stride        row_bytes, contiguous

and in a block at `offset + t * row_bytes`, as a block is layer → part → head → token → dim. So
every engine's layout, every range of layers or heads, and every tensor-parallel order is only
another table of (address, offset), and one kernel serves them all. `PagedCache` (engine_cache.py)
has the addresses, `BlockLayout` the offsets; lanes.py joins them.

Layers and heads are always numbered as in the *model*. The cache of a tensor-parallel rank has the
number of its first head, that of a pipeline stage the numbers of its layers, and a slice of a block
keeps the numbers of the whole block: nothing is renumbered, and what both sides have is moved.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np

from ..errors import LayoutError
from .engine_cache import PagedCache, row_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

Selection = tuple[int, int] | slice | range


class _Part(Protocol):
    @property
    def heads(self) -> int: ...
    @property
    def row_bytes(self) -> int: ...


class _Layer(Protocol):
    @property
    def kind(self) -> str: ...
    @property
    def parts(self) -> Sequence[_Part]: ...
    @property
    def has_heads(self) -> bool: ...
    def entries(self, block_tokens: int) -> int: ...
    def part_bytes(self, part: Any, block_tokens: int) -> int: ...


class Schema(Protocol):
    """What this package needs of a `tiffin.kvstore.format.schema.KVSchema`, which it may not import
    (kvstore is above it)."""

    @property
    def block_tokens(self) -> int: ...
    @property
    def layers(self) -> Sequence[Any]: ...


@dataclass(frozen=True, slots=True)
class BlockPart:
    """One part of one layer of a block: `heads` runs, each `rows` rows and then a tail.

    `rows` belong to the block's last `rows` tokens (all of them, except in a window), unless
    `per_token` is False: then they are a state or an engine's own packing, which has a place in the
    block but no lanes. `sliced`: whether it has a head axis; if not, every rank has the same. The
    tail is what a format stores after a head's rows, such as the scales of a quantised part: the
    next run begins after it, and kernels that know the format find it at `rows * row_bytes`.
    """

    heads: int
    rows: int
    row_bytes: int
    tail_bytes: int = 0
    sliced: bool = True
    per_token: bool = True

    def __post_init__(self) -> None:
        if min(self.heads, self.rows, self.row_bytes) < 1 or self.tail_bytes < 0:
            raise LayoutError(f"no such part: {self}")

    @property
    def run_bytes(self) -> int:
        """Bytes of one head: its rows and its tail."""
        return self.rows * self.row_bytes + self.tail_bytes


@dataclass(frozen=True, slots=True)
class BlockShape:
    """The parts of every layer that a block of `tokens` tokens stores, in whatever order."""

    tokens: int
    layers: tuple[tuple[BlockPart, ...], ...]
    most_heads: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        if self.tokens < 1 or not self.layers or not all(self.layers):
            raise LayoutError("a block has at least one token, and every layer at least one part")
        if any(part.per_token and part.rows > self.tokens for ps in self.layers for part in ps):
            raise LayoutError(f"a part has more rows than the block's {self.tokens} tokens")
        most = max(part.heads for parts in self.layers for part in parts)
        object.__setattr__(self, "most_heads", most)

    @classmethod
    def gqa(
        cls,
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        itemsize: int,
        tokens: int,
        v_head_dim: int | None = None,
    ) -> Self:
        """K and V in every layer, `itemsize` bytes per element."""
        dims = (head_dim, head_dim if v_head_dim is None else v_head_dim)
        parts = tuple(BlockPart(kv_heads, tokens, dim * itemsize) for dim in dims)
        return cls(tokens, (parts,) * layers)

    @classmethod
    def mla(cls, *, layers: int, dim: int, itemsize: int, tokens: int) -> Self:
        """One latent per token in every layer."""
        part = BlockPart(1, tokens, dim * itemsize, sliced=False)
        return cls(tokens, ((part,),) * layers)

    @classmethod
    def of_schema(cls, schema: Schema) -> Self:
        """The shape of a KVSchema's blocks.

        Entries of compressed layers, states and opaque bytes are not rows of tokens: they have a
        place but no lanes. A part's tail is its bytes beyond its rows.
        """
        tokens = schema.block_tokens
        return cls(tokens, tuple(_schema_parts(layer, tokens) for layer in schema.layers))

    @classmethod
    def of_cache(cls, cache: PagedCache, tokens: int) -> Self:
        """The shape of a model that has just this cache's layers, from 0 on, and its heads.

        A layer of one part is a latent, the same on every rank.
        """
        if cache.first_head or cache.layer_ids != tuple(range(len(cache.layers))):
            raise LayoutError(
                "this cache is a part of a model: describe the model's blocks instead"
            )
        return cls(
            tokens,
            tuple(
                tuple(
                    BlockPart(int(view.shape[2]), tokens, row_bytes(view), sliced=len(parts) > 1)
                    for view in parts
                )
                for parts in cache.layers
            ),
        )


def _schema_parts(layer: _Layer, tokens: int) -> tuple[BlockPart, ...]:
    per_token = str(layer.kind) in ("gqa", "mla", "window")
    rows = layer.entries(tokens)
    parts = []
    for part in layer.parts:
        run_bytes = layer.part_bytes(part, tokens) // part.heads
        tail_bytes = run_bytes - rows * part.row_bytes
        parts.append(
            BlockPart(part.heads, rows, part.row_bytes, tail_bytes, layer.has_heads, per_token)
        )
    return tuple(parts)


def rank_heads(heads: int, rank: int, ranks: int) -> tuple[int, int]:
    """The heads, (first, end), of a tensor-parallel rank.

    With more ranks than heads, `ranks / heads` of them have a copy of the same head, neighbours
    first, as vLLM and SGLang share them: rank r has head `r * heads // ranks`. Raises LayoutError
    if neither number divides the other.
    """
    if ranks < 1 or not 0 <= rank < ranks:
        raise LayoutError(f"rank {rank} of {ranks}")
    if heads % ranks and ranks % heads:
        raise LayoutError(f"{heads} heads can't be shared by {ranks} ranks")
    first = rank * heads // ranks
    return first, first + max(1, heads // ranks)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class BlockLayout:
    """Where each head's run begins in a block.

    `runs`: int64 [n, 4], one row of (layer, part, head, offset) per run, with the model's numbers.
    A head may have several runs (copies on several ranks): a gather fills them all, a scatter reads
    the first. `nbytes`: of the whole block. Layouts compare and hash by value.

    Every order is a constructor that fills this table; a new order needs no new kernel.
    """

    shape: BlockShape
    runs: NDArray[np.int64]
    nbytes: int
    name: str = "block"
    _hash: int = field(init=False)

    def __post_init__(self) -> None:
        self.runs.flags.writeable = False
        content = hash((self.shape, self.nbytes, self.runs.tobytes()))
        object.__setattr__(self, "_hash", content)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, BlockLayout):
            return NotImplemented
        return self is other or (
            self._hash == other._hash
            and self.nbytes == other.nbytes
            and self.shape == other.shape
            and np.array_equal(self.runs, other.runs)
        )

    def __repr__(self) -> str:
        return f"<BlockLayout {self.name}: {len(self.runs)} runs, {self.nbytes} bytes>"

    @property
    def tokens(self) -> int:
        return self.shape.tokens

    def offset(self, layer: int, part: int, head: int) -> int:
        """Where a head's first run begins. Raises LayoutError if the block has no such head."""
        found = np.flatnonzero((self.runs[:, :3] == (layer, part, head)).all(axis=1))
        if not len(found):
            raise LayoutError(f"no layer {layer}, part {part}, head {head} in {self!r}")
        return int(self.runs[found[0], 3])

    @classmethod
    def canonical(cls, shape: BlockShape) -> Self:
        """The pool's order: layer → part → head → token → dim, without gaps."""
        return cls._packed(shape, range(len(shape.layers)), None, "canonical")

    @classmethod
    def slice(
        cls,
        shape: BlockShape,
        *,
        layers: Selection | None = None,
        heads: Selection | None = None,
    ) -> Self:
        """Some layers and heads of a block, packed in the same order.

        Ranges are half-open and ascending, as in `KVSchema.ranges`; parts without a head axis are
        taken whole. Raises LayoutError for layers or heads that do not exist.
        """
        chosen = select("layers", layers, len(shape.layers))
        return cls._packed(shape, chosen, heads, "slice")

    @classmethod
    def rank(cls, shape: BlockShape, rank: int, ranks: int) -> Self:
        """One tensor-parallel rank's share of a block, packed: the heads that its engine has."""
        runs, nbytes = _share(shape, rank, ranks)
        return cls(shape, runs, nbytes, f"rank {rank} of {ranks}")

    @classmethod
    def rank_major(cls, shape: BlockShape, ranks: int) -> Self:
        """The shares of ranks 0, 1, ... one after the other, as engines' own stores keep them.

        Ranks beyond the number of heads have copies (`rank_heads`), and parts without a head axis
        are copied to all ranks. Raises LayoutError if neither of `ranks` and the number of heads
        divides the other.
        """
        shares = [_share(shape, rank, ranks) for rank in range(ranks)]
        begins = np.cumsum([0, *(nbytes for _, nbytes in shares)])
        tables = [
            runs + np.array((0, 0, 0, begin))
            for (runs, _), begin in zip(shares, begins, strict=False)
        ]
        return cls(shape, np.concatenate(tables), int(begins[-1]), f"rank-major, {ranks} ranks")

    @classmethod
    def _packed(
        cls, shape: BlockShape, layers: Iterable[int], heads: Selection | None, name: str
    ) -> Self:
        chosen = []
        for layer in layers:
            for index, part in enumerate(shape.layers[layer]):
                span = select("heads", heads if part.sliced else None, part.heads)
                chosen.append((layer, index, part, span))
        runs, nbytes = _pack(chosen)
        return cls(shape, runs, nbytes, name)


def _share(shape: BlockShape, rank: int, ranks: int) -> tuple[NDArray[np.int64], int]:
    chosen = []
    for layer, parts in enumerate(shape.layers):
        for index, part in enumerate(parts):
            span = rank_heads(part.heads, rank, ranks) if part.sliced else (0, part.heads)
            chosen.append((layer, index, part, range(*span)))
    return _pack(chosen)


def _pack(chosen: Iterable[tuple[int, int, BlockPart, range]]) -> tuple[NDArray[np.int64], int]:
    """The table of these heads' runs one after the other, and their bytes."""
    tables, offset = [], 0
    for layer, index, part, heads in chosen:
        table = np.empty((len(heads), 4), np.int64)
        table[:, :2] = layer, index
        table[:, 2] = heads
        table[:, 3] = offset + np.arange(len(heads)) * part.run_bytes
        tables.append(table)
        offset += len(heads) * part.run_bytes
    return np.concatenate(tables), offset


def select(what: str, chosen: Selection | None, count: int) -> range:
    """A selection as a non-empty ascending range with step 1 inside [0, count).

    Raises LayoutError for any other: clipping it silently would move less than was asked for.
    """
    if chosen is None:
        return range(count)
    span = range(*chosen) if isinstance(chosen, tuple) and len(chosen) == 2 else chosen
    if isinstance(span, slice):
        first = 0 if span.start is None else span.start
        end = count if span.stop is None else span.stop
        span = range(first, end, 1 if span.step is None else span.step)
    if (
        not isinstance(span, range)
        or span.step != 1
        or not len(span)
        or span.start < 0
        or span.stop > count
    ):
        raise LayoutError(f"{what} {chosen} selects no consecutive range of the {count} there are")
    return span


__all__ = [
    "BlockLayout",
    "BlockPart",
    "BlockShape",
    "PagedCache",
    "Schema",
    "Selection",
    "rank_heads",
    "select",
]
