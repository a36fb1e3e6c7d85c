"""Transfers between an NVMe tier's slab and a GPU, without the DRAM tier in between.

Two paths; the constructor chooses one:

    gds      kvikio (GPUDirect Storage): the drive's DMA engine writes the GPU's memory. Needs
             kvikio 25.04 or later, NVIDIA's cufile library and nvidia-fs or a driver with P2P DMA,
             and a filesystem that supports it (ext4 or xfs on NVMe). Used only after it has read
             the slab's first page correctly.
    bounce   two pinned buffers: while the tier reads piece i+1 into one (O_DIRECT, several requests
             at a time), piece i is copied from the other to the device.

kvikio has a bounce path of its own ("compatibility mode"), and so has cufile. They are not used:
they read through POSIX calls without the tier's counters, health and queue depth. Only transfers
shorter than kvikio's `gds_threshold` (1 MiB) still take its POSIX path.

This module does not verify the bytes: the reader of a block compares it with its header's
checksums.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import threading
import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from tiffin.messenger.errors import MessengerError, RangeError
from tiffin.messenger.gpu.copier import DeviceCopier, StillCopying
from tiffin.messenger.gpu.copy_buffers import check_plain
from tiffin.messenger.gpu.cuda_driver import CudaError
from tiffin.messenger.gpu.pinning import Pinned, PinningError
from tiffin.messenger.gpu.pipeline import until

from ..errors import InvalidInput, TierUnavailable
from .base import GRANULE_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tiffin.messenger.shm.host_copy import ByteArray

    from ..memory.arena import Extent
    from .nvme import NvmeTier

_log = logging.getLogger(__name__)

# Four of the tier's own pieces, so that each buffer fills its queue once; a drive of 7 GB/s takes
# 1.2 ms for it and a PCIe Gen5 link 0.15 ms.
PIECE_BYTES = 8 << 20
_BUFFERS = 2
# Timeout of a copy, or of an event before it: a device that takes longer does not respond any more.
_TIMEOUT_S = 30.0


class DeviceSlab:
    """Reads and writes extents of `tier` from and to tensors on the copier's device.

    `path` is "gds" or "bounce", and `reason` says why not GDS. The caller owns the tier and the
    copier, which must outlive this object.

    Thread-safe: one call runs at a time, further calls wait.
    """

    def __init__(
        self,
        tier: NvmeTier,
        copier: DeviceCopier,
        *,
        piece_bytes: int = PIECE_BYTES,
        gds: bool = True,
    ) -> None:
        """`gds=False` does not try GDS. Raises InvalidInput unless `piece_bytes` is whole pages."""
        if piece_bytes < GRANULE_BYTES or piece_bytes % GRANULE_BYTES:
            raise InvalidInput(f"piece_bytes {piece_bytes}; whole pages of {GRANULE_BYTES}")
        self._tier = tier
        self._copier = copier
        self._piece_bytes = piece_bytes
        self._counts: Counter[str] = Counter()  # changed under _turn
        self._turn = threading.Lock()
        self._closed = False
        self._stuck: StillCopying | None = None
        self._file: Any = None
        self.reason = "not asked for"
        if gds:
            self._file, self.reason = _open_gds(tier, copier.device)
        self.path = "bounce" if self._file is None else "gds"
        self._disk = ThreadPoolExecutor(1, thread_name_prefix="tiffin-gds")
        self._buffers, self._pins = _pinned_buffers(copier.device, piece_bytes)

    def read(self, extent: Extent, at: int, target: Any, *, after: Any = None) -> None:
        """Fill `target` (a contiguous tensor on the device) from byte `at` of `extent`.

        `at` is a multiple of 4 KiB. Returns when the bytes are in `target`. The transfer begins
        only after the event `after`; later uses of `target` need no event, on any stream.

        Raises InvalidInput before any byte moves, TierUnavailable when the disk or the device
        refuses: the content of `target` is then undefined.
        """
        nbytes = self._check(extent, at, target)
        with self._serving(after):
            if self._by_gds("pread", extent, at, target, nbytes):
                return
            self._read_bouncing(extent, at, target, nbytes)
            self._count("bounce.read", nbytes)

    def write(self, extent: Extent, at: int, source: Any, *, after: Any = None) -> None:
        """Copy `source` (a contiguous tensor on the device) to byte `at` of `extent`; see `read`.

        `after` is the event at which `source` is complete. The caller writes the header with
        `tier.commit` after this has returned, as for other writes.
        """
        nbytes = self._check(extent, at, source)
        with self._serving(after):
            if self._by_gds("pwrite", extent, at, source, nbytes):
                return
            self._write_bouncing(extent, at, source, nbytes)
            self._count("bounce.write", nbytes)

    def statistics(self) -> dict[str, int]:
        """Counts since this was opened: `<path>.<read or write>.calls` and `.bytes`, and the number
        of GDS failures. The tier's own statistics do not include transfers by GDS."""
        return dict(sorted(self._counts.items()))

    def close(self) -> None:
        """Release the buffers; idempotent. The tier stays open.

        Raises TierUnavailable while the device still uses the buffers; retry then.
        """
        with self._turn:
            self._closed = True
            self._settle()
            self._disk.shutdown()
            if self._file is not None:
                self._file.close()
                self._file = None
            for pin in self._pins:
                pin.close()
            self._buffers, self._pins = [], []

    def _check(self, extent: Extent, at: int, tensor: Any) -> int:
        if at % GRANULE_BYTES:
            raise InvalidInput(f"byte {at} of an extent is not the start of a page")
        if tensor.device != self._copier.device:
            raise InvalidInput(f"not a contiguous tensor on {self._copier.device}")
        try:
            check_plain(tensor)
        except RangeError as error:
            raise InvalidInput(str(error)) from error
        nbytes = int(tensor.numel() * tensor.element_size())
        if not 0 <= at <= at + nbytes <= extent.length:
            raise InvalidInput(f"bytes [{at}, {at + nbytes}) are outside {extent}")
        if extent.offset % GRANULE_BYTES or not (
            0 <= extent.offset <= extent.offset + extent.length <= self._tier.capacity_bytes
        ):
            raise InvalidInput(
                f"{extent} is not inside a tier of {self._tier.capacity_bytes} bytes"
            )
        return nbytes

    @contextlib.contextmanager
    def _serving(self, after: Any) -> Iterator[None]:
        """Admit one call at a time, after the event `after` and after any abandoned copy."""
        with self._turn:
            if self._closed:
                raise TierUnavailable("the path between the slab and the device is closed")
            self._settle()
            try:
                if after is not None and not until(after.query, time.monotonic() + _TIMEOUT_S):
                    raise TierUnavailable(f"what had to come first took over {_TIMEOUT_S} s")
                yield
            except StillCopying as error:
                self._stuck = error
                raise TierUnavailable(f"the device does not answer: {error}") from error
            except MessengerError as error:
                raise TierUnavailable(f"a copy on {self._copier.device} failed: {error}") from error

    def _settle(self) -> None:
        """Check that a copy which was abandoned after a timeout has ended, so that its buffers can
        be reused. Raises TierUnavailable if not."""
        if self._stuck is None:
            return
        try:
            ended = self._stuck.transfer.done()
        except CudaError as error:
            raise TierUnavailable(f"the device failed: {error}") from error
        if not ended:
            raise TierUnavailable("the device still copies what was given up before")
        self._stuck = None

    def _by_gds(self, verb: str, extent: Extent, at: int, tensor: Any, nbytes: int) -> bool:
        """Whether GDS moved all bytes. If not, the caller retries on the bounce path, which raises
        any error."""
        if self._file is None:
            return False
        move, flat = getattr(self._file, verb), _bytes_of(tensor)
        first = self._tier.layout.data_offset + extent.offset + at
        futures, moved, failure = [], 0, ""
        # One kvikio task per piece, and wait for each: kvikio splits a larger transfer into several
        # tasks and reports the first that fails, while the others still access the tensor.
        try:
            for start, stop in self._parts(nbytes):
                size = stop - start
                futures.append(move(flat[start:stop], size, first + start, task_size=size))
        except (OSError, RuntimeError) as error:
            failure = str(error)
        for future in futures:
            try:
                moved += int(future.get())
            except (OSError, RuntimeError) as error:
                failure = str(error)
        if failure or moved != nbytes:
            why = failure or f"{moved} bytes were moved"
            _log.warning("GDS %s of %d bytes failed, bouncing instead: %s", verb, nbytes, why)
            self._counts["gds.failures"] += 1
            return False
        self._count("gds.read" if verb == "pread" else "gds.write", nbytes)
        return True

    def _count(self, what: str, nbytes: int) -> None:
        self._counts[f"{what}.calls"] += 1
        self._counts[f"{what}.bytes"] += nbytes

    def _read_bouncing(self, extent: Extent, at: int, target: Any, nbytes: int) -> None:
        flat, parts = _bytes_of(target), self._parts(nbytes)
        coming = self._start_read(extent, at, parts, 0)
        for i, (start, stop) in enumerate(parts):
            buffer = _result(coming)
            # The other buffer is free: the previous iteration waited for its copy.
            coming = self._start_read(extent, at, parts, i + 1)
            try:
                copy = self._copier.submit([[(flat[start:stop], buffer)]])
                copy.wait(_TIMEOUT_S)
            except BaseException:
                _join(coming)
                raise

    def _write_bouncing(self, extent: Extent, at: int, source: Any, nbytes: int) -> None:
        flat, going = _bytes_of(source), None
        try:
            for i, (start, stop) in enumerate(self._parts(nbytes)):
                buffer = self._buffers[i % _BUFFERS][: stop - start]
                self._copier.submit([[(buffer, flat[start:stop])]]).wait(_TIMEOUT_S)
                _result(going)
                going = self._disk.submit(self._put, extent, at + start, buffer)
            _result(going)
        except BaseException:
            _join(going)
            raise

    def _parts(self, nbytes: int) -> list[tuple[int, int]]:
        step = self._piece_bytes
        return [(start, min(nbytes, start + step)) for start in range(0, nbytes, step)]

    def _start_read(
        self, extent: Extent, at: int, parts: list[tuple[int, int]], i: int
    ) -> Future[ByteArray] | None:
        if i >= len(parts):
            return None
        start, stop = parts[i]
        buffer = self._buffers[i % _BUFFERS][: stop - start]
        return self._disk.submit(self._get, extent, at + start, buffer)

    def _get(self, extent: Extent, at: int, buffer: ByteArray) -> ByteArray:
        self._tier.read(extent, at, buffer)
        return buffer

    def _put(self, extent: Extent, at: int, buffer: ByteArray) -> ByteArray:
        self._tier.write(extent, at, buffer)
        return buffer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _open_gds(tier: NvmeTier, device: Any) -> tuple[Any, str]:
    """(an open kvikio file, "") or (None, why not)."""
    if device.type != "cuda":
        return None, f"{device} is no GPU"
    if not tier.statistics().direct_io:
        return None, "the tier's filesystem refuses direct I/O"
    try:
        import kvikio
        import kvikio.cufile_driver
        import kvikio.defaults
    except ImportError as error:
        return None, f"kvikio cannot be imported: {error}"
    try:
        # OFF: a file that cufile cannot open is an error, instead of a switch to POSIX calls.
        with kvikio.defaults.set("compat_mode", kvikio.CompatMode.OFF):
            file = kvikio.CuFile(str(tier.path), "r+")
    except (OSError, RuntimeError, AttributeError) as error:
        return None, f"kvikio cannot open {tier.path}: {error}"
    reason = _why_not(file, kvikio.cufile_driver, tier, device)
    if reason:
        file.close()
        return None, reason
    return file, ""


def _why_not(file: Any, driver: Any, tier: NvmeTier, device: Any) -> str:
    """Why GDS should not be used for this file; empty if it works. `driver`: `cufile_driver`."""
    import torch

    on_gpu = device.type == "cuda"
    try:
        if not driver.get("is_gds_available"):
            return "cufile would bounce itself (its compatibility mode): no GPUDirect Storage here"
        # Zeros, which a superblock never is: reused memory might contain the right bytes by chance.
        page = torch.zeros(GRANULE_BYTES, dtype=torch.uint8, device=device)
        with torch.cuda.device(device) if on_gpu else contextlib.nullcontext():
            if on_gpu:
                torch.cuda.current_stream().synchronize()  # GDS ignores CUDA streams
            # Not `pread`, which uses POSIX calls for a transfer this short.
            moved = int(file.raw_read(page, GRANULE_BYTES, 0))
        there = bytes(page.cpu().numpy())
        with open(tier.path, "rb") as plain:
            expected = plain.read(GRANULE_BYTES)
    except (OSError, RuntimeError, AttributeError, KeyError) as error:
        return f"a first read by GDS failed: {error}"
    return "" if moved == GRANULE_BYTES and there == expected else "GDS read a page wrongly"


def _pinned_buffers(device: Any, piece_bytes: int) -> tuple[list[ByteArray], list[Pinned]]:
    """Bounce buffers: page-aligned for direct I/O, and pinned where CUDA permits it."""
    buffers = [np.frombuffer(mmap.mmap(-1, piece_bytes), np.uint8) for _ in range(_BUFFERS)]
    pins: list[Pinned] = []
    try:
        pins += [Pinned(buffer, str(device)) for buffer in buffers]
    except PinningError as error:
        _log.warning("copies of the slab go through a further buffer: %s", error)
    return buffers, pins


def _bytes_of(tensor: Any) -> Any:
    """The tensor as uint8 [nbytes], not copied."""
    import torch

    return tensor.reshape(-1).view(torch.uint8)


def _result(future: Future[ByteArray] | None) -> Any:
    return None if future is None else future.result()


def _join(future: Future[ByteArray] | None) -> None:
    """Wait until the disk no longer accesses the buffer; ignores the result and any error."""
    if future is not None and not future.cancel():
        future.exception()
