"""Readers of streams between machines: they prefetch, leave early, want a few heads only, or lose
the node that they follow."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from kvsupport import (
    Background,
    held_bytes,
    is_quiet,
    payload_of,
    payloads_of,
    skip_time,
    wait_until,
)
from poolsupport import LARGE, Cluster, Member
from streamsupport import (
    LAYER_BYTES,
    LAYERS,
    SMALL_BYTES,
    SPLIT,
    Counted,
    ahead_threads,
    prompt,
    publish,
)
from streamworker import is_right

from tiffin.kvstore import AsyncClient, Client, KVSchema
from tiffin.kvstore.client.pool import failover_source
from tiffin.kvstore.client.pool.remote.remote_source import RemoteSource
from tiffin.kvstore.deadlines import GRACE_S
from tiffin.kvstore.errors import DeadlineExceeded, NodeUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tiffin.kvstore import Prefix
    from tiffin.kvstore.client.streaming.layer_stream import LayerStream
    from tiffin.kvstore.client.verbs.slots import Slots


def right(stream: LayerStream, prefix: Prefix) -> list[bool]:
    return [is_right(layer, prefix) for layer in stream]


# -- readers ---------------------------------------------------------------------------------------


class TestHeads:
    @pytest.mark.parametrize("verify", ["always", "off"])
    @pytest.mark.parametrize("schema", [LARGE, SPLIT], ids=["whole segments", "one of each head"])
    def test_only_they_travel(self, cluster: Cluster, schema: KVSchema, verify: Any) -> None:
        """Except for the rest of segments that have to be verified whole."""
        one = cluster.start("one", schema=schema, relayed=True)
        received = Counted(one)
        prefix = one.put(prompt(3, schema))
        reader = cluster.open(verify=verify)
        for layer in reader.stream(prefix, heads=(1, 2), node=one.number):
            assert layer.blocks[0].k.shape == (1, 64, 64)
            for block, key in zip(layer.blocks, prefix.keys, strict=True):
                where = schema.range(layer.index, "v", (1, 2))
                wanted = payload_of(key, schema)[where.offset : where.end]
                assert block.v.tobytes() == wanted.tobytes()
        whole = schema is LARGE and verify == "always"
        wanted = 3 * (schema.block_bytes // (1 if whole else 4) + schema.header_bytes)
        assert wanted <= received() < wanted + LAYERS * SMALL_BYTES


class TestFetchingAhead:
    @pytest.mark.parametrize("ahead", [0, 1, 2])
    def test_so_many_layers_come_while_the_caller_works(self, cluster: Cluster, ahead: int) -> None:
        one = cluster.start("one", relayed=True)
        received = Counted(one)
        prefix = one.put(prompt(2))
        with cluster.open().stream(prefix, node=one.number, ahead=ahead) as stream:
            for layer in stream:
                here = min(layer.index + 1 + ahead, LAYERS)
                wait_until(lambda n=here: received() >= 2 * n * LAYER_BYTES, "they come unasked")
                assert received() < 2 * here * LAYER_BYTES + 2 * (LAYER_BYTES // 2)
                assert is_right(layer, prefix)
        assert not ahead_threads()

    def test_a_layer_that_is_here_needs_no_network(self, cluster: Cluster) -> None:
        one = cluster.start("one", relayed=True)
        received = Counted(one)
        prefix = one.put(prompt(2))
        with cluster.open().stream(prefix, node=one.number) as stream:
            course = iter(stream)
            assert next(course).index == 0
            wait_until(lambda: received() >= 4 * LAYER_BYTES, "the next one comes")
            assert one.network is not None
            one.network.pause()
            assert is_right(next(course), prefix)
            one.network.resume()
            assert [layer.index for layer in course] == [2, 3]

    def test_who_leaves_early_waits_for_nobody(self, cluster: Cluster) -> None:
        """A reader that awaits an unwritten layer can close at once, and keeps its connections."""
        one = cluster.start("one")
        client, prefix = cluster.open(), prompt(2)
        slots = client.reserve(prefix)
        publish(slots, 0)
        with client.stream(prefix, node=one.number, timeout_s=300) as stream:
            assert is_right(next(iter(stream)), prefix)
            wait_until(lambda: one.node.statistics()["waiting_requests"], "the next is awaited")
        assert not ahead_threads()
        wait_until(
            lambda: held_bytes(one.node.statistics()) == 2 * LARGE.extent_bytes, "it lets go"
        )
        publish(slots, 1, 2, 3)
        slots.commit()
        assert slots.stored == (0, 1), "the reservation was on one of its connections"

    @pytest.mark.slow
    def test_who_leaves_in_the_middle_of_a_layer_is_cut_off(self, cluster: Cluster) -> None:
        one = cluster.start("one", relayed=True)
        prefix = one.put(prompt(2))
        assert one.network is not None
        with cluster.open().stream(prefix, node=one.number, timeout_s=300) as stream:
            one.network.stall_after(3 * LAYER_BYTES)
            course = iter(stream)
            layer = next(course)
            wait_until(lambda: not one.network._flowing.is_set(), "half of the next is here")  # type: ignore[union-attr]
        assert not ahead_threads()
        assert is_right(layer, prefix)
        one.network.resume()

    def test_a_loop_that_is_left_leaves_nothing(self, cluster: Cluster) -> None:
        one = cluster.start("one")
        prefix = one.put(prompt(2))
        for _ in cluster.open().stream(prefix, node=one.number):
            break
        assert not ahead_threads()

    def test_a_client_that_is_closed_ends_its_streams(self, cluster: Cluster) -> None:
        one = cluster.start("one")
        client, prefix = cluster.open(), prompt(1)
        slots = cluster.open().reserve(prefix)
        publish(slots, 0)
        stream = client.stream(prefix, node=one.number, timeout_s=300)
        assert stream.step() is not None
        wait_until(lambda: one.node.statistics()["waiting_requests"], "the next is awaited")
        client.close()
        wait_until(lambda: not ahead_threads(), "its thread ends")
        slots.abort()

    @pytest.mark.parametrize("ahead", [0, 1])
    def test_a_cancelled_reader_is_gone_at_once(self, cluster: Cluster, ahead: int) -> None:
        one = cluster.start("one")
        prefix = prompt(1)
        slots = cluster.open().reserve(prefix)
        publish(slots, 0)

        async def run() -> None:
            async with AsyncClient(cluster.open()) as reader:
                layers: list[int] = []

                async def read() -> None:
                    how = {"node": one.number, "timeout_s": 300.0, "ahead": ahead}
                    async with reader.stream(prefix, **how) as stream:  # type: ignore[arg-type]
                        layers.extend([layer.index async for layer in stream])

                task = asyncio.create_task(read())
                await asyncio.to_thread(
                    wait_until, lambda: one.node.statistics()["waiting_requests"], "it waits"
                )
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await asyncio.wait_for(task, 30)
                assert not ahead_threads()
                assert len(asyncio.all_tasks()) == 1

        asyncio.run(run())
        wait_until(lambda: held_bytes(one.node.statistics()) == LARGE.extent_bytes, "it lets go")
        slots.abort()


# -- nodes that hang ------------------------------------------------------------------------------


@pytest.fixture
def hung(cluster: Cluster) -> Iterator[tuple[list[Member], Prefix, Client]]:
    """Three nodes that have the same blocks, a client that is connected to them, and no answers."""
    members = [cluster.start(name, relayed=True) for name in ("one", "two", "three")]
    prefix = prompt(2)
    for member in members:
        member.put(prefix)
    cluster.settle()
    client = cluster.open()
    for member in members:
        with client.stream(prefix, node=member.number) as stream:
            assert stream.step() is not None
    for member in members:
        assert member.network is not None
        member.network.pause()
    yield members, prefix, client
    for member in members:
        assert member.network is not None
        member.network.resume()


Hung = tuple[list[Member], "Prefix", "Client"]


class TestNodesThatHang:
    def test_all_together_have_the_time_of_one(
        self, hung: Hung, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Each node gets as its `timeout_s` no more than the earlier nodes have left."""
        _, prefix, client = hung
        given: list[float] = []

        class Clock:
            """A clock on which each node has taken all of its time, and the grace."""

            @staticmethod
            def monotonic() -> float:
                return time.monotonic() + sum(given) + GRACE_S * len(given)

        def hangs(self: RemoteSource, request: Any) -> Any:
            given.append(request.timeout_s)
            raise DeadlineExceeded("it hangs")

        monkeypatch.setattr(failover_source, "time", Clock)
        monkeypatch.setattr(RemoteSource, "_lease", hangs)
        with pytest.raises(DeadlineExceeded), client.stream(prefix, timeout_s=60.0):
            pass
        assert len(given) == 3, "one that hangs leaves time for the others"
        assert sum(given) <= 60.0

    @pytest.mark.slow
    def test_one_leaves_time_for_another(self, hung: Hung) -> None:
        members, prefix, client = hung
        assert members[1].network is not None
        members[1].network.resume()
        with client.stream(prefix, timeout_s=3.0) as stream:
            assert right(stream, prefix) == [True] * LAYERS

    def test_who_is_cancelled_asks_no_other_and_waits_no_more(
        self, hung: Hung, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        _, prefix, client = hung
        asked = threading.Event()
        given: list[float] = []
        lease = RemoteSource._lease

        def seen(self: RemoteSource, request: Any) -> Any:
            given.append(request.timeout_s)
            asked.set()
            return lease(self, request)

        monkeypatch.setattr(RemoteSource, "_lease", seen)

        async def run() -> None:
            reader = AsyncClient(client)

            async def read() -> None:
                async with reader.stream(prefix, timeout_s=300.0):
                    pass

            task = asyncio.create_task(read())
            assert await asyncio.to_thread(asked.wait, 30)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asyncio.wait_for(task, 30)
            assert len(asyncio.all_tasks()) == 1

        asyncio.run(run())
        assert len(given) == 1


# -- a node that is lost ---------------------------------------------------------------------------


def lose(member: Member) -> None:
    """Make a node unreachable; the directory does not notice."""
    member.hang_up()
    assert member.network is not None
    member.network.cut()


class TestLosingTheNode:
    @pytest.mark.parametrize("ahead", [0, 1, 3])
    @pytest.mark.parametrize("read", [0, 2, LAYERS])
    def test_another_that_has_the_blocks_goes_on(
        self, cluster: Cluster, read: int, ahead: int
    ) -> None:
        one, two = cluster.start("one", relayed=True), cluster.start("two")
        prefix = prompt(3)
        for member in (one, two):
            member.put(prefix)
        cluster.settle()
        with cluster.open().stream(prefix, node=one.number, ahead=ahead) as stream:
            course = iter(stream)
            layers = [next(course) for _ in range(read)]
            lose(one)
            layers += course
            assert [layer.index for layer in layers] == list(range(LAYERS))
            assert all(is_right(layer, prefix) for layer in layers)
            assert (stream.blocks, stream.complete, stream.reason) == (3, True, None)
        cluster.remember(two)

    def test_home_takes_over_what_was_followed_elsewhere(self, cluster: Cluster) -> None:
        one, home = cluster.start("one", relayed=True), cluster.start("home")
        prefix = prompt(2)
        for member in (one, home):
            member.put(prefix)
        with cluster.open(home).stream(prefix, node=one.number, heads=(0, 3)) as stream:
            course = iter(stream)
            layers = [next(course)]
            lose(one)
            layers += course
            for layer in layers:
                for block, key in zip(layer.blocks, prefix.keys, strict=True):
                    where = LARGE.range(layer.index, "k", (0, 3))
                    wanted = payload_of(key, LARGE)[where.offset : where.end]
                    assert block.k.tobytes() == wanted.tobytes()
            assert len(layers) == LAYERS
        cluster.remember(home)

    def test_another_takes_over_from_home(self, cluster: Cluster, monkeypatch: Any) -> None:
        home, two = cluster.start("home"), cluster.start("two")
        prefix = prompt(2)
        for member in (home, two):
            member.put(prefix)
        cluster.settle()
        client = cluster.open(home)
        with client.stream(prefix) as stream:
            course = iter(stream)
            first = next(course)

            def lost(*_: Any) -> Any:
                raise NodeUnavailable("home was killed")

            with monkeypatch.context() as patched:
                patched.setattr(client.near_link, "call", lost)
                rest = list(course)
            layers = [first, *rest]
            assert [layer.index for layer in layers] == list(range(LAYERS))
            assert all(is_right(layer, prefix) for layer in layers), "views of home stay valid"

    def test_asyncio_goes_on_alike(self, cluster: Cluster) -> None:
        one, two = cluster.start("one", relayed=True), cluster.start("two")
        prefix = prompt(2)
        for member in (one, two):
            member.put(prefix)
        cluster.settle()

        async def run() -> None:
            async with AsyncClient(cluster.open()) as reader:
                read = 0
                async for layer in reader.stream(prefix, node=one.number):
                    assert is_right(layer, prefix)
                    read += 1
                    if read == 1:
                        await asyncio.to_thread(lose, one)
                assert read == LAYERS

        asyncio.run(run())
        cluster.remember(two)

    def test_a_lease_that_was_lost_alone_is_taken_anew(
        self, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """After a short outage of the network, or with a slow caller."""
        one = cluster.start("one")
        prefix = one.put(prompt(2))
        with cluster.open().stream(prefix, node=one.number, ahead=0) as stream:
            course = iter(stream)
            layers = [next(course)]
            skip_time(monkeypatch, 3600.0)
            wait_until(lambda: one.counters()["expired"], "it expires")
            layers += course
        assert len(layers) == LAYERS
        assert all(is_right(layer, prefix) for layer in layers)

    @pytest.mark.parametrize("other", ["nobody", "too few", "reserved", "other bytes"])
    def test_nobody_else_can_take_over(self, cluster: Cluster, other: str) -> None:
        """A stream ends unless another node has all its blocks with the bytes already yielded."""
        one, two = cluster.start("one", relayed=True), cluster.start("two")
        prefix = one.put(prompt(2))
        held: Slots | None = None
        with Client.attach(two.node) as near:
            if other == "too few":
                near.put(prefix[:1], payloads_of(prefix[:1]))
            elif other == "reserved":
                held = near.reserve(prefix)
                publish(held, *range(LAYERS))
            elif other == "other bytes":  # in the very first byte alone, which was read before
                payloads = payloads_of(prefix)
                payloads[1][0] ^= 1
                assert near.put(prefix, payloads).complete
            cluster.settle()
            stream = cluster.open(home=two).stream(prefix, node=one.number)
            course = iter(stream)
            assert is_right(next(course), prefix)
            lose(one)
            rest: list[Any] = []
            with pytest.raises(NodeUnavailable):
                rest.extend(course)
            # Prefetched layers are the lost node's; none of another node were added.
            assert all(is_right(layer, prefix) for layer in rest)
            if held is not None:
                held.abort()
            wait_until(lambda: is_quiet(two.node.statistics()), "nothing is held")
            stream.close()
        cluster.remember(two)

    def test_bytes_that_were_not_handed_out_yet_may_differ(self, cluster: Cluster) -> None:
        """Then all bytes are of the node that takes over, as if the stream had begun there."""
        one, two = cluster.start("one", relayed=True), cluster.start("two")
        prefix = one.put(prompt(1))
        payloads = payloads_of(prefix)
        payloads[0][-1] ^= 1
        with Client.attach(two.node) as near:
            near.put(prefix, payloads)
        cluster.settle()
        with cluster.open().stream(prefix, node=one.number) as stream:
            course = iter(stream)
            layers = [next(course)]
            lose(one)
            layers += course
        found = [is_right(layer, prefix) for layer in layers]
        assert found == [True] * (LAYERS - 1) + [False]
        with cluster.open().get(prefix) as blocks:
            assert blocks[0].bytes.tobytes() == payloads[0].tobytes()
        cluster.remember(two)


def test_many_streams_side_by_side(cluster: Cluster) -> None:
    """More streams than a client has connections to a node, each read by its own thread."""
    one = cluster.start("one", blocks=64)
    client = cluster.open()
    prefixes = [one.put(prompt(1)) for _ in range(12)]

    def read(client: Client, prefix: Prefix) -> list[bool]:
        with client.stream(prefix, node=one.number, timeout_s=30) as stream:
            return right(stream, prefix)

    readers: list[Callable[[], Any]] = [
        Background(lambda p=p: read(client, p)).result for p in prefixes
    ]
    for result in readers:
        assert result() == [True] * LAYERS
