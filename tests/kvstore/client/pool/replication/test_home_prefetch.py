"""Prefetches of a pool: the home node copies from others, and whatever fails ends them in time."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from kvsupport import Background, assert_right, fresh_prefix, wait_until, within
from poolsupport import LARGE, Cluster, Held, check, fill

from tiffin.kvstore import AsyncClient, Client
from tiffin.kvstore.client.pool.replication import node_copy
from tiffin.kvstore.errors import ClientClosed, NodeUnavailable

if TYPE_CHECKING:
    from tiffin.kvstore import Prefix


def prompt(blocks: int = 3) -> Prefix:
    return fresh_prefix(blocks, LARGE)


def ended(handle: Any, timeout_s: float = 20.0) -> tuple[int, str | None]:
    """How many blocks a prefetch brought in the end, and why not more."""
    assert handle.wait(timeout_s=timeout_s)
    assert handle.poll()
    return handle.blocks, handle.reason


class TestBringing:
    def test_blocks_of_other_nodes_are_at_home_for_every_client(self, cluster: Cluster) -> None:
        one, two, home = (cluster.start(name) for name in ("one", "two", "home"))
        prefix = prompt(6)
        home.put(prefix[:1])
        one.put(prefix[1:3])
        home.put(prefix[3:4])
        two.put(prefix[4:])
        cluster.settle()
        client = cluster.open(home)
        assert ended(client.prefetch(prefix, timeout_s=20)) == (6, None)
        one.stop()
        two.stop()
        cluster.remember(home)
        with Client.attach(home.node) as neighbour, neighbour.get(prefix) as blocks:
            assert blocks.complete
            assert_right(blocks, prefix)
        with client.get(prefix) as blocks:
            assert len(blocks.places().offsets) == 6, "they are read in place"

    def test_it_returns_at_once_and_needs_no_poll(
        self, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        far, home = cluster.start("far"), cluster.start("home")
        prefix = far.put(prompt())
        cluster.settle()
        held = Held(node_copy.Copier.copy)
        monkeypatch.setattr(node_copy.Copier, "copy", lambda *a: held(*a))
        handle = cluster.open(home).prefetch(prefix, timeout_s=20)
        assert held.reached.wait(20)
        assert not handle.poll()
        assert not handle.wait(timeout_s=0.01)
        assert (handle.blocks, handle.reason, handle.ended) == (0, None, False)
        assert "under way" in repr(handle)
        held.go.set()
        wait_until(lambda: home.has(prefix) == [True] * 3, "they come")
        assert ended(handle) == (3, None)

    def test_what_is_known_up_to_a_gap(self, cluster: Cluster) -> None:
        far, home = cluster.start("far"), cluster.start("home")
        prefix = prompt(4)
        far.put(prefix[:1])
        far.put(prefix[2:])
        cluster.settle()
        assert ended(cluster.open(home).prefetch(prefix)) == (1, "miss")
        assert home.has(prefix) == [True, False, False, False]

    def test_many_at_once(self, cluster: Cluster) -> None:
        far, home = cluster.start("far", 32), cluster.start("home", 32)
        prefixes = [far.put(prompt(2)) for _ in range(8)]
        cluster.settle()
        client = cluster.open(home)
        handles = [client.prefetch(prefix, timeout_s=30) for prefix in prefixes]
        assert [ended(handle, 30) for handle in handles] == [(2, None)] * 8

    def test_with_asyncio(self, cluster: Cluster) -> None:
        far, home = cluster.start("far"), cluster.start("home")
        prefix = far.put(prompt())
        cluster.settle()
        pool = cluster.open(home)

        async def use() -> None:
            client = AsyncClient(pool)
            handle = await client.prefetch(prefix, timeout_s=20)
            assert await handle.wait(timeout_s=20)
            assert await handle.poll()
            assert handle.complete
            await client.close()
            with pytest.raises(ClientClosed):
                await handle.poll()

        asyncio.run(use())
        assert home.has(prefix) == [True] * 3


class TestFailing:
    def test_a_source_that_is_lost_is_replaced_by_another_holder(self, cluster: Cluster) -> None:
        one, two, home = cluster.start("one"), cluster.start("two"), cluster.start("home")
        prefix = one.put(two.put(prompt(4)))
        cluster.settle()
        one.hang_up()
        assert ended(cluster.open(home).prefetch(prefix, timeout_s=20)) == (4, None)

    def test_a_source_that_is_killed_on_the_way(self, cluster: Cluster) -> None:
        far, home = cluster.start("far", relayed=True), cluster.start("home")
        prefix = far.put(prompt(4))
        cluster.settle()
        assert far.network is not None
        far.network.stall_after(LARGE.extent_bytes)
        handle = cluster.open(home).prefetch(prefix, timeout_s=20)
        wait_until(lambda: far.network._left["from"] <= 0, "it is on the way")  # type: ignore[union-attr]
        far.hang_up()
        far.network.cut()
        assert ended(handle) == (0, "lost")
        assert home.has(prefix) == [False] * 4

    @pytest.mark.slow
    def test_a_source_that_stalls_ends_at_the_deadline(self, cluster: Cluster) -> None:
        far, home = cluster.start("far", relayed=True), cluster.start("home")
        prefix = far.put(prompt(4))
        cluster.settle()
        assert far.network is not None
        far.network.stall_after(LARGE.extent_bytes)
        client = cluster.open(home)
        with within(0.5, "a prefetch from a node that stalls"):
            assert ended(client.prefetch(prefix, timeout_s=0.5)) == (0, "deadline")
        far.network.resume()
        check(client, prefix)

    @pytest.mark.slow
    def test_nothing_that_is_leased_makes_room(self, cluster: Cluster) -> None:
        far, home = cluster.start("far"), cluster.start("home", 4)
        wanted, kept = far.put(prompt(2)), home.put(prompt(4))
        cluster.settle()
        client = cluster.open(home)
        with client.get(kept) as blocks:
            assert ended(client.prefetch(wanted, timeout_s=20)) == (0, "no_room")
            assert blocks.complete
            assert_right(blocks, kept)
        assert ended(client.prefetch(wanted, timeout_s=20)) == (2, None)

    @pytest.mark.slow
    def test_room_for_a_part(self, cluster: Cluster) -> None:
        far, home = cluster.start("far"), cluster.start("home", 4)
        prefix = far.put(prompt(4))
        fill(home, 2)
        cluster.settle()
        assert ended(cluster.open(home).prefetch(prefix, timeout_s=20)) == (2, "no_room")

    def test_a_home_that_is_drained(self, cluster: Cluster) -> None:
        far, home = cluster.start("far"), cluster.start("home")
        prefix = far.put(prompt())
        cluster.settle()
        home.node.draining = True
        assert ended(cluster.open(home).prefetch(prefix)) == (0, "draining")

    def test_a_directory_that_is_away(self, cluster: Cluster) -> None:
        far, home = cluster.start("far"), cluster.start("home")
        prefix = far.put(prompt())
        cluster.settle()
        members = cluster.flaky()
        client = cluster.open(home, members=members)
        client.nodes()
        members.away = True
        assert ended(client.prefetch(prefix)) == (0, "directory")

    def test_a_home_that_is_gone(self, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
        far, home = cluster.start("far"), cluster.start("home")
        prefix = far.put(prompt())
        cluster.settle()
        client = cluster.open(home)

        def refusing(request: Any, timeout_s: float) -> Any:
            raise NodeUnavailable("nobody listens")

        monkeypatch.setattr(client.near_link._link, "call", refusing)  # type: ignore[union-attr]
        assert ended(client.prefetch(prefix)) == (0, "lost")

    def test_a_client_is_closed_meanwhile(
        self, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        far, home = cluster.start("far"), cluster.start("home")
        prefix = far.put(prompt())
        cluster.settle()
        held = Held(node_copy.Copier.copy)
        monkeypatch.setattr(node_copy.Copier, "copy", lambda *a: held(*a))
        client = cluster.open(home)
        handles = [client.prefetch(prefix, timeout_s=60) for _ in range(4)]
        assert held.reached.wait(20)
        waiting = Background(partial(handles[0].wait, timeout_s=60))
        with within(5, "closing"):
            client.close()
        with pytest.raises(ClientClosed):
            waiting.result()
        for handle in handles:
            with pytest.raises(ClientClosed):
                handle.poll()
        held.go.set()
        wait_until(
            lambda: home.has(prefix) == [True] * 3, "the node goes on with what it has begun"
        )
