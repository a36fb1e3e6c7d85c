"""The expected headers of a prefix's blocks. Only this module compares them. Pure: no I/O."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import CorruptBlock
from .header import verify_identity

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from .keys import Prefix


class ExpectedHeaders:
    """Keys, parents, fingerprints and tokens of a prefix's blocks; a block's offset and generation
    come with its lease."""

    __slots__ = ("_fingerprints", "_keys", "_prefix", "_shape", "_tokens")

    def __init__(self, prefix: Prefix) -> None:
        self._prefix = prefix
        self._shape = prefix.schema.header
        self._keys = prefix.keys
        self._tokens = prefix.token_chunks()
        self._fingerprints = prefix.schema_fingerprint + prefix.namespace_fingerprint

    def leading(
        self,
        raws: Iterable[bytes],
        offsets: Sequence[int],
        generations: Sequence[int],
        first: int = 0,
    ) -> list[bytes]:
        """Those of `raws`, copies of headers without the zeros at their end, as far as they are of
        the blocks from `first` on. They lie at `offsets`."""
        end = first + len(offsets)
        return self._shape.leading(
            raws,
            offsets,
            generations,
            self._keys[first:end],
            self._parent(first),
            self._fingerprints,
            self._tokens[first:end],
        )

    def check(self, index: int, raw: bytes, generation: int, offset: int) -> None:
        """Raise CorruptBlock or VersionMismatch, which name what differs, unless `raw`, a whole
        header, is the header of block `index`."""
        if self.leading([raw[: self._shape.used_bytes]], [offset], [generation], index):
            return
        verify_identity(
            raw,
            self._keys[index],
            self._parent(index),
            self._prefix.schema_fingerprint,
            self._prefix.namespace_fingerprint,
            generation,
            self._tokens[index],
            offset_expected=offset,
        )
        raise CorruptBlock("another block's header: its sizes or its algorithm differ")

    def _parent(self, index: int) -> bytes:
        return self._keys[index - 1] if index else self._prefix.parent
