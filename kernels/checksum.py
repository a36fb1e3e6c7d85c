"""Checksums of segments where they lie: of a tensor in HBM by a Triton kernel, of one in DRAM by
`pagehash.py`, which has the definition (`xxh3_64_pages`).

On the device nothing waits for the host. What is to be hashed is planned before the first launch,
level by level, and uploaded as one table; then there is one launch for the pages of all segments
(two, if some segment begins or ends at no multiple of 8 bytes), one for each level above, each a
512th of the level below, and one that turns roots into checksums: three for segments of up to
2 MiB, four up to 1 GiB. The upper levels could be hashed by a CPU. But it would have to wait for
the page hashes, 128 KiB of a block of 64 MiB, and nobody on the device could use the result; to
launch twice more is some 20 us of the host, which waits for nothing.

The kernel has not run on a GPU: its tests run in Triton's interpreter, and compile it for one. By
arithmetic it is bound by memory. Compiled for sm_90, a word of 8 bytes costs some 13 instructions,
nearly all integer, of which an H100 SXM does 132 × 64 per cycle at 1.7 GHz: 64 MiB, 8.4 million
words, take 8 us, and reading them at 3.35 TB/s 20 us.
"""

from __future__ import annotations

import functools
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import numpy as np
import torch

from . import pagehash
from .errors import DeviceError, LayoutError
from .pagehash import HASH_BYTES, PAGE_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from numpy.typing import NDArray

    Numbers = NDArray[np.int64]

Backend = Literal["triton", "reference"]

# Pages of one program, by four threads each: 64 threads, so that a block of 64 MiB gives each of an
# H100's 132 SMs eight programs. Chosen by that arithmetic.
TILE_PAGES: Final = 16
TILE_BYTES: Final = TILE_PAGES * PAGE_BYTES
_WARPS: Final = 2
_FINISH_SEGMENTS: Final = 128

# XXH3's default secret: kSecret, xxhash.h of xxHash 0.8.3.
_SECRET: Final = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
    "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
    "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
    "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e"
    "2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_PRIME32: Final = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
_PRIME64: Final = (
    0x9E3779B185EBCA87,
    0xC2B2AE3D27D4EB4F,
    0x165667B19E3779F9,
    0x85EBCA77C2B2AE63,
    0x27D4EB2F165667C5,
)


@dataclass(frozen=True, slots=True)
class PendingChecksums:
    """Checksums that a device is computing, or has computed.

    `bits` is int64 [segments] on the device of the memory, the bits of unsigned numbers: whoever
    uses it on another stream makes that wait for `event` first (None on a CPU).
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
    the kernel for a GPU and `pagehash` for a CPU; the kernel takes a CPU tensor in Triton's
    interpreter only, and the reference copies what a GPU has to the host. On a GPU the memory is
    read by the current stream, and the host waits for it once, at the end.

    Raises LayoutError for another tensor or a span that is not inside it, DeviceError for a device
    that the backend cannot use; then nothing was launched.
    """
    return segment_checksums_async(memory, spans, backend=backend).result()


def segment_checksums_async(
    memory: Any, spans: Sequence[tuple[int, int]], *, backend: Backend | None = None
) -> PendingChecksums:
    """`segment_checksums`, launched on the current stream of the memory's device, not waited for.

    Raises like it. What the stream still has to read may not be changed by other streams until the
    event has passed.
    """
    table = _spans(memory, spans)
    if _by_kernel(memory, backend):
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


def _by_kernel(memory: Any, backend: Backend | None) -> bool:
    """Whether the kernel is to be used. Raises DeviceError."""
    on_host = memory.device.type == "cpu"
    if memory.device.type not in ("cpu", "cuda"):
        raise DeviceError(f"no checksums on {memory.device}: the memory is on a GPU or a CPU")
    if backend not in (None, "triton", "reference"):
        raise DeviceError(f"backend {backend!r}: it is 'triton', 'reference' or None")
    if backend == "triton" and on_host and not _interpreted():
        raise DeviceError("the kernel takes a tensor of a CPU in Triton's interpreter only")
    return not on_host if backend is None else backend == "triton"


def _interpreted() -> bool:
    import triton

    from .checksum_kernel import hash_pages

    return not isinstance(hash_pages, triton.runtime.JITFunction)


def _reference(memory: Any, table: Numbers) -> Any:
    """The same by `pagehash`, on the host; int64 [spans] on the memory's device."""
    if memory.device.type == "cpu":
        found = pagehash.checksums(memory.numpy(), table.T.tolist())
    else:
        parts = [memory[at : at + length].cpu().numpy() for at, length in table.T.tolist()]
        found = np.array([pagehash.checksum(part) for part in parts], np.uint64)
    return torch.from_numpy(found.view(np.int64)).to(memory.device)


# -- planning, on the host -------------------------------------------------------------------------


class _Tiles(NamedTuple):
    """What one launch hashes: `tiles` is int64 [3, count], see `checksum_kernel.hash_pages`."""

    tiles: Numbers
    align: int


class _Plan(NamedTuple):
    """The launches, in order; and int64 [2, segments]: which hash is the root, and the length."""

    launches: list[_Tiles]
    segments: Numbers


def hash_count(lengths: Numbers) -> int:
    """How many hashes all levels of segments of so many bytes have."""
    total, counts = 0, _pages(lengths)
    while len(counts):
        total += int(counts.sum())
        counts = _pages(HASH_BYTES * counts[counts > 1])
    return total


def plan(addresses: Numbers, lengths: Numbers, hashes_address: int) -> _Plan:
    """What is launched for segments that lie at `addresses`, with the hashes of all levels, one
    level after the other, from `hashes_address` on."""
    launches: list[_Tiles] = []
    roots = np.zeros(len(lengths), np.int64)
    live = np.arange(len(lengths))  # segments that have this level
    # Nothing is read of an empty segment, so it may as well be aligned.
    sources, nbytes, begin = np.where(lengths > 0, addresses, hashes_address), lengths, 0
    while len(live):
        counts = _pages(nbytes)
        ends = begin + np.cumsum(counts)
        firsts = ends - counts
        launches += _launches(sources, nbytes, counts, firsts)
        roots[live] = firsts  # of those with one page, for good
        more = counts > 1
        live, begin = live[more], int(ends[-1])
        sources, nbytes = hashes_address + HASH_BYTES * firsts[more], HASH_BYTES * counts[more]
    return _Plan(launches, np.stack([roots, lengths]))


def _pages(nbytes: Numbers) -> Numbers:
    """`pagehash.page_count` of each."""
    return np.maximum(1, -(-nbytes // PAGE_BYTES))


def _launches(sources: Numbers, nbytes: Numbers, counts: Numbers, firsts: Numbers) -> list[_Tiles]:
    """The tiles of one level: those in whole words of 8 bytes, and those that are not."""
    per_segment = -(-counts // TILE_PAGES)
    segment = np.repeat(np.arange(len(counts)), per_segment)
    number = np.arange(len(segment)) - np.repeat(np.cumsum(per_segment) - per_segment, per_segment)
    skipped = number * TILE_BYTES
    tiles = np.stack(
        [
            sources[segment] + skipped,
            np.minimum(nbytes[segment] - skipped, TILE_BYTES),
            firsts[segment] + number * TILE_PAGES,
        ]
    )
    places = tiles[0] | tiles[1]
    in_words = places % 8 == 0
    launches = []
    if in_words.any():
        align = 8 if (places[in_words] % 16).any() else 16
        launches.append(_Tiles(tiles[:, in_words], align))
    if not in_words.all():
        launches.append(_Tiles(tiles[:, ~in_words], 1))
    return launches


def _constants() -> NDArray[np.uint64]:
    """The table that the kernels read; its parts are named in `checksum_kernel.py`."""
    primes = (
        _PRIME32[2],
        *_PRIME64[:4],
        _PRIME32[1],
        _PRIME64[4],
        _PRIME32[0],
    )
    keys = np.frombuffer(_SECRET, "<u8")
    last, merge = (np.frombuffer(_SECRET, "<u8", 8, at) for at in (192 - 64 - 7, 11))
    page_sum = PAGE_BYTES * _PRIME64[0] % 2**64
    flips = keys[3] ^ keys[4], keys[5] ^ keys[6]
    rest = np.array([*primes, page_sum, *flips], np.uint64)
    return np.concatenate([keys, last, merge, rest])


# -- launching -------------------------------------------------------------------------------------


@functools.cache
def _constants_on(device: Any) -> Any:
    return torch.from_numpy(_constants().view(np.int64)).to(device).view(torch.uint64)


def _launch(memory: Any, table: Numbers) -> PendingChecksums:
    """Upload the plan, and launch it on the current stream."""
    from .checksum_kernel import finish, hash_pages

    device, count = memory.device, table.shape[1]
    on_host = device.type == "cpu"
    checksums = torch.empty(count, dtype=torch.int64, device=device)
    here: AbstractContextManager[Any] = nullcontext() if on_host else torch.cuda.device(device)
    with here:
        if count:
            hashes = torch.empty(hash_count(table[1]), dtype=torch.uint64, device=device)
            todo = plan(memory.data_ptr() + table[0], table[1], hashes.data_ptr())
            parts = [launch.tiles.ravel() for launch in todo.launches]
            uploaded = _upload(np.concatenate([*parts, todo.segments.ravel()]), device)
            constants, at = _constants_on(device), 0
            for tiles, align in todo.launches:
                size = tiles.shape[1]
                hash_pages[(size,)](
                    constants, uploaded[at : at + 3 * size], size, hashes,
                    PAGES=TILE_PAGES, ALIGN=align, num_warps=_WARPS, enable_fp_fusion=False,
                )  # fmt: skip
                at += 3 * size
            finish[(-(-count // _FINISH_SEGMENTS),)](
                constants, uploaded[at:], count, hashes, checksums.view(torch.uint64),
                SEGMENTS=_FINISH_SEGMENTS, enable_fp_fusion=False,
            )  # fmt: skip
        event = None if on_host else torch.cuda.Event()
        if event is not None:
            event.record()
    return PendingChecksums(checksums, event)


def _upload(numbers: Numbers, device: Any) -> Any:
    """In the current stream's order. The pinned copy is the allocator's until that is done."""
    tensor = torch.from_numpy(numbers)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


__all__ = ["PendingChecksums", "segment_checksums", "segment_checksums_async"]
