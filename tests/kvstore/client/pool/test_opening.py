"""Clients of many nodes from their URLs, and a daemon with all of its options."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from directory.ports import free_port
from kvsupport import (
    Daemon,
    assert_right,
    await_closed,
    fresh_prefix,
    open_files,
    payloads_of,
    wait_until,
    within,
)

from tiffin.kvstore import AsyncClient, Client
from tiffin.kvstore.client.pool.open_pool import open_pool
from tiffin.kvstore.errors import (
    ClientClosed,
    DeadlineExceeded,
    InvalidInput,
    NodeUnavailable,
    NotAuthenticated,
)
from tiffin.kvstore.node.server.unix_server import UnixServer
from tiffin.kvstore.url import Pool

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kvsupport import LoopThread
    from poolsupport import Cluster


@pytest.fixture
def token(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text("a token of the pool, 32 characters\n")
    path.chmod(0o600)
    return path


@pytest.fixture
def daemon(own_daemon: Callable[..., Daemon], token: Path) -> Daemon:
    """A process that listens on the network, with a token."""
    options = ["--listen", "127.0.0.1:0", "--token-file", str(token), "--name", "the-node"]
    return own_daemon(options=options)


def address_of(daemon: Daemon) -> str:
    found = re.findall(r"and\s+(127\.0\.0\.1:\d+)", daemon.log())
    assert found, daemon.log()
    return str(found[-1])


class TestDaemon:
    @pytest.mark.slow
    def test_by_its_socket_and_by_its_port(self, daemon: Daemon, token: Path) -> None:
        address = address_of(daemon)
        prefix = fresh_prefix(3)
        with (
            Client.open(daemon.url) as near,
            Client.open(f"tiffin://{address}?token_file={token}", name="from afar") as far,
        ):
            assert far.put(prefix, payloads_of(prefix)).complete
            with near.get(prefix) as blocks:
                assert_right(blocks, prefix)
            names = [session["name"] for session in near.statistics()["sessions"]]
            assert "from afar" in names
            assert near.remove(prefix) == 3
        url = f"tiffin://{address}?token_file={token}&home={daemon.socket}&admission=always"
        with Client.open(url) as both:
            both.put(prefix, payloads_of(prefix))
            with both.get(prefix) as blocks:
                assert_right(blocks, prefix)
                memory = both.near_link.mapping.memory  # type: ignore[attr-defined]
                assert np.shares_memory(blocks[0].bytes, memory)

    @pytest.mark.slow
    def test_without_the_token_nobody_gets_in(
        self, daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("TIFFIN_TOKEN_FILE", raising=False)
        url = f"tiffin://{address_of(daemon)}"
        with pytest.raises(NotAuthenticated):
            Client.open(url)
        wrong = tmp_path / "wrong"
        wrong.write_text("another token, of somebody else")
        wrong.chmod(0o600)
        with pytest.raises(NotAuthenticated):
            Client.open(f"{url}?token_file={wrong}")

    @pytest.mark.slow
    def test_a_restart_is_found_without_doing_anything(
        self, own_daemon: Callable[..., Daemon]
    ) -> None:
        port = free_port()
        daemon = own_daemon(options=["--listen", f"127.0.0.1:{port}"])
        prefix = fresh_prefix(1)
        with Client.open(f"tiffin://127.0.0.1:{port}") as client:
            client.put(prefix, payloads_of(prefix))
            before = open_files()
            for _ in range(3):
                daemon.kill()
                assert client.get(prefix).missing[0].reason == "lost"
                with pytest.raises(NodeUnavailable):
                    client.match(prefix)
                with pytest.raises(NodeUnavailable):
                    client.statistics()
                daemon.start()
                assert client.match(prefix).blocks == 0
                assert client.put(prefix, payloads_of(prefix)).stored == (0,)
                with client.get(prefix) as blocks:
                    assert_right(blocks, prefix)
            await_closed(before)

    @pytest.mark.slow
    @pytest.mark.parametrize("kind", ["unix", "tcp", "pool"])
    def test_a_closed_client_leaves_nothing_to_the_collector_of_cycles(
        self, own_daemon: Callable[..., Daemon], kind: str
    ) -> None:
        daemon = own_daemon(options=["--listen", "127.0.0.1:0"])
        far = f"tiffin://{address_of(daemon)}"
        url = {"unix": daemon.url, "tcp": far, "pool": f"{far}?home={daemon.socket}"}[kind]
        prefix = fresh_prefix(2)
        Client.open(url).close()
        gc.collect()
        gc.disable()
        try:
            before = open_files()
            for _ in range(10):
                with Client.open(url) as client:
                    client.put(prefix, payloads_of(prefix))
                    with client.get(prefix) as blocks:
                        assert_right(blocks, prefix)
                    del blocks
            await_closed(before)
        finally:
            gc.enable()

    @pytest.mark.slow
    def test_a_stopped_node_costs_the_deadline_and_no_more(
        self, own_daemon: Callable[..., Daemon]
    ) -> None:
        daemon = own_daemon(options=["--listen", "127.0.0.1:0"])
        prefix, missing = fresh_prefix(2), fresh_prefix(1)
        with Client.open(f"tiffin://{address_of(daemon)}") as client:
            client.put(prefix, payloads_of(prefix))
            raising: list[Callable[[], Any]] = [
                lambda: client.match(prefix, timeout_s=0.1),
                lambda: client.put(missing, payloads_of(missing), timeout_s=0.1),
                lambda: client.statistics(timeout_s=0.1),
                lambda: client.remove(prefix, timeout_s=0.1),
                lambda: client.reserve(prefix, timeout_s=0.1),
            ]
            with daemon.stopped():
                with within(0.1, "a get"), client.get(prefix, timeout_s=0.1) as blocks:
                    assert (len(blocks), blocks.reason) == (0, "deadline")
                for call in raising:
                    with (
                        within(0.1, "a call of a stopped node"),
                        pytest.raises((DeadlineExceeded, NodeUnavailable)),
                    ):
                        call()
            with Client.open(daemon.url) as near:
                assert near.match(prefix).blocks in (0, 2)  # a queued removal may be done or not
                wait_until(
                    lambda: near.statistics()["tiers"]["dram"]["reserved_bytes"] == 0,
                    "nothing is reserved for who has left",
                )


class TestFixedLists:
    @pytest.mark.slow
    def test_one_of_them_is_enough(self, cluster: Cluster) -> None:
        gone, mute, well = (
            cluster.start("gone"),
            cluster.start("mute", relayed=True),
            cluster.start("well"),
        )
        prefix = well.put(fresh_prefix(2))
        gone.hang_up()
        assert mute.network is not None
        url = f"tiffin://{gone.address},{well.address},{mute.address}?hedge_s=0.2"
        with Client.open(url) as client:
            with client.get(prefix) as blocks:
                assert blocks.complete
            mute.network.pause()
            with within(1.0, "a get beside a node that hangs"), client.get(prefix) as blocks:
                assert blocks.complete
            assert client.exists(prefix, timeout_s=0.5) == [True, True]
            mute.network.resume()

    def test_each_is_asked_for_everything(self, cluster: Cluster) -> None:
        one, two = cluster.start("one"), cluster.start("two")
        prefix = fresh_prefix(5)
        one.put(prefix[:3])
        two.put(prefix[3:])
        with Client.open(f"tiffin://{one.address},{two.address}") as client:
            assert client.match(prefix).blocks == 3  # of one node
            assert client.exists(prefix) == [True] * 5
            with client.get(prefix) as blocks:
                assert blocks.complete
                assert_right(blocks, prefix)
            assert client.pin(prefix) == 3
            assert client.remove(prefix) == 3

    def test_in_asyncio(self, cluster: Cluster) -> None:
        one = cluster.start("one")
        prefix = fresh_prefix(3)

        async def use() -> None:
            async with AsyncClient.open(f"tiffin://{one.address}") as client:
                assert (await client.put(prefix, payloads_of(prefix))).complete
                gets = [client.get(prefix) for _ in range(30)]
                for blocks in await asyncio.gather(*gets):
                    assert_right(blocks, prefix)
                    blocks.release()
                async with client.reserve(fresh_prefix(1)) as slots:
                    slots[0].view[:] = 0
                assert slots.stored == (0,)
            with pytest.raises(ClientClosed):
                await client.match(prefix)

        asyncio.run(use())


class TestHome:
    def serve(self, cluster: Cluster, path: Path, loop: LoopThread) -> Any:
        """A member with a unix socket, and what closes it."""
        member = cluster.start("home")
        server = UnixServer.__new__(UnixServer)

        async def begin() -> None:
            server.__init__(member.node, path)  # type: ignore[misc]
            await server.__aenter__()

        loop.run(begin())
        record = cluster.directory.nodes()[member.number]
        from msgspec.structs import replace

        there = cluster.directory.register(replace(record, socket=os.path.realpath(path)))
        cluster.directory.withdraw(member.number)
        return member, server, there

    @pytest.mark.parametrize("home", ["auto", "none", "path"])
    def test_the_node_of_this_host_is_home(
        self, cluster: Cluster, tmp_path_factory: Any, loop_thread: LoopThread, home: str
    ) -> None:
        path = tmp_path_factory.mktemp("h") / "s"
        member, server, number = self.serve(cluster, path, loop_thread)
        target = Pool(
            directory=f"embedded:{cluster.name}", home=str(path) if home == "path" else home
        )
        with contextlib.closing(Client(open_pool(target, "client"), "always")) as client:
            assert (client.near_link is not None) == (home != "none")
            prefix = fresh_prefix(2)
            assert client.put(prefix, payloads_of(prefix)).complete
            with client.get(prefix) as blocks:
                assert_right(blocks, prefix)
            sessions = [s for s in member.node.statistics()["sessions"] if s["name"] == "client"]
            assert len(sessions) == 1
            assert client.home_number == (number if home != "none" else None)
        loop_thread.run(server.__aexit__())
        cluster.directory.withdraw(number)

    def test_a_home_that_is_not_there_is_an_error_and_leaves_nothing(
        self, cluster: Cluster, tmp_path: Path
    ) -> None:
        cluster.start("one")
        target = Pool(directory=f"embedded:{cluster.name}", home=str(tmp_path / "none"))
        handles = cluster.directory._state.handles
        with pytest.raises(NodeUnavailable, match="tiffin node --socket"):
            open_pool(target, "")
        for bad in ({"hedge_s": -1.0}, {"streams": 99}):
            with pytest.raises(InvalidInput):
                open_pool(Pool(directory=f"embedded:{cluster.name}", numbers=bad), "")
        assert cluster.directory._state.handles == handles

    @pytest.mark.slow
    def test_a_home_that_died_is_done_without(
        self, cluster: Cluster, own_daemon: Callable[..., Daemon]
    ) -> None:
        daemon = own_daemon()
        far = cluster.start("far")
        prefix, more = far.put(fresh_prefix(2)), fresh_prefix(2)
        cluster.settle()
        target = Pool(directory=f"embedded:{cluster.name}", home=str(daemon.socket))
        with contextlib.closing(Client(open_pool(target, ""), "always")) as client:
            with client.get(prefix) as blocks:
                assert blocks.complete
            daemon.kill()
            for _ in range(2):
                with client.get(prefix) as blocks:
                    assert blocks.complete
                    assert_right(blocks, prefix)
            assert client.match(prefix).blocks == 2
            assert client.put(more, payloads_of(more)).complete
            assert far.has(more) == [True, True]
            with client.reserve(fresh_prefix(1)) as slots:
                slots[0].view[:] = 0
            assert slots.stored == (0,)
            assert client.pin(more) == client.remove(more) == 2
            assert far.has(more) == [False, False]
