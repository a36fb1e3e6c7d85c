"""Checksums of segments in place: of a tensor in HBM by a Triton kernel, of one in DRAM by
`page_hash.py`, which has the definition (`xxh3_64_pages`).

On the device nothing waits for the host. All levels are planned before the first launch and
uploaded as one table; then there is one launch for the pages of all segments
(two, if some segment begins or ends at no multiple of 8 bytes), one for each level above, each a
512th of the level below, and one that turns roots into checksums: three for segments of up to
2 MiB, four up to 1 GiB. The upper levels could be hashed by a CPU. But it would have to wait for
the page hashes, 128 KiB of a block of 64 MiB, and no kernel on the device could use the result; two
more launches cost the host some 20 us, without waiting.

The kernel has not run on a GPU: its tests run in Triton's interpreter, and compile it for one. By
arithmetic it is bound by memory. Compiled for sm_90, a word of 8 bytes costs some 13 instructions,
nearly all integer, of which an H100 SXM does 132 × 64 per cycle at 1.7 GHz: 64 MiB, 8.4 million
words, take 8 us, and reading them at 3.35 TB/s 20 us.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from ..backend import uses_triton
from ..errors import DeviceError, LayoutError
from ..launching import on_stream, upload
from . import page_hash
from .launch_plan import TILE_PAGES, constants, hash_count, plan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ..backend import Backend
    from .launch_plan import Numbers

_WARPS: Final = 2
_FINISH_SEGMENTS: Final = 128


@dataclass(frozen=True, slots=True)
class PendingChecksums:
    """Checksums that a device is computing, or has computed.

    `bits` is int64 [segments] on the device of the memory, the bits of unsigned numbers. Before it
    is used on another stream, that stream has to wait for `event` (None on a CPU).
    """

    bits: Any
    event: Any

    def result(self) -> NDArray[np.uint64]:
        """Wait for them and copy them to the host: uint64 [segments]."""
        if self.event is not None:
            self.event.synchronize()
        found: NDArray[np.uint64] = self.bits.cpu().numpy().view(np.uint64)
        return found


def segment_checksums(
    memory: Any, spans: Sequence[tuple[int, int]], *, backend: Backend | None = None
) -> NDArray[np.uint64]:
    """The `xxh3_64_pages` of each (offset, length) of `memory`, uint64 [spans].

    `memory` is a contiguous tensor of uint8, [bytes], on a GPU or a CPU. `backend` is by default
    the kernel for a GPU and `page_hash` for a CPU; the kernel takes a CPU tensor only in Triton's
    interpreter, and the reference copies a GPU tensor to the host. On a GPU the current stream
    reads the memory, and the host waits for it once, at the end.

    Raises LayoutError for another tensor or a span that is not inside it, DeviceError for a device
    that the backend cannot use; nothing was launched then.
    """
    return segment_checksums_async(memory, spans, backend=backend).result()


def segment_checksums_async(
    memory: Any, spans: Sequence[tuple[int, int]], *, backend: Backend | None = None
) -> PendingChecksums:
    """`segment_checksums`, launched on the current stream of the memory's device, not waited for.

    Raises the same errors. Other streams may not change the memory until the event has passed.
    """
    table = _spans(memory, spans)
    if memory.device.type not in ("cpu", "cuda"):
        raise DeviceError(f"no checksums on {memory.device}: the memory is on a GPU or a CPU")
    if uses_triton(memory.device, backend):
        return _launch(memory, table)
    return PendingChecksums(_reference(memory, table), None)


def _spans(memory: Any, spans: Sequence[tuple[int, int]]) -> Numbers:
    """int64 [2, spans]: offsets and lengths. Raises LayoutError."""
    if not isinstance(memory, torch.Tensor) or memory.dtype is not torch.uint8:
        raise LayoutError("the memory of segments is a tensor of uint8")
    if memory.dim() != 1 or not memory.is_contiguous():
        raise LayoutError("the memory of segments has one dimension and no gaps")
    try:
        given = np.asarray(spans if len(spans) else np.empty((0, 2), np.int64))
        # Not np.asarray(spans, np.int64), which would cut 1.5 to 1.
        table = given.astype(np.int64, casting="same_kind")
    except (TypeError, ValueError, OverflowError) as error:
        raise LayoutError(f"spans are pairs of offset and length: {error}") from error
    if table.ndim != 2 or table.shape[1] != 2:
        raise LayoutError(f"spans are pairs of offset and length, not of shape {table.shape}")
    offsets, lengths = table.T
    # Without a sum, which could wrap around.
    wrong = (offsets < 0) | (lengths < 0) | (offsets > memory.numel() - lengths)
    if wrong.any():
        offset, length = table[int(wrong.argmax())].tolist()
        raise LayoutError(
            f"{length} bytes from {offset} on are not inside a memory of {memory.numel()} bytes"
        )
    return np.ascontiguousarray(table.T)


def _reference(memory: Any, table: Numbers) -> Any:
    """The same by `page_hash`, on the host; int64 [spans] on the memory's device."""
    if memory.device.type == "cpu":
        found = page_hash.checksums(memory.numpy(), table.T.tolist())
    else:
        parts = [memory[at : at + length].cpu().numpy() for at, length in table.T.tolist()]
        found = np.array([page_hash.checksum(part) for part in parts], np.uint64)
    return torch.from_numpy(found.view(np.int64)).to(memory.device)


@functools.cache
def _constants_on(device: Any) -> Any:
    return torch.from_numpy(constants().view(np.int64)).to(device).view(torch.uint64)


def _launch(memory: Any, table: Numbers) -> PendingChecksums:
    """Upload the plan, and launch it on the current stream."""
    device, count = memory.device, table.shape[1]
    checksums = torch.empty(count, dtype=torch.int64, device=device)
    with on_stream(device):
        if count:
            _launch_plan(memory, table, checksums.view(torch.uint64))
        event = torch.cuda.Event() if device.type == "cuda" else None
        if event is not None:
            event.record()
    return PendingChecksums(checksums, event)


def _launch_plan(memory: Any, table: Numbers, checksums: Any) -> None:
    from .kernel import finish, hash_pages

    device, count = memory.device, table.shape[1]
    hashes = torch.empty(hash_count(table[1]), dtype=torch.uint64, device=device)
    todo = plan(memory.data_ptr() + table[0], table[1], hashes.data_ptr())
    parts = [launch.tiles.ravel() for launch in todo.launches]
    uploaded = upload(np.concatenate([*parts, todo.segments.ravel()]), device)
    numbers, at = _constants_on(device), 0
    for tiles, align in todo.launches:
        size = tiles.shape[1]
        hash_pages[(size,)](
            numbers, uploaded[at : at + 3 * size], size, hashes,
            PAGES=TILE_PAGES, ALIGN=align, num_warps=_WARPS, enable_fp_fusion=False,
        )  # fmt: skip
        at += 3 * size
    finish[(-(-count // _FINISH_SEGMENTS),)](
        numbers, uploaded[at:], count, hashes, checksums,
        SEGMENTS=_FINISH_SEGMENTS, enable_fp_fusion=False,
    )  # fmt: skip


__all__ = ["PendingChecksums", "segment_checksums", "segment_checksums_async"]
