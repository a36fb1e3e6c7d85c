"""Bytes between an NVMe tier's slab and a GPU, without the DRAM tier in between.

Two ways, chosen once, when it is opened:

    gds      kvikio (GPUDirect Storage): the drive's DMA engine writes the GPU's memory. Needs
             kvikio 25.04 or later, NVIDIA's cufile library and nvidia-fs or a driver with P2P DMA,
             and a filesystem that supports it (ext4 or xfs on NVMe). Believed only after it has
             read the slab's first page correctly.
    bounce   two pinned buffers: while the tier reads piece i+1 into one (O_DIRECT, several requests
             at a time), piece i is copied from the other to the device.

kvikio has a bounce of its own ("compatibility mode"), and so has cufile. They are not used: they
read through POSIX calls without the tier's counters, health and queue depth. Only for what is
shorter than its `gds_threshold` (1 MiB) kvikio still does that.

The bytes are not checked here: whoever reads a block compares it with its header's checksums.
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

from tiffin.messenger.device import DeviceCopier, StillCopying
from tiffin.messenger.device_driver import DeviceError
from tiffin.messenger.device_moves import until
from tiffin.messenger.errors import MessengerError
from tiffin.messenger.pinning import Pinned, PinningError

from ..errors import InvalidInput, TierUnavailable
from .base import GRANULE_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tiffin.messenger.local import ByteArray

    from ..arena import Extent
    from .nvme import NvmeTier

_log = logging.getLogger(__name__)

# Four of the tier's own pieces, so that each buffer fills its queue once; a drive of 7 GB/s takes
# 1.2 ms for it and a PCIe Gen5 link 0.15 ms.
PIECE_BYTES = 8 << 20
_BUFFERS = 2
# A copy, or an event before it, that takes longer belongs to a device that answers no more.
_TIMEOUT_S = 30.0


class DeviceSlab:
    """Reads and writes extents of `tier` from and to tensors on the copier's device.

    `path` is "gds" or "bounce", and `reason` says why not GDS. Both the tier and the copier are the
    caller's and must outlive this.

    Threads: one call at a time; others wait.
    """

    def __init__(
        self,
        tier: NvmeTier,
        copier: DeviceCopier,
        *,
        piece_bytes: int = PIECE_BYTES,
        gds: bool = True,
    ) -> None:
        """`gds=False` does not even try it. Raises InvalidInput for pieces that are no pages."""
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

        `at` is a multiple of 4 KiB. Returns when the bytes are there. They may overwrite `target`
        only after the event `after`; who uses it next on a stream of its own need not wait.

        Raises InvalidInput before anything moves, TierUnavailable when the disk or the device
        refuses: the target then holds anything.
        """
        nbytes = self._check(extent, at, target)
        with self._serving(after):
            if self._by_gds("pread", extent, at, target, nbytes):
                return
            self._read_bouncing(extent, at, target, nbytes)
            self._count("bounce.read", nbytes)

    def write(self, extent: Extent, at: int, source: Any, *, after: Any = None) -> None:
        """Copy `source` (a contiguous tensor on the device) to byte `at` of `extent`; see `read`.

        `after` is the event at which `source` is complete. The header goes in by `tier.commit`,
        after this has returned, as always.
        """
        nbytes = self._check(extent, at, source)
        with self._serving(after):
            if self._by_gds("pwrite", extent, at, source, nbytes):
                return
            self._write_bouncing(extent, at, source, nbytes)
            self._count("bounce.write", nbytes)

    def statistics(self) -> dict[str, int]:
        """Counts since it was opened: `<path>.<read or write>.calls` and `.bytes`, and how often
        GDS failed. What GDS moves is not in the tier's own statistics."""
        return dict(sorted(self._counts.items()))

    def close(self) -> None:
        """Let go of the buffers; a second call does nothing. The tier stays open.

        Raises TierUnavailable when the device still uses them; call again.
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
        if tensor.device != self._copier.device or not tensor.is_contiguous():
            raise InvalidInput(f"not a contiguous tensor on {self._copier.device}")
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
        """One at a time, after `after`, with no copy left over from before."""
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
        """Buffers of a copy that was given up are used again when it has ended."""
        if self._stuck is None:
            return
        try:
            ended = self._stuck.transfer.done()
        except DeviceError as error:
            raise TierUnavailable(f"the device failed: {error}") from error
        if not ended:
            raise TierUnavailable("the device still copies what was given up before")
        self._stuck = None

    def _by_gds(self, verb: str, extent: Extent, at: int, tensor: Any, nbytes: int) -> bool:
        """Whether GDS moved it all. If not, the bounce does it again, and says what is wrong."""
        if self._file is None:
            return False
        move, flat = getattr(self._file, verb), _bytes_of(tensor)
        first = self._tier.layout.data_offset + extent.offset + at
        futures, moved, failure = [], 0, ""
        # A task per piece, and each is waited for: of a larger one kvikio makes several, tells of
        # the first that fails, and the others go on touching the tensor.
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
            # The other buffer is free: its copy was waited for in the round before.
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
        # OFF: what cufile cannot open is an error then, and not read by POSIX calls from there on.
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
        # Zeros, which a superblock never is: old memory might hold the right bytes by chance.
        page = torch.zeros(GRANULE_BYTES, dtype=torch.uint8, device=device)
        with torch.cuda.device(device) if on_gpu else contextlib.nullcontext():
            if on_gpu:
                torch.cuda.current_stream().synchronize()  # GDS knows nothing of streams
            # Not `pread`, which takes POSIX calls for so little.
            moved = int(file.raw_read(page, GRANULE_BYTES, 0))
        there = bytes(page.cpu().numpy())
        with open(tier.path, "rb") as plain:
            expected = plain.read(GRANULE_BYTES)
    except (OSError, RuntimeError, AttributeError, KeyError) as error:
        return f"a first read by GDS failed: {error}"
    return "" if moved == GRANULE_BYTES and there == expected else "GDS read a page wrongly"


def _pinned_buffers(device: Any, piece_bytes: int) -> tuple[list[ByteArray], list[Pinned]]:
    """Page-aligned, so that direct I/O goes straight into them, and pinned where CUDA allows it."""
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
    """Until the disk does not touch the buffer any more; what it says is no longer of interest."""
    if future is not None and not future.cancel():
        future.exception()
