"""Hostile, silent and vanishing nodes and clients must not cost more than a call's time, keep what
they hold, control a terminal, or reveal a secret."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from kvsupport import assert_right, payloads_of, wait_until
from kvsupport import fresh_prefix as fresh
from poolsupport import LARGE, Cluster, Member

from tiffin.kvstore import AsyncClient, Client
from tiffin.kvstore.client.async_client import CALLS
from tiffin.kvstore.client.pool.many_nodes import ManyNodes
from tiffin.kvstore.client.pool.members import FixedMembers
from tiffin.kvstore.client.pool.remote.nixl_reads import OneSided
from tiffin.kvstore.client.pool.remote.peer import Peer
from tiffin.kvstore.client.pool.remote.reply_checks import check_reply
from tiffin.kvstore.client.pool.replication import node_copy
from tiffin.kvstore.client.pool.replication.replication_requests import Orders
from tiffin.kvstore.client.pool.verb_driver import VerbDriver
from tiffin.kvstore.credentials import Credentials
from tiffin.kvstore.deadlines import GRACE_S
from tiffin.kvstore.errors import (
    ClientClosed,
    DeadlineExceeded,
    InvalidInput,
    NodeUnavailable,
    ProtocolError,
    StaleLease,
    TiffinError,
)
from tiffin.kvstore.node.core import messages
from tiffin.kvstore.url import parse_url
from tiffin.messenger.testing import soon

if TYPE_CHECKING:
    from tiffin.kvstore import Prefix


def prompt(blocks: int) -> Prefix:
    return fresh(blocks, LARGE)


class Home:
    """A client's home that fails at some requests."""

    def __init__(self, client: Client, kind: type[messages.Request], error: type[Exception]):
        assert client.near_link is not None
        self._link: Any = client.near_link._link
        self._kind = kind
        self._error = error
        client.near_link._link = self  # type: ignore[assignment]

    def call(self, request: messages.Request, timeout_s: float) -> Any:
        if isinstance(request, self._kind):
            if self._error is DeadlineExceeded:
                time.sleep(timeout_s + GRACE_S)
            raise self._error("no home")
        return self._link.call(request, timeout_s)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._link, name)


class TestVanished:
    def test_a_client_that_left_does_not_wait_for_room(self, serve: Any, connect: Any) -> None:
        node, address = serve()
        full, wanted = prompt(16), prompt(1)
        with Client.attach(node) as client:
            client.put(full, payloads_of(full))
            with client.get(full):  # nothing can be evicted
                peer = connect(address)
                request = messages.Reserve(
                    1, wanted.key_bytes, wanted.parent, 0, LARGE.extent_bytes, 3600.0
                )
                with peer.transport.stream(soon()) as stream:
                    stream.message(messages.encoder.encode(request))
                    stream.flush(soon())
                    waiting = lambda: node.statistics()["waiting_requests"]  # noqa: E731
                    wait_until(lambda: waiting() == 1, "it waits")
                    stream.cut()
                wait_until(lambda: waiting() == 0, "the node sees that nobody waits any more")


class TestHome:
    @pytest.fixture
    def far(self, cluster: Cluster) -> tuple[Member, Prefix]:
        far, _ = cluster.start("far"), cluster.start("home")
        prefix = far.put(prompt(3))
        cluster.settle()
        return far, prefix

    @pytest.mark.parametrize("error", [NodeUnavailable, StaleLease, DeadlineExceeded])
    @pytest.mark.parametrize("into", [False, True], ids=["view", "into"])
    def test_a_home_lost_under_a_copy_costs_the_copy_and_not_the_read(
        self, cluster: Cluster, far: tuple[Member, Prefix], error: type[TiffinError], into: bool
    ) -> None:
        client = cluster.open(cluster.members["home"], admission="always")
        Home(client, messages.Commit, error)
        target = bytearray(3 * LARGE.block_bytes) if into else None
        with client.get(far[1], into=target, timeout_s=20.0) as blocks:
            assert blocks.complete, blocks.reason
            assert_right(blocks, far[1])

    def test_a_silent_home_is_not_asked_for_slots(
        self, cluster: Cluster, far: tuple[Member, Prefix]
    ) -> None:
        client = cluster.open(cluster.members["home"], admission="always")
        Home(client, messages.Lease, DeadlineExceeded)
        Home(client, messages.Reserve, AssertionError)
        client.get(far[1], timeout_s=0.05).release()

    @pytest.mark.parametrize("verb", ["pin", "remove"])
    def test_what_a_silent_home_took_is_not_given_to_others_again(
        self,
        cluster: Cluster,
        far: tuple[Member, Prefix],
        verb: str,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        client = cluster.open(cluster.members["home"])
        Home(client, messages.Pin | messages.Remove, DeadlineExceeded)  # type: ignore[arg-type]
        given: list[float] = []

        def ask(number: int, request: Any, timeout_s: float, record: object = None) -> Any:
            given.append(timeout_s)
            raise DeadlineExceeded("as well")

        monkeypatch.setattr(client._nodes.driver, "ask", ask)
        with contextlib.suppress(DeadlineExceeded):
            getattr(client, verb)(far[1], timeout_s=0.05)
        assert given
        assert max(given) == 0.0


class TestTime:
    def test_when_time_is_up_no_further_silent_node_is_tried(self, nothing_left: None) -> None:
        with contextlib.ExitStack() as stack:
            silent = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(4)]
            driver = VerbDriver(FixedMembers([s.getsockname()[:2] for s in silent]), Credentials())
            client = Client(ManyNodes(driver), "always")
            stack.callback(client.close)
            prefix = prompt(1)
            with pytest.raises(NodeUnavailable):
                client.put(prefix, payloads_of(prefix), timeout_s=0.0)
            assert len(driver._peers) == 1

    def test_a_silent_target_is_not_offered_every_source(
        self, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        members = [cluster.start(name) for name in "abc"]
        prefix = prompt(1)
        for member in members[:2]:
            member.put(prefix)
        cluster.settle()
        client, asked = cluster.open(), []

        def ask(number: int, request: Any, timeout_s: float) -> Any:
            asked.append(number)
            raise DeadlineExceeded("silent")

        monkeypatch.setattr(client._nodes.driver, "ask", ask)
        with pytest.raises(DeadlineExceeded):
            client.replicate(prefix, [members[2].number], timeout_s=0.0)
        assert asked == [members[2].number]

    def test_reads_over_several_streams_are_hedged_too(self, cluster: Cluster) -> None:
        one, two = (cluster.start(name, 72, relayed=True) for name in "ab")
        prefix = prompt(68)  # 17 MiB: spread
        for member in (one, two):
            member.put(prefix)
        cluster.settle()
        client = cluster.open(streams=2)
        client.get(prefix[:1]).release()
        first = one if one.counters()["dram_hits"] else two
        assert first.network is not None
        first.network.stall_after(1 << 20)
        with client.get(prefix, timeout_s=30.0) as blocks:
            assert blocks.complete, blocks.reason
            assert_right(blocks, prefix)
        first.network.resume()

    def test_asking_for_nixl_takes_no_more_time_than_the_read_has(self) -> None:
        given: list[float] = []

        def call(request: messages.Request, timeout_s: float) -> Any:
            given.append(timeout_s)
            raise DeadlineExceeded("silent")

        way = OneSided("a node", call, None)  # type: ignore[arg-type]
        assert way.messenger(time.monotonic() + 60.0) is None
        assert 0.0 <= given[0] <= 60.0
        with way._lock:  # as if another thread were connecting
            assert way.messenger(time.monotonic()) is None
        assert len(given) == 1


class TestTurns:
    """The limit of concurrent calls of one asyncio client: the rest wait."""

    @staticmethod
    def crowded(cluster: Cluster, test: Any) -> None:
        async def main() -> None:
            client = AsyncClient(cluster.open())
            go = threading.Event()
            running = [asyncio.ensure_future(client._run(go.wait)) for _ in range(CALLS)]
            await asyncio.sleep(0)
            try:
                await test(client)
                assert not any(one.done() for one in running)
            finally:
                go.set()
                await asyncio.gather(*running)
                await client.close()

        asyncio.run(main())

    def test_who_waits_for_a_turn_waits_until_the_deadline(self, cluster: Cluster) -> None:
        async def test(client: AsyncClient) -> None:
            with pytest.raises(DeadlineExceeded, match="other calls"):
                await client.match(prompt(1), timeout_s=0.05)

        self.crowded(cluster, test)

    def test_who_waits_for_a_turn_can_be_cancelled(self, cluster: Cluster) -> None:
        ran: list[int] = []

        async def test(client: AsyncClient) -> None:
            waiting = asyncio.ensure_future(client._run(partial(ran.append, 1)))
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting

        self.crowded(cluster, test)
        assert not ran


def test_a_copy_counts_what_another_writer_brought_meanwhile(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = cluster.start("source"), cluster.start("target")
    prefix = source.put(prompt(2))
    cluster.settle()
    begin = node_copy.Copier._copy_leased

    def overtaken(*arguments: Any) -> int:
        target.put(prefix)
        return begin(*arguments)

    monkeypatch.setattr(node_copy.Copier, "_copy_leased", overtaken)
    assert cluster.open().replicate(prefix, [target.number]) == {target.number: 2}


def test_an_order_to_a_closed_client_is_a_typed_error() -> None:
    orders = Orders()
    orders.close()
    with pytest.raises(ClientClosed):
        orders.add(lambda: None)


def test_a_node_cannot_have_done_it_to_more_blocks_than_it_was_given() -> None:
    for kind in (
        messages.Remove(1, bytes(32)),
        messages.Pin(1, bytes(32), 1, 1.0),
        messages.Pull(1, bytes(32), bytes(16), 0, 1, 1.0),
    ):
        assert check_reply(kind, messages.Done(1, 2))
        assert not check_reply(kind, messages.Done(1, 3))
        assert not check_reply(kind, messages.Done(1, -1))
    assert not check_reply(messages.Evacuate(1, 1.0), messages.Done(1, 1 << 70))


@pytest.mark.parametrize("name", ["\x1b[2J", "a\nb", "\x9b2J", "\x7f"])
def test_a_name_does_not_command_the_terminals_of_others(serve: Any, name: str) -> None:
    _, address = serve()
    peer = Peer(address, Credentials(), name)
    with contextlib.closing(peer), pytest.raises(ProtocolError):
        peer.call(messages.Match(0, b""), 5.0)


@pytest.mark.parametrize(
    "url",
    [
        "redis://:hunter2@[::1",
        "reds://:hunter2@host",
        "unix://:hunter2@x",
        "tiffin://:hunter2@h:1/x",
        "tiffin://u:hunter2@h:1",
        "tiffin://u:hun/ter2@h:1",
    ],
)
def test_no_error_repeats_a_password(url: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        parse_url(url)
    assert "ter2" not in str(caught.value)
    assert "ter2" not in repr(parse_url("redis://:hunter2@host"))
