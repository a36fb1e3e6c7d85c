"""Who gives up, closes or is cancelled while bytes are being copied lets go of nothing too early.

The copy is held open by an event. Until it has ended its extent must not be anybody else's, so the
node has to show it as reserved.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import TYPE_CHECKING, Any

import pytest
from kvsupport import SCHEMA, fresh_prefix, payloads_of, wait_until

from tiffin.kvstore import AsyncClient, Client
from tiffin.kvstore.errors import ClientClosed
from tiffin.kvstore.node.node import Node, NodeOptions
from tiffin.messenger import local

if TYPE_CHECKING:
    from collections.abc import Iterator


class SlowCopy:
    """Stands before the real copy until `go` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.go = threading.Event(), threading.Event()
        self._copy = local.copy_segments_hashed
        monkeypatch.setattr(local, "copy_segments_hashed", self)

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


def test_a_waiting_call_of_a_loop_that_was_closed_does_not_stop_the_node(node: Node) -> None:
    prefix, other = fresh_prefix(4), fresh_prefix(1)

    async def run() -> None:
        client = await AsyncClient.attach(node)
        held = await client.reserve(prefix)
        assert len(held) == 4
        with pytest.raises(TimeoutError):  # it waits for room, and nobody waits for it
            await asyncio.wait_for(client.reserve(other, timeout_s=0.2), 0.05)

    asyncio.run(run())
    with Client.attach(node) as client:
        assert client.statistics()["node"] == "node"
        wait_until(lambda: not client.statistics()["waiting_requests"], "the deadline to pass")
