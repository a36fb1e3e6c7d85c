"""Nodes that a client names in its URL: copies between them, and which of them is home."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest
from kvsupport import Daemon, fresh_prefix, wait_until
from poolsupport import LARGE, Cluster, Member

from tiffin.kvstore import Client
from tiffin.kvstore.client.connection.node_link import LocalLink
from tiffin.kvstore.client.pool.many_nodes import ManyNodes
from tiffin.kvstore.client.pool.members import FixedHomeNumber, FixedMembers
from tiffin.kvstore.client.pool.verb_driver import VerbDriver
from tiffin.kvstore.credentials import Credentials, parse_address
from tiffin.kvstore.errors import InvalidInput, NodeUnavailable, NoRoom

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tiffin.kvstore import Prefix

LISTENING = ["--listen", "127.0.0.1:0"]


def prompt(blocks: int = 3) -> Prefix:
    return fresh_prefix(blocks, LARGE)


@contextlib.contextmanager
def listing(*listed: Member, home: Member | None = None) -> Iterator[Client]:
    """A client of a list of nodes, in this order."""
    driver = VerbDriver(FixedMembers([parse_address(m.address) for m in listed]), Credentials())
    link = None if home is None else LocalLink(home.node, "in place", owns_node=False)
    number = FixedHomeNumber()
    nodes = ManyNodes(driver, home=link, home_number=number, admission="never")
    with Client(nodes, "always") as client:
        if home is not None:
            client.statistics()
        yield client


def address_of(daemon: Daemon) -> str:
    """The network address of a daemon, from its log."""
    line: str = wait_until(
        lambda: next((x for x in daemon.log().splitlines() if " and 127." in x), None), "it listens"
    )
    return line.rpartition(" and ")[2].strip()


class TestReplicating:
    def test_nodes_of_a_list_copy_from_each_other(self, cluster: Cluster) -> None:
        """Their numbers in the list are not those in the directory."""
        one, two, three = (cluster.start(name) for name in ("one", "two", "three"))
        prefix = prompt()
        two.put(prefix)
        cluster.settle()
        assert two.number != 3
        with listing(three, one, two) as client:
            assert client.replicate(prefix, [2, 1]) == {2: 3, 1: 3}
        assert one.has(prefix) == three.has(prefix) == [True] * 3

    def test_nobody_has_it(self, cluster: Cluster) -> None:
        one, two = cluster.start("one"), cluster.start("two")
        with listing(one, two) as client, pytest.raises(NoRoom, match="first block"):
            client.replicate(prompt(), [1])

    def test_a_source_that_is_gone(self, cluster: Cluster) -> None:
        one, two, three = (cluster.start(name) for name in ("one", "two", "three"))
        prefix = three.put(prompt())
        cluster.settle()
        two.hang_up()
        with listing(two, one, three) as client:
            assert client.replicate(prefix, [2]) == {2: 3}
            with pytest.raises(NodeUnavailable):
                client.replicate(prefix, [1])

    def test_nodes_without_a_directory_say_so(self, serve: Callable[..., Any]) -> None:
        addresses = [serve()[1] for _ in range(2)]
        url = "tiffin://" + ",".join(f"{host}:{port}" for host, port in addresses)
        with Client.open(url) as client, pytest.raises(InvalidInput, match="in no directory"):
            client.replicate(prompt(), [1])  # type: ignore[attr-defined]


class TestHome:
    def test_it_is_found_in_the_list(self, cluster: Cluster) -> None:
        far, home = cluster.start("far"), cluster.start("home")
        with listing(far, home, home=home) as client:
            found = client.statistics()
            assert found["home"] == home.address
            assert list(found["nodes"]) == [far.address, home.address]
            assert client.home_number == 2

    def test_one_that_the_list_lacks(self, cluster: Cluster) -> None:
        far, home = cluster.start("far"), cluster.start("home")
        with listing(far, home=home) as client:
            found = client.statistics()
            assert found["home"] == "home"
            assert found["nodes"]["home"]["node"] == "home"
            assert client.home_number is None

    def test_prefetches_from_the_list(self, cluster: Cluster) -> None:
        far, home = cluster.start("far"), cluster.start("home")
        prefix = far.put(prompt())
        with listing(far, home, home=home) as client:
            handle = client.prefetch(prefix, timeout_s=20)
            assert handle.wait(timeout_s=20)
            assert handle.complete
        with listing(far, home=home) as client:
            lonely = client.prefetch(far.put(prompt()), timeout_s=20)
            assert lonely.wait(timeout_s=20)
            assert lonely.reason == "no_directory"

    @pytest.mark.slow
    def test_daemons_without_a_directory(self, own_daemon: Callable[..., Daemon]) -> None:
        daemon, other = own_daemon(options=LISTENING), own_daemon(options=LISTENING)
        both = f"{address_of(other)},{address_of(daemon)}"
        with Client.open(f"tiffin://{both}?home={daemon.socket}") as client:
            assert client.home_number == 2  # type: ignore[attr-defined]
            assert client.statistics()["home"] == address_of(daemon)
            prefix = fresh_prefix(1)
            with Client.open(other.url) as far:
                far.put(prefix, [bytes(prefix.schema.block_bytes)])
            handle = client.prefetch(prefix, timeout_s=20)
            assert handle.wait(timeout_s=20)
            assert handle.reason == "no_directory"
