"""Layers that are read while the next are computed: order, visibility, and every way it can end.

Order is asserted by handshake: the writer writes layer i + 1 only after the reader has reported
that it has layer i.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from kvsupport import (
    Background,
    Worker,
    assert_conserved,
    fresh_prefix,
    held_bytes,
    is_quiet,
    payload_of,
    payloads_of,
    skip_time,
    wait_until,
)
from poolsupport import Cluster
from streamworker import LAYERS, STREAMED, fill, is_right, prefix_of

from tiffin.kvstore import AsyncClient, Client, KVSchema, TiffinError
from tiffin.kvstore.client.blocks.block_views import select_shard
from tiffin.kvstore.client.pool.remote.peer import Peer
from tiffin.kvstore.client.streaming import layer_source
from tiffin.kvstore.client.streaming.layer_stream import AsyncLayerStream, LayerStream
from tiffin.kvstore.credentials import Credentials
from tiffin.kvstore.errors import (
    ClientClosed,
    CorruptBlock,
    DeadlineExceeded,
    InvalidInput,
    NodeUnavailable,
    SchemaError,
    StaleLease,
)
from tiffin.kvstore.node.core import messages
from tiffin.kvstore.node.core.node_core import CoreOptions
from tiffin.kvstore.node.node import Node, NodeOptions
from tiffin.kvstore.node.server.tcp_server import RemoteService
from tiffin.messenger.errors import GrantError
from tiffin.messenger.shm import host_copy
from tiffin.messenger.transport import Range

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator
    from pathlib import Path

BLOCKS = 16
SHARDED = KVSchema.gqa(
    model="sharded stream",
    layers=3,
    kv_heads=8,
    head_dim=16,
    dtype="float16",
    block_tokens=16,
    shards=8,
)


def start_node(**core: float) -> Node:
    options = CoreOptions(**core)  # type: ignore[arg-type]
    return Node(NodeOptions(BLOCKS * STREAMED.extent_bytes, prefault=False, core=options))


def finish(node: Node) -> None:
    """Nothing is held any more, and nothing is lost."""
    wait_until(lambda: is_quiet(node.statistics()), "the node comes to rest")
    assert_conserved(node.statistics())
    node.check()
    assert not node.core.residency.published
    node.close()


@pytest.fixture
def node() -> Iterator[Node]:
    node = start_node()
    yield node
    finish(node)


@pytest.fixture
def writer(node: Node) -> Iterator[Client]:
    with Client.attach(node, name="writer") as client:
        yield client


@contextlib.contextmanager
def url_of(node: Node) -> Iterator[str]:
    """The node over the network."""
    service = RemoteService(node, ("127.0.0.1", 0))
    try:
        yield f"tiffin://127.0.0.1:{service.address[1]}"
    finally:
        service.close()


@pytest.fixture
def url(node: Node) -> Iterator[str]:
    with url_of(node) as url:
        yield url


@pytest.fixture(params=["near", "far"])
def reader(request: pytest.FixtureRequest, node: Node) -> Iterator[Client]:
    if request.param == "near":
        with Client.attach(node, name="reader") as client:
            yield client
    else:
        with url_of(node) as url, Client.open(url, name="reader") as client:
            yield client


# -- reading ---------------------------------------------------------------------------------------


def test_committed_blocks_come_layer_by_layer(writer: Client, reader: Client) -> None:
    prefix = fresh_prefix(3, STREAMED)
    writer.put(prefix, payloads_of(prefix))
    stream = reader.stream(prefix)
    layers = [(layer.index, is_right(layer, prefix)) for layer in stream]
    assert layers == [(index, True) for index in range(LAYERS)]
    assert (stream.blocks, stream.tokens, stream.complete) == (3, 3 * STREAMED.block_tokens, True)


def test_arrays_are_those_of_a_get(writer: Client, reader: Client) -> None:
    prefix = fresh_prefix(1, STREAMED)
    writer.put(prefix, payloads_of(prefix))
    with writer.get(prefix) as blocks, reader.stream(prefix) as stream:
        for layer in stream:
            for name in ("k", "v"):
                got, wanted = layer.blocks[0].part(name), blocks[0].layer(layer.index).part(name)
                assert got.dtype == wanted.dtype
                assert np.array_equal(got.view(np.uint16), wanted.view(np.uint16))
            assert layer.blocks[0].k.shape == (4, 16, 32)


def test_a_layer_is_read_before_the_next_is_written(writer: Client, reader: Client) -> None:
    """And nothing is visible to other clients before the commit."""
    prefix = fresh_prefix(3, STREAMED)
    writer.put(prefix[:1], payloads_of(prefix[:1]))  # two kinds of blocks in one stream
    slots = writer.reserve(prefix)
    fill(slots, 0)
    slots.publish(0)
    written = 1
    with reader.stream(prefix) as stream:
        assert stream.complete
        for layer in stream:
            assert layer.index == written - 1, "this layer was read before the next was written"
            assert is_right(layer, prefix)
            assert reader.match(prefix).blocks == 1
            if written < LAYERS:
                fill(slots, written)
                slots.publish(written)
                written += 1
            else:
                slots.commit()
    assert written == LAYERS
    assert reader.match(prefix).blocks == 3


class TestSlotsByLayer:
    """Slots that were reserved `by_layer` are stored only once every layer was published."""

    @pytest.fixture(params=["node", "staged"])
    def layered(self, request: pytest.FixtureRequest, node: Node) -> Iterator[Client]:
        """A writer whose slots lie in the node, or in its own process."""
        if request.param == "node":
            with Client.attach(node) as client:
                yield client
        else:
            with url_of(node) as url, Client.open(f"{url}?home=none") as client:
                yield client

    def test_all_layers_published_are_stored(self, layered: Client) -> None:
        prefix = fresh_prefix(2, STREAMED)
        with layered.reserve(prefix, by_layer=True) as slots:
            for layer in range(LAYERS):
                fill(slots, layer)
                slots.publish(layer)
        assert slots.stored == (0, 1)
        assert layered.match(prefix).blocks == 2

    def test_the_commit_names_the_layers_that_are_missing(self, layered: Client) -> None:
        prefix = fresh_prefix(1, STREAMED)
        slots = layered.reserve(prefix, by_layer=True)
        fill(slots, 0)
        slots.publish(0)
        with pytest.raises(InvalidInput, match=r"layers \[1, .* were not published"):
            slots.commit()
        for layer in range(1, LAYERS):
            fill(slots, layer)
            slots.publish(layer)
        slots.commit()
        assert slots.stored == (0,)

    def test_leaving_half_way_stores_nothing(self, layered: Client) -> None:
        prefix = fresh_prefix(1, STREAMED)

        def leave_half_way() -> None:
            with layered.reserve(prefix, by_layer=True) as slots:
                fill(slots, 0)
                slots.publish(0)

        with pytest.raises(InvalidInput, match="not published"):
            leave_half_way()
        assert layered.match(prefix).blocks == 0
        assert layered.put(prefix, payloads_of(prefix)).stored == (0,), "the slots were given back"

    @pytest.mark.parametrize("over_tcp", [False, True])
    def test_the_asynchronous_client_refuses_likewise(self, node: Node, over_tcp: bool) -> None:
        prefix = fresh_prefix(1, STREAMED)

        async def leave_half_way(client: AsyncClient) -> None:
            async with client.reserve(prefix, by_layer=True) as slots:
                fill(slots, 0)
                await slots.publish(0)

        async def run(client: AsyncClient) -> None:
            with pytest.raises(InvalidInput, match="not published"):
                await leave_half_way(client)
            assert (await client.match(prefix)).blocks == 0
            await client.close()

        if over_tcp:
            with url_of(node) as url:
                asyncio.run(opened_and(run, f"{url}?home=none"))
        else:
            asyncio.run(attached_and(run, node))


async def opened_and(action: Callable[[AsyncClient], Awaitable[None]], url: str) -> None:
    await action(await AsyncClient.open(url))


async def attached_and(action: Callable[[AsyncClient], Awaitable[None]], node: Node) -> None:
    await action(await AsyncClient.attach(node))


def test_a_writer_that_publishes_nothing_is_followed_to_its_commit(
    writer: Client, reader: Client
) -> None:
    prefix = fresh_prefix(2, STREAMED)
    slots = writer.reserve(prefix)
    with reader.stream(prefix, timeout_s=30) as stream:
        found = Background(lambda: [is_right(layer, prefix) for layer in stream])
        for layer in range(LAYERS):
            fill(slots, layer)
        slots.commit()
        assert found.result() == [True] * LAYERS


def test_a_stream_has_the_leading_blocks_that_are_there(writer: Client, reader: Client) -> None:
    prefix = fresh_prefix(3, STREAMED)
    writer.put(prefix[:1], payloads_of(prefix[:1]))
    writer.put(prefix[2:], payloads_of(prefix[2:]))
    with reader.stream(prefix) as stream:
        assert (stream.blocks, stream.reason, stream.complete) == (1, "miss", False)
        assert [len(layer.blocks) for layer in stream] == [1] * LAYERS
    with pytest.raises(ClientClosed):
        stream.step()
    nothing = reader.stream(fresh_prefix(2, STREAMED))
    assert list(nothing) == []
    assert (nothing.blocks, nothing.reason) == (0, "miss")
    assert list(reader.stream(prefix[:0])) == []


def test_cold_blocks_are_brought_into_dram_first(tmp_path: Path) -> None:
    extent = STREAMED.extent_bytes
    node = Node(NodeOptions(4 * extent, tmp_path, 24 * extent, prefault=False))
    with Client.attach(node) as client, url_of(node) as url, Client.open(url) as far:
        prefixes = [fresh_prefix(2, STREAMED) for _ in range(4)]
        for prefix in prefixes:
            assert client.put(prefix, payloads_of(prefix)).complete
        assert max(client.match(prefixes[0]).where) == 2, "on disk alone"
        for prefix in prefixes:
            for reader in (client, far):
                with reader.stream(prefix) as stream:
                    assert stream.complete
                    assert [is_right(layer, prefix) for layer in stream] == [True] * LAYERS
    finish(node)


def test_ranks_publish_their_own_heads(reader: Client, node: Node) -> None:
    """A layer is readable when every rank has published its part of it."""
    prefix = fresh_prefix(2, SHARDED)
    with Client.attach(node) as one, Client.attach(node) as two:
        ranks = [c.reserve(prefix, shard=(r, 2)) for r, c in enumerate((one, two))]
        with reader.stream(prefix, timeout_s=30) as stream:
            course = iter(stream)
            for layer in range(3):
                found = Background(lambda: next(course))
                for rank, slots in enumerate(ranks):
                    assert found._outcome is None, "half a layer was handed out"
                    for slot in slots:
                        right = payload_of(prefix.keys[slot.index], SHARDED)
                        for index in SHARDED.shard_segments(layer, (rank, 2)):
                            span = SHARDED.segments[index]
                            slot.view[span.offset : span.end] = right[span.offset : span.end]
                    slots.publish(layer)
                assert is_right(found.result(), prefix)
            for slots in ranks:
                slots.commit()
            assert next(course, None) is None


@pytest.mark.parametrize("heads", [(0, 2), (1, 3), (3, 4)])
@pytest.mark.parametrize("schema", [STREAMED, SHARDED], ids=["whole segments", "one of each head"])
@pytest.mark.parametrize("verify", ["always", "off"])
def test_heads_are_those_of_a_get(
    writer: Client, reader: Client, schema: KVSchema, heads: tuple[int, int], verify: Any
) -> None:
    prefix = fresh_prefix(2, schema)
    slots = writer.reserve(prefix)
    with reader.stream(prefix, heads=heads, verify=verify, timeout_s=30) as stream:
        layers = []
        course = iter(stream)
        for index in range(len(schema.layers)):
            fill(slots, index)
            slots.publish(index)
            layers.append(next(course))
        slots.commit()
        assert next(course, None) is None
        with writer.get(prefix, heads=heads) as blocks:
            for layer in layers:
                for got, wanted in zip(layer.blocks, blocks, strict=True):
                    for name in ("k", "v"):
                        part = got.part(name)
                        assert part.shape[0] == heads[1] - heads[0]
                        assert np.array_equal(
                            part.view(np.uint8), wanted.layer(layer.index).part(name).view(np.uint8)
                        )


def test_heads_that_are_not_there_are_refused(reader: Client) -> None:
    for heads in ((0, 5), (2, 2), "k"):
        with pytest.raises(SchemaError):
            list(reader.stream(fresh_prefix(1, STREAMED), heads=heads))  # type: ignore[arg-type]


def test_damage_beside_the_chosen_heads_is_not_theirs(
    writer: Client, reader: Client, node: Node
) -> None:
    """Where heads have segments of their own, only these are read and verified."""
    prefix = fresh_prefix(1, SHARDED)
    slots = writer.reserve(prefix)
    offset = slots[0].offset
    for layer in range(3):
        fill(slots, layer)
    slots.commit()
    node.dram.region.array[
        offset + SHARDED.header_bytes + SHARDED.range(1, "v", (5, 6)).offset
    ] ^= 1
    for heads in ((0, 5), (6, 8)):
        assert [layer.index for layer in reader.stream(prefix, heads=heads)] == [0, 1, 2]
    with pytest.raises(CorruptBlock, match="layer 1"):
        list(reader.stream(prefix, heads=(4, 6)))


# -- how it ends -----------------------------------------------------------------------------------


@pytest.mark.parametrize("published", [0, 2])
def test_an_abort_ends_the_stream(writer: Client, reader: Client, published: int) -> None:
    prefix = fresh_prefix(2, STREAMED)
    slots = writer.reserve(prefix)
    for layer in range(published):
        fill(slots, layer)
        slots.publish(layer)
    with reader.stream(prefix, timeout_s=30) as stream:
        course = iter(stream)
        for _ in range(published):
            assert is_right(next(course), prefix)
        waiting = Background(lambda: next(course))
        slots.abort()
        with pytest.raises(StaleLease, match="given up"):
            waiting.result()
    assert reader.match(prefix).blocks == 0


def test_a_reservation_that_expires_ends_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    node = start_node()
    with Client.attach(node) as writer, Client.attach(node) as reader:
        prefix = fresh_prefix(1, STREAMED)
        slots = writer.reserve(prefix)
        with reader.stream(prefix, timeout_s=30) as stream:
            following = Background(lambda: list(stream))
            wait_until(lambda: node.statistics()["waiting_requests"], "it waits")
            skip_time(monkeypatch, 100.0)
            with pytest.raises(StaleLease):
                following.result()
        with pytest.raises(StaleLease, match="has ended"):
            slots.publish(0)
        with pytest.raises(StaleLease, match="not stored"):
            slots.commit()
    finish(node)


def test_extents_under_a_follower_are_not_used_again(writer: Client, node: Node) -> None:
    prefix = fresh_prefix(2, STREAMED)
    slots = writer.reserve(prefix)
    fill(slots, 0)
    slots.publish(0)
    with Client.attach(node) as reader:
        stream = reader.stream(prefix)
        course = iter(stream)
        layer = next(course)
        slots.abort()
        others = [fresh_prefix(1, STREAMED) for _ in range(BLOCKS)]
        stored = [writer.put(o, payloads_of(o), timeout_s=0).stored for o in others]
        assert stored.count((0,)) == BLOCKS, "room was made by eviction"
        assert held_bytes(node.statistics()) == 2 * STREAMED.extent_bytes
        quarantined = node.statistics()["tiers"]["dram"]["quarantined_bytes"]
        assert quarantined == 2 * STREAMED.extent_bytes
        assert is_right(layer, prefix), "another block was written over it"
        with pytest.raises(StaleLease):
            next(course)
        wait_until(lambda: is_quiet(node.statistics()), "an ended stream lets go")


def test_what_is_changed_after_it_was_published_is_found_by_its_readers(
    writer: Client, reader: Client
) -> None:
    prefix = fresh_prefix(1, STREAMED)
    with writer.reserve(prefix) as slots:
        for layer in range(LAYERS):
            fill(slots, layer)
            slots.publish(layer)
        slots[0].view[0] ^= 1
    with reader.get(prefix) as blocks:
        assert (len(blocks), blocks.reason) == (0, "corrupt"), "sealed as it was published"


@pytest.mark.parametrize("published", [0, 1, LAYERS])
@pytest.mark.parametrize("ranks", [1, 2])
def test_each_byte_is_hashed_once(
    writer: Client, published: int, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed_bytes = 0
    hash_blocks = host_copy.hash_blocks  # `hash_segments` calls it too

    def counting(blocks: Any, spans: Any, algorithm: Any) -> Any:
        nonlocal hashed_bytes
        hashed_bytes += len(blocks) * sum(length for _, length in spans)
        return hash_blocks(blocks, spans, algorithm)

    monkeypatch.setattr(host_copy, "hash_blocks", counting)
    prefix = fresh_prefix(2, STREAMED if ranks == 1 else SHARDED)
    for rank in range(ranks):
        slots = writer.reserve(prefix, shard=(rank, ranks))
        for layer in range(min(published, len(prefix.schema.layers))):
            fill(slots, layer)
            slots.publish(layer)
        slots.commit()
    assert writer.match(prefix).blocks == 2
    assert hashed_bytes == 2 * prefix.schema.block_bytes


@pytest.mark.parametrize("published", [False, True])
def test_damage_is_found_with_its_layer(
    writer: Client, reader: Client, node: Node, published: bool
) -> None:
    prefix = fresh_prefix(1, STREAMED)
    span = STREAMED.spans[2]
    slots = writer.reserve(prefix)
    for layer in range(LAYERS):
        fill(slots, layer)
        if published:
            slots.publish(layer)
    offset = slots[0].offset
    if not published:
        slots.commit()
    at = offset + STREAMED.header_bytes + span.offset + 5
    node.dram.region.array[at] ^= 1
    course = iter(reader.stream(prefix))
    assert is_right(next(course), prefix)
    assert is_right(next(course), prefix)
    with pytest.raises(CorruptBlock, match="layer 2"):
        next(course)
    if published:
        slots.abort()
    else:
        wait_until(lambda: writer.match(prefix).blocks == 0, "the node drops it")


def test_verify_off_hashes_nothing(writer: Client, reader: Client, node: Node) -> None:
    prefix = fresh_prefix(1, STREAMED)
    slots = writer.reserve(prefix)
    offset = slots[0].offset
    for layer in range(LAYERS):
        fill(slots, layer)
    slots.commit()
    node.dram.region.array[offset + STREAMED.header_bytes] ^= 1
    found = [is_right(layer, prefix) for layer in reader.stream(prefix, verify="off")]
    assert found == [False] + [True] * (LAYERS - 1)


@pytest.mark.usefixtures("patient")
def test_a_layer_that_does_not_come_in_time(writer: Client, reader: Client) -> None:
    prefix = fresh_prefix(1, STREAMED)
    with writer.reserve(prefix) as slots:
        slots[0].skip()
        fill(slots, 0)
        with pytest.raises(DeadlineExceeded, match="layer 0 did not come"):
            list(reader.stream(prefix, timeout_s=0.05))


def test_a_loop_that_is_left_lets_go(writer: Client, reader: Client, node: Node) -> None:
    prefix = fresh_prefix(1, STREAMED)
    writer.put(prefix, payloads_of(prefix))
    stream = reader.stream(prefix)
    for _ in stream:
        assert held_bytes(node.statistics()) == STREAMED.extent_bytes
        break
    wait_until(lambda: held_bytes(node.statistics()) == 0, "the lease is given back")
    with pytest.raises(ClientClosed, match="has ended"):
        next(iter(stream))


def test_views_end_with_their_stream(writer: Client, node: Node) -> None:
    prefix = fresh_prefix(1, STREAMED)
    writer.put(prefix, payloads_of(prefix))
    with Client.attach(node) as reader:
        with reader.stream(prefix) as stream:
            layers = list(stream)
            assert all(is_right(layer, prefix) for layer in layers), "valid in the `with` block"
            with pytest.raises(ValueError, match="read-only"):
                layers[0].blocks[0].k[:] = 0
        with pytest.raises(ClientClosed):
            _ = layers[0].blocks[0].k


def test_a_remote_lease_lasts_as_long_as_it_is_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_source, "POLL_S", 1000.0)
    node = start_node(remote_lease_s=30.0, write_lease_s=1e6)
    with Client.attach(node) as writer, url_of(node) as url, Client.open(url) as reader:
        prefix = fresh_prefix(1, STREAMED)
        slots = writer.reserve(prefix)
        with reader.stream(prefix, timeout_s=1000, ahead=0) as stream:
            course = iter(stream)
            waiting = Background(lambda: next(course))
            wait_until(lambda: node.statistics()["waiting_requests"], "it awaits a layer")
            skip_time(monkeypatch, 300.0)
            with node.held():
                node._tick(time.monotonic() + 300.0)
            assert not node.statistics()["counters"]["expired"], "ten times the lease has passed"
            fill(slots, 0)
            slots.publish(0)
            assert is_right(waiting.result(), prefix)
            skip_time(monkeypatch, 600.0)
            wait_until(
                lambda: held_bytes(node.statistics()) == STREAMED.extent_bytes,
                "nobody asks, so the follower's lease ends and the writer's is left",
            )
            wait_until(lambda: node.statistics()["counters"]["expired"], "it has expired")
            with pytest.raises(StaleLease, match="want of an await"):
                next(course)
        slots.abort()
    finish(node)


# -- asyncio ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("far", [False, True])
def test_asyncio_writers_and_readers(node: Node, url: str, far: bool) -> None:
    prefix = fresh_prefix(2, STREAMED)

    async def run() -> None:
        opened = AsyncClient.open(url) if far else AsyncClient.attach(node)
        async with await AsyncClient.attach(node) as writer, await opened as reader:
            async with writer.reserve(prefix) as slots:
                fill(slots, 0)
                await slots.publish(0)
                read = 0
                async with reader.stream(prefix) as stream:
                    assert stream.blocks == 2
                    async for layer in stream:
                        assert is_right(layer, prefix)
                        assert layer.index == read
                        read += 1
                        if read < LAYERS:
                            fill(slots, read)
                            await slots.publish(read)
                        else:
                            await slots.commit()
            assert read == LAYERS
            assert [layer.index async for layer in reader.stream(prefix)] == list(range(LAYERS))

    asyncio.run(run())


def test_a_cancelled_reader_lets_go(node: Node, writer: Client) -> None:
    prefix = fresh_prefix(1, STREAMED)
    slots = writer.reserve(prefix)

    async def run() -> None:
        async with await AsyncClient.attach(node) as reader:

            async def read() -> None:
                async with reader.stream(prefix, timeout_s=30) as stream:
                    async for _ in stream:
                        raise AssertionError("nothing was published")

            task = asyncio.create_task(read())
            await asyncio.to_thread(
                wait_until, lambda: node.statistics()["waiting_requests"], "it waits"
            )
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(run())
    assert held_bytes(node.statistics()) == STREAMED.extent_bytes, "only the writer's"
    slots.abort()


def test_a_second_cancellation_does_not_stop_what_lets_go() -> None:
    """A task that is cancelled while `close` waits still releases the blocks."""
    ended: list[str] = []
    waits, go_on = threading.Event(), threading.Event()

    class Ending:
        def end(self) -> None:
            waits.set()
            assert go_on.wait(30)
            ended.append("end")

    async def run() -> None:
        stream = LayerStream(Ending(), Any, 5.0)  # type: ignore[arg-type]
        closing = asyncio.create_task(AsyncLayerStream(stream, Any).close())
        await asyncio.to_thread(waits.wait)
        for _ in range(3):
            closing.cancel()
            await asyncio.sleep(0)
        assert not closing.done(), "nobody else would tell the node"
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await closing

    asyncio.run(run())
    assert ended == ["end"]


# -- what is refused -------------------------------------------------------------------------------


def test_ranges_that_were_not_awaited_are_refused(node: Node, writer: Client) -> None:
    """Whatever a client asks for, the node's threads send only what was published."""
    prefix = fresh_prefix(2, STREAMED)
    slots = writer.reserve(prefix)
    fill(slots, 1)
    slots.publish(1)
    span = STREAMED.spans[1]
    service = RemoteService(node, ("127.0.0.1", 0))
    peer = Peer(service.address, Credentials())
    try:
        held = peer.call(messages.Lease(0, prefix.key_bytes, 30.0, True), 30.0)
        assert len(held.offsets) == 2

        def read(*ranges: Range) -> int:
            targets = [np.zeros(length, np.uint8) for _, length in ranges]
            deadline = time.monotonic() + 30
            return peer.transport.read(held.lease, ranges, targets, deadline=deadline).ranges

        with pytest.raises(GrantError, match="await"):
            read(Range(0, 1))
        answer = peer.call(messages.Await(0, held.lease, [1], 0.0), 30.0)
        assert answer.ready
        assert read(Range(0, 2 * span.length)) == 1, "layer 1 of both blocks, end to end"
        assert read(Range(0, span.length), Range(span.length, span.length + 1)) == 1
        assert read(Range(2 * span.length, 1)) == 0
        for segments in ([0], [0, 1], [2], [], [LAYERS + 7]):
            assert not peer.call(messages.Await(0, held.lease, segments, 0.0), 30.0).ready
            with pytest.raises(GrantError, match="await"):
                read(Range(0, 1))
        assert peer.call(messages.Confirm(0, held.lease), 30.0).count == 0, "nor one-sidedly"
        ordinary = peer.call(messages.Lease(0, prefix.key_bytes, 0.0), 30.0)
        assert (ordinary.lease, ordinary.offsets) == (0, [])
        with pytest.raises(StaleLease):
            peer.call(messages.Await(0, 77, [0], 0.0), 30.0)
    finally:
        peer.close()
        service.close()
        slots.abort()


def test_layers_that_cannot_be_published(writer: Client) -> None:
    slots = writer.reserve(fresh_prefix(1, STREAMED))
    slots.publish(0)
    with pytest.raises(InvalidInput, match="published before"):
        slots.publish(0)
    for layer in (LAYERS, -1):
        with pytest.raises(SchemaError):
            slots.publish(layer)
    slots.abort()
    with pytest.raises(StaleLease, match="committed or aborted"):
        slots.publish(1)


def test_publications_that_no_client_makes(node: Node) -> None:
    session = node.connect("liar", 1)
    replies: list[Any] = []
    prefix = fresh_prefix(1, SHARDED)
    size = SHARDED.extent_bytes
    owned = select_shard(SHARDED, (0, 2)).bitmap()
    reserve = messages.Reserve(1, prefix.key_bytes, prefix.parent, 0, size, 0.0, 0, 2, owned)
    node.submit(session, reserve, replies.append)
    lease = replies[-1].lease
    sums = bytes(8)
    for slots, segments, spans, checksums in [
        ([1], [0], [4096, 8], sums),  # no such slot
        ([0], [0], [4096], sums),  # half a span
        ([0], [0], [4096, 8], sums[:-1]),
        ([0, 0], [0], [4096, 8], 2 * sums),
        ([0], [0, 0], [4096, 8, 4104, 8], 2 * sums),
        ([0], [0], [0, 8], sums),  # in the header
        ([0], [0], [4096, size - 4095], sums),  # beyond the extent
        ([0], [0], [4096, 0], sums),
        ([0], [7], [4096, 8], sums),  # another rank's
        ([0], [4095], [4096, 8], sums),
    ]:
        request = messages.Publish(2, lease, slots, segments, spans, checksums)
        node.submit(session, request, replies.append)
        assert replies[-1].error == "InvalidInput", (slots, segments, spans)
    assert not node.core.residency.published
    node.submit(session, messages.Publish(2, lease, [0], [0], [4096, 8], sums), replies.append)
    assert replies[-1].count == 1
    node.submit(session, messages.Publish(3, lease + 99, [], [], [], b""), replies.append)
    assert replies[-1].error == "StaleLease"
    node.disconnect(session, fenced=True)


def test_a_stream_too_wide_for_one_answer_is_refused(writer: Client) -> None:
    wide = KVSchema.gqa(
        model="wide", layers=1, kv_heads=1024, head_dim=1, dtype="int8", block_tokens=1, shards=1024
    )
    with pytest.raises(InvalidInput, match="slices of the prefix"):
        writer.stream(wide.prefix(np.arange(1000)))


@pytest.mark.parametrize("ahead", [-1, 17, "1", 0.5, None])
def test_numbers_of_layers_that_cannot_be_fetched_ahead(reader: Client, ahead: Any) -> None:
    with pytest.raises(InvalidInput, match="ahead"):
        reader.stream(fresh_prefix(1, STREAMED), ahead=ahead)


# -- a pool ----------------------------------------------------------------------------------------


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    cluster = Cluster()
    yield cluster
    cluster.close()


def test_a_pool_streams_from_the_writers_node(cluster: Cluster) -> None:
    one, two = (cluster.start(name, schema=STREAMED) for name in ("one", "two"))
    prefix = fresh_prefix(2, STREAMED)
    writer, near, far = cluster.open(home=one), cluster.open(home=one), cluster.open(home=two)
    slots = writer.reserve(prefix)
    for layer in range(LAYERS):
        fill(slots, layer)
        slots.publish(layer)
    for unaware in (far, cluster.open()):
        stream = unaware.stream(prefix)
        assert list(stream) == [], "the directory knows nothing of reservations"
        assert (stream.blocks, stream.reason) == (0, "miss")
    streams = [near.stream(prefix), near.stream(prefix, node=one.number)]
    streams.append(far.stream(prefix, node=one.number))
    courses = [iter(stream) for stream in streams]
    for course in courses:
        assert [is_right(next(course), prefix) for _ in range(LAYERS)] == [True] * LAYERS
    slots.commit()
    for course in courses:
        assert next(course, None) is None
    cluster.settle()
    stream = far.stream(prefix)
    assert [is_right(layer, prefix) for layer in stream] == [True] * LAYERS, "located now"
    assert stream.blocks == 2
    with pytest.raises(NodeUnavailable, match="not in the pool"):
        list(far.stream(prefix, node=999))
    cluster.quiet()


# -- processes -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_processes_hand_layers_over(
    own_daemon: Callable[..., Any], commands_folder: Path
) -> None:
    daemon = own_daemon(dram=BLOCKS * STREAMED.extent_bytes)
    with Worker("streamworker.py", commands_folder, "write", daemon.url, "pair", 3) as writer:
        assert writer.says() == "ready"
        with Worker("streamworker.py", commands_folder, "read", daemon.url, "pair", 3) as reader:
            assert reader.says() == "blocks 3"
            for layer in range(LAYERS):
                assert writer.ask(f"layer {layer}") == "done"
                assert reader.says() == f"layer {layer} right"
            assert writer.ask("commit") == "done"
            assert reader.says() == "end"


def test_a_process_reads_over_the_network_what_another_writes(
    node: Node, writer: Client, url: str, commands_folder: Path
) -> None:
    prefix = prefix_of("afar", 3)
    slots = writer.reserve(prefix)
    with Worker("streamworker.py", commands_folder, "read", url, "afar", 3) as reader:
        assert reader.says() == "blocks 3"
        for layer in range(LAYERS):
            fill(slots, layer)
            slots.publish(layer)
            assert reader.says() == f"layer {layer} right"
        slots.commit()
        assert reader.says() == "end"


@pytest.mark.slow
def test_the_death_of_the_writer_ends_the_stream(
    own_daemon: Callable[..., Any], commands_folder: Path
) -> None:
    daemon = own_daemon(dram=BLOCKS * STREAMED.extent_bytes)
    prefix = prefix_of("killed", 2)
    with (
        Client.open(daemon.url) as reader,
        Worker("streamworker.py", commands_folder, "write", daemon.url, "killed", 2) as writer,
    ):
        assert writer.says() == "ready"
        assert writer.ask("layer 0") == "done"
        with reader.stream(prefix, timeout_s=60) as stream:
            course = iter(stream)
            first = next(course)
            assert is_right(first, prefix)
            waiting = Background(lambda: next(course))
            writer.kill()
            with pytest.raises(StaleLease, match="given up"):
                waiting.result()
            assert is_right(first, prefix), "its extents were used again"
        wait_until(lambda: is_quiet(reader.statistics()), "all is free")
        assert reader.put(prefix, payloads_of(prefix)).complete


@pytest.mark.slow
def test_a_node_that_dies_ends_the_stream(own_daemon: Callable[..., Any]) -> None:
    daemon = own_daemon(dram=BLOCKS * STREAMED.extent_bytes)
    prefix = fresh_prefix(1, STREAMED)
    with Client.open(daemon.url) as writer, Client.open(daemon.url) as reader:
        slots = writer.reserve(prefix)
        with reader.stream(prefix, timeout_s=60) as stream:
            waiting = Background(lambda: list(stream))
            wait_until(lambda: writer.statistics()["waiting_requests"], "it waits")
            assert len(slots) == 1
            daemon.process.kill()
            with pytest.raises(TiffinError):
                waiting.result()
