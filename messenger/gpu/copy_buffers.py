"""The arguments of a copier's submit: buffers, ranges in them, their addresses. No copies happen
here.

A tensor is memory of the device or of the host, an array is memory of the host. On a copier of
device `cpu`, tensors stand for device memory: so the same calls take the same paths.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from ..errors import RangeError
from ..shm.host_copy import byte_view
from .copy_plan import CopyRows, Direction, concatenate
from .pinning import partly_registered, registration

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

# A contiguous torch tensor of any dtype, or any buffer that `byte_view` accepts.
Memory: TypeAlias = Any


@dataclass(frozen=True, slots=True)
class Copies:
    """Many ranges from one buffer to another: bytes, int64 [n] each, in any order.

    For thousands of pieces: pairs of slices would cost microseconds each before any byte moves.
    """

    target: Memory
    source: Memory
    target_offsets: NDArray[np.int64]
    source_offsets: NDArray[np.int64]
    lengths: NDArray[np.int64]


# (target, source): copies all bytes of the source over the target.
Pair: TypeAlias = tuple[Memory, Memory]


@dataclass(frozen=True, slots=True)
class Asked:
    """One group after checking: its ranges, their direction, and whether the host's side is pinned
    and reachable by a kernel."""

    rows: CopyRows
    direction: Direction
    pinned: bool
    reachable: bool


class _Place(NamedTuple):
    address: int
    nbytes: int
    owner: int  # the start of the allocation, or of the registration, that it lies in
    on_device: bool
    pinned: bool
    reachable: bool
    writable: bool


def look_at(groups: Sequence[Sequence[Pair | Copies]], device: Any) -> list[Asked]:
    """Check each group and compute its ranges. Raises RangeError for ranges outside their buffers,
    lengths that differ, memory that is not contiguous, read-only or of another device, and for
    groups of different directions: one submit has one direction. A group of no ranges has the
    direction of the others."""
    owners: dict[tuple[int, int], int] = {}
    ways: set[Direction] = set()
    looked = [_group(group, device, owners, ways) for group in groups]
    if len(ways) > 1:
        raise RangeError(f"one submit goes one way, not {sorted(way.value for way in ways)}")
    way = ways.pop() if ways else Direction.WITHIN
    return [Asked(rows, way, *host) for rows, host in looked]


def _group(
    group: Sequence[Pair | Copies],
    device: Any,
    owners: dict[tuple[int, int], int],
    ways: set[Direction],
) -> tuple[CopyRows, tuple[bool, bool]]:
    """(ranges, (pinned, reachable)) of one group. All pairs together become one array: an array per
    pair would cost more than everything else."""
    singles: list[tuple[int, int, int, int]] = []
    several: list[CopyRows] = []
    pinned = reachable = True
    for asked in group:
        target = _place(asked.target if isinstance(asked, Copies) else asked[0], device)
        source = _place(asked.source if isinstance(asked, Copies) else asked[1], device)
        if not target.writable:
            raise RangeError("the target of a copy is read-only memory")
        way = _direction(target, source, device)
        ways.add(way)
        if way is not Direction.WITHIN:
            host = source if target.on_device else target
            pinned, reachable = pinned and host.pinned, reachable and host.reachable
        owner = owners.setdefault((target.owner, source.owner), len(owners))
        if isinstance(asked, Copies):
            several.append(_rows(asked, target, source, owner))
        elif target.nbytes != source.nbytes:
            raise RangeError(f"a target of {target.nbytes} bytes for a source of {source.nbytes}")
        else:
            singles.append((target.address, source.address, target.nbytes, owner))
    columns = np.array(singles, np.int64).reshape(-1, 4).T
    return concatenate([CopyRows(*columns), *several]), (pinned, reachable)


def _rows(asked: Copies, target: _Place, source: _Place, owner: int) -> CopyRows:
    to, come, lengths = _columns(asked.target_offsets, asked.source_offsets, asked.lengths)
    _check_inside(to, lengths, target, "target")
    _check_inside(come, lengths, source, "source")
    owners = np.full(len(lengths), owner, np.int64)
    return CopyRows(to + target.address, come + source.address, lengths, owners)


def _columns(*columns: NDArray[np.int64]) -> tuple[NDArray[np.int64], ...]:
    arrays = [np.asarray(column) for column in columns]
    if any(a.ndim != 1 or a.shape != arrays[0].shape or a.dtype.kind not in "iu" for a in arrays):
        raise RangeError("offsets and lengths are three arrays of whole numbers, equally long")
    return tuple(a.astype(np.int64) for a in arrays)


def _check_inside(
    offsets: NDArray[np.int64], lengths: NDArray[np.int64], place: _Place, what: str
) -> None:
    # Compares without adding two large numbers, whose sum could overflow.
    inside = (lengths >= 0) & (offsets >= 0) & (lengths <= place.nbytes - offsets)
    if not inside.all():
        i = int(np.argmin(inside))
        raise RangeError(
            f"range {i} ({lengths[i]} bytes at {offsets[i]}) is not inside a {what} of "
            f"{place.nbytes} bytes"
        )


def _direction(target: _Place, source: _Place, device: Any) -> Direction:
    if target.on_device == source.on_device:
        if not target.on_device and device.type != "cpu":
            raise RangeError(f"neither end is on {device}; use tiffin.messenger.shm.host_copy")
        return Direction.WITHIN
    return Direction.TO_DEVICE if target.on_device else Direction.FROM_DEVICE


def _place(memory: Memory, device: Any) -> _Place:
    if hasattr(memory, "data_ptr"):
        return _tensor_place(memory, device)
    array = byte_view(memory)
    address = int(array.__array_interface__["data"][0])
    entry = registration(address, len(array), device.type)
    return _Place(
        address=address,
        nbytes=len(array),
        owner=address if entry is None else entry.start,
        on_device=False,
        pinned=entry is not None,
        reachable=entry is not None and entry.kernels,
        writable=bool(array.flags.writeable),
    )


def check_plain(tensor: Any) -> None:
    """Raise RangeError for a tensor whose values are not its memory's bytes in order."""
    if tensor.is_conj() or tensor.is_neg():
        raise RangeError(
            "a tensor with its conjugate or negative bit set has other numbers in its memory; pass "
            "tensor.resolve_conj().resolve_neg()"
        )
    try:
        contiguous = tensor.is_contiguous()
        tensor.data_ptr()
    except RuntimeError as error:  # sparse, fake, and the like
        raise RangeError(f"a tensor without memory of its own: {error}") from error
    if not contiguous:
        raise RangeError("a tensor that is not contiguous has no byte order; copy it first")


def _tensor_place(tensor: Any, device: Any) -> _Place:
    check_plain(tensor)
    address, nbytes = int(tensor.data_ptr()), int(tensor.numel() * tensor.element_size())
    owner = int(tensor.untyped_storage().data_ptr())
    if tensor.device == device:
        return _Place(address, nbytes, owner, True, True, True, True)
    if tensor.device.type != "cpu":
        raise RangeError(f"a tensor on {tensor.device} for a copier of {device}")
    entry = registration(address, nbytes, device.type)
    pinned = entry is not None or (
        not partly_registered(address, nbytes, device.type) and bool(tensor.is_pinned())
    )
    return _Place(
        address=address,
        nbytes=nbytes,
        owner=owner if entry is None else entry.start,
        on_device=False,
        pinned=pinned,
        reachable=pinned if entry is None else entry.kernels,
        writable=True,
    )
