"""Blocks in HBM that another process on this host reads where they lie.

The exporter's message says where its memory is and what is in it; the reader copies blocks into
memory of its own and compares the checksums there. Nobody holds anything for anybody: what the
message says may be out of date, and then the checksums differ and the block is a miss. Checking the
exporter's memory before the copy would prove nothing about the copy.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Annotated, Any, Self

import msgspec
import numpy as np

from tiffin.kernels.errors import KernelError
from tiffin.messenger.device_region import DeviceRegion
from tiffin.messenger.errors import MessengerError

from ..block import KEY_BYTES, MAX_BLOCK_TOKENS, MAX_SEGMENTS, TOKEN_BYTES
from ..errors import InvalidInput, ProtocolError, SchemaError, TierUnavailable, VersionMismatch
from ..node.messages import NOT_A_MESSAGE
from .below import spans_of
from .memory import spans_at

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..keys import Prefix
    from ..schema import KVSchema
    from .held import HbmBlock

EXPORT_VERSION = 1
# A GPU of 192 GiB has fewer blocks of 64 MiB; of small models it has more than anyone lists.
EXPORT_BLOCKS_MAX = 65536

_Key = Annotated[bytes, msgspec.Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
_Number = Annotated[int, msgspec.Meta(ge=0, le=2**62)]


class ExportedBlock(msgspec.Struct, frozen=True, array_like=True):
    """One block: `tokens` and `checksums` are uint32 and uint64, little-endian."""

    key: _Key
    tokens: Annotated[bytes, msgspec.Meta(max_length=MAX_BLOCK_TOKENS * TOKEN_BYTES)]
    offset: _Number
    generation: _Number
    checksums: Annotated[bytes, msgspec.Meta(max_length=MAX_SEGMENTS * 8)]


class Export(msgspec.Struct, frozen=True, array_like=True):
    """`region` is a `DeviceRegion`'s descriptor; `schema` is the fingerprint of the blocks'."""

    version: int
    region: Annotated[bytes, msgspec.Meta(max_length=4096)]
    schema: _Key
    blocks: Annotated[list[ExportedBlock], msgspec.Meta(max_length=EXPORT_BLOCKS_MAX)]


_decoder = msgspec.msgpack.Decoder(Export)


def export_blocks(region: DeviceRegion, schema: KVSchema, blocks: Sequence[HbmBlock]) -> bytes:
    """The message about these blocks. Raises InvalidInput for too many of them."""
    if len(blocks) > EXPORT_BLOCKS_MAX:
        raise InvalidInput(f"{len(blocks)} blocks in one export; the limit is {EXPORT_BLOCKS_MAX}")
    exported = [
        ExportedBlock(
            block.key,
            block.entry.prefix.token_bytes(block.entry.index),
            block.offset,
            block.generation,
            block.entry.checksums.astype("<u8").tobytes(),
        )
        for block in blocks
    ]
    message = Export(EXPORT_VERSION, region.descriptor(), schema.fingerprint, exported)
    return msgspec.msgpack.encode(message)


class ImportedBlocks:
    """Blocks of another process. A context manager; one thread at a time."""

    def __init__(self, region: DeviceRegion, schema: KVSchema, export: Export) -> None:
        """Not for callers: see `attach`."""
        import torch

        self.schema = schema
        self._torch: Any = torch
        self._region = region
        self._blocks = {block.key: block for block in export.blocks}
        self._spans = spans_of(schema)

    def match(self, prefix: Prefix) -> int:
        """How many leading blocks of `prefix` the message names. Raises SchemaError."""
        if prefix.schema_fingerprint != self.schema.fingerprint:
            raise SchemaError("this prefix is of another schema than the exported blocks")
        for index, key in enumerate(prefix.keys):
            block = self._blocks.get(key)
            if block is None or block.tokens != prefix.token_bytes(index):
                return index
        return len(prefix)

    def read(self, prefix: Prefix, into: Any) -> int:
        """Copy the leading blocks of `prefix` into `into`, a contiguous tensor, uint8 [blocks,
        block_bytes] with room for at least those that match. Returns how many leading ones arrived
        right; the others have gone stale, and what `into` holds of them is undefined.

        On a GPU it begins behind what the current stream has, and returns when all is there.
        Raises SchemaError, InvalidInput for another tensor, TierUnavailable if the device refuses.
        """
        wanted = self.match(prefix)
        rows = self._rows(into, wanted)
        blocks = [self._blocks[key] for key in prefix.keys[:wanted]]
        if not blocks:
            return 0
        try:
            self._copy(rows, blocks)
            good = self._leading(rows, blocks)
        except (RuntimeError, KernelError, MessengerError) as error:
            raise TierUnavailable(f"blocks of another process are out of reach: {error}") from error
        return good

    def _rows(self, into: Any, count: int) -> Any:
        block_bytes, device = self.schema.block_bytes, self._region.tensor.device
        fits = (
            isinstance(into, self._torch.Tensor)
            and into.dtype == self._torch.uint8
            and into.device == device
            and into.is_contiguous()
            and into.ndim == 2
            and into.shape[0] >= count
            and into.shape[1] == block_bytes
        )
        if not fits:
            raise InvalidInput(
                f"`into` is a contiguous uint8 tensor on {device} (of `attach`), of at least "
                f"{count} rows of {block_bytes} bytes"
            )
        return into[:count]

    def _copy(self, rows: Any, blocks: Sequence[ExportedBlock]) -> None:
        """Queued on the current stream; the checksums queue behind them."""
        memory, nbytes = self._region.tensor, self.schema.block_bytes
        for row, block in zip(rows, blocks, strict=True):
            row.copy_(memory[block.offset : block.offset + nbytes], non_blocking=True)

    def _leading(self, rows: Any, blocks: Sequence[ExportedBlock]) -> int:
        from tiffin.kernels.checksum import segment_checksums

        on_gpu = rows.device.type == "cuda"
        context = self._torch.cuda.device(rows.device) if on_gpu else contextlib.nullcontext()
        starts = [i * self.schema.block_bytes for i in range(len(blocks))]
        with context:
            found = segment_checksums(rows.reshape(-1), spans_at(starts, self._spans))
        for i, sums in enumerate(found.reshape(len(blocks), -1)):
            if not np.array_equal(sums, np.frombuffer(blocks[i].checksums, "<u8")):
                return i
        return len(blocks)

    def close(self) -> None:
        """Let go of the exporter's memory. A second call does nothing."""
        self._region.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def attach(
    message: bytes, schema: KVSchema, *, fds: Sequence[int] = (), device: str | None = None
) -> ImportedBlocks:
    """What another process on this host exported. `fds` came beside it and are taken over, also
    when this raises. `device` is where it will be read: the exporter's own GPU without one.

    Raises ProtocolError for bytes that are no export, VersionMismatch for one of another version,
    SchemaError if it is of blocks of another schema, TierUnavailable if the memory cannot be
    reached from here.
    """
    try:
        export = _decode(message, schema)
    except BaseException:
        for fd in fds:
            with contextlib.suppress(OSError):  # EBADF: it never was a descriptor
                os.close(fd)
        raise
    try:
        region = DeviceRegion.attach(export.region, fds=fds, device=device)
    except (MessengerError, *NOT_A_MESSAGE) as error:
        raise TierUnavailable(f"the exporter's memory is out of reach: {error}") from error
    for block in export.blocks:
        if block.offset + schema.block_bytes > region.nbytes:
            region.close()
            raise ProtocolError(f"a block at {block.offset} of {region.nbytes} exported bytes")
    return ImportedBlocks(region, schema, export)


def _decode(message: bytes, schema: KVSchema) -> Export:
    try:
        export = _decoder.decode(message)
    except NOT_A_MESSAGE as error:
        raise ProtocolError(f"not an export of blocks: {error}") from error
    if export.version != EXPORT_VERSION:
        raise VersionMismatch(f"an export of version {export.version}, not {EXPORT_VERSION}")
    if export.schema != schema.fingerprint:
        raise SchemaError("the exported blocks are of another schema")
    if any(len(block.checksums) != 8 * len(schema.segments) for block in export.blocks):
        raise ProtocolError("an exported block has not as many checksums as its schema segments")
    return export
