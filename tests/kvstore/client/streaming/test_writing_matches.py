"""Matches that see what is being written, and wait for writers."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from kvsupport import Background, Worker, fresh_prefix, payloads_of, wait_until
from poolsupport import Cluster
from streamworker import LAYERS, STREAMED, fill, prefix_of

from tiffin.kvstore import AsyncClient, Client
from tiffin.kvstore.client.pool.many_nodes import IN_PEER
from tiffin.kvstore.client.verbs import block_verbs
from tiffin.kvstore.errors import InvalidInput, NodeUnavailable
from tiffin.kvstore.node.core.records import BEING_WRITTEN, IN_DRAM
from tiffin.kvstore.node.node import Node, NodeOptions
from tiffin.kvstore.node.server.tcp_server import RemoteService
from tiffin.kvstore.tiers.base import TierName

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

BLOCKS = 16


@pytest.fixture
def node() -> Iterator[Node]:
    node = Node(NodeOptions(BLOCKS * STREAMED.extent_bytes, prefault=False))
    yield node
    node.check()
    node.close()


@pytest.fixture
def writer(node: Node) -> Iterator[Client]:
    with Client.attach(node, name="writer") as client:
        yield client


@pytest.fixture(params=["near", "far"])
def reader(request: pytest.FixtureRequest, node: Node) -> Iterator[Client]:
    if request.param == "near":
        with Client.attach(node, name="reader") as client:
            yield client
        return
    service = RemoteService(node, ("127.0.0.1", 0))
    try:
        url = f"tiffin://127.0.0.1:{service.address[1]}"
        with Client.open(url, name="reader") as client:
            yield client
    finally:
        service.close()


def is_parked(node: Node) -> bool:
    return bool(node.statistics()["waiting_requests"])


# -- what is being written -------------------------------------------------------------------------


def test_reserved_blocks_count_if_they_are_asked_for(writer: Client, reader: Client) -> None:
    prefix = fresh_prefix(4, STREAMED)
    writer.put(prefix[:1], payloads_of(prefix[:1]))
    slots = writer.reserve(prefix[:3], by_layer=True)
    hit = reader.match(prefix, writing=True)
    assert (hit.blocks, hit.stored, hit.tokens) == (3, 1, 3 * STREAMED.block_tokens)
    assert hit.tiers == (TierName.DRAM,) * 3
    assert [where & ~IN_PEER for where in hit.where] == [IN_DRAM, BEING_WRITTEN, BEING_WRITTEN]
    plain = reader.match(prefix)
    assert (plain.blocks, plain.stored) == (1, 1)
    for layer in range(LAYERS):
        fill(slots, layer)
        slots.publish(layer)
    slots.commit()
    hit = reader.match(prefix, writing=True)
    assert (hit.blocks, hit.stored) == (3, 3)


def test_what_a_writer_gave_up_does_not_count(writer: Client, reader: Client) -> None:
    prefix = fresh_prefix(2, STREAMED)
    writer.reserve(prefix, by_layer=True).abort()
    assert reader.match(prefix, writing=True).blocks == 0


def test_stored_blocks_behind_one_that_is_written_count(writer: Client, reader: Client) -> None:
    prefix = fresh_prefix(2, STREAMED)
    writer.put(prefix[1:], payloads_of(prefix[1:]))
    slots = writer.reserve(prefix)
    hit = reader.match(prefix, writing=True)
    assert (hit.blocks, hit.stored) == (2, 0)
    slots.abort()


@pytest.mark.parametrize("wrong", [-1, 1.5, "1", True])
def test_numbers_of_blocks_that_no_prefix_has(reader: Client, wrong: Any) -> None:
    with pytest.raises(InvalidInput, match="at_least"):
        reader.match(fresh_prefix(1, STREAMED), at_least=wrong)


# -- waiting for a writer --------------------------------------------------------------------------


@pytest.mark.parametrize("poll_s", [0.01, 30.0])
def test_a_reader_that_is_early_waits_for_the_reservation(
    node: Node, writer: Client, reader: Client, monkeypatch: pytest.MonkeyPatch, poll_s: float
) -> None:
    monkeypatch.setattr(block_verbs, "POLL_S", poll_s)
    prefix = fresh_prefix(2, STREAMED)
    early = Background(lambda: reader.match(prefix, writing=True, at_least=2, timeout_s=30))
    wait_until(lambda: is_parked(node), "the reader waits")
    one = writer.reserve(prefix[:1])
    writer.reserve(fresh_prefix(1, STREAMED)).abort()  # of another prompt
    rest = writer.reserve(prefix[1:])
    hit = early.result()
    assert (hit.blocks, hit.stored) == (2, 0)
    one.abort()
    rest.abort()


def test_a_reader_that_wants_them_stored_waits_for_the_commit(
    node: Node, writer: Client, reader: Client
) -> None:
    prefix = fresh_prefix(2, STREAMED)
    early = Background(lambda: reader.match(prefix, at_least=9, timeout_s=30))
    wait_until(lambda: is_parked(node), "the reader waits")
    with writer.reserve(prefix) as slots:
        for layer in range(LAYERS):
            fill(slots, layer)
    assert early.result().stored == 2


@pytest.mark.parametrize("timeout_s", [0.0, 0.1])
def test_a_wait_ends_with_its_deadline(writer: Client, reader: Client, timeout_s: float) -> None:
    prefix = fresh_prefix(2, STREAMED)
    writer.put(prefix[:1], payloads_of(prefix[:1]))
    hit = reader.match(prefix, writing=True, at_least=2, timeout_s=timeout_s)
    assert hit.blocks == 1


def test_asyncio_waits_alike(node: Node, writer: Client) -> None:
    prefix = fresh_prefix(1, STREAMED)

    async def wait() -> Any:
        client = await AsyncClient.attach(node)
        waiting = asyncio.create_task(client.match(prefix, writing=True, at_least=1, timeout_s=30))
        await asyncio.to_thread(wait_until, lambda: is_parked(node), "the reader waits")
        slots = await asyncio.to_thread(writer.reserve, prefix)
        hit = await waiting
        slots.abort()
        await client.close()
        return hit

    assert asyncio.run(wait()).blocks == 1


# -- processes that die ----------------------------------------------------------------------------


@pytest.mark.slow
def test_what_a_killed_writer_wrote_counts_no_more(
    own_daemon: Callable[..., Any], commands_folder: Path
) -> None:
    daemon = own_daemon(dram=BLOCKS * STREAMED.extent_bytes)
    prefix = prefix_of("killed", 2)
    with (
        Client.open(daemon.url) as reader,
        Worker("streamworker.py", commands_folder, "write", daemon.url, "killed", 2) as writer,
    ):
        assert reader.match(prefix, writing=True, at_least=2, timeout_s=30).blocks == 2
        assert writer.says() == "ready"
        assert writer.ask("layer 0") == "done"
        writer.kill()
        wait_until(lambda: not reader.match(prefix, writing=True).blocks, "the writer is gone")
        assert reader.match(prefix).blocks == 0


@pytest.mark.slow
def test_a_node_that_dies_ends_the_wait(own_daemon: Callable[..., Any]) -> None:
    daemon = own_daemon(dram=BLOCKS * STREAMED.extent_bytes)
    prefix = fresh_prefix(1, STREAMED)
    with Client.open(daemon.url) as reader, Client.open(daemon.url) as other:
        early = Background(lambda: reader.match(prefix, writing=True, at_least=1, timeout_s=60))
        wait_until(lambda: other.statistics()["waiting_requests"], "the reader waits")
        daemon.kill()
        with pytest.raises(NodeUnavailable):
            early.result()


# -- a pool ----------------------------------------------------------------------------------------


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    cluster = Cluster()
    yield cluster
    cluster.close()


def test_a_pool_asks_home_and_the_node_that_is_named(cluster: Cluster) -> None:
    one, two = (cluster.start(name, schema=STREAMED) for name in ("one", "two"))
    prefix = fresh_prefix(2, STREAMED)
    writer, near, far = cluster.open(home=one), cluster.open(home=one), cluster.open(home=two)
    afar = Background(
        lambda: far.match(prefix, writing=True, at_least=2, timeout_s=30, node=one.number)
    )
    here = Background(lambda: near.match(prefix, writing=True, at_least=2, timeout_s=30))
    slots = writer.reserve(prefix, by_layer=True)
    assert here.result().where == bytes([BEING_WRITTEN] * 2)
    assert afar.result().where == bytes([BEING_WRITTEN | IN_PEER] * 2)
    assert far.match(prefix, writing=True).blocks == 0, "the directory lists no reservations"
    with pytest.raises(InvalidInput, match="name the writer's"):
        cluster.open().match(prefix, writing=True, at_least=2)
    for layer in range(LAYERS):
        fill(slots, layer)
        slots.publish(layer)
    slots.commit()
    cluster.settle()
    hit = far.match(prefix, writing=True, at_least=2)
    assert (hit.blocks, hit.stored) == (2, 2)
    cluster.quiet()


def test_an_empty_prefix_is_not_waited_for(reader: Client) -> None:
    assert reader.match(STREAMED.prefix(np.arange(3)), at_least=3, timeout_s=30).blocks == 0
