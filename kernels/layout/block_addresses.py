"""The blocks of a call as addresses, checked before anything is written to them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..errors import DeviceError, LayoutError, RoomError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class BlockMemory:
    """The blocks of a call in memory: `addresses` int64 [n], and the bytes as uint8 tensors."""

    addresses: NDArray[np.int64]
    tensors: Sequence[Any]


def block_memory(
    blocks: Any, *, count: int, nbytes: int, device: Any, written: bool, pinned: bool = True
) -> BlockMemory:
    """`count` blocks of `nbytes` that kernels on `device` can reach.

    `blocks`: one uint8 tensor [count, nbytes or more], or a sequence of 1-D uint8 tensors or NumPy
    arrays that may lie anywhere. Read-only arrays, such as leased blocks, are for reading: torch
    has no read-only tensors, so a tensor over one never leaves this package. For a CUDA device
    blocks are on it, or pinned on the host, where a kernel reads and writes them over PCIe under
    the same addresses (unified addressing, as on every 64-bit Linux); `pinned=False` is for
    references, which can't reach the host from a device. Blocks that are `written` may not overlap.

    Raises LayoutError, RoomError (too few or too small, or overlapping) and DeviceError.
    """
    if isinstance(blocks, torch.Tensor):
        memory = _rows(blocks)
        smallest, elsewhere = int(blocks.shape[1]), [blocks] if blocks.device != device else []
    else:
        tensors = [_tensor(block, written=written) for block in blocks]
        memory, smallest, elsewhere = _separate(tensors, device)
    if len(memory.tensors) != count:
        raise RoomError(f"{len(memory.tensors)} blocks for a map of {count}")
    if smallest < nbytes:
        raise RoomError(f"a block has {smallest} bytes of room and needs {nbytes}")
    _check_reach(elsewhere, device, pinned)
    if written and count > 1:
        ordered = np.sort(memory.addresses)
        if np.diff(ordered).min() < nbytes:
            raise RoomError(f"two blocks of {nbytes} bytes overlap")
    return memory


def _rows(blocks: Any) -> BlockMemory:
    if blocks.dim() != 2 or blocks.dtype != torch.uint8:
        raise LayoutError(f"blocks are uint8 [n, nbytes], not {blocks.dtype} {tuple(blocks.shape)}")
    if blocks.shape[1] > 1 and blocks.stride(1) != 1:
        raise LayoutError("a block's bytes are not contiguous")
    count = int(blocks.shape[0])
    addresses = int(blocks.data_ptr()) + np.arange(count, dtype=np.int64) * int(blocks.stride(0))
    return BlockMemory(addresses, blocks)


def _separate(tensors: list[Any], device: Any) -> tuple[BlockMemory, int, list[Any]]:
    """The blocks, the bytes of the smallest, and those that are not on the device."""
    addresses, elsewhere, smallest = [], [], 1 << 63
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor) or tensor.dtype is not torch.uint8:
            raise LayoutError("a block is a uint8 tensor or array")
        if tensor.dim() != 1 or not tensor.is_contiguous():
            raise LayoutError(f"a block is one contiguous axis, not of shape {tuple(tensor.shape)}")
        if tensor.device != device:
            elsewhere.append(tensor)
        smallest = min(smallest, tensor.numel())
        addresses.append(tensor.data_ptr())
    return BlockMemory(np.array(addresses, np.int64), tensors), smallest, elsewhere


def device_of(block: Any) -> Any:
    """The device of a block; an array is on the host."""
    return block.device if isinstance(block, torch.Tensor) else torch.device("cpu")


class _Bytes:
    """An array's memory, not marked as read-only; keeps the array alive."""

    def __init__(self, array: NDArray[np.uint8]) -> None:
        self._array = array
        self.__array_interface__ = array.__array_interface__ | {
            "data": (array.__array_interface__["data"][0], False)
        }


def _tensor(block: Any, *, written: bool) -> Any:
    """The block as a tensor for these kernels, which only read it unless it is `written`."""
    if not isinstance(block, np.ndarray):
        return block
    if block.dtype != np.uint8 or not block.flags.c_contiguous:
        raise LayoutError(
            f"a block is contiguous uint8, not {block.dtype} in steps {block.strides}"
        )
    if written and not block.flags.writeable:
        raise LayoutError("a block that is to be filled is memory that can't be written")
    return host_tensor(block)


def host_tensor(array: NDArray[Any]) -> Any:
    """A tensor over an array's memory. If the array is read-only, only read the tensor: torch knows
    no read-only tensors."""
    return torch.from_numpy(array if array.flags.writeable else np.asarray(_Bytes(array)))


def _check_reach(elsewhere: Sequence[Any], device: Any, pinned: bool) -> None:
    if elsewhere and not pinned:
        raise DeviceError(
            f"the reference on {device} does not reach memory on {elsewhere[0].device}"
        )
    # An allocation is pinned as a whole: the driver is asked once for all blocks of an arena.
    distinct = {tensor.untyped_storage().data_ptr(): tensor for tensor in elsewhere}
    for tensor in distinct.values():
        reachable = device.type == "cuda" and tensor.device.type == "cpu" and tensor.is_pinned()
        if not reachable:
            raise DeviceError(
                f"a block on {tensor.device} can't be reached from {device}"
                + (": pin the host memory" if tensor.device.type == "cpu" else "")
            )
