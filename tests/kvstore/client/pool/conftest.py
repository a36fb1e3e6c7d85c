"""A pool of several nodes for each test; afterwards all are at rest, and nothing is open."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from typing import TYPE_CHECKING, Any

import pytest
from kvsupport import is_quiet, wait_until
from poolsupport import LARGE, Cluster

from tiffin.kvstore.client.pool.remote.peer import Peer
from tiffin.kvstore.credentials import Credentials
from tiffin.kvstore.node.core.node_core import CoreOptions
from tiffin.kvstore.node.node import Node, NodeOptions
from tiffin.kvstore.node.server.tcp_server import RemoteService

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


# Threads that serve the whole process, started when they are first needed.
STAYS = ("asyncio_0", "tiffin-copy", "tiffin-uninterrupted")


@pytest.fixture
def nothing_left(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """No thread and no descriptor is left after the test."""
    threads, files = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))
    yield

    def gone() -> bool:
        new = set(threading.enumerate()) - threads
        more = [t for t in new if not t.name.startswith(STAYS)]
        if not more and len(os.listdir("/proc/self/fd")) <= files:
            return True
        # A logged error holds a traceback, which holds a view of a region, hence a descriptor.
        for when in ("call", "teardown"):
            caplog.get_records(when).clear()  # type: ignore[arg-type]
        gc.collect()
        return False

    wait_until(gone, f"threads and descriptors end: {set(threading.enumerate()) - threads}")


@pytest.fixture
def cluster(nothing_left: None) -> Iterator[Cluster]:
    cluster = Cluster()
    try:
        yield cluster
        cluster.quiet()
    finally:
        cluster.close()


@pytest.fixture
def serve(nothing_left: None) -> Iterator[Callable[..., tuple[Node, tuple[str, int]]]]:
    """A function that starts a node and its port; the node must end whole and hold nothing."""
    with contextlib.ExitStack() as stack:
        nodes: list[Node] = []

        def start(
            credentials: Credentials | None = None, core: CoreOptions | None = None
        ) -> tuple[Node, tuple[str, int]]:
            options = NodeOptions(
                16 * LARGE.extent_bytes, prefault=False, core=core or CoreOptions()
            )
            node = Node(options)
            stack.callback(node.close)
            service = RemoteService(node, ("127.0.0.1", 0), credentials)
            stack.callback(service.close)
            nodes.append(node)
            return node, service.address

        yield start
        for node in nodes:
            wait_until(lambda n=node: is_quiet(n.statistics()), "the node comes to rest")
            node.check()


@pytest.fixture
def connect(nothing_left: None) -> Iterator[Callable[..., Peer]]:
    """Peers that are closed with the test."""
    with contextlib.ExitStack() as stack:

        def make(
            address: tuple[str, int], credentials: Credentials | None = None, **options: Any
        ) -> Peer:
            peer = Peer(address, credentials or Credentials(), "test", **options)
            stack.callback(peer.close)
            return peer

        yield make
