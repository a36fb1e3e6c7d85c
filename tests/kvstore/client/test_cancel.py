"""A call that is given up, closed or cancelled during a copy releases nothing before its end.

The copy is held by an event. Until it has ended, its extent must not go to another writer, so the
node has to report it as reserved.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from kvsupport import (
    SCHEMA,
    assert_right,
    fresh_prefix,
    is_quiet,
    payloads_of,
    skip_time,
    wait_until,
)
from poolsupport import LARGE, Cluster

from tiffin.kvstore import AsyncClient, Client
from tiffin.kvstore.errors import ClientClosed
from tiffin.kvstore.node.node import Node, NodeOptions
from tiffin.messenger.shm import host_copy

if TYPE_CHECKING:
    from collections.abc import Iterator


class SlowCopy:
    """Waits for `go` before the real copy."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.go = threading.Event(), threading.Event()
        self._copy = host_copy.copy_blocks_hashed
        monkeypatch.setattr(host_copy, "copy_blocks_hashed", self)

    def __call__(self, *arguments: Any) -> Any:
        self.begun.set()
        assert self.go.wait(30)
        return self._copy(*arguments)


@pytest.fixture
def node() -> Iterator[Node]:
    node = Node(NodeOptions(dram_bytes=4 * SCHEMA.extent_bytes, prefault=False))
    yield node
    node.check()
    node.close()


@pytest.fixture
def slow_copy(monkeypatch: pytest.MonkeyPatch) -> SlowCopy:
    return SlowCopy(monkeypatch)


def reserved_bytes(node: Node) -> int:
    return int(node.statistics()["tiers"]["dram"]["reserved_bytes"])


def test_a_put_that_is_cancelled_twice_is_still_waited_for(node: Node, slow_copy: SlowCopy) -> None:
    async def run() -> None:
        client = await AsyncClient.attach(node)
        prefix = fresh_prefix(1)
        task = asyncio.ensure_future(client.put(prefix, payloads_of(prefix)))
        await asyncio.to_thread(slow_copy.begun.wait, 30)
        for _ in range(3):
            task.cancel()
            await asyncio.sleep(0.01)
            assert not task.done()
            assert reserved_bytes(node) == SCHEMA.extent_bytes
        slow_copy.go.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert reserved_bytes(node) == 0
        assert (await client.match(prefix)).blocks == 0
        await client.close()

    asyncio.run(run())


def test_an_async_close_waits_for_the_copies_of_its_tasks(node: Node, slow_copy: SlowCopy) -> None:
    async def run() -> None:
        client = await AsyncClient.attach(node)
        prefix = fresh_prefix(1)
        task = asyncio.ensure_future(client.put(prefix, payloads_of(prefix)))
        await asyncio.to_thread(slow_copy.begun.wait, 30)
        closing = asyncio.ensure_future(client.close())
        await asyncio.sleep(0.05)
        assert not closing.done()
        assert reserved_bytes(node) == SCHEMA.extent_bytes
        slow_copy.go.set()
        await closing
        with contextlib.suppress(ClientClosed):  # its commit may still have found the link open
            await task
        assert reserved_bytes(node) == 0

    asyncio.run(run())


def test_a_close_waits_for_the_copies_of_other_threads(node: Node, slow_copy: SlowCopy) -> None:
    client = Client.attach(node)
    prefix = fresh_prefix(1)
    outcome: list[BaseException] = []

    def put() -> None:
        try:
            client.put(prefix, payloads_of(prefix))
        except ClientClosed as error:
            outcome.append(error)

    writer, closer = threading.Thread(target=put), threading.Thread(target=client.close)
    writer.start()
    assert slow_copy.begun.wait(30)
    closer.start()
    wait_until(lambda: client._access is None, "close to begin")
    closer.join(0.05)
    assert closer.is_alive()
    assert reserved_bytes(node) == SCHEMA.extent_bytes
    slow_copy.go.set()
    for thread in (writer, closer):
        thread.join(30)
        assert not thread.is_alive()
    assert len(outcome) <= 1  # the commit may still have found the link open
    assert reserved_bytes(node) == 0


def test_a_waiting_call_of_a_loop_that_was_closed_does_not_stop_the_node(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix, other = fresh_prefix(4), fresh_prefix(1)

    async def run() -> Any:
        client = await AsyncClient.attach(node)
        held = await client.reserve(prefix)
        assert len(held) == 4
        with pytest.raises(TimeoutError):  # its task is cancelled while it waits for room
            await asyncio.wait_for(client.reserve(other, timeout_s=30), 0.05)
        return held

    held = asyncio.run(run())
    assert node.statistics()["waiting_requests"]
    skip_time(monkeypatch, 31.0)
    with Client.attach(node) as client:
        assert client.statistics()["node"] == "node"
        wait_until(lambda: not client.statistics()["waiting_requests"], "the deadline to pass")
    del held  # the reservation belongs to the closed loop, and ends with its handle
    wait_until(lambda: is_quiet(node.statistics()), "the reservation to be given back")


# -- over the network ------------------------------------------------------------------------------


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with contextlib.closing(Cluster()) as cluster:
        yield cluster
        cluster.quiet()


# The timeout of calls over a silent network: long enough to cancel them before it.
CUT_S = 1.5


async def settled(task: asyncio.Task[Any]) -> None:
    """Cancel the task more than once; it must not end yet."""
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0.02)
        assert not task.done()


@pytest.mark.slow
def test_a_network_get_that_is_cancelled_lets_go_of_the_buffer_first(cluster: Cluster) -> None:
    far = cluster.start("far", relayed=True)
    prefix = far.put(fresh_prefix(4, LARGE))
    cluster.settle()
    assert far.network is not None
    network = far.network
    target = np.zeros((4, LARGE.block_bytes), np.uint8)

    async def run() -> None:
        client = AsyncClient(cluster.open(hedge_s=30.0))
        (await client.get(prefix, into=target)).release()
        target[:] = 0
        network.stall_after(LARGE.extent_bytes)
        get = asyncio.ensure_future(_await(client.get(prefix, into=target, timeout_s=CUT_S)))
        await asyncio.to_thread(wait_until, lambda: target.any(), "the first bytes arrive")
        await settled(get)
        with pytest.raises(asyncio.CancelledError):
            await get
        target[:] = 7  # the buffer is the caller's again
        network.resume()
        await asyncio.sleep(0.1)
        assert (target == 7).all()
        async with client.get(prefix) as blocks:
            assert_right(blocks, prefix)
        await client.close()

    asyncio.run(run())


@pytest.mark.slow
def test_a_network_put_that_is_cancelled_lets_go_of_its_payloads_first(cluster: Cluster) -> None:
    far = cluster.start("far", relayed=True)
    prefix = fresh_prefix(4, LARGE)
    assert far.network is not None
    network = far.network

    async def run() -> None:
        client = AsyncClient(cluster.open())
        assert (await client.match(prefix)).blocks == 0
        network.stall_after(LARGE.extent_bytes, "to")
        payloads = payloads_of(prefix)
        put = asyncio.ensure_future(client.put(prefix, payloads, timeout_s=CUT_S))
        await asyncio.to_thread(
            wait_until, lambda: reserved_bytes(far.node), "its connection is there, and in use"
        )
        await settled(put)
        with pytest.raises(asyncio.CancelledError):
            await put
        for payload in payloads:
            payload[:] = 0  # too late to be sent
        network.resume()
        await asyncio.to_thread(
            wait_until, lambda: is_quiet(far.node.statistics()), "nothing is left of it"
        )
        async with client.get(prefix) as blocks:
            assert_right(blocks, prefix)
        await client.close()

    asyncio.run(run())


@pytest.mark.parametrize("verb", ["get", "reserve"])
def test_what_a_cancelled_call_got_at_home_is_given_back(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    home = cluster.start("home")
    prefix = fresh_prefix(2, LARGE)
    if verb == "get":
        home.put(prefix)
    pool = cluster.open(home)
    begun, go = threading.Event(), threading.Event()
    method = getattr(pool, verb)

    def slow(*arguments: Any, **keywords: Any) -> Any:
        got = method(*arguments, **keywords)
        begun.set()
        assert go.wait(30)
        return got

    monkeypatch.setattr(pool, verb, slow)

    async def run() -> None:
        client = AsyncClient(pool)
        task = asyncio.ensure_future(_await(getattr(client, verb)(prefix)))
        await asyncio.to_thread(begun.wait, 30)
        assert not is_quiet(home.node.statistics())
        await settled(task)
        go.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert is_quiet(home.node.statistics())
        await client.close()

    asyncio.run(run())


def test_an_async_close_cuts_calls_of_a_stalled_node(cluster: Cluster) -> None:
    far = cluster.start("far", relayed=True)
    prefix = far.put(fresh_prefix(2, LARGE))
    cluster.settle()
    assert far.network is not None
    network = far.network

    async def run() -> None:
        client = AsyncClient(cluster.open(hedge_s=60.0))
        async with client.get(prefix) as blocks:
            assert blocks.complete
        network.pause()
        calls = [asyncio.ensure_future(_await(client.get(prefix, timeout_s=60))) for _ in range(3)]
        await asyncio.sleep(0.1)
        async with asyncio.timeout(10):
            await client.close()
            await client.close()
            for one in calls:
                with contextlib.suppress(ClientClosed):
                    assert len(await one) == 0
        with pytest.raises(ClientClosed):
            await client.match(prefix)
        network.resume()

    asyncio.run(run())


async def _await(opening: Any) -> Any:
    return await opening
