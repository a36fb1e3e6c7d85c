"""Calls that are cancelled, and streams that are closed, while a connection is being opened: they
do not wait for a node that does not even answer the first packet.

Deadlines are an hour away, so that a call returns only if its connection is cut.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import socket
from typing import TYPE_CHECKING, Any

import pytest
from kvsupport import Background, is_quiet, payloads_of, wait_until
from streamsupport import ahead_threads, prompt
from streamworker import is_right

from tiffin.kvstore import AsyncClient, Client
from tiffin.kvstore.client.pool.many_nodes import ManyNodes
from tiffin.kvstore.client.pool.members import FixedMembers
from tiffin.kvstore.client.pool.peers import PoolOptions
from tiffin.kvstore.client.pool.remote import peer
from tiffin.kvstore.client.pool.verb_driver import VerbDriver
from tiffin.kvstore.client.streaming import layer_source
from tiffin.kvstore.credentials import Credentials
from tiffin.kvstore.errors import ClientClosed
from tiffin.messenger.testing import soon

if TYPE_CHECKING:
    from collections.abc import Iterator

    from poolsupport import Cluster

AN_HOUR_S = 3600.0


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the call's own deadline ends a wait for a connection, or for a layer."""
    monkeypatch.setattr(peer._Patience, "connect_s", AN_HOUR_S)
    monkeypatch.setattr(layer_source, "POLL_S", AN_HOUR_S)


@pytest.fixture
def deaf(nothing_left: None, patient: None) -> Iterator[Client]:
    """A client of two nodes whose kernels drop the first packet."""
    with contextlib.ExitStack() as stack:
        addresses = []
        for _ in range(2):
            sock = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
            for _ in range(8):
                one = stack.enter_context(socket.socket())
                one.setblocking(False)
                assert one.connect_ex(sock.getsockname()) in (0, errno.EINPROGRESS)
            addresses.append(sock.getsockname()[:2])
        options = PoolOptions(hedge_share=0.0)  # no hedging: it does not turn to the other node
        driver = VerbDriver(FixedMembers(addresses), Credentials(), options=options)
        client = Client(ManyNodes(driver), "always")
        stack.callback(client.close)
        yield client


def opened(client: Client) -> int:
    """How many connections are being opened."""
    return sum(p.transport._pool.counts()[1] for p in list(client._nodes.driver._peers.values()))


@pytest.mark.parametrize("verb", ["get", "match", "put", "stream"])
def test_a_call_that_is_cancelled_does_not_wait_for_a_connection(deaf: Client, verb: str) -> None:
    prefix = prompt(1)

    async def call(client: AsyncClient) -> Any:
        if verb == "put":
            return await client.put(prefix, payloads_of(prefix), timeout_s=AN_HOUR_S)
        if verb == "stream":
            async with client.stream(prefix, timeout_s=AN_HOUR_S) as stream:
                return [layer async for layer in stream]
        return await getattr(client, verb)(prefix, timeout_s=AN_HOUR_S)

    async def run() -> None:
        client = AsyncClient(deaf)
        task = asyncio.create_task(call(client))
        # `match` asks both nodes at the same time, in two threads.
        connecting = 2 if verb == "match" else 1
        await asyncio.to_thread(wait_until, lambda: opened(deaf) == connecting, "it connects")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, 30)
        assert opened(deaf) == 0
        await client.close()

    asyncio.run(run())
    assert not deaf._nodes.driver.links.statistics(), "whoever gave up, it was not the node"


def test_a_call_that_is_cancelled_does_not_wait_for_connections_of_others(
    cluster: Cluster, patient: None
) -> None:
    one = cluster.start("one")
    prefix = one.put(prompt(1))
    cluster.settle()
    pool = cluster.open(streams_max=1)

    async def run() -> None:
        client = AsyncClient(pool)
        with pool._nodes.driver.peer(one.number).stream(soon()):
            task = asyncio.ensure_future(_await(client.get(prefix, timeout_s=AN_HOUR_S)))
            await asyncio.to_thread(wait_until, lambda: _waiting(pool), "it waits for the only one")
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asyncio.wait_for(task, 30)
        async with client.get(prefix) as blocks:
            assert blocks.complete, "that was no fault of the node"
        await client.close()

    asyncio.run(run())


def test_who_closes_a_stream_does_not_wait_for_connections_of_others(
    cluster: Cluster, patient: None
) -> None:
    one = cluster.start("one")
    prefix = one.put(prompt(1))
    reader = cluster.open(streams_max=1)
    stream = reader.stream(prefix, node=one.number, timeout_s=AN_HOUR_S)
    assert is_right(stream.step(), prefix)
    current: Any = stream._source._current  # type: ignore[attr-defined]
    wait_until(lambda: current._prefetcher._results, "the next is here")
    with reader._nodes.driver.peer(one.number).stream(soon()):
        assert is_right(stream.step(), prefix)
        wait_until(lambda: _waiting(reader), "the one behind it waits for the only connection")
        Background(stream.close).result()
    assert not ahead_threads()
    reader.close()  # what could not be released for want of a connection ends with the session


@pytest.mark.parametrize("way", ["sync", "asyncio"])
def test_a_stream_that_is_dropped_gives_its_lease_back(cluster: Cluster, way: str) -> None:
    """The task that had the stream may have been lost with its loop."""
    one = cluster.start("one")
    pool, prefix = cluster.open(), one.put(prompt(2))

    async def begin() -> Any:
        stream = AsyncClient(pool).stream(prefix, node=one.number)
        layers = aiter(stream)
        assert is_right(await anext(layers), prefix)
        return layers

    def begin_at_once() -> Any:
        layers = iter(pool.stream(prefix, node=one.number))
        assert is_right(next(layers), prefix)
        return layers

    loop = asyncio.new_event_loop()  # its async generators are not shut down
    layers = loop.run_until_complete(begin()) if way == "asyncio" else begin_at_once()
    loop.close()
    assert not is_quiet(one.node.statistics())
    del layers
    gc.collect()
    wait_until(lambda: is_quiet(one.node.statistics()), "the lease to be given back")


def test_a_stream_that_was_given_up_before_it_began_waits_for_nothing(
    cluster: Cluster, patient: None
) -> None:
    one = cluster.start("one")
    reader, prefix = cluster.open(streams_max=1), one.put(prompt(1))
    stream = reader.stream(prefix, node=one.number, timeout_s=AN_HOUR_S)
    source: Any = stream._source
    with reader._nodes.driver.peer(one.number).stream(soon()):
        waiting = Background(stream.step)
        wait_until(lambda: _waiting(reader), "it waits for the only connection")
        source.interrupt()
        source.give_up()
        with pytest.raises(ClientClosed):
            waiting.result()
        stream.close()


def test_a_cancelled_reader_of_half_a_layer_is_cut_off(cluster: Cluster, patient: None) -> None:
    one = cluster.start("one", relayed=True)
    prefix = one.put(prompt(2))
    assert one.network is not None
    network = one.network

    async def run() -> None:
        async with AsyncClient(cluster.open()) as reader:
            how = {"node": one.number, "timeout_s": AN_HOUR_S, "ahead": 0}

            async def read() -> None:
                async with reader.stream(prefix, **how) as stream:  # type: ignore[arg-type]
                    network.stall_after(1 << 15)
                    async for _ in stream:
                        pass

            task = asyncio.create_task(read())
            stalled = lambda: not network._flowing.is_set()  # noqa: E731
            await asyncio.to_thread(wait_until, stalled, "half of a layer is here")
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asyncio.wait_for(task, 30)
            network.resume()

    asyncio.run(run())


async def _await(opening: Any) -> Any:
    return await opening


def _waiting(client: Client) -> bool:
    """Whether a thread waits for a connection that another thread uses."""
    (one,) = client._nodes.driver._peers.values()
    return bool(one.transport._pool._changed._waiters)  # type: ignore[attr-defined]
