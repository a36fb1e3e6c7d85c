"""Rows about the disk: the NVMe tier's bandwidth against fio, and a node's restart time."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
import warnings
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from xxhash import xxh3_64_intdigest

from tiffin.kvstore.client.client import Client
from tiffin.kvstore.format.header_writer import seal
from tiffin.kvstore.node.node import Node, NodeOptions
from tiffin.kvstore.tiers.base import TierWarning
from tiffin.kvstore.tiers.directio import PIECE_BYTES, QUEUE_DEPTH
from tiffin.kvstore.tiers.nvme import NvmeTier

from ..limits import DiskJob, aligned, best_disk, filled, read_pages
from .rows import MILLISECONDS, Row, Spread, Target, rates, times
from .setting import MIB, prefix_of, schema_of, size_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from tiffin.kvstore.format.keys import Prefix
    from tiffin.kvstore.format.schema import KVSchema

    from ..limits import Bytes, Direction, Disk
    from .setting import Setting

_RESTART_CHAIN = 100  # blocks per prompt; 2,000 blocks are 20 prompts


@contextlib.contextmanager
def _folder(setting: Setting) -> Iterator[Path]:
    """A new directory on the disk to be measured, removed afterwards."""
    setting.nvme_dir.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="tiffin-bench-", dir=setting.nvme_dir))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


@contextlib.contextmanager
def _tier(folder: Path, nbytes: int) -> Iterator[NvmeTier]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TierWarning)  # the row's note reports buffered I/O
        tier = NvmeTier(folder, nbytes)
    try:
        yield tier
    finally:
        tier.close()


# -- bandwidth -------------------------------------------------------------------------------------


def nvme(setting: Setting) -> list[Row]:
    """Bandwidth of whole blocks written and committed, then read back, one extent at a time."""
    return [row for size in setting.sizes.disk_block_bytes for row in _nvme(setting, size)]


class _Blocks:
    """Blocks of one size that fill a tier, and one page-aligned extent in memory as the buffer."""

    def __init__(self, tier: NvmeTier, block_bytes: int, count: int) -> None:
        self.tier = tier
        self.schema = schema_of(block_bytes)
        self.prefix = prefix_of(self.schema, count)
        self.extents = [tier.reserve(self.schema.extent_bytes) for _ in range(count)]
        self.memory = filled(aligned(self.schema.extent_bytes))
        payload = self.memory[self.schema.header_bytes :]
        checksums = _checksums(payload, self.schema)
        self._headers = [aligned(self.schema.header_bytes) for _ in range(count)]
        for index, (extent, header) in enumerate(zip(self.extents, self._headers, strict=True)):
            seal(
                header,
                self.prefix,
                index,
                generation=1,
                offset=extent.offset,
                checksums=checksums,
            )

    @property
    def nbytes(self) -> int:
        """Bytes of all extents."""
        return len(self.extents) * self.schema.extent_bytes

    def write(self) -> float:
        """Seconds to write and commit every block."""
        payload = self.memory[self.schema.header_bytes :]
        start_s = time.perf_counter()
        for extent, header in zip(self.extents, self._headers, strict=True):
            self.tier.write(extent, self.schema.header_bytes, payload)
            self.tier.commit(extent, header)
        return time.perf_counter() - start_s

    def read(self) -> float:
        """Seconds to read every extent."""
        start_s = time.perf_counter()
        for extent in self.extents:
            self.tier.read(extent, 0, self.memory)
        return time.perf_counter() - start_s


def _checksums(payload: Bytes, schema: KVSchema) -> NDArray[np.uint64]:
    """XXH3-64 of every segment, uint64 [segments]."""
    found = [xxh3_64_intdigest(payload[s.offset : s.end].data) for s in schema.segments]
    return np.array(found, np.uint64)


def _nvme(setting: Setting, block_bytes: int) -> list[Row]:
    disk = best_disk()
    extent_bytes = schema_of(block_bytes).extent_bytes
    count = max(2, setting.sizes.disk_bytes // block_bytes)
    seconds: dict[str, list[float]] = {}
    pause_s = setting.sizes.disk_pause_s
    with _folder(setting) as folder, _tier(folder, count * extent_bytes) as tier:
        blocks = _Blocks(tier, block_bytes, count)
        piece_bytes = min(PIECE_BYTES, block_bytes)
        job_bytes = count * block_bytes // piece_bytes * piece_bytes
        job = DiskJob(folder / "limit", job_bytes, piece_bytes, QUEUE_DEPTH)
        for number in range(-1, setting.sizes.disk_rounds):  # the first writes allocate
            setting.tell(f"blocks of {size_text(block_bytes)}, round {number + 1}")
            for name, taken_s in _disk_round(blocks, disk, job, pause_s).items():
                if number >= 0:
                    seconds.setdefault(name, []).append(taken_s)
        direct = tier.statistics().direct_io
    note = "" if direct else "this filesystem has no direct I/O: buffered"
    return [_nvme_row(direction, seconds, blocks, job, note) for direction in ("write", "read")]


def _disk_round(blocks: _Blocks, disk: Disk, job: DiskJob, pause_s: float) -> dict[str, float]:
    steps: dict[str, Callable[[], float]] = {
        "tier write": blocks.write,
        "limit write": partial(disk.run, job, "write"),
        "tier read": blocks.read,
        "limit read": partial(disk.run, job, "read"),
    }
    taken = {}
    for name, step in steps.items():
        time.sleep(pause_s)
        taken[name] = step()
    return taken


def _nvme_row(
    direction: Direction,
    seconds: dict[str, list[float]],
    blocks: _Blocks,
    job: DiskJob,
    note: str,
) -> Row:
    size, count = size_text(blocks.schema.block_bytes), len(blocks.extents)
    verb = "write and commit" if direction == "write" else "read"
    return Row(
        name=f"nvme-{direction}-{size}",
        what=f"NVMe tier: {verb} {count} blocks of {size}, one after the other",
        unit="GB/s",
        value=rates(seconds[f"tier {direction}"], blocks.nbytes),
        limit_what=f"{best_disk().what}, direct, sequential over one file, bs="
        f"{size_text(job.piece_bytes)} iodepth={job.depth} as the tier's pieces and threads",
        limit=rates(seconds[f"limit {direction}"], job.nbytes),
        targets=(Target("ratio", ">=", 0.85),),
        note=note,
    )


# -- restart ---------------------------------------------------------------------------------------


def restart(setting: Setting) -> list[Row]:
    """Restart time of a node over an NVMe tier full of blocks: from its constructor to serving."""
    schema = schema_of(setting.sizes.small_block_bytes)
    with _folder(setting) as folder:
        nbytes = setting.sizes.restart_blocks * schema.extent_bytes
        setting.tell(f"writing {setting.sizes.restart_blocks} blocks")
        prefixes, offsets = _fill(folder, nbytes, setting.sizes.restart_blocks, setting)
        options = NodeOptions(
            dram_bytes=16 * MIB, nvme_path=folder, nvme_bytes=nbytes, prefault=False
        )
        slab = folder / "slab.tiffin"
        opened: list[float] = []
        limit: list[float] = []
        for number in range(-1, setting.sizes.restart_rounds):
            setting.tell(f"restart {number + 1}")
            start_s = time.perf_counter()
            read_pages(slab, offsets, QUEUE_DEPTH)
            limit_s = time.perf_counter() - start_s
            opened_s, found = _restart(options, prefixes)
            assert found == setting.sizes.restart_blocks, found
            if number >= 0:
                opened.append(opened_s)
                limit.append(limit_s)
    return [_restart_row(setting, times(opened, MILLISECONDS), times(limit, MILLISECONDS))]


def _fill(
    folder: Path, nbytes: int, count: int, setting: Setting
) -> tuple[list[Prefix], list[int]]:
    """Commit blocks in chains; returns their prefixes, and the offsets of their headers in the
    file."""
    schema = schema_of(setting.sizes.small_block_bytes)
    chain = min(_RESTART_CHAIN, count)
    prefixes = [prefix_of(schema, chain, seed) for seed in range(count // chain)]
    assert len(prefixes) * chain == count
    memory = filled(aligned(schema.extent_bytes))
    payload = memory[schema.header_bytes :]
    checksums = _checksums(payload, schema)
    header = memory[: schema.header_bytes]
    offsets = []
    with _tier(folder, nbytes) as tier:
        for prefix in prefixes:
            for index in range(chain):
                extent = tier.reserve(schema.extent_bytes)
                seal(
                    header,
                    prefix,
                    index,
                    generation=1,
                    offset=extent.offset,
                    checksums=checksums,
                )
                tier.write(extent, schema.header_bytes, payload)
                tier.commit(extent, header)
                offsets.append(tier.layout.data_offset + extent.offset)
    return prefixes, offsets


def _restart(options: NodeOptions, prefixes: list[Prefix]) -> tuple[float, int]:
    """Seconds to construct the node, and how many blocks match then."""
    start_s = time.perf_counter()
    node = Node(options)
    taken_s = time.perf_counter() - start_s
    try:
        client = Client.attach(node)
        found = sum(client.match(prefix).blocks for prefix in prefixes)
        client.close()
    finally:
        node.close()
    return taken_s, found


def _restart_row(setting: Setting, opened: Spread, limit: Spread) -> Row:
    count = setting.sizes.restart_blocks
    return Row(
        name="restart",
        what=f"start of a node over {count} blocks in NVMe; all of them match then",
        unit="ms",
        value=opened,
        limit_what=f"{count} direct reads of 4 KiB by {QUEUE_DEPTH} threads: the headers' pages",
        limit=limit,
        targets=(Target("p50", "<=", 1000),),
        note="open, scan and adopt; DRAM is small and not prefaulted",
    )
