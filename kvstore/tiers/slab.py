"""The format of a slab file, and its inspection without a node.

A slab is one preallocated file: a superblock, a map, and extents. `docs/slab-format.md` has a
diagram.

The map has one u32 per 4 KiB granule of the data area: the number of granules of the extent that
begins there and a tag of its generation (`MapEntry`), or 0. It exists because headers are the
index: without it, a restarted node would have to read every granule to find them, 25 million for
100 GiB; with it, only the few thousand pages that matter. The map is only a hint. It is written
without a journal or a flush; an entry only points to a header, and the header is verified (its
checksum, the offset it names, and the tag). A missing entry means a lost block. A stale entry
points to a page that is no header, or to a header whose payload was overwritten since, which its
segment checksums detect.
"""

from __future__ import annotations

import errno
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from xxhash import xxh3_64_intdigest

from ..errors import CorruptBlock, InvalidInput, TierUnavailable, VersionMismatch
from ..format.header import MAGIC as BLOCK_MAGIC
from ..format.header import MAX_HEADER_BYTES, PAGE_BYTES, Header, read_header, segment_checksum
from ..memory.arena import Extent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

SLAB_NAME = "slab.tiffin"
MAGIC = b"TIFFINS1"
FORMAT_VERSION = 1
GRANULE_BYTES = PAGE_BYTES
_MAP_ENTRY = struct.Struct("<I")
# Of an entry: 64 GiB of granules, four times the largest block; above them the tag.
_GRANULES = (1 << 24) - 1

# magic, checksum | version, granule | capacity, map offset, map bytes, data offset | uuid
_SUPERBLOCK = struct.Struct("<8sQIIQQQQ16s")
_SUMMED_FROM = 16  # the checksum covers [16, PAGE_BYTES)
_HEADER_BYTES = struct.Struct("<I")
_HEADER_BYTES_OFFSET = 112  # in a block header

# The map is read in pieces of this size: 16 GiB of slab each.
_MAP_READ_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class SlabLayout:
    """The layout of a slab file. All offsets and sizes are in bytes, multiples of 4096."""

    capacity_bytes: int  # of the data area
    map_offset: int
    map_bytes: int
    data_offset: int
    uuid: bytes  # 16 bytes, new with every slab

    @property
    def file_bytes(self) -> int:
        return self.data_offset + self.capacity_bytes

    @classmethod
    def plan(cls, capacity_bytes: int, uuid: bytes) -> SlabLayout:
        """The layout of a new slab: superblock, map, data."""
        assert capacity_bytes > 0
        assert capacity_bytes % GRANULE_BYTES == 0
        map_bytes = _round_up(capacity_bytes // GRANULE_BYTES * _MAP_ENTRY.size, PAGE_BYTES)
        return cls(capacity_bytes, PAGE_BYTES, map_bytes, PAGE_BYTES + map_bytes, uuid)

    def pack(self) -> bytes:
        """The superblock, one page."""
        page = bytearray(PAGE_BYTES)
        _SUPERBLOCK.pack_into(
            page, 0, MAGIC, 0, FORMAT_VERSION, GRANULE_BYTES, self.capacity_bytes,
            self.map_offset, self.map_bytes, self.data_offset, self.uuid,
        )  # fmt: skip
        page[8:16] = xxh3_64_intdigest(page[_SUMMED_FROM:]).to_bytes(8, "little")
        return bytes(page)

    @classmethod
    def unpack(cls, page: bytes) -> SlabLayout:
        """The layout in a superblock. Raises CorruptBlock for a page that is no superblock,
        VersionMismatch for a superblock of another format version or granule size."""
        if len(page) < PAGE_BYTES:
            raise CorruptBlock(f"a superblock of {len(page)} bytes; it has {PAGE_BYTES}")
        fields = _SUPERBLOCK.unpack_from(page)
        magic, checksum, version, granule_bytes = fields[:4]
        if magic != MAGIC:
            raise CorruptBlock("wrong magic: not a slab")
        if checksum != xxh3_64_intdigest(page[_SUMMED_FROM:PAGE_BYTES]):
            raise CorruptBlock("superblock checksum differs")
        if version != FORMAT_VERSION or granule_bytes != GRANULE_BYTES:
            raise VersionMismatch(
                f"slab format {version} with granules of {granule_bytes} bytes; "
                f"this program reads format {FORMAT_VERSION} with {GRANULE_BYTES}"
            )
        layout = cls(*fields[4:])
        if layout.capacity_bytes < GRANULE_BYTES or layout != cls.plan(
            layout.capacity_bytes // GRANULE_BYTES * GRANULE_BYTES, layout.uuid
        ):
            raise CorruptBlock(f"impossible layout: {layout}")
        return layout


class MapEntry(NamedTuple):
    """Where an extent begins in the data area, its bytes, and a tag of its block's generation, 1 to
    255. A tag of 0, as older slabs have, fits every generation."""

    offset: int
    length: int
    tag: int = 0

    @staticmethod
    def tag_of(generation: int) -> int:
        return generation % 255 + 1

    def pack(self) -> bytes:
        return _MAP_ENTRY.pack(self.tag << 24 | self.length // GRANULE_BYTES)


def map_entries(fd: int, layout: SlabLayout) -> Iterator[MapEntry]:
    """Every nonzero map entry, ascending, unchecked.

    Reads the parts of the map that were ever written, 16 MiB at a time; the whole map is 1/1024 of
    the slab. Raises OSError.
    """
    start, map_end = layout.map_offset, layout.map_offset + layout.map_bytes
    while (start := _next_data(fd, start, map_end)) < map_end:
        raw = _pread(fd, start, min(_MAP_READ_BYTES, map_end - start))
        entries = np.frombuffer(raw, "<u4", len(raw) // _MAP_ENTRY.size)
        first = (start - layout.map_offset) // _MAP_ENTRY.size
        for index in np.flatnonzero(entries).tolist():
            entry = int(entries[index])
            length = (entry & _GRANULES) * GRANULE_BYTES
            yield MapEntry((first + index) * GRANULE_BYTES, length, entry >> 24)
        start += _MAP_READ_BYTES


def map_entry_offset(layout: SlabLayout, offset: int) -> int:
    """The file offset of the map entry for the extent at `offset` of the data area."""
    return layout.map_offset + offset // GRANULE_BYTES * _MAP_ENTRY.size


def probe_extent(read: Callable[[int, int], bytes], entry: MapEntry, intact_bytes: int) -> Header:
    """The verified header of the extent that a map entry names.

    `read(offset, nbytes)` reads the data area; its first `intact_bytes` existed when the slab was
    opened. Raises CorruptBlock or VersionMismatch when there is no such extent, and the errors of
    `read`.
    """
    offset, length, tag = entry
    if offset + length > intact_bytes:
        raise CorruptBlock(f"extent ends at {offset + length}, the data at {intact_bytes}")
    header = _header_at(read, offset, length)
    if header.extent_bytes != length:
        raise CorruptBlock(f"map says {length} bytes, the header {header.extent_bytes}")
    if tag not in (0, MapEntry.tag_of(header.generation)):
        raise CorruptBlock(f"the header is of generation {header.generation}, the map of another")
    return header


def resolve_overlaps(
    found: Iterable[tuple[Extent, Header]], capacity_bytes: int
) -> tuple[list[tuple[Extent, Header]], list[tuple[Extent, Header]]]:
    """(kept, lost): of overlapping extents, keeps the one with the higher generation, the newer.

    Costs one byte of memory per granule, 25 MB for 100 GiB, during the call.
    """
    newest_first = sorted(found, key=lambda pair: (-pair[1].generation, pair[0].offset))
    taken = np.zeros(capacity_bytes // GRANULE_BYTES, np.bool_)
    kept, lost = [], []
    for extent, header in newest_first:
        first = extent.offset // GRANULE_BYTES
        granules = taken[first : first + extent.length // GRANULE_BYTES]
        if granules.any():
            lost.append((extent, header))
        else:
            granules[:] = True
            kept.append((extent, header))
    kept.sort(key=lambda pair: pair[0].offset)
    return kept, lost


@dataclass(frozen=True, slots=True)
class SlabBlock:
    """One extent of a slab in an inspection's report. `offset` is from the data area's start."""

    key: str  # hex, empty when there is no header to read it from
    offset: int
    extent_bytes: int
    payload_bytes: int
    generation: int
    token_count: int
    algorithm: str  # of its segments' checksums, empty when there is no header
    damage: str  # what is wrong with it, or empty

    @property
    def status(self) -> str:
        return "damaged" if self.damage else "ok"


@dataclass(frozen=True, slots=True)
class SlabReport:
    """The result of inspecting a slab file."""

    path: Path
    uuid: str  # hex
    capacity_bytes: int
    missing_bytes: int  # difference to the file length in the superblock, if the file is shorter
    blocks: tuple[SlabBlock, ...]  # by offset
    payload_verified: bool

    @property
    def damaged_blocks(self) -> int:
        return sum(1 for block in self.blocks if block.damage)

    @property
    def used_bytes(self) -> int:
        """Total bytes of the intact extents."""
        return sum(block.extent_bytes for block in self.blocks if not block.damage)


def inspect_slab(
    path: str | os.PathLike[str],
    *,
    verify_payload: bool = False,
    scan_all: bool = False,
) -> SlabReport:
    """List the blocks of a slab (the file, or the directory it is in). Reads only.

    A node may be using the slab; its concurrent changes can then show as damage. `scan_all` ignores
    the map and tries every granule, which also finds blocks that were erased and not yet
    overwritten; it reads the whole slab, and without a superblock derives the layout from the
    file's size.

    `verify_payload` reads every payload and checks it, segment by segment.

    Raises InvalidInput when there is no such file, CorruptBlock when it is no slab, VersionMismatch
    for another format version, TierUnavailable when it cannot be read.
    """
    file = Path(path)
    if file.is_dir():
        file /= SLAB_NAME
    try:
        with open(file, "rb", buffering=0) as raw:
            return _Inspection(file, raw.fileno(), scan_all).report(verify_payload)
    except FileNotFoundError as error:
        raise InvalidInput(f"no slab at {file}") from error
    except OSError as error:
        raise TierUnavailable(f"cannot read {file}: {error.strerror}") from error


class _Inspection:
    def __init__(self, file: Path, fd: int, scan_all: bool) -> None:
        self._file = file
        self._fd = fd
        self._scan_all = scan_all
        self._file_bytes = os.fstat(fd).st_size
        self._layout = self._read_layout()
        missing_bytes = max(0, self._layout.file_bytes - self._file_bytes)
        self._missing_bytes = missing_bytes
        self._intact_bytes = max(0, self._layout.capacity_bytes - missing_bytes)

    def report(self, verify_payload: bool) -> SlabReport:
        found: list[tuple[Extent, Header]] = []
        damaged: list[SlabBlock] = []
        probe = self._probe_any if self._scan_all else self._probe_mapped
        for entry in self._candidates():
            try:
                header = probe(entry)
            except (CorruptBlock, VersionMismatch) as error:
                if not self._scan_all:
                    damaged.append(SlabBlock("", *entry[:2], 0, 0, 0, "", str(error)))
                continue
            found.append((Extent(entry.offset, header.extent_bytes), header))
        kept, lost = resolve_overlaps(found, self._layout.capacity_bytes)
        damaged += [_describe(pair, "overlapped by a newer extent") for pair in lost]
        for extent, header in kept:
            damage = self._payload_damage(extent, header) if verify_payload else ""
            damaged.append(_describe((extent, header), damage))
        return SlabReport(
            path=self._file,
            uuid=self._layout.uuid.hex(),
            capacity_bytes=self._layout.capacity_bytes,
            missing_bytes=self._missing_bytes,
            blocks=tuple(sorted(damaged, key=lambda block: block.offset)),
            payload_verified=verify_payload,
        )

    def _read_layout(self) -> SlabLayout:
        try:
            return SlabLayout.unpack(_pread(self._fd, 0, PAGE_BYTES))
        except CorruptBlock:
            pages = self._file_bytes // PAGE_BYTES
            if not self._scan_all or pages < 3:
                raise
            # Of n pages one is the superblock, and of the others 1 in 1025 is a page of the map.
            granules = pages - 1 - -(-(pages - 1) // 1025)
            return SlabLayout.plan(granules * GRANULE_BYTES, bytes(16))

    def _candidates(self) -> Iterator[MapEntry]:
        if not self._scan_all:
            yield from map_entries(self._fd, self._layout)
            return
        for start in range(0, self._intact_bytes, _MAP_READ_BYTES):
            data = self._read(start, min(_MAP_READ_BYTES, self._intact_bytes - start))
            for at in range(0, len(data), GRANULE_BYTES):
                if data.startswith(BLOCK_MAGIC, at):
                    yield MapEntry(start + at, self._intact_bytes - start - at)

    def _probe_mapped(self, entry: MapEntry) -> Header:
        return probe_extent(self._read, entry, self._intact_bytes)

    def _probe_any(self, entry: MapEntry) -> Header:
        header = _header_at(self._read, entry.offset, entry.length)
        if header.extent_bytes > entry.length or header.extent_bytes % GRANULE_BYTES:
            raise CorruptBlock(f"extent of {header.extent_bytes} bytes does not fit")
        return header

    def _payload_damage(self, extent: Extent, header: Header) -> str:
        start, bad = extent.offset + header.header_bytes, []
        segments = zip(header.segment_bytes.tolist(), header.checksums.tolist(), strict=True)
        for index, (length, checksum) in enumerate(segments):
            if segment_checksum(self._read(start, length), header.algorithm) != checksum:
                bad.append(index)
            start += length
        return f"payload differs from its checksum in segments {bad}" if bad else ""

    def _read(self, offset: int, nbytes: int) -> bytes:
        return _pread(self._fd, self._layout.data_offset + offset, nbytes)


def _header_at(read: Callable[[int, int], bytes], offset: int, length: int) -> Header:
    page = read(offset, PAGE_BYTES)
    if len(page) == PAGE_BYTES:
        (header_bytes,) = _HEADER_BYTES.unpack_from(page, _HEADER_BYTES_OFFSET)
        if PAGE_BYTES < header_bytes <= min(length, MAX_HEADER_BYTES):
            page = read(offset, header_bytes)
    return read_header(page, offset_expected=offset)


def _describe(pair: tuple[Extent, Header], damage: str) -> SlabBlock:
    extent, header = pair
    return SlabBlock(
        key=header.key.hex(),
        offset=extent.offset,
        extent_bytes=extent.length,
        payload_bytes=header.payload_bytes,
        generation=header.generation,
        token_count=header.token_count,
        algorithm=header.algorithm,
        damage=damage,
    )


def _pread(fd: int, offset: int, nbytes: int) -> bytes:
    """`nbytes` at `offset`, fewer only at the end of the file."""
    data = os.pread(fd, nbytes, offset)
    while 0 < len(data) < nbytes:
        rest = os.pread(fd, nbytes - len(data), offset + len(data))
        if not rest:
            break
        data += rest
    return data


def _next_data(fd: int, offset: int, end: int) -> int:
    """The first page from `offset` on that may contain data; a new map is one long file hole."""
    if offset >= end:
        return end
    try:
        data_offset = os.lseek(fd, offset, os.SEEK_DATA)
    except OSError as error:
        if error.errno == errno.ENXIO:  # nothing but a hole up to the end of the file
            return end
        if error.errno == errno.EINVAL:  # a filesystem without SEEK_DATA
            return offset
        raise
    return min(end, max(offset, data_offset // PAGE_BYTES * PAGE_BYTES))


def _round_up(nbytes: int, multiple: int) -> int:
    return -(-nbytes // multiple) * multiple
