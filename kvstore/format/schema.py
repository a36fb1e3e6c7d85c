"""The schema of a block: the layout of its payload, byte for byte.

A schema is a tuple of layer specs. It determines a block's size, each layer's segment, and the byte
range of any (layer, part, head range). The order is

    layer → part (K, V) → head → token → dim          contiguous, without padding

and, where a part is quantised, each head's float32 scales follow its tokens (docs/quantisation.md),
so that one layer is one range, and so are one tensor-parallel rank's heads of one part: ranks of
any degree read the same block, each its own slices. Engines keep `[page, token, head, dim]`;
kernels convert on load and save.

A segment is a byte range with its own checksum: one layer, or with `shards=n` one of n equal groups
of heads of one part of a layer, so that one rank's slice can be written, moved and verified alone.
"""

import json
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Final, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tiffin.messenger.shm.host_copy import XXH3_64, Algorithm

from ..errors import SchemaError
from ..sizes import format_bytes
from .header import (
    CHECKSUMS,
    MAX_BLOCK_TOKENS,
    MAX_SEGMENTS,
    PAGE_BYTES,
    HeaderShape,
    header_bytes,
)
from .keys import Extras, Prefix, TokenIds
from .layer_spec import (
    DTYPES,
    MAX_BLOCK_BYTES,
    PART_NAMES,
    LayerKind,
    LayerSpec,
    Part,
    check_int,
    check_name,
)
from .shard import AnyShard, Shard, check_shard

__all__ = [
    "DTYPES",
    "HASHES",
    "MAX_BLOCK_BYTES",
    "MAX_LAYERS",
    "SCHEMA_FORMAT",
    "AnyShard",
    "ByteRange",
    "HeadRange",
    "KVSchema",
    "LayerKind",
    "LayerRange",
    "LayerSpec",
    "Part",
    "Shard",
]

SCHEMA_FORMAT: Final = "tiffin-schema-1"
HASHES: Final = ("xxh3_128", "sha256", "blake2b")
MAX_LAYERS: Final = MAX_SEGMENTS

_Range: TypeAlias = range  # KVSchema has a method of that name
HeadRange: TypeAlias = tuple[int, int] | slice | range
LayerRange: TypeAlias = int | tuple[int, int] | slice | range


@dataclass(frozen=True, slots=True)
class ByteRange:
    """`length` bytes from `offset` on, counted from the start of a payload."""

    offset: int
    length: int

    @property
    def end(self) -> int:
        return self.offset + self.length


@dataclass(frozen=True, slots=True, repr=False)
class KVSchema:
    """The block layout of one model. Equal schemas have equal fingerprints.

    Raises SchemaError for anything that describes no valid block; there are no later checks.
    """

    model: str
    layers: tuple[LayerSpec, ...]
    block_tokens: int = 512
    hash: str = "xxh3_128"
    shards: int = 1  # groups of heads with checksums of their own, in layers that they divide
    checksum: Algorithm = XXH3_64  # of each segment; a GPU can compute xxh3_64_pages
    block_bytes: int = field(init=False, compare=False)  # payload, without the header
    header_bytes: int = field(init=False, compare=False)
    extent_bytes: int = field(init=False, compare=False)  # header and payload, in whole pages
    spans: tuple[ByteRange, ...] = field(init=False, compare=False)  # one per layer
    segments: tuple[ByteRange, ...] = field(init=False, compare=False)  # what checksums cover
    segment_bytes: NDArray[np.uint64] = field(init=False, compare=False)  # [segments], read-only
    first_segments: tuple[int, ...] = field(init=False, compare=False)  # of each layer, and the end
    header: HeaderShape = field(init=False, compare=False)  # how its blocks' headers are made
    fingerprint: bytes = field(init=False, compare=False)  # 16 bytes

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", _as_layers(self.layers))
        check_name("model", self.model)
        check_int("block_tokens", self.block_tokens, 1, MAX_BLOCK_TOKENS)
        if self.hash not in HASHES:
            raise SchemaError(f"unknown hash {self.hash!r}; known: {', '.join(HASHES)}")
        if self.checksum not in tuple(CHECKSUMS):
            raise SchemaError(f"unknown checksum {self.checksum!r}; known: {', '.join(CHECKSUMS)}")
        quantised = any(layer.quantised for layer in self.layers)
        for index, layer in enumerate(self.layers):
            wrong = layer.misfit(self.block_tokens)
            if wrong is None and quantised:
                wrong = layer.unaligned(self.block_tokens)
            if wrong is not None:
                raise SchemaError(f"layer {index}: {wrong}")
        spans = _tile(layer.segment_bytes(self.block_tokens) for layer in self.layers)
        block_bytes = spans[-1].end
        if block_bytes > MAX_BLOCK_BYTES:
            raise SchemaError(
                f"a block would have {format_bytes(block_bytes)}; "
                f"at most {format_bytes(MAX_BLOCK_BYTES)}"
            )
        object.__setattr__(self, "spans", spans)
        segments = self._cut_segments()
        head_bytes = header_bytes(len(segments), self.block_tokens)
        extent_bytes = -(-(head_bytes + block_bytes) // PAGE_BYTES) * PAGE_BYTES
        header = HeaderShape(
            segment_bytes=self.segment_bytes,
            token_count=self.block_tokens,
            extent_bytes=extent_bytes,
            algorithm=self.checksum,
        )
        object.__setattr__(self, "segments", segments)
        object.__setattr__(self, "header", header)
        object.__setattr__(self, "block_bytes", block_bytes)
        object.__setattr__(self, "header_bytes", head_bytes)
        object.__setattr__(self, "extent_bytes", extent_bytes)
        digest = blake2b(self.canonical_bytes(), digest_size=16).digest()
        object.__setattr__(self, "fingerprint", digest)

    def _cut_segments(self) -> tuple[ByteRange, ...]:
        """The segments of all layers; stores `first_segments` and `segment_bytes` too."""
        check_int("shards", self.shards, 1, MAX_SEGMENTS)
        if self.shards > 1 and not any(self.splits(layer) for layer in range(len(self.layers))):
            raise SchemaError(
                f"shards={self.shards} divides the heads of no layer, so there is nothing to split"
            )
        firsts, lengths = [0], []
        for layer, spec in enumerate(self.layers):
            if self.splits(layer):
                for part in spec.parts:
                    group_bytes = spec.part_bytes(part, self.block_tokens) // self.shards
                    lengths += [group_bytes] * self.shards
            else:
                lengths.append(self.spans[layer].length)
            firsts.append(len(lengths))
        if len(lengths) > MAX_SEGMENTS:
            raise SchemaError(
                f"{len(self.layers)} layers with shards={self.shards} make {len(lengths)} segments;"
                f" a header has room for {MAX_SEGMENTS}"
            )
        sizes = np.array(lengths, np.uint64)
        sizes.flags.writeable = False
        object.__setattr__(self, "segment_bytes", sizes)
        object.__setattr__(self, "first_segments", tuple(firsts))
        return _tile(lengths) if self.shards > 1 else self.spans

    @classmethod
    def of(
        cls,
        model: str,
        specs: Iterable[LayerSpec],
        *,
        block_tokens: int = 512,
        hash: str = "xxh3_128",
        shards: int = 1,
        checksum: Algorithm = XXH3_64,
    ) -> Self:
        """A schema with one spec per layer, for models that mix kinds.

        With `shards`, layers whose heads it divides are split; the others keep one segment each.
        """
        return cls(
            model=model,
            layers=tuple(specs),
            block_tokens=block_tokens,
            hash=hash,
            shards=shards,
            checksum=checksum,
        )

    @classmethod
    def gqa(
        cls,
        *,
        model: str,
        layers: int,
        kv_heads: int,
        head_dim: int,
        dtype: str,
        v_head_dim: int | None = None,
        v_dtype: str | None = None,
        block_tokens: int = 512,
        hash: str = "xxh3_128",
        shards: int = 1,
        scale_tokens: int = 0,
        checksum: Algorithm = XXH3_64,
    ) -> Self:
        """A model whose layers all keep K and V for every token: Llama, Qwen, Mistral.

        `shards`: the largest tensor-parallel degree whose ranks write or read slices of a block
        independently; it divides `kv_heads`, and every other degree divides it. `scale_tokens`:
        quantised, with one scale per head and `scale_tokens` tokens (block_tokens: one per head).
        """
        spec = LayerSpec.gqa(
            kv_heads=kv_heads,
            head_dim=head_dim,
            dtype=dtype,
            v_head_dim=v_head_dim,
            v_dtype=v_dtype,
            scale_tokens=scale_tokens,
        )
        specs = _repeat(spec, layers)
        return cls(
            model=model,
            layers=specs,
            block_tokens=block_tokens,
            hash=hash,
            shards=shards,
            checksum=checksum,
        )

    @classmethod
    def mla(
        cls,
        *,
        model: str,
        layers: int,
        latent_dim: int,
        rope_dim: int = 0,
        dtype: str,
        block_tokens: int = 512,
        hash: str = "xxh3_128",
        scale_tokens: int = 0,
        checksum: Algorithm = XXH3_64,
    ) -> Self:
        """A model whose layers all keep one latent vector per token: DeepSeek.

        `scale_tokens`: quantised, with one scale per `scale_tokens` tokens.
        """
        spec = LayerSpec.mla(
            latent_dim=latent_dim, rope_dim=rope_dim, dtype=dtype, scale_tokens=scale_tokens
        )
        specs = _repeat(spec, layers)
        return cls(
            model=model, layers=specs, block_tokens=block_tokens, hash=hash, checksum=checksum
        )

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __repr__(self) -> str:
        kinds = [str(layer.kind) for layer in self.layers]
        counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
        size_mib = self.block_bytes / (1 << 20)
        return (
            f"<KVSchema {self.model!r} layers: {counts};"
            f" {self.block_tokens} tokens = {size_mib:.1f} MiB; {self.fingerprint.hex()}>"
        )

    def canonical_bytes(self) -> bytes:
        """Every field that can change a block's bytes or its header's checksums, as compact ASCII
        JSON (docs/schema.md)."""
        layers = [
            [
                str(layer.kind),
                [_canonical(part) for part in layer.parts],
                layer.window_tokens,
                layer.tokens_per_entry,
                list(layer.shape),
                layer.format,
            ]
            for layer in self.layers
        ]
        content = [SCHEMA_FORMAT, self.model, self.hash, self.block_tokens, layers]
        if self.shards > 1:
            content.append(self.shards)
        if self.checksum != XXH3_64:
            content.append(self.checksum)
        return json.dumps(content, ensure_ascii=True, separators=(",", ":")).encode("ascii")

    def range(self, layer: int, part: str, heads: HeadRange | None = None) -> ByteRange:
        """Where one part of one layer, or a half-open range of its heads, lies in the payload.

        `heads` takes `(first, end)`, a slice or a range. Parts without a head axis (latent, state,
        data) are the same on every tensor-parallel rank and are returned whole. Raises SchemaError.
        """
        check_int("layer", layer, 0, len(self.layers) - 1)
        for name, span in self._parts(layer, heads):
            if name == part:
                return span
        names = PART_NAMES[self.layers[layer].kind]
        raise SchemaError(f"layer {layer} has parts {names}, not {part!r}")

    def ranges(
        self, layers: LayerRange | None = None, heads: HeadRange | None = None
    ) -> tuple[ByteRange, ...]:
        """The smallest list of ranges that covers these layers and heads, in payload order.

        `layers` is one index, `(first, end)`, a slice or a range, half-open and ascending; None is
        all of them. `heads` as in `range`. Raises SchemaError for selections that are empty or do
        not exist.
        """
        spans: list[ByteRange] = []
        for layer in _select("layers", layers, len(self.layers)):
            for span in self._spans(layer, heads):
                if spans and spans[-1].end == span.offset:
                    spans[-1] = ByteRange(spans[-1].offset, spans[-1].length + span.length)
                else:
                    spans.append(span)
        return tuple(spans)

    def splits(self, layer: int) -> bool:
        """Whether `shards` splits this layer: it has heads, and `shards` divides their number in
        each part. Otherwise the layer is one segment, which rank 0 writes for all ranks."""
        spec = self.layers[layer]
        return (
            self.shards > 1
            and spec.has_heads
            and all(part.heads % self.shards == 0 for part in spec.parts)
        )

    def layer_segments(self, layer: int) -> _Range:
        """The indices of a layer's segments."""
        return range(self.first_segments[layer], self.first_segments[layer + 1])

    def layer_of(self, segment: int) -> int:
        """The layer of a segment."""
        return bisect_right(self.first_segments, segment) - 1

    def check_shard(self, shard: AnyShard | None) -> Shard | None:
        """`shard`, if the writer's slice is whole segments; None for the only writer of a block.

        Raises SchemaError.
        """
        return check_shard(self, shard)

    def shard_segments(self, layer: int, shard: AnyShard) -> list[int]:
        """The indices of the layer's segments that one writer writes."""
        shard = Shard(*shard)
        rank, ranks = shard.rank, shard.ranks
        first = self.first_segments[layer]
        if not shard.holds(layer):
            return []
        if not self.splits(layer):
            return [] if rank else [first]
        each = self.shards // ranks
        groups = range(rank * each, (rank + 1) * each)
        parts = range(len(self.layers[layer].parts))
        return [first + part * self.shards + group for part in parts for group in groups]

    def shard_range(self, layer: int, part: str, shard: Shard) -> ByteRange:
        """Where one rank's heads of one part lie; the whole part if the layer is not split.

        Raises SchemaError.
        """
        whole = self.range(layer, part)
        if not self.splits(layer):
            return whole
        rank, ranks = shard.rank, shard.ranks
        return ByteRange(whole.offset + rank * (whole.length // ranks), whole.length // ranks)

    def prefix(
        self,
        token_ids: TokenIds,
        namespace: str = "",
        secret: bytes = b"",
        extras: Extras | None = None,
    ) -> Prefix:
        """The blocks of a prompt and their keys. Raises TokenError and InvalidInput."""
        return Prefix(self, token_ids, namespace=namespace, secret=secret, extras=extras)

    def _spans(self, layer: int, heads: HeadRange | None) -> Iterable[ByteRange]:
        if heads is None or not self.layers[layer].has_heads:
            return (self.spans[layer],)
        return (span for _, span in self._parts(layer, heads))

    def _parts(self, layer: int, heads: HeadRange | None) -> Iterator[tuple[str, ByteRange]]:
        spec = self.layers[layer]
        offset = self.spans[layer].offset
        for part in spec.parts:
            part_bytes = spec.part_bytes(part, self.block_tokens)
            if heads is None or not spec.has_heads:
                yield part.name, ByteRange(offset, part_bytes)
            else:
                chosen = _select("heads", heads, part.heads)
                head_bytes = part_bytes // part.heads
                first_offset = offset + chosen.start * head_bytes
                yield part.name, ByteRange(first_offset, len(chosen) * head_bytes)
            offset += part_bytes


def _canonical(part: Part) -> list[str | int]:
    """A part's fields; `scale_tokens` only if it is quantised, so that the canonical form of other
    parts is as before."""
    fields: list[str | int] = [part.name, part.heads, part.dim, part.dtype]
    return [*fields, part.scale_tokens] if part.scale_tokens else fields


def _select(what: str, chosen: LayerRange | None, count: int) -> _Range:
    """A selection as a non-empty ascending range with step 1 inside [0, count)."""
    if chosen is None:
        return range(count)
    if isinstance(chosen, slice):
        span = range(*chosen.indices(count))
        # an open end is clipped as in any slice; an explicit end beyond `count` is an error
        if isinstance(chosen.stop, int) and chosen.stop > count:
            raise SchemaError(f"{what} {chosen} goes beyond the {count} there are")
    elif isinstance(chosen, range):
        span = chosen
    elif isinstance(chosen, tuple) and len(chosen) == 2:
        first = check_int(what, chosen[0], 0, count)
        span = range(first, check_int(what, chosen[1], 0, count))
    else:
        first = check_int(what, chosen, 0, count - 1)
        span = range(first, first + 1)
    if not span or span.step != 1 or span.start < 0 or span.stop > count:
        raise SchemaError(f"{what} {chosen} selects no consecutive range of the {count} there are")
    return span


def _tile(sizes: Iterable[int]) -> tuple[ByteRange, ...]:
    spans = []
    offset = 0
    for size_bytes in sizes:
        spans.append(ByteRange(offset, size_bytes))
        offset += size_bytes
    return tuple(spans)


def _as_layers(layers: Iterable[LayerSpec]) -> tuple[LayerSpec, ...]:
    if not isinstance(layers, list | tuple):
        raise SchemaError("layers is a sequence of LayerSpec; KVSchema.gqa and .mla take a count")
    check_int("the number of layers", len(layers), 1, MAX_LAYERS)
    if not all(isinstance(layer, LayerSpec) for layer in layers):
        raise SchemaError("every layer is a LayerSpec")
    return tuple(layers)


def _repeat(spec: LayerSpec, layers: int) -> tuple[LayerSpec, ...]:
    return (spec,) * check_int("layers", layers, 1, MAX_LAYERS)
