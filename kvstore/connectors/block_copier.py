"""Copies blocks between an engine's cache and the pool's memory or a GPU's memory.

One kernel call moves all layers of many blocks, and converts them if the schema is quantised. The
ways differ in how the kernel reaches the blocks:

    cache on    blocks in                      way
    CPU         host memory                    the torch reference, where they lie
    GPU         that GPU's memory (HBM tier)   the kernel, where they lie
    GPU         pinned host memory             the kernel, where they lie, over the link
    GPU         other host memory              through device memory and `DeviceCopier`

Work is queued on the current stream of the cache's device. If blocks are in host memory, the host
waits for the stream at the end, because the pool then hashes the saved blocks, or ends the lease of
the loaded ones. That wait has no timeout: a kernel can't be cancelled, so memory that it may access
can't be released either.
"""

from __future__ import annotations

import contextlib
from collections import deque
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch

from tiffin.kernels.errors import DeviceError
from tiffin.kernels.layout.transfer_plan import PageMap
from tiffin.kernels.paged import gather_scatter
from tiffin.kernels.quant import quantised_gather
from tiffin.messenger.errors import MessengerError
from tiffin.messenger.gpu.copier import DeviceCopier, StillCopying
from tiffin.messenger.gpu.pinning import registration

from ..errors import TierUnavailable
from .kernel_tables import layout_of, quantised_layout_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tiffin.kernels.layout.engine_cache import PagedCache
    from tiffin.messenger.gpu.copier import DeviceTransfer

    from ..format.schema import KVSchema

# Size of a stage in device memory, of which there are at most two: large enough that the start of a
# copy costs nothing (128 MiB are 2.5 ms at 50 GB/s), small compared to a model.
STAGE_BYTES = 128 << 20
_STAGES = 2
# Timeout of one wait for a copy; `_wait` retries until the copy has ended.
_PATIENCE_S = 10.0


class BlockMover:
    """Gathers and scatters blocks of one schema, for caches on one device ("cpu", "cuda:0").

    On a CPU it allocates no memory and starts no threads. Use it where the current stream is the
    one that the engine computes on. Not thread-safe.
    """

    def __init__(self, schema: KVSchema, device: Any) -> None:
        self.schema = schema
        self.device = torch.device(device)
        self._layout = layout_of(schema)
        self._quantised = quantised_layout_of(schema)
        self._copier: DeviceCopier | None = None

    def gather(self, cache: PagedCache, pages: PageMap, blocks: Sequence[Any]) -> None:
        """Fill `blocks` (uint8 [block_bytes] each: arrays of the host, or tensors of the cache's
        device) with the tokens that `pages` names, a row for each block.

        Arrays are filled when it returns, tensors in the order of the current stream. Raises the
        kernels' errors before anything is written, TierUnavailable when the device fails.
        """
        with self._copies(blocks) as copies:
            for part, members in self._parts(pages, blocks):
                if self._reaches(members[0]):
                    self._gather(cache, part, members)
                    continue
                stage = copies.stage(len(members))
                self._gather(cache, part, stage)
                copies.start(self._open_copier(), list(zip(members, stage, strict=True)))

    def scatter(self, cache: PagedCache, pages: PageMap, blocks: Sequence[Any]) -> None:
        """Fill the rows of the cache that `pages` names from `blocks`, which are as in `gather`,
        but may be read-only arrays.

        The cache is filled in the order of the current stream; arrays have been read when it
        returns. Raises as `gather` does.
        """
        with self._copies(blocks) as copies:
            for part, members in self._parts(pages, blocks):
                if self._reaches(members[0]):
                    self._scatter(cache, part, members)
                    continue
                stage = copies.stage(len(members))
                pairs = list(zip(stage, members, strict=True))
                copies.start(self._open_copier(), pairs).stream_wait(self._stream())
                self._scatter(cache, part, stage)

    def while_idle(self, action: Callable[[], None]) -> bool:
        """Call `action` if no copy is in flight; returns whether that was so. After `gather` or
        `scatter` has ended, a copy is in flight only if an exception (Ctrl-C) interrupted the call,
        or the device failed."""
        if self._copier is not None and self._copier.statistics()["in_flight_bytes"]:
            return False
        action()
        return True

    def close(self) -> None:
        """Release the copier's staging buffers."""
        copier, self._copier = self._copier, None
        if copier is not None:
            copier.close()

    # -- kernels ---------------------------------------------------------------------------------

    def _gather(self, cache: PagedCache, pages: PageMap, blocks: Sequence[Any]) -> None:
        if self._quantised is None:
            gather_scatter.gather(cache, pages, blocks, self._layout)
        else:
            quantised_gather.gather_quantised(cache, pages, blocks, self._quantised)

    def _scatter(self, cache: PagedCache, pages: PageMap, blocks: Sequence[Any]) -> None:
        if self._quantised is None:
            gather_scatter.scatter(cache, pages, blocks, self._layout)
        else:
            quantised_gather.scatter_dequantised(cache, pages, blocks, self._quantised)

    # -- where blocks lie ------------------------------------------------------------------------

    def _parts(
        self, pages: PageMap, blocks: Sequence[Any]
    ) -> Iterator[tuple[PageMap, Sequence[Any]]]:
        """Split the blocks into consecutive runs that are all staged or all not; a staged run has
        at most STAGE_BYTES, or one block."""
        most = max(1, STAGE_BYTES // self.schema.block_bytes)
        for reached, group in groupby(range(len(blocks)), lambda i: self._reaches(blocks[i])):
            indices = list(group)
            step = len(indices) if reached else most
            for at in range(0, len(indices), step):
                first = indices[at]
                end = indices[min(at + step, len(indices)) - 1] + 1
                yield _rows(pages, first, end), blocks[first:end]

    def _reaches(self, block: Any) -> bool:
        """Whether a kernel can access the block in place, without staging."""
        if self.device.type == "cpu" or isinstance(block, torch.Tensor):
            return True
        entry = registration(block.ctypes.data, block.nbytes, self.device.type)
        return entry is not None and entry.kernels

    # -- copies and streams ----------------------------------------------------------------------

    @contextlib.contextmanager
    def _copies(self, blocks: Sequence[Any]) -> Iterator[_Copies]:
        """A context for a move: at its end no copy or kernel accesses host memory any more, also
        after an error."""
        copies = _Copies(self)
        try:
            yield copies
        except (MessengerError, DeviceError) as error:
            raise TierUnavailable(f"a move on {self.device} failed: {error}") from error
        finally:
            try:
                copies.end()
            finally:
                if not all(isinstance(block, torch.Tensor) for block in blocks):
                    self._synchronize()

    def stage(self, count: int) -> Any:
        """Device memory for so many blocks, uint8 [count, block_bytes]. It belongs to the current
        stream: after it is freed, torch reuses it only for later work on that stream."""
        try:
            return torch.empty(
                (count, self.schema.block_bytes), dtype=torch.uint8, device=self.device
            )
        except torch.OutOfMemoryError as error:
            raise TierUnavailable(f"no room to stage {count} blocks: {error}") from error

    def _open_copier(self) -> DeviceCopier:
        if self._copier is None:
            self._copier = DeviceCopier(str(self.device))
        return self._copier

    def _stream(self) -> Any:
        on_gpu = self.device.type == "cuda"
        return torch.cuda.current_stream(self.device) if on_gpu else None

    def point(self) -> Any:
        """An event after all work queued on the current stream so far. None on a CPU."""
        stream = self._stream()
        return None if stream is None else stream.record_event()

    def _synchronize(self) -> None:
        stream = self._stream()
        if stream is None:
            return
        try:
            stream.synchronize()
        except RuntimeError as error:  # sticky: this process can't use the device any more
            raise TierUnavailable(f"{self.device} failed: {error}") from error


class _Copies:
    """Copies between host memory and stages, at most _STAGES at once."""

    def __init__(self, mover: BlockMover) -> None:
        self._mover = mover
        self._live: deque[DeviceTransfer] = deque()  # each keeps its stage alive until it has ended

    def stage(self, count: int) -> Any:
        """Device memory for so many blocks; waits until fewer than _STAGES are in use."""
        while len(self._live) >= _STAGES:
            _wait(self._live.popleft())
        return self._mover.stage(count)

    def start(self, copier: DeviceCopier, pairs: list[tuple[Any, Any]]) -> DeviceTransfer:
        """Copy each (target, source), after all work queued on the current stream so far."""
        try:
            transfer = copier.submit([pairs], after=self._mover.point())
        except StillCopying as error:
            self._live.append(error.transfer)
            raise
        self._live.append(transfer)
        return transfer

    def end(self) -> None:
        """Wait for all copies. Raises TierUnavailable when one failed."""
        failed: MessengerError | None = None
        while self._live:
            try:
                _wait(self._live.popleft())
            except MessengerError as error:
                failed = error
        if failed is not None:
            raise TierUnavailable(f"a copy failed: {failed}") from failed


def _wait(transfer: DeviceTransfer) -> None:
    while True:
        with contextlib.suppress(StillCopying):
            transfer.wait(_PATIENCE_S)
            return


def _rows(pages: PageMap, first: int, end: int) -> PageMap:
    """The rows of the blocks [first, end)."""
    if (first, end) == (0, len(pages)):
        return pages
    return PageMap(
        pages.pages[first:end],
        page_tokens=pages.page_tokens,
        tokens=pages.tokens[first:end],
        first_slots=pages.first_slots[first:end],
    )
