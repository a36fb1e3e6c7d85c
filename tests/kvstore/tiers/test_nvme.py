"""The NVMe tier: restarts, damage of every kind, and disks that refuse.

One rule in all of them: a scan yields what was committed, byte for byte; the rest is a count and
a warning.
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tiffin.kvstore.errors import CorruptBlock, InvalidInput, TierUnavailable
from tiffin.kvstore.format.header import PAGE_BYTES
from tiffin.kvstore.memory.arena import Extent
from tiffin.kvstore.testing import TIER_BYTES, block_header, checked, random_bytes, store_block
from tiffin.kvstore.tiers.base import TierWarning
from tiffin.kvstore.tiers.nvme import NvmeTier
from tiffin.kvstore.tiers.slab import (
    SLAB_NAME,
    MapEntry,
    SlabLayout,
    inspect_slab,
    map_entry_offset,
)

if TYPE_CHECKING:
    from collections.abc import Callable

PAYLOAD_BYTES = 10_000


def _open(directory: Path, **options: Any) -> NvmeTier:
    return NvmeTier(directory, TIER_BYTES, **options)


def _filled(directory: Path, count: int) -> tuple[SlabLayout, list[Extent]]:
    """A closed slab with blocks 0, 1, ...: the number is the key and the payload's seed."""
    with checked(_open(directory)) as tier:
        extents = [
            store_block(tier, random_bytes(PAYLOAD_BYTES, i), key=_key(i), generation=i + 1)
            for i in range(count)
        ]
        return tier.layout, extents


def _key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def _patch(directory: Path, offset: int, change: Callable[[bytearray], None], nbytes: int) -> None:
    with open(directory / SLAB_NAME, "r+b") as file:
        file.seek(offset)
        data = bytearray(file.read(nbytes))
        change(data)
        file.seek(offset)
        file.write(data)


def _survivors(directory: Path) -> tuple[list[int], int]:
    """(numbers of the blocks that a restart finds, how many it refused); compares payloads."""
    with checked(_open(directory)) as tier:
        numbers = []
        for extent, header in tier.scan():
            tier.arena.claim(extent.offset, extent.length)
            number = int.from_bytes(header.key, "big")
            target = np.empty(header.payload_bytes, np.uint8)
            tier.read(extent, header.header_bytes, target)
            assert np.array_equal(target, random_bytes(PAYLOAD_BYTES, number))
            numbers.append(number)
        return sorted(numbers), tier.statistics().damaged


def test_a_restart_finds_what_was_committed(tmp_path: Path) -> None:
    layout, extents = _filled(tmp_path, 5)
    assert _survivors(tmp_path) == ([0, 1, 2, 3, 4], 0)
    with _open(tmp_path) as tier:
        assert tier.layout == layout
        tier.erase(extents[3])
    assert _survivors(tmp_path) == ([0, 1, 2, 4], 0)


def test_files_are_private(tmp_path: Path) -> None:
    directory = tmp_path / "deep" / "slab"
    _filled(directory, 1)
    assert directory.stat().st_mode & 0o777 == 0o700
    assert (directory / SLAB_NAME).stat().st_mode & 0o777 == 0o600


WRITER = """
import os, sys
from pathlib import Path
from tiffin.kvstore.testing import TIER_BYTES, random_bytes, store_block
from tiffin.kvstore.tiers.nvme import NvmeTier
tier = NvmeTier(sys.argv[1], TIER_BYTES)
held = []
for i in range(100_000):
    if len(held) == 200:
        tier.release(held.pop(0))
    key = i.to_bytes(16, "big")
    held.append(store_block(tier, random_bytes(10_000, i), key=key, generation=i + 1))
    os.write(1, b"%d\\n" % i)
"""


def test_a_killed_process_loses_at_most_what_it_was_writing(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if int(line) == 300:
                break
        process.send_signal(signal.SIGKILL)
        last = max([300, *(int(line) for line in process.stdout)])
    numbers, damaged = _survivors(tmp_path)
    assert damaged == 0
    # The one in progress may have been released, committed, or neither.
    assert numbers[-1] in (last, last + 1)
    assert 199 <= len(numbers) <= 200
    assert numbers == list(range(numbers[0], numbers[-1] + 1))


def test_one_process_at_a_time(tmp_path: Path) -> None:
    with _open(tmp_path), pytest.raises(TierUnavailable, match="in use by another node"):
        _open(tmp_path)
    _open(tmp_path).close()


@pytest.mark.parametrize("fresh", [True, False])
def test_two_nodes_cannot_share_a_slab_by_two_hard_links(tmp_path: Path, fresh: bool) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    second.mkdir()
    if not fresh:
        _open(first).close()
    with _open(first):
        (second / SLAB_NAME).hardlink_to(first / SLAB_NAME)
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(TierUnavailable, match="under another name: delete this name"):
            _open(second)
        assert len(os.listdir("/proc/self/fd")) == before
        assert sorted(path.name for path in second.iterdir()) == [SLAB_NAME]
    with _open(second), pytest.raises(TierUnavailable, match="under another name"):
        _open(first)


@pytest.mark.parametrize("byte", [0, 8, 16, 32, 48, 64, 80, 88, 96, 104, 108, 112, 116, 118, 120,
                                  128, 136, 200, 391, 392, 4095])  # fmt: skip
@pytest.mark.parametrize("bit", [0, 7])
def test_a_flipped_bit_in_a_header_is_a_miss(tmp_path: Path, byte: int, bit: int) -> None:
    layout, extents = _filled(tmp_path, 3)

    def flip(data: bytearray) -> None:
        data[0] ^= 1 << bit

    _patch(tmp_path, layout.data_offset + extents[1].offset + byte, flip, 1)
    report = inspect_slab(tmp_path)
    assert [block.status for block in report.blocks] == ["ok", "damaged", "ok"]
    assert _survivors(tmp_path) == ([0, 2], 1)
    assert _survivors(tmp_path) == ([0, 2], 0)  # refused once, then forgotten


def test_swapped_extents_are_misses(tmp_path: Path) -> None:
    layout, extents = _filled(tmp_path, 3)
    length = extents[0].length

    def swap(data: bytearray) -> None:
        data[:length], data[length:] = data[length:], data[:length]

    assert extents[0].offset + length == extents[1].offset
    _patch(tmp_path, layout.data_offset + extents[0].offset, swap, 2 * length)
    assert _survivors(tmp_path) == ([2], 2)


@pytest.mark.parametrize("granules", [1, 2, 5, 2**32 - 1])
def test_a_wrong_map_entry_is_a_miss(tmp_path: Path, granules: int) -> None:
    layout, extents = _filled(tmp_path, 3)

    def set_entry(data: bytearray) -> None:
        data[:] = granules.to_bytes(4, "little")

    _patch(tmp_path, map_entry_offset(layout, extents[0].offset), set_entry, 4)
    _patch(tmp_path, map_entry_offset(layout, TIER_BYTES - PAGE_BYTES), set_entry, 4)
    assert _survivors(tmp_path) == ([1, 2], 2)


@pytest.mark.parametrize(
    ("generation", "found"), [(1, [0, 1]), (9, [1]), (None, [0, 1])], ids=["own", "newer", "older"]
)
def test_a_map_entry_leads_to_no_header_of_another_generation(
    tmp_path: Path, generation: int | None, found: list[int]
) -> None:
    """A power cut may leave a newer block's entry, but not its header, over a block that was
    removed meanwhile. Slabs of older releases have no tags."""
    layout, (extent, _) = _filled(tmp_path, 2)
    tag = 0 if generation is None else MapEntry.tag_of(generation)

    def set_entry(data: bytearray) -> None:
        data[:] = MapEntry(*extent, tag).pack()

    _patch(tmp_path, map_entry_offset(layout, extent.offset), set_entry, 4)
    assert _survivors(tmp_path) == (found, 2 - len(found))


def test_a_lost_map_is_a_lost_cache_and_scan_all_finds_it(tmp_path: Path) -> None:
    layout, _ = _filled(tmp_path, 3)

    def clear(data: bytearray) -> None:
        data[:] = bytes(len(data))

    _patch(tmp_path, layout.map_offset, clear, layout.map_bytes)
    assert inspect_slab(tmp_path).blocks == ()
    report = inspect_slab(tmp_path, scan_all=True, verify_payload=True)
    assert [block.key for block in report.blocks] == [_key(i).hex() for i in range(3)]
    assert report.damaged_blocks == 0
    _patch(tmp_path, 0, clear, PAGE_BYTES)
    with pytest.raises(CorruptBlock, match="not a slab"):
        inspect_slab(tmp_path)
    assert inspect_slab(tmp_path, scan_all=True).blocks == report.blocks


def test_a_full_map_of_garbage_is_survived(tmp_path: Path) -> None:
    layout, _ = _filled(tmp_path, 3)

    def scramble(data: bytearray) -> None:
        data[:] = random_bytes(len(data), 9).tobytes()

    _patch(tmp_path, layout.map_offset, scramble, layout.map_bytes)
    numbers, damaged = _survivors(tmp_path)
    assert numbers == []
    assert damaged == TIER_BYTES // PAGE_BYTES


def test_of_overlapping_extents_the_newer_stays(tmp_path: Path) -> None:
    """A power cut may restore the map entry of a block that was released since."""
    with checked(_open(tmp_path)) as tier:
        payload = random_bytes(PAYLOAD_BYTES, 7)
        newer = Extent(4 * PAGE_BYTES, 4 * PAGE_BYTES)
        for older in (Extent(2 * PAGE_BYTES, 3 * PAGE_BYTES), Extent(0, 16 * PAGE_BYTES)):
            tier.commit(older, block_header(older, payload[:100], generation=3))
        tier.write(newer, PAGE_BYTES, payload)
        tier.commit(newer, block_header(newer, payload, key=_key(7), generation=9))
    report = inspect_slab(tmp_path)
    assert [block.damage for block in report.blocks] == ["overlapped by a newer extent"] * 2 + [""]
    assert _survivors(tmp_path) == ([7], 2)


@pytest.mark.parametrize("keep_bytes", [0, 100, PAGE_BYTES - 1])
def test_a_slab_cut_inside_its_superblock_is_set_aside(tmp_path: Path, keep_bytes: int) -> None:
    _filled(tmp_path, 3)
    os.truncate(tmp_path / SLAB_NAME, keep_bytes)
    with pytest.warns(TierWarning, match="is no slab"):
        assert _survivors(tmp_path) == ([], 0)
    assert (tmp_path / "slab.tiffin.damaged-1").stat().st_size == keep_bytes


def test_a_truncated_slab_keeps_what_is_left(tmp_path: Path) -> None:
    layout, extents = _filled(tmp_path, 5)
    os.truncate(tmp_path / SLAB_NAME, layout.data_offset + extents[3].offset + PAGE_BYTES)
    report = inspect_slab(tmp_path)
    assert report.missing_bytes == TIER_BYTES - extents[3].offset - PAGE_BYTES
    assert [block.status for block in report.blocks] == ["ok"] * 3 + ["damaged"] * 2
    with pytest.warns(TierWarning, match="B short"):
        assert _survivors(tmp_path) == ([0, 1, 2], 2)
    assert (tmp_path / SLAB_NAME).stat().st_size == layout.file_bytes
    os.truncate(tmp_path / SLAB_NAME, layout.map_offset + 10)
    with pytest.warns(TierWarning, match="B short"):
        assert _survivors(tmp_path)[0] == []


def test_damaged_superblocks_are_set_aside_a_limited_number_of_times(tmp_path: Path) -> None:
    for number in range(1, 9):
        _filled(tmp_path, 1)
        _patch(tmp_path, 40 + number, lambda data: data.reverse(), 2000)
        _patch(tmp_path, 24, lambda data: data.__setitem__(0, data[0] ^ 1), 1)
        with pytest.warns(TierWarning, match=f"damaged-{number}"):
            _open(tmp_path).close()
    _patch(tmp_path, 24, lambda data: data.__setitem__(0, data[0] ^ 1), 1)
    with pytest.raises(TierUnavailable, match="8 damaged ones"):
        _open(tmp_path)


def test_another_version_is_left_alone(tmp_path: Path) -> None:
    layout, _ = _filled(tmp_path, 1)
    page = bytearray(layout.pack())
    page[16] = 2
    page[8:16] = _xxh3(page[16:]).to_bytes(8, "little")
    _patch(tmp_path, 0, lambda data: data.__setitem__(slice(None), page), PAGE_BYTES)
    with pytest.raises(TierUnavailable, match="slab format 2"):
        _open(tmp_path)
    assert os.listdir(tmp_path) == [SLAB_NAME]


def _xxh3(data: bytes | bytearray) -> int:
    from xxhash import xxh3_64_intdigest

    return xxh3_64_intdigest(data)


def test_another_capacity_is_refused(tmp_path: Path) -> None:
    _filled(tmp_path, 1)
    for capacity_bytes in (TIER_BYTES // 2, TIER_BYTES * 2):
        with pytest.raises(InvalidInput, match=f"ask for exactly {TIER_BYTES} bytes, or delete"):
            NvmeTier(tmp_path, capacity_bytes)
    assert _survivors(tmp_path) == ([0], 0)


def test_an_interrupted_creation_leaves_no_slab(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slab.new").write_bytes(b"half")
    monkeypatch.setattr(os, "fsync", _refusing(errno.EIO))
    with pytest.raises(TierUnavailable, match="EIO"):
        _open(tmp_path)
    assert os.listdir(tmp_path) == []
    monkeypatch.undo()
    _open(tmp_path).close()


def test_a_symlink_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_bytes(bytes(PAGE_BYTES))
    (tmp_path / SLAB_NAME).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(TierUnavailable, match="ELOOP"):
        _open(tmp_path)


def test_no_space_shows_at_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "posix_fallocate", _refusing(errno.ENOSPC))
    with pytest.raises(TierUnavailable, match=r"does not fit.*ENOSPC.*B are free"):
        _open(tmp_path)
    assert os.listdir(tmp_path) == []


def test_a_small_filesystem_says_what_is_missing(tmp_path: Path) -> None:
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1M", "tmpfs", str(tmp_path)], capture_output=True
    ).returncode:
        pytest.skip("may not mount")
    try:
        with pytest.raises(TierUnavailable, match="too little"):
            _open(tmp_path)
        assert os.listdir(tmp_path) == []
        subprocess.run(["mount", "-o", "remount,ro", str(tmp_path)], check=True)
        with pytest.raises(TierUnavailable, match="EROFS"):
            _open(tmp_path)
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_filesystems_without_fallocate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "posix_fallocate", _refusing(errno.EOPNOTSUPP))
    _filled(tmp_path, 2)
    assert _survivors(tmp_path) == ([0, 1], 0)


def test_a_directory_that_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(TierUnavailable, match="EEXIST"):
        _open(tmp_path / "file")
    with pytest.raises(TierUnavailable, match="ENOTDIR"):
        _open(tmp_path / "file" / "below")
    monkeypatch.setattr(Path, "mkdir", _refusing(errno.EACCES))
    with pytest.raises(TierUnavailable, match="EACCES"):
        _open(tmp_path / "new")


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EROFS])
def test_a_disk_that_refuses_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    with checked(_open(tmp_path, piece_bytes=PAGE_BYTES)) as tier:
        kept = store_block(tier, random_bytes(PAYLOAD_BYTES, 0))
        extent = tier.reserve(64 * PAGE_BYTES)
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwritev", _refusing(code))
            with pytest.raises(TierUnavailable, match=errno.errorcode[code]):
                tier.write(extent, 0, bytes(64 * PAGE_BYTES))
        statistics = tier.statistics()
        assert (statistics.errors, statistics.healthy) == (1, False)
        target = np.empty(PAYLOAD_BYTES, np.uint8)
        tier.read(kept, PAGE_BYTES, target)  # stored blocks stay readable
        assert np.array_equal(target, random_bytes(PAYLOAD_BYTES, 0))


def test_a_disk_that_refuses_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _filled(tmp_path, 2)
    with checked(_open(tmp_path)) as tier:
        monkeypatch.setattr(os, "preadv", _refusing(errno.EIO))
        with pytest.raises(TierUnavailable, match="EIO"):
            tier.read(tier.reserve(1), 0, bytearray(10))
        with pytest.raises(TierUnavailable, match="EIO"):
            tier.scan()
        assert not tier.healthy


def test_a_file_that_vanishes_under_a_node(tmp_path: Path) -> None:
    with checked(_open(tmp_path)) as tier:
        extent = store_block(tier, random_bytes(PAYLOAD_BYTES, 0))
        os.truncate(tier.path, PAGE_BYTES)
        with pytest.raises(TierUnavailable, match="ends"):
            tier.read(extent, PAGE_BYTES, bytearray(PAYLOAD_BYTES))


def test_a_failed_call_returns_only_after_its_last_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the caller would reuse memory that the disk is still writing to."""
    real = os.preadv
    under_way: set[int] = set()

    def slow_or_failing(fd: int, buffers: list[memoryview], offset: int) -> int:
        if offset == first:
            raise OSError(errno.EIO, "Input/output error")
        under_way.add(offset)
        time.sleep(0.05)
        moved = real(fd, buffers, offset)
        under_way.discard(offset)
        return moved

    with checked(_open(tmp_path, piece_bytes=PAGE_BYTES)) as tier:
        extent = tier.reserve(8 * PAGE_BYTES)
        first = tier.layout.data_offset + extent.offset
        monkeypatch.setattr(os, "preadv", slow_or_failing)
        with pytest.raises(TierUnavailable):
            tier.read(extent, 0, bytearray(8 * PAGE_BYTES))
        assert under_way == set()


def test_short_transfers_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def short(verb: Callable[..., int]) -> Callable[..., int]:
        def transfer(fd: int, buffers: list[memoryview], offset: int) -> int:
            (buffer,) = buffers
            moved = verb(fd, [buffer[: 2 * PAGE_BYTES]], offset)
            return moved if moved < 2 * PAGE_BYTES else moved - 100  # cut inside a page

        return transfer

    monkeypatch.setattr(os, "pwritev", short(os.pwritev))
    monkeypatch.setattr(os, "preadv", short(os.preadv))
    _filled(tmp_path, 4)
    assert _survivors(tmp_path) == ([0, 1, 2, 3], 0)


@pytest.mark.parametrize("at_open", [True, False])
def test_without_direct_io_it_warns_and_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_open: bool
) -> None:
    real_open, real_preadv = os.open, os.preadv
    direct_fds = set()

    def refuse_open(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT and at_open:
            raise OSError(errno.EINVAL, "Invalid argument")
        fd = real_open(path, flags, mode)
        direct_fds.discard(fd)
        if flags & os.O_DIRECT:
            direct_fds.add(fd)
        return fd

    def refuse_preadv(fd: int, buffers: list[memoryview], offset: int) -> int:
        if fd in direct_fds:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "open", refuse_open)
    monkeypatch.setattr(os, "preadv", refuse_preadv)
    with pytest.warns(TierWarning, match="without direct I/O"):
        tier = _open(tmp_path)
    with checked(tier):
        assert not tier.statistics().direct_io
        extent = store_block(tier, random_bytes(PAYLOAD_BYTES, 0))
        assert [found for found, _ in tier.scan()] == [extent]


def test_direct_io_is_used_where_it_works(tmp_path: Path) -> None:
    with checked(_open(tmp_path)) as tier:
        if not tier.statistics().direct_io:
            pytest.skip("this filesystem has no direct I/O")
        extent = tier.reserve(TIER_BYTES)
        tier.write(extent, 0, np.ones(TIER_BYTES, np.uint8))
        assert tier.statistics().direct_io


def test_inspection_verifies_payloads(tmp_path: Path) -> None:
    layout, extents = _filled(tmp_path, 3)
    at = layout.data_offset + extents[1].offset + PAGE_BYTES + PAYLOAD_BYTES - 1
    _patch(tmp_path, at, lambda data: data.__setitem__(0, data[0] ^ 0x10), 1)
    assert inspect_slab(tmp_path / SLAB_NAME).damaged_blocks == 0
    report = inspect_slab(tmp_path, verify_payload=True)
    assert [block.status for block in report.blocks] == ["ok", "damaged", "ok"]
    assert report.blocks[1].damage == "payload differs from its checksum in segments [0]"
    assert (report.blocks[0].token_count, report.blocks[0].generation) == (16, 1)
    assert report.used_bytes == extents[0].length + extents[2].length


def test_inspection_of_nothing(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="no slab at"):
        inspect_slab(tmp_path)


def test_a_queue_depth_that_cannot_be(tmp_path: Path) -> None:
    for depth in (0, 65):
        with pytest.raises(InvalidInput):
            _open(tmp_path, queue_depth=depth)


def test_descriptors_and_the_lock_are_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = len(os.listdir("/proc/self/fd"))
    _filled(tmp_path, 1)
    with pytest.raises(InvalidInput):
        NvmeTier(tmp_path, 2 * TIER_BYTES)
    monkeypatch.setattr(os, "preadv", _refusing(errno.EIO))
    with pytest.raises(TierUnavailable):
        _open(tmp_path)
    monkeypatch.undo()
    assert len(os.listdir("/proc/self/fd")) == before
    assert _survivors(tmp_path) == ([0], 0)


def test_two_thousand_blocks_are_scanned_quickly(tmp_path: Path) -> None:
    count = 2000
    with checked(NvmeTier(tmp_path, count * 2 * PAGE_BYTES)) as tier:
        for i in range(count):
            extent = tier.reserve(2 * PAGE_BYTES)
            tier.commit(extent, block_header(extent, random_bytes(0, 0), key=_key(i)))
    with checked(NvmeTier(tmp_path, count * 2 * PAGE_BYTES)) as tier:
        start = time.perf_counter()
        assert sum(1 for _ in tier.scan()) == count
        assert time.perf_counter() - start < 5  # 0.1 s on an idle machine


def _refusing(code: int) -> Callable[..., Any]:
    def refuse(*args: object, **kwargs: object) -> Any:
        raise OSError(code, os.strerror(code))

    return refuse
