"""A power cut damages no result, and brings back no block that was removed.

The simulated disk forgets: of each page that was written since the last flush, any version may be
left, at random. Blocks that a node finds there must be right, and none of them a removed one.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import powerworker
import pytest
from kvsupport import EXTENT, assert_right, fresh_prefix, payloads_of, wait_until

from tiffin.kvstore import Client
from tiffin.kvstore.errors import DeadlineExceeded, TierUnavailable
from tiffin.kvstore.format.header import PAGE_BYTES
from tiffin.kvstore.node.node import Node, NodeOptions
from tiffin.kvstore.tiers.slab import SLAB_NAME, inspect_slab

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from tiffin.kvstore import Prefix

DRAM_BLOCKS, NVME_BLOCKS = 8, 24


def open_node(path: Path) -> Node:
    return Node(
        NodeOptions(
            dram_bytes=DRAM_BLOCKS * EXTENT, nvme_path=path, nvme_bytes=NVME_BLOCKS * EXTENT
        )
    )


class Disk:
    """The slab in `path` as a power cut at any moment would leave it."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path = path
        self.flushes = 0
        self.before_write: Callable[[], object] = lambda: None
        self.before_flush: Callable[[], object] = lambda: None
        self._lock = threading.Lock()
        self._pages: dict[int, list[bytes]] = {}  # versions since the last flush
        self._flushed = bytearray((path / SLAB_NAME).read_bytes())
        self._calls = {name: getattr(os, name) for name in ("pwrite", "pwritev", "fdatasync")}
        monkeypatch.setattr(os, "pwrite", self._pwrite)
        monkeypatch.setattr(os, "pwritev", self._pwritev)
        monkeypatch.setattr(os, "fdatasync", self._flush)
        monkeypatch.setattr(os, "fsync", self._flush)

    def _is_ours(self, descriptor: int) -> bool:
        return os.fstat(descriptor).st_ino == (self.path / SLAB_NAME).stat().st_ino

    def _pwrite(self, descriptor: int, data: Any, offset: int) -> int:
        return self._write("pwrite", descriptor, data, bytes(data), offset)

    def _pwritev(self, descriptor: int, buffers: Sequence[Any], offset: int) -> int:
        return self._write("pwritev", descriptor, buffers, b"".join(map(bytes, buffers)), offset)

    def _write(self, call: str, descriptor: int, data: Any, written: bytes, offset: int) -> int:
        ours = self._is_ours(descriptor)
        if ours:
            self.before_write()
        with self._lock:
            done: int = self._calls[call](descriptor, data, offset)
            if ours:
                self._note(offset, written[:done])
            return done

    def _note(self, offset: int, written: bytes) -> None:
        first = offset // PAGE_BYTES
        for page in range(first, -(-(offset + len(written)) // PAGE_BYTES)):
            start = page * PAGE_BYTES
            versions = self._pages.setdefault(page, [])
            flushed = self._flushed[start : start + PAGE_BYTES]
            before = bytearray(versions[-1] if versions else flushed)
            at = max(offset, start)
            part = written[at - offset : start + PAGE_BYTES - offset]
            before[at - start : at - start + len(part)] = part
            versions.append(bytes(before))

    def flush(self) -> None:
        """Flush, as the kernel does by itself at some time."""
        with open(self.path / SLAB_NAME, "rb") as file:
            self._flush(file.fileno())

    def _flush(self, descriptor: int) -> None:
        if not self._is_ours(descriptor):
            return
        self.before_flush()
        with self._lock:
            self._calls["fdatasync"](descriptor)
            self.flushes += 1
            for page, versions in self._pages.items():
                self._flushed[page * PAGE_BYTES : (page + 1) * PAGE_BYTES] = versions[-1]
            self._pages.clear()

    def cut(self, target: Path, dice: random.Random, survival: float) -> None:
        """Write to `target` what a power cut now would leave."""
        target.mkdir()
        with self._lock:
            left = bytearray(self._flushed)
            for page, versions in self._pages.items():
                if dice.random() < survival:
                    left[page * PAGE_BYTES : (page + 1) * PAGE_BYTES] = dice.choice(versions)
        (target / SLAB_NAME).write_bytes(left)


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Disk:
    open_node(tmp_path / "a").close()
    return Disk(tmp_path / "a", monkeypatch)


@pytest.fixture
def node(disk: Disk) -> Iterator[Node]:
    node = open_node(disk.path)
    yield node
    node.check()
    node.close()


def put_on_disk(client: Client, disk: Disk, blocks: int) -> list[Prefix]:
    """Put blocks and stop the node, so that they are flushed to the disk."""
    prefixes = [fresh_prefix(1) for _ in range(blocks)]
    for prefix in prefixes:
        assert client.put(prefix, payloads_of(prefix)).complete
    wait_until(
        lambda: all(client.match(prefix).blocks for prefix in prefixes), "the blocks to be there"
    )
    return prefixes


def found_after(disk: Disk, target: Path, prefixes: Sequence[Prefix], survival: float = 0.5,
                seed: int = 0) -> list[int]:  # fmt: skip
    """Which of `prefixes` a node finds after a power cut; their bytes are compared."""
    disk.cut(target, random.Random(seed), survival)
    node = open_node(target)
    try:
        with Client.attach(node) as client:
            found = [i for i, prefix in enumerate(prefixes) if client.match(prefix).blocks]
            for i in found:
                with client.get(prefixes[i], timeout_s=30.0) as blocks:
                    assert_right(blocks, prefixes[i])
        node.check()
    finally:
        node.close()
    return found


@pytest.mark.parametrize("survival", [0.0, 0.5])
def test_a_power_cut_does_not_bring_back_what_was_removed(
    tmp_path: Path, disk: Disk, survival: float
) -> None:
    node = open_node(disk.path)
    with Client.attach(node) as client:
        prefixes = put_on_disk(client, disk, 12)
    node.close()  # all of them are on the disk, flushed
    node = open_node(disk.path)
    with Client.attach(node) as client:
        assert found_after(disk, tmp_path / "before", prefixes) == list(range(12))
        with client.get(prefixes[0]) as blocks:  # in both tiers
            assert blocks.complete
        for prefix in prefixes[:6]:
            assert client.remove(prefix) == 1
        assert found_after(disk, tmp_path / "after", prefixes, survival) == list(range(6, 12))
        names = {prefix.keys[0].hex() for prefix in prefixes[:6]}
        every_page = inspect_slab(tmp_path / "after", scan_all=True)
        assert not names & {block.key for block in every_page.blocks}
    node.check()
    node.close()


def test_what_left_by_itself_and_is_removed_then_is_not_brought_back_either(
    tmp_path: Path, disk: Disk, node: Node, client: Client
) -> None:
    """An eviction does not flush; a remove does, even if it finds nothing."""
    old = put_on_disk(client, disk, DRAM_BLOCKS)
    disk.flush()
    while any(client.match(prefix).blocks for prefix in old):
        put_on_disk(client, disk, 1)
        wait_until(lambda: not node.statistics()["queued_moves"], "moves to end")
    for prefix in old:
        assert client.remove(prefix) == 0
    assert found_after(disk, tmp_path / "after", old, survival=0.0) == []


@pytest.mark.parametrize("seed", range(6))
def test_whatever_the_disk_had_not_flushed(
    tmp_path: Path, disk: Disk, node: Node, client: Client, seed: int
) -> None:
    """Blocks are put, read, removed and put again; the power fails at random moments."""
    dice = random.Random(seed)
    prefixes = [fresh_prefix(1) for _ in range(40)]
    removed: set[int] = set()
    for step in range(1, 161):
        chosen = dice.randrange(len(prefixes))
        prefix = prefixes[chosen]
        if dice.random() < 0.55:
            client.put(prefix, payloads_of(prefix))
            removed.discard(chosen)
        elif dice.random() < 0.6:
            client.remove(prefix)
            removed.add(chosen)
        else:
            with client.get(prefix) as blocks:
                assert_right(blocks, prefix)
        if dice.random() < 0.02:
            disk.flush()
        if step % 40 == 0:
            found = found_after(disk, tmp_path / f"cut-{step}", prefixes, dice.random(), seed)
            assert not removed.intersection(found), step


def test_a_remove_waits_for_what_is_on_its_way_to_the_disk(
    tmp_path: Path, disk: Disk, node: Node, client: Client
) -> None:
    writing, go_on = threading.Event(), threading.Event()

    def hold_up() -> None:
        if threading.current_thread().name.startswith("tiffin-mover"):
            writing.set()
            assert go_on.wait(30)

    disk.before_write = hold_up
    prefixes = [fresh_prefix(1) for _ in range(DRAM_BLOCKS)]
    for prefix in prefixes:
        client.put(prefix, payloads_of(prefix))
    assert writing.wait(30)  # above the watermark: the first are being demoted
    removers = [
        threading.Thread(target=client.remove, args=(prefix,), kwargs={"timeout_s": 30.0})
        for prefix in prefixes
    ]
    for remover in removers:
        remover.start()
    wait_until(lambda: not any(client.match(p).blocks for p in prefixes), "all to be forgotten")
    assert any(remover.is_alive() for remover in removers)
    with pytest.raises(DeadlineExceeded, match="Remove again"):
        client.remove(prefixes[0], timeout_s=0.1)
    go_on.set()
    for remover in removers:
        remover.join(30)
        assert not remover.is_alive()
    assert client.remove(prefixes[0]) == 0
    assert found_after(disk, tmp_path / "after", prefixes) == []


def test_removes_at_the_same_time_share_a_flush(disk: Disk, node: Node, client: Client) -> None:
    prefixes = put_on_disk(client, disk, 16)
    wait_until(lambda: not node.statistics()["queued_moves"], "moves to end")
    flushing, go_on = threading.Event(), threading.Event()

    def hold_up() -> None:
        flushing.set()
        assert go_on.wait(30)

    before, disk.before_flush = disk.flushes, hold_up
    removers = [
        threading.Thread(target=client.remove, args=(prefix,), kwargs={"timeout_s": 30.0})
        for prefix in prefixes
    ]
    for remover in removers:
        remover.start()
    assert flushing.wait(30)
    wait_until(lambda: not any(client.match(p).blocks for p in prefixes), "all to be forgotten")
    other = fresh_prefix(1)  # other calls do not wait meanwhile
    assert client.put(other, payloads_of(other)).complete
    go_on.set()
    for remover in removers:
        remover.join(30)
    assert disk.flushes - before <= 3


@pytest.mark.parametrize("verb", ["pwritev", "fdatasync"])
def test_a_disk_that_refuses_to_forget_says_so_and_takes_no_more_blocks(
    disk: Disk, node: Node, client: Client, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    prefixes = put_on_disk(client, disk, 12)
    wait_until(lambda: not node.statistics()["queued_moves"], "moves to end")

    def refuse(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    on_disk = next(p for p in prefixes if node.core.index[p.keys[0]].nvme is not None)
    with monkeypatch.context() as patch:
        patch.setattr(os, verb, refuse)
        with pytest.raises(TierUnavailable, match=r"1 blocks are forgotten here.*a restart"):
            client.remove(on_disk)
    assert client.match(on_disk).blocks == 0
    numbers = node.statistics()["tiers"]["nvme"]
    assert (numbers["writable"], numbers["healthy"]) == (False, False)
    with pytest.raises(TierUnavailable):  # the refused erase was not repeated since
        client.remove(on_disk)
    other = fresh_prefix(DRAM_BLOCKS)
    assert client.put(other, payloads_of(other)).complete


def test_a_disk_that_did_not_erase_is_not_believed_when_it_forgets(
    disk: Disk, node: Node, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Evicted blocks may still be on NVMe, so a removal can't be confirmed."""
    for _ in range(NVME_BLOCKS + DRAM_BLOCKS):
        prefix = fresh_prefix(1)
        client.put(prefix, payloads_of(prefix))
        wait_until(lambda: not node.statistics()["queued_moves"], "moves to end")

    def refuse(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", refuse)
        while node.statistics()["tiers"]["nvme"]["writable"]:
            prefix = fresh_prefix(1)
            client.put(prefix, payloads_of(prefix), timeout_s=0.2)
    with pytest.raises(TierUnavailable, match="a restart"):
        client.remove(prefix)


@pytest.mark.slow
def test_a_file_system_that_stops_as_at_a_power_cut(tmp_path: Path) -> None:
    """The same with ext4 and its journal, as root: the cut loses ext4's own page cache."""
    image, mounted = tmp_path / "image", tmp_path / "mounted"
    mounted.mkdir()
    image.touch()
    os.truncate(image, 256 << 20)

    def mount() -> None:
        command = ["mount", "-o", "loop", str(image), str(mounted)]
        if subprocess.run(command, capture_output=True).returncode:
            pytest.skip("may not mount")

    if shutil.which("mkfs.ext4") is None:
        pytest.skip("no mkfs.ext4")
    subprocess.run(["mkfs.ext4", "-q", "-F", str(image)], check=True)
    mount()
    try:
        subprocess.run([sys.executable, powerworker.__file__, str(mounted)], check=True)
    finally:
        subprocess.run(["umount", str(mounted)], check=True)
    mount()
    try:
        node = powerworker.open_node(mounted)
        with Client.attach(node) as client:
            prefixes = map(powerworker.prefix_of, range(powerworker.BLOCKS))
            found = [bool(client.match(prefix).blocks) for prefix in prefixes]
        node.close()
    finally:
        subprocess.run(["umount", str(mounted)], check=True)
    removed, left = powerworker.REMOVED, powerworker.BLOCKS - powerworker.REMOVED
    assert found == [False] * removed + [True] * left
