"""Many small ranges of bytes, copied by one kernel from a table of addresses, without tensors.

A copy engine takes one descriptor per range and is slow at ranges below some 32 KiB (for sources
see `tiffin.messenger.gpu.copy_plan`). A kernel has no such cost: a row of its table is 24 bytes,
and rows are shared by as many programs as the caller allows. Addresses may be of device memory or
of pinned host memory, which a GPU reads and writes in place over PCIe (unified addressing).

Addresses are not checked: the caller that makes the table knows the memory, keeps it alive until
the copy has ended and has refused overlaps (a row may be copied before or after any other). Only
shapes, signs and sizes are checked here.

`copy_ranges_host` is the same copy for host memory, and the reference in tests of the kernel.
"""

from __future__ import annotations

import ctypes
import functools
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import backend
from ..errors import DeviceError, LayoutError
from ..layout.access_width import alignment, word_type

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Addresses = NDArray[np.int64]

# What a program moves at a time: with 8 warps, 64 bytes per thread in four loads of 16.
CHUNK_BYTES = 16 << 10
_CHUNK_BYTES_MIN = 512
# Bytes of loads in flight that keep a PCIe link busy: 55 GB/s × about 1.5 us there and back is
# 82 KB; three times that. An estimate, not measured.
_IN_FLIGHT_BYTES = 256 << 10
_LINK_PROGRAMS_MIN, _LINK_PROGRAMS_MAX = 16, 64

# One call of memmove from Python costs about as much as 64 records of a NumPy copy by index.
_RECORDS_PER_RANGE_MAX = 64
# From this size on a memmove of each range is faster than records, which are copied twice: 21
# against 17 GB/s at 128 KiB, 10 against 12 at 16 KiB (AMD EPYC, one thread; one plain copy: 21).
_MEMMOVE_BYTES = 64 << 10
# Records gathered before they are scattered again: they stay in a core's L2 cache.
_GATHERED_BYTES = 512 << 10


def link_programs(chunk_bytes: int) -> int:
    """How many programs keep a PCIe link busy with rows of `chunk_bytes`: few, as each occupies
    part of an SM while the link is busy."""
    return min(_LINK_PROGRAMS_MAX, max(_LINK_PROGRAMS_MIN, _IN_FLIGHT_BYTES // chunk_bytes))


def check_ranges(
    targets: Addresses, sources: Addresses, lengths: Addresses
) -> tuple[Addresses, Addresses, Addresses]:
    """The three as int64 arrays [n], without ranges of no bytes.

    Raises LayoutError for arrays that differ in shape, negative lengths and null addresses.
    """
    three = [np.asarray(column) for column in (targets, sources, lengths)]
    if any(column.ndim != 1 or column.shape != three[0].shape for column in three):
        raise LayoutError(
            f"a table needs three columns of one length, not {[c.shape for c in three]}"
        )
    if any(column.dtype != np.int64 for column in three):
        raise LayoutError(f"addresses and lengths are int64, not {[c.dtype.name for c in three]}")
    some = three[2] != 0
    if not some.all():
        three = [column[some] for column in three]
    if len(three[0]) and min(int(column.min()) for column in three) <= 0:
        raise LayoutError("a range has a negative length or starts at address 0")
    return three[0], three[1], three[2]


def chunk_table(
    targets: Addresses, sources: Addresses, lengths: Addresses, chunk_bytes: int = CHUNK_BYTES
) -> Addresses:
    """Ranges, cut into rows of at most `chunk_bytes`: int64 [3, rows], target, source, length."""
    counts = -(-lengths // chunk_bytes)
    which = np.repeat(np.arange(len(lengths)), counts)
    firsts = np.cumsum(counts) - counts
    at = (np.arange(len(which)) - firsts[which]) * chunk_bytes
    table = np.empty((3, len(which)), np.int64)
    np.add(targets[which], at, out=table[0])
    np.add(sources[which], at, out=table[1])
    np.minimum(lengths[which] - at, chunk_bytes, out=table[2])
    return table


def copy_ranges(
    targets: Addresses,
    sources: Addresses,
    lengths: Addresses,
    *,
    device: Any,
    programs: int | None = None,
) -> None:
    """Copy each range in one launch on the current stream of `device`, a torch device.

    `programs` bounds the grid; None is one for each row up to four per SM. Ranges must not overlap,
    and their memory must stay until the stream has passed the launch. Costs the host one launch and
    one small pinned copy (the table), whatever the number of ranges.

    Raises LayoutError for a bad table and DeviceError when there is no Triton for the device.
    """
    targets, sources, lengths = check_ranges(targets, sources, lengths)
    if programs is not None and programs < 1:
        raise LayoutError(f"programs={programs}; at least 1 has to run")
    if not len(lengths):
        return
    kernel = _kernel()
    import torch

    from ..launching import multiprocessors, on_stream, upload

    device = torch.device(device)
    on_host = device.type == "cpu"
    if on_host and not backend.interpreted():
        raise DeviceError("Triton has no kernels for a CPU; use copy_ranges_host")
    chunk_bytes = _chunk_bytes(int(lengths.max()))
    align = alignment(targets, sources, lengths)
    word_bytes = min(8, align)
    words = (word_type(word_bytes), word_bytes, align, chunk_bytes)
    table = chunk_table(targets, sources, lengths, chunk_bytes)
    rows = table.shape[1]
    with on_stream(device):
        # torch's allocators know that the stream uses this memory, so it may be freed here.
        uploaded = upload(table, device)
        most = programs or (rows if on_host else 4 * multiprocessors(device))
        warps = max(1, chunk_bytes // 2048)
        # There is nothing to fuse; without enable_fp_fusion Triton warns of its default.
        kernel[(min(rows, most),)](uploaded, rows, *words, num_warps=warps, enable_fp_fusion=False)


def copy_ranges_host(targets: Addresses, sources: Addresses, lengths: Addresses) -> None:
    """Copy each range of host memory, in this thread; the reference of `copy_ranges`.

    Many small ranges are copied as records by index, a few large ones by memmove.
    Raises LayoutError for a bad table.
    """
    targets, sources, lengths = check_ranges(targets, sources, lengths)
    if not len(lengths):
        return
    target_base, source_base = int(targets.min()), int(sources.min())
    record_bytes = int(np.gcd.reduce(np.concatenate(
        (targets - target_base, sources - source_base, lengths)
    )))  # fmt: skip
    counts = lengths // record_bytes
    split = int(counts.sum()) > len(lengths) * _RECORDS_PER_RANGE_MAX
    if split or len(lengths) == 1 or int(lengths.sum()) >= len(lengths) * _MEMMOVE_BYTES:
        columns = (targets.tolist(), sources.tolist(), lengths.tolist())
        for target, source, length in zip(*columns, strict=True):
            ctypes.memmove(target, source, length)
        return
    which = np.repeat(np.arange(len(lengths)), counts)
    within = np.arange(len(which)) - (np.cumsum(counts) - counts)[which]
    to = ((targets - target_base) // record_bytes)[which] + within
    come = ((sources - source_base) // record_bytes)[which] + within
    # Views from the first byte to the last; bytes between the ranges are never touched.
    target_records = _records(target_base, int(to.max()) + 1, record_bytes)
    source_records = _records(source_base, int(come.max()) + 1, record_bytes)
    step = max(1, _GATHERED_BYTES // record_bytes)
    for start in range(0, len(to), step):
        target_records[to[start : start + step]] = source_records[come[start : start + step]]


class _Records:
    """Memory at an address, for NumPy. (A ctypes array would be a new type per size.)"""

    def __init__(self, address: int, count: int, record_bytes: int) -> None:
        self.__array_interface__ = {
            "data": (address, False),
            "shape": (count,),
            "typestr": f"|V{record_bytes}",
            "version": 3,
        }


def _records(address: int, count: int, record_bytes: int) -> NDArray[Any]:
    return np.asarray(_Records(address, count, record_bytes))


def _chunk_bytes(longest_bytes: int) -> int:
    power = 1 << (longest_bytes - 1).bit_length()
    return min(CHUNK_BYTES, max(_CHUNK_BYTES_MIN, power))


def available(device_type: str) -> bool:
    """Whether `copy_ranges` can run on devices of this type here: it needs Triton, and for a GPU
    also what its launcher is built with at first use (a C compiler, Python's headers)."""
    try:
        _kernel()
    except DeviceError:
        return False
    return backend.interpreted() or (device_type == "cuda" and backend.can_launch())


@functools.cache
def _kernel() -> Any:
    """The kernel, imported at first use: importing this module must need neither torch nor
    Triton."""
    try:
        import torch  # noqa: F401

        from .kernel import copy_rows
    except ImportError as error:
        raise DeviceError(f"copying ranges by a kernel needs torch and Triton: {error}") from error
    return copy_rows
