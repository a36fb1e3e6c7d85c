"""A process that only reads can't damage the pool by accident, whatever its code does.

Otherwise one operation in place on a leased block, in an engine, would change a block that was
verified and that all clients read.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import kvsupport
import msgspec
import numpy as np
import pytest
from kvsupport import SLACK_S, assert_right, damage, fresh_prefix, payloads_of
from readonlyworker import prompt
from waysupport import IN_PLACE_WAYS

from tiffin.kvstore import Client
from tiffin.kvstore.errors import TierUnavailable
from tiffin.kvstore.node.core import messages
from tiffin.kvstore.node.node import Node, NodeOptions
from tiffin.messenger.wire.framing import encode_frame

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvsupport import Daemon
    from waysupport import Pool

WORKER = Path(kvsupport.__file__).with_name("readonlyworker.py")
BLOCKS = 3

in_place_ways = pytest.mark.parametrize("way", IN_PLACE_WAYS)


def permissions(view: Any) -> str:
    """The kernel's permissions of the view's memory: "r--s" can't be written."""
    address = int(view.__array_interface__["data"][0])
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, found, *_ = line.split()
        begin, end = (int(number, 16) for number in span.split("-"))
        if begin <= address < end:
            return found
    raise AssertionError("not mapped")


def assert_read_only(*views: Any) -> None:
    for view in views:
        assert permissions(view) == "r--s"
        with pytest.raises(ValueError, match="read-only"):
            view[...] = 0
        with pytest.raises(ValueError, match="WRITEABLE"):
            view.setflags(write=True)


@in_place_ways
def test_what_a_get_hands_out_is_memory_that_cannot_be_written(pool: Pool) -> None:
    prefix = pool.put(fresh_prefix(2))
    with pool.client.get(prefix) as blocks:
        layer = blocks[0].layer(1)
        assert_read_only(blocks[0].bytes, blocks[0].memory, blocks[1].memory, layer.k, layer.v)


@in_place_ways
def test_only_slots_can_be_written(pool: Pool) -> None:
    """A client that also writes still reads from memory that can't be written."""
    prefix = fresh_prefix(2)
    with pool.client.reserve(prefix) as slots:
        for slot, payload in zip(slots, payloads_of(prefix), strict=True):
            assert permissions(slot.view) == "rw-s"
            slot.view[:] = payload
    with pool.client.get(prefix) as blocks:
        assert_right(blocks, prefix)
        assert_read_only(blocks[0].memory, blocks[1].layer(0).k)


@pytest.mark.parametrize("way", ["sync-embedded", "sync-daemon", "sync-pool"])
def test_what_a_stream_hands_out_is_memory_that_cannot_be_written(pool: Pool) -> None:
    prefix = pool.put(fresh_prefix(2))
    with pool.client.raw.stream(prefix) as layers:
        for layer in layers:
            assert_read_only(*(part for block in layer.blocks for part in (block.k, block.v)))


@pytest.mark.parametrize("way", ["sync-daemon"])
def test_the_descriptor_of_a_welcome_is_open_for_reading_only(pool: Pool) -> None:
    hello = messages.Hello(1, messages.PROTOCOL_VERSION, "raw", 0)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(SLACK_S)
        sock.connect(str(pool.daemon.socket))
        sock.sendall(encode_frame(msgspec.msgpack.encode(hello)))
        _, descriptors, _, _ = socket.recv_fds(sock, 4096, 4)
    (descriptor,) = descriptors
    try:
        assert fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
        with pytest.raises(PermissionError):
            mmap.mmap(descriptor, 4096, flags=mmap.MAP_SHARED)
        mmap.mmap(descriptor, 4096, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ).close()
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.pwrite(descriptor, b"x", 0)
    finally:
        os.close(descriptor)


# -- another process -------------------------------------------------------------------------------


@pytest.fixture
def engine(own_daemon: Callable[..., Daemon]) -> Callable[[str], tuple[int, list[str]]]:
    """A function that runs the worker on a daemon's blocks: its exit status and output lines.
    Afterwards the blocks must be unchanged."""
    daemon = own_daemon()

    def run(verb: str) -> tuple[int, list[str]]:
        prefix = prompt(verb, BLOCKS)
        with Client.open(daemon.url) as client:
            assert client.put(prefix, payloads_of(prefix)).complete
            command = [sys.executable, str(WORKER), daemon.url, verb, str(BLOCKS), verb]
            ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
            with client.get(prefix, verify="always") as blocks:
                assert blocks.complete, blocks.reason
                assert_right(blocks, prefix)
        return ended.returncode, (ended.stdout or ended.stderr).split("\n")

    return run


@pytest.mark.slow
def test_who_only_reads_has_nothing_that_can_be_written(
    engine: Callable[[str], tuple[int, list[str]]],
) -> None:
    status, (reading, writing, *_) = engine("look")
    assert (status, reading) == (0, "r--s r")
    # The first reservation maps the memory a second time, to be written.
    assert writing.split()[:2] == ["r--s", "rw-s"]


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["native", "numpy", "torch", "stream"])
def test_an_operation_in_place_ends_the_process_that_made_it(
    engine: Callable[[str], tuple[int, list[str]]], verb: str
) -> None:
    if verb == "torch":
        pytest.importorskip("torch")
    status, lines = engine(verb)
    assert (status, lines) == (-signal.SIGSEGV, [""])


@pytest.mark.slow
def test_who_cannot_map_it_once_more_is_told_and_goes_on_reading(
    engine: Callable[[str], tuple[int, list[str]]],
) -> None:
    status, lines = engine("poor")
    assert (status, lines[:2]) == (0, [f"TierUnavailable {BLOCKS}", "True"])


def test_a_node_of_this_process_that_was_closed_is_not_written() -> None:
    prefix, node = fresh_prefix(1), Node(NodeOptions(1 << 20, prefault=False))
    with Client.attach(node) as client:
        node.close()
        with pytest.raises(TierUnavailable, match="closed"):
            client.put(prefix, payloads_of(prefix))
        with pytest.raises(TierUnavailable, match="closed"):
            client.reserve(prefix)
    with pytest.raises(TierUnavailable, match="closed"):
        Client.attach(node)


@pytest.mark.parametrize("way", ["sync-daemon"])
def test_what_another_process_damages_is_seen_through_the_same_view(pool: Pool) -> None:
    """Only this mapping is read-only: it is the pool's memory, not a copy of it."""
    prefix = pool.put(fresh_prefix(1))
    with pool.client.get(prefix) as blocks:
        view = blocks[0].memory
        before = int(view[5])
        damage(view, 5)
        assert int(view[5]) == before ^ 1
    with pool.client.get(prefix) as blocks:
        assert blocks.reason == "corrupt"


# -- other users of blocks -------------------------------------------------------------------------


def test_kernels_read_leased_blocks_where_they_lie_and_fill_none() -> None:
    torch = pytest.importorskip("torch")
    from tiffin.kernels.errors import LayoutError
    from tiffin.kernels.layout.engine_cache import PagedCache
    from tiffin.kernels.layout.transfer_plan import PageMap
    from tiffin.kernels.paged import gather_scatter
    from tiffin.kvstore.connectors.kernel_tables import layout_of

    schema = kvsupport.SCHEMA
    prefix, layout = fresh_prefix(2), layout_of(schema)
    pages = PageMap(np.arange(2)[:, None], page_tokens=schema.block_tokens)
    shape = (2, schema.block_tokens, 2, 8)
    layers = [tuple(torch.zeros(shape, dtype=torch.bfloat16) for _ in "kv") for _ in range(2)]
    cache = PagedCache(layers)
    with Client.open("embedded:?dram=1MiB&prefault=false") as client:
        client.put(prefix, payloads_of(prefix))
        with client.get(prefix) as blocks:
            leased = [block.memory for block in blocks]
            gather_scatter.scatter(cache, pages, leased, layout)
            with pytest.raises(LayoutError, match="can't be written"):
                gather_scatter.gather(cache, pages, leased, layout)
            filled = [np.zeros_like(block) for block in leased]
            gather_scatter.gather(cache, pages, filled, layout)
        assert all(map(np.array_equal, filled, payloads_of(prefix)))
