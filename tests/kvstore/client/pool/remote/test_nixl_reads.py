"""Large reads by NIXL, through the pool's client: real processes, over shared memory (UCX cma)."""

from __future__ import annotations

import os
import time
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from directory.ports import free_port
from kvsupport import Daemon, assert_right, fresh_prefix, payloads_of

from tiffin.kvstore import Client, KVSchema
from tiffin.kvstore.client.pool.remote.nixl_reads import process_agent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

REQUIRED = os.environ.get("TIFFIN_REQUIRE_NIXL") == "1"
pytestmark = pytest.mark.skipif(
    find_spec("nixl_cu12") is None and not REQUIRED,
    reason="nixl-cu12 is not installed (pip install --no-deps nixl-cu12)",
)

# Blocks of 1 MiB.
SCHEMA = KVSchema.gqa(
    model="wide", layers=8, kv_heads=4, head_dim=64, dtype="bfloat16", block_tokens=128
)


@pytest.fixture
def node(
    own_daemon: Callable[..., Daemon], monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Daemon, str]]:
    # Without RDMA hardware: memory of the same host, and TCP to find each other.
    monkeypatch.setenv("UCX_TLS", "all")
    process_agent.cache_clear()
    port = free_port()
    options = ["--listen", f"127.0.0.1:{port}", "--nixl", "--nixl-lanes", "all"]
    daemon = own_daemon(dram=64 << 20, options=options)
    yield daemon, f"tiffin://127.0.0.1:{port}?nixl=true"
    process_agent().close()
    process_agent.cache_clear()


def bytes_of_paths(client: Any) -> dict[str, int]:
    """How many bytes the paths to the node moved."""
    (peer,) = client._nodes.driver._peers.values()
    messenger = peer.one_sided.messenger(time.monotonic() + 5.0)
    if messenger is None:
        return {}
    paths = zip(messenger._paths, messenger.links, strict=True)
    return {path.name: link.statistics.bytes for path, link in paths}


@pytest.mark.parametrize("verify", ["always", "off"])
def test_large_reads_go_by_nixl(node: tuple[Daemon, str], verify: Any) -> None:
    with Client.open(node[1]) as client:
        prefix = fresh_prefix(6, SCHEMA)
        assert client.put(prefix, payloads_of(prefix)).complete
        into = [np.zeros(SCHEMA.block_bytes, np.uint8) for _ in range(6)]
        with client.get(prefix, into=into, verify=verify) as blocks:
            assert blocks.complete
            assert_right(blocks, prefix)
        moved = bytes_of_paths(client)
        assert moved["nixl"] >= 6 * SCHEMA.block_bytes
        assert moved["tcp"] == 0


def test_a_killed_node_is_a_lost_one(node: tuple[Daemon, str]) -> None:
    daemon, url = node
    with Client.open(url) as client:
        prefix = fresh_prefix(4, SCHEMA)
        assert client.put(prefix, payloads_of(prefix)).complete
        with client.get(prefix) as blocks:
            assert blocks.complete
        daemon.kill()
        with client.get(prefix, timeout_s=3.0) as blocks:
            assert len(blocks) == 0
            assert blocks.reason in ("lost", "stalled", "deadline")
        daemon.start()
        # The block was in DRAM only: this tests that the node is reached again, by any path.
        again = fresh_prefix(4, SCHEMA)
        assert client.put(again, payloads_of(again), timeout_s=10.0).complete
        with client.get(again) as blocks:
            assert blocks.complete
            assert_right(blocks, again)


def test_a_node_without_nixl_is_read_over_tcp(own_daemon: Callable[..., Daemon]) -> None:
    port = free_port()
    own_daemon(dram=64 << 20, options=["--listen", f"127.0.0.1:{port}", "--no-prefault"])
    with Client.open(f"tiffin://127.0.0.1:{port}?nixl=true") as client:
        prefix = fresh_prefix(4, SCHEMA)
        assert client.put(prefix, payloads_of(prefix)).complete
        with client.get(prefix) as blocks:
            assert blocks.complete
            assert_right(blocks, prefix)
        assert bytes_of_paths(client) == {}
