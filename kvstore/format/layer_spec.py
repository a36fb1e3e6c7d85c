"""The specification of one layer of a block: its kind, its parts, and their sizes in bytes.

Use the constructors named after the kinds: `LayerSpec.gqa`, `.mla`, `.window` and so on.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from math import prod
from typing import Any, Final, Self

import ml_dtypes
import numpy as np

from ..errors import SchemaError
from ..text import shown
from .header import MAX_BLOCK_TOKENS

MAX_NAME_BYTES: Final = 1024
MAX_BLOCK_BYTES: Final = 16 << 30  # a hundred times Llama-3-70B's 160 MiB: more is a typing error
MAX_WINDOW_TOKENS: Final = 2**32 - 1

DTYPES: Final[dict[str, np.dtype[Any]]] = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
    "float8_e4m3": np.dtype(ml_dtypes.float8_e4m3fn),  # GPUs' and torch's variant, no inf
    "float8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
    "int8": np.dtype(np.int8),
    "uint8": np.dtype(np.uint8),
}
# The dtypes of quantised values, which have scales beside them (docs/quantisation.md).
QUANTISED: Final = ("float8_e4m3", "int8")
SCALE: Final = np.dtype("<f4")


class LayerKind(StrEnum):
    """How a layer's cache grows with tokens."""

    GQA = "gqa"  # K and V for every token
    MLA = "mla"  # one latent vector for every token; K and V are computed from it
    WINDOW = "window"  # K and V for the last w tokens only
    COMPRESSED = "compressed"  # K and V once per m tokens
    STATE = "state"  # constant size, whatever the number of tokens
    OPAQUE = "opaque"  # a fixed number of bytes in an engine's own packing


_KV: Final = ("k", "v")
PART_NAMES: Final = {
    LayerKind.GQA: _KV,
    LayerKind.MLA: ("latent",),
    LayerKind.WINDOW: _KV,
    LayerKind.COMPRESSED: _KV,
    LayerKind.STATE: ("state",),
    LayerKind.OPAQUE: ("data",),
}
# Kinds whose parts have a head axis. The others are the same on every tensor-parallel rank.
_SLICED: Final = frozenset({LayerKind.GQA, LayerKind.WINDOW, LayerKind.COMPRESSED})
# Kinds that have one entry, whatever the number of tokens.
_WHOLE: Final = frozenset({LayerKind.STATE, LayerKind.OPAQUE})


@dataclass(frozen=True, slots=True)
class Part:
    """One array of a layer: [heads, entries, dim]. Raises SchemaError for invalid sizes.

    With `scale_tokens` it is quantised: float32 scales follow each head's entries, one scale for
    every `scale_tokens` consecutive entries (an entry is a token; in a compressed layer it stands
    for several tokens).
    """

    name: str
    heads: int
    dim: int
    dtype: str
    scale_tokens: int = 0

    def __post_init__(self) -> None:
        check_int("heads", self.heads, 1, 65536)
        check_int("dim", self.dim, 1, MAX_BLOCK_BYTES)
        if not isinstance(self.dtype, str) or self.dtype not in DTYPES:
            raise SchemaError(f"unknown dtype {self.dtype!r}; known: {', '.join(DTYPES)}")
        check_int("scale_tokens", self.scale_tokens, 0, MAX_BLOCK_TOKENS)
        if self.scale_tokens and self.dtype not in QUANTISED:
            raise SchemaError(
                f"{self.name} is {self.dtype}, which has no scales: scale_tokens goes with"
                f" {' or '.join(QUANTISED)}"
            )

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        return DTYPES[self.dtype]

    @property
    def row_bytes(self) -> int:
        """Bytes of one entry of one head."""
        return self.dim * DTYPES[self.dtype].itemsize

    def scales(self, entries: int) -> int:
        """The number of scales of one head; 0 if the part is not quantised."""
        return entries // self.scale_tokens if self.scale_tokens else 0

    def head_bytes(self, entries: int) -> int:
        """Bytes of one head: its entries, followed by their scales."""
        return entries * self.row_bytes + self.scales(entries) * SCALE.itemsize


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """The specification of one layer. Use the constructors named after the kinds.

    Fields that a kind does not use have their defaults, so equal layers have equal specs.
    """

    kind: LayerKind
    parts: tuple[Part, ...]
    window_tokens: int = 0
    tokens_per_entry: int = 1
    shape: tuple[int, ...] = ()
    format: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.kind, LayerKind):
            raise SchemaError(f"unknown layer kind {self.kind!r}")
        if not isinstance(self.parts, tuple) or not isinstance(self.shape, tuple):
            raise SchemaError("parts and shape are tuples")
        names, expected = tuple(part.name for part in self.parts), PART_NAMES[self.kind]
        if names != expected:
            raise SchemaError(f"a {self.kind} layer has parts {expected}, not {names}")
        if self.kind not in _SLICED and self.parts[0].heads != 1:
            raise SchemaError(f"a {self.kind} layer has no head axis: heads must be 1")
        if self.kind in _WHOLE and self.parts[0].scale_tokens:
            raise SchemaError(f"a {self.kind} layer has no entries that could share a scale")
        lowest, highest = (1, MAX_WINDOW_TOKENS) if self.kind is LayerKind.WINDOW else (0, 0)
        check_int("window_tokens", self.window_tokens, lowest, highest)
        most = MAX_BLOCK_TOKENS if self.kind is LayerKind.COMPRESSED else 1
        check_int("tokens_per_entry", self.tokens_per_entry, 1, most)
        self._check_shape_and_format()

    def _check_shape_and_format(self) -> None:
        if self.kind is not LayerKind.STATE and self.shape:
            raise SchemaError(f"a {self.kind} layer has no shape")
        if self.kind is LayerKind.STATE and prod(self.shape) != self.parts[0].dim:
            raise SchemaError(f"shape {self.shape} does not have {self.parts[0].dim} elements")
        if self.kind is LayerKind.OPAQUE:
            check_name("format", self.format)
        elif self.format:
            raise SchemaError(f"a {self.kind} layer has no format")

    @classmethod
    def gqa(
        cls,
        *,
        kv_heads: int,
        head_dim: int,
        dtype: str,
        v_head_dim: int | None = None,
        v_dtype: str | None = None,
        scale_tokens: int = 0,
    ) -> Self:
        """K and V per token: multi-head, grouped-query and multi-query attention.

        `scale_tokens` quantises the parts with a quantised dtype: K and V, or one of them.
        """
        k = Part("k", kv_heads, head_dim, dtype)
        v_dim = head_dim if v_head_dim is None else v_head_dim
        v = Part("v", kv_heads, v_dim, dtype if v_dtype is None else v_dtype)
        return cls(LayerKind.GQA, _quantised((k, v), scale_tokens))

    @classmethod
    def mla(cls, *, latent_dim: int, rope_dim: int = 0, dtype: str, scale_tokens: int = 0) -> Self:
        """One vector of latent_dim + rope_dim per token, which K and V share."""
        check_int("latent_dim", latent_dim, 1, MAX_BLOCK_BYTES)
        check_int("rope_dim", rope_dim, 0, MAX_BLOCK_BYTES)
        latent = Part("latent", 1, latent_dim + rope_dim, dtype)
        return cls(LayerKind.MLA, _quantised((latent,), scale_tokens))

    @classmethod
    def window(
        cls,
        *,
        kv_heads: int,
        head_dim: int,
        dtype: str,
        window_tokens: int,
        scale_tokens: int = 0,
    ) -> Self:
        """K and V of a block's last `window_tokens` tokens; of all of them if it has fewer."""
        parts = tuple(Part(name, kv_heads, head_dim, dtype) for name in _KV)
        parts = _quantised(parts, scale_tokens)
        return cls(LayerKind.WINDOW, parts, window_tokens=window_tokens)

    @classmethod
    def compressed(
        cls,
        *,
        kv_heads: int,
        head_dim: int,
        dtype: str,
        tokens_per_entry: int,
        scale_tokens: int = 0,
    ) -> Self:
        """One K and V entry per `tokens_per_entry` tokens, which must divide block_tokens."""
        parts = tuple(Part(name, kv_heads, head_dim, dtype) for name in _KV)
        parts = _quantised(parts, scale_tokens)
        return cls(LayerKind.COMPRESSED, parts, tokens_per_entry=tokens_per_entry)

    @classmethod
    def state(
        cls,
        *,
        shape: Iterable[int] | None = None,
        dtype: str = "uint8",
        nbytes: int | None = None,
    ) -> Self:
        """The state after a block's last token: an array of `shape`, or just `nbytes` bytes."""
        if (shape is None) == (nbytes is None):
            raise SchemaError("a state layer has either a shape or nbytes")
        if nbytes is not None and dtype != "uint8":
            raise SchemaError("nbytes counts bytes; give a shape with the dtype instead")
        sizes = tuple(shape) if shape is not None else (nbytes,)
        checked = tuple(check_int("shape", size, 1, MAX_BLOCK_BYTES) for size in sizes)
        return cls(LayerKind.STATE, (Part("state", 1, prod(checked), dtype),), shape=checked)

    @classmethod
    def opaque(cls, *, nbytes: int, format: str) -> Self:
        """`nbytes` per block whose content only the engine knows; `format` names the packing."""
        return cls(LayerKind.OPAQUE, (Part("data", 1, nbytes, "uint8"),), format=format)

    def entries(self, block_tokens: int) -> int:
        """Rows along the token axis, per head, in a block of `block_tokens` tokens."""
        if self.kind in _WHOLE:
            return 1
        if self.kind is LayerKind.WINDOW:
            return min(self.window_tokens, block_tokens)
        return block_tokens // self.tokens_per_entry

    def part_bytes(self, part: Part, block_tokens: int) -> int:
        return part.heads * part.head_bytes(self.entries(block_tokens))

    def segment_bytes(self, block_tokens: int) -> int:
        """Bytes of this layer in one block."""
        return sum(self.part_bytes(part, block_tokens) for part in self.parts)

    @property
    def has_heads(self) -> bool:
        """Whether the layer has a head axis, so that a head range selects only a part of it."""
        return self.kind in _SLICED

    @property
    def quantised(self) -> bool:
        """Whether any part has scales."""
        return any(part.scale_tokens for part in self.parts)

    def misfit(self, block_tokens: int) -> str | None:
        """Why blocks of `block_tokens` tokens can't have this layer; None if they can."""
        if block_tokens % self.tokens_per_entry:
            return (
                f"one entry per {self.tokens_per_entry} tokens"
                f" does not divide {block_tokens} tokens"
            )
        entries = self.entries(block_tokens)
        for part in self.parts:
            if part.scale_tokens and entries % part.scale_tokens:
                return (
                    f"{part.name}: one scale per {part.scale_tokens} entries does not divide the"
                    f" {entries} of a block"
                )
        return None

    def unaligned(self, block_tokens: int) -> str | None:
        """The reason why float32 scales would not be aligned to 4 bytes, in a block or in some
        selection of its layers and heads; None if they are."""
        for part in self.parts:
            values_bytes = self.entries(block_tokens) * part.row_bytes
            if values_bytes % SCALE.itemsize:
                what = f"a head of {part.name}" if self.has_heads else part.name
                return (
                    f"{what} has {values_bytes} bytes; beside quantised parts it must be a multiple"
                    f" of {SCALE.itemsize}: choose another dim or block_tokens, or pad it"
                )
        return None


def _quantised(parts: tuple[Part, ...], scale_tokens: int) -> tuple[Part, ...]:
    """`parts`, with scales for those with a quantised dtype. Raises SchemaError."""
    if scale_tokens == 0:
        return parts
    if not any(part.dtype in QUANTISED for part in parts):
        return tuple(replace(part, scale_tokens=scale_tokens) for part in parts)  # raises
    return tuple(
        replace(part, scale_tokens=scale_tokens) if part.dtype in QUANTISED else part
        for part in parts
    )


def check_int(what: str, value: object, lowest: int, highest: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise SchemaError(f"{what} is an int, not {shown(value)}")
    if not lowest <= value <= highest:
        raise SchemaError(f"{what} is {shown(value)}; it must be in [{lowest}, {highest}]")
    return value


def check_name(what: str, value: object) -> None:
    if not isinstance(value, str) or not value:
        raise SchemaError(f"{what} is a non-empty str, not {value!r}")
    try:
        size_bytes = len(value.encode())
    except UnicodeEncodeError as error:
        raise SchemaError(f"{what} must encode as UTF-8: {error.reason}") from error
    if size_bytes > MAX_NAME_BYTES:
        raise SchemaError(f"{what} has {size_bytes} bytes of UTF-8; at most {MAX_NAME_BYTES}")
