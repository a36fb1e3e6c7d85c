"""A failure while a node opens or closes costs a tier, or the node, and leaves nothing open."""

from __future__ import annotations

import errno
import gc
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from kvsupport import EXTENT, assert_right, fresh_prefix, payloads_of, write_block

from tiffin.kvstore import Client
from tiffin.kvstore.errors import TierUnavailable
from tiffin.kvstore.node.node import Node, NodeOptions
from tiffin.kvstore.tiers.nvme import NvmeTier
from tiffin.kvstore.tiers.slab import SLAB_NAME

if TYPE_CHECKING:
    from tiffin.kvstore import Prefix

NVME_BYTES = 32 * EXTENT


def options_for(path: Path) -> NodeOptions:
    return NodeOptions(dram_bytes=8 * EXTENT, nvme_path=path, nvme_bytes=NVME_BYTES)


def held() -> dict[str, int]:
    """What this process holds: threads, descriptors, mapped regions."""
    gc.collect()  # cyclic garbage of earlier tests must not be freed while this one counts
    maps = Path("/proc/self/maps").read_text()
    return {
        "threads": sum(thread.name.startswith("tiffin") for thread in threading.enumerate()),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "regions": maps.count("memfd:"),
    }


def refuse(*_: object) -> int:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def store(tier: NvmeTier, prefix: Prefix, generation: int) -> None:
    """Write the first block of a prefix, as a node would have left it."""
    write_block(tier, tier.reserve(EXTENT), prefix, generation, payloads_of(prefix)[0])


def damage_first_extent(path: Path, tier: NvmeTier) -> None:
    with open(path / SLAB_NAME, "r+b") as file:
        file.seek(tier.layout.data_offset)
        file.write(b"no header")


@pytest.mark.parametrize("damaged", [False, True])
def test_a_disk_that_can_only_be_read_costs_the_tier_and_not_the_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damaged: bool
) -> None:
    """A start has to erase extents that it does not keep: older copies and damaged ones."""
    prefixes = [fresh_prefix(1) for _ in range(3)]
    with NvmeTier(tmp_path, NVME_BYTES) as tier:
        for generation, prefix in enumerate((fresh_prefix(1), *prefixes), 1):
            store(tier, prefix, generation)
        if not damaged:
            store(tier, prefixes[0], 9)
    if damaged:
        damage_first_extent(tmp_path, tier)
    monkeypatch.setattr(os, "pwrite", refuse)
    node = Node(options_for(tmp_path))
    with Client.attach(node) as client:
        numbers = node.statistics()["tiers"]["nvme"]
        assert (numbers["writable"], numbers["healthy"]) == (False, False)
        for prefix in prefixes:
            with client.get(prefix) as blocks:
                assert blocks.complete
                assert_right(blocks, prefix)
        other = fresh_prefix(8)
        assert client.put(other, payloads_of(other)).complete
    node.check()
    monkeypatch.undo()
    node.close()
    with NvmeTier(tmp_path, NVME_BYTES) as tier:  # the directory is free
        assert len(list(tier.scan())) >= 3


@pytest.mark.slow
def test_a_node_that_does_not_open_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each thread in turn can't be started."""
    start, left = threading.Thread.start, 0

    def refuse_behind(thread: threading.Thread) -> None:
        nonlocal left
        if thread.name.startswith("tiffin") and left == 0:
            raise RuntimeError("can't start new thread")
        left -= thread.name.startswith("tiffin")
        start(thread)

    with NvmeTier(tmp_path, NVME_BYTES) as tier:
        store(tier, fresh_prefix(1), 1)
    before, failed = held(), 0
    monkeypatch.setattr(threading.Thread, "start", refuse_behind)
    for allowed in range(20):
        left = allowed
        try:
            node = Node(options_for(tmp_path))
        except RuntimeError:
            failed += 1
            assert held() == before, allowed
        else:
            node.close()
            break
    assert failed >= 4  # a disk, movers, an inspector, a ticker
    assert held() == before


def test_a_scan_that_fails_unexpectedly_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def scan(_: NvmeTier) -> Any:
        raise ZeroDivisionError

    before = held()
    with monkeypatch.context() as patch:
        patch.setattr(NvmeTier, "scan", scan)
        with pytest.raises(ZeroDivisionError):
            Node(options_for(tmp_path))
    assert held() == before
    Node(options_for(tmp_path)).close()
    assert held() == before


def test_a_second_node_of_a_directory_leaves_nothing(tmp_path: Path) -> None:
    node = Node(options_for(tmp_path))
    before = held()
    with pytest.raises(TierUnavailable, match="in use"):
        Node(options_for(tmp_path))
    assert held() == before
    node.close()


def test_a_close_that_fails_closes_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = held()
    node = Node(options_for(tmp_path))
    with Client.attach(node) as client:
        prefix = fresh_prefix(2)
        client.put(prefix, payloads_of(prefix))

    def refuse_flush() -> int:
        raise ZeroDivisionError

    monkeypatch.setattr(node.core, "flush", refuse_flush)
    with pytest.raises(ZeroDivisionError):
        node.close()
    assert held() == before
