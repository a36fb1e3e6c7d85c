"""A client of one node has the verbs of a pool's, and says which of them need a pool."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from kvsupport import fresh_prefix, payloads_of, wait_until

from tiffin.kvstore import AsyncClient, Client
from tiffin.kvstore.errors import InvalidInput
from tiffin.kvstore.node.node import Node, NodeOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

URL = "embedded:?dram=1MiB"
PREFIX = fresh_prefix(1)


@pytest.fixture
def client() -> Iterator[Client]:
    with Client.open(URL) as client:
        yield client


@pytest.mark.parametrize(
    "call",
    [
        lambda client: client.nodes(),
        lambda client: client.replicate(PREFIX, [1]),
        lambda client: client.evacuate(1),
        lambda client: client.match(PREFIX, node=1),
        lambda client: client.stream(PREFIX, node=1),
        lambda client: client.reserve(PREFIX, node=1),
        lambda client: client.put(PREFIX, payloads_of(PREFIX), node=1),
        lambda client: client.put(PREFIX, payloads_of(PREFIX), replicas=2),
    ],
)
def test_what_needs_a_pool_is_refused(client: Client, call: Callable[[Any], Any]) -> None:
    with pytest.raises(InvalidInput, match="redis://"):
        call(client)
    assert client.match(PREFIX).blocks == 0

    async def awaited() -> None:
        async with AsyncClient.open(URL) as many:
            with pytest.raises(InvalidInput, match="redis://"):
                await call(many)

    asyncio.run(awaited())


def test_it_is_at_its_node(client: Client) -> None:
    assert not client.is_pool
    assert client.home_number is None
    assert client.near_link is not None
    assert client.region is not None


def test_a_class_of_the_users_own_is_opened() -> None:
    class Mine(Client):
        pass

    with Mine.open(URL) as client:
        assert type(client) is Mine


def test_a_stream_goes_on_after_a_step_that_was_cancelled() -> None:
    """At a node of this host; a pool's stream ends."""
    node, prefix = Node(NodeOptions(dram_bytes=1 << 20, prefault=False)), fresh_prefix(1)

    async def run() -> list[int]:
        client = await AsyncClient.attach(node)
        slots = await client.reserve(prefix)
        for slot, payload in zip(slots, payloads_of(prefix), strict=True):
            slot.view[:] = payload
        async with client.stream(prefix) as stream:
            step = asyncio.ensure_future(anext(aiter(stream)))
            await asyncio.to_thread(
                wait_until, lambda: node.statistics()["waiting_requests"], "it waits"
            )
            step.cancel()
            with pytest.raises(asyncio.CancelledError):
                await step
            await slots.commit()
            found = [layer.index async for layer in stream]
        await client.close()
        return found

    assert asyncio.run(run()) == [0, 1]
    node.check()
    node.close()
