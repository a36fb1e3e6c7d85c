"""Checks callers' payloads and target buffers and converts them to flat uint8 views.

Accepted: numpy arrays, CPU torch tensors, bytes, bytearrays, memoryviews. A typed array is accepted
as a payload only if the whole schema is of that dtype: an array of another dtype with the right
number of bytes is the classic way to store garbage.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ...errors import InvalidInput, SchemaError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ...format.schema import KVSchema

    Bytes = NDArray[np.uint8]

_RAW = ("uint8", "int8")
_BYTES = np.dtype(np.uint8)


def _flat(data: Any, what: str) -> tuple[Bytes, str]:
    """A flat uint8 view of `data` and the name of its dtype."""
    if type(data) is np.ndarray and data.dtype is _BYTES and data.flags.c_contiguous:
        return data.reshape(-1), "uint8"  # the usual case, in a third of the time
    if type(data).__module__.split(".")[0] == "torch":
        return _flat_tensor(data, what)
    if isinstance(data, np.ma.MaskedArray):
        raise InvalidInput(f"{what} is a masked array; pass its values, such as .filled(0)")
    try:
        # Convert subclasses (a matrix) to plain arrays: their slices differ.
        array = np.asarray(data) if isinstance(data, np.ndarray) else np.frombuffer(data, np.uint8)
    except (TypeError, ValueError, BufferError) as error:
        raise InvalidInput(f"{what} is not a buffer of bytes: {error}") from error
    if not array.flags.c_contiguous:
        raise InvalidInput(f"{what} has gaps (not C-contiguous); pass numpy.ascontiguousarray")
    if array.dtype.hasobject or not array.dtype.isnative:
        raise InvalidInput(f"{what} has dtype {array.dtype.str}; pass numbers in native byte order")
    return array.reshape(-1).view(np.uint8), array.dtype.name


def _flat_tensor(tensor: Any, what: str) -> tuple[Bytes, str]:
    import torch

    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
        kind = getattr(tensor, "layout", type(tensor).__name__)
        raise InvalidInput(f"{what} is no dense tensor, but {kind}; pass tensor.to_dense()")
    if tensor.device.type != "cpu":
        raise InvalidInput(f"{what} is on {tensor.device}; pass tensor.cpu()")
    if tensor.is_conj() or tensor.is_neg():
        raise InvalidInput(
            f"{what} has its conjugate or negative bit set: other numbers are in its memory; "
            "pass tensor.resolve_conj().resolve_neg()"
        )
    try:
        if not tensor.is_contiguous():
            raise InvalidInput(f"{what} has gaps; pass tensor.contiguous()")
        flat = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    except (TypeError, RuntimeError) as error:  # nested, masked, fake, inside vmap, and the like
        raise InvalidInput(f"{what} is a tensor without memory of its own: {error}") from error
    return flat, str(tensor.dtype).removeprefix("torch.")


def payload_views(schema: KVSchema, payloads: Sequence[Any], count: int) -> list[Bytes]:
    """One flat uint8 view [block_bytes] per payload, as the source of a copy.

    Raises InvalidInput for a wrong number of payloads and SchemaError for a wrong size or dtype.
    """
    try:
        given = len(payloads)
        payloads[:0]  # refuses sets and dictionaries
    except (TypeError, LookupError, OverflowError) as error:
        raise InvalidInput(
            f"payloads are a sequence, one per block, not {type(payloads).__name__}"
        ) from error
    if given != count:
        raise InvalidInput(
            f"{given} payloads for {count} blocks: pass one per full block of "
            f"{schema.block_tokens} tokens"
        )
    return [_payload(schema, payload, f"payload {i}") for i, payload in enumerate(payloads)]


def _payload(schema: KVSchema, payload: Any, what: str) -> Bytes:
    flat, dtype = _flat(payload, what)
    if dtype not in _RAW:
        wanted = {part.numpy_dtype.name for layer in schema.layers for part in layer.parts}
        if wanted != {dtype}:
            raise SchemaError(
                f"{what} is of dtype {dtype}, the schema of {', '.join(sorted(wanted))}; "
                "pass raw bytes (uint8) if that is meant"
            )
    if flat.nbytes != schema.block_bytes:
        raise SchemaError(f"{what} has {flat.nbytes} bytes; a block has {schema.block_bytes}")
    return flat


def target_views(into: Any, count: int, nbytes: int) -> list[Bytes]:
    """`count` writable flat views of `nbytes` each: from one buffer per block, or one large one.

    Raises InvalidInput for read-only memory and wrong sizes.
    """
    if isinstance(into, list | tuple):
        views = [_target(buffer, f"buffer {i}") for i, buffer in enumerate(into)]
    else:
        whole = _target(into, "the buffer")
        if whole.nbytes != count * nbytes:
            raise InvalidInput(
                f"the buffer has {whole.nbytes} bytes; {count} blocks of {nbytes} need "
                f"{count * nbytes}"
            )
        views = [whole[i * nbytes : (i + 1) * nbytes] for i in range(count)]
    if len(views) != count:
        raise InvalidInput(f"{len(views)} buffers for {count} blocks; pass one per block")
    for i, view in enumerate(views):
        if view.nbytes != nbytes:
            raise InvalidInput(f"buffer {i} has {view.nbytes} bytes; this get needs {nbytes}")
    return views


def _target(buffer: Any, what: str) -> Bytes:
    flat, _ = _flat(buffer, what)
    if not flat.flags.writeable:
        raise InvalidInput(f"{what} is read-only")
    return flat
